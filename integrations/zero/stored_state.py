"""State of an optimizer in a store, or divided over ranks, in the form of ``optimizer.state``.

In a distributed checkpoint a parameter's state is one tensor of the whole shape. A rank writes and
reads the boxes that make up the range it owns, so a checkpoint does not depend on ranks, buckets or
meshes. Numbers are saved as tensors, and nothing is pickled.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from commpress.collectives.channel import Channel
from commpress.collectives.reduce_scatter import gather_rows
from commpress.errors import InvalidArgument, StateMismatch, check_counts, check_entries
from commpress.integrations.zero.bucket import OwnedRange, ShardedBucket
from commpress.integrations.zero.elementwise import takes_tensors
from commpress.integrations.zero.moments import Moments
from commpress.integrations.zero.update_chunk import (
    WEIGHT,
    ChunkRange,
    UpdateChunk,
    ranges_of,
)
from commpress.integrations.zero.wrapper import MASTER, Wrapper, copied, like, probe, trainable
from commpress.optim.checkpoint import check_groups, take_groups
from commpress.optim.layout import Columns, alike, box_of, is_cut, local
from commpress.tiered_mem import TieredStore
from commpress.work import Steps

FORMAT = 2.0  # of commits
STEPPED = "stepped"  # entry of a rank's part: 0 for a parameter without a state so far


class StoredState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """A mapping {parameter: state of the plain optimizer}. It returns copies, sharded as the
    parameter is.

    The state of a half-precision parameter also has its float32 master.
    """

    def __init__(
        self,
        store: TieredStore,
        chunks: list[UpdateChunk],
        moments: dict[str, float],
        scalars: dict[str, Any],
        coded: Moments,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """``settle`` waits for a running update."""
        self._coded, self._store, self._chunks = coded, store, chunks
        self._settle = settle
        self._moments, self._scalars = moments, scalars
        self._ranges = ranges_of(chunks)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self._settle()
        stepped = [p for p in self._ranges if p in self]
        return iter(sorted(stepped, key=lambda p: self._ranges[p][0][1].index))

    def __len__(self) -> int:
        self._settle()
        return sum(p in self for p in self._ranges)

    def __contains__(self, parameter: object) -> bool:
        self._settle()
        if not isinstance(parameter, torch.Tensor) or parameter not in self._ranges:
            return False
        chunk, own = self._ranges[parameter][0]
        return own in chunk.scalars

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter not in self:
            raise KeyError(parameter)
        ranges = self._ranges[parameter]
        if sum(own.numel for _, own in ranges) != local(parameter).numel():
            raise InvalidArgument(
                f"parameter {ranges[0][1].name!r} is divided over the ranks, and this rank has "
                "only a part of its state: use sharded_state_dict() or state_dict()"
            )
        chunk, own = ranges[0]
        result = {key: copied(value) for key, value in chunk.scalars[own].items()}
        keys = {key: key for key in self._moments} | (
            {} if parameter.dtype == torch.float32 else {MASTER: WEIGHT}
        )
        values = {key: torch.empty(local(parameter).shape) for key in keys}
        for chunk, own in ranges:
            with self._coded.opened(chunk, write=False) as held:
                for key, source in keys.items():
                    own.of(values[key]).copy_(own.inside(held[source]))
        result |= {key: alike(value, parameter) for key, value in values.items()}
        return dict(sorted(result.items()))

    def check(self, parameter: torch.Tensor, state: Mapping[str, Any]) -> None:
        """Raise ``StateMismatch`` unless this is a state of the parameter."""
        ranges = self._ranges.get(parameter)
        what = f"the state of {ranges[0][1].name!r}" if ranges else "a state outside of the store"
        check_entries(state, tuple(self._scalars), what)
        for key in self._moments:
            if (
                key not in state
                or state[key].shape != parameter.shape
                or is_cut(state[key]) != is_cut(parameter)
            ):
                raise StateMismatch(
                    f"{what} has {key!r} of shape "
                    f"{tuple(getattr(state.get(key), 'shape', ()))}, expected "
                    f"{tuple(parameter.shape)}: load the state of the same model and optimizer"
                )

    @torch.no_grad()
    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        self._settle()
        self.check(parameter, state)
        for chunk, own in self._ranges[parameter]:
            if not chunk.keys:
                self._begin(chunk)
            chunk.scalars[own] = {
                key: like(example, state[key]) for key, example in self._scalars.items()
            }
            with self._coded.opened(chunk) as held:
                for key in self._moments:
                    own.inside(held[key]).copy_(own.of(state[key]))
                if MASTER in state:
                    own.inside(held[WEIGHT]).copy_(own.of(state[MASTER]))

    def __delitem__(self, parameter: torch.Tensor) -> None:
        """Reset the state to that before the first step."""
        self._settle()
        for chunk, own in self._ranges[parameter]:
            chunk.scalars.pop(own, None)
            with self._coded.opened(chunk) as held:
                for key in chunk.keys:
                    own.inside(held[key]).fill_(self._moments[key])

    def _begin(self, chunk: UpdateChunk) -> None:
        """Give a chunk moments, as they are before the first step."""
        for key, first in self._moments.items():
            self._coded.put(chunk, key, torch.full((chunk.numel,), first))
        chunk.keys = list(self._moments)

    def clear(self) -> None:
        self._settle()
        for chunk in self._chunks:
            for key in chunk.keys:
                self._store.delete(chunk.name(key))
            chunk.keys, chunk.scalars = [], {}


class StoredOptimizer(Wrapper):
    """Base of optimizers whose ``chunks`` are in a ``store``, with moments read and written by
    ``_coded``."""

    store: TieredStore
    prefix: str
    chunks: list[UpdateChunk]
    _coded: Moments
    _stored: StoredState

    def __init__(
        self,
        params: Any,
        optimizer: type[torch.optim.Optimizer],
        options: dict[str, Any],
        *,
        commit_every: int,
        max_grad_norm: float | None,
        on_nonfinite: Literal["skip", "raise"],
    ) -> None:
        check_counts(commit_every=commit_every)
        super().__init__(
            params, optimizer, options, max_grad_norm=max_grad_norm, on_nonfinite=on_nonfinite
        )
        self._places, _ = trainable(self.param_groups, streamed=True)
        # the optimizer combines elements of a tensor, so that none may be cut
        self.by_tensor = takes_tensors(optimizer, options, self.param_groups)
        self.commit_every = commit_every
        self._optimizer, self._make = optimizer, partial(optimizer, **options)
        dims = max(p.dim() for group in self._places for p, _, _ in group) if self.by_tensor else 1
        self._moments, self._scalars = probe(optimizer, options, dims=dims)

    def _stepped(self, chunk: UpdateChunk, states: Mapping[ChunkRange, dict[str, Any]]) -> bool:
        """Keep what a step has left besides weights; return whether this was the first step of the
        chunk."""
        found = states.values()
        kept = {key for state in found for key, value in state.items() if value is not None}
        if odd := sorted(kept.symmetric_difference((*self._moments, *self._scalars))):
            raise InvalidArgument(
                f"optimizer is {self._optimizer.__name__}, whose state of {chunk.ranges[0].name!r} "
                f"has {sorted(kept)} where that of other tensors has "
                f"{sorted((*self._moments, *self._scalars))}: {odd[0]!r} would be lost. Pass "
                "tensors of this kind to an Offloaded of their own, with another prefix="
            )
        for own, state in states.items():
            chunk.scalars[own] = {key: state[key] for key in self._scalars if key in state}
        if chunk.keys:
            return False
        for key, first in self._moments.items():
            flat = torch.zeros(chunk.numel)
            for own in chunk.ranges:
                moment = states.get(own, {}).get(key)  # none yet without a gradient
                own.inside(flat).copy_(torch.tensor(first) if moment is None else moment.view(-1))
            self._coded.put(chunk, key, flat)
        chunk.keys = list(self._moments)
        return True

    @torch.no_grad()
    def _renewed(self, values: str) -> None:
        """Copy stored values that were written, by name, to their separate master."""
        for chunk in self.chunks:
            if chunk.values == values and chunk.copied:
                with (
                    self.store.borrow(chunk.master) as master,
                    self.store.borrow(values, write=False) as held,
                ):
                    master.copy_(held)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in memory, in the format of ``optimizer``. A running update is
        finished first."""
        self.settle_weights()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this class or of the plain optimizer. Load the model's weights
        first. If a state does not fit, nothing changes."""
        groups = state_dict["param_groups"]
        check_groups(self, groups)
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in groups for number in group["params"]]
        found = {
            p: state_dict["state"].get(number) or {}
            for p, number in zip(parameters, numbers, strict=True)
        }
        for p, state in found.items():
            if state:
                self._stored.check(p, state)
        held = {p: found[p] for p in ranges_of(self.chunks) if found[p]}
        self.settle_weights()
        self._stored.clear()
        for p, state in held.items():
            self._stored[p] = state
        self._loaded(found)
        take_groups(self, groups)
        steps = [int(state["step"]) for state in found.values() if "step" in state]
        self.steps_done = max(steps, default=self.steps_done)

    def _loaded(self, found: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Follow the states of all parameters, empty before the first step, of which the store has
        its part."""
        raise NotImplementedError

    # ------------------------------------------------------------ commits

    def commit(self) -> int:
        """Commit the state: a process that is killed afterwards resumes from this step. A running
        update is finished first."""
        self.settle_weights()
        return self.store.commit()

    def _record(self) -> None:
        """Put what the store's tensors lack into the store. Called before each of its commits and
        snapshots, whoever asks for them."""
        raise NotImplementedError

    def _ended(self) -> None:
        """End a step: commit if it is time."""
        self.steps_done += 1
        if self.commit_every and self.steps_done % self.commit_every == 0:
            self.commit()

    def _layout(self) -> int:
        """Return a hash of the optimizer's state and of the places of all parts."""
        bits = ["8 bits"] if self._coded.quantised else []
        state = [self._optimizer.__name__, *bits, *self._moments, *self._scalars]
        return zlib.crc32(";".join([*state, *self._places_of_parts()]).encode())

    def _places_of_parts(self) -> list[str]:
        raise NotImplementedError

    @property
    def _meta(self) -> str:
        return f"{self.prefix}/meta"

    def _floats(self, state: Mapping[str, Any] | None) -> list[float]:
        """Return whether there is a state, and its numbers."""
        numbers = [float((state or {}).get(key, -1.0)) for key in self._scalars]
        return [float(state is not None), *numbers]

    def _floats_of(self, chunk: UpdateChunk) -> list[float]:
        return [each for own in chunk.ranges for each in self._floats(chunk.scalars.get(own))]

    def _put_numbers(self, numbers: Sequence[float]) -> None:
        head = [FORMAT, float(self._layout()), float(self.steps_done)]
        self.store.put(self._meta, torch.tensor([*head, *numbers], dtype=torch.float64))

    def _committed(self) -> Iterator[float]:
        """Set the number of steps to the committed one, and return the other numbers."""
        with self.store.borrow(self._meta, write=False) as meta:
            numbers = meta.tolist()
        if numbers[:2] != [FORMAT, float(self._layout())]:
            raise StateMismatch(
                f"the store has a state {self.prefix!r} of other parameters, chunk_mb or "
                "optimizer: use those it was made with, or pass another prefix="
            )
        self.steps_done = int(numbers[2])
        return iter(numbers[3:])

    def _scalars_of(self, numbers: Iterator[float]) -> dict[str, Any] | None:
        """Return what ``_floats`` has converted."""
        there = bool(next(numbers))
        found = {key: like(example, next(numbers)) for key, example in self._scalars.items()}
        return found if there else None

    def _restore(self, chunk: UpdateChunk, numbers: Iterator[float]) -> None:
        found = {own: self._scalars_of(numbers) for own in chunk.ranges}
        chunk.scalars = {own: state for own, state in found.items() if state is not None}
        if all(chunk.name(key) in self.store for key in self._moments):
            chunk.keys = list(self._moments)


