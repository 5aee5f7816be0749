"""Moving bytes between ranks through torch.distributed. Knows rows and headers, not codecs.

Every row starts with a header of ``HEADER`` bytes (``frame``). Tensors are uint8[size, row]; row r goes to rank r or came
from it. ``tag`` numbers the operation: two operations under way at once must not share one.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from commpress.collectives.frame import HEADER, same, unpack
from commpress.errors import CommunicationError, Mismatch, PeerFailure
from commpress.work import Work

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


class Transport(Protocol):
    rank: int
    size: int
    ordered: bool  # collectives must be issued in the same order on every rank

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        """out[r] := the row that rank r holds for this rank."""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        """out[r] := the one row of rank r."""


class TorchTransport:
    """Over a process group: point to point on Gloo, torch's collectives elsewhere (NCCL).

    Note: why point to point. Gloo's own all-to-all posts its sends first and reaches half of a shaped link; receives
    posted before sends reach over 0.9 of it. And Gloo ends the process when a message is longer than the buffer waiting
    for it, so an all-to-all sends its headers ahead as messages of their own: a peer that disagrees is seen before its
    payload, which has another tag, could be matched. An all-gather follows an all-to-all that agreed and needs none.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout: timedelta, point_to_point: bool | None = None) -> None:
        self.group, self.timeout = group, timeout
        self.rank, self.size = group.rank(), group.size()
        backends = dist.get_backend_config(group).split(",")  # such as cpu:gloo,cuda:nccl
        only_gloo = all(backend.endswith("gloo") for backend in backends)
        self.point_to_point = only_gloo if point_to_point is None else point_to_point
        self.ordered = not self.point_to_point
        self.failure: str | None = None
        self._kept: list[Any] = []  # buffers of operations that a disagreement left unfinished

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if self.point_to_point:
            return _Exchange(self, out, inp, tag, ahead=True)
        self._agree(inp)
        return _Checked(self, dist.all_to_all_single(out, inp, group=self.group, async_op=True))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if self.point_to_point:
            return _Exchange(self, out, inp.expand(self.size, -1), tag, ahead=False)
        return _Checked(self, _gather(out, inp, group=self.group, async_op=True))

    def peer(self, rank: int) -> str:
        """How messages name a rank: its number in the group, and globally where that differs."""
        world = dist.get_global_rank(self.group, rank)
        return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"

    def fail(self, message: str, ranks: tuple[int, ...]) -> PeerFailure:
        self.failure = message
        return PeerFailure(message, ranks=ranks)

    def _usable(self) -> None:
        if self.failure:
            raise CommunicationError(
                f"this transport failed before: {self.failure} Destroy the process group and build a new one."
            )

    def _agree(self, inp: torch.Tensor) -> None:
        """Compare headers before torch's all-to-all, which hangs or ends the process where rows differ in size.

        One small collective and one host synchronisation. Not only for sizes never seen: a rank that has seen its size
        would enter the all-to-all while another is still here.
        """
        mine = torch.zeros(1, HEADER + 8, dtype=torch.uint8, device=inp.device)
        mine[0, :HEADER] = inp[0, :HEADER]
        mine[0, HEADER:] = torch.tensor([inp.shape[1]], dtype=torch.int64).view(torch.uint8).to(inp.device)
        every = mine.new_empty(self.size, HEADER + 8)
        _Checked(self, _gather(every, mine, group=self.group, async_op=True)).wait()
        rows = every.cpu().numpy()
        different = tuple(
            r
            for r, row in enumerate(rows)
            if not (same(rows[self.rank], row) and (row[HEADER:] == rows[self.rank, HEADER:]).all())
        )
        if different:
            peers = "; ".join(f"{self.peer(r)} sends {_row(rows[r])}" for r in different)
            raise Mismatch(
                f"rank {self.rank} sends {_row(rows[self.rank])}, but {peers}. Every rank must use the same codec, options "
                "and model, and call collectives in the same order.",
                ranks=different,
            )


