"""Rows moved by torch's own collectives, as over NCCL, whose headers are compared beforehand; and
Gloo's groups: their connections, to be cut; their threads, to be quieted; how long they must live.

Note: connections. Gloo offers no way to interrupt a call: one that waits for a peer which will
never send ends with the timeout, and destroying the group waits for it. A connection that is shut
down ends it at once, here and on the other side. They are found among the files of the process.

Note: threads. Gloo's thread takes the lock of a connection only if it is free, and asks again at
once while there is news. Whoever holds the lock writes to the connection, which wakes the peer's
Gloo thread. Where ranks share a core, that one takes the writer's place, and the writer's own spins
until the writer runs again: a time slice of 2 to 4 ms in an exchange that takes 0.2. Under
SCHED_BATCH a thread that wakes takes a core that is idle, else its turn.

Note: lifetime. The C++ reducer of DistributedDataParallel holds its group. Where it is the last to
do so, as after ``destroy_process_group()``, the end of the model waits for Gloo's threads without
letting go of the interpreter, while one of these needs the interpreter to let go of the tensors of
a collective: neither ever goes on. A group that Python holds is let go of without that lock.
"""

import atexit
import contextlib
import ctypes
import os
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from commpress.collectives.frame import HEADER, Rows, alike, same, unpack
from commpress.collectives.transports import interface
from commpress.collectives.transports.sockets import SocketTransport
from commpress.errors import CommunicationError, InvalidArgument, Mismatch, PeerFailure
from commpress.torch_private import abort, all_gather_single, gloo_at
from commpress.work import Work, started

LOOK = 0.05  # seconds between two looks at the peers while a device is waited for
GRACE = 5.0  # seconds that a device has to end what a peer that is gone had sent all of
_AGREEMENT = 1 << 62  # tags of headers that travel alone
# Linux; elsewhere nothing is found, and nothing done
_FILES, _TASKS = Path("/proc/self/fd"), Path("/proc/self/task")
_THREAD = "gloo_tcp_loop"
_POLL = 0.02  # seconds between two looks at who has died meanwhile
_kept: list[tuple[Any, Callable[[], bool]]] = []  # groups, and whether each is in use
T = TypeVar("T")