class Slice(torch.Tensor):
    """A tensor of ``parameter``'s shape that has, on this rank, only ``local``: the elements of its
    shard from ``start`` on."""

    local: torch.Tensor
    # parts of ``local`` as boxes, by their offsets in the whole tensor
    boxes: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(cls, local: torch.Tensor, start: int, parameter: torch.Tensor) -> "Slice":
        self = torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=local.dtype, device=local.device
        )
        self.local, self.boxes, at, whole = local, {}, 0, box_of(parameter)
        for begin, size in boxes_of_range(start, start + local.numel(), whole["size"]):
            place = tuple(a + b for a, b in zip(whole["begin"], begin, strict=True))
            self.boxes[place] = local[at : at + prod(size)].view(size)
            at += prod(size)
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"Slice({self.local.numel()} elements of {tuple(self.shape)}, in {len(self.boxes)} "
            "boxes)"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(
            f"a Slice serves torch.distributed.checkpoint only and cannot compute {func}"
        )

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.shape,
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(place), box.shape) for place, box in self.boxes.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.boxes[tuple(index.offset)]


def boxes_of_range(
    start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (begin, size) of the boxes, in order, that make up the elements ``start`` to ``stop``
    of a tensor: at most two for each dimension."""
    if start >= stop:
        return
    if not shape:
        yield [], []
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # rows that are complete
    if first > last:  # a part of one row
        yield from _inside(first - 1, start, stop, shape)
        return
    yield from _inside(first - 1, start, first * inner, shape)
    if first < last:
        yield [first, *([0] * (len(shape) - 1))], [last - first, *shape[1:]]
    yield from _inside(last, last * inner, stop, shape)


def _inside(
    row: int, start: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[list[int], list[int]]]:
    inner = prod(shape[1:])
    for begin, size in boxes_of_range(start - row * inner, stop - row * inner, shape[1:]):
        yield [row, *begin], [1, *size]


class PartitionedState:
    """State of an optimizer divided into rows over the ranks: gather it, divide it again, and give
    each rank's part."""

    def __init__(
        self,
        buckets: Sequence[ShardedBucket],
        channel: Channel,
        state: MutableMapping[Any, Any],
        moments: Iterable[str],
        scalars: dict[str, Any],
        columns: Columns | None = None,
    ) -> None:
        self._columns = columns
        self._buckets, self._channel, self._state = buckets, channel, state
        self._moments, self._scalars = list(moments), scalars

    def whole(self) -> Steps[dict[int, dict[str, Any]]]:
        """Return {number of the parameter: its state}, equal on every rank."""
        result: dict[int, dict[str, Any]] = {}
        for bucket in self._buckets:
            scalars = yield from self._numbers_of(bucket)
            for m, numbers in zip(bucket.members, scalars, strict=True):
                stepped = bool(np.isfinite(numbers).all()) and bool(numbers[0])
                if stepped or bucket.mastered:
                    result[m.index] = {}
                if stepped:
                    found = zip(self._scalars.items(), numbers[1:], strict=True)
                    result[m.index] |= {
                        key: like(example, number) for (key, example), number in found
                    }
            for key in [*self._moments, MASTER] if bucket.mastered else self._moments:
                flat = yield from self._gathered(bucket, key)
                for m, numbers in zip(bucket.members, scalars, strict=True):
                    if key == MASTER or numbers[0]:
                        result[m.index][key] = alike(m.view(flat).clone(), m.parameter)
        return dict(sorted(result.items()))

    def _numbers_of(self, bucket: ShardedBucket) -> Steps[np.ndarray]:
        """Return float64[members, 1 + scalars]: whether there is a state, and its numbers, from a
        rank that owns some of the parameter."""
        mine = np.full((len(bucket.members), 1 + len(self._scalars)), np.nan)
        row = {m.index: i for i, m in enumerate(bucket.members)}
        for own in bucket.ranges:
            state = self._state.get(own.weight, {})
            mine[row[own.member.index]] = [
                float(bool(state)),
                *(float(state.get(key, 0.0)) for key in self._scalars),
            ]
        every = yield from self._channel.gathered(mine.reshape(-1).tolist())
        found = np.fmax.reduce(every)
        if self._columns is not None:  # ranks with an equal shard may own none of it
            found = np.fmax.reduce((yield from self._columns.gathered(found.tolist())))
        return found.reshape(mine.shape)

    def _gathered(self, bucket: ShardedBucket, key: str) -> Steps[torch.Tensor]:
        row = torch.zeros(bucket.width, dtype=torch.float32, device=bucket.device)
        for own in bucket.ranges:
            value = own.weight if key == MASTER else self._state.get(own.weight, {}).get(key)
            if value is not None:
                row[own.place] = value
        flat = torch.zeros(bucket.flat.numel(), dtype=torch.float32, device=bucket.device)
        yield from gather_rows(
            row,
            flat,
            bucket.exact_plan,
            self._channel.call(len(bucket.exact_plan)),
        )
        return flat

    def load(self, states: dict[int, dict[str, Any]], numbers: Sequence[int]) -> None:
        """Load the state of all parameters; ``numbers``: key of each in ``states``."""
        parts: dict[OwnedRange, dict[str, Any]] = {}
        for own in (own for bucket in self._buckets for own in bucket.ranges):
            state = states.get(numbers[own.member.index], {})
            entries = (*self._moments, *self._scalars) if state else ()
            check_entries(state, entries, f"the state of {own.member.name!r}")
            parts[own] = _cut(own, state)
        self._take(parts)

    def _take(self, parts: Mapping[OwnedRange, dict[str, Any]]) -> None:
        """Load the state of each range; a float32 master that is not among them starts from the
        weights."""
        for bucket in self._buckets:
            if bucket.mastered and all(MASTER in parts[own] for own in bucket.ranges):
                bucket.trust()
            else:
                bucket.adopt()
            for own in bucket.ranges:
                master = parts[own].pop(MASTER, own.weight)
                if bucket.mastered and master is not own.weight:
                    own.weight.copy_(master)
        if not any(parts.values()):
            self._state.clear()
        for own, values in parts.items():
            if values:
                self._state[own.weight] = values
            elif own.weight in self._state:
                del self._state[own.weight]

    # ------------------------------------------------------------ parts of ranks

    def sharded(self) -> dict[str, dict[str, Any]]:
        """Return {name: {key: Slice or tensor}} of this rank's part, to be saved or loaded into.

        Slices are views of the state. Before the first step there is no state: they are zeros, and
        ``STEPPED`` is 0.
        """
        states: dict[str, dict[str, Any]] = {}
        for bucket in self._buckets:
            for own in bucket.ranges:
                whole, state = own.member.parameter, self._state.get(own.weight, {})
                found = {
                    key: state[key] if state else torch.zeros_like(own.weight)
                    for key in self._moments
                }
                one = states[own.member.name] = {
                    key: Slice(value, own.start, whole) for key, value in found.items()
                }
                one |= {key: _number(state.get(key, 0.0)) for key in self._scalars} | {
                    STEPPED: _number(bool(state))
                }
                if bucket.mastered:
                    one[MASTER] = Slice(own.weight, own.start, whole)
        return states

    def load_sharded(self, states: dict[str, dict[str, Any]]) -> None:
        """Load what ``torch.distributed.checkpoint.load`` has written into the result of
        ``sharded``."""
        parts: dict[OwnedRange, dict[str, Any]] = {}
        for own in (own for bucket in self._buckets for own in bucket.ranges):
            loaded, values = states[own.member.name], parts.setdefault(own, {})
            if loaded[STEPPED].item():
                values |= {key: loaded[key].local for key in self._moments}
                values |= {
                    key: like(example, loaded[key].item()) for key, example in self._scalars.items()
                }
            if MASTER in loaded:
                values[MASTER] = loaded[MASTER].local
        self._take(parts)


def _cut(own: OwnedRange, state: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    parameter: Any = own.member.parameter
    shape, cut = parameter.shape, getattr(parameter, "placements", None)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            result[key] = value
        elif (
            value.shape == shape
            and getattr(value, "placements", None) == cut
            and local(value).shape == own.member.shape
        ):
            result[key] = own.of(local(value)).to(own.weight.device, _kept(value.dtype), copy=True)
        elif value.numel() == 1:
            result[key] = value.clone()
        else:
            raise StateMismatch(
                f"{key!r} of {own.member.name!r} has shape {tuple(value.shape)} and placements "
                f"{getattr(value, 'placements', None)}, expected {tuple(shape)} and {cut}: load "
                "the state of the same model, and from another mesh by sharded_state_dict() and "
                "torch.distributed.checkpoint"
            )
    return result


def _kept(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _number(value: Any) -> torch.Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def numbers_of(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        key: torch.tensor(value, dtype=torch.float64)
        for key, value in group.items()
        if _numeric(value)
    }


def _numeric(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return bool(value) and all(isinstance(v, (int, float)) for v in value)
    return isinstance(value, (int, float))


def like_saved(value: Any, tensor: torch.Tensor) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(type(v)(n) for v, n in zip(value, tensor.tolist(), strict=True))
    return type(value)(tensor.item())
