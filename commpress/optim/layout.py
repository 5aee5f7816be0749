"""Layout: this rank's part of each tensor, the ranks with the same part, and the ranks with the
other parts.

- A DTensor of tensor parallelism: this rank has a shard. Its *replicas*, the ranks with the same
  shard, average messages; its *shard peers*, those with the other shards of the same replica,
  decide together. Shard peers exchange only norms, votes and steps: shards are never joined.
- Local experts: a layer of experts records the ranks of its parameters here, and code that reduces,
  moves or clips parameters looks them up.
- An optimizer that keeps weights elsewhere, in shards or in a store, is a ``WeightHolder``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from commpress.collectives.agreement import Consensus
from commpress.collectives.buckets import FLOATS
from commpress.collectives.channel import Channel
from commpress.collectives.transports.factory import (
    AgreeOver,
    DeviceMesh,
    group_of,
    own_transport,
    ranks_of,
)
from commpress.errors import InvalidArgument
from commpress.torch_private import flat_mesh, set_shard, shard_like, waited
from commpress.work import Steps

# ---------------------------------------------------------------- parameters


def named_parameters(groups: Iterable[dict[str, Any]]) -> tuple[list[torch.Tensor], list[str]]:
    """List the parameters, group by group, and their names, or numbers if they have none."""
    parameters: list[torch.Tensor] = []
    names: list[str] = []
    for group in groups:
        first = len(parameters)
        parameters += group["params"]
        names += group.get("param_names") or [f"#{i:05d}" for i in range(first, len(parameters))]
    return parameters, names


def tensors_in(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a torch optimizer's argument: tensors, named tensors or groups."""
    for each in params:
        if isinstance(each, dict):
            inner = each["params"]
            yield from tensors_in([inner] if isinstance(inner, torch.Tensor) else inner)
        else:
            yield each[1] if isinstance(each, tuple) else each


def check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise ``InvalidArgument`` for a parameter without plain numbers in memory; DTensors are
    accepted."""
    if is_lazy(parameter):
        raise InvalidArgument(
            f"parameter {name!r} has no shape yet: run the model once on a sample before you "
            "construct the optimizer"
        )
    if is_cut(parameter):
        return
    wrapped: bool = is_traceable_wrapper_subclass(parameter)
    if wrapped:
        raise InvalidArgument(
            f"parameter {name!r} is a {type(parameter).__name__}, expected a plain tensor: train "
            "it with another optimizer, or convert it before"
        )
    if parameter.layout != torch.strided:
        raise InvalidArgument(
            f"parameter {name!r} is sparse ({parameter.layout}), expected a dense one: convert it "
            "with .to_dense(). Sparse gradients of dense parameters are welcome"
        )
    if parameter.is_meta:
        raise InvalidArgument(
            f"parameter {name!r} is on the meta device, without values: construct the optimizer "
            "after the model is on its device, as with model.to_empty(device=...) and its weights "
            "loaded"
        )
    if parameter.dtype not in FLOATS:
        cure = (
            "train real and imaginary part as one float32 parameter (torch.view_as_real)"
            if parameter.is_complex()
            else "convert it with .float(), or give it to another optimizer"
        )
        raise InvalidArgument(
            f"parameter {name!r} is {parameter.dtype}, expected float32, bfloat16 or float16: "
            f"{cure}"
        )


# ---------------------------------------------------------------- shards of DTensors


def is_cut(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    cut: Any = tensor
    return waited(cut.to_local()) if is_cut(cut) else cut


def version_of(parameter: torch.Tensor) -> int:
    """Return a number that rises when the parameter or its shard is written."""
    return parameter._version + local(parameter)._version


def move_to(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Make ``values`` the memory of this rank's part of the parameter, with their content."""
    if is_cut(parameter):
        set_shard(parameter, values)
    else:
        parameter.data = values


