"""Transfers that belong together, such as the pieces of the chunks of one block."""

import threading
from collections.abc import Callable

from commpress.errors import DiskFull


class Batch:
    """What became of them: the checksum of each chunk in order, and an error if one failed."""

    def __init__(self, left: int, over: Callable[["Batch"], None]) -> None:
        """``over`` is called once, when ``left`` transfers have ended."""
        self.checksums: list[int] = []
        self.error: BaseException | None = None
        self._left, self._over, self._lock = left, over, threading.Lock()
        if not left:
            over(self)

    def ended(self, error: BaseException | None) -> None:
        """Transfers end in any thread, in any order. A full disk is the error to tell, whatever else failed."""
        with self._lock:
            if error is not None and (self.error is None or isinstance(error, DiskFull)):
                self.error = error
            self._left -= 1
            last = not self._left
        if last:
            self._over(self)
