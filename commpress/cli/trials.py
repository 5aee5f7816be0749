"""One buffer reduced flat and by way of nodes again and again: which is faster at which size."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from commpress.cli import rounds
from commpress.cli.reduced import Reduced
from commpress.collectives.links import BufferTrial
from commpress.collectives.transports.loopback import Recorded
from commpress.collectives.transports.transport import Transport
from commpress.collectives.two_level import Hierarchy, reduce_routes, routes
from commpress.work import run as drive

TURN = 7  # calls back to back of one way before the next has its turn
WARM = 1  # turns that do not count: the first calls of a process are slow
SPAN, MOST = 2.0, 60  # seconds that short calls are repeated for, and turns at most: near a crossing a few say little
TRIED = ("none", "sign")  # the longest rows and the shortest
LADDER = tuple(1 << n for n in range(10, 21, 2))  # elements
ENOUGH = 0.3  # seconds of a call, from which larger buffers need no trial: bandwidth decides


class Race(Reduced):
    def __init__(self, numel: int, codec: str, transport: Transport, hierarchy: Hierarchy, sequence: int) -> None:
        super().__init__(numel, codec, transport, sequence)
        self.between = {index: Recorded(t) for index, t in hierarchy.between.items()}
        self.hierarchy = Hierarchy(hierarchy.topology, hierarchy.inside, self.between)
        self.routes = routes(self.spans, self.policy, self.hierarchy)
        self.route_feedbacks = [route.zeros() for route in self.routes]

    def run(self, others: Mapping[str, Callable[[], object]], iterations: int) -> tuple[dict[str, float], int]:
        """Median seconds of each way, "flat" and "levels" last, in turns; and how often "levels" was called for that."""
        ways = {**others, "flat": self.reduce, "levels": self.levels}
        once = rounds.medians(rounds.slowest({name: [self._time(way, 1)] for name, way in ways.items()}))
        calls = {name: max(min(int(1 / s), TURN), 1) for name, s in once.items()}  # in a turn: about a second, or TURN
        iterations = max(iterations, min(int(SPAN / sum(calls[name] * s for name, s in once.items())), MOST))
        timed = {name: partial(self._time, way, calls[name]) for name, way in ways.items()}
        took = rounds.medians(rounds.slowest(rounds.in_turns(timed, iterations, warm=WARM)))
        return took, 1 + (WARM + iterations) * calls["levels"]

    def _time(self, way: Callable[[], object], calls: int) -> float:
        self.fill()
        return rounds.together(way, calls)

    def levels(self) -> None:
        steps = reduce_routes(
            self.buffer, self.route_feedbacks, plan=self.routes, hierarchy=self.hierarchy, workspace=self.workspace,
            sequence=self.sequence,
        )  # fmt: skip
        self.finish(drive(steps), len(self.routes))

    def sent(self) -> int:
        """Bytes that this rank has sent to other nodes by way of nodes."""
        return sum(t.sent_bytes for t in self.between.values())


def trials(
    codec: str, transport: Transport, hierarchy: Hierarchy, iterations: int, sequence: int, *, ladder: Sequence[int] = LADDER
) -> tuple[list[BufferTrial], int]:
    """Both ways at the sizes of ``ladder``, and the next sequence number."""
    found: list[BufferTrial] = []
    for numel in ladder:
        race = Race(numel, codec, transport, hierarchy, sequence)
        took, _ = race.run({}, iterations)
        found.append(BufferTrial(numel, took["flat"], took["levels"]))
        sequence = race.sequence
        if took["flat"] > ENOUGH:
            break
    return found, sequence