def alike(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return ``values`` of this rank, as a DTensor if ``parameter`` is one."""
    return shard_like(values, parameter) if is_cut(parameter) else values


@torch.no_grad()
def settle_gradient(parameter: Any) -> None:
    """Sum a gradient that is still partial; collective over the parameter's mesh."""
    gradient = parameter.grad
    if is_cut(parameter) and is_cut(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def _dimensions(parameter: Any) -> Iterator[tuple[int, Any]]:
    """Yield the size of each mesh dimension of a DTensor, and its placement there; nothing for
    others."""
    if is_cut(parameter):
        yield from zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True)


def shards_of(parameter: Any) -> int:
    """Return the number of different shards of a parameter."""
    # a _StridedShard of FSDP2 is no shard
    return prod(ranks for ranks, each in _dimensions(parameter) if not each.is_replicate())


def largest_shard(parameter: Any) -> torch.Size:
    """Return the shape of the first rank's shard, the largest one, which every rank can compute."""
    shape = list(parameter.shape)
    for ranks, placement in _dimensions(parameter):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // ranks)
    return torch.Size(shape)


# the whole tensor's ``shape``, where the part ``begin``s and its ``size``
Box = dict[str, list[int]]


def box_of(parameter: Any) -> Box:
    """Return the box of this rank's part of a parameter: all of it, unless it is a DTensor."""
    shape = list(parameter.shape)
    begin, size = [0] * len(shape), list(shape)
    places = parameter.device_mesh.get_coordinate() if is_cut(parameter) else ()
    for place, (ranks, placement) in zip(places, _dimensions(parameter), strict=True):
        if placement.is_shard():
            d = placement.dim
            width = -(-size[d] // ranks)  # as ``torch.chunk`` cuts
            first = min(place * width, size[d])
            begin[d], size[d] = begin[d] + first, min(width, size[d] - first)
    return {"shape": shape, "begin": begin, "size": size}


class Columns(Consensus):
    """Votes of the shard peers of these parameters. Nothing is sent without DTensors."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(own_transport(group_of(mesh), votes=True))
        self.mesh = mesh

    def share(self, parameter: Any) -> float:
        """Return this rank's weight in a sum over shard peers: a shard that several have counts
        once."""
        return shards_of(parameter) / self.mesh.size()

    def all_of(self, indices: Sequence[int], count: int) -> Steps[list[int]]:
        """Return the indices, below ``count``, that every rank names."""
        named = np.zeros(count)
        named[list(indices)] = 1
        every = yield from self.gathered(named.tolist())
        result: list[int] = np.flatnonzero(every.all(axis=0)).tolist()
        return result


def groups_on(
    mesh: DeviceMesh | None,
    parameters: Iterable[Any],
    process_group: Any,
    agree_over: AgreeOver | None = None,
) -> tuple[Any, AgreeOver | None]:
    """Return the ranks that average and the ranks that must agree: as given, or those of ``mesh``.

    The ranks of a mesh average over its dimensions in which no parameter is cut.
    """
    if mesh is None:
        return process_group, agree_over
    if process_group is not None or agree_over is not None:
        raise InvalidArgument(
            "mesh is given, and so is process_group or agree_over: pass the whole mesh alone, or "
            "the two groups without it"
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise InvalidArgument(
            "mesh has no names: make it with mesh_dim_names, as in init_device_mesh('cpu', (2, 2), "
            "mesh_dim_names=('dp', 'tp'))"
        )
    cut = {name for p in parameters if is_cut(p) for name in p.device_mesh.mesh_dim_names or ()}
    average = tuple(name for name in names if name not in cut)
    if unknown := cut - set(names):
        raise InvalidArgument(
            f"parameters are cut over {sorted(unknown)}, and mesh has the dimensions "
            f"{list(names)}: pass the mesh whose part they are on"
        )
    if not average:
        raise InvalidArgument(
            f"parameters are cut over all dimensions of mesh, {list(names)}: no ranks have the "
            "same part. Pass the whole mesh, with the dimension over which replicas average"
        )
    over = mesh[average] if len(average) < len(names) else mesh
    return flat_mesh(over).get_group(), mesh if cut else None


def columns_of(parameters: Sequence[Any]) -> Columns | None:
    """Return the shard peers over the DTensors' largest mesh, or None without DTensors;
    collective."""
    meshes = dict.fromkeys(p.device_mesh for p in parameters if is_cut(p))
    return Columns(max(meshes, key=lambda mesh: mesh.size())) if meshes else None


def columns_over(
    parameters: Sequence[Any],
    names: Sequence[str],
    *,
    process_group: Any,
    agree_over: AgreeOver | None,
) -> Columns | None:
    """Return the shard peers, or None without DTensors; collective. ``process_group``: the ranks
    that average."""
    cut = check_cut(parameters, names, process_group)
    if cut is None:
        return None
    if agree_over is None:
        raise InvalidArgument(
            f"parameter {cut!r} is a DTensor and agree_over is None: ranks with other shards of it "
            "would skip steps, freeze and thaw apart. Pass the whole mesh instead of the group, as "
            "in mesh=mesh"
        )
    return columns_of(parameters)


def check_cut(parameters: Sequence[Any], names: Sequence[str], process_group: Any) -> str | None:
    """Return the name of the first DTensor, if any. Raise ``InvalidArgument`` unless all are on one
    mesh, whose ranks do not average with each other."""
    cut = [(name, p) for name, p in zip(names, parameters, strict=True) if is_cut(p)]
    if not cut:
        return None
    name, first = cut[0]
    mesh = first.device_mesh
    if process_group is None:
        raise InvalidArgument(
            f"parameter {name!r} is a DTensor, of which this rank has a part (FSDP2, tensor "
            "parallelism), and process_group is None, which means all ranks: pass the ranks that "
            "have the same part, by the whole mesh: mesh=mesh. With fully_shard use torch's "
            "own optimizer and commpress.compress_fsdp(model)"
        )
    for other, parameter in cut:
        if parameter.device_mesh != mesh:
            raise InvalidArgument(
                f"parameters are DTensors on several meshes, {name!r} on {mesh} and {other!r} on "
                f"{parameter.device_mesh}: make an optimizer for each"
            )
        if any(not p.is_replicate() and type(p).__name__ != "Shard" for p in parameter.placements):
            raise InvalidArgument(
                f"parameter {other!r} is a DTensor placed {parameter.placements}, expected Shard "
                "and Replicate: under fully_shard use torch's own optimizer and "
                "commpress.compress_fsdp(model)"
            )
    shared = sorted(set(mesh.mesh.flatten().tolist()) & set(ranks_of(process_group)))
    if len(shared) > 1:
        raise InvalidArgument(
            f"parameter {name!r} is a DTensor on {mesh}, and process_group has the ranks {shared} "
            "of that mesh, which have other parts of it, or gradients that torch has averaged: "
            "pass the ranks that have the same part, by the whole mesh (mesh=mesh), and with "
            "fully_shard use commpress.compress_fsdp(model)"
        )
    return name


# ---------------------------------------------------------------- local experts

HELD: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → the ranks that hold it


class Held(NamedTuple):
    """Global ranks of a local expert's parameter, which only some ranks hold."""

    divided: tuple[int, ...]  # the experts are divided over these
    # ranks with this parameter, this one included; backward averages its gradient over them
    holders: tuple[int, ...]
    rank: int  # this rank


def mark_held(
    parameter: torch.Tensor, divided: Sequence[int], holders: Sequence[int], rank: int
) -> None:
    """Record the ranks that hold a parameter, for its lifetime, even if it moves or is
    converted."""
    HELD[parameter] = Held(tuple(divided), tuple(holders), rank)


def held_of(parameter: torch.Tensor) -> Held | None:
    """Return the ranks that hold a parameter, or None if all do."""
    found: Held | None = HELD.get(parameter)
    return found


def is_held(name: str, parameter: torch.Tensor, ranks: Sequence[int]) -> bool:
    """True if some of ``ranks`` hold other experts under this name, so that it must not be averaged
    over them."""
    held = held_of(parameter)
    if held is None:
        return False
    others = set(ranks) - {held.rank}
    if others.isdisjoint(held.divided):
        return False  # all have the same experts
    strangers = sorted(others - set(held.divided) - set(held.holders))
    # else these are other sets of such ranks
    if strangers and len(others) + 1 != len(held.divided) * len(held.holders):
        raise InvalidArgument(
            f"parameter {name!r} is of experts divided among ranks {list(held.divided)}, and ranks "
            f"{strangers} train with them: nobody would average what these have of the same "
            "experts. Pass replicas= to parallelise or Experts, the group of the ranks that hold "
            "the same experts as this one"
        )
    return True


def refuse_averaging(named: Iterable[tuple[str, torch.Tensor]], ranks: Sequence[int]) -> None:
    """Raise ``InvalidArgument`` if DistributedDataParallel over ``ranks`` would average different
    experts."""
    found = [name for name, parameter in named if is_held(name, parameter, ranks)]
    if found:
        raise InvalidArgument(
            f"DistributedDataParallel has {found[0]!r}, of experts that are divided among its "
            f"ranks ({len(found)} such): it gives all ranks those of rank 0 and averages different "
            "ones. Call commpress.moe.parallelise(model) on the very module that is wrapped, "
            "before it is"
        )


def refuse_held(
    what: str,
    named: Iterable[tuple[str, torch.Tensor]],
    why: str,
    *,
    cure: str = "train them with OneBitAdam or ZeroOneAdam, or with an optimizer of torch, to "
    "which commpress.moe.held_parameters(model) gives them",
) -> None:
    """Raise ``InvalidArgument`` if a parameter is a local expert's, on any number of ranks."""
    found = [name for name, parameter in named if held_of(parameter) is not None]
    if found:
        raise InvalidArgument(
            f"parameter {found[0]!r} is of experts that are divided among ranks ({len(found)} "
            f"such), and {what} {why}: {cure}"
        )


# ---------------------------------------------------------------- weights stored elsewhere


class LocalWeights:
    """This rank's part of ``parameter``: all of it, the shard of a DTensor, or the part in
    ``source``."""

    def __init__(
        self, name: str, parameter: torch.Tensor, source: torch.Tensor | None = None
    ) -> None:
        check_parameter(name, parameter)
        self.name, self.parameter = name, parameter
        self.source = source = parameter if source is None else source
        here = local(source).detach()
        self.shape, self.dtype, self.device = here.shape, here.dtype, here.device
        if here.numel() and here.untyped_storage().nbytes() < here.numel() * here.element_size():
            raise InvalidArgument(
                f"parameter {name!r} holds no values now, they lie elsewhere: give LocalUpdates "
                "the optimizer that knows where, commpress.Offloaded for a model that "
                "commpress.stream streams"
            )

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[torch.Tensor]:
        """Open the values in memory. ``write``: save changes."""
        here = local(self.source).detach()
        if here.shape != self.shape or here.dtype != self.dtype:
            raise InvalidArgument(
                f"parameter {self.name!r} is now {tuple(here.shape)} of {here.dtype}, it was "
                f"{tuple(self.shape)} of {self.dtype}: construct LocalUpdates after converting or "
                "sharding the model, and step outside of its forward"
            )
        yield here


class WeightHolder(ABC):
    """Optimizer whose weights are not only in its parameters: other ranks or a store have parts or
    copies."""

    averaged = False  # True if replicas are kept equal elsewhere

    @property
    @abstractmethod
    def inner_channel(self) -> Channel | None:
        """Channel to the ranks that have the other parts and average gradients in every step; None
        without any."""

    @abstractmethod
    def local_weights(self) -> list[LocalWeights]:
        """List this rank's part of all trained weights. Names and lengths are equal on the same
        rank of every replica."""

    @abstractmethod
    def settle_weights(self) -> None:
        """Finish running work before weights are read."""

    @abstractmethod
    def weights_written(self) -> None:
        """Update copies after weights were written. Collective over the ranks of
        ``inner_channel``."""
