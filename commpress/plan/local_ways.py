"""Local updates on a modelled cluster: what a step costs on average over a round, and what a plan
advises.

A round is H steps of computing alone and one exchange of what changed, which the simulator runs as
it runs those of DDP. Without overlap all stand still for it; with τ steps of overlap it runs beside
these, on the same cores, and what it takes longer is exposed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commpress.codecs import SparseCodec, codec_named, policy_of
from commpress.collectives.allreduce import Workspace, reduce_bucket
from commpress.collectives.buckets import MESSAGE, Span, messages
from commpress.collectives.frame import HEADER
from commpress.collectives.scalars import gathered
from commpress.errors import InvalidArgument
from commpress.optim.exchange_header import NUMBERS
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.model import Model
from commpress.plan.network import SizedTransport, Traffic
from commpress.plan.simulator import Build, Simulated, Training, no_residual, simulate_step
from commpress.plan.ways import MIN_NUMEL
from commpress.schedules import Hidden, Pace
from commpress.work import Steps, overlapped

PREFIX = "local:"
CODECS = ("int4", "bits2", "topk-64+bits2")  # from fine to coarse
EVERY = 30  # steps of a round that a plan considers
# bytes of memory per parameter that the change, the outer step and the merge read and write
PASSES = 48
SPARSE_PASSES = 88  # copies of a sparse change that take as long as to encode and decode it
SPARSE_RANKS = 23  # up to which everybody's change to everybody is less than two phases of two bits

# Per cent of held-out loss above synchronous training, the rates of both searched: 1.1 M
# parameters, 4 ranks, 2,000 steps (docs/local_updates_loss.md). Other models and longer runs lose
# less or more; what is not here was not measured.
LOSS = {
    (10, "none"): 1.6, (10, "int4"): 1.3, (10, "bits2"): 1.7, (10, "sign"): 9.0,
    (30, "none"): 2.8, (30, "int4"): 3.4, (30, "bits2"): 3.7, (30, "sign"): 8.8,
    (100, "none"): 10.3, (100, "int4"): 10.8,
}  # fmt: skip


@dataclass(frozen=True)
class LocalWay:
    """Options of ``LocalUpdates`` that decide what it costs. As text: local:CODEC:H:τ, of which H
    and τ may be left out."""

    codec: str
    every: int = EVERY
    overlap: int = 0

    def __post_init__(self) -> None:
        codec_named(self.codec)
        if self.every < 1 or not 0 <= self.overlap <= self.every:
            raise InvalidArgument(
                f"{self} is no way to train: expected every of at least 1 and overlap from 0 to "
                "that"
            )

    @property
    def hidden(self) -> bool:
        """True if an exchange is under way for a whole round, as with every="auto", which then
        finds its length."""
        return self.overlap == self.every

    @property
    def name(self) -> str:
        if self.hidden:
            return f"local {self.codec}, {self.every} steps, hidden"
        return f"local {self.codec}, every {self.every}" + (
            f", overlap {self.overlap}" if self.overlap else ""
        )

    @property
    def call(self) -> str:
        sparse = "outer=SparseLoCo(), " if self.sparse else ""
        if self.hidden:
            codec = "" if self.codec == CODECS[0] else f', {sparse}codec="{self.codec}"'
            return f"LocalUpdates(inner{codec})"
        late = f", overlap={self.overlap}" if self.overlap else ""
        return f'LocalUpdates(inner, every={self.every}, {sparse}codec="{self.codec}"{late})'

    @property
    def sparse(self) -> bool:
        return isinstance(codec_named(self.codec), SparseCodec)

    @property
    def effect(self) -> str:
        gap = None if self.overlap else LOSS.get((self.every, self.codec))
        return "another loss" + (
            ", not measured" if gap is None else f": {gap:+.1f} % in a small GPT"
        )


def local_way(text: str) -> LocalWay:
    codec, *numbers = text.removeprefix(PREFIX).split(":")
    if not codec or len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise InvalidArgument(
            f"way is {text!r}, expected local:CODEC, local:CODEC:H or local:CODEC:H:N, as "
            "local:int4:30:5"
        )
    return LocalWay(codec, *map(int, numbers))


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
