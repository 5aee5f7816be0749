"""Bytes moved between ranks: the protocol of all transports, and one among some ranks of another.

Every row starts with a header of ``HEADER`` bytes (``frame``). Tensors are uint8[size, row]; row r
goes to rank r or came from it; others are ``Rows``. ``tag`` numbers the operation: two operations
under way at once must not share one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from commpress.collectives.frame import HEADER, Rows, rows_of
from commpress.work import Work


@runtime_checkable
class Transport(Protocol):
    rank: int
    size: int
    ordered: bool  # collectives must be issued in the same order on every rank
    # payloads bear a checksum without being asked: they lie in host memory, where that costs little
    checks: bool

    def abandon(self, reason: str) -> None:
        """Use it no more, and let the peers know, as far as that is possible: what came is damaged,
        or this rank gives up."""

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        """out[r] := the row that rank r holds for this rank."""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        """out[r] := the one row of rank r."""

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        """Send the rows of ``inp``, receive those of ``out``; which ranks these are, both sides
        know.

        A header always arrives, its payload only if the header is ``wanted[r]``: ``verify_rows``
        says what differs.
        """


class Divisible(Transport, Protocol):
    def subset(self, ranks: Sequence[int]) -> Transport | None:
        """One of the same kind among some of these ranks, numbered in ascending order; None on the
        others.

        All ranks call it, in the same order. Two subsets under way at once between the same two
        ranks must not share tags.
        """


def part_of(transport: Transport, ranks: Sequence[int]) -> Transport | None:
    """A transport among some ranks: one of its own kind if it can, else over its connections. As
    ``Divisible.subset``."""
    if hasattr(transport, "subset"):
        return transport.subset(ranks)
    return Subset(transport, tuple(sorted(ranks))) if transport.rank in ranks else None


class ByRows:
    """All-to-all and all-gather by way of ``exchange``."""

    rank: int
    size: int
    exchange: Callable[[Rows, Rows, torch.Tensor, int], Work]

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        wanted = inp[self.rank, :HEADER].expand(self.size, -1)
        return self.exchange(rows_of(out), rows_of(inp), wanted, tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self.all_to_all(out, inp.expand(self.size, -1), tag)


class InFront:
    """A transport in front of another one."""

    inner: Transport
    rank: int
    size: int
    ordered: bool
    checks: bool

    def stand_for(self, inner: Transport) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.ordered, self.checks = inner.ordered, inner.checks

    def abandon(self, reason: str) -> None:
        self.inner.abandon(reason)


class Subset(ByRows, InFront):
    """Some ranks of another transport, which need not know of it: rows go to them alone."""

    def __init__(self, inner: Transport, members: Sequence[int]) -> None:
        self.stand_for(inner)
        self.rank, self.size, self.members = members.index(inner.rank), len(members), members

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        came = self._spread(out.headers)
        work = self.inner.exchange(
            Rows(came, self._among(out.payloads)),
            Rows(self._spread(inp.headers), self._among(inp.payloads)),
            self._spread(wanted),
            tag,
        )
        return _SubsetWork(work, lambda: out.headers.copy_(came[list(self.members)]))

    def _among(self, payloads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {self.members[r]: payload for r, payload in payloads.items()}

    def _spread(self, headers: torch.Tensor) -> torch.Tensor:
        every = headers.new_zeros(self.inner.size, HEADER)
        every[list(self.members)] = headers
        return every


@dataclass
class _SubsetWork:
    work: Work
    finish: Callable[[], object]

    def wait(self) -> None:
        self.work.wait()
        self.finish()