class _Checked:
    """torch's own Work, its errors typed."""

    def __init__(self, transport: TorchTransport, work: dist.Work) -> None:
        self.transport, self.work = transport, work

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.transport.fail(f"a collective failed: {error}", ()) from error


class _Exchange:
    """Rows to and from every peer, receives posted before sends, headers ahead of payloads if asked for."""

    def __init__(
        self, transport: TorchTransport, out: torch.Tensor, inp: torch.Tensor, tag: int, *, ahead: bool
    ) -> None:
        self.transport, self.out, self.inp = transport, out, inp
        group, rank, size = transport.group, transport.rank, transport.size
        header_tag, payload_tag = _tags(tag, inp.shape[1])
        froms = [(rank - i) % size for i in range(1, size)]
        tos = [(rank + i) % size for i in range(1, size)]
        cut = HEADER if ahead else 0
        self.headers = {r: self._post(group.recv, out[r, :HEADER], r, header_tag) for r in froms if ahead}
        self.payloads = {r: self._post(group.recv, out[r, cut:], r, payload_tag) for r in froms}
        self.sent_headers = {r: self._post(group.send, inp[r, :HEADER], r, header_tag) for r in tos if ahead}
        self.sent_payloads = {r: self._post(group.send, inp[r, cut:], r, payload_tag) for r in tos}
        out[rank] = inp[rank]

    def _post(self, call: Callable[..., dist.Work], row: torch.Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return call([row], peer, tag)
        except RuntimeError as error:
            raise self._failure({peer: error}) from error

    def wait(self) -> None:
        """Until every row is here and every own row gone, or a peer's header differs: then ``verify`` names it."""
        deadline = time.monotonic() + self.transport.timeout.total_seconds()
        self._wait_all(self.headers, deadline)
        self._wait_all(self.sent_headers, deadline)
        mine = self.inp[self.transport.rank, :HEADER].numpy()
        if not all(same(mine, self.out[r, :HEADER].numpy()) for r in self.headers):
            self.transport._kept.append(self)  # their buffers must outlive messages that nobody will take
            self.transport.failure = "the ranks disagreed and left messages behind."
            return
        self._wait_all(self.payloads, deadline)
        self._wait_all(self.sent_payloads, deadline)

    def _wait_all(self, works: dict[int, dist.Work], deadline: float) -> None:
        failed: dict[int, RuntimeError] = {}
        for rank, work in works.items():
            left = max(deadline - time.monotonic(), 0.001) if not failed else 0.001
            try:
                work.wait(timedelta(seconds=left))
            except RuntimeError as error:
                failed[rank] = error
        if failed:
            raise self._failure(failed) from next(iter(failed.values()))

    def _failure(self, failed: dict[int, RuntimeError]) -> PeerFailure:
        closed = [r for r, e in failed.items() if "closed by peer" in str(e) or "reset by peer" in str(e)]
        silent = [r for r in failed if r not in closed]
        seconds = self.transport.timeout.total_seconds()
        says = [f"{self.transport.peer(r)} closed its connection: it died or left" for r in closed]
        if not closed:  # one time-out closes every pair, so after a death the others' errors say nothing
            says += [f"{self.transport.peer(r)} was silent for {seconds:g} s ({failed[r]})" for r in silent]
        ranks = tuple(closed or silent)
        return self.transport.fail(f"rank {self.transport.rank}: " + "; ".join(says) + ".", ranks)


def _row(header: Any) -> str:
    """What a rank is about to send, from its header and the bytes of its rows."""
    frame = unpack(header[:HEADER])
    return f"{frame.describe() if frame else 'no header'} in rows of {int(header[HEADER:].view('int64')[0])} bytes"


def _tags(tag: int, row: int) -> tuple[int, int]:
    """Tags of header and payload; the payload's depends on its size, so rows of different size never meet."""
    mixed = (row * 0x9E3779B1 >> 16) & 0x7FFF
    return tag % 0x4000, 0x40000000 | (tag % 0x4000) << 15 | mixed
