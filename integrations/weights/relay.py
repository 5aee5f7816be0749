"""Versions of another server as a relay has them: each chunk is fetched once and kept in memory.

Readers that follow at the same pace find what the first of them asked for, the part of a file too
that is still on its way. Relays read from relays as readers do, so a tree needs no connections but
these: whoever is asked last asks the one above.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from time import monotonic

from commpress.integrations.weights.http_place import HttpPlace
from commpress.integrations.weights.places import ReadablePlace
from commpress.integrations.weights.replay import CHUNK
from commpress.integrations.weights.weight_records import HEAD_NAME, HeadRecord

KEPT = 1024  # chunks
Chunk = tuple[bytes, int]  # and the size of the whole file


class RelayPlace(ReadablePlace):
    """Files of ``above``. All but the head are written once, so a chunk is good for ever."""

    def __init__(self, above: HttpPlace) -> None:
        super().__init__()
        self._above, self._chunks = above, OrderedDict[tuple[str, int], Future[Chunk]]()
        self._changing, self._asking = threading.Lock(), threading.Lock()
        self._head, self._newest, self._run = b"", 0, ""

    def __str__(self) -> str:
        return str(self._above)

    def range(self, name: str, first: int, last: int) -> tuple[bytes, int]:
        """(bytes, size of the whole file)."""
        if name == HEAD_NAME:
            body = self._seen(self._above.head(0, 0))
            return body[first : last + 1], len(body)
        parts, total, begin = [], last + 1, first // CHUNK * CHUNK
        while begin <= last and begin < total:
            part, total = self._chunk(name, begin)
            parts.append(part)
            begin += CHUNK
        skipped = first % CHUNK
        return b"".join(parts)[skipped : skipped + last - first + 1], total

    def _chunk(self, name: str, begin: int) -> Chunk:
        """Ask for it once, however many wait for it; again where that went wrong."""
        with self._changing:
            found = self._chunks.get((name, begin))
            if mine := found is None:
                found = self._chunks[name, begin] = Future[Chunk]()
                while len(self._chunks) > KEPT:
                    self._chunks.popitem(last=False)
            else:
                self._chunks.move_to_end((name, begin))
        assert found is not None
        if mine:
            try:
                found.set_result(self._above.range(name, begin, begin + CHUNK - 1))
            except BaseException as error:
                with self._changing:
                    self._chunks.pop((name, begin), None)
                found.set_exception(error)
        return found.result()

    def head(self, after: int, seconds: float) -> bytes:
        """One of those that wait asks; the others learn it from that one."""
        ends = monotonic() + seconds
        if self._asking.acquire(timeout=seconds):
            try:
                if self._newest <= after:
                    self._seen(self._above.head(after, max(ends - monotonic(), 0.0)))
            finally:
                self._asking.release()
        return self._head or self._seen(self._above.head(0, 0))

    def _seen(self, body: bytes) -> bytes:
        head = HeadRecord.unpack(body)
        with self._changing:
            if head.run != self._run:  # its files have the names of another's
                self._chunks.clear()
            self._head, self._newest, self._run = body, head.newest, head.run
        return body
