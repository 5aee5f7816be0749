"""One pass over the same bytes of a disk again and again: by the tiered store, by its engine alone, and by others.

Where on a disk a file lies can change its speed by a tenth and more, so all of them use one stretch of one of the store's own
files. Changes of the store alternate between this stretch and another; the others run while the store keeps to that one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from commpress.cli.io_peers import COLD, FIO, HUGE, DeepSpeed, Stretch, run_fio
from commpress.errors import InvalidArgument
from commpress.tiered_mem import FileLayer, Options, TieredStore, engines
from commpress.tiered_mem.arena import Arena
from commpress.tiered_mem.engines.transfer import transfer_all

TENSOR = 16 << 20
TRIES = 6


@contextmanager
def passes(
    folder: Path, chunk: int, size: int, engine: str, depth: int, fio: str | None, deepspeed: bool
) -> Iterator[dict[str, Callable[[], float]]]:
    """Name → call that moves ``size`` bytes once and returns bytes per second."""
    settings = Options(chunk_bytes=chunk, segment_bytes=max(1 << 30, 2 * size))
    with TieredStore.open(folder, host=size + (4 << 20), engine=engine, depth=depth, options=settings) as store:
        stored = Stored(store, size, max(chunk, TENSOR))
        stretch = stored.stretch
        calls: dict[str, Callable[[], float]] = {"store write": stored.write, "store read": stored.read}
        with Alone(stretch, chunk, engine, depth) as alone, Alone(stretch, chunk, engine, depth, bare=True) as bare:
            others: dict[str, Callable[[str], float]] = {"engine": alone.rate, "bare": bare.rate}
            if fio:
                others |= {f"fio {kind}": partial(run_fio, fio, stretch, kind, chunk, depth) for kind in (*FIO, COLD, HUGE)}
            if deepspeed:
                others["deepspeed"] = DeepSpeed(stretch, chunk, depth).rate
            for name, call in others.items():
                for verb in ("write", "read"):
                    calls[f"{name} {verb}"] = partial(stored.aside, partial(call, verb))
            yield calls


class Stored:
    """Tensors of a store that are changed and written, evicted and read."""

    def __init__(self, store: TieredStore, size: int, tensor_bytes: int) -> None:
        self._store, self._size = store, size
        self._names = [f"t{i}" for i in range(size // tensor_bytes)]
        for name in self._names:
            store.put(name, torch.randint(0, 256, (tensor_bytes,), dtype=torch.uint8))
        for _ in range(TRIES):
            self._change()
            if (found := self._place()) and found.offset + size <= found.path.stat().st_size:
                self.stretch = found
                break
        else:
            raise InvalidArgument(f"--size is {size}: with a power of two the store's files have a stretch of that length")

    def write(self) -> float:
        self._settle(here=False)
        self._dirty()
        return rate(self._size, lambda: self._store.flush().wait())

    def read(self) -> float:
        self._settle(here=True)
        self._store.evict(self._names).wait()
        return rate(self._size, lambda: self._store.prefetch(self._names).wait())

    def aside(self, call: Callable[[], float]) -> float:
        """While the stretch is free for others."""
        self._settle(here=False)
        return call()

    def _settle(self, *, here: bool) -> None:
        for _ in range(TRIES):
            if (self._place() == self.stretch) == here:
                return
            self._change()
        raise InvalidArgument(f"--size is {self._size}: with a power of two the store writes to two places by turns")

    def _change(self) -> None:
        self._dirty()
        self._store.flush().wait()

    def _dirty(self) -> None:
        for name in self._names:
            with self._store.borrow(name):
                pass

    def _place(self) -> Stretch | None:
        """Where the tensors lie, if they lie side by side."""
        places = [place for name in self._names for place in self._store.places(name)]
        at = places[0].offset
        for place in places:
            if place.file != places[0].file or place.offset != at:
                return None
            at += place.nbytes
        return Stretch(Path(places[0].file), places[0].offset, self._size, self._store.direct)


class Alone:
    """An engine, checksums on, from as few buffers as fio has: one for each transfer at once. Or ``bare``: no checksums, and
    as much memory as the tensors have, which is in no cache: what memory and disk allow at that depth."""

    def __init__(self, stretch: Stretch, chunk: int, engine: str, depth: int, *, bare: bool = False) -> None:
        self._layer, self._stretch, self._hashed = FileLayer(), stretch, not bare
        folder = self._layer.open_folder(stretch.path.parent)
        try:
            self._file = self._layer.open(folder, stretch.path.name, direct=stretch.direct)
        finally:
            self._layer.close(folder)
        self._engine, self._buffers = engines.start(engine, self._layer, depth), Arena(stretch.size if bare else depth * chunk)
        self._buffers.bytes.random_(0, 256)
        self._engine.register(self._buffers.whole())
        memory = self._buffers.whole()
        ends = range(0, stretch.size, chunk)
        self._pieces = [(stretch.offset + at, memory[at % len(memory) :][:chunk]) for at in ends]

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._layer.close(self._file)

    def rate(self, verb: str) -> float:
        write = verb == "write"
        move = partial(transfer_all, self._engine, self._file, self._pieces, write=write, hashed=self._hashed)
        return rate(self._stretch.size, move)


def rate(size: int, call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return size / (perf_counter() - begin)
