"""io_uring by its three system calls through ctypes, without a package to install.

One thread does everything: it keeps ``depth`` requests in the kernel, and computes checksums of the
next transfers in the meantime. While the kernel is busy, neighboring transfers are combined into
one request, which saves calls, wake-ups and interrupts: 2 to 6 % of the step of an optimizer on
disk in four runs (nothing without computation at the same time). Several threads, which would pass
the interpreter's lock to each other for every transfer, would cost more than they gain.

Note: why not the ``liburing`` wheel. Its current release ends the process with SIGILL on calls from
its own help, and it was no faster. The ring is shared memory with a simple layout: two heads, two
tails, an array for each.

Order of memory accesses: a system call on the ring follows every index that is published here, and
precedes every index that is read.
"""

import ctypes
import mmap
import os
import struct
import sys
from collections import deque
from collections.abc import Iterable, Iterator

from commpress.errors import MissingPackage
from commpress.tiered_mem.engines import thread_priority
from commpress.tiered_mem.engines.transfer import Transfer
from commpress.work import started

SETUP, ENTER, REGISTER = 425, 426, 427  # the same on every architecture
READ_FIXED, WRITE_FIXED, READ, WRITE = 4, 5, 22, 23
GETEVENTS, SINGLE_MMAP, REGISTER_BUFFERS, SQES = 1, 1, 0, 0x10000000
# opcode, flags, priority, fd, offset, address, length, rw, user, buffer, ...
SQE = struct.Struct("<BBHiQQIIQHHI16x")
CQE = struct.Struct("<QiI")  # user, result, flags
LARGEST = 1 << 30  # bytes of one registered buffer, the kernel's limit
# largest combined request in bytes: with more, the cache would lose hashed bytes before they are
# written
REQUEST = 2 << 20
LOOK = 64  # transfers examined before their turn
BELL = 0  # user field of the read that waits for new transfers
Ended = list[tuple[Transfer, BaseException | None]]


