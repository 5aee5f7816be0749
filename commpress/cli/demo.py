"""train a small GPT with and without compression and show the difference

Trains the same model from the same start on the same data, on 4 local processes under DistributedDataParallel:
  plain      torch's all-reduce of float32 gradients
  bf16       torch's bf16_compress_hook
  commpress  commpress.compress(ddp, codec=...)
and ends with a table and a plot: loss against steps, and loss against bytes sent. The text is the source of Python's
standard library, so nothing is downloaded.

  commpress demo                                  about 3 minutes on 2 cores
  commpress demo --codec int4 --runs plain,commpress
  commpress demo --error-feedback none            what happens when what a bit leaves out is thrown away
  commpress demo --seeds 3 --json demo.json       spread over seeds
"""

import argparse
import sys
from dataclasses import asdict, fields
from statistics import mean, stdev
from typing import Any

from commpress.cli import table
from commpress.cli.ranks import LocalRanks
from commpress.cli.train import RUNS, Result, Settings, by_run, train
from commpress.codecs import codec_named
from commpress.errors import InvalidArgument, MissingPackage

FEEDBACK: dict[str, bool | str] = {"kept": True, "ef21": "ef21", "none": False}
_LINES = 10  # progress lines per run where there is no terminal


def options(parser: argparse.ArgumentParser) -> None:
    default = {field.name: field.default for field in fields(Settings)}

    def option(name: str, metavar: str, what: str, kind: type = int) -> None:
        value = default[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=value, metavar=metavar, help=f"{what} (default {value})"
        )

    parser.add_argument(
        "--runs", default=",".join(RUNS), metavar="A,B", help=f"which of {', '.join(RUNS)} (default all)"
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes (default 4)")
    option("steps", "N", "training steps of each run")
    option("seed", "N", "of weights and batches")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="repeat with so many seeds (default 1)")
    option("codec", "NAME", "of the run commpress: sign, sign-l1, ternary, int8, int4, fp8, log3, bf16, fp16 or none", str)
    option("head_codec", "NAME", "of the output layer in that run", str)
    parser.add_argument("--error-feedback", choices=FEEDBACK, default="kept",
                        help="what compression leaves out: kept and sent later (default), ef21: changes sent instead, or none")
    option("min_numel", "N", "smaller tensors travel exactly")
    option("exact_steps", "N", "first steps that travel exactly")
    option("width", "N", "of the model")
    option("layers", "N", "of the model")
    option("length", "N", "bytes of text in a window")
    option("batch", "N", "windows per rank and step")
    option("lr", "X", "peak learning rate of SGD with momentum", float)
    parser.add_argument("--out", default="demo.png", metavar="FILE", help="the plot (default demo.png)")
    parser.add_argument("--json", metavar="FILE", help="everything measured")


def run(options: argparse.Namespace) -> int:
    _need_packages()
    from commpress.cli import demo_plot

    plan = _plan(options)
    print(_headline(plan, options.ranks))
    results = []
    with LocalRanks(options.ranks) as ranks:
        for settings in plan:
            with Progress(settings, options.seeds) as progress:
                results.append(ranks.call(train, settings, progress.report))
    print()
    print(summary(results))
    demo_plot.draw(results, options.out)
    print(f"\nplot: {options.out}")
    if options.json:
        table.write_json(options.json, [as_dict(result) for result in results])
    return 0


def _need_packages() -> None:
    try:
        import matplotlib  # noqa: F401
        import tqdm  # noqa: F401
    except ImportError as error:
        raise MissingPackage(f"the demo needs {error.name}: pip install 'commpress[demo]'") from error


def _plan(options: argparse.Namespace) -> list[Settings]:
    """One entry per seed and run; what cannot work is refused before a process starts."""
    runs = options.runs.split(",")
    if unknown := [name for name in runs if name not in RUNS]:
        raise InvalidArgument(f"--runs has {unknown[0]!r}, expected some of {', '.join(RUNS)}, separated by commas")
    if min(options.steps, options.seeds, options.batch, options.length) < 1:
        raise InvalidArgument("--steps, --seeds, --batch and --length must be at least 1")
    codec_named(options.codec), codec_named(options.head_codec)
    same = {field.name: getattr(options, field.name) for field in fields(Settings) if hasattr(options, field.name)}
    same |= {"error_feedback": FEEDBACK[options.error_feedback]}
    return [Settings(**same | {"run": name, "seed": options.seed + i}) for i in range(options.seeds) for name in runs]


