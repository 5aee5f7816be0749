"""Rows moved through a process group of torch: point to point over Gloo, by torch's collectives
elsewhere (NCCL)."""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from commpress.collectives.frame import alike, same, unpack
from commpress.collectives.transports.gloo import Connections
from commpress.collectives.transports.rows import HEADER, Rows, rows_of
from commpress.collectives.transports.staged import HostBuffers, Staged
from commpress.errors import CommunicationError, InvalidArgument, Mismatch, PeerFailure
from commpress.torch_private import all_gather_single
from commpress.work import Work

# payloads of at most so many bytes travel in one message with their header: a copy costs less than
# a message
SMALL = 64 << 10
# of many ranks less, so that their short messages need at most ROOM bytes for one operation
SMALLEST, ROOM = 4096, 4 << 20
_SPARE = 8  # operations whose room is kept for later ones


class _ShortMessages(NamedTuple):
    """Room for a header and a short payload of every rank."""

    rows: tuple[torch.Tensor, ...]  # uint8[HEADER + small] for each rank
    table: np.ndarray  # the same memory: NumPy copies a few bytes in less time than torch


class TorchTransport:
    """Over a process group: point to point on Gloo, torch's collectives elsewhere (NCCL).

    Note: why point to point. Gloo's own all-to-all posts its sends first and reaches half of a
    shaped link; receives posted before sends reach over 0.9 of it. And Gloo ends the process when a
    message is longer than the buffer waiting for it, so an all-to-all sends its headers ahead as
    messages of their own: a peer that disagrees is seen before its payload, which has another tag,
    could be matched. Where a header is due, a receive has room for ``SMALL`` bytes more, so that a
    short payload comes with its header; a message may be shorter than its receive. An all-gather
    follows an all-to-all that agreed and needs none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: timedelta,
        point_to_point: bool | None = None,
        # of the group, ascending, if not all: possible where messages go point to point
        members: Sequence[int] = (),
        connections: Connections | None = None,  # of the group, to be cut when it is of no more use
    ) -> None:
        self.group, self.timeout = group, timeout
        self.members = tuple(members or range(group.size()))
        self.rank, self.size = self.members.index(group.rank()), len(self.members)
        self.point_to_point = plainly_gloo(group) if point_to_point is None else point_to_point
        self.ordered = not self.point_to_point
        self.checks = self.point_to_point or checks_asked()
        self._connections = connections
        self.failure: str | None = None
        self._free = HostBuffers()
        self._kept: list[Any] = []  # buffers of operations that a disagreement left unfinished
        self.small = max(min(SMALL, ROOM // self.size), SMALLEST)
        self._spare: deque[_ShortMessages] = deque(maxlen=_SPARE)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if self._by_host(inp):
            return Staged(self, self._free).all_to_all(out, inp, tag)
        if self.point_to_point:
            wanted = inp[self.rank, :HEADER].expand(self.size, -1)
            return _TorchTransfer(self, rows_of(out), rows_of(inp), wanted, tag)
        self._agree(inp)
        return _Checked(self, dist.all_to_all_single(out, inp, group=self.group, async_op=True))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if self._by_host(inp):
            return Staged(self, self._free).all_gather(out, inp, tag)
        if self.point_to_point:
            rows = dict.fromkeys(range(self.size), inp[0])
            return _TorchTransfer(self, Rows(out, dict(enumerate(out))), Rows(inp, rows), None, tag)
        return _Checked(self, all_gather_single(out, inp, group=self.group, async_op=True))

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        self._usable()
        if self._by_host(inp.headers):
            return Staged(self, self._free).exchange(out, inp, wanted, tag)
        return (_TorchTransfer if self.point_to_point else _BatchedTransfer)(
            self, out, inp, wanted, tag
        )

    def subset(self, ranks: Sequence[int]) -> "TorchTransport | None":
        """Point to point: over the connections that are there. Else a process group of its own.

        Note: placeholders. torch names a group that only its members make after the number of
        groups they have, so who does not belong makes one too, of itself alone, to go on counting
        alike.
        """
        among = self.rank in ranks
        members = sorted(self.members[r] for r in ranks)
        if self.point_to_point:
            if not among:
                return None
            return TorchTransport(
                self.group, timeout=self.timeout, members=members, connections=self._connections
            )
        world = [
            dist.get_global_rank(self.group, m)
            for m in (members if among else [self.members[self.rank]])
        ]
        backend = dist.get_backend(self.group)
        group = dist.new_group(
            world, timeout=self.timeout, backend=backend, use_local_synchronization=True
        )
        return TorchTransport(group, timeout=self.timeout, point_to_point=False) if among else None

    def take(self) -> _ShortMessages:
        """Room for one operation; ``give`` it back."""
        try:
            return self._spare.pop()
        except IndexError:
            table = torch.empty(self.size, HEADER + self.small, dtype=torch.uint8)
            return _ShortMessages(table.unbind(), table.numpy())

    @property
    def spare_bytes(self) -> int:
        """Room that lies ready for headers and short payloads."""
        return sum(messages.table.nbytes for messages in tuple(self._spare))

    def give(self, *messages: _ShortMessages) -> None:
        self._spare.extend(messages)

    def peer(self, rank: int) -> str:
        """The name of a rank in messages: its number here, and globally where that differs."""
        world = dist.get_global_rank(self.group, self.members[rank])
        return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"

    def fail(self, message: str, ranks: tuple[int, ...]) -> PeerFailure:
        self.failure = message
        return PeerFailure(message, ranks=ranks)

    def abandon(self, reason: str) -> None:
        """Note: Gloo's connections are cut, so that peers know at once; NCCL's ranks know when
        their time is over."""
        self.failure = reason
        if self._connections is not None:
            self._connections.cut()

    def _by_host(self, tensor: torch.Tensor) -> bool:
        """True on CUDA over Gloo, which sends memory of the host."""
        return self.point_to_point and tensor.device.type == "cuda"

    def _usable(self) -> None:
        if self.failure:
            raise CommunicationError(
                f"this transport failed before: {self.failure} Destroy the process group and "
                "build a new one."
            )

    def _agree(self, inp: torch.Tensor) -> None:
        """Compare headers before torch's all-to-all, which hangs or ends the process where rows
        differ in size.

        One small collective and one host synchronisation. Not only for sizes never seen: a rank
        that has seen its size would enter the all-to-all while another is still here.
        """
        mine = torch.zeros(1, HEADER + 8, dtype=torch.uint8, device=inp.device)
        mine[0, :HEADER] = inp[0, :HEADER]
        mine[0, HEADER:] = (
            torch.tensor([inp.shape[1]], dtype=torch.int64).view(torch.uint8).to(inp.device)
        )
        every = mine.new_empty(self.size, HEADER + 8)
        _Checked(self, all_gather_single(every, mine, group=self.group, async_op=True)).wait()
        rows = every.cpu().numpy()
        different = tuple(
            r
            for r, row in enumerate(rows)
            if not (
                same(rows[self.rank].tobytes(), row.tobytes())
                and (row[HEADER:] == rows[self.rank, HEADER:]).all()
            )
        )
        if different:
            peers = "; ".join(f"{self.peer(r)} sends {_row(rows[r])}" for r in different)
            raise Mismatch(
                f"rank {self.rank} sends {_row(rows[self.rank])}, but {peers}. Every rank must use "
                "the same codec, options and model, and call collectives in the same order.",
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


class _TorchTransfer:
    """Rows to and from peers, receives posted before sends, headers ahead of payloads if it is
    known what is wanted."""

    def __init__(
        self, transport: TorchTransport, out: Rows, inp: Rows, wanted: torch.Tensor | None, tag: int
    ) -> None:
        self.transport, self.out, self.inp, self.wanted, self.posted = (
            transport,
            out,
            inp,
            wanted,
            time.monotonic(),
        )
        group, rank, size = transport.group, transport.rank, transport.size
        froms = [r for r in ((rank - i) % size for i in range(1, size)) if r in out.payloads]
        tos = [r for r in ((rank + i) % size for i in range(1, size)) if r in inp.payloads]
        ahead = wanted is not None
        most = transport.small if ahead else 0
        self.headers, self.sent_headers = dict[int, dist.Work](), dict[int, dist.Work]()
        if ahead:
            self.incoming, self.outgoing = transport.take(), transport.take()
            self.headers = {
                r: self._post(group.recv, self.incoming.rows[r], r, _header_tag(tag)) for r in froms
            }
            self.outgoing.table[:, :HEADER] = inp.headers.numpy()
        self.payloads = self._post_payloads(group.recv, out, froms, tag, most)
        if ahead:
            self.sent_headers = {
                r: self._post(group.send, self._first_message(r), r, _header_tag(tag)) for r in tos
            }
        self.sent_payloads = self._post_payloads(group.send, inp, tos, tag, most)
        if rank in inp.payloads:
            out.payloads[rank].copy_(inp.payloads[rank])
            if ahead:
                out.headers[rank] = inp.headers[rank]

    def _post_payloads(
        self, call: Callable[..., dist.Work], rows: Rows, peers: list[int], tag: int, most: int
    ) -> dict[int, dist.Work]:
        parts = {r: rows.payloads[r] for r in peers}
        return {
            r: self._post(call, p, r, _payload_tag(tag, p.numel()))
            for r, p in parts.items()
            if p.numel() > most
        }

    def _first_message(self, rank: int) -> torch.Tensor:
        """The header, and the payload itself if it is short. It must live until it is gone."""
        payload, row = self.inp.payloads[rank], self.outgoing.rows[rank]
        length = payload.numel()
        if length > self.transport.small:
            return row[:HEADER]
        if length:
            row[HEADER : HEADER + length] = payload
        return row[: HEADER + length]

    def _post(
        self, call: Callable[..., dist.Work], row: torch.Tensor, peer: int, tag: int
    ) -> dist.Work:
        try:
            return call([row], self.transport.members[peer], tag)
        except RuntimeError as error:
            raise self._failure({peer: error}) from error

    def wait(self) -> None:
        """Until every row is here and every own row gone, or a peer's header differs: then
        ``verify`` names it."""
        deadline = time.monotonic() + self.transport.timeout.total_seconds()
        self._wait_all(self.headers, deadline)
        self._wait_all(self.sent_headers, deadline)
        if self.wanted is not None:
            ranks = list(self.headers)
            got = self.out.headers.numpy()
            got[ranks] = self.incoming.table[ranks, :HEADER]
            if not alike(self.wanted.numpy()[ranks], got[ranks]):
                # their buffers must outlive messages that nobody will take
                self.transport._kept.append(self)
                self.transport.failure = "the ranks disagreed and left messages behind."
                return
        for r in self.headers:
            length = self.out.payloads[r].numel()
            if 0 < length <= self.transport.small:
                self.out.payloads[r].copy_(self.incoming.rows[r][HEADER : HEADER + length])
        self._wait_all(self.payloads, deadline)
        self._wait_all(self.sent_payloads, deadline)
        if self.wanted is not None:
            self.transport.give(self.incoming, self.outgoing)

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
        """Name the ranks at fault.

        Note: closed or silent. A rank that waited in vain closes all its connections, and so looks
        dead to those who wait a little longer. So a connection that closes late does not excuse the
        ranks that sent nothing all the time. One that closes early was a death: then nobody else
        has had time to be called silent.
        """
        closed = [
            r for r, e in failed.items() if "closed by peer" in str(e) or "reset by peer" in str(e)
        ]
        silent = [r for r in failed if r not in closed]
        seconds = time.monotonic() - self.posted
        if closed and seconds < self.transport.timeout.total_seconds() / 2:
            silent = []
        says = [
            f"{self.transport.peer(r)} was silent for {seconds:.1f} s ({failed[r]})" for r in silent
        ]
        says += [
            f"{self.transport.peer(r)} closed its connection: it died, left or gave up waiting"
            for r in closed
        ]
        return self.transport.fail(
            f"rank {self.transport.rank}: " + "; ".join(says) + ".", tuple(silent or closed)
        )


class _Post(dist.P2POp):
    """One send or receive of a batch, in a group of which torch need not know the global ranks."""

    def __init__(
        self,
        call: Callable[..., Any],
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        tag: int,
        peer: int,
    ) -> None:
        self.op, self.tensor, self.group, self.tag, self.peer, self.group_peer = (
            call,
            tensor,
            group,
            tag,
            peer,
            peer,
        )

    def __new__(cls, *_: Any) -> "_Post":
        return object.__new__(cls)


class _BatchedTransfer:
    """The same with torch's batched calls, in two rounds: rows of different length would hang or
    end the process."""

    def __init__(
        self, transport: TorchTransport, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int
    ) -> None:
        self.transport, self.out, self.inp, self.wanted, self.tag = transport, out, inp, wanted, tag
        self.froms = [r for r in out.payloads if r != transport.rank]
        self.tos = [r for r in inp.payloads if r != transport.rank]
        headers = {r: out.headers[r] for r in self.froms}, {r: inp.headers[r] for r in self.tos}
        self.headers = self._post(*headers, _header_tag(tag))
        if transport.rank in inp.payloads:
            out.payloads[transport.rank].copy_(inp.payloads[transport.rank])
            out.headers[transport.rank] = inp.headers[transport.rank]

    def _post(
        self, out: Mapping[int, torch.Tensor], inp: Mapping[int, torch.Tensor], tag: int
    ) -> list[dist.Work]:
        group = self.transport.group
        operations: list[dist.P2POp] = [
            _Post(call, tensor, group, tag, self.transport.members[r])
            for call, rows in ((dist.irecv, out), (dist.isend, inp))
            for r, tensor in rows.items()
            if tensor.numel()
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        self._wait_all(self.headers)
        got, wanted = self.out.headers.cpu().numpy(), self.wanted.cpu().numpy()
        if not alike(wanted[self.froms], got[self.froms]):
            self.transport.failure = "the ranks disagreed and left messages behind."
            return
        payloads = (
            {r: self.out.payloads[r] for r in self.froms},
            {r: self.inp.payloads[r] for r in self.tos},
        )
        self._wait_all(self._post(*payloads, self.tag % 0x4000 | 0x4000))

    def _wait_all(self, works: list[dist.Work]) -> None:
        for work in works:
            _Checked(self.transport, work).wait()


def plainly_gloo(group: dist.ProcessGroup | None) -> bool:
    """True if all of it is Gloo, or "commpress" over nothing else; its name is such as
    cpu:gloo,cuda:nccl."""
    return all(
        name.endswith("gloo") for name in plain_backend(dist.get_backend_config(group)).split(",")
    )


def checks_asked() -> bool:
    """True if NCCL's payloads bear checksums too, of which the host takes a copy; the same on every
    rank."""
    asked = os.environ.get("COMMPRESS_CHECKSUM", "0")
    if asked not in ("0", "1"):
        raise InvalidArgument(
            f"COMMPRESS_CHECKSUM is {asked!r}, expected 0 or 1; the same on every rank"
        )
    return asked == "1"


def plain_backend(name: str) -> str:
    """The backend for a group of our own beside one called ``name``: what lies below "commpress",
    which checks every call."""
    if "commpress" not in name:
        return name
    return (
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    )


def _row(header: Any) -> str:
    """A rank's message in words, from its header and the bytes of its rows."""
    frame = unpack(header[:HEADER])
    return (
        f"{frame.describe() if frame else 'no header'} in rows of "
        f"{int(header[HEADER:].view('int64')[0])} bytes"
    )


def _header_tag(tag: int) -> int:
    return tag % 0x4000


def _payload_tag(tag: int, numel: int) -> int:
    """Depends on the size of the payload, so that rows of different size never meet."""
    return 0x40000000 | (tag % 0x4000) << 15 | (numel * 0x9E3779B1 >> 16) & 0x7FFF
