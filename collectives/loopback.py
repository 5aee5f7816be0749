"""All ranks in one process, and wrappers that record, break or delay any transport.

``simulate`` steps one generator per rank in lockstep: what it runs is the production code, bit for bit.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from commpress.collectives.frame import HEADER, same
from commpress.collectives.transport import Transport
from commpress.errors import PeerFailure
from commpress.work import Steps, Work

T = TypeVar("T")


class Loopback:
    """A switch between ``size`` ranks of this process; ``transport(rank)`` is one rank's end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted: dict[tuple[int, int], torch.Tensor] = {}

    def transport(self, rank: int) -> "LoopbackTransport":
        return LoopbackTransport(self, rank)

    def transports(self) -> list["LoopbackTransport"]:
        return [self.transport(r) for r in range(self.size)]


class LoopbackTransport:
    ordered = False

    def __init__(self, switch: Loopback, rank: int) -> None:
        self.switch, self.rank, self.size = switch, rank, switch.size

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self.switch.posted[self.rank, tag] = inp
        return _Delivery(self, out, inp, tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self.all_to_all(out, inp.expand(self.size, -1), tag)


class _Delivery:
    def __init__(self, transport: LoopbackTransport, out: torch.Tensor, inp: torch.Tensor, tag: int) -> None:
        self.transport, self.out, self.inp, self.tag = transport, out, inp, tag

    def wait(self) -> None:
        """Like Gloo: a header is always delivered, a payload only behind a header equal to one's own."""
        me, posted = self.transport.rank, self.transport.switch.posted
        silent = tuple(r for r in range(self.transport.size) if (r, self.tag) not in posted)
        if silent:
            raise PeerFailure(f"rank {me}: no message number {self.tag} from ranks {list(silent)}.", ranks=silent)
        for r in range(self.transport.size):
            row = posted[r, self.tag][me]
            self.out[r, :HEADER] = row[:HEADER]
            if same(self.inp[me, :HEADER].numpy(), row[:HEADER].numpy()):
                self.out[r, HEADER:] = row[HEADER:]


def simulate(ranks: Sequence[Steps[T]]) -> list[T]:
    """Step one algorithm per rank in lockstep, each to its next wait, and return all results."""
    waits: dict[int, Work] = {}
    results: dict[int, T] = {}
    running = dict(enumerate(ranks))
    while running:
        for r, steps in list(running.items()):
            try:
                waits[r] = next(steps)
            except StopIteration as stop:
                results[r] = stop.value
                del running[r]
        for r in running:
            waits[r].wait()
    return [results[r] for r in sorted(results)]


# ---------------------------------------------------------------- wrappers


@dataclass
class Recorded:
    """Counts what leaves this rank: messages and bytes, headers included, own row not."""

    inner: Transport
    messages: int = 0
    sent_bytes: int = 0
    operations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.size, self.ordered = self.inner.rank, self.inner.size, self.inner.ordered

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._count("all_to_all", inp)
        return self.inner.all_to_all(out, inp, tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._count("all_gather", inp)
        return self.inner.all_gather(out, inp, tag)

    def _count(self, operation: str, inp: torch.Tensor) -> None:
        self.messages += self.size - 1
        self.sent_bytes += (self.size - 1) * inp.shape[1]
        self.operations.append(operation)


class Faulty:
    """Works ``after`` times, then lets ``fault(rows)`` spoil what this rank sends, or raises if it is an error."""

    def __init__(self, inner: Transport, *, after: int, fault: Callable[[torch.Tensor], object] | Exception) -> None:
        self.inner, self.left, self.fault = inner, after, fault
        self.rank, self.size, self.ordered = inner.rank, inner.size, inner.ordered

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._maybe(inp)
        return self.inner.all_to_all(out, inp, tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._maybe(inp)
        return self.inner.all_gather(out, inp, tag)

    def _maybe(self, inp: torch.Tensor) -> None:
        self.left -= 1
        if self.left < 0:
            if isinstance(self.fault, Exception):
                raise self.fault
            self.fault(inp)


@dataclass
class Timed:
    """Adds up the seconds spent waiting for the wire."""

    inner: Transport
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.rank, self.size, self.ordered = self.inner.rank, self.inner.size, self.inner.ordered

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return _TimedWork(self, self.inner.all_to_all(out, inp, tag))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return _TimedWork(self, self.inner.all_gather(out, inp, tag))


class _TimedWork:
    def __init__(self, timed: Timed, work: Work) -> None:
        self.timed, self.work = timed, work

    def wait(self) -> None:
        start = time.perf_counter()
        try:
            self.work.wait()
        finally:
            self.timed.seconds += time.perf_counter() - start
