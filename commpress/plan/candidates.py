"""Candidates: what a training run could do about its network, and what each would cost: seconds,
bytes, memory.

Every candidate is simulated with the collectives it would run. Memory is counted per rank from what
each keeps for n parameters in float32; activations are not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from commpress.codecs import codec_named, policy_of
from commpress.codecs.planned import PLAIN, Planned
from commpress.codecs.whole_tensors import LowRankCodec
from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import Span
from commpress.collectives.reduce_scatter import Deal, Part, deals, gather_rows, reduce_rows
from commpress.errors import InvalidArgument
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.local_ways import considered
from commpress.plan.model import Model
from commpress.plan.network import SizedTransport
from commpress.plan.simulator import (
    Build,
    Simulated,
    Training,
    no_residual,
    simulate_calls,
    simulate_step,
)
from commpress.plan.ways import step_by, widest
from commpress.work import Steps

# of DDP's gradients, from exact to coarse
WAYS = (PLAIN, "bf16-ring", "int8", "int4", "sign", "powersgd-4")
# of these, those that are chosen unasked: the others may change a loss
CHOSEN = (PLAIN, "int8", "int4")
HOOK = {"bf16-ring"}  # torch's own hook: no codec of ours, so no plan can name it
RARELY = 16  # steps between two rounds of 0/1 Adam late in a run
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


@dataclass(frozen=True)
class Settings:
    """Seconds are those of one rank on its own; rates are bytes per second between a rank and a
    tier."""

    compute_seconds: float
    bucket_mb: float = 25.0
    # tier → bytes of one rank, where there is a limit
    memory: dict[str, float] = field(default_factory=dict)
    host_rate: float = 12e9
    disk_rate: float = 2e9


@dataclass(frozen=True)
class Candidate:
    name: str
    call: str  # how a user gets it
    seconds: float
    sent_bytes: float  # by a rank and step
    between_bytes: float
    memory: dict[str, float]  # tier → bytes
    codec: str = ""  # if a plan can name it
    layered: bool = False
    effect: str = "exact"  # on what is learnt
    fits: bool = True
    local: bool = False  # updates: ranks differ between rounds, and learn something else


def training(model: Model, seconds: float, bucket_mb: float) -> Training:
    """A third forward, two thirds backward, of what the optimizer leaves: about a twentieth."""
    return Training(
        0.95 * seconds / 3, 0.95 * seconds * 2 / 3, 0.05 * seconds, model.shares(bucket_mb)
    )


def candidates(
    cluster: Cluster, costs: Costs, model: Model, settings: Settings, ways: Sequence[str] = WAYS
) -> list[Candidate]:
    """All of them, the fastest first; those that do not fit their memory last."""
    n, adam = 4.0 * model.numel, 16.0 * model.numel  # weights, gradients and two moments
    found: list[Candidate] = []
    reduced: dict[str, Simulated] = {}
    for way in dict.fromkeys([PLAIN, *ways]):
        simulated = reduced[way] = _reduced(cluster, costs, model, settings, way)
        found.append(_ddp(way, simulated, model, cluster.size))
        if (
            cluster.topology.layered
            and way not in (PLAIN, *HOOK)
            and not isinstance(codec_named(way), LowRankCodec)
        ):
            two = _reduced(cluster, costs, model, settings, way, layered=True)
            found.append(_ddp(way, two, model, cluster.size, nodes=len(cluster.topology.nodes)))
    alone = reduced[PLAIN].compute_seconds
    if "sign" in reduced:
        sign = reduced["sign"]
        kept = n * (1 + 1 / cluster.size)
        found.append(
            Candidate(
                "1-bit Adam",
                "OneBitAdam + overlap(ddp, optimizer)",
                sign.seconds,
                sign.traffic.nbytes,
                sign.traffic.between,
                {"device": adam + kept},
                effect="one bit, delayed; after an exact warm-up",
            )
        )
        found.append(
            _rarely("0/1 Adam", "ZeroOneAdam", sign, alone, {"device": adam + kept + 2 * n})
        )
    found += _local(cluster, costs, model, settings)
    if cluster.size <= SHARDED_LIMIT:
        found += _sharded(cluster, costs, model, settings, alone)
    checked = [_checked(candidate, settings.memory) for candidate in found]
    return sorted(checked, key=lambda c: (not c.fits, c.seconds))


def recommended(found: Sequence[Candidate], ways: Sequence[str] = CHOSEN) -> Candidate:
    """Of what a plan can say in these ways, the finest within ``MARGIN`` of the fastest; no
    compression, if that is within ``AT_ALL``."""
    order = {way: i for i, way in enumerate(dict.fromkeys([PLAIN, *ways]))}
    able = [c for c in found if c.codec in order and c.fits]
    if not able:
        raise InvalidArgument(
            "no way to reduce gradients under DDP fits the memory: take one of the sharded "
            "candidates"
        )
    least = min(c.seconds for c in able)
    near = (c for c in able if c.seconds * (1 - (AT_ALL if c.codec == PLAIN else MARGIN)) <= least)
    return min(near, key=lambda c: (order[c.codec], c.seconds))


def advised(
    found: Sequence[Candidate], chosen: Candidate, *, local_updates: bool = True
) -> tuple[Candidate, str]:
    """Advice for this link, with its reason: ``chosen``, which keeps ranks alike, unless local
    updates, which change the loss, are allowed and save more than ``LOCAL_WORTH`` of its step. Of
    these near the fastest the finest whose loss is known, if there is one."""
    local = [c for c in found if c.local and c.fits]
    if not local_updates:
        return chosen, f"{chosen.call}: {1e3 * chosen.seconds:.4g} ms a step"
    if not local or min(c.seconds for c in local) > (1 - LOCAL_WORTH) * chosen.seconds:
        fastest = min((c.seconds for c in local), default=float("inf"))
        why = (
            "local updates do not fit the memory"
            if not local
            else (
                f"local updates would take {1e3 * fastest:.4g} ms and change the loss: not worth it"
            )
        )
        return chosen, f"{chosen.call}: {1e3 * chosen.seconds:.4g} ms a step; {why}"
    least = min(c.seconds for c in local)
    near = [c for c in local if c.seconds * (1 - LOCAL_NEAR) <= least]
    best = max(near, key=lambda c: ("not measured" not in c.effect, c.sent_bytes, -c.seconds))
    return best, (
        f"{best.call}: {1e3 * best.seconds:.4g} ms a step, where {chosen.call}, the best that "
        f"keeps ranks alike, takes {1e3 * chosen.seconds:.4g} ms; {best.effect}, so compare it "
        "with a plain run"
    )


def plan_of(
    chosen: Candidate, found: Sequence[Candidate], cluster: Cluster, bucket_mb: float
) -> Planned:
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
        topology=str(cluster.topology) if chosen.layered else None,
        bucket_mb=bucket_mb,
        why=why,
    )


# ---------------------------------------------------------------- one candidate


def _reduced(
    cluster: Cluster,
    costs: Costs,
    model: Model,
    settings: Settings,
    way: str,
    *,
    layered: bool = False,
) -> Simulated:
    build = step_by(way, model, costs, bucket_mb=settings.bucket_mb, layered=layered)
    most = widest(model.buckets(settings.bucket_mb))
    steps = training(model, settings.compute_seconds, settings.bucket_mb)
    return simulate_step(cluster, costs, build, most, steps, limit=1 if layered else 4)


def _ddp(way: str, simulated: Simulated, model: Model, ranks: int, *, nodes: int = 0) -> Candidate:
    n, kept, effect = 4.0 * model.numel, 0.0, "exact"
    if way in HOOK:
        call, effect = "torch's bf16_compress_hook", "rounded"
    elif way == PLAIN:
        call = "DistributedDataParallel"
    else:
        codec = codec_named(way)
        call = f'compress(ddp, "{way}"' + (
            f', topology="{nodes}x{ranks // nodes}")' if nodes else ")"
        )
        effect = "low rank, delayed" if isinstance(codec, LowRankCodec) else "rounded, delayed"
        # and what is proposed
        kept = (
            2 * (n / (ranks / nodes) if nodes else n * (1 + 1 / ranks)) if codec.feedback else 0.0
        )
    return Candidate(
        way + (", two levels" if nodes else ""),
        call,
        simulated.seconds,
        simulated.traffic.nbytes,
        simulated.traffic.between,
        {"device": 4 * n + kept},
        "" if way in HOOK else way,
        bool(nodes),
        effect,
    )


def _rarely(
    name: str, call: str, simulated: Simulated, alone: float, memory: dict[str, float]
) -> Candidate:
    """One round in ``RARELY`` steps; the others compute alone."""
    return Candidate(
        f"{name}, every {RARELY}",
        call,
        alone + (simulated.seconds - alone) / RARELY,
        simulated.traffic.nbytes / RARELY,
        simulated.traffic.between / RARELY,
        memory,
        effect="ranks differ between rounds",
    )


def _local(cluster: Cluster, costs: Costs, model: Model, settings: Settings) -> list[Candidate]:
    """Θ and the outer momentum on the host; on the device the change under way, and residuals."""
    n, ranks = 4.0 * model.numel, cluster.size
    found = []
    for way, simulated in considered(cluster, costs, model, settings.compute_seconds):
        kept = n if way.sparse else 2 * n * (1 + 1 / ranks)
        memory = {"device": 5 * n + kept, "host": n if way.sparse else 2 * n}
        traffic = simulated.traffic
        found.append(
            Candidate(
                way.name,
                way.call,
                simulated.seconds,
                traffic.nbytes,
                traffic.between,
                memory,
                effect=way.effect,
                local=True,
            )
        )
    return found


def _sharded(
    cluster: Cluster, costs: Costs, model: Model, settings: Settings, alone: float
) -> list[Candidate]:
    n, ranks, scratch = 4.0 * model.numel, cluster.size, SCRATCH * 1e6 * settings.bucket_mb
    found = []
    for codec in ("none", "int8"):
        scatter, gather = (
            _shards(model, settings.bucket_mb, codec, gather=g) for g in (False, True)
        )
        most = widest(model.buckets(settings.bucket_mb)) + ranks * 64 * len(model.shapes)
        steps = training(model, settings.compute_seconds, settings.bucket_mb)
        down = simulate_step(cluster, costs, scatter, most, steps)
        up = simulate_calls(cluster, costs, gather, most)
        seconds, sent = down.seconds + up.seconds, down.traffic.nbytes + up.traffic.nbytes
        between = down.traffic.between + up.traffic.between
        tail = "" if codec == "none" else f', codec="{codec}", weights="{codec}"'
        effect = "exact" if codec == "none" else "rounded"
        held = {stage: scratch + sharded_bytes(stage, n, ranks, codec) for stage in (1, 2, 3)}
        stages: list[tuple[str, str, float, dict[str, float]]] = [
            (f"ZeRO-1 {codec}", f"Partitioned(stage=1{tail})", seconds, {"device": held[1]}),
            (f"ZeRO-2 {codec}", f"Partitioned(stage=2{tail})", seconds, {"device": held[2]}),
            (
                f"ZeRO-3 {codec}",
                "compress_fsdp" if tail else "fully_shard",
                seconds + up.seconds,
                {"device": held[3]},
            ),
        ]
        # gradients out, weights back, master weights and moments in and out of the tier
        moved = 7 * n / ranks
        for tier, rate in (("host", settings.host_rate), ("disk", settings.disk_rate)):
            memory = {"device": held[2] - 2 * n / ranks, tier: 3 * n / ranks}
            stages.append(
                (
                    f"offload to {tier} {codec}",
                    f"Partitioned(store=…{tail})",
                    seconds + moved / rate,
                    memory,
                )
            )
        found += [
            Candidate(
                name,
                call,
                s,
                sent + (up.traffic.nbytes if "3" in name else 0.0),
                between,
                m,
                effect=effect,
            )
            for name, call, s, m in stages
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


def _shards(model: Model, bucket_mb: float, codec: str, *, gather: bool) -> Build:
    """The reduce-scatter of every bucket, or the all-gather of its weights: the calls that
    ``Partitioned`` makes."""

    def build(
        transport: SizedTransport, workspace: Workspace, buffer: torch.Tensor
    ) -> list[Steps[Any]]:
        jobs: list[Steps[Any]] = []
        sequence = 0
        for bucket in model.buckets(bucket_mb):
            plan = _deals(bucket.spans, transport, codec)
            if gather:
                jobs.append(
                    gather_rows(
                        buffer,
                        buffer,
                        plan=plan,
                        transport=transport,
                        workspace=workspace,
                        sequence=sequence,
                    )
                )
            else:
                jobs.append(
                    reduce_rows(
                        buffer,
                        buffer,
                        [no_residual() for _ in plan],
                        plan=plan,
                        transport=transport,
                        workspace=workspace,
                        sequence=sequence,
                    )
                )
            sequence += len(plan)
        return jobs

    return build


def _deals(spans: Sequence[Span], transport: SizedTransport, codec: str) -> list[Deal]:
    parts, at = [], 0
    for span in spans:
        width = -(-span.numel // transport.size)
        parts.append(Part(span.name, at, width, span.numel))
        at += width
    return deals(parts, policy_of(codec, min_numel=256), rank=transport.rank, ranks=transport.size)


def _checked(candidate: Candidate, memory: dict[str, float]) -> Candidate:
    fits = all(candidate.memory.get(tier, 0.0) <= limit for tier, limit in memory.items())
    return Candidate(**{**vars(candidate), "fits": fits})
