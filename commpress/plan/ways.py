"""Ways to reduce a model's gradients, simulated: the exchanges that the DDP hook makes.

``plain`` and ``bf16-ring`` are rings of a library; every other name is a codec, reduced in one
level, or in two with ``layered``. Policies are accepted where codecs are.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch

from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.allreduce import Workspace
from commpress.collectives.channel import AT_ONCE, Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.levels import Levels
from commpress.collectives.two_level import hierarchy_of
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.kernels.pieces import Pieces
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.grid import RINGS
from commpress.plan.model import Model, ModelBucket, Shape, bucket_of
from commpress.plan.network import Network, SizedTransport
from commpress.plan.ring import ring_allreduce
from commpress.plan.simulator import (
    ALONE,
    Build,
    Job,
    Simulated,
    Training,
    no_residual,
    simulate_calls,
    simulate_step,
)
from commpress.work import Steps

Way = str | Codec | Policy
MIN_NUMEL = 256  # as the DDP hook's: shorter tensors travel exactly


def simulate_buffer(
    cluster: Cluster, costs: Costs, way: Way, numel: int, *, layered: bool = False, **run: Any
) -> Simulated:
    """All-reduces of one buffer, as ``commpress bench allreduce`` has it; ``run``: as for
    ``simulate_calls``."""
    build = reducing(way, [bucket_of([Shape("buffer", (numel,))])], layered=layered, min_numel=0)
    return simulate_calls(cluster, costs, build, numel, **run)


def simulate_training(
    cluster: Cluster,
    costs: Costs,
    way: Way,
    model: Model,
    seconds: float,
    *,
    bucket_mb: float = 25.0,
    layered: bool = False,
) -> Simulated:
    """A step under DDP, which one rank alone computes in so many seconds."""
    training = training_of(model, seconds, bucket_mb)
    return simulate_buckets(
        cluster, costs, way, model.buckets(bucket_mb), training, layered=layered
    )


def simulate_buckets(
    cluster: Cluster,
    costs: Costs,
    way: Way,
    buckets: Sequence[ModelBucket],
    training: Training,
    *,
    layered: bool = False,
    min_numel: int = MIN_NUMEL,
) -> Simulated:
    """A step whose backward fills these buckets."""
    build = reducing(way, buckets, layered=layered, min_numel=min_numel)
    limit = ALONE if _is_ring(way) else 1 if layered else AT_ONCE
    return simulate_step(cluster, costs, build, widest(buckets), training, limit=limit)


def training_of(model: Model, seconds: float, bucket_mb: float) -> Training:
    """A third forward, two thirds backward, of what the optimizer leaves: about a twentieth."""
    return Training(
        0.95 * seconds / 3, 0.95 * seconds * 2 / 3, 0.05 * seconds, model.shares(bucket_mb)
    )


def widest(buckets: Sequence[ModelBucket]) -> int:
    """Elements of the longest."""
    return max(bucket.numel for bucket in buckets)


def reducing(
    way: Way,
    buckets: Sequence[ModelBucket],
    *,
    layered: bool = False,
    min_numel: int = MIN_NUMEL,
) -> Build:
    """The jobs of these buckets."""

    def build(transport: SizedTransport, workspace: Workspace, buffer: torch.Tensor) -> list[Job]:
        if _is_ring(way):
            return [Job(_ring(RINGS[way], b.numel, transport.network)) for b in buckets]
        channel = Channel(transport, workspace=workspace)
        if layered:
            topology = transport.network.cluster.topology
            channel.levels = Levels(hierarchy_of(topology, transport))
        exchanges = Exchanges(
            policy_of(way, min_numel=min_numel),
            transport.size,
            workspace,
            levels=channel.levels,
            residuals=NoResiduals(),
        )
        jobs = []
        for bucket in buckets:
            exchange = exchanges.of((bucket,), bucket.tensors, buffer.device)
            first = channel.take(exchange.sequences)
            jobs.append(Job(exchange.steps(channel, buffer, sequence=first, key=0), exchange.waits))
        return jobs

    return build


class NoResiduals(ResidualStore):
    """Residuals that take no memory: nobody touches them."""

    def attach(self, keys: Any, pieces: Pieces, device: torch.device) -> ErrorFeedback | None:
        return no_residual() if pieces.residual_numel else None


def _is_ring(way: Way) -> TypeGuard[str]:
    return isinstance(way, str) and way in RINGS


def _ring(size: int, numel: int, network: Network) -> Steps[None]:
    """Sums read two numbers and write one; torch's bf16 hook rounds, divides and puts back, 16
    bytes an element."""
    known = network.cluster.ring_byte if size == 4 else network.cluster.half_byte
    moved = (0 if known else 3 * size) + (0 if size == 4 else 16)
    return ring_allreduce(
        size * numel,
        network,
        arithmetic=moved * numel * network.kernels.costs.memory,
        byte=known / 2 if known else None,
    )