class TorchTransport:
    """Over a process group whose backend moves tensors where they lie.

    Note: torch's all-to-all hangs, or ends the process, where rows differ in size. So ranks compare
    their headers and sizes before it. An all-gather follows an all-to-all that agreed and needs
    none.

    ``control``: connections of the hosts. Headers then travel there, so that nobody waits for a
    device to know them, with all that lies on the host; and they say who is gone, which NCCL does
    not: it waits, and ends the process when its own time is over.
    """

    ordered = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: timedelta,
        connections: "Connections | None" = None,
        control: SocketTransport | None = None,
        device: torch.device | None = None,
    ) -> None:
        """``connections``: those that the group has over Gloo, to be cut when it is of no more
        use. ``device``: where NCCL's communicator is made now, in the thread and order that all
        ranks have in common, rather than by whichever message goes first."""
        self.group, self.timeout, self.control, self.device = group, timeout, control, device
        if device is not None:
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        self._agreements = 0
        self.rank, self.size = group.rank(), group.size()
        self.checks, self.failure = checks_asked(), ""
        self._connections = connections

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if control := self._by_host(inp):
            return control.all_to_all(out, inp, tag)
        if self.control is None:
            self._agree(inp[0, :HEADER], inp.shape[1])
        return _Checked(self, dist.all_to_all_single(out, inp, group=self.group, async_op=True))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._usable()
        if control := self._by_host(inp):
            return control.all_gather(out, inp, tag)
        return _Checked(self, all_gather_single(out, inp, group=self.group, async_op=True))

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        self._usable()
        payloads = (*out.payloads.values(), *inp.payloads.values())
        if self.control is not None and all(map(self._by_host, payloads)):
            return self.control.exchange(out, inp, wanted, tag)
        return _BatchedTransfer(self, out, inp, wanted, tag)

    def takes(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "cpu"

    def announce(self, header: torch.Tensor, length: int) -> None:
        self._usable()
        if self.control is not None:
            self._agree(header, length)

    def until(self, done: Callable[[], bool]) -> None:
        """Note: the host sleeps in between, since NCCL's own wait is the stream's, and a copy from
        the device that waits for it cannot be ended."""
        begin = look = time.monotonic()
        missed: float | None = None  # since when a peer is gone
        while not done():
            now = time.monotonic()
            if now >= look:
                lost = {} if self.control is None else self.control.lost()
                missed, look = (missed or now) if lost else None, now + LOOK
                late = now - begin > self.timeout.total_seconds()
                if late or (missed is not None and now - missed > GRACE):
                    raise self._gone(lost, now - begin)
            time.sleep(1e-4 if now - begin < LOOK else 1e-3)

    def _gone(self, lost: Mapping[int, str], seconds: float) -> PeerFailure:
        abort(self.group)
        who = [f"{self.peer(r)} {how}" for r, how in sorted(lost.items())]
        who = who or [f"a collective on a device did not end within {seconds:.1f} s"]
        self.failure = f"rank {self.rank}: " + "; ".join(who) + "."
        return PeerFailure(self.failure, ranks=tuple(sorted(lost)))

    def _by_host(self, tensor: torch.Tensor) -> SocketTransport | None:
        """The connections that carry ``tensor``, where the group itself has none for it."""
        return None if self.takes(tensor) else self.control

    def subset(self, ranks: Sequence[int]) -> "TorchTransport | None":
        """Over a process group of its own.

        Note: placeholders. torch names a group that only its members make after the number of
        groups they have, so who does not belong makes one too, of itself alone, to go on counting
        alike.
        """
        among = self.rank in ranks
        members = sorted(ranks) if among else [self.rank]
        group = dist.new_group(
            [dist.get_global_rank(self.group, member) for member in members],
            timeout=self.timeout,
            backend=dist.get_backend(self.group),
            use_local_synchronization=True,
        )
        if not among:
            return None
        control = None if self.control is None else self.control.subset(ranks)
        return TorchTransport(group, timeout=self.timeout, control=control, device=self.device)

    def peer(self, rank: int) -> str:
        """The name of a rank in messages: its number here, and globally where that differs."""
        world = dist.get_global_rank(self.group, rank)
        return f"rank {rank}" if world == rank else f"rank {rank} (global rank {world})"

    def abandon(self, reason: str) -> None:
        """Note: Gloo's connections are cut, so that peers know at once; NCCL's ranks are told by
        way of the host."""
        self.failure = reason
        if self._connections is not None:
            self._connections.cut()
        if self.control is not None:
            self.control.abandon(reason)
            abort(self.group)

    def _usable(self) -> None:
        if self.failure:
            raise CommunicationError(
                f"this transport failed before: {self.failure} Destroy the process group and "
                "build a new one."
            )

    def _agree(self, header: torch.Tensor, length: int) -> None:
        """Compare headers before torch's all-to-all, which hangs or ends the process where rows
        differ in size.

        One small collective. Not only for sizes never seen: a rank that has seen its size would
        enter the all-to-all while another is still here.
        """
        if self.size == 1:
            return
        said = bytearray(header.cpu().numpy().tobytes() + length.to_bytes(8, "little"))
        mine = torch.frombuffer(said, dtype=torch.uint8).view(1, -1)
        every = mine.new_empty(self.size, HEADER + 8)
        if self.control is not None:
            self._agreements += 1
            self.control.all_gather(every, mine, _AGREEMENT + self._agreements).wait()
        else:
            _Checked(self, all_gather_single(every, mine, group=self.group, async_op=True)).wait()
        rows = every.numpy()
        own = bytes(said)
        different = tuple(
            r
            for r, row in enumerate(map(bytes, rows))
            if not (same(own, row) and row[HEADER:] == own[HEADER:])
        )
        if different:
            peers = "; ".join(f"{self.peer(r)} sends {_row(rows[r])}" for r in different)
            raise Mismatch(
                f"rank {self.rank} sends {_row(rows[self.rank])}, but {peers}. Every rank must use "
                "the same codec, options and model, and call collectives in the same order.",
                ranks=different,
            )


@dataclass
class _Checked:
    """torch's own Work, its errors typed."""

    transport: TorchTransport
    work: dist.Work

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            self.transport.failure = f"a collective failed: {error}"
            raise PeerFailure(self.transport.failure) from error


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
        self.op, self.tensor, self.group, self.tag = call, tensor, group, tag
        self.peer = self.group_peer = peer

    def __new__(cls, *_: Any) -> "_Post":
        return object.__new__(cls)


@dataclass(eq=False)
class _BatchedTransfer:
    """Rows to and from peers by torch's batched calls, in two rounds.

    Rows of different length would hang or end the process.
    """

    transport: TorchTransport
    out: Rows
    inp: Rows
    wanted: torch.Tensor
    tag: int

    def __post_init__(self) -> None:
        transport, out, inp, tag = self.transport, self.out, self.inp, self.tag
        self.froms = [r for r in out.payloads if r != transport.rank]
        self.tos = [r for r in inp.payloads if r != transport.rank]
        self.headers: list[Work]
        if control := transport.control:  # headers are on the host
            heads = Rows(out.headers, _empty(self.froms)), Rows(inp.headers, _empty(self.tos))
            self.headers = [control.exchange(*heads, self.wanted, tag)]
        else:
            theirs = {r: out.headers[r] for r in self.froms}
            self.headers = self._post(theirs, {r: inp.headers[r] for r in self.tos}, tag % 0x4000)
        if transport.rank in inp.payloads:
            out.payloads[transport.rank].copy_(inp.payloads[transport.rank])
            out.headers[transport.rank] = inp.headers[transport.rank]

    def _post(
        self, out: Mapping[int, torch.Tensor], inp: Mapping[int, torch.Tensor], tag: int
    ) -> list[Work]:
        group = self.transport.group
        operations: list[dist.P2POp] = [
            _Post(call, tensor, group, tag, r)
            for call, rows in ((dist.irecv, out), (dist.isend, inp))
            for r, tensor in rows.items()
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return [_Checked(self.transport, work) for work in works]

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

    def _wait_all(self, works: list[Work]) -> None:
        for work in works:
            work.wait()


def _empty(ranks: Sequence[int]) -> dict[int, torch.Tensor]:
    return {r: torch.empty(0, dtype=torch.uint8) for r in ranks}


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


# ---------------------------------------------------------------- Gloo's groups


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Gloo's group of these ranks, collective. By itself it asks the name server for this host each
    time."""
    if interface.named():
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    address, _ = interface.own_address()
    return gloo_at(address, store, rank, size, timeout)


def watched(make: Callable[[], T], watch: Callable[[], object]) -> T:
    """The result of ``make``, which waits for other ranks in C++, where nothing can end it.
    ``watch`` is called meanwhile.

    If it raises, ``make`` is left to its own timeout in its thread, and what it makes is let go of
    there.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    started("commpress-connect", run)
    while not wait([made], _POLL).done:
        watch()
    return made.result()


# ---------------------------------------------------------------- connections


class Connections:
    """Connections of one group, by file descriptor and by inode, because a descriptor may belong to
    another file when it is cut."""

    def __init__(self, inodes: dict[int, int]) -> None:
        self._inodes = inodes

    def __len__(self) -> int:
        return len(self._inodes)

    def cut(self) -> None:
        for descriptor, inode in self._inodes.items():
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(descriptor)) as connection,
            ):
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(socket.SHUT_RDWR)


