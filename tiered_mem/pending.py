"""Work of the store under way: ``wait()`` it in a thread, ``await`` it in asyncio."""

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """Either way of waiting gives the result or raises the error. Nobody needs to wait: the work goes on by itself."""

    def __init__(self) -> None:
        self.future: Future[T] = Future()

    def wait(self, timeout: float | None = None) -> T:
        return self.future.result(timeout)

    def done(self) -> bool:
        return self.future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self.future).__await__()

    def run(self, call: Callable[[], T]) -> None:
        """Do the work here."""
        try:
            self.finish(call())
        except BaseException as error:
            self.fail(error)

    def finish(self, result: T) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def caller() -> object:
    """Who borrows: the task where one runs, otherwise the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.get_ident()
