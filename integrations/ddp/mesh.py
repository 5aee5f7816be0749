"""Compression of a whole mesh in one call: each named dimension gets its codec, and ranks that must
stay equal agree."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from commpress.collectives.agreement import Consensus
from commpress.collectives.channel import Counters
from commpress.collectives.transports.factory import group_of, own_transport
from commpress.errors import InvalidArgument, StateMismatch, refuse_unknown
from commpress.integrations.ddp.hook import (
    DEFAULT_MIN_NUMEL,
    CompressedState,
    compressed_allreduce_hook,
)
from commpress.integrations.ddp.replicas import Replicas
from commpress.integrations.fsdp.fsdp2 import ShardedState, compress_fsdp
from commpress.integrations.fsdp.hsdp import compress_hsdp
from commpress.integrations.pipeline.edges import check_backwards, compress_pipeline
from commpress.optim.layout import is_cut, is_held, local, refuse_held, shards_of
from commpress.torch_private import check_unhooked, pipeline_stages, tensor_parallel_parts
from commpress.work import run

DATA = ("dp", "data", "replica", "shard")
PIPELINE = ("pp", "pipe", "stage")


class MeshStates:
    """States of the dimensions of a mesh, by name, with operations on all of its ranks together."""

    def __init__(self, mesh: DeviceMesh, models: Sequence[nn.Module], data: Sequence[str]) -> None:
        self.mesh, self.models = mesh, list(models)
        self.by_name: dict[str, Any] = {}
        self.replicas: Replicas | None = None
        self.sharded: list[ShardedState] = []  # states of a pipeline's stages under fully_shard
        names = mesh.mesh_dim_names or ()
        sizes = dict(zip(names, mesh.mesh.shape, strict=True))
        pipelined = [name for name in names if is_pipeline(name)]
        self._copies = 1  # ranks of one stage and replica, with other shards or the same weights
        for name in names:
            self._copies *= 1 if name in data or name in pipelined else sizes[name]
        self._replicas = 1
        for name in data:
            self._replicas *= sizes[name]
        # the present tensors: forwards of torch's DDP under tensor parallelism replace them
        self._held = [
            (p, tensor_parallel_parts(p) or shards_of(p))
            for model in models
            for p in model.parameters()
        ]
        self._consensus = Consensus(own_transport(group_of(mesh), votes=True))

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.by_name)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients on this rank, for a model without DistributedDataParallel."""
        return self._own_replicas("no_sync").no_sync()

    def synchronize(self) -> None:
        """Average the gradients between replicas, once after the backwards of a pipeline or under
        ``no_sync``; collective.

        Stages under fully_shard have reduced their gradients already: they agree with all other
        stages whether the step is taken.
        """
        if self.replicas is None and self.sharded:
            finite = all(state.finite for state in self.sharded)
            finite = run(self._consensus.agreed(finite))
            errors = [state.settle(finite) for state in self.sharded]
            if errors[0] is not None:
                raise errors[0]
            return
        self._own_replicas("synchronize").synchronize()

    def _own_replicas(self, call: str) -> Replicas:
        if self.replicas is None:
            raise InvalidArgument(
                f"{call} is for a model given as it is; of DDP and FSDP call their own"
            )
        return self.replicas

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients as ``torch.nn.utils.clip_grad_norm_`` would those of the whole model;
        collective over the mesh.

        Squares of shards and stages are summed, copies count once, so all ranks scale by the same
        factor. Non-finite gradients stay unchanged.
        """
        if not max_norm > 0:
            raise InvalidArgument(f"max_norm is {max_norm!r}, expected a positive number")
        own = 0.0
        for p, shards in self._held:
            if p.grad is not None:
                own += shards / self._copies * float(local(p.grad).double().square().sum())
        every = run(self._consensus.gathered([own]))
        norm = torch.tensor((float(every.sum()) / self._replicas) ** 0.5)
        factor = min(1.0, max_norm / (float(norm) + 1e-6))
        for p, _ in self._held if torch.isfinite(norm) else ():
            if p.grad is not None:
                local(p.grad).mul_(factor)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's residuals of every dimension, for a bitwise resume on the same
        mesh."""
        return {
            name: state.state_dict()
            for name, state in self.by_name.items()
            if hasattr(state, "load_state_dict")
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self.by_name[name].load_state_dict(state)


class ShardedStages(dict[int, ShardedState]):
    """States of this rank's stages under fully_shard, by stage number."""

    @property
    def gradients(self) -> Counters:
        return Counters.together([state.gradients for state in self.values()])

    @property
    def weights(self) -> Counters:
        return Counters.together([state.weights for state in self.values()])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of each stage, for a bitwise resume on the same mesh."""
        return {str(stage): state.state_dict() for stage, state in self.items()}

    def elastic_state_dict(self) -> dict[str, Any]:
        """Return each stage's state for torch's distributed checkpoints; collective."""
        return {str(stage): state.elastic_state_dict() for stage, state in self.items()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Load a ``state_dict`` of the same mesh, or an ``elastic_state_dict`` of these stages,
        from any ranks."""
        if missing := [stage for stage in self if str(stage) not in states]:
            raise StateMismatch(
                f"the state is of {', '.join(map(repr, states))}, and this rank runs stages "
                f"{list(self)}: load one that has "
                f"{', '.join(repr(str(stage)) for stage in missing)}, such as elastic_state_dict() "
                "of who ran them"
            )
        for stage, state in self.items():
            state.load_state_dict(states[str(stage)])


def compress_mesh(
    target: Any, mesh: Any, dims: Mapping[str, Any] | None, options: dict[str, Any]
) -> MeshStates:
    """Implement ``commpress.compress(target, mesh=mesh, dims=dims)``."""
    _check_mesh(mesh, dims)
    assert dims
    stages = _stages(target)
    models = [target] if stages is None else [stage.submod for stage in stages]
    data, pipelined = (
        [name for name in dims if is_data(name)],
        [name for name in dims if is_pipeline(name)],
    )
    if stages is not None:
        check_backwards(target, stages)
    _check_dims(models, mesh, dims, data, pipelined, piped=stages is not None)
    states = MeshStates(mesh, models, [name for name in mesh.mesh_dim_names or () if is_data(name)])
    # dimensions whose ranks can wait for each other in a backward
    together = tuple(name for name in mesh.mesh_dim_names or () if not is_pipeline(name))
    for name in data:
        given = {"agree_over": mesh[together]} | options
        if isinstance(models[0], FSDPModule):
            every = [_sharded(model, mesh, name, dims[name], dict(given)) for model in models]
            states.by_name[name] = every[0]
            if stages is not None and all(isinstance(state, ShardedState) for state in every):
                for state in every:
                    state.settle_by_steps()
                states.sharded += every
                if len(every) > 1:
                    states.by_name[name] = ShardedStages(
                        {stage.stage_index: s for stage, s in zip(stages, every, strict=True)}
                    )
        elif isinstance(models[0], DistributedDataParallel):
            states.by_name[name] = _hooked(models[0], dims[name], given)
        else:
            # all stages average after their last backward, and can wait for each other
            if stages is not None:
                given = {"agree_over": mesh} | options
            among = dist.get_process_group_ranks(mesh[name].get_group())
            held = [(which, p) for which, p in _named(models) if is_held(which, p, among)]
            refuse_held(
                "compress(mesh=)",
                held,
                "averages what replicas hold",
                cure="wrap it in DistributedDataParallel",
            )
            states.by_name[name] = state = _state(
                _named(models), mesh[name].get_group(), dims[name], given
            )
            states.replicas = Replicas(
                [p for m in models for p in m.parameters()], state, in_backward=stages is None
            )
            for model in models:
                states.replicas.start_alike(model, mesh[name].get_group())
                states.replicas.belong_to(model)
                if stages is not None:
                    states.replicas.watch(model)
    for name in pipelined:
        states.by_name[name] = compress_pipeline(target, dims[name])
    return states


def is_data(name: str) -> bool:
    return any(word in name for word in DATA)


def is_pipeline(name: str) -> bool:
    return any(word in name for word in PIPELINE)


def _named(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for number, model in enumerate(models):
        for name, parameter in model.named_parameters():
            yield (name if len(models) == 1 else f"{number}.{name}"), parameter


def _state(
    named: Any, group: dist.ProcessGroup, codec: Any, options: dict[str, Any]
) -> CompressedState:
    if isinstance(codec, str) and codec == "auto":
        raise InvalidArgument(
            "dims has 'auto', which tries torch's own all-reduce too, and that does not agree: "
            "name a codec"
        )
    refuse_unknown("compress", options, CompressedState)
    given = {"min_numel": DEFAULT_MIN_NUMEL} | options
    return CompressedState(codec, named_parameters=named, process_group=group, **given)


def _hooked(ddp: DistributedDataParallel, codec: Any, options: dict[str, Any]) -> CompressedState:
    check_unhooked(ddp)
    state = _state(ddp.module.named_parameters(), ddp.process_group, codec, options)
    ddp.register_comm_hook(state, compressed_allreduce_hook)
    return state


def _sharded(model: Any, mesh: DeviceMesh, name: str, codec: Any, options: dict[str, Any]) -> Any:
    # its own
    options = {
        key: value
        for key, value in options.items()
        if (key, value) != ("min_numel", DEFAULT_MIN_NUMEL)
    }
    if options.pop("exclude", ()):
        raise InvalidArgument(
            "exclude is given for a model under fully_shard: in dims= pass a policy such as "
            "commpress.ByName"
        )
    parameter: Any = next(model.parameters())
    if name in (parameter.device_mesh.mesh_dim_names or ()):
        return compress_fsdp(model, codec=codec, weights=options.pop("weights", codec), **options)
    return compress_hsdp(model, mesh[name], codec, **options)


def _stages(target: Any) -> list[Any] | None:
    """Stages of ``torch.distributed.pipelining``, or None for a model."""
    if isinstance(target, nn.Module):
        return None
    if isinstance(target, Sequence):
        return list(target)
    return [target] if hasattr(target, "submod") else pipeline_stages(target)


# ---------------------------------------------------------------- arguments


def _check_mesh(mesh: Any, dims: Mapping[str, Any] | None) -> None:
    if not isinstance(mesh, DeviceMesh) or not mesh.mesh_dim_names:
        raise InvalidArgument(
            f"mesh is {mesh!r}, expected a DeviceMesh whose dimensions have names, as from "
            "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))"
        )
    if not dims or not isinstance(dims, Mapping):
        raise InvalidArgument(
            f"dims is {dims!r}, expected what to compress by name, as in dims={{'dp': 'int8'}}"
        )
    for name in dims:
        if name not in mesh.mesh_dim_names:
            raise InvalidArgument(
                f"dims names {name!r}, expected dimensions of the mesh: {list(mesh.mesh_dim_names)}"
            )
        if not (is_data(name) or is_pipeline(name)):
            raise InvalidArgument(
                f"dims names {name!r}, expected data-parallel dimensions, which have "
                f"{', '.join(map(repr, DATA))} in their names, and pipelines "
                f"({', '.join(map(repr, PIPELINE))}): what else crosses a mesh, such as the "
                "traffic of tensor parallelism, stays exact. Leave it out"
            )
        if (
            is_pipeline(name)
            and not (mesh.mesh.diff(dim=mesh.mesh_dim_names.index(name)) > 0).all()
        ):
            raise InvalidArgument(
                f"ranks of the mesh do not ascend along {name!r}: {mesh.mesh.tolist()}. torch "
                f"sorts the ranks of a group, so mesh[{name!r}].get_local_rank() would not be the "
                "stage. Number them so that they do"
            )


def _check_dims(
    models: Sequence[nn.Module],
    mesh: DeviceMesh,
    dims: Mapping[str, Any],
    data: Sequence[str],
    pipelined: Sequence[str],
    *,
    piped: bool,
) -> None:
    if pipelined and not piped:
        raise InvalidArgument(
            f"dims names {pipelined[0]!r}, and the first argument is a model: pass the stages of "
            "this rank, or the schedule that runs them (torch.distributed.pipelining)"
        )
    kinds = {
        kind
        for kind in (FSDPModule, DistributedDataParallel)
        if any(isinstance(m, kind) for m in models)
    }
    if DistributedDataParallel in kinds and len(models) > 1:
        raise InvalidArgument(
            f"this rank has {len(models)} stages under DistributedDataParallel: call compress for "
            "each of them with its data dimension, and once for the pipeline"
        )
    if FSDPModule in kinds and not all(isinstance(m, FSDPModule) for m in models):
        raise InvalidArgument(
            f"of this rank's {len(models)} stages some are under fully_shard and some are not: "
            "their gradients are averaged at different times. Shard all of them"
        )
    if FSDPModule not in kinds and len(data) > 1:
        raise InvalidArgument(
            f"dims names {list(data)}, expected one dimension of replicas: flatten them to one in "
            "the mesh"
        )
    parameters: list[Any] = [p for model in models for p in model.parameters() if is_cut(p)]
    cut = {name for p in parameters for name in p.device_mesh.mesh_dim_names or ()}
    for name in data:
        if FSDPModule not in kinds and name in cut:
            raise InvalidArgument(
                f"dims names {name!r}, over which parameters are cut: tensor-parallel traffic "
                "stays exact. Name the dimension of replicas"
            )
    model = models[0]
    if isinstance(model, DistributedDataParallel):
        mine = dist.get_process_group_ranks(model.process_group)
        for name in data:
            ranks = dist.get_process_group_ranks(mesh[name].get_group())
            if ranks != mine:
                raise InvalidArgument(
                    f"dims names {name!r} with the ranks {ranks}, and DistributedDataParallel "
                    f"averages over {mine}: wrap with process_group=mesh[{name!r}].get_group()"
                )
