"""Updates of streamed parameters in backward, each as soon as its gradient is whole.

backward   3   2   1   0
update         3   2   1   0
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from commpress.errors import InvalidArgument
from commpress.integrations.zero.update_chunk import AHEAD, UpdateChunk
from commpress.tiered_mem.blocks import Pending

LEAVING = 2  # updated chunks that are being written; then updates wait


class BackwardUpdates:
    """A thread that updates chunks one after the other.

    ``start`` is called before the first of a step; ``update(chunk, later)`` gets those that will
    follow if this step is like the last one, and returns the writes that it has begun. Backward
    waits while more than ``waiting`` chunks have not been updated.
    """

    def __init__(
        self,
        start: Callable[[], None],
        update: Callable[[UpdateChunk, Sequence[UpdateChunk]], list[Pending[None]]],
        waiting: int,
    ) -> None:
        self._start, self._update, self._waiting = start, update, waiting
        self._thread = ThreadPoolExecutor(1, "update")
        self._running: deque[Future[None]] = deque()
        self._leaving: deque[list[Pending[None]]] = deque()  # writes of updated chunks
        self._chunks: list[UpdateChunk] = []  # of this step
        self._before: list[UpdateChunk] = []  # of the last one
        self._error: BaseException | None = None

    @property
    def begun(self) -> bool:
        """True if a chunk was updated in this step."""
        return bool(self._chunks)

    def check(self) -> None:
        """Refuse a second backward in a step."""
        if self._chunks:
            self._refuse(self._chunks[0])

    def _refuse(self, chunk: UpdateChunk) -> NoReturn:
        raise InvalidArgument(
            f"{chunk.ranges[0].name!r} gets a second gradient before step, but "
            "gradients='backward' has updated it by the first one: call step after each backward, "
            "or pass the micro-batches to streamed.accumulate"
        )

    def add(self, chunk: UpdateChunk) -> None:
        if not self._chunks:
            self._start()
        if chunk in self._chunks:
            self._refuse(chunk)
        at = len(self._chunks)
        self._chunks.append(chunk)
        later = (
            self._before[at + 1 : at + 1 + AHEAD] if self._before[at : at + 1] == [chunk] else []
        )
        self._running.append(self._thread.submit(self._run, chunk, later))
        self._wait_for(self._waiting)

    def _run(self, chunk: UpdateChunk, later: Sequence[UpdateChunk]) -> None:
        self._leaving.append(self._update(chunk, later))
        self._settle(LEAVING)

    def _settle(self, left: int) -> None:
        while len(self._leaving) > left:
            for pending in self._leaving.popleft():
                pending.wait()

    def wait(self) -> None:
        """Wait for all updates; raise the error of one, each time."""
        if self._running or self._leaving:
            self._running.append(self._thread.submit(self._settle, 0))
        self._wait_for(0)

    def _wait_for(self, left: int) -> None:
        while len(self._running) > left:
            self._error = self._error or self._running[0].exception()
            self._running.popleft()
        if self._error is not None:
            raise self._error

    def end(self) -> set[UpdateChunk]:
        """End a step; return the chunks that it has updated in backward."""
        self.wait()
        self._before, self._chunks = self._chunks, []
        return set(self._before)

    def close(self) -> None:
        self._thread.shutdown()
