"""Parameters divided into chunks of about equal length, with master weights, moments and gradients
as tensors of a store.

Parameters are cut at multiples of ``ALIGN`` elements: see the note on vectors in ``bucket``. A
streamed parameter's chunks are the stored ranges of its group; such a range in float32 is itself
the master weight. For an optimizer that takes whole tensors nothing is cut, and each tensor is a
chunk.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.bucket import ALIGN, Numbered
from commpress.integrations.zero.streamed_group import StreamedGroup
from commpress.integrations.zero.wrapper import copied
from commpress.optim.checkpoint import options_of
from commpress.optim.layout import local
from commpress.tiered_mem import Pending, TieredStore
from commpress.work import stream_of

WEIGHT, GRADIENT = "weight", "gradient"
LEAVING = 2  # gradients being written before a wait
AHEAD = 2  # chunks that are read during the update of one


@dataclass(frozen=True, eq=False)
class ChunkRange:
    """Elements of one parameter, or of this rank's shard of it, in a chunk."""

    parameter: torch.Tensor
    name: str
    index: int  # of the parameter, among all
    group: int
    start: int  # first element in the parameter
    at: int  # first element in the chunk
    numel: int
    whole: bool = False  # updated in the parameter's shape

    def inside(self, chunk: torch.Tensor) -> torch.Tensor:
        return chunk[self.at : self.at + self.numel]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same elements of a tensor with the parameter's shape and sharding."""
        return local(whole).detach().view(-1)[self.start : self.start + self.numel]

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its elements in the shape in which they are updated."""
        return flat.view(self.parameter.shape) if self.whole else flat


@dataclass(eq=False)
class UpdateChunk:
    """Elements that are read, updated and written together."""

    number: int
    prefix: str
    ranges: list[ChunkRange] = field(default_factory=list)
    numel: int = 0
    values: str = ""  # name in the store of streamed parameters' values, in their dtype
    tier: str = "disk"  # place between steps
    master: str = ""  # name in the store of the float32 weights
    keys: list[str] = field(default_factory=list)  # moments in the store
    # the rest of the state, such as the number of steps, of ranges that had a gradient
    scalars: dict[ChunkRange, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.master = self.master or self.name(WEIGHT)

    def name(self, key: str) -> str:
        return f"{self.prefix}/{self.number:06d}/{key}"

    @property
    def on(self) -> Literal["host", "device"]:
        """Tier on which it is updated."""
        return "device" if self.tier == "device" else "host"

    @property
    def passes(self) -> bool:
        """True if it is on disk between steps."""
        return self.tier == "disk"

    @property
    def gaps(self) -> bool:
        return self.numel != sum(r.numel for r in self.ranges)

    @property
    def copied(self) -> bool:
        """True if streamed values are separate from the master weights, of which they are
        copies."""
        return bool(self.values) and self.values != self.master

    def names(self) -> list[str]:
        """Return the names of all its tensors except the gradient."""
        return [
            self.master,
            *([self.values] if self.copied else []),
            *(self.name(key) for key in self.keys),
        ]

    @contextmanager
    def borrowed(
        self, store: TieredStore, *, write: bool = True
    ) -> Iterator[dict[str, torch.Tensor]]:
        names = {WEIGHT: self.master} | {key: self.name(key) for key in self.keys}
        with ExitStack() as stack:
            yield {
                key: stack.enter_context(store.borrow(name, on=self.on, write=write))
                for key, name in names.items()
            }

    def step(
        self,
        make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        gradients: Sequence[torch.Tensor | None],
        held: dict[str, torch.Tensor],
        param_groups: Sequence[dict[str, Any]],
    ) -> dict[ChunkRange, dict[str, Any]]:
        """Take one step of an optimizer for this chunk alone, in place in the store's tensors;
        return the new states of the ranges that have a gradient. Others stay as they are.

        ``make`` makes the user's optimizer from parameter groups.
        """
        weights = [own.shaped(own.inside(held[WEIGHT])) for own in self.ranges]
        groups: dict[int, list[torch.Tensor]] = {}
        for own, weight in zip(self.ranges, weights, strict=True):
            groups.setdefault(own.group, []).append(weight)
        optimizer = make(
            [{**options_of(param_groups[number]), "params": of} for number, of in groups.items()]
        )
        for own, weight, gradient in zip(self.ranges, weights, gradients, strict=True):
            weight.grad = None if gradient is None else own.shaped(gradient).to(weight.device)
            if own in self.scalars:
                moments = {key: own.shaped(own.inside(held[key])) for key in self.keys}
                optimizer.state[weight] = moments | {
                    key: copied(value) for key, value in self.scalars[own].items()
                }
        optimizer.step()
        states = {
            own: dict(optimizer.state[weight])
            for own, weight in zip(self.ranges, weights, strict=True)
            if weight.grad is not None
        }
        for own in states.keys() - self.scalars.keys():
            for key in self.keys:  # the first gradient, after others of the chunk had one
                if (moment := states[own].get(key)) is not None:
                    own.inside(held[key]).copy_(moment.view(-1))
        # the object may exist until the next collection of cycles: free its tensors now
        optimizer.state.clear()
        for weight in weights:
            weight.grad = None
        return states


def chunks(
    groups: Sequence[Sequence[Numbered]],
    numel: int,
    prefix: str,
    streamed: Mapping[int, StreamedGroup],
    *,
    whole: bool = False,
) -> list[UpdateChunk]:
    """Divide parameters into chunks of about ``numel`` elements; ``streamed``: groups of streamed
    parameters by id; ``whole``: each parameter is a chunk."""
    result: list[UpdateChunk] = []
    numel = max(numel // ALIGN, 1) * ALIGN
    for number, group in enumerate(groups):
        chunk: UpdateChunk | None = None
        for parameter, name, index in group:
            start, numel_here = 0, local(parameter).numel()
            while start < numel_here and id(parameter) not in streamed:
                if chunk is None or whole or chunk.numel >= numel:
                    chunk = UpdateChunk(len(result), prefix)
                    result.append(chunk)
                count = numel_here if whole else min(numel_here - start, numel - chunk.numel)
                chunk.ranges.append(
                    ChunkRange(parameter, name, index, number, start, chunk.numel, count, whole)
                )
                chunk.numel += -(-count // ALIGN) * ALIGN
                start += count
    return result + _streamed_chunks(groups, prefix, len(result), streamed, whole=whole)


Ranges = dict[torch.Tensor, list[tuple[UpdateChunk, ChunkRange]]]


def ranges_of(chunks: Iterable[UpdateChunk]) -> Ranges:
    """Return the chunks with parts of each parameter, and the parts."""
    found: Ranges = {}
    for chunk in chunks:
        for own in chunk.ranges:
            found.setdefault(own.parameter, []).append((chunk, own))
    return found


def _streamed_chunks(
    groups: Sequence[Sequence[Numbered]],
    prefix: str,
    first: int,
    streamed: Mapping[int, StreamedGroup],
    *,
    whole: bool,
) -> list[UpdateChunk]:
    """Make one chunk for each stored range of a streamed group with a parameter among
    ``groups``."""
    known = {
        id(p): (name, index, number)
        for number, group in enumerate(groups)
        for p, name, index in group
    }
    found = {streamed[one] for one in known if one in streamed}
    result: list[UpdateChunk] = []
    for own in sorted(found, key=lambda group: group.number):
        for stored in own.stored:
            master = stored.name if own.dtype == torch.float32 else ""
            chunk = UpdateChunk(
                first + len(result), prefix, numel=stored.numel, values=stored.name, master=master
            )
            for member, start, place in own.overlaps(stored.start, stored.numel):
                if id(member.parameter) in known:
                    numel, (name, index, number) = (
                        place.stop - place.start,
                        known[id(member.parameter)],
                    )
                    if whole and numel != member.parameter.numel():
                        raise InvalidArgument(
                            f"optimizer takes whole tensors, and {name!r}, of "
                            f"{member.parameter.numel()} elements, is streamed in several chunks: "
                            "pass a chunk_mb= to commpress.stream in which its block fits"
                        )
                    chunk.ranges.append(
                        ChunkRange(
                            member.parameter, name, index, number, start, place.start, numel, whole
                        )
                    )
            if chunk.ranges:
                result.append(chunk)
    return result


# ---------------------------------------------------------------- gradients


class ParameterGradients:
    """Gradients of one chunk after the other, in float32 where the chunk is updated, read from
    ``parameter.grad`` or from what ``take`` has removed there for a delayed step."""

    def __init__(self, store: TieredStore, chunks: Sequence[UpdateChunk]) -> None:
        self._store, self._chunks = store, chunks
        self._taken: dict[int, torch.Tensor] | None = None  # by the parameter's number
        self._buffers: dict[str, torch.Tensor] = {}  # as long as the longest chunk

    def ready(
        self, chunk: UpdateChunk, factor: torch.Tensor | None, stack: ExitStack
    ) -> list[torch.Tensor | None]:
        """Return the clipped gradients of a chunk's ranges, valid until ``stack`` is closed: those
        of the parameters, or in the store, themselves if they need no conversion; None for
        parameters without one."""
        found = self._found(chunk)
        if chunk.on == "host":
            self._store.crossing.down += sum(
                own.numel * g.dtype.itemsize for own, g in found if g is not None
            )
        if factor is None and all(g is None or _readable(g) for _, g in found):
            return [None if g is None else own.of(g) for own, g in found]
        flat = self.buffer(chunk)
        for own, g in found:
            if g is not None:
                own.inside(flat).copy_(own.of(g.contiguous()), non_blocking=True)
        _arrive(g for _, g in found if g is not None)
        return _clipped(chunk, flat, factor, [own for own, g in found if g is not None])

    def square_sum(self) -> float:
        """Return Σ g² in double, summed where the gradients are."""
        every = [one for chunk in self._chunks for one in self._found(chunk)]
        return _square_sum(own.of(g.contiguous()) for own, g in every if g is not None)

    def take(self) -> None:
        """Set gradients apart for a step, so that the next backward begins without any."""
        parameters = {own.index: own.parameter for chunk in self._chunks for own in chunk.ranges}
        self._taken = {}
        for index, parameter in parameters.items():
            if parameter.grad is not None:
                self._taken[index], parameter.grad = parameter.grad, None

    def buffer(self, chunk: UpdateChunk) -> torch.Tensor:
        """Return a buffer for a chunk's values on its tier, with zeros between parameters."""
        if chunk.on not in self._buffers:
            longest = max(c.numel for c in self._chunks if c.on == chunk.on)
            self._buffers[chunk.on] = (
                torch.zeros(longest, device=self._store.device)
                if chunk.on == "device"
                else torch.zeros(longest, pin_memory=_on_card(self._chunks))
            )
        flat = self._buffers[chunk.on][: chunk.numel]
        return flat.zero_() if chunk.gaps else flat

    def names(self, chunk: UpdateChunk) -> list[str]:
        """Return the tensors of the store to read for a chunk."""
        return []

    def put_back(self) -> None:
        """Keep the gradients of a step that failed, until they are cleared."""

    def forget(self, chunk: UpdateChunk) -> None:
        """Drop the gradient of a chunk, which was used or is not wanted."""

    def clear(self) -> None:
        """Drop all gradients."""

    def settle(self) -> None:
        """Wait for pending work, and raise its errors."""

    def _found(self, chunk: UpdateChunk) -> list[tuple[ChunkRange, torch.Tensor | None]]:
        found = [
            (own, own.parameter.grad if self._taken is None else self._taken.get(own.index))
            for own in chunk.ranges
        ]
        return [(own, None if g is None else local(g)) for own, g in found]


