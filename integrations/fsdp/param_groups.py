"""Groups of parameters that FSDP2 communicates together: the only module that reads its internals.

Each call of ``fully_shard`` makes one group. Its reduce-scatter and all-gather use one flat buffer
with a row for each rank, which has the rank's slice of every parameter, in the order of
``FSDPParamGroup.fsdp_params``. torch passes the buffer without a description; the order is read
here, once, and every later call is compared with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from commpress.collectives.reduce_scatter import Part
from commpress.errors import InvalidArgument
from commpress.torch_private import (
    check_fsdp,
    fsdp_groups,
    fsdp_mesh,
    fsdp_shapes,
    take_loaded_parameters,
)


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """One ``fully_shard``: its module and parameters in torch's order."""

    module: FSDPModule
    names: tuple[str, ...]
    mesh: DeviceMesh
    inner: Any  # torch's FSDPParamGroup

    @property
    def name(self) -> str:
        return f"the parameter group of {self.names[0]!r}"

    @property
    def parameters(self) -> tuple[DTensor, ...]:
        return tuple(p.sharded_param for p in self.inner.fsdp_params)

    @property
    def gathered_twice(self) -> bool:
        """True if its parameters are freed after forward, and gathered again among the same ranks
        for backward."""
        return self.inner._reshard_after_forward and not self.inner._use_post_forward_mesh

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Dtype of its parameters in forward and backward."""
        first, *others = {p.mp_policy.param_dtype for p in self.inner.fsdp_params}
        if others:
            raise InvalidArgument(
                f"{self.name} is computed in several dtypes, by param_dtype_override_fn of its "
                "MixedPrecisionPolicy: apply fully_shard to modules of one dtype each"
            )
        dtype: torch.dtype = first or self.parameters[0].dtype
        return dtype

    @property
    def reduces(self) -> bool:
        """False while a backward only accumulates."""
        return bool(self.inner.reduce_grads)

    @property
    def gradients_in_use(self) -> bool:
        """True if its gradients are read as soon as they are reduced, before backward ends."""
        hooks = (
            getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self.parameters
        )
        return self.inner._all_reduce_hook is not None or any(hooks)

    @property
    def offloaded(self) -> bool:
        """True if its shards are on the host while it computes on another device."""
        return any(p.device.type != self.mesh.device_type for p in self.parameters)

    @property
    def prefetches(self) -> bool:
        """True if the user has chosen the groups to gather in advance in forward."""
        return bool(self.module._get_fsdp_state()._states_to_forward_prefetch)

    @property
    def ranks(self) -> int:
        return self.mesh.size()

    def parts(self, *, trainable: bool) -> list[Part]:
        """Return the parts of a row and their places; ``trainable``: those of a reduce-scatter,
        without frozen parameters."""
        parts, at = [], 0
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if trainable and not parameter.requires_grad:
                continue
            shape = self.shapes[name]
            width = _width(parameter, shape, self.ranks)
            parts.append(Part(name, at, width, shape.numel()))
            at += width
        return parts

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes that the ranks of this group shard: with tensor parallelism the shape of a
        parameter's shard."""
        return dict(zip(self.names, fsdp_shapes(self.inner), strict=True))

    def columns_part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of a whole parameter that this group's ranks shard."""
        parameter = self.parameters[self.names.index(name)]
        coordinate, mesh = parameter.device_mesh.get_coordinate(), parameter.device_mesh.mesh
        assert coordinate is not None
        for number, placement in enumerate(parameter.placements[1:], 1):
            if isinstance(placement, Shard):
                chunks = whole.chunk(mesh.shape[number], placement.dim)
                place = coordinate[number]
                whole = chunks[place] if place < len(chunks) else whole[:0]
        return whole

    def slices(self, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return views of each rank's slice of a parameter in ``whole``, which has all its elements
        in order."""
        chunks = self.cut(name, whole.view(self.shapes[name]), self.ranks)
        return [*chunks, *[whole[:0]] * (self.ranks - len(chunks))]

    def cut(self, name: str, whole: torch.Tensor, ranks: int) -> Sequence[torch.Tensor]:
        """Divide ``whole`` among ``ranks`` as the parameter is sharded, into at most one part
        each."""
        return whole.chunk(ranks, _dim(self.parameters[self.names.index(name)]))

    @cached_property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()


def param_groups_of(model: torch.nn.Module) -> list[ParamGroup]:
    """All groups of ``model`` that have parameters, outermost first."""
    check_fsdp()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[ParamGroup] = []
    known: set[int] = set()  # modules given to one fully_shard call share its group
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = fsdp_groups(module)
        if len(groups) > 1:
            raise InvalidArgument(
                f"{type(module).__name__} has parameters on {len(groups)} meshes "
                "(shard_placement_fn), for which torch has no custom communication: call "
                "fully_shard separately for the parameters of each mesh"
            )
        for group in groups:
            if not group.fsdp_params or id(group) in known:
                continue
            known.add(id(group))
            take_loaded_parameters(group)
            parameters = tuple(p.sharded_param for p in group.fsdp_params)
            unknown = [p for p in parameters if id(p) not in names]
            if unknown:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(unknown[0].shape)} in a sharded "
                    f"{type(module).__name__} is not among model.named_parameters(): pass the "
                    "whole model, in sharded state (between steps)"
                )
            one = ParamGroup(
                module, tuple(names[id(p)] for p in parameters), fsdp_mesh(group), group
            )
            _check(one)
            found.append(one)
    if not found:
        raise InvalidArgument(
            "the model has no module that is sharded by FSDP2: call "
            "torch.distributed.fsdp.fully_shard(module) first"
        )
    return found


def _check(param_group: ParamGroup) -> None:
    for name, parameter in zip(param_group.names, param_group.parameters, strict=True):
        if param_group.mesh.ndim != 1 or not hasattr(parameter.placements[0], "dim"):
            raise InvalidArgument(
                f"{name} is placed {parameter.placements} on a mesh of "
                f"{parameter.device_mesh.ndim} dimensions {parameter.device_mesh.mesh_dim_names}, "
                "expected fully_shard over one that only shards. For hybrid sharding use "
                "fully_shard(module, mesh=mesh['shard']) and commpress.compress_hsdp(model, "
                "mesh['replicate'])"
            )
        mesh = parameter.device_mesh
        for number, dim in enumerate(mesh.mesh_dim_names or range(mesh.ndim)):
            if not bool((mesh.mesh.diff(dim=number) > 0).all()):
                raise InvalidArgument(
                    f"{name} is sharded on a mesh whose ranks do not ascend along {dim!r}: "
                    f"{mesh.mesh.tolist()}. FSDP2 assigns rows in the order of the group, which "
                    "torch sorts, but distributed checkpoints save them in the order of the mesh: "
                    "rows would be swapped. Start the ranks in the order of the mesh"
                )
        if any(
            type(placement) is not Shard and not placement.is_replicate()
            for placement in parameter.placements[1:]
        ):
            raise InvalidArgument(
                f"{name} is placed {parameter.placements}, expected tensor parallelism that only "
                "shards and replicates: leave its module out of fully_shard"
            )
        if hasattr(parameter.to_local(), "fsdp_pre_all_gather"):
            raise InvalidArgument(
                f"{name} has its own all-gather (fsdp_pre_all_gather), which cannot be compressed: "
                "pass weights=None, or use a plain parameter"
            )


def column_mesh(param_groups: Sequence[ParamGroup]) -> DeviceMesh | None:
    """Return the mesh of all ranks with parts of the same parameters, if tensor parallelism shards
    some; else None."""
    found = [
        p.device_mesh for each in param_groups for p in each.parameters if p.device_mesh.ndim > 1
    ]
    return found[0] if found else None


def _dim(parameter: DTensor) -> int:
    """Return the sharded dimension; with tensor parallelism on the same dimension torch's placement
    is not a Shard."""
    placement: Any = parameter.placements[0]
    return int(placement.dim)


def _width(parameter: DTensor, shape: torch.Size, ranks: int) -> int:
    """Return the elements of every row; dimension 0 is cut into ⌈size / ranks⌉, others only if they
    divide evenly."""
    if _dim(parameter) != 0:
        return shape.numel() // ranks
    return -(-shape[0] // ranks) * shape[1:].numel()
