"""Private members of torch, by the names of each version. No other module depends on a version.

Written for torch 2.6 to 2.15; ``tests/house/test_torch_private.py`` checks each entry with the
torch that runs it.
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

RECONFIGURES = RELEASE >= (2, 14)  # torch can give a group other ranks: dist._reconfigure

AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
# renamed in 2.13
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# Methods that communicate stay out of graphs, because sockets and threads cannot be traced. The
# public ``torch.compiler.disable`` would do the same but imports the compiler, which takes seconds.
untraced = _disable_dynamo


# ---------------------------------------------------------------- optimizers


def _adam_of_old(*tensors: Any, decoupled_weight_decay: bool, **options: Any) -> None:
    (_adamw if decoupled_weight_decay else _adam)(*tensors, **options)


# Torch's functional Adam; until 2.6 decoupled weight decay was a separate function.
adam: Callable[..., None] = (
    _adam if "decoupled_weight_decay" in inspect.signature(_adam).parameters else _adam_of_old
)

ENDLESS = 1e9  # steps after which a bias correction is exactly 1


# ---------------------------------------------------------------- autograd


_BACKWARDS = (torch.autograd.backward.__code__, torch.autograd.grad.__code__)
_NODE: Any = torch.autograd.function.BackwardCFunction.apply
_NODE_CODE = _NODE.__code__


def in_nested_backward() -> bool:
    """Return whether this thread runs a backward that the backward of an autograd function has
    called, as reentrant checkpoints do. Torch itself tells no backward from another."""
    frame, inside = inspect.currentframe(), False
    while frame is not None:
        if inside and frame.f_code is _NODE_CODE:
            return True
        inside |= frame.f_code in _BACKWARDS
        frame = frame.f_back
    return False


# ---------------------------------------------------------------- streams


def current_stream_address(device: int) -> int:
    """Return the address of this thread's current stream, without an object for it, which costs
    more than a launch."""
    return torch._C._cuda_getCurrentRawStream(device)


# ---------------------------------------------------------------- process groups


def begin_sequence(backend: Any) -> None:
    """Give a backend its first sequence number. Since 2.14 it has one, and warns if it is given
    another."""
    if RELEASE < (2, 14):
        backend._set_sequence_number_for_group()


def abort(group: dist.ProcessGroup) -> None:
    """Abort NCCL's running collectives. Gloo does nothing; groups before 2.7 have no such
    method."""
    if hasattr(group, "abort"):
        group.abort()


def is_default(group: dist.ProcessGroup) -> bool:
    """Return whether this is the group that ``init_process_group`` has made."""
    return dist.is_initialized() and group is dist.group.WORLD


def other_groups() -> list[dist.ProcessGroup]:
    """Return the groups made by ``new_group``, ``split_group`` or a mesh."""
    return [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def is_registered(group: dist.ProcessGroup) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def groups_named() -> int:
    """Return the number of groups named by a counter, which is the next group's name."""
    return dist.distributed_c10d._world.group_count


def default_store() -> dist.Store:
    """Return the store of the default group, through which groups agree on connections."""
    return dist.distributed_c10d._get_default_store()


def change_default_group(size: int, store: dist.Store, named: int) -> None:
    """Tell torch the new size and store of the default group, and the number of the next group's
    name."""
    world, group = dist.distributed_c10d._world, dist.group.WORLD
    assert group is not None
    world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    world.pg_map[group] = (world.pg_map[group][0], store)
    world.group_count = named


def set_timeout(backend: Any, timeout: Any) -> None:
    """Set the timeout of all later calls."""
    backend._set_default_timeout(timeout)


