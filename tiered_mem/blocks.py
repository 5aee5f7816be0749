"""Blocks: tensors that lie side by side, move together and share chunks. One large tensor, or a
pack of small ones. The catalog holds all of them, and the one lock that guards them."""

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
    """Either way of waiting gives the result or raises the error. Nobody needs to wait: the work
    goes on by itself."""

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
    """Identity of whoever borrows: the task where one runs, otherwise the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.get_ident()


@dataclass(eq=False)
class Use:
    """Holders of one tensor: any number of readers, or one writer."""

    readers: Counter[object] = field(default_factory=Counter)
    writer: object = None

    def __bool__(self) -> bool:
        return bool(self.readers) or self.writer is not None

    def holders(self) -> set[object]:
        return set(self.readers) | ({self.writer} if self.writer is not None else set())


@dataclass(eq=False)
class Block:
    """Everything here is guarded by the store's lock, but for the bytes: those belong to whoever
    borrows or moves them."""

    number: int
    size: int = 0  # bytes in use
    capacity: int = 0  # bytes of the slot of a pack that is still being filled
    entries: dict[str, Entry] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()  # on disk; current unless dirty
    dirty: bool = False
    arena: Arena | None = None
    slot: Slot | None = None
    uses: dict[str, Use] = field(default_factory=dict)
    moving: Pending[None] | None = None  # being read, written or copied
    flushing: bool = False  # being written: may be read meanwhile
    leaving: bool = False  # give the memory back as soon as it is clean and unused
    frozen: bool = False  # a commit still needs the bytes as they are
    pinned: bool = False
    prefetched: bool = False  # read ahead and not used since
    failure: BaseException | None = None  # of the last write
    damage: Damaged | None = None  # of the bytes on disk
    # uses of the bytes on the device, in whatever streams, that may be under way
    events: list["torch.cuda.Event"] = field(default_factory=list)

    @property
    def used(self) -> bool:
        return any(self.uses.values())

    @property
    def written(self) -> bool:
        """Somebody may be changing the bytes."""
        return any(use.writer is not None for use in self.uses.values())

    @property
    def idle(self) -> bool:
        """Nobody uses it, moves it or needs it as it is."""
        return not (self.uses or self.moving or self.frozen)

    @property
    def live(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def row(self) -> ManifestRow:
        return ManifestRow(self.size, tuple(self.entries.values()), self.chunks)

    def mark(self, device: torch.device) -> None:
        """Remember that this thread's stream may still use the bytes."""
        if (stream := stream_of(device)) is not None:
            self.events = [event for event in self.events if not event.query()]
            self.events.append(stream.record_event())

    def follow(self, device: torch.device) -> None:
        """Have this thread's stream wait for those that use the bytes."""
        if (stream := stream_of(device)) is not None:
            for event in self.events:
                stream.wait_event(event)

    def settle(self) -> None:
        """Wait until the device is done with the bytes."""
        for event in self.events:
            event.synchronize()
        self.events.clear()


class Catalog:
    """Blocks by number, tensors by name. ``changed`` is the store's lock, and the condition on
    which everybody waits and that every change notifies. It is held whenever a method here is
    called, and never while bytes move."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.blocks: dict[int, Block] = {}
        self.names: dict[str, Block] = {}
        self.cutting = False  # a commit waits until nobody writes
        self._next = 1

    def new_block(self) -> Block:
        block = self.blocks[self._next] = Block(self._next)
        self._next += 1
        return block

    def renumber(self, block: Block, number: int) -> None:
        """A block takes the number of one that is gone."""
        del self.blocks[block.number]
        block.number, self.blocks[number] = number, block

    def block(self, name: str) -> Block:
        try:
            return self.names[name]
        except (KeyError, TypeError):
            raise InvalidArgument(
                f"no tensor {name!r:.200} in the store; it holds {len(self.names)}"
            ) from None

    def blocks_of(self, names: str | Iterable[str]) -> list[Block]:
        """The blocks of these tensors, each once."""
        return list(
            dict.fromkeys(
                self.block(name) for name in ([names] if isinstance(names, str) else names)
            )
        )

    def extents(self) -> set[Extent]:
        """Places of the current state on disk."""
        return {chunk.extent for block in self.blocks.values() for chunk in block.chunks}

    def barred(self, who: object) -> bool:
        """While a commit waits for writers to finish, only those who write already may write
        more."""
        return self.cutting and not any(
            use.writer == who for block in self.blocks.values() for use in block.uses.values()
        )

    def admit_writer(self) -> None:
        while self.barred(caller()):
            self.changed.wait()


def entry_of(name: str, tensor: torch.Tensor, start: int = 0) -> Entry:
    """Description of a tensor that lies at ``start``; refuses what cannot be stored."""
    if (
        not isinstance(name, str)
        or not name
        or len(name.encode(errors="surrogatepass")) > LONGEST_NAME
    ):
        raise InvalidArgument(
            f"name is {name!r:.100}, expected a text of 1 to {LONGEST_NAME} bytes"
        )
    if "\0" in name:
        raise InvalidArgument(f"name is {name!r:.100}, expected a text without the character 0")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise InvalidArgument(
            f"name {name!r} holds half a character (a surrogate), which no file can keep"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout != torch.strided or tensor.device.type == "meta":
        raise InvalidArgument(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}, expected "
            f"a dense one of {', '.join(DTYPES)}"
        )
    if not strides_fit(tensor.shape):
        raise InvalidArgument(
            f"{name!r} has shape {tuple(tensor.shape)}, whose strides are beyond 64 bits"
        )
    return Entry(name, start, tensor.numel() * tensor.element_size(), dtype, tuple(tensor.shape))
