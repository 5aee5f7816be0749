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
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from statistics import mean, stdev
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import harness
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.ranks import LocalRanks
from commpress.cli.training import HELD_OUT, bf16_hook, sent_bytes
from commpress.codecs import ByName, Codec, Policy, codec_named
from commpress.errors import InvalidArgument, MissingPackage

RUNS = ("plain", "bf16", "commpress")
WINDOWS = 32  # held-out windows per rank
FEEDBACK: dict[str, bool | str] = {"kept": True, "ef21": "ef21", "none": False}


@dataclass(frozen=True)
class DemoRun:
    """One run. Equal settings start from equal weights and see equal batches, whatever the run."""

    run: str = "commpress"
    steps: int = 3000
    seed: int = 0
    width: int = 32
    layers: int = 2
    length: int = 32
    batch: int = 4  # windows per rank
    lr: float = 0.02  # peak, of SGD with momentum
    codec: str | Codec | Policy = "sign"
    head_codec: str = "int8"  # of the output layer, whose gradients are the spikiest
    error_feedback: bool | Literal["ef21"] = True
    min_numel: int = 256
    exact_steps: int = 450
    exclude: tuple[str, ...] = ()


@dataclass
class DemoResult:
    """The same on every rank, but for ``counters``."""

    settings: DemoRun
    parameters: int
    losses: list[float]  # of each step, mean over the ranks, in nats per byte
    sent: list[int]  # bytes that left a rank up to each step, mean over the ranks
    counted: bool  # by the kernel on each socket; else what the algorithm must send, without TCP's headers
    held_out_loss: float
    seconds: float
    ranks: int
    counters: dict[str, Any] = field(default_factory=dict)  # commpress's own, of this rank

    @property
    def samples_per_second(self) -> float:
        return len(self.losses) * self.settings.batch * self.ranks / self.seconds

    @property
    def final_loss(self) -> float:
        """Mean over the last twentieth of the steps."""
        last = self.losses[-max(len(self.losses) // 20, 1) :]
        return sum(last) / len(last)

    @property
    def bytes_per_step(self) -> float:
        return self.sent[-1] / len(self.sent)


def options(parser: argparse.ArgumentParser) -> None:
    default = {field.name: field.default for field in fields(DemoRun)}

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
    if find_spec("matplotlib") is None:
        raise MissingPackage("the demo needs matplotlib: pip install 'commpress[demo]'")
    plan = _plan(options)
    print(_headline(plan, options.ranks))
    results = []
    with LocalRanks(options.ranks) as ranks:
        for settings in plan:
            title = settings.run + (f" seed {settings.seed}" if options.seeds > 1 else "")
            with harness.ProgressBar(f"{title:<9}", lines=10) as progress:
                results.append(ranks.call(train, settings, progress))
    print()
    print(summary(results))
    draw(results, options.out)
    print(f"\nplot: {options.out}")
    return harness.deliver(options, results)


def _plan(options: argparse.Namespace) -> list[DemoRun]:
    """One entry per seed and run; what cannot work is refused before a process starts."""
    runs = options.runs.split(",")
    if unknown := [name for name in runs if name not in RUNS]:
        raise InvalidArgument(f"--runs has {unknown[0]!r}, expected some of {', '.join(RUNS)}, separated by commas")
    if min(options.steps, options.seeds, options.batch, options.length) < 1:
        raise InvalidArgument("--steps, --seeds, --batch and --length must be at least 1")
    codec_named(options.codec), codec_named(options.head_codec)
    same = {field.name: getattr(options, field.name) for field in fields(DemoRun) if hasattr(options, field.name)}
    same |= {"error_feedback": FEEDBACK[options.error_feedback]}
    return [DemoRun(**same | {"run": name, "seed": options.seed + i}) for i in range(options.seeds) for name in runs]


def _headline(plan: list[DemoRun], ranks: int) -> str:
    s = plan[0]
    return (
        f"GPT of width {s.width}, {s.layers} layers, on bytes of Python's standard library; {ranks} ranks x {s.batch} windows "
        f"of {s.length} bytes, {s.steps} steps of SGD with momentum"
    )


def summary(results: list[DemoResult]) -> str:
    """The table, and how to read it."""
    head = ["run", "training loss", "held-out loss", "MB/step/rank", "fewer bytes", "samples/s", "seconds"]
    groups = by_run(results)
    plain = mean(r.bytes_per_step for r in groups["plain"]) if "plain" in groups else None
    rows = []
    for name, group in groups.items():
        bytes_per_step = mean(r.bytes_per_step for r in group)
        rows.append(
            [
                name, spread([r.final_loss for r in group]), spread([r.held_out_loss for r in group]),
                f"{bytes_per_step / 1e6:.3f}", f"{plain / bytes_per_step:.1f}x" if plain else "-",
                f"{mean(r.samples_per_second for r in group):.0f}", f"{mean(r.seconds for r in group):.1f}",
            ]
        )  # fmt: skip
    return "\n".join([harness.render(head, rows), "", *_notes(results)])


def _notes(results: list[DemoResult]) -> list[str]:
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


def _about(ours: DemoResult, plain: DemoResult | None) -> list[str]:
    """Notes on commpress's first run: what it counted itself, and after the steps that it left exact."""
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


# ---------------------------------------------------------------- on every rank


def train(rank: int, size: int, settings: DemoRun, report: Callable[[float, str], None]) -> DemoResult:
    """Train on the default process group, which is initialised and has ``size`` ranks; the loss reported is this rank's."""
    torch.manual_seed(settings.seed)
    model = GPT(width=settings.width, layers=settings.layers, length=settings.length)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    state = _attach(ddp, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_and_decay(step, settings.steps))
    library, draws = standard_library(), torch.Generator().manual_seed(settings.seed * 4096 + rank)
    losses: list[float] = []
    sent: list[int] = []
    dist.barrier()
    before, start = sent_bytes(), perf_counter()
    for step in range(settings.steps):
        loss = ddp(*batch(library[:-HELD_OUT], settings.batch, settings.length, draws))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sent.append(_sent(before, step + 1, state, settings.run, ddp))
        rate, done = (step + 1) * settings.batch * size / (perf_counter() - start), (step + 1) / settings.steps
        now = f"loss {losses[-1]:.3f}, {rate:.0f} samples/s, {sent[-1] / 1e6:.1f} MB sent"
        report(done, f"step {step + 1}/{settings.steps}: {now}")
    dist.barrier()
    seconds = perf_counter() - start
    held_out_loss = _held_out_loss(model, library[-HELD_OUT:], settings.length, rank)
    means = torch.tensor([losses, sent, [held_out_loss] * len(losses)], dtype=torch.float64)
    dist.all_reduce(means)
    means /= size
    return DemoResult(
        settings,
        parameters=sum(p.numel() for p in model.parameters()),
        losses=means[0].tolist(),
        sent=[round(b) for b in means[1].tolist()],
        counted=before is not None,
        held_out_loss=float(means[2, 0]),
        seconds=seconds,
        ranks=size,
        counters=state.counters.as_dict() if state else {},
    )


def by_run(results: list[DemoResult]) -> dict[str, list[DemoResult]]:
    groups: dict[str, list[DemoResult]] = {}
    for result in results:
        groups.setdefault(result.settings.run, []).append(result)
    return groups


def _attach(ddp: DistributedDataParallel, settings: DemoRun) -> "commpress.CompressedState | None":
    if settings.run == "plain":
        return None
    if settings.run == "bf16":
        ddp.register_comm_hook(None, bf16_hook)
        return None
    return commpress.compress(
        ddp, ByName({"^head": settings.head_codec}, settings.codec), min_numel=settings.min_numel,
        error_feedback=settings.error_feedback, exact_steps=settings.exact_steps, exclude=settings.exclude, seed=settings.seed,
    )  # fmt: skip


def _warm_and_decay(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first 20 steps, down to zero over all of them."""
    return min(1.0, (step + 1) / 20) * (1 - step / steps)


def _sent(
    before: int | None, steps: int, state: "commpress.CompressedState | None", run: str, ddp: DistributedDataParallel
) -> int:
    """Bytes sent since ``before``; where the kernel does not tell, those of a ring all-reduce or the state's own count."""
    if before is not None:
        return (sent_bytes() or before) - before
    if state is not None:
        return state.counters.wire_bytes
    size = dist.get_world_size()
    width = 4 if run == "plain" else 2
    return steps * 2 * (size - 1) * width * sum(p.numel() for p in ddp.parameters()) // size


def _held_out_loss(model: GPT, held_out: torch.Tensor, length: int, rank: int) -> float:
    """Of this rank's share of the held-out windows, the same whatever the seed."""
    with torch.no_grad():
        return float(model(*batch(held_out, WINDOWS, length, torch.Generator().manual_seed(rank))))


# ---------------------------------------------------------------- the picture

STYLES: dict[str, dict[str, Any]] = {  # the widest first, so that lines that lie on each other all show
    "plain": {"color": "#999999", "linewidth": 5.0},
    "bf16": {"color": "#1f77b4", "linewidth": 2.2, "linestyle": "--"},
    "commpress": {"color": "#d62728", "linewidth": 1.8},
}


def draw(results: list[DemoResult], path: str) -> None:
    """One line per run, averaged over seeds and smoothed over a fiftieth of the steps."""
    from commpress.cli import charts

    groups, curves = by_run(results), []
    with charts.chart(path, _title(results[0]), panels=2, share=True) as (by_step, by_bytes):
        for name in sorted(groups, key=list(STYLES).index):
            group, style = groups[name], STYLES[name]
            losses = charts.smooth([mean(step) for step in zip(*(r.losses for r in group), strict=True)])
            sent = [mean(step) / 1e6 for step in zip(*(r.sent for r in group), strict=True)]
            held_out = mean(r.held_out_loss for r in group)
            by_step.plot(range(1, len(losses) + 1), losses, label=f"{name}: held-out loss {held_out:.3f}", **style)
            by_bytes.plot(sent, losses, label=f"{name}: {sent[-1]:.3g} MB", **style)
            curves.append(losses)
            exact = group[0].settings.exact_steps
            if name == "commpress" and 0 < exact < len(losses):
                says = {"color": style["color"], "label": f"compressed from step {exact} on"}
                for panel, x in ((by_step, exact), (by_bytes, sent[exact - 1])):
                    panel.plot(x, losses[exact - 1], "o", **says)
        by_step.set(xlabel="step", title="The same steps", ylabel="training loss, nats per byte (smoothed)")
        by_bytes.set(xlabel="MB sent by each rank", title="The same bytes")
        charts.fit(by_step, curves)


def _title(result: DemoResult) -> str:
    settings = result.settings
    without = "" if settings.error_feedback else " without error feedback"
    feedback = " with EF21" if settings.error_feedback == "ef21" else without
    return (
        f"GPT of {result.parameters / 1e6:.2g} M parameters on Python source, {result.ranks} ranks, SGD; commpress: codec "
        f"{settings.codec}" + feedback
    )