def gloo_at(
    address: str, store: dist.Store, rank: int, size: int, timeout: Any
) -> dist.ProcessGroupGloo:
    """Make a Gloo group. This rank listens at ``address``, which saves a look-up of its own
    name."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout
    made: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return made


def refusing_backend(rank: int, size: int, options: Callable[[Any], None]) -> Any:
    """Return a backend that answers every collective with an error; ``options`` may change its
    options first."""
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
    """Clear DTensor's caches of meshes. It takes two meshes over the same ranks for one, even if
    this process has another coordinate in the second, and would give it the shard of the first."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _redistribute

    rules = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    getattr(rules, "cache", rules).cache_clear()  # torch 2.8 wraps it
    for clear in (
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None),
        getattr(_redistribute, "clear_redistribute_planner_cache", None),
        getattr(_redistribute._gen_transform_infos, "cache_clear", None),
    ):
        if clear is not None:
            clear()


def shard_like(values: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a DTensor with ``values`` as this rank's shard, sharded as ``parameter`` is."""
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
    """Move this rank's shard of a DTensor to the memory of ``values``, as fully_shard does; earlier
    views keep the old memory."""
    parameter._local_tensor = values.data


def waited(tensor: Any) -> Any:
    """Return the tensor, after waiting if DTensor has left the result of an unfinished
    collective."""
    return tensor.wait() if hasattr(tensor, "trigger_wait") else tensor


# ---------------------------------------------------------------- experts


@dataclass(frozen=True, slots=True)
class _RoutingOfOld:
    """Routes of one batch, as returned by ``create_routing`` and taken by the other calls."""

    handle: object
    topk_idx: torch.Tensor
    layout: str = "flat"


class _SwitchOfOld:
    """Base class of dispatchers of tokens where torch has none."""


try:  # from 2.15 on
    from torch.distributed._token_switch import Routing, TokenSwitch  # type: ignore[import-not-found, unused-ignore]
except ImportError:
    Routing, TokenSwitch = _RoutingOfOld, _SwitchOfOld


# ---------------------------------------------------------------- DistributedDataParallel


def hook_of(ddp: Any) -> str:
    """Return the name of DDP's communication hook, "" without one; DDP then divides by its first
    number of ranks. A DDP that was pickled lists its hook but has none."""
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))


def check_wrapped(ddp: Any) -> None:
    """Raise ``InvalidArgument`` unless it is a DistributedDataParallel. ``replicate()`` hides one,
    made in the first forward; the second ``replicate()`` of torch 2.9 and later has none."""
    if isinstance(ddp, DistributedDataParallel):
        return
    cure = "wrap the model first, as in DistributedDataParallel(model)"
    if any(
        kind.__module__.startswith("torch.distributed._composable.replicate")
        for kind in type(ddp).__mro__
    ):
        cure = (
            "torch's replicate() hides its DistributedDataParallel or has none: use "
            "DistributedDataParallel(model) instead"
        )
    raise InvalidArgument(
        f"ddp is a {type(ddp).__name__}, expected a DistributedDataParallel: {cure}"
    )


def check_unhooked(ddp: Any) -> None:
    """Raise ``InvalidArgument`` if a communication hook is registered already."""
    if hook := hook_of(ddp):
        raise InvalidArgument(
            f"ddp has the communication hook {hook!r} already, and DistributedDataParallel takes "
            "only one: call one of commpress.compress, overlap and keep_local, once. For another "
            "codec wrap the model again, as in DistributedDataParallel(ddp.module)"
        )


def hook_states(ddp: Any) -> list[Any]:
    """Return the states of DDP's communication hooks."""
    return [state for _, state in ddp._comm_hooks]


# ---------------------------------------------------------------- GradScaler


def scales_of(scaler: Any) -> Any:
    """Return copies of a scaler's scale and of the steps since its last change, on its device; None
    before its first use."""
    return (
        None if scaler._scale is None else (scaler._scale.clone(), scaler._growth_tracker.clone())
    )


def put_scales(scaler: Any, scales: Any) -> None:
    """Restore what ``scales_of`` returned."""
    if scales is not None:
        scaler._scale.copy_(scales[0])
        scaler._growth_tracker.copy_(scales[1])


