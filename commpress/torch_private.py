"""Private members of torch, as each of its versions spells them. Nothing else needs to know a
version.

Written for torch 2.6 to 2.15; ``tests/house/test_torch_private.py`` says of each entry what must
hold where it runs.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adam import adam as _adam
from torch.optim.adamw import adamw as _adamw

from commpress.errors import InvalidArgument, MissingPackage

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])

RECONFIGURES = RELEASE >= (2, 14)  # torch has a way to give a group other ranks: dist._reconfigure

AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
# renamed in 2.13
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Methods that communicate are left out of graphs: sockets and threads are nothing to trace. As
# ``torch.compiler.disable``, which imports the compiler where it decorates and takes seconds.
untraced = _disable_dynamo


# ---------------------------------------------------------------- optimizers


def _adam_of_old(*tensors: Any, decoupled_weight_decay: bool, **options: Any) -> None:
    (_adamw if decoupled_weight_decay else _adam)(*tensors, **options)


# Torch's functional Adam; until 2.6 weight decay that does not enter the gradient was a function of
# its own.
adam: Callable[..., None] = (
    _adam if "decoupled_weight_decay" in inspect.signature(_adam).parameters else _adam_of_old
)

ENDLESS = 1e9  # steps after which a bias correction is 1 in every bit


# ---------------------------------------------------------------- process groups


def begin_sequence(backend: Any) -> None:
    """Give a backend its first sequence number; from 2.14 on it has one, and warns whoever gives it
    another."""
    if RELEASE < (2, 14):
        backend._set_sequence_number_for_group()


def abort(group: dist.ProcessGroup) -> None:
    """End what NCCL has under way; Gloo does nothing, and until 2.6 a group could not."""
    if hasattr(group, "abort"):
        group.abort()


def is_default(group: dist.ProcessGroup) -> bool:
    """True if it is what ``init_process_group`` has made."""
    return dist.is_initialized() and group is dist.group.WORLD


def other_groups() -> list[dist.ProcessGroup]:
    """Groups made by ``new_group``, ``split_group`` or a mesh."""
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def is_registered(group: dist.ProcessGroup) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def groups_named() -> int:
    """Groups that torch has given a number for a name: the next one gets this."""
    return dist.distributed_c10d._world.group_count


def default_store() -> dist.Store:
    """The store of the default group, in which others agree on connections."""
    return dist.distributed_c10d._get_default_store()


def change_default_group(size: int, store: dist.Store, named: int) -> None:
    """Tell torch of the default group's number of ranks, its store, and the number of the next
    group's name."""
    world, group = dist.distributed_c10d._world, dist.group.WORLD
    assert group is not None
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    world.pg_map[group] = (world.pg_map[group][0], store)
    world.group_count = named


def set_timeout(backend: Any, timeout: Any) -> None:
    """Set the timeout of every call from now on."""
    backend._set_default_timeout(timeout)


def gloo_at(
    address: str, store: dist.Store, rank: int, size: int, timeout: Any
) -> dist.ProcessGroupGloo:
    """Gloo's group of these ranks; this one listens at ``address``, and asks no name server for its
    own."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    made: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return made


def refusing_backend(rank: int, size: int, options: Callable[[Any], None]) -> Any:
    """A backend that answers every collective with an error; ``options`` may change its options
    first."""
    fake: Any = torch._C._distributed_c10d.FakeProcessGroup
    if not hasattr(fake, "_create_internal") or not hasattr(fake.Options(), "error_on_collective"):
        raise MissingPackage(
            f"the backend 'commpress_mpi' needs torch 2.10 or later, this is {torch.__version__}"
        )
    given = fake.Options()
    given.error_on_collective = True
    options(given)
    return fake._create_internal(rank, size, given)


def forget_meshes() -> None:
    """Empty what DTensor remembers of meshes: it takes two over the same ranks for one, also if
    this process has another coordinate in the second, and then gives it the shard of the first."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    for clear in (
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(_redistribute._gen_transform_infos, "cache_clear", None),
    ):
        if clear is not None:
            clear()


def shard_like(values: torch.Tensor, parameter: Any) -> torch.Tensor:
    """A DTensor of which this rank has ``values``, cut as ``parameter`` is."""
    shape, stride = parameter.shape, parameter.stride()
    result: torch.Tensor = type(parameter.detach()).from_local(
        values,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=stride,
    )
    return result


