"""The threads of a store, and whether it is still open."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from commpress.errors import StorageError


class Background:
    def __init__(self) -> None:
        self.closed = False
        self._pid = os.getpid()
        self._threads: set[threading.Thread] = set()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="store-ahead")

    def check(self) -> None:
        if self.closed:
            raise StorageError("the store is closed: open it again")
        if os.getpid() != self._pid:
            raise StorageError("the store was opened by the parent process: a fork has no part in it")

    def spawn(self, call: Callable[[], None]) -> None:
        """In a thread of its own: a pool whose threads all wait for each other would never go on."""

        def go() -> None:
            try:
                call()
            finally:
                self._threads.discard(threading.current_thread())

        self.check()
        thread = threading.Thread(target=go, name="store", daemon=True)
        self._threads.add(thread)
        thread.start()

    def in_order(self, call: Callable[[], None]) -> None:
        """After all that were given before: reads ahead begin in the order of need."""
        self._ahead.submit(call)

    def end(self) -> None:
        """Wait for what runs; ``closed`` is set, and who waits has been notified."""
        for thread in list(self._threads):
            thread.join()
        self._ahead.shutdown(cancel_futures=True)