def forget_found(scaler: Any) -> None:
    """Forget which gradients were unscaled and whether any was infinite."""
    scaler._per_optimizer_states.clear()


# ---------------------------------------------------------------- DDP


class LossScale:
    """Cached scale of a GradScaler, read again only after a change, because reading waits for the
    GPU."""

    def __init__(self) -> None:
        self._seen: tuple[Any, int, float] = None, 0, 1.0

    def of(self, scaler: torch.amp.GradScaler | None) -> float:
        """Return the current scale, 1 without a scaler."""
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
    """Keep the DDP that will wrap ``model`` from averaging and broadcasting these parameters."""
    before = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*before, *names])


def tensor_parallel_parts(parameter: Any) -> int:
    """Return the number of shards of a parameter that torch has turned into a plain tensor for DDP
    (``_pre_dp_module_transform``); 0 if it has not."""
    spec = getattr(parameter, "_st_info", None)
    if spec is None:
        return 0
    sizes = zip(spec.mesh.mesh.shape, spec.placements, strict=True)
    return prod(size for size, placement in sizes if placement.is_shard())


# ---------------------------------------------------------------- pipelining


def pipeline_stages(schedule: Any) -> list[Any]:
    """Return this rank's stages of a schedule of ``torch.distributed.pipelining``."""
    stages = getattr(schedule, "_stages", None)
    stage = getattr(schedule, "_stage", None)
    if stages is None and stage is None:
        raise InvalidArgument(
            f"the stages of a {type(schedule).__name__} of torch {torch.__version__} cannot be "
            "found: pass the stages instead"
        )
    return [stage] if stages is None else list(stages)


def splits_backward(schedule: Any) -> bool:
    """Return whether a schedule computes gradients of weights apart from those of activations, as
    zero bubbles do."""
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
    """Return whether each output of a stage, or each input, gets a gradient; None if torch has not
    found out.

    Torch before 2.13, and any torch if the user has given the shapes, takes all floats for tensors
    with a gradient.
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
    """Return the mesh if it has one dimension, else a one-dimensional mesh of all its ranks."""
    return mesh if mesh.ndim == 1 else mesh._flatten()


# ---------------------------------------------------------------- FSDP2


def fsdp_communication() -> tuple[type, type]:
    """Return the base classes of FSDP2's custom all-gather and reduce-scatter; ``object`` where
    torch has none."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError:
        return object, object
    return AllGather, ReduceScatter


def check_fsdp() -> None:
    """Raise ``MissingPackage`` if FSDP2 of this torch takes no custom communication."""
    if fsdp_communication()[0] is object:
        raise MissingPackage(
            "FSDP2 takes custom communication since torch 2.9, this is "
            f"{torch.__version__}: pip install --upgrade torch"
        )


def fsdp_mesh(group: Any) -> Any:
    """Return the mesh over which one ``fully_shard`` shards, without dimensions of tensor
    parallelism."""
    return group.mesh_info.mesh


def fsdp_shapes(group: Any) -> list[torch.Size]:
    """Return the shapes of the tensors that its ranks shard: whole parameters, or shards of tensor
    parallelism."""
    return [parameter._orig_size for parameter in group.fsdp_params]


def fsdp_groups(module: Any) -> list[Any]:
    """Return the parameter groups of one ``fully_shard``. Since 2.13 there may be several, each
    with its own mesh."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):
        return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    raise InvalidArgument(
        f"the parameters of a fully_shard of torch {torch.__version__} cannot be found: use torch "
        "2.9 to 2.15"
    )


def take_loaded_parameters(group: Any) -> None:
    """Take parameters that a loader has put into the modules after ``fully_shard``, as torch does
    before its first forward."""
    for parameter in group.fsdp_params if group.is_sharded else ():
        parameter.reset_sharded_param()


def reshards_after_forward(module: Any) -> bool:
    """Return whether a module under fully_shard frees weights between forward and backward; the
    default frees all but its own."""
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