def set_shard(parameter: Any, values: torch.Tensor) -> None:
    """Put this rank's part of a DTensor into other memory, as fully_shard does; views taken of it
    before keep the old one."""
    parameter._local_tensor = values.data


def waited(tensor: Any) -> Any:
    """The tensor itself where DTensor has left one that a collective has yet to fill."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor


# ---------------------------------------------------------------- experts


@dataclass(frozen=True, slots=True)
class _RoutingOfOld:
    """Routes of one batch: what ``create_routing`` returns and the other calls take."""

    handle: object
    topk_idx: torch.Tensor
    layout: str = "flat"


class _SwitchOfOld:
    """Base of dispatchers of tokens where torch has none."""


try:  # from 2.15 on
    from torch.distributed._token_switch import Routing, TokenSwitch  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    Routing, TokenSwitch = _RoutingOfOld, _SwitchOfOld


# ---------------------------------------------------------------- DistributedDataParallel


def hook_of(ddp: Any) -> str:
    """Name of the communication hook that its gradients go through, "" without one: then it divides
    by the number of ranks it saw first. A DDP that was pickled lists its hook, and has none."""
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))


def check_wrapped(ddp: Any) -> None:
    """Raise ``InvalidArgument`` unless it is a DistributedDataParallel. That of ``replicate()`` is
    hidden and made in the first forward; of torch 2.9 and later there is another ``replicate()``
    without one."""
    if isinstance(ddp, DistributedDataParallel):
        return
    cure = "wrap the model first, as in DistributedDataParallel(model)"
    if any(
        kind.__module__.startswith("torch.distributed._composable.replicate")
        for kind in type(ddp).__mro__
    ):
        cure = (
            "torch's replicate() makes none that can be given here: use "
            "DistributedDataParallel(model) in its place"
        )
    raise InvalidArgument(
        f"ddp is a {type(ddp).__name__}, expected a DistributedDataParallel: {cure}"
    )


def check_unhooked(ddp: Any) -> None:
    """Raise ``InvalidArgument`` if gradients go through a communication hook already."""
    if hook := hook_of(ddp):
        raise InvalidArgument(
            f"ddp has the communication hook {hook!r} already, and DistributedDataParallel takes "
            "one, for good: call one of commpress.compress, overlap and keep_local, once. For "
            "another codec wrap the model anew, as in DistributedDataParallel(ddp.module)"
        )


def hook_states(ddp: Any) -> list[Any]:
    """States of its communication hooks."""
    return [state for _, state in ddp._comm_hooks]


# ---------------------------------------------------------------- GradScaler


def scales_of(scaler: Any) -> Any:
    """Copies, on its device, of its scale and of the steps since that has changed. None before its
    first use."""
    return (
        None if scaler._scale is None else (scaler._scale.clone(), scaler._growth_tracker.clone())
    )


def put_scales(scaler: Any, scales: Any) -> None:
    """Have them as they were."""
    if scales is not None:
        scaler._scale.copy_(scales[0])
        scaler._growth_tracker.copy_(scales[1])


def forget_found(scaler: Any) -> None:
    """Forget of gradients that are gone that they were unscaled, and whether some were infinite."""
    scaler._per_optimizer_states.clear()


# ---------------------------------------------------------------- DDP


class LossScale:
    """The scale of a GradScaler, which is read again only after it was written: reading waits for a
    GPU."""

    def __init__(self) -> None:
        self._seen: tuple[Any, int, float] = None, 0, 1.0

    def of(self, scaler: torch.amp.GradScaler | None) -> float:
        """The scale as it is now, 1 without a scaler."""
        if scaler is None:
            return 1.0
        scale = scaler._scale
        if scale is None:  # before the first loss
            return scaler.get_scale()
        tensor, version, value = self._seen
        if scale is not tensor or scale._version != version:
            version, value = scale._version, scaler.get_scale()
            self._seen = scale, version, value
        return value


def leave_to_themselves(model: torch.nn.Module, names: list[str]) -> None:
    """Let DDP around ``model``, which is made after this, neither average nor broadcast these
    parameters."""
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*before, *names])


def tensor_parallel_parts(parameter: Any) -> int:
    """Shards of a parameter that torch has made a plain tensor of for DDP
    (``_pre_dp_module_transform``); 0 if it has not."""
    spec = getattr(parameter, "_st_info", None)
    if spec is None:
        return 0
    sizes = zip(spec.mesh.mesh.shape, spec.placements, strict=True)
    return prod(size for size, placement in sizes if placement.is_shard())


# ---------------------------------------------------------------- pipelining


def pipeline_stages(schedule: Any) -> list[Any]:
    """The stages of this rank that a schedule of ``torch.distributed.pipelining`` runs."""
    stages = getattr(schedule, "_stages", None)
    stage = getattr(schedule, "_stage", None)
    if stages is None and stage is None:
        raise InvalidArgument(
            f"a {type(schedule).__name__} of torch {torch.__version__} does not say which stages "
            "it runs: pass the stages instead"
        )
    return [stage] if stages is None else list(stages)


def splits_backward(schedule: Any) -> bool:
    """True if a schedule computes gradients of weights apart from those of activations, as zero
    bubbles do."""
    orders = [
        getattr(schedule, name, None) or {}
        for name in ("pipeline_order", "pipeline_order_with_comms")
    ]
    actions = [
        action for order in orders for row in order.values() for action in row if action is not None
    ]
    actions += [part for action in actions for part in getattr(action, "sub_actions", None) or ()]
    return any(action.computation_type.name == "BACKWARD_WEIGHT" for action in actions)


def learning(stage: Any, *, outputs: bool) -> tuple[bool, ...] | None:
    """Tell for each of a stage's outputs, or inputs, whether its gradient comes back; None if
    torch has not found out.

    Before 2.13 torch asks every float for its gradient, and does not ask either where a user has
    given the shapes.
    """
    metas = getattr(getattr(stage, "_stage_meta", None), "outputs" if outputs else "inputs", None)
    mode = getattr(stage, "_inference_mode", None)
    if (
        metas is None
        or mode is None
        or mode.name != "DYNAMIC"
        or any(meta is None for meta in metas)
    ):
        return None
    return tuple(bool(meta.requires_grad) for meta in metas)


# ---------------------------------------------------------------- meshes


def flat_mesh(mesh: Any) -> Any:
    """The mesh itself if it has one dimension, else one dimension of all its ranks."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


