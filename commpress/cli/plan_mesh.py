"""Every grid of parallelism for given ranks, links and a model, and which of them to take."""

import argparse
from dataclasses import asdict

import numpy as np

from commpress.cli import cluster_options, harness, terminal
from commpress.cli.refusals import no_experts, planned_codecs
from commpress.errors import InvalidArgument
from commpress.plan.candidates import CHOSEN, finest_near
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
    model = cluster_options.model_of(options, planned_codecs)
    if options.pairs:
        links = load_pairs(options.pairs)
    else:
        links = PairLinks.of_cluster(cluster_options.cluster_of(options))
    fixed, speeds = dims_of(options.dims), speeds_of(options.speeds, links.size)
    work = MeshWork.of(
        model,
        1e-3 * options.compute_ms,
        batch=options.batch or 4 * links.size,
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
    ways = ["none", *CHOSEN[1:], *options.allow]
    costs = cluster_options.costs_of(options)
    found = [best_of(grid, work, links, costs, fixed, ways, speeds, limit) for grid in grids]
    found.sort(key=lambda step: (not step.fits, step.seconds))
    best = chosen(found)
    what = f"a step of {work.batch} sequences of {work.length} tokens"
    print(f"{model.numel / 1e6:.1f} M parameters on {links.size} ranks, {what}")
    print(terminal.table(list(map(cells, found)), best=found.index(best)))
    print("dp: with its codec, if not exact; MB of the rank and out of the node that send most\n")
    terminal.say(why(best, found))
    for says, numbers, usual in (
        (f"ranks by place, in the order of {', '.join(AXES)}", best.order, range(links.size)),
        ("blocks of the stages", best.layers, best.layers[:1] * len(best.layers)),
        ("sequences of the replicas", best.batches, best.batches[:1] * len(best.batches)),
    ):
        if list(numbers) != list(usual):
            terminal.say(f"{says}: {' '.join(map(str, numbers))}")
    best.save(options.out)
    print("".join(f"\n    {line}" for line in best.call.splitlines()))
    print(f"\nsaved: {options.out}")
    return harness.deliver(options, [asdict(step) for step in found])


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
    return finest_near(every, lambda step: step.dims.dp == "none")


def why(best: MeshStep, found: list[MeshStep]) -> str:
    """Sentence with what it saves against data parallelism alone and against the next one, and the
    part that costs these most more."""
    parts = [f"take {best.grid}: {1e3 * best.seconds:.4g} ms a step"]
    alone = [step for step in found if step.kinds == 0]
    others = [step for step in found if step.fits and step not in (best, *alone)]
    for step in [*alone, *others[:1]]:
        if step is not best:
            part = max(SAYS, key=lambda name: step.parts[name] - best.parts[name])
            no_room = "" if step.fits else f", and does not fit: {step.memory / 1e9:.2f} GB"
            parts.append(
                f"{step.grid} takes {1e3 * step.seconds:.4g} ms, {1e3 * step.parts[part]:.4g} of "
                f"them {SAYS[part]} (here {1e3 * best.parts[part]:.4g}){no_room}"
            )
    return "; ".join(parts)


def shown(seconds: float, digits: float = 1e3) -> str:
    value = digits * seconds
    return "-" if value < 5e-4 else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def cells(step: MeshStep) -> dict[str, str]:
    parts = step.parts
    codec = "" if step.dims.dp == "none" or not parts["dp"] else f" {step.dims.dp}"
    return {
        "grid": str(step.grid),
        "step ms": shown(step.seconds),
        **{name: shown(parts[name]) for name in ("compute", "bubble", "tp")},
        "sp+ep": shown(parts["sp"] + parts["ep"]),
        "pp": shown(parts["pp"]),
        "dp": shown(parts["dp"]) + codec,
        "MB/rank": shown(sum(step.sent.values()), 1e-6),
        "MB/node": shown(step.between, 1e-6),
        "GB": f"{step.memory / 1e9:.2f}" + ("" if step.fits else " !"),
    }
