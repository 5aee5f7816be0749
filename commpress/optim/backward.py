"""Buckets of gradients that hooks fill in a backward and that are sent in order."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable


class BackwardBuckets:
    """Hooks of ``parameters``, a list for each bucket. A complete bucket is launched after those
    before it, the rest at the end of the backward, which waits for all.

    A subclass overrides ``place``, ``launch``, ``ended`` and ``accumulated``.
    """

    syncing = True  # False: backwards only accumulate
    at_end = 0  # number of last buckets that are launched at the end only

    def __init__(
        self, parameters: Sequence[Sequence[torch.Tensor]], *, hooked: bool = True
    ) -> None:
        self._counts = [len(each) for each in parameters]
        self._arrived: list[set[int]] = [set() for _ in parameters]
        self._next = 0  # bucket to be launched
        # reference to the callback at the end of the current backward
        self._ending: weakref.ref[Any] | None = None
        self._futures: list[torch.futures.Future[Any]] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(weakly(self._came, b, i))
            for b, each in enumerate(parameters if hooked else ())
            for i, parameter in enumerate(each)
        ]

    def place(self, b: int, i: int) -> None:
        """Copy the gradient of a parameter into its bucket, zeros if it has none."""
        raise NotImplementedError

    def launch(self, b: int) -> torch.futures.Future[Any]:
        """Begin to send a bucket."""
        raise NotImplementedError

    def ended(self) -> None:
        """Use the results of all buckets, at the end of a backward."""

    def accumulated(self, b: int, i: int) -> None:
        """Note a gradient that is not sent in this backward."""

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the next backward outside sends the sum."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def _came(self, b: int, i: int) -> None:
        if not self.syncing:
            self.accumulated(b, i)
            return
        self.drop_aborted()
        if self._ending is None:
            ending = partial(self.finish)
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)
        self.place(b, i)
        self._arrived[b].add(i)
        while self._next < len(self._counts) - self.at_end and (
            len(self._arrived[self._next]) == self._counts[self._next]
        ):
            self._launch()

    def _launch(self) -> None:
        self._next += 1
        self._futures.append(self.launch(self._next - 1))

    def drop_aborted(self) -> None:
        """Reset after a backward that ended with an error, in which case autograd frees the
        callback of its end."""
        if self._ending is not None and self._ending() is None:
            self._reset()

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets and wait for all."""
        for b in range(self._next, len(self._counts)):
            for i in range(self._counts[b]):
                if i not in self._arrived[b]:
                    self.place(b, i)
            self._launch()
        self._reset()
        self.ended()

    def _reset(self) -> None:
        self._ending = None
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()
        self._next = 0
        for arrived in self._arrived:
            arrived.clear()


def weakly(method: Callable[..., None], *given: Any) -> Callable[..., None]:
    """Return a hook that calls ``method`` with ``given`` while its owner lives: modules and
    parameters must not keep it alive."""
    reference = weakref.WeakMethod(method)

    def hook(*_: object) -> None:
        if (call := reference()) is not None:
            call(*given)

    return hook
