"""Versions of another server as a relay has them: each chunk is fetched once and kept in memory.

Readers that follow at the same pace find what the first of them asked for, the part of a file too
that is still on its way. Relays read from relays as readers do, so a tree needs no connections but
these: whoever is asked last asks the one above.
"""

import threading
from collections import OrderedDict
from concurrent.futures import Future

from commpress.integrations.weights import weight_records as records
from commpress.integrations.weights.http_place import HttpPlace
from commpress.integrations.weights.replay import CHUNK

KEPT = 1024  # chunks
Chunk = tuple[bytes, int]  # and the size of the whole file


class RelayPlace(HttpPlace):
    """Files of a server above. All but the head are written once, so a chunk is good for ever."""

    def __init__(self, url: str, key: bytes | None) -> None:
        super().__init__(url, key)
        self._chunks = OrderedDict[tuple[str, int], Future[Chunk]]()
        self._changing, self._run = threading.Lock(), ""

    def range(self, name: str, first: int, most: int) -> Chunk:
        """Ask for it once, however many wait for it; again where that went wrong."""
        if name.startswith(records.HEAD_NAME):
            body, total = super().range(name, 0, records.LONGEST_HEAD)
            self.saw(body)
            return body[first : first + most], total
        with self._changing:
            if mine := (name, first) not in self._chunks:
                self._chunks[name, first] = Future[Chunk]()
            found = self._chunks[name, first]
            self._chunks.move_to_end((name, first))
            while len(self._chunks) > KEPT:
                self._chunks.popitem(last=False)
        if mine:
            try:
                found.set_result(super().range(name, first, CHUNK))
            except BaseException as error:
                with self._changing:
                    self._chunks.pop((name, first), None)
                found.set_exception(error)
        body, total = found.result()
        return body[:most], total

    def saw(self, head: bytes) -> None:
        super().saw(head)
        run = records.unpack(records.HeadRecord, head).run
        with self._changing:
            if run != self._run:  # its files have the names of another's
                self._chunks.clear()
            self._run = run
