"""Weights of a model as ranks hold them: boxes of tensors, and who publishes which of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from commpress.checksum import checksum_of
from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.weights.weight_layout import (
    NUMBERS,
    DescribedTensor,
    WeightLayout,
    WeightPiece,
)

Tensors = Mapping[str, torch.Tensor]
Source = torch.nn.Module | Tensors | Iterable[tuple[str, torch.Tensor]] | Callable[[], Tensors]
Box = tuple[tuple[int, ...], tuple[int, ...]]
UNDIVIDED = 1 << 16  # elements of a box that one of its holders takes alone


def tensors_of(source: Source) -> Callable[[], Tensors]:
    """A call that gives the tensors as they are then; parameters and persistent buffers of a
    module."""
    if isinstance(source, torch.nn.Module):
        state = partial(source.state_dict, keep_vars=True)
        return lambda: {k: v for k, v in state().items() if isinstance(v, torch.Tensor)}
    if callable(source):
        return lambda: _named(source())
    named = _named(source)
    return lambda: named


def _named(given: Any) -> dict[str, torch.Tensor]:
    try:
        found = dict(given)
    except (TypeError, ValueError):
        found = {"": given}
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise InvalidArgument(
                f"weights are {name!r} with a {type(value).__name__}, expected a module, names "
                "with tensors, or a function that gives them"
            )
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def box_of(name: str, tensor: torch.Tensor) -> Box:
    """The first element and the size of that part in the whole."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return (0,) * len(shape), shape
    if any(placement.is_partial() for placement in tensor.placements):
        raise InvalidArgument(
            f"{name!r} is placed {tensor.placements}: sums that are still open are no weights"
        )
    if tensor.device_mesh.get_coordinate() is None or not tensor.to_local().numel():
        return (0,) * len(shape), (0,) * len(shape)
    (chunk,) = tensor.__create_chunk_list__()
    if chunk.sizes != tensor.to_local().shape:
        raise InvalidArgument(f"{name!r} is placed {tensor.placements}, which is no box: gather it")
    return tuple(chunk.offsets), tuple(chunk.sizes)


class RankGather:
    """Plain data of every rank at every rank; alone without a group."""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.rank, self.size, self._group = 0, 1, None
        if dist.is_available() and dist.is_initialized():
            world = process_group or dist.group.WORLD
            ranks = dist.get_process_group_ranks(world)
            if len(ranks) > 1:  # over the CPU, for another thread than training's
                alone = process_group is not None  # others of the world need not come
                self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=alone)
                self.rank, self.size = dist.get_rank(world), len(ranks)

    def together(self, call: Callable[[], Any]) -> list[Any]:
        """Plain data that ``call`` returned on every rank; a rank's error is raised on all."""
        outcome, error = None, None
        try:
            outcome = call()
        except Exception as caught:
            error = caught
        own = msgpack.packb([outcome, repr(error) if error else ""])
        every = [msgpack.unpackb(each) for each in self._gathered(own)]
        if error is not None:
            raise error
        for rank, (_, message) in enumerate(every):
            if message:
                raise StateMismatch(f"rank {rank} could not publish: {message}")
        return [outcome for outcome, _ in every]

    def _gathered(self, own: bytes) -> list[bytes]:
        if self._group is None:
            return [own]
        with torch.device("cpu"):
            sizes = [torch.tensor([len(own)]) for _ in range(self.size)]
            dist.all_gather(sizes, sizes[self.rank].clone(), group=self._group)
            rows = [torch.zeros(max(map(int, sizes)), dtype=torch.uint8) for _ in sizes]
            row = torch.frombuffer(bytearray(own.ljust(len(rows[0]))), dtype=torch.uint8)
            dist.all_gather(rows, row, group=self._group)
        return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def first(self, call: Callable[[], Any]) -> Any:
        """Run it on rank 0 alone; its result or error is that of all ranks."""
        return self.together(lambda: None if self.rank else call())[0]

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def layout_over(gather: RankGather, tensors: Tensors, dtype: torch.dtype | None) -> WeightLayout:
    """The layout that all ranks find in what they hold: each element has one of its holders."""
    described, tied = dict[str, DescribedTensor](), dict[str, str]()
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    tables = gather.together(lambda: _table(tensors, dtype, alone=gather.size == 1))
    for rank, (ties, rows) in enumerate(tables):
        tied |= ties
        for name, kind, *box, hashed in rows:
            shape, begin, size = map(tuple, box)
            own = DescribedTensor(name, kind, shape)
            if (found := described.setdefault(name, own)) != own:
                raise InvalidArgument(
                    f"{name!r} is {own} on rank {rank}, elsewhere {found}: tensors that differ by "
                    "rank need names of their own"
                )
            holders.setdefault((name, (begin, size)), []).append((rank, hashed))
    load, numbers = [0] * gather.size, {name: i for i, name in enumerate(described)}
    parts: list[list[WeightPiece]] = [[] for _ in load]
    for (name, (begin, size)), found_on in holders.items():
        ranks = [rank for rank, _ in found_on]
        if len({hashed for _, hashed in found_on}) > 1:
            raise InvalidArgument(
                f"{name!r} has other values on rank {ranks[-1]} than on rank {ranks[0]}: "
                "experts of one rank need names of their own, and replicas the same weights"
            )
        for rank, first, last in _shares(size, ranks, load):
            load[rank] += last - first
            parts[rank].append(WeightPiece(numbers[name], begin, size, first, last))
    every = tuple(described.values())
    kept = (sorted(part, key=lambda piece: every[piece.tensor].dtype) for part in parts)
    layout = WeightLayout(every, tuple(tied.items()), tuple(map(tuple, kept)))
    try:
        layout.check()
    except ValueError as error:
        raise InvalidArgument(
            f"this group does not hold the model once ({error}): publish from all ranks that hold "
            "a part"
        ) from error
    return layout


