"""Moving bytes between ranks through torch.distributed. Knows rows and headers, not codecs.

Every row starts with a header of ``HEADER`` bytes (``frame``). Tensors are uint8[size, row]; row r goes to rank r or came
from it; others are ``Rows``. ``tag`` numbers the operation: two operations under way at once must not share one.
"""

import atexit
import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from commpress.collectives.frame import HEADER, alike, same, unpack
from commpress.collectives.transports.gloo_connections import Connections, connections_of
from commpress.collectives.transports.gloo_threads import yielding
from commpress.collectives.transports.group_lifetime import outlive
from commpress.collectives.transports.rows import Rows, rows_of
from commpress.collectives.transports.sockets import Mesh, SocketTransport
from commpress.errors import CommunicationError, InvalidArgument, Mismatch, PeerFailure
from commpress.torch_private import all_gather_single
from commpress.work import Work

SMALL = 64 << 10  # payloads of at most so many bytes travel in one message with their header: a copy costs less than a message
SMALLEST, PARCEL = 4096, 4 << 20  # of many ranks less, so that there is not more than PARCEL of such room for one operation
_PARCELS = 8  # kept for later operations


class _Parcels(NamedTuple):
    rows: tuple[torch.Tensor, ...]  # uint8[HEADER + small] for each rank
    table: np.ndarray  # the same memory: NumPy copies a few bytes in less time than torch


class Transport(Protocol):
    rank: int
    size: int
    ordered: bool  # collectives must be issued in the same order on every rank
    checks: bool  # payloads bear a checksum without being asked: they lie in host memory, where that costs little

    def abandon(self, reason: str) -> None:
        """Use it no more, and let the peers know, as far as that is possible: what came is damaged, or this rank gives up."""

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        """out[r] := the row that rank r holds for this rank."""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        """out[r] := the one row of rank r."""

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        """Send the rows of ``inp``, receive those of ``out``; which ranks these are, both sides know.

        A header always arrives, its payload only if the header is ``wanted[r]``: ``verify_rows`` says what differs.
        """


class Divisible(Transport, Protocol):
    def subset(self, ranks: Sequence[int]) -> Transport | None:
        """One of the same kind among some of these ranks, numbered in ascending order; None on the others.

        All ranks call it, in the same order. Two subsets under way at once between the same two ranks must not share tags.
        """


