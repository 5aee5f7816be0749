"""Blocks: contiguous tensors that move together and share chunks: one large tensor, or a pack of
small ones. The catalog has all of them, and the lock that guards them."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from commpress.errors import Damaged, InvalidArgument
from commpress.tiered_mem.arena import Arena, Slot
from commpress.tiered_mem.manifest import (
    DTYPES,
    LONGEST_NAME,
    Chunk,
    Entry,
    Extent,
    ManifestRow,
    strides_fit,
)
from commpress.work import stream_of

T = TypeVar("T")


class Pending(Generic[T]):
    """Result of background work. ``wait`` and ``await`` return it or raise its error; the work does
    not depend on them."""

    def __init__(self) -> None:
        self.future: Future[T] = Future()

    def wait(self, timeout: float | None = None) -> T:
        return self.future.result(timeout)

    def done(self) -> bool:
        return self.future.done()

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self.future).__await__()

    def run(self, call: Callable[[], T]) -> None:
        """Do the work in this thread."""
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
    """Return the identity of the borrower: the running task if there is one, otherwise the
    thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.get_ident()


@dataclass(eq=False)
class Use:
    """Borrowers of one tensor: any number of readers, or one writer."""

    readers: Counter[object] = field(default_factory=Counter)
    writer: object = None

    def __bool__(self) -> bool:
        return bool(self.readers) or self.writer is not None

    def holders(self) -> set[object]:
        return set(self.readers) | ({self.writer} if self.writer is not None else set())


@dataclass(eq=False)
class Block:
    """A block. The store's lock guards all its fields, but not the bytes, which belong to those
    that borrow or move them."""

    number: int
    size: int = 0  # bytes in use
    capacity: int = 0  # bytes of the slot of a pack that is still being filled
    entries: dict[str, Entry] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()  # on disk; current unless dirty
    dirty: bool = False
    arena: Arena | None = None
    slot: Slot | None = None
    uses: dict[str, Use] = field(default_factory=dict)
    borrows: int = 0  # so far: a read in advance that comes after the use is dropped
    moving: Pending[None] | None = None  # being read, written or copied
    flushing: bool = False  # being written, and may be read
    leaving: bool = False  # free the memory as soon as it is clean and unused
    frozen: bool = False  # a commit still needs the present bytes
    pinned: bool = False
    # asked for in advance and not used since: bytes that leave before it, if there are as many
    prefetched: int = 0
    failure: BaseException | None = None  # of the last write
    damage: Damaged | None = None  # of the bytes on disk
    # uses of the bytes on the device, in any stream, that may be running
    events: list["torch.cuda.Event"] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return any(self.uses.values())

    @property
    def written(self) -> bool:
        """True if a writer may be changing the bytes."""
        return any(use.writer is not None for use in self.uses.values())

    @property
    def idle(self) -> bool:
        """True if it is not used, not moved, and not needed unchanged."""
        return not (self.uses or self.moving or self.frozen)

    @property
    def live(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def row(self) -> ManifestRow:
        return ManifestRow(self.size, tuple(self.entries.values()), self.chunks)

    def mark(self, device: torch.device) -> None:
        """Record that this thread's stream may still use the bytes."""
        if (stream := stream_of(device)) is not None:
            self.events = [event for event in self.events if not event.query()]
            self.events.append(stream.record_event())

    def follow(self, device: torch.device) -> None:
        """Let this thread's stream wait for those that use the bytes."""
        if (stream := stream_of(device)) is not None:
            for event in self.events:
                stream.wait_event(event)

    def settle(self) -> None:
        """Wait until the device has finished with the bytes."""
        for event in self.events:
            event.synchronize()
        self.events.clear()


class Catalog:
    """Blocks by number and tensors by name. ``changed`` is the store's lock and its only condition,
    which every change notifies. Methods here need it; it is never held while bytes move."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.blocks: dict[int, Block] = {}
        self.names: dict[str, Block] = {}
        self.cutting = False  # a commit waits for writers
        self._next = 1

    def new_block(self) -> Block:
        block = self.blocks[self._next] = Block(self._next)
        self._next += 1
        return block

    def renumber(self, block: Block, number: int) -> None:
        """Give a block the number of a deleted one."""
        del self.blocks[block.number]
        block.number, self.blocks[number] = number, block

    def block(self, name: str) -> Block:
        try:
            return self.names[name]
        except (KeyError, TypeError):
            raise InvalidArgument(
                f"no tensor {name!r:.200} in the store, which has {len(self.names)} others: "
                "list(store) names them"
            ) from None

    def blocks_of(self, names: str | Iterable[str]) -> list[Block]:
        """Return the blocks of these tensors, each once."""
        return list(
            dict.fromkeys(
                self.block(name) for name in ([names] if isinstance(names, str) else names)
            )
        )

    def extents(self) -> set[Extent]:
        """Return the places of the current state on disk."""
        return {chunk.extent for block in self.blocks.values() for chunk in block.chunks}

    def barred(self, who: object) -> bool:
        """Return whether ``who`` may not begin to write: while a commit waits for writers, only
        present writers may write more."""
        return self.cutting and not any(
            use.writer == who for block in self.blocks.values() for use in block.uses.values()
        )

    def admit_writer(self) -> None:
        while self.barred(caller()):
            self.changed.wait()


def entry_of(name: str, tensor: torch.Tensor) -> Entry:
    """Describe a tensor; refuse tensors that cannot be stored."""
    if (
        not isinstance(name, str)
        or not name
        or len(name.encode(errors="surrogatepass")) > LONGEST_NAME
    ):
        raise InvalidArgument(f"name is {name!r:.100}, expected text of 1 to {LONGEST_NAME} bytes")
    if "\0" in name:
        raise InvalidArgument(f"name is {name!r:.100}, expected text without the character 0")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InvalidArgument(
            f"name is {name!r}, expected text without surrogates, which cannot be stored"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise InvalidArgument(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, expected "
            f"a dense one of {', '.join(DTYPES)}"
        )
    if not strides_fit(tensor.shape):
        raise InvalidArgument(
            f"{name!r} has shape {tuple(tensor.shape)}, expected one with strides of 64 bits"
        )
    return Entry(name, 0, tensor.nbytes, dtype, tuple(tensor.shape))
