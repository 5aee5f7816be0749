"""Work of one call on a commpress group: waiting for agreement, issued, finished, or failed with a
typed error."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from commpress.integrations.process_group.records import Record
from commpress.work import future_on

if TYPE_CHECKING:
    from commpress.integrations.process_group.guard import Guard

_ZERO = timedelta(0)
SLICE = timedelta(seconds=0.5)
# torch's error for a wait that was too short, unlike Gloo's for its own timeout
_TOO_SHORT = "Operation timed out!"


class GroupWork(dist.Work):
    """Work of a call. ``issue`` starts it on the transport and returns the transport's work; the
    guard calls ``issue`` once all ranks agree."""

    def __init__(
        self,
        guard: "Guard | None",
        issue: Callable[["GroupWork"], Any],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        super().__init__()
        self.guard, self.issue, self.tensors = guard, issue, tensors
        self.settled, self.deadline = False, 0.0
        self.expected: dict[int, Record] = {}  # the record that each peer must send
        self.record: Record | None = None
        self.early = False  # issued before the peers agree
        self.sliced = False  # may be waited for again
        self.source = -1  # of a receive from any source
        self.inner: Any = None
        self.error: Exception | None = None
        self.has_future = False  # the future was handed out
        self._future: torch.futures.Future[Any] | None = None
        self._done = False

    def start(self) -> None:
        """Issue the call; called once, by the guard under its lock."""
        try:
            self.inner = self.issue(self)
        except Exception as error:  # for the caller, not for the thread that issues the call
            self.fail(error)
            return
        # NCCL returns none for a call that the caller's stream runs: what is later there waits
        self._done = self.inner is None
        self.issue = _issued
        self.settled = True
        if self._future is not None and self._done:
            self._future.set_result(list(self.tensors))
        elif self._future is not None:
            _chain(self.inner.get_future(), self._future)

    def fail(self, error: Exception) -> None:
        self.error, self.settled, self.issue = error, True, _issued
        if self._future is not None:
            self._future.set_exception(error)

    def describe(self) -> str:
        """Describe the call as this rank has made it."""
        record = self.record or next(iter(self.expected.values())).mirrored()
        return record.describe()

    # ------------------------------------------------------------ torch.distributed.Work

    def wait(self, timeout: timedelta = _ZERO) -> bool:
        if self.guard is not None and not self.settled:
            self.guard.settle(self, _deadline(timeout))
        if self.error is not None:
            raise self.error
        if not self._done:
            self._finish(timeout)
        return True

    def _finish(self, timeout: timedelta) -> None:
        """Wait for the data.

        Note: slices. A peer that fails after all have agreed may never issue the call, so if data
        is late, the guard reads the peers' records. The wait for a collective may be repeated after
        a timeout; the wait for a send or a receive may not, but it depends on one peer only.
        """
        slices = self.sliced and timeout == _ZERO
        while True:
            try:
                self.inner.wait(SLICE) if slices else self.inner.wait(
                    *([timeout] if timeout > _ZERO else [])
                )
            except Exception as error:
                if (
                    slices
                    and self.guard is not None
                    and _TOO_SHORT in str(error)
                    and self.guard.look()
                ):
                    continue
                typed = self.guard.explain(error, self) if self.guard is not None else error
                if typed is error:
                    raise
                self.error = typed
                raise typed from error
            self._done = True
            return

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done or self.error is not None or (self.settled and self.inner.is_completed())

    def is_success(self) -> bool:
        return self.error is None and (self._done or (self.settled and self.inner.is_success()))

    def exception(self) -> Any:
        return (
            self.error if self.error is not None or self.inner is None else self.inner.exception()
        )

    def result(self) -> list[torch.Tensor]:
        if self.inner is not None and self.error is None:
            return self.inner.result()
        return list(self.tensors)

    def source_rank(self) -> int:
        return self.source if self.source >= 0 else self.inner._source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        self.has_future = True
        if self._future is None:
            if self.settled and self.inner is not None and self.error is None:
                return self.inner.get_future()
            self._future = (
                future_on(self.tensors[0].device) if len(self.tensors) else torch.futures.Future()
            )
            if self.error is not None:
                self._future.set_exception(self.error)
            elif self._done:
                self._future.set_result(list(self.tensors))
        return self._future


@dataclass
class FutureWork:
    """The part of ``Work`` that ``GroupWork`` needs, over a future."""

    future: torch.futures.Future[Any]
    tensors: Sequence[torch.Tensor]

    def wait(self, timeout: timedelta = _ZERO) -> None:
        self.future.wait()

    def is_completed(self) -> bool:
        return self.future.done()

    is_success = is_completed

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return list(self.tensors)

    def get_future(self) -> torch.futures.Future[Any]:
        return self.future


def profiling() -> bool:
    """Return whether a profiler runs: it sees only calls issued by the thread that started it."""
    return torch.autograd._profiler_enabled()


def _issued(work: GroupWork) -> Any:
    raise AssertionError("a call is issued once")


def _deadline(timeout: timedelta) -> float | None:
    return time.monotonic() + timeout.total_seconds() if timeout > _ZERO else None


def _chain(source: torch.futures.Future[Any], target: torch.futures.Future[Any]) -> None:
    def pass_on(done: torch.futures.Future[Any]) -> None:
        try:
            target.set_result(done.value())
        except Exception as error:
            target.set_exception(error)

    source.add_done_callback(pass_on)
