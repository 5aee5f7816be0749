"""Parameters of which each rank has a shard (DTensors of tensor parallelism), and the ranks that
have the other shards.

A row of the mesh, the ranks with the same shard, averages what it sends; a column, those with the
other shards of the same replica, decides together. Only norms, votes and steps cross a column:
shards are never put together.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import numpy as np
import torch

from commpress.collectives.consensus import AgreeOver, Consensus, DeviceMesh, group_of
from commpress.collectives.transports.factory import own_transport, ranks_of
from commpress.errors import InvalidArgument
from commpress.torch_private import flat_mesh, set_shard, shard_like, waited
from commpress.work import Steps


def is_cut(tensor: Any) -> bool:
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this rank has of it: the same memory."""
    cut: Any = tensor
    return waited(cut.to_local()) if is_cut(cut) else cut


def version_of(parameter: torch.Tensor) -> int:
    """A number that rises when it is written, as a DTensor or by way of its shard."""
    return parameter._version + local(parameter)._version


def move_to(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Make ``values`` the memory of what this rank has of it, with what they hold."""
    if is_cut(parameter):
        set_shard(parameter, values)
    else:
        parameter.data = values


def largest_shard(parameter: Any) -> torch.Size:
    """Shape of what the first rank has of it: nobody has more, and every rank knows."""
    shape = list(parameter.shape)
    if is_cut(parameter):
        for ranks, placement in zip(
            parameter.device_mesh.mesh.shape, parameter.placements, strict=True
        ):
            if placement.is_shard():
                shape[placement.dim] = -(-shape[placement.dim] // ranks)
    return torch.Size(shape)


def alike(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``values`` of this rank, cut as ``parameter`` is."""
    if not is_cut(parameter):
        return values
    return shard_like(values, parameter)


@torch.no_grad()
def settle_gradient(parameter: Any) -> None:
    """Sum a gradient that still is one summand per shard; collective over the parameter's mesh."""
    gradient = parameter.grad
    if is_cut(parameter) and is_cut(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


class Columns:
    """Ranks that have the other shards of these parameters. None of this communicates where there
    are no DTensors."""

    def __init__(self, mesh: Any, *, timeout: timedelta | None) -> None:
        self.mesh = mesh
        self._consensus = Consensus(own_transport(group_of(mesh), timeout=timeout))

    def share(self, parameter: Any) -> float:
        """Share of this rank in a sum over the column: its shard counts once, however many have
        it."""
        return shards_of(parameter) / self.mesh.size()

    def agreed(self, finite: bool, device: torch.device) -> Steps[bool]:
        """True on every rank of the column if all say so."""
        return self._consensus.agreed(finite, device)

    def gathered(self, values: Sequence[float], device: torch.device) -> Steps[np.ndarray]:
        """These numbers of every rank of the column: float64[ranks, len(values)]."""
        return self._consensus.gathered(values, device)

    def all_of(self, indices: Sequence[int], count: int, device: torch.device) -> Steps[list[int]]:
        """Those that every rank names, out of so many."""
        named = np.zeros(count)
        named[list(indices)] = 1
        every = yield from self.gathered(named.tolist(), device)
        result: list[int] = np.flatnonzero(every.all(axis=0)).tolist()
        return result


def shards_of(parameter: Any) -> int:
    """Different shards that a parameter is cut into."""
    if not is_cut(parameter):
        return 1
    sizes = zip(parameter.device_mesh.mesh.shape, parameter.placements, strict=True)
    # a _StridedShard of FSDP2 is no shard
    return prod(size for size, placement in sizes if not placement.is_replicate())


def groups_on(
    mesh: DeviceMesh | None,
    parameters: Iterable[Any],
    process_group: Any,
    agree_over: AgreeOver | None = None,
) -> tuple[Any, AgreeOver | None]:
    """The ranks that average, and all that must agree: as given, or those of ``mesh``.

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


def tensors_in(params: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors of what torch's optimizers take: tensors, named ones or groups of them."""
    for each in params:
        if isinstance(each, dict):
            inner = each["params"]
            yield from tensors_in([inner] if isinstance(inner, torch.Tensor) else inner)
        else:
            yield each[1] if isinstance(each, tuple) else each


def columns_of(parameters: Sequence[Any], *, timeout: timedelta | None) -> Columns | None:
    """None where no parameter is a DTensor; else over their mesh, of several the largest;
    collective."""
    meshes = dict.fromkeys(p.device_mesh for p in parameters if is_cut(p))
    return Columns(max(meshes, key=lambda mesh: mesh.size()), timeout=timeout) if meshes else None


def columns_over(
    parameters: Sequence[Any],
    names: Sequence[str],
    *,
    process_group: Any,
    agree_over: AgreeOver | None,
    timeout: timedelta | None,
) -> Columns | None:
    """None where no parameter is a DTensor; collective. ``process_group``: the ranks that
    average."""
    cut = [(name, p) for name, p in zip(names, parameters, strict=True) if is_cut(p)]
    if not cut:
        return None
    check_cut(cut, process_group)
    if agree_over is None:
        raise InvalidArgument(
            f"parameter {cut[0][0]!r} is a DTensor and agree_over is None: ranks with other shards "
            "of it would skip steps, freeze and thaw apart. Pass the whole mesh instead of the "
            "groups, as in mesh=mesh"
        )
    return Columns(cut[0][1].device_mesh, timeout=timeout)


def check_cut(cut: Sequence[tuple[str, Any]], process_group: Any) -> None:
    """Raise ``InvalidArgument`` unless these DTensors lie on one mesh, whose ranks do not average
    with each other."""
    name, first = cut[0]
    mesh = first.device_mesh
    if process_group is None:
        raise InvalidArgument(
            f"parameter {name!r} is a DTensor, of which this rank has a part (FSDP2, tensor "
            "parallelism), and process_group is None, which means all ranks: pass the ranks that "
            "have the same part, by the whole mesh: mesh=mesh. With fully_shard use torch's own "
            "optimizer and commpress.compress_fsdp(model)"
        )
    for other, parameter in cut:
        if parameter.device_mesh != mesh:
            raise InvalidArgument(
                f"parameters are DTensors on several meshes, {name!r} on {mesh} and {other!r} on "
                f"{parameter.device_mesh}: make an optimizer for each"
            )
        odd = [
            p for p in parameter.placements if not p.is_replicate() and type(p).__name__ != "Shard"
        ]
        if odd:
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
