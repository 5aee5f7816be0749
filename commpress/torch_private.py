"""Private members of torch, as each of its versions spells them. Nothing else needs to know a version.

Written for torch 2.6 to 2.15; ``tests/test_torch_private.py`` says of each entry what must hold where it runs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.adam import adam as _adam
from torch.optim.adamw import adamw as _adamw

from commpress.errors import InvalidArgument, MissingPackage

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])

AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in 2.13
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# ---------------------------------------------------------------- optimizers


def _adam_of_old(*tensors: Any, decoupled_weight_decay: bool, **options: Any) -> None:
    (_adamw if decoupled_weight_decay else _adam)(*tensors, **options)


# Torch's functional Adam; until 2.6 weight decay that does not enter the gradient was a function of its own.
adam: Callable[..., None] = _adam if "decoupled_weight_decay" in inspect.signature(_adam).parameters else _adam_of_old


# ---------------------------------------------------------------- process groups


def begin_sequence(backend: Any) -> None:
    """Give a backend its first sequence number; from 2.14 on it has one, and warns whoever gives it another."""
    if RELEASE < (2, 14):
        backend._set_sequence_number_for_group()


def abort(group: dist.ProcessGroup) -> None:
    """End what NCCL has under way; Gloo does nothing, and until 2.6 a group could not."""
    if hasattr(group, "abort"):
        group.abort()


def refusing_backend(rank: int, size: int, options: Callable[[Any], None]) -> Any:
    """A backend that answers every collective with an error; ``options`` may change its options first."""
    fake: Any = torch._C._distributed_c10d.FakeProcessGroup
    if not hasattr(fake, "_create_internal") or not hasattr(fake.Options(), "error_on_collective"):
        raise MissingPackage(f"the backend 'commpress_mpi' needs torch 2.10 or later, this is {torch.__version__}")
    given = fake.Options()
    given.error_on_collective = True
    options(given)
    return fake._create_internal(rank, size, given)


# ---------------------------------------------------------------- FSDP2


def fsdp_communication() -> tuple[type, type]:
    """The base classes of FSDP2's custom all-gather and reduce-scatter."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    except ImportError as error:
        raise MissingPackage(
            f"FSDP2 takes communication of others' from torch 2.9 on, this is {torch.__version__}: pip install --upgrade torch"
        ) from error
    return AllGather, ReduceScatter


def fsdp_groups(module: Any) -> list[Any]:
    """The parameter groups of one ``fully_shard``; several, each on a mesh of its own, since 2.13."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if hasattr(state, "_fsdp_param_group"):
        return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    raise InvalidArgument(
        f"torch {torch.__version__} keeps the parameters of a fully_shard somewhere else than 2.9 to 2.15 do: use one of these"
    )
