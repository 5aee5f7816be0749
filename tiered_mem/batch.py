"""Transfers that belong together, such as the chunks of one block."""

import threading
from collections.abc import Callable

from commpress.errors import DiskFull


class Batch:
    """Checksums in the order of the transfers, and an error if one failed; ``over`` is called once, after the last."""

    def __init__(self, count: int, over: Callable[["Batch"], None]) -> None:
        self.checksums = [0] * count
        self.error: BaseException | None = None
        self._left, self._over, self._lock = count, over, threading.Lock()
        if not count:
            over(self)

    def add(self, index: int, checksum: int, error: BaseException | None) -> None:
        """Transfers end in any thread, in any order. A full disk is the error to tell, whatever else failed."""
        with self._lock:
            self.checksums[index] = checksum
            if error is not None and (self.error is None or isinstance(error, DiskFull)):
                self.error = error
            self._left -= 1
            last = not self._left
        if last:
            self._over(self)