class StoredGradients(ParameterGradients):
    """Gradients moved from autograd into a store; ``parameter.grad`` is None.

    A chunk's gradients are one float32 tensor there, from the first until the step that uses them.
    The tensor of a chunk on disk is written as soon as it is complete.
    """

    def __init__(
        self, store: TieredStore, chunks: Sequence[UpdateChunk], *, norms: bool = True
    ) -> None:
        """``norms``: their norm will be asked for."""
        super().__init__(store, chunks)
        self._norms = norms
        # squares of the norms of gradients that came from a device, where that is quicker
        self._parts: dict[UpdateChunk, dict[ChunkRange, float]] = {}
        self._there: dict[UpdateChunk, set[ChunkRange]] = {}  # ranges with a gradient in the store
        self._used: dict[UpdateChunk, set[ChunkRange]] = {}  # those of the step that is running
        self._squares: dict[UpdateChunk, float] = {}  # squares of norms of complete gradients
        self._new: dict[UpdateChunk, set[ChunkRange]] = {}  # ranges in this backward
        self._leaving: list[Pending[None]] = []
        self.whole: Callable[[UpdateChunk], bool] | None = None  # takes a complete gradient, or not
        self.syncing = True  # False: gradients add up in memory, in float32
        self._held: dict[torch.Tensor, torch.Tensor] = {}  # those, by parameter
        self._ranges = ranges_of(chunks)
        longest = max(c.numel for c in chunks)
        self._scratch = torch.zeros(longest, pin_memory=_on_card(chunks))

    def hook(self, parameter: torch.Tensor) -> Any:
        return parameter.register_post_accumulate_grad_hook(self._arrived)

    @torch.no_grad()
    def _arrived(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = local(parameter.grad), None
        if gradient.layout != torch.strided:
            raise InvalidArgument(
                f"the gradient of {self._ranges[parameter][0][1].name!r} is sparse: build its "
                "module with sparse=False"
            )
        if (held := self._held.pop(parameter, None)) is not None:
            gradient = held.add_(gradient)
        if self.syncing:
            self._move(parameter, gradient)
        else:
            self._held[parameter] = gradient.float()

    def _move(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        gradient = gradient.contiguous()
        for chunk, own in self._ranges[parameter]:
            self.add(chunk, {own: own.of(gradient)})

    @contextmanager
    def across(self) -> Iterator[None]:
        """Move at the end of the context the gradients that have added up in memory."""
        try:
            yield
            for parameter, gradient in self._held.items():
                self._move(parameter, gradient)
        finally:
            self._held.clear()

    @torch.no_grad()
    def add(self, chunk: UpdateChunk, values: dict[ChunkRange, torch.Tensor]) -> None:
        if chunk in self._used:
            raise InvalidArgument(
                f"{chunk.ranges[0].name!r} gets a gradient while it is updated: call step after "
                "each backward, or pass the micro-batches to streamed.accumulate"
            )
        there, name = self._there.setdefault(chunk, set()), chunk.name(GRADIENT)
        self._note(chunk, values, there)
        new = self._new.setdefault(chunk, set())
        if not there:
            self._store.put(name, self._first(chunk, values))
        else:
            with self._store.borrow(name) as held:
                for own, value in self._on_host(values).items():
                    mine = own.inside(held)
                    mine.add_(value) if own in there else mine.copy_(value)
        self._store.crossing.down += sum(value.nbytes for value in values.values())
        there.update(values)
        new.update(values)
        self._squares.pop(chunk, None)
        if len(new) == len(chunk.ranges):
            new.clear()
            if self.whole is not None:
                self._used[chunk] = there
                if self.whole(chunk):
                    del self._there[chunk]
                    return
                del self._used[chunk]
            if chunk.passes:
                if self._norms:
                    self._squares[chunk] = self._square(chunk)
                self._leaving.append(self._store.evict(name))
            if len(self._leaving) > LEAVING:
                self._leaving.pop(0).wait()

    def _first(self, chunk: UpdateChunk, values: dict[ChunkRange, torch.Tensor]) -> torch.Tensor:
        """Return the first gradients of a chunk in float32: one that is all of it as it is, others
        side by side with zeros in between."""
        (value, *others), whole = values.values(), not chunk.gaps and len(chunk.ranges) == 1
        if whole and not others and value.dtype == torch.float32 and value.is_contiguous():
            return value.view(-1)
        flat = self._scratch[: chunk.numel].zero_()
        for own, value in values.items():
            own.inside(flat).copy_(value, non_blocking=True)
        _arrive(values.values())
        return flat

    def _on_host(self, values: dict[ChunkRange, torch.Tensor]) -> dict[ChunkRange, torch.Tensor]:
        """Return values of one chunk on the host, those of a device by way of pinned memory."""
        there = {own: value for own, value in values.items() if value.device.type != "cpu"}
        staged = {own: own.inside(self._scratch) for own in there}
        for own, value in there.items():
            staged[own].copy_(value, non_blocking=True)
        _arrive(there.values())
        return values | staged

    def _note(
        self, chunk: UpdateChunk, values: dict[ChunkRange, torch.Tensor], there: set[ChunkRange]
    ) -> None:
        """Sum up the squares of gradients on a device, unless others are there to be added to."""
        parts = self._parts.setdefault(chunk, {})
        for own, value in values.items():
            parts.pop(own, None)
            if self._norms and own not in there and value.device.type != "cpu":
                parts[own] = _square_sum([value])

    def _square(self, chunk: UpdateChunk) -> float:
        if len(parts := self._parts.get(chunk, {})) == len(chunk.ranges):
            return sum(parts[own] for own in chunk.ranges)
        with self._store.borrow(chunk.name(GRADIENT), write=False) as held:
            return _square_sum(own.inside(held) for own in chunk.ranges)

    def square_sum(self) -> float:
        """Return Σ g² in double, of each chunk as it was after its last gradient."""
        for chunk in self._there:
            self._new[chunk].clear()
            if chunk not in self._squares:
                self._squares[chunk] = self._square(chunk)
        return sum(self._squares[chunk] for chunk in self._chunks if chunk in self._squares)

    def ready(
        self, chunk: UpdateChunk, factor: torch.Tensor | None, stack: ExitStack
    ) -> list[torch.Tensor | None]:
        there = self._used.get(chunk)
        if there is None:
            return [None] * len(chunk.ranges)
        held = stack.enter_context(self._store.borrow(chunk.name(GRADIENT), write=False))
        if chunk.on == "host" and factor is None:
            return _clipped(chunk, held, None, there)
        flat = self.buffer(chunk)
        if chunk.on == "device":
            self._store.crossing.up += flat.nbytes
        return _clipped(chunk, flat.copy_(held), factor, there)

    def names(self, chunk: UpdateChunk) -> list[str]:
        return [chunk.name(GRADIENT)] if chunk in self._used else []

    def take(self) -> None:
        self._used, self._there = self._there, {}
        self._squares.clear()
        self._parts.clear()
        self._new.clear()

    def put_back(self) -> None:
        self._used, self._there = {}, self._used

    def forget(self, chunk: UpdateChunk) -> None:
        """Delete the gradient of a chunk without writing it."""
        if self._used.pop(chunk, None) is not None:
            self._store.delete(chunk.name(GRADIENT))

    def clear(self) -> None:
        self.settle()
        for chunk in self._there:
            self._store.delete(chunk.name(GRADIENT))
        self._there.clear()
        self._squares.clear()
        self._parts.clear()
        self._new.clear()

    def settle(self) -> None:
        leaving, self._leaving = self._leaving, []
        for pending in leaving:
            pending.wait()


def _on_card(chunks: Sequence[UpdateChunk]) -> bool:
    """Return whether parameters are on CUDA, so that memory for their gradients is pinned."""
    return any(local(own.parameter).is_cuda for chunk in chunks for own in chunk.ranges)


def _arrive(values: Iterable[torch.Tensor]) -> None:
    """Wait once for what this thread's streams copy from the devices of ``values`` to the host."""
    for device in {value.device for value in values}:
        if (stream := stream_of(device)) is not None:
            stream.synchronize()


def _clipped(
    chunk: UpdateChunk,
    flat: torch.Tensor,
    factor: torch.Tensor | None,
    there: Container[ChunkRange],
) -> list[torch.Tensor | None]:
    """Return the parts of ``flat`` that belong to the chunk's ranges, after clipping. ``there``:
    those with a gradient."""
    if factor is not None:
        flat.mul_(factor.to(flat.device))
    return [own.inside(flat) if own in there else None for own in chunk.ranges]


def _square_sum(parts: Iterable[torch.Tensor]) -> float:
    norms = (float(torch.linalg.vector_norm(part, dtype=torch.float64)) for part in parts)
    return sum(norm**2 for norm in norms)


def _readable(gradient: torch.Tensor) -> bool:
    """Return whether the processor's update can read a gradient in place."""
    return (
        gradient.dtype == torch.float32
        and gradient.device.type == "cpu"
        and gradient.layout == torch.strided
        and gradient.is_contiguous()
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use ``count`` threads in this thread, and in those that begin meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
