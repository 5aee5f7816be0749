"""One buffer that is all-reduced again and again, as the DDP hook does it, flat or by way of
nodes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from commpress.cli import harness
from commpress.codecs import policy_of
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.collectives.levels import Levels
from commpress.collectives.measured_links import BufferTrial
from commpress.collectives.two_level import Hierarchy

CALLS = 7  # calls back to back of one side in a round
WARM = 1  # rounds that do not count: the first calls of a process are slow
# seconds that short calls are repeated for, and rounds at most: near a crossing a few say little
SPAN, MOST = 2.0, 60
TRIED = ("none", "sign")  # the longest rows and the shortest
LADDER = tuple(1 << n for n in range(10, 21, 2))  # elements
ENOUGH = 0.3  # seconds of a call, from which larger buffers need no trial: bandwidth decides


class Reduced:
    """Every call starts from the same input; residuals stay in between."""

    def __init__(self, numel: int, codec: str, channel: Channel) -> None:
        self.channel, self.codec = channel, codec
        self.input = torch.randn(numel, generator=torch.Generator().manual_seed(channel.rank))
        self.buffer = self.input.clone()
        self.flat = self.exchange()

    def exchange(self, levels: Levels | None = None) -> Exchange:
        channel, numel = self.channel, len(self.input)
        every = Exchanges(policy_of(self.codec), channel.size, channel.workspace, levels=levels)
        where = [Span("buffer", 0, numel)], [(numel,)]
        return every.of(("buffer",), lambda: where, self.input.device)

    def fill(self) -> None:
        self.buffer.copy_(self.input)

    def reduce(self, way: Exchange | None = None) -> None:
        way = way or self.flat
        call = self.channel.call(way.sequences)
        for outcome in self.channel.run(way.steps(self.channel, self.buffer, call)):
            outcome.commit()

    def timed(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one of several calls back to back, which all ranks begin together with the
        input."""
        self.fill()
        return harness.together(call, calls)

    def wrong(self) -> int:
        """Elements whose bits are not those of rank 0, over all ranks."""
        first = self.buffer.clone()
        dist.broadcast(first, 0)
        count = (first.view(torch.int32) != self.buffer.view(torch.int32)).sum()
        dist.all_reduce(count)
        return int(count)


class TwoLevel(Reduced):
    """The same buffer flat and by way of nodes."""

    def __init__(self, numel: int, codec: str, channel: Channel, hierarchy: Hierarchy) -> None:
        super().__init__(numel, codec, channel)
        channel.levels = self.hierarchy = Levels(hierarchy)
        self.levels = partial(self.reduce, self.exchange(self.hierarchy))

    def run(self, iterations: int, **others: Callable[[], object]) -> dict[str, float]:
        """Median seconds of each way, interleaved."""
        ways: dict[str, Callable[[], object]] = {
            **others,
            "flat": self.reduce,
            "levels": self.levels,
        }
        once = harness.medians({name: partial(self.timed, way, 1) for name, way in ways.items()}, 1)
        # in a round: about a second, or CALLS
        calls = {name: max(min(int(1 / s), CALLS), 1) for name, s in once.items()}
        iterations = max(
            iterations, min(int(SPAN / sum(calls[name] * s for name, s in once.items())), MOST)
        )
        timings = {name: partial(self.timed, way, calls[name]) for name, way in ways.items()}
        return harness.medians(timings, iterations, warm=WARM)


def trials(
    codec: str,
    channel: Channel,
    hierarchy: Hierarchy,
    iterations: int,
    *,
    ladder: Sequence[int] = LADDER,
) -> list[BufferTrial]:
    """Both ways at the sizes of ``ladder``, until one takes long."""
    found: list[BufferTrial] = []
    for numel in ladder:
        took = TwoLevel(numel, codec, channel, hierarchy).run(iterations)
        found.append(BufferTrial(numel, took["flat"], took["levels"]))
        if took["flat"] > ENOUGH:
            break
    return found
