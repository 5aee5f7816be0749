"""Local updates on a modelled cluster: what a step costs on average over a round, and what a plan
advises.

A round is H steps of computing alone and one exchange of what changed, which the simulator runs as
it runs those of DDP. Without overlap all stand still for it; with τ steps of overlap it runs beside
these, on the same cores, and what it takes longer is exposed.
"""

from dataclasses import dataclass, replace

import torch

from commpress.codecs import SparseCodec, codec_named
from commpress.collectives.agreement import gathered
from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import MESSAGE
from commpress.collectives.frame import HEADER
from commpress.optim.rounds import NUMBERS
from commpress.plan.model import Model, bucket_of
from commpress.plan.network import SizedTransport
from commpress.plan.simulator import (
    Build,
    Job,
    Simulated,
    Training,
    compute_seconds,
    simulate_step,
)
from commpress.plan.ways import Scenario, reducing
from commpress.schedules import Hidden, Pace
from commpress.work import Steps, overlapped

CODECS = ("int4", "bits2", "topk-64+bits2")  # from fine to coarse
EVERY = 30  # steps of a round that stands still for its exchange
# Per cent of held-out loss above synchronous training, by codec and steps that are overlapped, of
# rounds of ``EVERY`` steps or of these: 1.1 M parameters, 4 ranks, 2,000 and 3,000 steps, the rates
# searched (docs/local_updates.md). Others were not measured.
LOSS = {("int4", 0): 3.4, ("bits2", 0): 3.7, ("int4", 1): 0.8}
# bytes of memory per parameter that the change, the outer step and the merge read and write
PASSES = 48
SPARSE_PASSES = 88  # copies of a sparse change that take as long as to encode and decode it
SPARSE_RANKS = 23  # up to which everybody's change to everybody is less than two phases of two bits


@dataclass(frozen=True)
class LocalWay:
    """Options of ``LocalUpdates`` that decide what it costs."""

    codec: str
    every: int = EVERY
    overlap: int = 0

    @property
    def hidden(self) -> bool:
        """True if an exchange is under way for a whole round, as with every="auto", which then
        finds its length."""
        return self.overlap == self.every

    @property
    def sparse(self) -> bool:
        return isinstance(codec_named(self.codec), SparseCodec)

    @property
    def name(self) -> str:
        steps = f"{self.every} steps, hidden" if self.hidden else f"every {self.every}"
        return f"local {self.codec}, {steps}"

    @property
    def call(self) -> str:
        words = [] if self.hidden else [f"every={self.every}"]
        words += ["outer=SparseLoCo()"] * self.sparse
        if words or self.codec != CODECS[0]:
            words.append(f'codec="{self.codec}"')
        return f"LocalUpdates({', '.join(['inner', *words])})"

    @property
    def effect(self) -> str:
        measured = self.hidden or not self.overlap
        gap = LOSS.get((self.codec, self.overlap)) if measured else None
        said = ", not measured" if gap is None else f": {gap:+.1f} % in a small GPT"
        return f"another loss{said}"


def simulate_local(scenario: Scenario, way: LocalWay) -> Simulated:
    """Means over a round: seconds of a step, and bytes of one."""
    machines, model, seconds = (scenario.cluster, scenario.costs), scenario.model, scenario.seconds
    beside = Training(0.0, way.overlap * seconds, _outer(scenario), (0.0, 1.0))
    round_ = simulate_step(*machines, exchange_by(way, model), model.numel, beside, limit=2)
    alone = compute_seconds(*machines, Training(0.0, seconds, 0.0, (1.0,)))
    total = round_.seconds + (way.every - way.overlap) * alone
    return replace(
        round_,
        seconds=total / way.every,
        compute_seconds=alone,
        traffic=round_.traffic.over(way.every),
    )


def _outer(scenario: Scenario) -> float:
    """Seconds of the change, the outer step and the merge."""
    return PASSES * scenario.model.numel * scenario.costs.memory


def exchange_by(way: LocalWay, model: Model) -> Build:
    """The exchange of one round, all parameters in one fragment; then nothing, until the overlap is
    over."""
    two_phases = reducing(way.codec, [bucket_of(model.shapes)])

    def exchange(
        transport: SizedTransport, workspace: Workspace, buffer: torch.Tensor
    ) -> Steps[None]:
        yield from gathered([0.0] * NUMBERS, transport=transport, sequence=1 << 20)
        if way.sparse:
            yield from _sparse(way, transport, workspace, buffer)
        else:
            (mean,) = two_phases(transport, workspace, buffer)
            yield from mean.steps

    return lambda *rank: [Job(exchange(*rank)), Job(_nothing())]


def _sparse(
    way: LocalWay, transport: SizedTransport, workspace: Workspace, buffer: torch.Tensor
) -> Steps[list[None]]:
    """Everybody's change to everybody, as ``all_gather_mean`` sends it; its arithmetic is charged
    as copies."""
    codec = codec_named(way.codec)
    assert isinstance(codec, SparseCodec)

    def part(number: int, x: torch.Tensor) -> Steps[None]:
        for _ in range(SPARSE_PASSES):
            x.copy_(x)
        size = HEADER + codec.arithmetic.row_bytes(len(x))
        outbox, inbox = (workspace.rows(size, rows, buffer.device) for rows in (1, transport.size))
        yield transport.all_gather(inbox, outbox, number)
        workspace.give_rows(outbox, inbox)

    return overlapped([part(i, x) for i, x in enumerate(buffer.split(MESSAGE))], limit=2)


def _nothing() -> Steps[None]:
    yield from ()


def considered(scenario: Scenario) -> list[tuple[LocalWay, Simulated]]:
    """Ways that a plan weighs: each codec standing still for its exchange, and the finest whose
    hidden round is no long one."""
    found, hidden, schedule = [], list[LocalWay](), Hidden()
    for codec in CODECS:
        way = LocalWay(codec)
        if way.sparse and scenario.cluster.size > SPARSE_RANKS:
            continue
        simulated = simulate_local(scenario, way)
        found.append((way, simulated))
        stands = (simulated.seconds - simulated.compute_seconds) * way.every
        steps = schedule.needed(Pace(simulated.compute_seconds, stands, _outer(scenario)))
        hidden.append(LocalWay(codec, steps, steps))
    best = next(
        (way for way in hidden if way.every <= schedule.long),
        min(hidden, key=lambda way: way.every),
    )
    return [*found, (best, simulate_local(scenario, best))]