def _headline(plan: list[Settings], ranks: int) -> str:
    s = plan[0]
    return (
        f"GPT of width {s.width}, {s.layers} layers, on bytes of Python's standard library; {ranks} ranks x {s.batch} windows "
        f"of {s.length} bytes, {s.steps} steps of SGD with momentum"
    )


class Progress:
    """A bar on a terminal, a few lines elsewhere; the loss shown is that of rank 0."""

    def __init__(self, settings: Settings, seeds: int) -> None:
        self.label = settings.run + (f" seed {settings.seed}" if seeds > 1 else "")
        self.steps = settings.steps
        self.bar: Any = None

    def __enter__(self) -> "Progress":
        from tqdm import tqdm

        if sys.stderr.isatty():
            form = "{desc} {percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
            self.bar = tqdm(total=self.steps, desc=f"{self.label:<9}", bar_format=form)
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def report(self, step: int, loss: float, sent: int, samples_per_second: float) -> None:
        now = f"loss {loss:.3f}, {samples_per_second:.0f} samples/s, {sent / 1e6:.1f} MB sent"
        if self.bar is not None:
            self.bar.set_postfix_str(now, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step % max(self.steps // _LINES, 1) == 0 or step == self.steps:
            print(f"{self.label:<9} step {step}/{self.steps}: {now}", file=sys.stderr, flush=True)


def summary(results: list[Result]) -> str:
    """The table, and how to read it."""
    head = ["run", "training loss", "held-out loss", "MB/step/rank", "fewer bytes", "samples/s", "seconds"]
    groups = by_run(results)
    plain = mean(r.bytes_per_step for r in groups["plain"]) if "plain" in groups else None
    rows = []
    for name, group in groups.items():
        bytes_per_step = mean(r.bytes_per_step for r in group)
        rows.append(
            [
                name,
                spread([r.final_loss for r in group]),
                spread([r.held_out_loss for r in group]),
                f"{bytes_per_step / 1e6:.3f}",
                f"{plain / bytes_per_step:.1f}x" if plain else "-",
                f"{mean(r.samples_per_second for r in group):.0f}",
                f"{mean(r.seconds for r in group):.1f}",
            ]
        )
    return "\n".join([table.render(head, rows), "", *_notes(results)])


def _notes(results: list[Result]) -> list[str]:
    last = max(len(results[0].losses) // 20, 1)
    notes = [f"Losses in nats per byte: mean of the last {last} steps, and on text that nobody trained on."]
    if len({r.settings.seed for r in results}) > 1:
        notes.append("Mean and standard deviation over seeds.")
    if all(r.counted for r in results):
        notes.append("Bytes: what the kernel counted on each rank's sockets, headers and acknowledgements included.")
    else:
        notes.append("Bytes: what the algorithms hand to the network (the kernel's own count is not available here).")
    ours = next((r for r in results if r.counters), None)
    if ours is not None:
        notes += _about(ours, next((r for r in results if r.settings.run == "plain"), None))
    notes.append("Loopback is faster than any network: speed here shows what compression costs, not what it gains.")
    return notes


def _about(ours: Result, plain: Result | None) -> list[str]:
    """What commpress did in its first run, counted by itself and after the steps that it left exact."""
    settings, own = ours.settings, ours.counters["wire_bytes"] / len(ours.losses) / 1e6
    (feedback,) = (way for way, value in FEEDBACK.items() if value == settings.error_feedback)
    notes = [
        f"commpress: codec {settings.codec}, {settings.head_codec} for the output layer, error feedback: {feedback}. It "
        f"counted {own:.4g} MB/step itself: messages and their headers, without those of TCP."
    ]
    exact, steps = settings.exact_steps, len(ours.losses)
    if 0 < exact < steps:
        rest = (ours.sent[-1] - ours.sent[exact - 1]) / (steps - exact)
        fewer = f", {plain.bytes_per_step / rest:.1f} times fewer than plain" if plain else ""
        notes.append(f"Its first {exact} steps travel exactly; after them it sends {rest / 1e6:.4g} MB/step{fewer}.")
    return notes


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def as_dict(result: Result) -> dict[str, Any]:
    return asdict(result) | {
        "final_loss": result.final_loss,
        "bytes_per_step": result.bytes_per_step,
        "samples_per_second": result.samples_per_second,
    }
