"""Every grid of parallelism for given ranks, links and a model, and which of them to take."""

import argparse
from dataclasses import asdict
from functools import partial

import numpy as np

from commpress.cli import cluster_options, harness, terminal
from commpress.cli.refusals import no_experts, planned_codecs
from commpress.errors import InvalidArgument
from commpress.plan.candidates import AT_ALL, CHOSEN, MARGIN
from commpress.plan.costs import Costs
from commpress.plan.grid import dims_of, speeds_of
from commpress.plan.grids import (
    AXES,
    Grid,
    MeshDims,
    MeshStep,
    MeshWork,
    chosen,
    every_grid,
    predicted,
)
from commpress.plan.pair_links import PairLinks, load_pairs
from commpress.plan.placement import place

HEAD = [
    "grid",
    "step ms",
    "compute",
    "bubble",
    "tp",
    "sp+ep",
    "pp",
    "dp",
    "MB/rank",
    "MB/node",
    "GB",
]
SAYS = {
    "dp": "averaging gradients",
    "tp": "rings of tensor parallelism",
    "pp": "waiting for edges of the pipeline",
    "sp": "keys and values of other ranks",
    "ep": "tokens on their way to experts",
    "bubble": "the pipeline's bubble",
    "compute": "computing",
}


def run(options: argparse.Namespace) -> int:
    model, links = cluster_options.model_of(options), links_of(options)
    planned_codecs(options)
    fixed, speeds = dims_of(options.dims), speeds_of(options.speeds, links.size)
    batch = 4 * links.size if options.batch is None else options.batch
    work = MeshWork.of(
        model,
        1e-3 * options.compute_ms,
        batch=batch,
        length=options.length,
        micro=options.micro,
        experts=options.experts,
        experts_per_token=options.experts_per_token,
    )
    if options.experts and not work.has_experts:
        no_experts(options)
    limit = options.memory.get("device", np.inf)
    grids = every_grid(links.size, work)
    if not grids:
        raise InvalidArgument(
            f"no grid of {links.size} ranks divides this model and batch: "
            f"{work.fits(Grid(dp=links.size))}"
        )
    allowed = [way.strip() for way in options.allow.split(",") if way.strip()]
    costs = cluster_options.costs_of(options)
    found = [
        best_of(grid, work, links, costs, fixed, ["none", *CHOSEN[1:], *allowed], speeds, limit)
        for grid in grids
    ]
    found.sort(key=lambda step: (not step.fits, step.seconds))
    best = chosen(found)
    what = f"a step of {work.batch} sequences of {work.length} tokens"
    print(f"{model.numel / 1e6:.1f} M parameters on {links.size} ranks, {what}")
    terminal.show(HEAD, [cells(step) for step in found], best=[found.index(best)])
    print("dp: with its codec, if not exact; MB of the rank and out of the node that send most\n")
    terminal.say(why(best, found))
    if best.order != tuple(range(links.size)):
        terminal.say(
            f"ranks by place, in the order of {', '.join(AXES)}: {' '.join(map(str, best.order))}"
        )
    if len(set(best.layers)) > 1:
        terminal.say(f"blocks of the stages: {' '.join(map(str, best.layers))}")
    if len(set(best.batches)) > 1:
        terminal.say(f"sequences of the replicas: {' '.join(map(str, best.batches))}")
    best.save(options.out)
    print(
        "\n"
        + "\n".join(f"    {line}" for line in best.call.splitlines())
        + f"\n\nsaved: {options.out}"
    )
    title = f"{model.numel / 1e6:.4g} M parameters, {links.size} ranks"
    return harness.deliver(
        options, [asdict(step) for step in found], draw=partial(draw, found=found, title=title)
    )


def links_of(options: argparse.Namespace) -> PairLinks:
    return (
        load_pairs(options.pairs)
        if options.pairs
        else PairLinks.of_cluster(cluster_options.cluster_of(options))
    )


