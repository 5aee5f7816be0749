"""Groups inside a commpress group: torch's own with Gloo and NCCL, or MPI."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commpress.collectives.transports import interface
from commpress.collectives.transports.factory import host_transport
from commpress.collectives.transports.meeting import nothing
from commpress.collectives.transports.mpi import MpiTransport
from commpress.collectives.transports.torch import (
    Connections,
    TorchTransport,
    connections_of,
    gloo_group,
    outlive,
    watched,
    yielding,
)
from commpress.collectives.transports.transport import Transport
from commpress.integrations.process_group.mpi_group import MpiGroup
from commpress.integrations.process_group.records import grace_of
from commpress.torch_private import abort, begin_sequence, refusing_backend, set_timeout

_UNSET = timedelta(milliseconds=-1)
Abort = Callable[[], object]  # ends running operations


def torch_group(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group: dist.ProcessGroup,
    *,
    within: timedelta | None = None,
    watch: Callable[[], object] = nothing,
) -> tuple[dist.ProcessGroup, Abort]:
    """Make torch's own group with Gloo and, if there is CUDA, NCCL; ``group`` returns the same
    backends.

    ``within``: time limit for ranks that connect again. torch keeps the backends that a group has
    once returned, so ``group`` then keeps its first ones, with which every call fails. ``watch`` is
    called during the wait; an error that it raises ends that.
    """
    interface.name_interface()
    limit = timeout - timedelta(seconds=grace_of(timeout))
    kinds = dist.ProcessGroup.BackendType
    inner = dist.ProcessGroup(store, rank, size)
    inner._set_default_backend(kinds.GLOO)
    prefixed = dist.PrefixStore("cpu", store)
    make: Callable[..., Any] = partial(gloo_group, prefixed, rank, size, within or limit)
    connect = partial(connections_of, partial(yielding, make), size - 1)
    gloo, connections = connect() if within is None else watched(connect, watch)
    owner = weakref.ref(group)
    outlive(gloo, lambda: owner() is not None and inner_of(owner()) is inner)
    if within is not None:
        set_timeout(gloo, limit)
    backends: dict[str, tuple[Any, Any]] = {"cpu": (kinds.GLOO, gloo)}
    if has_nccl():
        backends["cuda"] = (
            kinds.NCCL,
            nccl_backend(dist.PrefixStore("cuda", store), rank, size, timeout),
        )
    for device, (kind, backend) in backends.items():
        begin_sequence(backend)
        inner._register_backend(torch.device(device), kind, backend)
        if within is None:
            group._register_backend(torch.device(device), kind, backend)
    if within is None:
        group._set_default_backend(kinds.GLOO)
    return inner, partial(_abort, inner, connections)


def has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def nccl_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def inner_of(group: Any) -> Any:
    """Return the group that carries the data of this one."""
    return getattr(group, "_inner", None)


@dataclass(eq=False)
class CurrentBackend:
    """Backend of a group with changing ranks: it passes calls to the backend that carries the data
    at that time."""

    _group: Any
    _device: torch.device

    def __getattr__(self, name: str) -> Any:
        return getattr(inner_of(self._group)._get_backend(self._device), name)


def _abort(inner: dist.ProcessGroup, connections: Connections) -> None:
    abort(inner)
    connections.cut()


def mpi_group(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    group: dist.ProcessGroup,
    *,
    within: timedelta | None = None,
    epoch: str = "",
) -> tuple[MpiGroup, Abort]:
    """Make a group over MPI; ``group`` returns a placeholder, because torch stores a group's name
    and devices in its backends.

    Calls of the placeholder raise an error. ``within``, ``epoch``: time limit and name of a new
    communicator, for ranks that continue without others.
    """
    limit = timeout - timedelta(seconds=grace_of(timeout))
    if within is not None:
        anew = MpiGroup(store, rank, size, limit, epoch=epoch, connecting=within.total_seconds())
        return anew, anew.abort
    kinds = dist.ProcessGroup.BackendType
    placeholder = refusing_backend(
        rank, size, lambda options: setattr(options, "_timeout", timeout)
    )
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        group._register_backend(torch.device(device), kinds.CUSTOM, placeholder)
    group._set_default_backend(kinds.CUSTOM)
    mpi = MpiGroup(store, rank, size, limit)
    return mpi, mpi.abort


def at_once(inner: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a call may be issued before the peers have agreed, because NCCL neither ends
    the process nor blocks the host."""
    return (
        bool(tensors) and tensors[0].is_cuda and isinstance(inner, dist.ProcessGroup) and has_nccl()
    )


def ready(tensors: Sequence[torch.Tensor]) -> None:
    """Wait for the kernels that write tensors on a GPU, because another thread will read them from
    the host."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()


def card_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of NCCL alone, unregistered in torch.distributed."""
    kinds, group = dist.ProcessGroup.BackendType, dist.ProcessGroup(store, rank, size)
    backend = nccl_backend(store, rank, size, timeout)
    begin_sequence(backend)
    group._set_default_backend(kinds.NCCL)
    group._register_backend(torch.device("cuda"), kinds.NCCL, backend)
    return group


class CardTransport(TorchTransport):
    """Transport over its own NCCL communicator, which is made with the first message.

    Its group is unregistered in torch.distributed, without a name and global ranks.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        control = host_transport(dist.PrefixStore("hosts", store), rank, range(size), timeout)
        super().__init__(card_group(store, rank, size, timeout), timeout=timeout, control=control)
        self._store, self._parts = store, 0

    def peer(self, rank: int) -> str:
        return f"rank {rank}"

    def subset(self, ranks: Sequence[int]) -> "CardTransport | None":
        self._parts += 1
        store, members = dist.PrefixStore(f"part{self._parts}", self._store), sorted(ranks)
        return (
            CardTransport(store, members.index(self.rank), len(members), self.timeout)
            if self.rank in members
            else None
        )


def private_transports(
    inner: Any,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    check: Callable[[], object] = nothing,
) -> Mapping[str, Callable[[], Transport]]:
    """Return makers of ``private_transport``, and of a ``CardTransport`` if NCCL carries tensors on
    CUDA.

    ``check`` is called during waits for ranks, and raises if one of them is dead.
    """
    makers: dict[str, Callable[[], Transport]] = {
        "cpu": partial(private_transport, inner, store, rank, size, timeout, check)
    }
    if isinstance(inner, dist.ProcessGroup) and has_nccl():
        makers["cuda"] = partial(
            CardTransport, dist.PrefixStore("card", store), rank, size, timeout
        )
    return makers


def private_transport(
    inner: Any,
    store: dist.Store,
    rank: int,
    size: int,
    timeout: timedelta,
    check: Callable[[], object] = nothing,
) -> Transport:
    """Make the transport of the group's own compressed messages, separate from all others. All
    ranks call it together."""
    if not isinstance(inner, dist.ProcessGroup):
        return MpiTransport(inner.communicator, timeout=timeout)
    return host_transport(store, rank, range(size), timeout, check)


def options_of(
    kind: Any, given: Any, timeout: timedelta | None, named: dict[str, Any], field: str
) -> Any:
    """Return torch's options, from any of the three forms that its own groups take."""
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