class UringEngine:
    name = "io_uring"

    def __init__(self, depth: int = 4) -> None:
        if not sys.platform.startswith("linux"):
            raise MissingPackage("io_uring is part of Linux; use the engine 'threads' here")
        self.depth = depth
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._open_ring(1 << depth.bit_length())
        self._memory: tuple[int, int] | None = None  # address and length of the registered memory
        self._waiting: deque[Iterator[Transfer]] = deque()
        # the first waiting transfers, already examined
        self._line: deque[Transfer] = deque()
        self._run: list[Transfer] = []  # transfers of the next request
        self._under_way: dict[int, list[Transfer]] = {}
        self._count = 0
        self._closing = self._listening = False
        self._bell, self._rung = os.eventfd(0), mmap.mmap(-1, 8)
        self._thread = started("io", self._serve)

    def register(self, memory: memoryview) -> None:
        start, pieces = _address(memory), range(0, len(memory), LARGEST)
        vectors = b"".join(
            struct.pack("<QQ", start + at, min(LARGEST, len(memory) - at)) for at in pieces
        )
        try:
            self._call(REGISTER, self._ring, REGISTER_BUFFERS, vectors, len(pieces))
            self._memory = start, len(memory)
        # over the limit of locked memory: the kernel then pins pages for every transfer
        except OSError:
            self._memory = None

    def submit(self, transfers: Iterable[Transfer]) -> None:
        self._waiting.append(iter(transfers))
        if self._listening:
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        self._closing = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        self._rings.close()
        self._sqes.close()
        os.close(self._ring)
        os.close(self._bell)

    # ---------------------------------------------------------------- the thread

    def _serve(self) -> None:
        thread_priority.raise_own()
        self._listen()
        ended: Ended = []
        while True:
            ended += self._fill()
            while ended:  # while the kernel processes the next ones
                transfer, error = ended.pop(0)
                transfer.end(error)
                del transfer
            self._listening = len(self._under_way) < self.depth
            self._prepare()
            if self._closing and not self._next() and not self._under_way:
                return
            if not (self._listening and self._next()):
                self._call(ENTER, self._ring, 0, 0 if self._hash_ahead() else 1, GETEVENTS, None, 0)
            self._listening = False
            ended = self._completed()

    def _prepare(self) -> None:
        """Compute the checksums of the next write while the kernel is busy."""
        if not self._listening:
            _hash(self._next())

    def _hash_ahead(self) -> bool:
        """Compute the checksum of one later write while the kernel reads, so that the disk need not
        wait for it; return whether there was one. Not while it writes, because the cache would lose
        bytes that are hashed long before they are written."""
        if self._listening or any(run[0].write for run in self._under_way.values()):
            return False
        while len(self._line) < LOOK and (transfer := self._taken()):
            self._line.append(transfer)
        first = next((t for t in self._line if t.write and t.checksum is None), None)
        if first is not None:
            first.hash()
        return first is not None

    def _next(self) -> list[Transfer]:
        """Return the next request, which stays until ``_fill`` takes it: neighbors, if the kernel
        is busy; otherwise one transfer, to fill the kernel's queue soon."""
        if not self._run:
            room = REQUEST if len(self._under_way) >= max(self.depth - 1, 1) else 0
            while (transfer := self._look()) and (
                not self._run or _joins(self._run[-1], transfer, room)
            ):
                self._run.append(self._line.popleft())
                room -= len(transfer.view)
        return self._run

    def _look(self) -> Transfer | None:
        """Return the first waiting transfer without removing it."""
        if not self._line and (transfer := self._taken()):
            self._line.append(transfer)
        return self._line[0] if self._line else None

    def _taken(self) -> Transfer | None:
        while self._waiting:
            if transfer := next(self._waiting[0], None):
                return transfer
            self._waiting.popleft()
        return None

    def _fill(self) -> Ended:
        """Fill the kernel's queue; return transfers that it refused."""
        refused: Ended = []
        while len(self._under_way) < self.depth and (run := self._next()):
            self._run = []
            _hash(run)
            refused += self._begin(run)
        return refused

    def _completed(self) -> Ended:
        """Return ended transfers with their errors; short requests continue."""
        ended: Ended = []
        for user, result in list(self._entries()):
            if user == BELL:
                self._listen()
            else:
                ended += self._after(self._under_way.pop(user), result)
        return ended

    def _after(self, run: list[Transfer], result: int) -> Ended:
        """Handle the end of a request, whose transfers have ended or continue. After an error of
        several transfers each begins again by itself, so that only the affected ones fail."""
        if result < 0 and len(run) > 1:
            return [end for transfer in run for end in self._begin([transfer])]
        ended: Ended = []
        try:
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            while run:
                count = min(result, len(run[0].rest))
                if not run[0].advance(count):
                    return ended + self._begin(run)
                ended.append((run.pop(0), None))
                if not (result := result - count) and run:
                    return ended + self._begin(run)
        except OSError as error:
            return ended + [(transfer, error) for transfer in run]
        return ended

    # ---------------------------------------------------------------- the ring

    def _begin(self, run: list[Transfer]) -> Ended:
        """Submit one request for neighbors; return all of them with the error if the kernel refuses
        it."""
        first, nbytes = run[0], sum(len(transfer.rest) for transfer in run)
        address, opcode, index = _address(first.rest), WRITE if first.write else READ, 0
        if (
            self._memory
            and (at := address - self._memory[0]) >= 0
            and at + nbytes <= self._memory[1]
        ):
            index = at // LARGEST
            if (at + nbytes - 1) // LARGEST == index:
                opcode = WRITE_FIXED if first.write else READ_FIXED
        offset, user = first.offset + first.moved, self._count + 1
        try:
            self._push(
                SQE.pack(opcode, 0, 0, first.fd, offset, address, nbytes, 0, user, index, 0, 0)
            )
        except OSError as error:
            return [(transfer, error) for transfer in run]
        self._count, self._under_way[user] = user, run
        return []

    def _listen(self) -> None:
        """Let the kernel wait for ``submit``, too."""
        self._push(
            SQE.pack(
                READ, 0, 0, self._bell, 0, _address(memoryview(self._rung)), 8, 0, BELL, 0, 0, 0
            )
        )

    def _push(self, entry: bytes) -> None:
        tail = self._load(self._sq_tail)
        slot = tail & self._sq_mask
        self._sqes[64 * slot : 64 * slot + 64] = entry
        struct.pack_into("<I", self._rings, self._sq_array + 4 * slot, slot)
        struct.pack_into("<I", self._rings, self._sq_tail, (tail + 1) & 0xFFFFFFFF)
        try:
            while self._call(ENTER, self._ring, 1, 0, 0, None, 0) != 1:
                pass
        except OSError:
            struct.pack_into("<I", self._rings, self._sq_tail, tail)
            raise

    def _entries(self) -> Iterator[tuple[int, int]]:
        head, tail = self._load(self._cq_head), self._load(self._cq_tail)
        while head != tail:
            user, result, _ = CQE.unpack_from(
                self._rings, self._cqes + CQE.size * (head & self._cq_mask)
            )
            head = (head + 1) & 0xFFFFFFFF
            struct.pack_into("<I", self._rings, self._cq_head, head)
            yield user, result

    def _load(self, at: int) -> int:
        return int(struct.unpack_from("<I", self._rings, at)[0])

    def _open_ring(self, entries: int) -> None:
        parameters = ctypes.create_string_buffer(120)
        self._ring = self._call(SETUP, entries, parameters)
        found = struct.unpack("<30I", parameters.raw)
        (sq_entries, cq_entries), features = found[:2], found[5]
        sq, cq = found[10:20], found[20:30]
        if not features & SINGLE_MMAP:
            os.close(self._ring)
            raise MissingPackage(
                "this kernel's io_uring is too old (before 5.4); use the engine 'threads'"
            )
        self._rings = mmap.mmap(
            self._ring, max(sq[6] + 4 * sq_entries, cq[5] + CQE.size * cq_entries)
        )
        self._sqes = mmap.mmap(self._ring, 64 * sq_entries, offset=SQES)
        self._sq_tail, self._sq_mask, self._sq_array = sq[1], self._load(sq[2]), sq[6]
        self._cq_head, self._cq_tail, self._cqes = cq[0], cq[1], cq[5]
        self._cq_mask = self._load(cq[2])

    def _call(self, number: int, *arguments: object) -> int:
        """Make a system call, and repeat it when a signal interrupts it."""
        while True:
            result = self._libc.syscall(ctypes.c_long(number), *map(_as_c, arguments))
            if result >= 0:
                return int(result)
            if (failed := ctypes.get_errno()) != 4:  # EINTR
                raise OSError(failed, os.strerror(failed))


def _as_c(value: object) -> object:
    return ctypes.c_long(value) if isinstance(value, int) else value


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def _hash(run: list[Transfer]) -> None:
    for transfer in run:
        if transfer.write:
            transfer.hash()


def _joins(last: Transfer, transfer: Transfer, room: int) -> bool:
    """Return whether a transfer continues the last one of a request, in the file and in memory, and
    fits into its ``room``."""
    return (
        len(transfer.view) <= room
        and (transfer.fd, transfer.write, transfer.offset)
        == (last.fd, last.write, last.offset + len(last.view))
        and _address(transfer.view) == _address(last.view) + len(last.view)
    )
