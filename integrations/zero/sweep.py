"""The update of streamed parameters in a thread, while the next forward uses those that are done.

update     0   1   2   3
forward        0   1   2   3
"""

from collections.abc import Callable, Iterable
from threading import Condition, Thread


class Sweep:
    """An update of values in a store, by name, one after the other. ``update(done)`` runs in a
    thread and calls ``done(name)`` after each."""

    def __init__(
        self, names: Iterable[str], update: Callable[[Callable[[str], None]], None]
    ) -> None:
        self._left, self._changed = set(names), Condition()
        self._error: BaseException | None = None
        self._update = update
        self._thread = Thread(target=self._run, name="update")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._update(self._done)
        except BaseException as error:  # raised where a value is wanted
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _done(self, name: str) -> None:
        with self._changed:
            self._left.discard(name)
            self._changed.notify_all()

    def has(self, names: Iterable[str]) -> bool:
        """Return whether these values are up to date."""
        return self._left.isdisjoint(names)

    def wait(self, names: Iterable[str]) -> None:
        """Wait until these values are up to date; raise what has ended the update before."""
        with self._changed:
            self._changed.wait_for(lambda: self.has(names) or self._error is not None)
            if not self.has(names):
                assert self._error is not None
                raise self._error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def finish(self) -> None:
        """Wait for the end; raise what has ended the update early."""
        self.join()
        if self._error is not None:
            raise self._error
