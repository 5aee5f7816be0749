"""Candidates: what a training run could do about its network, and what each would cost: seconds,
bytes, memory.

Every candidate is simulated with the collectives it would run. Memory is counted per rank from what
each keeps for n parameters in float32; activations are not in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from commpress.codecs import codec_named, policy_of
from commpress.codecs.planned import PLAIN, Planned
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.collectives.allreduce import Call, Workspace
from commpress.collectives.buckets import Span
from commpress.collectives.reduce_scatter import Deal, Part, deals, gather_rows, reduce_rows
from commpress.errors import InvalidArgument
from commpress.plan.local_ways import considered
from commpress.plan.model import ModelBucket
from commpress.plan.network import SizedTransport
from commpress.plan.simulator import (
    Build,
    Job,
    Simulated,
    no_residual,
    simulate_calls,
    simulate_step,
)
from commpress.plan.ways import MIN_NUMEL, Scenario, widest

# of DDP's gradients, from exact to coarse
WAYS = (PLAIN, "bf16-ring", "fp8", "int4", "sign", "powersgd-4")
# of these, those that are chosen unasked: the others may change a loss
CHOSEN = (PLAIN, "fp8", "int4")
HOOK = {"bf16-ring"}  # torch's own hook: no codec of ours, so no plan can name it
# how a user gets them, and their effect
UNCOMPRESSED = {
    PLAIN: ("DistributedDataParallel", "exact"),
    "bf16-ring": ("torch's bf16_compress_hook", "rounded"),
}
RARELY = 16  # steps between two rounds of 0/1 Adam late in a run
RATES = {"host": 12e9, "disk": 2e9}  # bytes per second between a rank and a tier
SCRATCH = 10  # buckets that sharded candidates have in memory beside what they keep
SHARDED_LIMIT = 512  # ranks up to which sharded candidates are simulated
MARGIN = 0.03  # of its step that a coarser way must save to be worth it, as in codec="auto"
# of a step with local updates that a way must save if its loss is not known, or its codec is
# coarser
LOCAL_NEAR = 0.1
LOCAL_WORTH = 0.25  # of the best step that keeps ranks alike, that local updates must save
# of a step without compression that compression must save: two predictions are each a few per cent
# off
AT_ALL = 0.06


@dataclass
class Candidate:
    name: str
    call: str  # how a user gets it
    seconds: float
    sent_bytes: float  # by a rank and step
    memory: dict[str, float]  # tier → bytes
    codec: str = ""  # if a plan can name it
    layered: bool = False
    effect: str = "exact"  # on what is learnt
    fits: bool = True
    local: bool = False  # updates: ranks differ between rounds, and learn something else


def candidates(scenario: Scenario, ways: Sequence[str] = WAYS) -> list[Candidate]:
    """All of them, the fastest first; those that do not fit their memory last."""
    found = [*_ddp(scenario, ways), *_local(scenario)]
    if scenario.cluster.size <= SHARDED_LIMIT:
        found += _sharded(scenario)
    for one in found:
        one.fits = all(one.memory.get(tier, 0.0) <= most for tier, most in scenario.memory.items())
    return sorted(found, key=lambda c: (not c.fits, c.seconds))


def recommended(found: Sequence[Candidate], ways: Sequence[str] = CHOSEN) -> Candidate:
    """Choose what a plan can say in these ways: the finest within ``MARGIN`` of the fastest; no
    compression, if that is within ``AT_ALL``."""
    order = {way: i for i, way in enumerate(dict.fromkeys([PLAIN, *ways]))}
    able = [c for c in found if c.codec in order and c.fits]
    if not able:
        raise InvalidArgument(
            "no way to reduce gradients under DDP fits the memory: take one of the sharded "
            "candidates"
        )
    able.sort(key=lambda c: (order[c.codec], c.seconds))
    least = min(c.seconds for c in able)
    return next(
        c for c in able if c.seconds * (1 - (AT_ALL if c.codec == PLAIN else MARGIN)) <= least
    )


def advised(
    found: Sequence[Candidate], chosen: Candidate, *, local_updates: bool = True
) -> tuple[Candidate, str]:
    """Advice for this link, with its reason: ``chosen``, which keeps ranks alike, unless local
    updates, which change the loss, are allowed and save more than ``LOCAL_WORTH`` of its step. Of
    these near the fastest the finest whose loss is known, if there is one."""
    local = [c for c in found if c.local and c.fits]
    why = f"{chosen.call}: {1e3 * chosen.seconds:.4g} ms a step"
    if not local_updates:
        return chosen, why
    if not local:
        return chosen, f"{why}; local updates do not fit the memory"
    least = min(c.seconds for c in local)
    if least > (1 - LOCAL_WORTH) * chosen.seconds:
        return chosen, (
            f"{why}; local updates would take {1e3 * least:.4g} ms and change the loss: not worth "
            "it"
        )
    near = [c for c in local if c.seconds * (1 - LOCAL_NEAR) <= least]
    best = max(near, key=lambda c: ("not measured" not in c.effect, c.sent_bytes, -c.seconds))
    return best, (
        f"{best.call}: {1e3 * best.seconds:.4g} ms a step, where {chosen.call}, the best that "
        f"keeps ranks alike, takes {1e3 * chosen.seconds:.4g} ms; {best.effect}, so compare it "
        "with a plain run"
    )


def plan_of(chosen: Candidate, found: Sequence[Candidate], scenario: Scenario) -> Planned:
    plain = next(c for c in found if c.codec == PLAIN)
    others = [c for c in found if c.fits and c.codec not in ("", PLAIN)]
    if chosen.codec != PLAIN:
        why = (
            f"{chosen.name} takes {1e3 * chosen.seconds:.4g} ms a step, plain "
            f"{1e3 * plain.seconds:.4g} ms"
        )
    elif others:
        other = min(others, key=lambda c: c.seconds)
        why = (
            f"do not compress: plain takes {1e3 * plain.seconds:.4g} ms a step, {other.name} "
            f"{1e3 * other.seconds:.4g} ms"
        )
    else:
        why = "do not compress under DDP: residuals do not fit the memory"
    return Planned(
        chosen.codec,
        topology=str(scenario.cluster.topology) if chosen.layered else None,
        bucket_mb=scenario.bucket_mb,
        why=why,
    )


# ---------------------------------------------------------------- one candidate


def _ddp(scenario: Scenario, ways: Sequence[str]) -> Iterator[Candidate]:
    cluster, n = scenario.cluster, 4.0 * scenario.model.numel
    ranks, nodes = cluster.size, cluster.count
    for way in dict.fromkeys([PLAIN, *ways]):
        codec = None if way in UNCOMPRESSED else codec_named(way)
        low_rank = isinstance(codec, LowRankCodec)
        both = cluster.topology.layered and codec is not None and not low_rank
        for layered in (False, True) if both else (False,):
            simulated = scenario.step(way, layered=layered)
            topology = f', topology="{nodes}x{ranks // nodes}"' if layered else ""
            effect = "low rank, delayed" if low_rank else "rounded, delayed"
            call, effect = UNCOMPRESSED.get(way, (f'compress(ddp, "{way}"{topology})', effect))
            kept = 0.0
            if codec is not None and codec.feedback:  # and what is proposed
                kept = 2 * (n / (ranks / nodes) if layered else n * (1 + 1 / ranks))
            yield _candidate(
                way + ", two levels" * layered,
                call,
                simulated,
                {"device": 4 * n + kept},
                codec="" if way in HOOK else way,
                layered=layered,
                effect=effect,
            )
            if way == "sign" and not layered:
                yield from _one_bit(simulated, scenario)


def _candidate(
    name: str, call: str, simulated: Simulated, memory: dict[str, float], **more: Any
) -> Candidate:
    return Candidate(name, call, simulated.seconds, simulated.traffic.nbytes, memory, **more)


def _one_bit(sign: Simulated, scenario: Scenario) -> list[Candidate]:
    """1-bit Adam late in a run, and 0/1 Adam, of which most steps compute alone."""
    n = 4.0 * scenario.model.numel
    kept = 4 * n + n * (1 + 1 / scenario.cluster.size)
    rarely = replace(
        sign,
        seconds=sign.compute_seconds + sign.exposed_seconds / RARELY,
        traffic=sign.traffic.over(RARELY),
    )
    return [
        _candidate(
            "1-bit Adam",
            "OneBitAdam + overlap(ddp, optimizer)",
            sign,
            {"device": kept},
            effect="one bit, delayed; after an exact warm-up",
        ),
        _candidate(
            f"0/1 Adam, every {RARELY}",
            "ZeroOneAdam",
            rarely,
            {"device": kept + 2 * n},
            effect="ranks differ between rounds",
        ),
    ]


def _local(scenario: Scenario) -> Iterator[Candidate]:
    """Θ and the outer momentum on the host; on the device the change under way, and residuals."""
    n = 4.0 * scenario.model.numel
    for way, simulated in considered(scenario):
        kept = n if way.sparse else 2 * n * (1 + 1 / scenario.cluster.size)
        memory = {"device": 5 * n + kept, "host": n if way.sparse else 2 * n}
        yield _candidate(way.name, way.call, simulated, memory, effect=way.effect, local=True)


def _sharded(scenario: Scenario) -> list[Candidate]:
    machines, model = (scenario.cluster, scenario.costs), scenario.model
    n, ranks, scratch = 4.0 * model.numel, scenario.cluster.size, SCRATCH * 1e6 * scenario.bucket_mb
    most = widest(scenario.buckets) + ranks * 64 * len(model.shapes)
    found = []
    for codec in ("none", "fp8"):
        scatter, gather = (_shards(scenario.buckets, codec, gather=g) for g in (False, True))
        down = simulate_step(*machines, scatter, most, scenario.training)
        up = simulate_calls(*machines, gather, most)
        seconds, sent = down.seconds + up.seconds, down.traffic.nbytes + up.traffic.nbytes
        tail = "" if codec == "none" else f', codec="{codec}", weights="{codec}"'
        one, two, three = (scratch + sharded_bytes(stage, n, ranks, codec) for stage in (1, 2, 3))
        again = "compress_fsdp" if tail else "fully_shard"  # gathers for backward, too
        rows = [
            ("ZeRO-1", f"Partitioned(stage=1{tail})", seconds, sent, {"device": one}),
            ("ZeRO-2", f"Partitioned(stage=2{tail})", seconds, sent, {"device": two}),
            ("ZeRO-3", again, seconds + up.seconds, sent + up.traffic.nbytes, {"device": three}),
        ]
        # gradients out, weights back, master weights and moments in and out of the tier
        moved = 7 * n / ranks
        for tier, rate in RATES.items():
            memory = {"device": two - 2 * n / ranks, tier: 3 * n / ranks}
            call = f"Partitioned(store=…{tail})"
            rows.append((f"offload to {tier}", call, seconds + moved / rate, sent, memory))
        effect = "exact" if codec == "none" else "rounded"
        found += [
            Candidate(f"{name} {codec}", call, took, nbytes, memory, effect=effect)
            for name, call, took, nbytes, memory in rows
        ]
    return found


def sharded_bytes(stage: int, n: float, ranks: int, codec: str) -> float:
    """Bytes that a rank keeps of n bytes of parameters between backward and step, beside scratch.

    What compression keeps is of the whole model, because a rank quantises its own gradients of all
    of it: only the rest is divided by the ranks.
    """
    lossy = codec != "none"
    # residuals; weights from forward to backward, as they came; the own rows on their way out and
    # in
    if stage == 3:
        return 4 * n / ranks + lossy * (
            n + n * codec_named(codec).row_bytes(4096) / (4 * 4096) + 2 * n / ranks
        )
    whole = 2 * n if stage == 1 else n
    # exact masters; residuals, and those that a step proposes
    return whole + 3 * n / ranks + lossy * (n / ranks + 2 * n)


def _shards(buckets: Sequence[ModelBucket], codec: str, *, gather: bool) -> Build:
    """The reduce-scatter of every bucket, or the all-gather of its weights: the calls that
    ``Partitioned`` makes."""

    def build(transport: SizedTransport, workspace: Workspace, buffer: torch.Tensor) -> list[Job]:
        jobs: list[Job] = []
        sequence = 0
        for bucket in buckets:
            plan = _deals(bucket.spans, transport, codec)
            call = Call(transport, workspace, sequence)
            if gather:
                jobs.append(Job(gather_rows(buffer, buffer, plan, call)))
            else:
                kept = [no_residual() for _ in plan]
                jobs.append(Job(reduce_rows(buffer, buffer, kept, plan, call), len(plan)))
            sequence += len(plan)
        return jobs

    return build


def _deals(spans: Sequence[Span], transport: SizedTransport, codec: str) -> list[Deal]:
    parts, at = [], 0
    for span in spans:
        width = -(-span.numel // transport.size)
        parts.append(Part(span.name, at, width, span.numel))
        at += width
    policy = policy_of(codec, min_numel=MIN_NUMEL)
    return deals(parts, policy, rank=transport.rank, ranks=transport.size)
