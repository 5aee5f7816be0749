"""Advice for given machines and links: what to use and what it gains, or that nothing should be
compressed."""

import argparse
import re
from dataclasses import asdict, replace
from functools import partial

import torch

from commpress.cli import cluster_options, harness, plan_mesh, terminal
from commpress.cli.option_groups import GRADIENTS
from commpress.cli.refusals import planned_codecs
from commpress.errors import InvalidArgument
from commpress.plan.assignment import assign
from commpress.plan.candidates import (
    CHOSEN,
    WAYS,
    Candidate,
    Settings,
    advised,
    candidates,
    plan_of,
    recommended,
)
from commpress.units import TIERS

LOCAL = "local"
# within 100 columns
HEAD = ["candidate", "step ms", "gain", "MB sent", "GB device", "host", "disk", "effect"]
NAMES = re.compile(
    r"\b(compress|compress_fsdp|LocalUpdates|SparseLoCo|ZeroOneAdam|OneBitAdam|overlap|Partitioned)\b"
)


def run(options: argparse.Namespace) -> int:
    if options.mesh:
        return plan_mesh.run(options)
    allowed = [way.strip() for way in options.allow.split(",") if way.strip()]
    local = LOCAL in allowed
    allowed = [way for way in allowed if way != LOCAL]
    ways = options.ways.split(",") if options.ways else list(dict.fromkeys([*WAYS, *allowed]))
    able = [way for way in ways if options.ways or way in (*CHOSEN, *allowed)]
    gradients = gradients_of(options.gradients) if options.gradients else None
    model = cluster_options.model_of(options, planned_codecs)
    cluster = cluster_options.cluster_of(options)
    settings = Settings(
        1e-3 * options.compute_ms,
        options.bucket_mb,
        options.memory,
        cluster_options.rate_of(options.host_rate),
        cluster_options.rate_of(options.disk_rate),
    )
    found = candidates(cluster, cluster_options.costs_of(options), model, settings, ways)
    chosen = recommended(found, able)
    plan = plan_of(chosen, found, cluster, options.bucket_mb)
    print(
        f"{model.numel / 1e6:.1f} M parameters on {cluster.size} ranks, "
        f"{1e3 * settings.compute_seconds:.4g} ms alone"
    )
    plain = next(c for c in found if c.codec == "plain")
    best, advice = advised(found, chosen, local_updates=local)
    effects = list(dict.fromkeys(effect(c) for c in found))
    terminal.show(HEAD, [cells(c, plain, effects) for c in found], best=[found.index(best)])
    print("\n".join(f"  effect {i}: {text}" for i, text in enumerate(effects, 1)))
    if options.calls:
        print("\n".join(["", *(f"  {c.name}\n      {call_of(c)}" for c in found)]))
    print()
    if gradients is not None and (chosen.layered or not plan.compresses):
        terminal.say(f"--gradients changes nothing: {chosen.name} has no codec for every layer")
    elif gradients is not None:
        rules = assign(gradients, ranks=cluster.size, uniform=options.uniform)
        print(
            f"a codec for every layer: {rules.gain:.2f} times fewer bytes than {options.uniform} "
            f"for all, at {rules.error / max(rules.uniform_error, 1e-300):.2f} of its error"
        )
        plan = replace(plan, codec=options.uniform, rules=rules.rules)
    plan.save(options.out)
    terminal.say(plan.why)
    terminal.say(f"advice: {advice}")
    faster, more = advised(found, recommended(found, ways))
    if faster.seconds < 0.97 * chosen.seconds and not (local and faster.local):
        terminal.say(
            f"with --allow {LOCAL if faster.local else faster.codec}, which may change the loss: "
            f"{more}"
        )
    print(f"\n    {call_of(best)}\n\nsaved: {options.out}")
    title = f"{model.numel / 1e6:.4g} M parameters, {cluster.size} ranks"
    return harness.deliver(
        options, found, draw=partial(draw, chosen=chosen, title=title), plan=asdict(plan)
    )


def gradients_of(path: str) -> dict[str, torch.Tensor]:
    saved = cluster_options.saved_tensors("gradients", path, GRADIENTS)
    if odd := [name for name, each in saved.items() if not each.is_floating_point()]:
        raise InvalidArgument(
            f"--gradients is {path!r}, whose {odd[0]!r} is {saved[odd[0]].dtype}, expected "
            f"{GRADIENTS}"
        )
    return saved


def effect(c: Candidate) -> str:
    return c.effect if c.fits else "DOES NOT FIT into the memory"


def call_of(c: Candidate) -> str:
    """To copy after ``import commpress``."""
    return NAMES.sub(r"commpress.\1", c.call)


def cells(c: Candidate, plain: Candidate, effects: list[str]) -> list[str]:
    memory = [f"{c.memory[tier] / 1e9:.2f}" if tier in c.memory else "-" for tier in TIERS]
    return [
        c.name,
        f"{1e3 * c.seconds:.1f}",
        f"{plain.seconds / c.seconds:.2f}x",
        f"{c.sent_bytes / 1e6:.2f}",
        *memory,
        str(effects.index(effect(c)) + 1),
    ]


def draw(path: str, found: list[Candidate], *, chosen: Candidate, title: str) -> None:
    """Seconds and memory of all candidates."""
    from commpress.cli import charts

    names = [c.name + ("" if c.fits else " (does not fit)") for c in found]

    def kind(c: Candidate) -> str:
        if c is chosen:
            return "chosen"
        return "a plan can name it" if c.codec else "done otherwise"

    seconds = {
        each: [1e3 * c.seconds * (kind(c) == each) for c in found]
        for each in ("chosen", "a plan can name it", "done otherwise")
    }
    memory = {tier: [c.memory.get(tier, 0.0) / 1e9 for c in found] for tier in TIERS}
    memory = {tier: sizes for tier, sizes in memory.items() if any(sizes)}
    with charts.chart(
        path, f"Predicted: {title}", panels=2, size=(6.6, 0.3 * len(found) + 1.8), share=True
    ) as (times, room):
        charts.stacked(
            times,
            names,
            seconds,
            "ms a step",
            show="{:.4g}",
            colours=("#2ca02c", "#1f77b4", "#c7c7c7"),
        )
        charts.stacked(
            room,
            names,
            memory,
            "GB on a rank, without activations",
            show="{:.3g}",
            colours=("#9467bd", "#ff7f0e", "#8c564b"),
        )