def best_of(
    grid: Grid,
    work: MeshWork,
    links: PairLinks,
    costs: Costs,
    fixed: dict[str, str],
    ways: list[str],
    speeds: list[float] | None,
    limit: float,
) -> MeshStep:
    """The finest codec of gradients near the fastest, as for one grid alone."""
    averaged = grid.dp * grid.ep * grid.sp > 1
    able = [fixed["dp"]] if "dp" in fixed else ways if averaged else ["none"]
    exact = {
        name: fixed[name] for name in ("pp", "ep") if name in fixed and getattr(grid, name) > 1
    }
    first, *others = (MeshDims(dp=way, **exact) for way in dict.fromkeys(able))
    every = [place(grid, work, links, costs, first, speeds=speeds, limit=limit)]
    every += [
        predicted(grid, work, links, costs, dims, order=every[0].order, speeds=speeds, limit=limit)
        for dims in others
    ]
    least = min(step.seconds for step in every)
    near = (
        step
        for step in every
        if step.seconds * (1 - (AT_ALL if step.dims.dp == "none" else MARGIN)) <= least
    )
    return next(near)


def why(best: MeshStep, found: list[MeshStep]) -> str:
    """Sentence with what it saves against data parallelism alone, and the next one's heaviest
    part."""
    text = f"take {best.grid}: {1e3 * best.seconds:.4g} ms a step"
    alone = next((step for step in found if step.kinds == 0), None)
    faster = [step for step in found if step.fits and step.seconds < best.seconds]
    if faster:
        text += (
            f"; {faster[0].grid} would take {1e3 * faster[0].seconds:.4g} ms with more kinds of "
            "parallelism"
        )
    if alone is not None and alone is not best:
        text += f"; {alone.grid} takes {1e3 * alone.seconds:.4g} ms, {heaviest(alone, best)}"
        text += "" if alone.fits else f", and does not fit: {alone.memory / 1e9:.2f} GB"
    others = [
        step
        for step in found
        if step.fits and step not in (best, alone) and step.seconds >= best.seconds
    ]
    if others:
        text += (
            f"; the next, {others[0].grid}, takes {1e3 * others[0].seconds:.4g} ms, "
            f"{heaviest(others[0], best)}"
        )
    return text


def heaviest(step: MeshStep, best: MeshStep) -> str:
    """The part that costs it most more than the best one."""
    part = max(step.parts, key=lambda name: step.parts[name] - best.parts[name])
    return f"{1e3 * step.parts[part]:.4g} of them {SAYS[part]} (here {1e3 * best.parts[part]:.4g})"


def shown(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def cells(step: MeshStep) -> list[str]:
    parts = step.parts
    ms = [parts["compute"], parts["bubble"], parts["tp"], parts["sp"] + parts["ep"], parts["pp"]]
    codec = "" if step.dims.dp == "none" else f" {step.dims.dp}"
    return [
        str(step.grid),
        shown(1e3 * step.seconds),
        *(shown(1e3 * s) if s > 5e-7 else "-" for s in ms),
        (f"{shown(1e3 * parts['dp'])}{codec}" if parts["dp"] else "-"),
        shown(sum(step.sent.values()) / 1e6),
        shown(step.between / 1e6),
        f"{step.memory / 1e9:.2f}" + ("" if step.fits else " !"),
    ]


def draw(path: str, rows: object, *, found: list[MeshStep], title: str) -> None:
    """Parts of every grid's step."""
    from commpress.cli import charts

    names = [str(step.grid) + ("" if step.fits else " (does not fit)") for step in found]
    parts = {
        name: [1e3 * step.parts[name] for step in found] for name in ("compute", "bubble", *AXES)
    }
    with charts.chart(
        path, f"Predicted: {title}", panels=1, size=(7.0, 0.3 * len(found) + 1.6)
    ) as (panel,):
        charts.stacked(
            panel, names, {k: v for k, v in parts.items() if any(v)}, "ms a step", show="{:.3g}"
        )
