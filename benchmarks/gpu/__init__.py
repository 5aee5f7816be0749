"""everything that needs a GPU, in half an hour: bits, speed, training steps, the backend, memory
beyond the device

Runs steps in the order of their importance, each in a process of its own with a limit of time, and
writes one line of JSON to results.jsonl after each; what fails or hangs is told with the reason,
and the others go on. At the end a table of figures with their limits, and pictures. Part 1 takes at
most 9 minutes on an H100 or H200; part 2 has what is larger.

  python benchmarks gpu                       part 1 on the first card
  python benchmarks gpu --part 2
  python benchmarks gpu --twin                every line, small, on the processor in place of a card
  python benchmarks gpu --steps kernels,ddp   only these
  python benchmarks gpu --results build/gpu/results.jsonl --docs docs/gpu.md
                                              enter what has run into a page, run nothing
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from commpress.cli import harness, terminal
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from gpu import codecs, features, groups, machine, memory, published, runner, training, two_ranks
from gpu.runner import Figure, Result, Step
from shared_options import add_output

STEPS = [
    Step("compile", codecs.compiling, 75),
    Step("bits", codecs.bits, 200),
    Step("kernels", codecs.kernels, 20),
    Step("launches", codecs.launches, 10),
    Step("ddp", training.ddp, 35),
    Step("ranks", training.ranks, 55),
    Step("fsdp", training.fsdp, 30),
    Step("optimizers", training.optimizers, 30),
    Step("backend", groups.backend, 15),
    Step("store", memory.store, 15),
    Step("offloaded", memory.offloaded, 20),
    Step("streaming", memory.streaming, 30),
    Step("nccl_ranks", groups.nccl_ranks, 60, part=2),
    Step("zero2", two_ranks.zero2, 30, part=2),
    Step("killed_rank", two_ranks.killed_rank, 50, part=2),
    Step("aligned_rows", two_ranks.aligned_rows, 30, part=2),
    Step("second_device", two_ranks.second_device, 30, part=2),
    Step("features", features.features, 90, part=2),
    Step("published", published.published, 20, part=2),
    Step("disk", memory.disk, 60, part=2),
    Step("offloaded_billion", memory.offloaded_billion, 120, part=2),
    Step("streaming_large", memory.streaming_large, 300, part=2),
    Step("largest", memory.largest, 400, part=2),
]
MARK = "<!-- runs are entered below, the last one first -->"
TABLE = (
    "\n\n| date | GPU | torch, CUDA, CuPy | steps that held | steps that failed |\n"
    "| --- | --- | --- | --- | --- |\n"
)
HEAD = ["figure", "value", "limit", "value / limit", ""]
WORD = {True: "ok", False: "MISSED", None: ""}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", type=int, default=1, choices=(1, 2), help="default 1")
    option(parser, "--steps A,B", says="only these; default all of the part")
    option(parser, "--twin", says="dry run of every line on the processor; figures mean nothing")
    says = "of results, made if need be (default build/gpu)"
    parser.add_argument("--out", dest="folder", default="build/gpu", metavar="FOLDER", help=says)
    option(parser, "--results FILE", says="show these instead of running anything")
    option(parser, "--docs PAGE", says="enter the run into the table of this page")
    add_output(parser, check="every step ran to its end and every figure holds its limit")


def run(options: argparse.Namespace) -> int:
    if options.docs and options.twin:
        raise InvalidArgument("--docs is for what ran on a card: leave --twin out")
    if options.results:
        about, results = read(Path(options.results))
    else:
        about, results = measure(options)
    rows = [row for result in results for row in rows_of(result)]
    print("\n" + terminal.table(rows))
    bad = [result for result in results if not result.holds]
    print(
        f"\n{len(results) - len(bad)} of {len(results)} steps ran to their end and held their "
        "limits"
    )
    for result in bad:
        print(f"  {result.step}: {reason(result)}")
    if options.docs:
        enter(Path(options.docs), about, results)
    return harness.deliver(
        options,
        [asdict(r) for r in results],
        judge=lambda _: judge(results),
        about=about,
    )


def chosen(options: argparse.Namespace) -> list[Step]:
    patience = 4 if options.twin else 1  # a twin may be busy with other things
    every = [replace(step, limit=patience * step.limit) for step in STEPS]
    if options.steps is None:
        return [step for step in every if step.part == options.part]
    known = {step.name: step for step in every}
    names = options.steps.split(",")
    if unknown := [name for name in names if name not in known]:
        raise InvalidArgument(f"--steps has {unknown[0]!r}, expected some of {', '.join(known)}")
    return [known[name] for name in names]


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Result]]:
    """Run the steps; every line of results.jsonl is written as soon as there is one."""
    steps, folder = chosen(options), Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    about = describe(options.twin, folder)
    if not about["card"]:
        raise InvalidArgument(
            "torch sees no CUDA device here: run this on a machine with a GPU, or add --twin"
        )
    print(
        f"{about['card']}: {len(steps)} steps, at most {sum(s.limit for s in steps) / 60:.0f} "
        "minutes"
    )
    if about.get("instead"):
        print(f"in place of CUDA: {about['instead']}")
    results = []
    with open(folder / "results.jsonl", "w") as file:
        file.write(json.dumps({"about": about, "part": options.part}) + "\n")
        for step in steps:
            print(f"\n{step.name}: {step.about} (at most {step.limit} s)", flush=True)
            results.append(result := runner.run(step, twin=options.twin, folder=folder))
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            for figure in result.figures:
                print(f"  {line_of(figure)}")
            print(f"  {result.status} after {result.seconds:.1f} s", flush=True)
    return about, results


def describe(twin: bool, folder: Path) -> dict[str, Any]:
    """Of the machine, found out by a process that ends: this one must not touch CUDA."""

    def look(_: machine.Machine, report: runner.Report) -> None:
        """The machine."""
        report("about", 0.0, note=json.dumps(machine.described(twin)))

    seen = runner.run(Step("machine", look, 60), twin=twin, folder=folder)
    if not seen.figures:
        raise InvalidArgument(f"the machine could not be looked at: {seen.why}")
    return {"date": time.strftime("%Y-%m-%d"), **json.loads(seen.figures[0].note)}


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    first, *lines = path.read_text().splitlines()
    results = [json.loads(line) for line in lines]
    return json.loads(first)["about"], [
        Result(**{**r, "figures": [Figure(**f) for f in r["figures"]]}) for r in results
    ]


# ---------------------------------------------------------------- on paper


def value_of(figure: Figure) -> str:
    if figure.error or figure.value is None:
        return (figure.error or figure.note or "nothing").splitlines()[0]
    return f"{figure.value:.4g} {figure.unit}".strip()


def limit_of(figure: Figure) -> str:
    return "" if figure.limit is None else f"at {figure.bound} {figure.limit:g}"


def line_of(figure: Figure) -> str:
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} of it"
    note = "" if figure.value is None else figure.note
    cells = [
        f"{figure.what}: {value_of(figure)}",
        limit_of(figure),
        ratio,
        WORD[figure.holds],
        note,
    ]
    return ", ".join(cell for cell in cells if cell)


def rows_of(result: Result) -> list[dict[str, str]]:
    rows = [
        {
            "figure": f"{result.step}: {f.what}",
            "value": value_of(f)[:60],
            "limit": limit_of(f),
            "value / limit": "" if f.ratio is None else f"{f.ratio:.2f}",
            "": WORD[f.holds],
        }
        for f in result.figures
    ]
    if result.status != "ok":
        ended = (result.step, result.status, "", "", "MISSED")
        rows.append(dict(zip(HEAD, ended, strict=True)))
    return rows


def reason(result: Result) -> str:
    """The cause, in a line, of a step that did not hold."""
    if result.status != "ok":
        lines = [line.strip() for line in result.why.splitlines()] or ["no word"]
        # where it was, or the error
        told = lines[1] if result.status == "out of time" and len(lines) > 1 else lines[-1]
        return f"{result.status} after {result.seconds:.0f} s of {result.limit_seconds}: {told}"
    return "; ".join(line_of(figure) for figure in result.figures if figure.holds is False)


def judge(results: Sequence[Result]) -> list[tuple[str, bool]]:
    return [
        (f"{r.step}: {r.status}" if r.holds else f"{r.step}: {reason(r)}", r.holds) for r in results
    ]


def absent(result: Result) -> bool:
    """Return whether a step could measure nothing on that machine."""
    return result.status == "ok" and all("not here" in figure.note for figure in result.figures)


def enter(page: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    """A row for this run at the top of the page's table."""
    text = page.read_text()
    before, mark, after = text.partition(MARK)
    if not mark:
        raise InvalidArgument(f"{page} has no line {MARK!r}: the table goes below it")
    rest = after.removeprefix(TABLE)
    held = ", ".join(r.step for r in results if r.holds and not absent(r)) or "none"
    if gone := [r.step for r in results if absent(r)]:
        held += f"; not possible there: {', '.join(gone)}"
    missed = (
        "<br>".join(f"{r.step}: {reason(r)[:160]}" for r in results if not r.holds).replace(
            "|", "/"
        )
        or "nothing"
    )
    versions = f"{about['torch']}, {about.get('cuda', '')}, {about.get('cupy', '')}"
    row = f"| {about['date']} | {about['card']} | {versions} | {held} | {missed} |\n"
    page.write_text(before + mark + TABLE + row + rest)
