"""The ways to reduce a model's gradients, as steps for the simulator: the same calls that the DDP
hook makes.

``plain`` and ``bf16-ring`` are rings of a library; every other name is a codec, reduced by
``collectives.allreduce``, or by ``collectives.hierarchical`` with ``layered``. Policies are
accepted where codecs are.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.allreduce import Workspace, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.powersgd import (
    MatrixPlan,
    RowsOnly,
    matrices_of,
    plan_matrices,
    reduce_matrices,
)
from commpress.collectives.two_level import hierarchy_of, reduce_routes, routes
from commpress.plan.costs import Costs
from commpress.plan.model import Model, ModelBucket
from commpress.plan.network import SizedTransport
from commpress.plan.ring import ring_allreduce
from commpress.plan.simulator import Build, no_residual
from commpress.plan.way_names import RINGS
from commpress.work import Steps, overlapped

MIN_NUMEL = 256  # as the DDP hook's: shorter tensors travel exactly


def buckets_by(
    way: str | Codec | Policy,
    buckets: Sequence[ModelBucket],
    costs: Costs,
    *,
    layered: bool = False,
    min_numel: int = MIN_NUMEL,
) -> Build:
    """The steps of every bucket."""

    def build(
        transport: SizedTransport, workspace: Workspace, buffer: torch.Tensor
    ) -> list[Steps[Any]]:
        if isinstance(way, str) and way in RINGS:
            return [_ring(RINGS[way], b.numel, transport, i, costs) for i, b in enumerate(buckets)]
        policy = policy_of(way, min_numel=min_numel)
        if layered:
            return _layered(policy, buckets, transport, workspace, buffer)
        return _flat(policy, buckets, transport, workspace, buffer)

    return build


def buffer_by(
    way: str | Codec | Policy, numel: int, costs: Costs, *, layered: bool = False
) -> Build:
    """One buffer of so many elements, as ``commpress bench allreduce`` has it."""
    return buckets_by(
        way,
        [ModelBucket((Span("buffer", 0, numel),), ((numel,),))],
        costs,
        layered=layered,
        min_numel=0,
    )


def widest(buckets: Sequence[ModelBucket]) -> int:
    return max(bucket.numel for bucket in buckets)


def step_by(
    way: str | Codec | Policy,
    model: Model,
    costs: Costs,
    *,
    bucket_mb: float = 25.0,
    layered: bool = False,
) -> Build:
    return buckets_by(way, model.buckets(bucket_mb), costs, layered=layered)


def _ring(size: int, numel: int, transport: SizedTransport, tag: int, costs: Costs) -> Steps[None]:
    """Sums read two numbers and write one; torch's bf16 hook rounds, divides and puts back, 16
    bytes an element."""
    cluster = transport.network.cluster
    known = cluster.ring_byte if size == 4 else cluster.half_byte
    moved = (0 if known else 3 * size) + (0 if size == 4 else 16)
    byte = known / 2 if known else -1.0
    return ring_allreduce(
        size * numel, transport, tag=tag, arithmetic=moved * numel * costs.memory, byte=byte
    )


def _flat(
    policy: Policy,
    buckets: Sequence[ModelBucket],
    transport: SizedTransport,
    workspace: Workspace,
    buffer: torch.Tensor,
) -> list[Steps[Any]]:
    jobs, sequence = [], 0
    for bucket in buckets:
        matrices = matrices_of(bucket.spans, bucket.shapes, policy)
        taken = {span.name for span, _ in matrices}
        rows = messages(
            [s for s in bucket.spans if s.name not in taken], RowsOnly(policy), transport.size
        )
        options: dict[str, Any] = {"transport": transport, "workspace": workspace}
        steps: list[Steps[Any]] = []
        if matrices:
            plan = plan_matrices(matrices, transport.size, {}, device=buffer.device)
            steps.append(
                reduce_matrices(
                    buffer, no_residual(), plan=plan, sequence=sequence + len(rows), **options
                )
            )
        if rows:
            residuals = [no_residual() if m.pieces.residual_numel else None for m in rows]
            steps.append(
                reduce_bucket(buffer, residuals, messages=rows, sequence=sequence, **options)
            )
        jobs.append(overlapped(steps, limit=2) if len(steps) > 1 else steps[0])
        sequence += len(rows) + (MatrixPlan.MESSAGES if matrices else 0)
    return jobs


def _layered(
    policy: Policy,
    buckets: Sequence[ModelBucket],
    transport: SizedTransport,
    workspace: Workspace,
    buffer: torch.Tensor,
) -> list[Steps[Any]]:
    hierarchy = hierarchy_of(transport.network.cluster.topology, transport)
    jobs: list[Steps[Any]] = []
    sequence = 0
    for bucket in buckets:
        plan = routes(bucket.spans, RowsOnly(policy), hierarchy)
        residuals = [
            {i: no_residual() if m.pieces.residual_numel else None for i, m in r.between.items()}
            for r in plan
        ]
        jobs.append(
            reduce_routes(
                buffer,
                residuals,
                plan=plan,
                hierarchy=hierarchy,
                workspace=workspace,
                sequence=sequence,
            )
        )
        sequence += len(plan)
    return jobs