# ---------------------------------------------------------------- FSDP2


def fsdp_communication() -> tuple[type, type]:
    """The base classes of FSDP2's custom all-gather and reduce-scatter."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError as error:
        raise MissingPackage(
            "FSDP2 takes communication of others' from torch 2.9 on, this is "
            f"{torch.__version__}: pip install --upgrade torch"
        ) from error
    return AllGather, ReduceScatter


def fsdp_mesh(group: Any) -> Any:
    """The mesh over which one ``fully_shard`` shards, without the dimensions of tensor
    parallelism."""
    return group.mesh_info.mesh


def fsdp_shapes(group: Any) -> list[torch.Size]:
    """Shapes of what its ranks share out: whole parameters, or what tensor parallelism has left of
    them."""
    return [parameter._orig_size for parameter in group.fsdp_params]


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups of one ``fully_shard``; several, each on a mesh of its own, since
    2.13."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):
        return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    raise InvalidArgument(
        f"torch {torch.__version__} keeps the parameters of a fully_shard somewhere else than 2.9 "
        "to 2.15 do: use one of these"
    )


def take_loaded_parameters(group: Any) -> None:
    """Take those that a loader has put into the modules after ``fully_shard``, as torch does before
    its first forward."""
    for parameter in group.fsdp_params if group.is_sharded else ():
        parameter.reset_sharded_param()


def reshards_after_forward(module: Any) -> bool:
    """True if weights of a module under fully_shard are let go between forward and backward; by
    default all but its own are."""
    states = {
        part: part._get_fsdp_state()
        for part in module.modules()
        if hasattr(part, "_get_fsdp_state")
    }
    own = [
        part
        for part, state in states.items()
        if part is module and getattr(state, "_auto_reshard_after_forward", False)
    ]
    return any(
        group._reshard_after_forward
        for part in states
        if part not in own
        for group in fsdp_groups(part)
    )