def connections_of(make: Callable[[], T], count: int) -> tuple[T, Connections]:
    """The result of ``make``, and the ``count`` connections that it opened.

    None of them if their number is another: then somebody else has opened some meanwhile, and these
    shall not be cut.
    """
    before = set(_sockets().items())
    made = make()
    opened = {
        fd: inode
        for fd, inode in _sockets().items()
        if (fd, inode) not in before and _connected(fd)
    }
    return made, Connections(opened if len(opened) == count else {})


def _sockets() -> dict[int, int]:
    """Inode by descriptor."""
    found = {}
    for name in os.listdir(_FILES) if _FILES.is_dir() else []:
        with contextlib.suppress(OSError):  # closed meanwhile, such as the listing's own
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def _connected(descriptor: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
        return bool(one.getpeername()) and one.family in (socket.AF_INET, socket.AF_INET6)
    return False


# ---------------------------------------------------------------- threads


def yielding(make: Callable[[], T]) -> T:
    """The result of ``make``, the threads that Gloo starts meanwhile under SCHED_BATCH."""
    before = _threads()
    made = make()
    for thread in _threads() - before:
        with contextlib.suppress(OSError):  # it has ended, or this process may not
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return made


def _threads() -> set[int]:
    found = set()
    for task in _TASKS.iterdir() if _TASKS.is_dir() else []:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == _THREAD:
                found.add(int(task.name))
    return found


# ---------------------------------------------------------------- lifetime


def outlive(group: Any, in_use: Callable[[], bool] | None = None) -> None:
    """Keep ``group`` to the end of the process, or until another one is kept after this one is not
    ``in_use`` any more."""
    gone: list[Any] = [pair for pair in _kept if pair[0] is not group and not pair[1]()]
    _kept[:] = [pair for pair in _kept if pair[0] is not group and pair not in gone]
    let_go(gone)
    _kept.append((group, in_use or (lambda: _registered(group))))
    _never_let_go()


def let_go(groups: list[Any]) -> None:
    """Empty the list in a thread of its own: the end of a group waits for calls that nothing can
    end before their time.

    The caller must hold none of them any more.
    """
    if groups:
        started("commpress-let-go", groups.clear)


def outliving() -> list[Any]:
    """The groups that are kept now."""
    return [group for group, _ in _kept]


def _registered(group: dist.ProcessGroup) -> bool:
    """True until it is destroyed."""
    try:
        return bool(dist.get_backend(group))
    except (ValueError, TypeError, AssertionError):
        return False


@cache
def _never_let_go() -> None:
    """Not at exit either, when modules are cleared in no order that could be relied on."""
    atexit.register(
        lambda: [ctypes.pythonapi.Py_IncRef(ctypes.py_object(group)) for group, _ in _kept]
    )


@cache
def linger_at_exit() -> None:
    """A thread of Gloo gives back the tensors of the last collective under the interpreter's lock:
    torch 2.13 aborts a process whose interpreter has begun to end by then, although all went
    well."""
    atexit.register(time.sleep, 0.02)
