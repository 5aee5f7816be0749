"""Every call of a process group as it is made right, and made wrong by one rank."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from commpress.torch_private import all_gather_single, reduce_scatter_single

NUMEL = 4096
ANYBODY = "recv, any source"
TIMES = 40  # before the one that is wrong, where calls are repeated


def _rows(numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.ones(numel, dtype=dtype) for _ in range(dist.get_world_size())]


def _all_reduce(n: int, dtype: torch.dtype) -> None:
    dist.all_reduce(torch.ones(n, dtype=dtype))


def _all_reduce_async(n: int, dtype: torch.dtype) -> None:
    dist.all_reduce(torch.ones(n, dtype=dtype), async_op=True).wait()


def _all_reduce_coalesced(n: int, dtype: torch.dtype) -> None:
    with _coalescing_manager():
        for tensor in (torch.ones(n, dtype=dtype), torch.ones(2 * n, dtype=dtype)):
            dist.all_reduce(tensor)


def _broadcast(n: int, dtype: torch.dtype) -> None:
    dist.broadcast(torch.ones(n, dtype=dtype), 0)


def _reduce(n: int, dtype: torch.dtype) -> None:
    dist.reduce(torch.ones(n, dtype=dtype), 0)


def _gather_list(n: int, dtype: torch.dtype) -> None:
    dist.all_gather(_rows(n, dtype), torch.ones(n, dtype=dtype))


def _gather_single(n: int, dtype: torch.dtype) -> None:
    all_gather_single(torch.ones(n * dist.get_world_size(), dtype=dtype), torch.ones(n, dtype=dtype))


def _gather_single_coalesced(n: int, dtype: torch.dtype) -> None:
    with _coalescing_manager():
        for _ in range(2):
            _gather_single(n, dtype)


def _gather(n: int, dtype: torch.dtype) -> None:
    dist.gather(torch.ones(n, dtype=dtype), _rows(n, dtype) if dist.get_rank() == 0 else None, dst=0)


def _scatter(n: int, dtype: torch.dtype) -> None:
    dist.scatter(torch.ones(n, dtype=dtype), _rows(n, dtype) if dist.get_rank() == 0 else None, src=0)


def _scatter_list(n: int, dtype: torch.dtype) -> None:
    dist.reduce_scatter(torch.ones(n, dtype=dtype), _rows(n, dtype))


def _scatter_single(n: int, dtype: torch.dtype) -> None:
    reduce_scatter_single(torch.ones(n, dtype=dtype), torch.ones(n * dist.get_world_size(), dtype=dtype))


def _scatter_single_coalesced(n: int, dtype: torch.dtype) -> None:
    with _coalescing_manager():
        for _ in range(2):
            _scatter_single(n, dtype)


def _all_to_all(n: int, dtype: torch.dtype) -> None:
    """Over the group itself: torch's function refuses lists of tensors on anything but NCCL and MPI by its name."""
    dist.group.WORLD.alltoall(_rows(n, dtype), _rows(n, dtype)).wait()  # type: ignore[union-attr]


def _all_to_all_single(n: int, dtype: torch.dtype) -> None:
    numel = n * dist.get_world_size()
    dist.all_to_all_single(torch.ones(numel, dtype=dtype), torch.ones(numel, dtype=dtype))


def _barrier(n: int, dtype: torch.dtype) -> None:
    dist.barrier()


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None  # torch's answer to ranks that are not in the group
        work.wait()


def _send(n: int, dtype: torch.dtype) -> None:
    """Everybody sends to the last rank."""
    last = dist.get_world_size() - 1
    if dist.get_rank() < last:
        dist.send(torch.ones(n, dtype=dtype), last)
    else:
        _wait([dist.irecv(torch.ones(n, dtype=dtype), r) for r in range(last)])


def _recv(n: int, dtype: torch.dtype) -> None:
    """Everybody receives from the last rank."""
    last = dist.get_world_size() - 1
    if dist.get_rank() < last:
        dist.recv(torch.ones(n, dtype=dtype), last)
    else:
        _wait([dist.isend(torch.ones(n, dtype=dtype), r) for r in range(last)])


def _recv_any(n: int, dtype: torch.dtype) -> None:
    last = dist.get_world_size() - 1
    if dist.get_rank() < last:
        dist.recv(torch.ones(n, dtype=dtype))
    else:
        _recv(n, dtype)


def _repeatedly(call: Callable[[int, torch.dtype], None], n: int, dtype: torch.dtype) -> None:
    for _ in range(TIMES):
        call(n, dtype)


CALLS: dict[str, Callable[[int, torch.dtype], None]] = {
    "all_reduce": _all_reduce,
    "all_reduce, async": _all_reduce_async,
    "all_reduce, repeated": partial(_repeatedly, _all_reduce),
    "all_reduce, async, repeated": partial(_repeatedly, _all_reduce_async),
    "all_reduce, coalesced": _all_reduce_coalesced,
    "broadcast": _broadcast,
    "broadcast, repeated": partial(_repeatedly, _broadcast),
    "reduce": _reduce,
    "all_gather": _gather_list,
    "all_gather_single": _gather_single,
    "all_gather_single, coalesced": _gather_single_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _scatter_list,
    "reduce_scatter_single": _scatter_single,
    "reduce_scatter_single, coalesced": _scatter_single_coalesced,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "send": _send,
    "recv": _recv,
    ANYBODY: _recv_any,
}
COMPRESSED = "all_reduce, compressed"
FAULTS = ("kill -9", "SIGSTOP", "wrong shape", "wrong dtype", "wrong op", "wrong codec")


def applies(call: str, fault: str) -> bool:
    """A barrier has no shape, and only a compressed call has a codec."""
    if fault == "wrong codec":
        return call == COMPRESSED
    return call != "barrier" or fault not in ("wrong shape", "wrong dtype")


def make(call: str, fault: str | None) -> None:
    """The call, or what a rank does that gets it wrong in this way. Signals come from outside."""
    name = "all_reduce" if call == COMPRESSED else call
    right = CALLS[name]
    if fault == "wrong shape":
        right(2 * NUMEL, torch.float32)
    elif fault == "wrong dtype":
        right(NUMEL, torch.float64 if call != COMPRESSED else torch.bfloat16)
    elif fault == "wrong op":
        (_reduce if name.startswith(("broadcast", "barrier")) else _broadcast)(NUMEL, torch.float32)
    else:
        right(NUMEL, torch.float32)