class TorchTransport:
    """Over a process group: point to point on Gloo, torch's collectives elsewhere (NCCL).

    Note: why point to point. Gloo's own all-to-all posts its sends first and reaches half of a shaped link; receives
    posted before sends reach over 0.9 of it. And Gloo ends the process when a message is longer than the buffer waiting
    for it, so an all-to-all sends its headers ahead as messages of their own: a peer that disagrees is seen before its
    payload, which has another tag, could be matched. Where a header is due, a receive has room for ``SMALL`` bytes more, so
    that a short payload comes with its header; a message may be shorter than its receive. An all-gather follows an
    all-to-all that agreed and needs none.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: timedelta,
        point_to_point: bool | None = None,
        members: Sequence[int] = (),  # of the group, ascending, if not all: possible where messages go point to point
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
        self._kept: list[Any] = []  # buffers of operations that a disagreement left unfinished
        self.small = max(min(SMALL, PARCEL // self.size), SMALLEST)
        self._parcels: deque[_Parcels] = deque(maxlen=_PARCELS)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if self.point_to_point:
            wanted = inp[self.rank, :HEADER].expand(self.size, -1)
            return _Exchange(self, rows_of(out), rows_of(inp), wanted, tag)
        self._agree(inp)
        return _Checked(self, dist.all_to_all_single(out, inp, group=self.group, async_op=True))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if self.point_to_point:
            rows = dict.fromkeys(range(self.size), inp[0])
            return _Exchange(self, Rows(out, dict(enumerate(out))), Rows(inp, rows), None, tag)
        return _Checked(self, all_gather_single(out, inp, group=self.group, async_op=True))

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        self._usable()
        return (_Exchange if self.point_to_point else _Batches)(self, out, inp, wanted, tag)

    def subset(self, ranks: Sequence[int]) -> "TorchTransport | None":
        """Point to point: over the connections that are there. Else a process group of its own.

        Note: placeholders. torch names a group that only its members make after the number of groups they have, so who does
        not belong makes one too, of itself alone, to go on counting alike.
        """
        among = self.rank in ranks
        members = sorted(self.members[r] for r in ranks)
        if self.point_to_point:
            if not among:
                return None
            return TorchTransport(self.group, timeout=self.timeout, members=members, connections=self._connections)
        world = [dist.get_global_rank(self.group, m) for m in (members if among else [self.members[self.rank]])]
        backend = dist.get_backend(self.group)
        group = dist.new_group(world, timeout=self.timeout, backend=backend, use_local_synchronization=True)
        return TorchTransport(group, timeout=self.timeout, point_to_point=False) if among else None

    def parcels(self) -> "_Parcels":
        """Room for a header and a short payload of every rank; ``give`` it back."""
        try:
            return self._parcels.pop()
        except IndexError:
            table = torch.empty(self.size, HEADER + self.small, dtype=torch.uint8)
            return _Parcels(table.unbind(), table.numpy())

    @property
    def spare_bytes(self) -> int:
        """What lies ready for headers and short payloads."""
        return sum(parcels.table.nbytes for parcels in tuple(self._parcels))

    def give(self, *parcels: "_Parcels") -> None:
        self._parcels.extend(parcels)

    def peer(self, rank: int) -> str:
        """How messages name a rank: its number here, and globally where that differs."""
        world = dist.get_global_rank(self.group, self.members[rank])
        return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"

    def fail(self, message: str, ranks: tuple[int, ...]) -> PeerFailure:
        self.failure = message
        return PeerFailure(message, ranks=ranks)

    def abandon(self, reason: str) -> None:
        """Note: Gloo's connections are cut, so that peers know at once; NCCL's ranks know when their time is over."""
        self.failure = reason
        if self._connections is not None:
            self._connections.cut()

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
        _Checked(self, all_gather_single(every, mine, group=self.group, async_op=True)).wait()
        rows = every.cpu().numpy()
        different = tuple(
            r
            for r, row in enumerate(rows)
            if not (same(rows[self.rank].tobytes(), row.tobytes()) and (row[HEADER:] == rows[self.rank, HEADER:]).all())
        )
        if different:
            peers = "; ".join(f"{self.peer(r)} sends {_row(rows[r])}" for r in different)
            raise Mismatch(
                f"rank {self.rank} sends {_row(rows[self.rank])}, but {peers}. Every rank must use the same codec, options "
                "and model, and call collectives in the same order.",
                ranks=different,
            )


@cache
def linger_at_exit() -> None:
    """A thread of Gloo gives back the tensors of the last collective under the interpreter's lock: torch 2.13 aborts a process
    whose interpreter has begun to end by then, although all went well."""
    atexit.register(time.sleep, 0.02)


def own_transport(process_group: dist.ProcessGroup | None = None, *, timeout: timedelta | None = None) -> Any:
    """A transport among the ranks of ``process_group``, so that its messages meet no others: over MPI if the group is.

    Else over a new group, of Gloo or NCCL below "commpress", which would check every message. Collective over those ranks. None
    where torch.distributed is not initialised: there is nobody to talk to. ``timeout``: of every wait; None: that of the group.
    """
    if not dist.is_initialized():
        return None
    from commpress.collectives.transports.same_kernels import require_same_kernels

    patience = timeout_of(process_group) if timeout is None else timeout
    communicator = getattr(process_group or dist.group.WORLD, "communicator", None)
    if communicator is not None:
        from commpress.collectives.transports.mpi import MpiTransport

        transport: Any = MpiTransport(communicator, timeout=patience)
        require_same_kernels(transport)
        return transport
    linger_at_exit()
    outlive(process_group or dist.group.WORLD)
    if plainly_gloo(process_group) and own_connections():
        transport = socket_transport(process_group, timeout=patience)
        require_same_kernels(transport)
        return transport
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    backend = plain_backend(dist.get_backend(process_group))
    make = partial(dist.new_group, ranks, timeout=patience, backend=backend, use_local_synchronization=True)
    group, connections = connections_of(partial(yielding, make), len(ranks) - 1)
    transport = TorchTransport(group, timeout=patience, connections=connections)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else "cpu"
    require_same_kernels(transport, device)
    return transport


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout that a group was made with; the default group's where it was made without one, as by a device mesh."""
    known = [found for each in (group, dist.group.WORLD) if each is not None and (found := _timeout(each)) is not None]
    usual = (default_pg_timeout, default_pg_nccl_timeout)
    return next((each for each in known if each not in usual), known[0] if known else default_pg_timeout)


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Note: torch tells it by way of the options of a group's backends only."""
    if isinstance(given := getattr(group, "timeout", None), timedelta):  # "commpress"
        return given
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):  # no backend for it, or one without options
            found: timedelta = group._get_backend(torch.device(device)).options._timeout
            return found
    return None


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
    """Rows to and from peers, receives posted before sends, headers ahead of payloads if it is known what is wanted."""

    def __init__(self, transport: TorchTransport, out: Rows, inp: Rows, wanted: torch.Tensor | None, tag: int) -> None:
        self.transport, self.out, self.inp, self.wanted, self.posted = transport, out, inp, wanted, time.monotonic()
        group, rank, size = transport.group, transport.rank, transport.size
        froms = [r for r in ((rank - i) % size for i in range(1, size)) if r in out.payloads]
        tos = [r for r in ((rank + i) % size for i in range(1, size)) if r in inp.payloads]
        ahead = wanted is not None
        most = transport.small if ahead else 0
        self.headers, self.sent_headers = dict[int, dist.Work](), dict[int, dist.Work]()
        if ahead:
            self.parcels, self.letters = transport.parcels(), transport.parcels()
            self.headers = {r: self._post(group.recv, self.parcels.rows[r], r, _header_tag(tag)) for r in froms}
            self.letters.table[:, :HEADER] = inp.headers.numpy()
        self.payloads = self._post_payloads(group.recv, out, froms, tag, most)
        if ahead:
            self.sent_headers = {r: self._post(group.send, self._letter(r), r, _header_tag(tag)) for r in tos}
        self.sent_payloads = self._post_payloads(group.send, inp, tos, tag, most)
        if rank in inp.payloads:
            out.payloads[rank].copy_(inp.payloads[rank])
            if ahead:
                out.headers[rank] = inp.headers[rank]

    def _post_payloads(
        self, call: Callable[..., dist.Work], rows: Rows, peers: list[int], tag: int, most: int
    ) -> dict[int, dist.Work]:
        parts = {r: rows.payloads[r] for r in peers}
        return {r: self._post(call, p, r, _payload_tag(tag, p.numel())) for r, p in parts.items() if p.numel() > most}

    def _letter(self, rank: int) -> torch.Tensor:
        """What goes ahead of the payload: the header, and the payload itself if it is short. It must live until it is gone."""
        payload, row = self.inp.payloads[rank], self.letters.rows[rank]
        length = payload.numel()
        if length > self.transport.small:
            return row[:HEADER]
        if length:
            row[HEADER : HEADER + length] = payload
        return row[: HEADER + length]

    def _post(self, call: Callable[..., dist.Work], row: torch.Tensor, peer: int, tag: int) -> dist.Work:
        try:
            return call([row], self.transport.members[peer], tag)
        except RuntimeError as error:
            raise self._failure({peer: error}) from error

    def wait(self) -> None:
        """Until every row is here and every own row gone, or a peer's header differs: then ``verify`` names it."""
        deadline = time.monotonic() + self.transport.timeout.total_seconds()
        self._wait_all(self.headers, deadline)
        self._wait_all(self.sent_headers, deadline)
        if self.wanted is not None:
            ranks = list(self.headers)
            got = self.out.headers.numpy()
            got[ranks] = self.parcels.table[ranks, :HEADER]
            if not alike(self.wanted.numpy()[ranks], got[ranks]):
                self.transport._kept.append(self)  # their buffers must outlive messages that nobody will take
                self.transport.failure = "the ranks disagreed and left messages behind."
                return
        for r in self.headers:
            length = self.out.payloads[r].numel()
            if 0 < length <= self.transport.small:
                self.out.payloads[r].copy_(self.parcels.rows[r][HEADER : HEADER + length])
        self._wait_all(self.payloads, deadline)
        self._wait_all(self.sent_payloads, deadline)
        if self.wanted is not None:
            self.transport.give(self.parcels, self.letters)

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

        Note: closed or silent. A rank that waited in vain closes all its connections, and so looks dead to those who
        wait a little longer. So a connection that closes late does not excuse the ranks that sent nothing all the time. One
        that closes early was a death: then nobody else has had time to be called silent.
        """
        closed = [r for r, e in failed.items() if "closed by peer" in str(e) or "reset by peer" in str(e)]
        silent = [r for r in failed if r not in closed]
        seconds = time.monotonic() - self.posted
        if closed and seconds < self.transport.timeout.total_seconds() / 2:
            silent = []
        says = [f"{self.transport.peer(r)} was silent for {seconds:.1f} s ({failed[r]})" for r in silent]
        says += [f"{self.transport.peer(r)} closed its connection: it died, left or gave up waiting" for r in closed]
        return self.transport.fail(f"rank {self.transport.rank}: " + "; ".join(says) + ".", tuple(silent or closed))


class _Batches:
    """The same with torch's batched calls, in two rounds: rows of different length would hang or end the process."""

    def __init__(self, transport: TorchTransport, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> None:
        self.transport, self.out, self.inp, self.wanted, self.tag = transport, out, inp, wanted, tag
        self.froms = [r for r in out.payloads if r != transport.rank]
        self.tos = [r for r in inp.payloads if r != transport.rank]
        headers = {r: out.headers[r] for r in self.froms}, {r: inp.headers[r] for r in self.tos}
        self.headers = self._post(*headers, _header_tag(tag))
        if transport.rank in inp.payloads:
            out.payloads[transport.rank].copy_(inp.payloads[transport.rank])
            out.headers[transport.rank] = inp.headers[transport.rank]

    def _post(self, out: Mapping[int, torch.Tensor], inp: Mapping[int, torch.Tensor], tag: int) -> list[dist.Work]:
        group = self.transport.group
        operations = [
            dist.P2POp(call, tensor, group=group, tag=tag, group_peer=self.transport.members[r])
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
        payloads = {r: self.out.payloads[r] for r in self.froms}, {r: self.inp.payloads[r] for r in self.tos}
        self._wait_all(self._post(*payloads, self.tag % 0x4000 | 0x4000))

    def _wait_all(self, works: list[dist.Work]) -> None:
        for work in works:
            _Checked(self.transport, work).wait()


def socket_transport(group: dist.ProcessGroup | None = None, *, timeout: timedelta) -> SocketTransport:
    """Over connections of our own among the ranks of a group, by which they tell each other where they are."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)

    def tell(here: bytes) -> list[bytes]:
        mine = torch.tensor(list(here), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(every, mine, group=group)
        return [bytes(row.tolist()) for row in every]

    return SocketTransport(Mesh(dist.get_rank(group), ranks, tell, timeout), timeout=timeout)


def plainly_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether all of it is Gloo, or "commpress" over nothing else; its name is such as cpu:gloo,cuda:nccl."""
    return all(name.endswith("gloo") for name in plain_backend(dist.get_backend_config(group)).split(","))


def own_connections() -> bool:
    """Whether rows of Gloo groups go over connections of our own, or through Gloo's messages (docs/transports.md)."""
    chosen = os.environ.get("COMMPRESS_TRANSPORT", "sockets" if hasattr(select, "epoll") else "gloo")
    if chosen not in ("sockets", "gloo"):
        raise InvalidArgument(f"COMMPRESS_TRANSPORT is {chosen!r}, expected sockets or gloo; the same on every rank")
    return chosen == "sockets"


def checks_asked() -> bool:
    """Whether NCCL's payloads bear checksums too, of which the host takes a copy; the same on every rank."""
    asked = os.environ.get("COMMPRESS_CHECKSUM", "0")
    if asked not in ("0", "1"):
        raise InvalidArgument(f"COMMPRESS_CHECKSUM is {asked!r}, expected 0 or 1; the same on every rank")
    return asked == "1"


def plain_backend(name: str) -> str:
    """The backend for a group of our own beside one called ``name``: what lies below "commpress", which checks every call."""
    if "commpress" not in name:
        return name
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def _row(header: Any) -> str:
    """What a rank is about to send, from its header and the bytes of its rows."""
    frame = unpack(header[:HEADER])
    return f"{frame.describe() if frame else 'no header'} in rows of {int(header[HEADER:].view('int64')[0])} bytes"


def _header_tag(tag: int) -> int:
    return tag % 0x4000


def _payload_tag(tag: int, numel: int) -> int:
    """Depends on the size of the payload, so that rows of different size never meet."""
    return 0x40000000 | (tag % 0x4000) << 15 | (numel * 0x9E3779B1 >> 16) & 0x7FFF
