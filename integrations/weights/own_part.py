"""One rank's part of published weights: its copy of the last version, block by block."""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from commpress.errors import StateMismatch
from commpress.integrations.weights.held_weights import Tensors, local, published_type
from commpress.integrations.weights.replay import Rebuilder, hash_of
from commpress.integrations.weights.weight_layout import (
    NumberType,
    WeightLayout,
    WeightPiece,
    host_zeros,
    placed,
)
from commpress.kernels.cpu.exact import decode, encode
from commpress.kernels.exact_format import BLOCK, SAME, SPARSE, SPARSE_HEAD
from commpress.tiered_mem.store import TieredStore

AHEAD = 4  # blocks that a store begins to read before they are needed
FEW = 4  # where one of so many numbers changed or fewer, only these cross from a device


class _Block(NamedTuple):
    """A block of the part; ``copy``, the numbers of the last version, is empty if a store has
    it. ``beside``: the same where the weights are, if that is a device."""

    number: int
    pieces: list[WeightPiece]
    numbers: NumberType
    copy: torch.Tensor
    beside: torch.Tensor | None

    def parts(self, tensors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        return [tensors[piece.tensor][piece.first : piece.last] for piece in self.pieces]


class Compared(NamedTuple):
    """A block of the new version: its code, its hash, and how many numbers changed."""

    code: bytes
    hashed: int
    changed: int


@dataclass(eq=False)
class OwnPart:
    """The pieces of one rank in a layout. ``_tensors`` gives what the rank holds, when asked.

    Copies are in ``_store``, under names that begin with ``_prefix``, or else in memory; then
    weights of a device have another beside them and are compared there.
    """

    _layout: WeightLayout
    _rank: int
    _tensors: Callable[[], Tensors]
    _dtype: torch.dtype | None
    _store: TieredStore | None
    _prefix: str

    def __post_init__(self) -> None:
        self._blocks, current = list[_Block](), self._current()
        for number, pieces in enumerate(self._layout.blocks(self._rank)):
            numbers, device = self._layout.numbers(pieces[0]), current[pieces[0].tensor].device
            copy = host_zeros([sum(piece.numel for piece in pieces)], numbers.dtype)
            apart = self._store is None and is_device(device)
            beside = torch.zeros_like(copy, device=device) if apart else None
            if self._store is not None:
                self._store.put(f"{self._prefix}{number}", copy.view(torch.uint8))
                copy = copy[:0].clone()
            self._blocks.append(_Block(number, pieces, numbers, copy, beside))
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), "commpress-scan")
        self._scratch = threading.local()

    def close(self) -> None:
        self._pool.shutdown()
        if self._store is not None:
            for block in self._blocks:
                self._store.delete(f"{self._prefix}{block.number}")

    @contextmanager
    def _copy(self, block: _Block, *, write: bool) -> Iterator[np.ndarray]:
        """Its copy's numbers; ``write``: what was done to them stays."""
        if self._store is None:
            yield block.numbers.patterns(block.copy)
            return
        if (ahead := block.number + AHEAD) < len(self._blocks):
            self._store.prefetch(f"{self._prefix}{ahead}")
        with self._store.borrow(f"{self._prefix}{block.number}", write=write) as kept:
            yield kept.numpy().view(block.numbers.unsigned)

    def scan(self, *, first: bool) -> "list[Future[Compared]]":
        """Compare what the rank holds with its copy; it may change again when this returns, though
        blocks of a device are still to be coded. The first version is the copy from then on."""
        tensors, found = self._current(), list[Future[Compared]]()
        for block in self._blocks:
            # by this thread, on whose stream the weights were made
            fetched = None if block.beside is None else self._fetch(block, block.beside, tensors)
            found.append(self._pool.submit(self._compare, block, tensors, fetched, first))
        for block, each in zip(self._blocks, found, strict=True):
            if block.beside is None:
                each.result()
        return found

    def _compare(
        self,
        block: _Block,
        tensors: Mapping[int, torch.Tensor],
        fetched: tuple[np.ndarray | None, np.ndarray] | None,
        first: bool,
    ) -> Compared:
        at, new = fetched or (None, self._patterns(block, tensors))
        with self._copy(block, write=first) as copy:
            if at is not None:
                values, new = new, copy.copy()
                new[at] = values
            if first:
                copy[:] = new
            code = encode(copy, new, block.numbers.kind)
        changed = 0 if code[0] == SAME and not first else len(new)
        if code[0] == SPARSE:
            changed = SPARSE_HEAD.unpack_from(code)[2]
        return Compared(code, hash_of(new, self._rank, block.number), changed)

    def _fetch(
        self, block: _Block, beside: torch.Tensor, tensors: Mapping[int, torch.Tensor]
    ) -> tuple[np.ndarray | None, np.ndarray]:
        """Compared where it lies: the places of numbers that changed and their values, or, where
        many did, all values."""
        numbers = block.numbers
        new = torch.cat([part.to(beside) for part in block.parts(tensors)])
        at = (numbers.integers(new) != numbers.integers(beside)).nonzero().view(-1)
        beside.copy_(new)
        values, few = numbers.integers(beside), FEW * len(at) <= len(new)
        found = (values[at] if few else values).cpu().numpy().view(numbers.unsigned)
        return at.cpu().numpy() if few else None, found

    def advance(self, codes: Sequence[bytes]) -> None:
        """The copy becomes the version that the codes lead to."""
        for block, code in zip(self._blocks, codes, strict=True):
            if code[0] != SAME:
                with self._copy(block, write=True) as copy:
                    decode(code, copy, block.numbers.kind)

    def anchor_codes(self, codes: Sequence[bytes]) -> Iterator[bytes]:
        """Codes of that version by itself. Training may go on changing what the rank holds."""
        for block, code in zip(self._blocks, codes, strict=True):
            with self._copy(block, write=False) as copy:
                content = copy.copy()
            decode(code, content, block.numbers.kind)
            yield encode(None, content, block.numbers.kind)

    def fill(self, earlier: Rebuilder) -> None:
        """The copy becomes a version whose ranks held other parts.

        Tensor by tensor, so that no rank has more than one of them whole.
        """
        theirs, ours = defaultdict[str, list[Any]](list), defaultdict[int, list[Any]](list)
        for part, blocks in enumerate(earlier.blocks):
            for b, pieces in enumerate(blocks):
                for piece, at in placed(pieces):
                    theirs[earlier.layout.tensors[piece.tensor].name].append((part, b, piece, at))
        for block in self._blocks:
            for piece, at in placed(block.pieces):
                ours[piece.tensor].append((block, piece, at))
        for number, wanted in ours.items():
            described = self._layout.tensors[number]
            whole, words = described.zeros(), described.numbers.words
            rows = [piece.rows for _, piece, _ in wanted]
            for part, b, piece, at in theirs[described.name]:
                top, bottom = piece.rows
                if any(top <= last and first <= bottom for first, last in rows):
                    piece.write(earlier.rebuilt(part, b)[at], whole)
            for block, piece, at in wanted:
                with self._copy(block, write=True) as copy:
                    values = block.numbers.patterns(piece.read(whole))
                    copy[at.start * words : at.stop * words] = values
        for block in self._blocks:
            if block.beside is not None:
                block.beside.copy_(block.copy)

    def _current(self) -> dict[int, torch.Tensor]:
        """This rank's values of every tensor that it publishes, flat, by the tensor's number."""
        tensors, found = self._tensors(), {}
        for piece in self._layout.parts[self._rank]:
            described, is_now = self._layout.tensors[piece.tensor], "missing"
            if (tensor := tensors.get(described.name)) is not None:
                own, kind = local(tensor), published_type(described.name, tensor, self._dtype)
                found[piece.tensor] = own.contiguous().view(-1)
                now = described._replace(dtype=kind, shape=tuple(tensor.shape))
                is_now = f"{now}, {list(own.shape)} of it on this rank"
                if (now, own.shape) == (described, piece.size):
                    continue
            raise StateMismatch(
                f"{described.name!r} is {is_now}; it was {described}, {list(piece.size)} of it "
                "here: make a new Publisher for another model, or for one that is sharded anew"
            )
        for alias, name in self._layout.tied:
            if tensors.get(alias) is not tensors.get(name):
                what = f"{alias!r} and {name!r} were one tensor and are two"
                raise StateMismatch(f"{what}: make a new Publisher for another model")
        return found

    def _patterns(self, block: _Block, tensors: Mapping[int, torch.Tensor]) -> np.ndarray:
        """A block as it is published: the memory of the tensor itself, where that will do."""
        parts, dtype = block.parts(tensors), block.numbers.dtype
        if len(parts) == 1 and parts[0].is_cpu and parts[0].dtype == dtype:
            return block.numbers.patterns(parts[0])
        rooms = self._scratch.__dict__  # a fresh room each time would cost more than the copy
        if (room := rooms.get(str(dtype))) is None:
            room = rooms[str(dtype)] = host_zeros([BLOCK // block.numbers.words], dtype)
        for part, (_, at) in zip(parts, placed(block.pieces), strict=True):
            room[at].copy_(part)
        return block.numbers.patterns(room[: at.stop])


def is_device(device: torch.device) -> bool:
    """True if weights there are compared there."""
    return device.type != "cpu"
