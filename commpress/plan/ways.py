"""Ways to reduce a model's gradients, simulated: the exchanges that the DDP hook makes.

``plain`` and ``bf16-ring`` are rings of a library; every other name is a codec, reduced in one
level, or in two with ``layered``. Policies are accepted where codecs are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
from commpress.plan.cluster import RINGS, Cluster
from commpress.plan.costs import Costs
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


@dataclass(frozen=True)
class Scenario:
    """A model that is trained on a cluster."""

    cluster: Cluster
    costs: Costs
    model: Model
    seconds: float  # of a step of one rank on its own
    bucket_mb: float = 25.0
    # tier → bytes of one rank, where there is a limit
    memory: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def buckets(self) -> list[ModelBucket]:
        return self.model.buckets(self.bucket_mb)

    @property
    def training(self) -> Training:
        """A third forward, two thirds backward, of what the optimizer leaves: about a twentieth."""
        both, shares = 0.95 * self.seconds, self.model.shares(self.bucket_mb)
        return Training(both / 3, both * 2 / 3, 0.05 * self.seconds, shares)

    def step(self, way: Way, *, layered: bool = False) -> Simulated:
        """A step under DDP."""
        machines = self.cluster, self.costs
        return simulate_buckets(*machines, way, self.buckets, self.training, layered=layered)


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
            call = channel.call(exchange.sequences)
            jobs.append(Job(exchange.steps(channel, buffer, call), exchange.waits))
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
