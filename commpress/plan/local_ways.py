"""Local updates on a modelled cluster: what a step costs on average over a round, and what a plan
advises.

A round is H steps of computing alone and one exchange of what changed, which the simulator runs as
it runs those of DDP. Without overlap all stand still for it; with τ steps of overlap it runs beside
these, on the same cores, and what it takes longer is exposed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.codecs import SparseCodec, codec_named, policy_of
from commpress.collectives.allreduce import Workspace, reduce_bucket
from commpress.collectives.buckets import MESSAGE, Span, messages
from commpress.collectives.frame import HEADER
from commpress.collectives.scalars import gathered
from commpress.optim.rounds import NUMBERS
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.model import Model
from commpress.plan.network import SizedTransport, Traffic
from commpress.plan.simulator import Build, Simulated, Training, no_residual, simulate_step
from commpress.plan.way_names import CODECS, LocalWay
from commpress.plan.ways import MIN_NUMEL
from commpress.schedules import Hidden, Pace
from commpress.work import Steps, overlapped

# bytes of memory per parameter that the change, the outer step and the merge read and write
PASSES = 48
SPARSE_PASSES = 88  # copies of a sparse change that take as long as to encode and decode it
SPARSE_RANKS = 23  # up to which everybody's change to everybody is less than two phases of two bits


def simulate_local(
    cluster: Cluster, costs: Costs, model: Model, seconds: float, way: LocalWay
) -> Simulated:
    """Means over a round: seconds of a step, and bytes of one."""
    numel = model.numel
    beside = Training(0.0, way.overlap * seconds, PASSES * numel * costs.memory, (0.0, 1.0))
    round_ = simulate_step(cluster, costs, exchange_by(way, model), numel, beside, limit=2)
    alone = _alone(cluster, costs, seconds)
    total = round_.seconds + (way.every - way.overlap) * alone
    traffic = Traffic(
        *(
            figure / way.every
            for figure in (round_.traffic.messages, round_.traffic.nbytes, round_.traffic.between)
        )
    )
    return Simulated(total / way.every, alone, traffic, round_.ranks, round_.classes)


def _alone(cluster: Cluster, costs: Costs, seconds: float) -> float:
    """Of a step of computing without communication, on the slowest class."""
    return simulate_step(
        cluster, costs, lambda *_: [], 1, Training(0.0, seconds, 0.0, (1.0,))
    ).seconds


def exchange_by(way: LocalWay, model: Model) -> Build:
    """The exchange of one round, all parameters in one fragment; then nothing, until the overlap is
    over."""
    spans, at = [], 0
    for shape in model.shapes:
        spans.append(Span(shape.name, at, shape.numel))
        at += shape.numel

    def build(
        transport: SizedTransport, workspace: Workspace, buffer: torch.Tensor
    ) -> list[Steps[Any]]:
        cross = _sparse if way.sparse else _two_phases
        return [_exchange(cross(way, spans, transport, workspace, buffer), transport), _nothing()]

    return build


def _exchange(steps: Steps[Any], transport: SizedTransport) -> Steps[None]:
    yield from gathered([0.0] * NUMBERS, transport=transport, sequence=1 << 20)
    yield from steps


def _two_phases(
    way: LocalWay,
    spans: Sequence[Span],
    transport: SizedTransport,
    workspace: Workspace,
    buffer: torch.Tensor,
) -> Steps[Any]:
    rows = messages(spans, policy_of(way.codec, min_numel=MIN_NUMEL), transport.size)
    residuals = [no_residual() if m.pieces.residual_numel else None for m in rows]
    return reduce_bucket(
        buffer, residuals, messages=rows, transport=transport, workspace=workspace, sequence=0
    )


def _sparse(
    way: LocalWay,
    spans: Sequence[Span],
    transport: SizedTransport,
    workspace: Workspace,
    buffer: torch.Tensor,
) -> Steps[Any]:
    """Everybody's change to everybody, as ``all_gather_mean`` sends it; its arithmetic is charged
    as copies."""
    codec, numel = codec_named(way.codec), sum(span.numel for span in spans)
    assert isinstance(codec, SparseCodec)

    def part(number: int, at: int) -> Steps[None]:
        x = buffer[at : min(at + MESSAGE, numel)]
        for _ in range(SPARSE_PASSES):
            x.copy_(x)
        size = HEADER + codec.arithmetic.row_bytes(len(x))
        outbox, inbox = (workspace.rows(size, rows, buffer.device) for rows in (1, transport.size))
        yield transport.all_gather(inbox, outbox, number)
        workspace.give_rows(outbox, inbox)

    return overlapped([part(i, at) for i, at in enumerate(range(0, numel, MESSAGE))], limit=2)


def _nothing() -> Steps[None]:
    yield from ()


def considered(
    cluster: Cluster, costs: Costs, model: Model, seconds: float
) -> list[tuple[LocalWay, Simulated]]:
    """Ways that a plan weighs: each codec standing still for its exchange, and the finest whose
    hidden round is no long one."""
    found, hidden, schedule = [], list[LocalWay](), Hidden()
    for codec in CODECS:
        way = LocalWay(codec)
        if way.sparse and cluster.size > SPARSE_RANKS:
            continue
        simulated = simulate_local(cluster, costs, model, seconds, way)
        found.append((way, simulated))
        stands = (simulated.seconds - simulated.compute_seconds) * way.every
        pace = Pace(simulated.compute_seconds, stands, PASSES * model.numel * costs.memory)
        steps = schedule.needed(pace)
        hidden.append(LocalWay(codec, steps, steps))
    best = next(
        (way for way in hidden if way.every <= schedule.long),
        min(hidden, key=lambda way: way.every),
    )
    return [*found, (best, simulate_local(cluster, costs, model, seconds, best))]
