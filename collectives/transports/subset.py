"""A transport among some ranks of another."""

from collections.abc import Callable, Mapping, Sequence

import torch

from commpress.collectives.frame import HEADER
from commpress.collectives.transports.rows import Rows, rows_of
from commpress.collectives.transports.transport import Transport
from commpress.work import Work


def part_of(transport: Transport, ranks: Sequence[int]) -> Transport | None:
    """A transport among some ranks: one of its own kind if it can, else over its connections. As ``Divisible.subset``."""
    if hasattr(transport, "subset"):
        return transport.subset(ranks)
    return Part(transport, tuple(sorted(ranks))) if transport.rank in ranks else None


class Part:
    """Some ranks of another transport, which need not know of it: rows go to them alone."""

    def __init__(self, inner: Transport, members: Sequence[int]) -> None:
        self.inner, self.members = inner, members
        self.rank, self.size, self.ordered = members.index(inner.rank), len(members), inner.ordered
        self.checks = inner.checks

    def abandon(self, reason: str) -> None:
        self.inner.abandon(reason)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self.exchange(rows_of(out), rows_of(inp), inp[self.rank, :HEADER].expand(self.size, -1), tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        return self.all_to_all(out, inp.expand(self.size, -1), tag)

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        came = self._spread(out.headers)
        work = self.inner.exchange(
            Rows(came, self._among(out.payloads)), Rows(self._spread(inp.headers), self._among(inp.payloads)),
            self._spread(wanted), tag,
        )  # fmt: skip
        return _PartWork(work, lambda: out.headers.copy_(came[list(self.members)]))

    def _among(self, payloads: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {self.members[r]: payload for r, payload in payloads.items()}

    def _spread(self, headers: torch.Tensor) -> torch.Tensor:
        every = headers.new_zeros(self.inner.size, HEADER)
        every[list(self.members)] = headers
        return every


class _PartWork:
    def __init__(self, work: Work, finish: Callable[[], object]) -> None:
        self.work, self.finish = work, finish

    def wait(self) -> None:
        self.work.wait()
        self.finish()
