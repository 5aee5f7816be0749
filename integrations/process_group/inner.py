"""Groups inside a commpress group: torch's own with Gloo and NCCL, or MPI."""

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commpress.collectives.transports.factory import own_connections
from commpress.collectives.transports.gloo import Connections, connections_of, outlive, yielding
from commpress.collectives.transports.mpi import MpiTransport
from commpress.collectives.transports.sockets import Mesh, SocketTransport
from commpress.collectives.transports.torch import TorchTransport
from commpress.collectives.transports.transport import Transport
from commpress.integrations.process_group.blame import grace_of
from commpress.integrations.process_group.mpi_group import MpiGroup
from commpress.torch_private import abort, begin_sequence, refusing_backend

_UNSET = timedelta(milliseconds=-1)
Abort = Callable[[], object]  # end what is under way


def torch_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, group: dist.ProcessGroup
) -> tuple[dist.ProcessGroup, Abort]:
    """torch's own group with Gloo and, where there is CUDA, NCCL; ``group`` hands out the same backends."""
    limit = timeout - timedelta(seconds=grace_of(timeout))
    kinds = dist.ProcessGroup.BackendType
    inner = dist.ProcessGroup(store, rank, size)
    inner._set_default_backend(kinds.GLOO)
    make: Callable[..., Any] = partial(dist.ProcessGroupGloo, dist.PrefixStore("cpu", store), rank, size, timeout=limit)
    gloo, connections = connections_of(partial(yielding, make), size - 1)
    owner = weakref.ref(group)
    outlive(gloo, lambda: owner() is not None)
    backends: dict[str, tuple[Any, Any]] = {"cpu": (kinds.GLOO, gloo)}
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backends["cuda"] = (kinds.NCCL, dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), rank, size, options))
    for device, (kind, backend) in backends.items():
        begin_sequence(backend)
        inner._register_backend(torch.device(device), kind, backend)
        group._register_backend(torch.device(device), kind, backend)
    group._set_default_backend(kinds.GLOO)
    return inner, partial(_abort, inner, connections)


def _abort(inner: dist.ProcessGroup, connections: Connections) -> None:
    abort(inner)
    connections.cut()


def mpi_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, group: dist.ProcessGroup
) -> tuple[MpiGroup, Abort]:
    """MPI; ``group`` hands out a placeholder, because torch keeps a group's name and devices in its backends.

    Whatever would call the placeholder past the group gets an error.
    """
    kinds = dist.ProcessGroup.BackendType
    placeholder = refusing_backend(rank, size, lambda options: setattr(options, "_timeout", timeout))
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        group._register_backend(torch.device(device), kinds.CUSTOM, placeholder)
    group._set_default_backend(kinds.CUSTOM)
    mpi = MpiGroup(store, rank, size, timeout - timedelta(seconds=grace_of(timeout)))
    return mpi, mpi.abort


def at_once(inner: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """True where a call may be issued before the peers have agreed: NCCL neither ends the process nor blocks the host."""
    return bool(tensors) and tensors[0].is_cuda and isinstance(inner, dist.ProcessGroup)


def ready(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for the kernels that fill tensors on a GPU, because another thread will read them by way of the host."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()


class _PrivateTransport(TorchTransport):
    """Over a Gloo group that torch.distributed knows nothing of: it has no name and no global ranks there."""

    def peer(self, rank: int) -> str:
        return f"rank {rank}"


def private_transport(inner: Any, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Transport:
    """For the group's own compressed messages: they meet no others. Made by all ranks in the same call."""
    if not isinstance(inner, dist.ProcessGroup):
        return MpiTransport(inner.communicator, timeout=timeout)

    if not own_connections():
        make: Callable[..., Any] = partial(dist.ProcessGroupGloo, store, rank, size, timeout=timeout)
        gloo, connections = connections_of(partial(yielding, make), size - 1)
        return _PrivateTransport(gloo, timeout=timeout, point_to_point=True, connections=connections)

    def share(here: bytes) -> list[bytes]:
        store.set(f"place/{rank}", here.decode())
        return [store.get(f"place/{peer}") for peer in range(size)]

    return SocketTransport(Mesh(rank, range(size), share, timeout), timeout=timeout)


def options_of(kind: Any, given: Any, timeout: timedelta | None, named: dict[str, Any], field: str) -> Any:
    """torch's options, from one of the three ways in which its own groups take them."""
    if given is None:
        given = named.get("op", named.get("root"))
    if isinstance(given, kind):
        return given
    options = kind()
    if given is not None and field:
        setattr(options, field, given)
    if timeout is not None and timeout != _UNSET:
        options.timeout = timeout
    return options
