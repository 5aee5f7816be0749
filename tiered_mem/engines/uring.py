"""io_uring by its three system calls through ctypes: nothing to install.

Note: why not the ``liburing`` wheel. Its current release ends the process with SIGILL on calls that its own help shows,
and it was no faster. The ring is shared memory of a simple layout: two heads, two tails, an array each.

Order of memory: every index we publish is followed, and every index we read is preceded, by a system call on the ring.
"""

import ctypes
import mmap
import os
import struct
import sys
import threading
from collections.abc import Iterator

from commpress.errors import MissingPackage
from commpress.tiered_mem.engines.completion import QueueEngine
from commpress.tiered_mem.engines.engine import Transfer

SETUP, ENTER, REGISTER = 425, 426, 427  # the same on every architecture
NOP, READ_FIXED, WRITE_FIXED, READ, WRITE = 0, 4, 5, 22, 23
GETEVENTS, SINGLE_MMAP, REGISTER_BUFFERS, SQES = 1, 1, 0, 0x10000000
SQE = struct.Struct("<BBHiQQIIQHHI16x")  # opcode, flags, priority, fd, offset, address, length, rw, user, buffer, ...
CQE = struct.Struct("<QiI")  # user, result, flags
LARGEST = 1 << 30  # bytes of one registered buffer, the kernel's limit


class UringEngine(QueueEngine):
    name = "io_uring"

    def __init__(self, depth: int = 4) -> None:
        if not sys.platform.startswith("linux"):
            raise MissingPackage("io_uring is part of Linux; use the engine 'threads' here")
        super().__init__(depth)
        self._libc = ctypes.CDLL(None, use_errno=True)
        entries = 1 << (2 * depth).bit_length()
        parameters = ctypes.create_string_buffer(120)
        self._ring = self._call(SETUP, entries, parameters)
        found = struct.unpack("<30I", parameters.raw)
        (sq_entries, cq_entries), features = found[:2], found[5]
        sq, cq = found[10:20], found[20:30]
        if not features & SINGLE_MMAP:
            os.close(self._ring)
            raise MissingPackage("this kernel's io_uring is too old (before 5.4); use the engine 'threads'")
        size = max(sq[6] + 4 * sq_entries, cq[5] + CQE.size * cq_entries)
        self._rings = mmap.mmap(self._ring, size)
        self._sqes = mmap.mmap(self._ring, 64 * sq_entries, offset=SQES)
        self._sq_tail, self._sq_mask, self._sq_array = sq[1], self._load(sq[2]), sq[6]
        self._cq_head, self._cq_tail, self._cq_mask, self._cqes = cq[0], cq[1], self._load(cq[2]), cq[5]
        self._submission = threading.Lock()
        self._under_way: dict[int, Transfer] = {}
        self._count = 0
        self._memory: tuple[int, int] | None = None  # address and length of what is registered
        self.start()

    def register(self, memory: memoryview) -> None:
        start, pieces = _address(memory), range(0, len(memory), LARGEST)
        vectors = b"".join(struct.pack("<QQ", start + at, min(LARGEST, len(memory) - at)) for at in pieces)
        try:
            self._call(REGISTER, self._ring, REGISTER_BUFFERS, vectors, len(pieces))
            self._memory = start, len(memory)
        except OSError:  # a limit on locked memory: the kernel pins page by page for every transfer instead
            self._memory = None

    def close(self) -> None:
        super().close()
        self._rings.close()
        self._sqes.close()
        os.close(self._ring)

    def _enqueue(self, transfer: Transfer) -> None:
        rest = transfer.rest
        address, opcode, index = _address(rest), WRITE if transfer.write else READ, 0
        if self._memory and (at := address - self._memory[0]) >= 0 and at + len(rest) <= self._memory[1]:
            index = at // LARGEST
            if (at + len(rest) - 1) // LARGEST == index:
                opcode = WRITE_FIXED if transfer.write else READ_FIXED
        offset = transfer.offset + transfer.moved
        self._push(transfer, SQE.pack(opcode, 0, 0, transfer.fd, offset, address, len(rest), 0, 0, index, 0, 0))

    def _push(self, transfer: Transfer | None, entry: bytes) -> None:
        with self._submission:
            user = 0
            if transfer is not None:
                self._count += 1
                user = self._count
                self._under_way[user] = transfer
            tail = self._load(self._sq_tail)
            slot = tail & self._sq_mask
            self._sqes[64 * slot : 64 * slot + 64] = entry[:32] + struct.pack("<Q", user) + entry[40:]
            struct.pack_into("<I", self._rings, self._sq_array + 4 * slot, slot)
            struct.pack_into("<I", self._rings, self._sq_tail, (tail + 1) & 0xFFFFFFFF)
            try:
                while self._call(ENTER, self._ring, 1, 0, 0, None, 0) != 1:
                    pass
            except OSError:
                struct.pack_into("<I", self._rings, self._sq_tail, tail)
                self._under_way.pop(user, None)
                raise

    def _completed(self) -> list[tuple[Transfer, int]] | None:
        self._call(ENTER, self._ring, 0, 1, GETEVENTS, None, 0)
        ended, stop = [], False
        for user, result in self._entries():
            if user:
                ended.append((self._under_way.pop(user), result))
            else:
                stop = True
        return None if stop else ended

    def _entries(self) -> Iterator[tuple[int, int]]:
        head, tail = self._load(self._cq_head), self._load(self._cq_tail)
        while head != tail:
            user, result, _ = CQE.unpack_from(self._rings, self._cqes + CQE.size * (head & self._cq_mask))
            head = (head + 1) & 0xFFFFFFFF
            struct.pack_into("<I", self._rings, self._cq_head, head)
            yield user, result

    def _stop(self) -> None:
        self._push(None, SQE.pack(NOP, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0))

    def _load(self, at: int) -> int:
        return int(struct.unpack_from("<I", self._rings, at)[0])

    def _call(self, number: int, *arguments: object) -> int:
        """A system call, repeated when a signal interrupts it."""
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
