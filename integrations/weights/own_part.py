"""One rank's part of published weights: its copy of the last version, block by block."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.errors import StateMismatch
from commpress.integrations.weights.held_weights import Tensors, local
from commpress.integrations.weights.replay import Rebuilder, seed_of
from commpress.integrations.weights.weight_layout import (
    NUMBERS,
    BlockRun,
    NumberType,
    WeightLayout,
    give,
    rows_meet,
    take,
)
from commpress.kernels.cpu.exact import decode, encode
from commpress.kernels.cuda import exact_blocks
from commpress.kernels.exact_format import SAME, SPARSE, SPARSE_HEAD
from commpress.tiered_mem.store import TieredStore

AHEAD = 4  # blocks that a store begins to read before they are needed
BATCH = 32  # blocks that are compared in one launch


class _Block(NamedTuple):
    """A block of the part; ``copy``, the numbers of the last version, is empty if a store has
    it. ``seed`` is that of its hash."""

    place: int  # among the part's blocks
    stream: int
    number: int
    runs: list[BlockRun]
    copy: torch.Tensor
    numbers: NumberType
    seed: int


class Compared(NamedTuple):
    """A block of the new version: its code, its hash, and how many numbers changed."""

    code: bytes
    hashed: int
    changed: int


class OwnPart:
    """The streams of one rank in a layout. ``tensors`` gives what the rank holds, when asked.

    Copies are in ``store``, under names that begin with ``prefix``, or else beside the weights: in
    memory, or on their device, where the blocks are compared then.
    """

    def __init__(
        self,
        layout: WeightLayout,
        rank: int,
        tensors: Callable[[], Tensors],
        store: TieredStore | None = None,
        prefix: str = "",
    ) -> None:
        self._layout, self._rank, self._tensors = layout, rank, tensors
        self._store, self._prefix = store, prefix
        self._streams, self._blocks = layout.parts[rank], list[_Block]()
        self._beside = store is None and on_device(list(self._current().values()))
        device = next(iter(self._current().values())).device if self._beside else None
        for s, stream in enumerate(self._streams):
            numbers = stream.numbers
            for b, runs in enumerate(stream.blocks()):
                numel = runs[-1].at + runs[-1].last - runs[-1].first
                copy, place = (
                    torch.zeros(numel, dtype=numbers.dtype, device=device),
                    len(self._blocks),
                )
                if store is not None:
                    store.put(self._name(place), copy.view(torch.uint8))
                    copy = copy[:0].clone()
                self._blocks.append(_Block(place, s, b, runs, copy, numbers, seed_of(rank, s, b)))
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), "commpress-scan")
        self._scratch = threading.local()

    def close(self) -> None:
        self._pool.shutdown()
        if self._store is not None:
            for block in self._blocks:
                self._store.delete(self._name(block.place))

    def _name(self, place: int) -> str:
        return f"{self._prefix}{place}"

    @contextmanager
    def _copy(self, block: _Block, *, write: bool) -> Iterator[np.ndarray]:
        """Its copy's numbers; ``write``: what was done to them stays."""
        if self._store is None:
            held = block.copy.cpu()  # itself, if it is there
            yield block.numbers.patterns(held)
            if write and not block.copy.is_cpu:
                block.copy.copy_(held)
            return
        if (ahead := block.place + AHEAD) < len(self._blocks):
            self._store.prefetch(self._name(ahead))
        with self._store.borrow(self._name(block.place), write=write) as kept:
            yield kept.numpy().view(block.numbers.unsigned)

    def by_stream(self, values: Sequence[int]) -> list[np.ndarray]:
        """Numbers of all blocks, those of each stream by themselves."""
        found: list[list[int]] = [[] for _ in self._streams]
        for block, value in zip(self._blocks, values, strict=True):
            found[block.stream].append(value)
        return [np.array(each, np.uint64) for each in found]

    def scan(self, *, first: bool) -> list[Compared]:
        """Compare what the rank holds with its copy; the first version is the copy from then on."""
        tensors = self._current()

        def one(block: _Block) -> Compared:
            new = self._patterns(block.numbers, block.runs, tensors)
            with self._copy(block, write=first) as copy:
                if first:
                    copy[:] = new
                code = encode(copy, new, block.numbers.kind)
            hashed = checksum_of(new.data.cast("B"), block.seed)
            return Compared(code, hashed, len(new) if first else _changed(code, len(new)))

        if not self._beside or first:
            return list(self._pool.map(one, self._blocks))
        found = list[Compared]()
        for some in self._alike(self._blocks):
            large = [block for block in some if block.copy.nbytes >= exact_blocks.SHORTEST]
            there = dict(
                zip((each.place for each in large), self._there(large, tensors), strict=True)
            )
            found += [there.get(block.place) or one(block) for block in some]
        return found

    def _there(
        self, blocks: Sequence[_Block], tensors: Mapping[int, torch.Tensor]
    ) -> list[Compared | None]:
        """Compared on their device; None for one that changed too much."""
        if not blocks:
            return []
        new = [
            each.numbers.integers(_gathered(torch.empty_like(each.copy), each.runs, tensors))
            for each in blocks
        ]
        codes = exact_blocks.encode([each.numbers.integers(each.copy) for each in blocks], new)
        hashed = exact_blocks.hashes(new, [each.seed for each in blocks])
        return [
            None if code is None else Compared(code, h, _changed(code, len(values)))
            for code, h, values in zip(codes, hashed, new, strict=True)
        ]

    def _alike(self, blocks: Sequence[_Block]) -> Iterator[list[_Block]]:
        """So many blocks of a type of numbers as go in one launch."""
        for _, of_type in groupby(blocks, lambda block: block.stream):
            while some := list(islice(of_type, BATCH)):
                yield some

    def advance(self, codes: Sequence[bytes]) -> None:
        """The copy becomes the version that the codes lead to."""
        sparse = [b for b in self._blocks if self._beside and codes[b.place][0] == SPARSE]
        for some in self._alike(sparse):
            copies = [block.numbers.integers(block.copy) for block in some]
            exact_blocks.decode([codes[block.place] for block in some], copies)
        done = {block.place for block in sparse}
        for block, code in zip(self._blocks, codes, strict=True):
            if block.place in done or code[0] == SAME:
                continue
            with self._copy(block, write=True) as copy:
                decode(code, copy, block.numbers.kind)

    def anchor_codes(self, codes: Sequence[bytes]) -> Iterator[bytes]:
        """Codes of that version by itself. Training may go on changing what the rank holds."""
        for block, code in zip(self._blocks, codes, strict=True):
            kind = block.numbers.kind
            with self._copy(block, write=False) as copy:
                content = copy.copy()
            decode(code, content, kind)
            yield encode(None, content, kind)

    def fill(self, earlier: Rebuilder) -> None:
        """The copy becomes a version whose ranks held other parts.

        Tensor by tensor, so that no rank has more than one of them whole.
        """
        theirs: dict[str, list[tuple[int, int, int, BlockRun]]] = {}
        for part, s, b, runs in earlier.layout.blocks():
            for run in runs:
                name = earlier.layout.tensors[run.piece.tensor].name
                theirs.setdefault(name, []).append((part, s, b, run))
        ours: dict[int, list[tuple[_Block, BlockRun]]] = {}
        for block in self._blocks:
            for run in block.runs:
                ours.setdefault(run.piece.tensor, []).append((block, run))
        for number, wanted in sorted(ours.items()):
            described = self._layout.tensors[number]
            numbers = NUMBERS[described.dtype]
            whole = torch.zeros(described.shape, dtype=numbers.dtype)
            for part, s, b, run in theirs[described.name]:
                if any(rows_meet(whole, run, own) for _, own in wanted):
                    give(earlier.block(part, s, b), [run], {run.piece.tensor: whole})
            for block, run in wanted:
                values = torch.empty(run.last - run.first, dtype=numbers.dtype)
                take({number: whole}, [run._replace(at=0)], values)
                at = run.at * numbers.words
                with self._copy(block, write=True) as copy:
                    copy[at : at + len(values) * numbers.words] = numbers.patterns(values)

    def _current(self) -> dict[int, torch.Tensor]:
        """This rank's values of every tensor that it publishes, flat, by the tensor's number."""
        tensors, found = self._tensors(), {}
        for number in {piece.tensor for stream in self._streams for piece in stream.pieces}:
            described = self._layout.tensors[number]
            tensor = tensors.get(described.name)
            if tensor is None or tuple(tensor.shape) != described.shape:
                what = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise StateMismatch(
                    f"{described.name!r} is {what}, published before with {described.shape}: make "
                    "a new Publisher for another model"
                )
            found[number] = local(tensor).contiguous().view(-1)
        return found

    def _patterns(
        self, numbers: NumberType, runs: Sequence[BlockRun], tensors: Mapping[int, torch.Tensor]
    ) -> np.ndarray:
        """A block as it is published: the memory of the tensor itself, where that will do."""
        parts = [tensors[run.piece.tensor][run.first : run.last] for run in runs]
        if len(parts) == 1 and parts[0].is_cpu and parts[0].dtype == numbers.dtype:
            return numbers.patterns(parts[0])
        rooms = self._scratch.__dict__  # a fresh room each time would cost more than the copy
        if (room := rooms.get(str(numbers.dtype))) is None:
            room = rooms[str(numbers.dtype)] = torch.empty(numbers.block, dtype=numbers.dtype)
        return numbers.patterns(_gathered(room[: runs[-1].at + len(parts[-1])], runs, tensors))


def on_device(tensors: Sequence[torch.Tensor]) -> bool:
    """True if all of them are on one GPU, where kernels of CUDA can compare them."""
    return len({t.device for t in tensors}) == 1 and tensors[0].is_cuda


def _gathered(
    room: torch.Tensor, runs: Sequence[BlockRun], tensors: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    for run in runs:
        part = tensors[run.piece.tensor][run.first : run.last]
        room[run.at : run.at + len(part)].copy_(part)
    return room


def _changed(code: bytes, numel: int) -> int:
    """The numbers that a code changes."""
    if code[0] == SPARSE:
        return int(SPARSE_HEAD.unpack_from(code)[3])
    return 0 if code[0] == SAME else numel
