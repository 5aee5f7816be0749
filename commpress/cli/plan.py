"""Advice for given machines and links: what to use and what it gains, or that nothing should be
compressed."""

import argparse
import re
from dataclasses import asdict

from commpress.cli import cluster_options, harness, terminal
from commpress.cli.refusals import planned_codecs
from commpress.plan.candidates import (
    CHOSEN,
    WAYS,
    Candidate,
    advised,
    candidates,
    plan_of,
    recommended,
)
from commpress.plan.ways import Scenario
from commpress.units import TIERS

LOCAL = "local"
NAMES = re.compile(
    r"\b(compress|compress_fsdp|LocalUpdates|SparseLoCo|ZeroOneAdam|OneBitAdam|overlap|Partitioned)\b"
)


def run(options: argparse.Namespace) -> int:
    local = LOCAL in options.allow
    able = [*CHOSEN, *(way for way in options.allow if way != LOCAL)]
    ways = list(dict.fromkeys([*WAYS, *able]))
    model = cluster_options.model_of(options, planned_codecs)
    cluster = cluster_options.cluster_of(options)
    costs, seconds = cluster_options.costs_of(options), 1e-3 * options.compute_ms
    scenario = Scenario(cluster, costs, model, seconds, memory=options.memory)
    found = candidates(scenario, ways)
    chosen = recommended(found, able)
    plan = plan_of(chosen, found, scenario)
    title = f"{model.numel / 1e6:.1f} M parameters on {cluster.size} ranks"
    print(f"{title}, {options.compute_ms:.4g} ms alone")
    plain = next(c for c in found if c.codec == "plain")
    best, advice = advised(found, chosen, local_updates=local)
    effects = list(dict.fromkeys(effect(c) for c in found))
    print(terminal.table([cells(c, plain, effects) for c in found], best=found.index(best)))
    print("\n".join(f"  effect {i}: {text}" for i, text in enumerate(effects, 1)), end="\n\n")
    plan.save(options.out)
    terminal.say(plan.why)
    terminal.say(f"advice: {advice}")
    faster, more = advised(found, recommended(found, ways))
    if faster.seconds < 0.97 * chosen.seconds and not (local and faster.local):
        allow = LOCAL if faster.local else faster.codec
        terminal.say(f"with --allow {allow}, which may change the loss: {more}")
    call = NAMES.sub(r"commpress.\1", best.call)  # to copy after ``import commpress``
    print(f"\n    {call}\n\nsaved: {options.out}")
    return harness.deliver(options, found, plan=asdict(plan))


def effect(c: Candidate) -> str:
    return c.effect if c.fits else "DOES NOT FIT into the memory"


def cells(c: Candidate, plain: Candidate, effects: list[str]) -> dict[str, str]:
    device, host, disk = (
        f"{c.memory[tier] / 1e9:.2f}" if tier in c.memory else "-" for tier in TIERS
    )
    return {
        "candidate": c.name,
        "step ms": f"{1e3 * c.seconds:.1f}",
        "gain": f"{plain.seconds / c.seconds:.2f}x",
        "MB sent": f"{c.sent_bytes / 1e6:.2f}",
        "GB device": device,
        "host": host,
        "disk": disk,
        "effect": str(effects.index(effect(c)) + 1),
    }
