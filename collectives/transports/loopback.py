"""All ranks in one process.

``simulate`` steps one generator per rank in lockstep: what it runs is the production code, bit for
bit.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from commpress.collectives.frame import Rows, same
from commpress.collectives.transports.transport import ByRows
from commpress.errors import PeerFailure
from commpress.work import Steps, Work

T = TypeVar("T")


class Loopback:
    """A switch between ``size`` ranks of this process; ``transport(rank)`` is one rank's end."""

    def __init__(self, size: int) -> None:
        self.size = size
        # by tag, sender and receiver
        self.sent: dict[tuple[int, int, int], deque[_Delivery]] = defaultdict(deque)
        self.wanted: dict[tuple[int, int, int], deque[_Delivery]] = defaultdict(deque)
        self.parts: dict[tuple[int, ...], Loopback] = {}

    def transport(self, rank: int) -> "LoopbackTransport":
        return LoopbackTransport(self, rank)

    def transports(self) -> list["LoopbackTransport"]:
        return [self.transport(r) for r in range(self.size)]


class LoopbackTransport(ByRows):
    ordered, checks = False, True

    def __init__(self, switch: Loopback, rank: int) -> None:
        self.switch, self.rank, self.size = switch, rank, switch.size

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        work = _Delivery(self, out, inp, wanted, tag)
        sent, received = self.switch.sent, self.switch.wanted
        ours = [(tag, self.rank, r) for r in inp.payloads]
        theirs = [(tag, r, self.rank) for r in out.payloads]
        for key in ours:
            sent[key].append(work)
        for key in theirs:
            received[key].append(work)
        for key in ours + theirs:
            # now and not in wait: who goes on may use its rows for something else
            if sent[key] and received[key]:
                received[key].popleft().deliver(sent[key].popleft())
        return work

    def abandon(self, reason: str) -> None:
        """All ranks are of one process: nobody needs to be told."""

    def subset(self, ranks: Sequence[int]) -> "LoopbackTransport | None":
        members = tuple(sorted(ranks))
        if self.rank not in members:
            return None
        part = self.switch.parts.setdefault(members, Loopback(len(members)))
        return part.transport(members.index(self.rank))


@dataclass(eq=False)
class _Delivery:
    transport: LoopbackTransport
    out: Rows
    inp: Rows
    wanted: torch.Tensor
    tag: int

    def __post_init__(self) -> None:
        self.missing, self.kept = set(self.out.payloads), set(self.inp.payloads)

    def wait(self) -> None:
        if silent := tuple(sorted(self.missing | self.kept)):
            me = self.transport.rank
            raise PeerFailure(
                f"rank {me}: no message number {self.tag} from ranks {list(silent)}.", ranks=silent
            )

    def deliver(self, sender: "_Delivery") -> None:
        """Like Gloo: a header is always delivered, a payload only behind a header that is
        wanted."""
        me, r = self.transport.rank, sender.transport.rank
        self.missing.discard(r)
        sender.kept.discard(me)
        header = sender.inp.headers[me]
        self.out.headers[r] = header
        if same(self.wanted[r].cpu().numpy().tobytes(), header.cpu().numpy().tobytes()):
            self.out.payloads[r].copy_(sender.inp.payloads[me])


def simulate(ranks: Sequence[Steps[T]]) -> list[T]:
    """Step one algorithm per rank in turn, each to its next wait, and return all results.

    A rank that waits in vain has its turn again after the others; when nobody can go on, the first
    failure is raised.
    """
    waits: dict[int, Work] = {}
    results: dict[int, T] = {}
    ready = dict(enumerate(ranks))
    while ready:
        for r, steps in ready.items():
            try:
                waits[r] = next(steps)
            except StopIteration as stop:
                results[r] = stop.value
        ready, failures = {}, []
        for r in sorted(waits):
            try:
                waits[r].wait()
                del waits[r]
                ready[r] = ranks[r]
            except PeerFailure as failure:
                failures.append(failure)
        if failures and not ready:
            raise failures[0]
    return [results[r] for r in sorted(results)]