def _table(
    tensors: Tensors, dtype: torch.dtype | None, *, alone: bool
) -> tuple[dict[str, str], list[list[Any]]]:
    """Names with those that they are tied to; a row for each other: its type, shape and box, and a
    hash of the part that other ranks may hold, too."""
    first, tied, rows = dict[int, str](), dict[str, str](), list[list[Any]]()
    for name, tensor in tensors.items():
        if first.setdefault(id(tensor), name) != name:
            tied[name] = first[id(tensor)]
            continue
        box, hashed = box_of(name, tensor), 0
        if not alone and not isinstance(tensor, DTensor):
            content = local(tensor).contiguous().view(-1).cpu().view(torch.uint8)
            hashed = checksum_of(content.numpy().data)
        kind = published_type(name, tensor, dtype)
        rows.append([name, kind, tuple(tensor.shape), *box, hashed])
    return tied, rows


def _shares(
    size: tuple[int, ...], ranks: Sequence[int], load: Sequence[int]
) -> list[tuple[int, int, int]]:
    """(rank, first, last) of a box that all of ``ranks`` hold."""
    numel = prod(size)
    if numel <= UNDIVIDED or len(ranks) == 1:
        return [(min(ranks, key=lambda rank: load[rank]), 0, numel)] if numel else []
    row = numel // size[0]  # whole ones: readers write rows of different parts at once
    cuts = [size[0] * i // len(ranks) * row for i in range(len(ranks) + 1)]
    shares = zip(ranks, cuts[:-1], cuts[1:], strict=True)
    return [share for share in shares if share[1] < share[2]]


def published_type(name: str, tensor: torch.Tensor, wanted: torch.dtype | None) -> str:
    """The type of numbers that readers get."""
    found = wanted if wanted is not None and tensor.is_floating_point() else tensor.dtype
    kind = str(found).removeprefix("torch.")
    if kind not in NUMBERS or tensor.layout is not torch.strided or tensor.is_meta:
        where = f"{found}, {tensor.layout} on {tensor.device}"
        expected = f"expected dense numbers in memory, one of {', '.join(NUMBERS)}"
        raise InvalidArgument(f"{name!r} is {where}, {expected}")
    return kind
