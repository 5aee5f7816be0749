"""Transports made for a process group: the kind that its backend calls for, its kernels compared
when ranks meet."""

import contextlib
import select
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from commpress.collectives.agreement import Consensus, gathered
from commpress.collectives.transports.meeting import nothing
from commpress.collectives.transports.mpi import MpiTransport
from commpress.collectives.transports.sockets import Mesh, SocketTransport
from commpress.collectives.transports.torch import (
    TorchTransport,
    connections_of,
    linger_at_exit,
    outlive,
    plain_backend,
    plainly_gloo,
    yielding,
)
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument, Mismatch
from commpress.kernels.cpu.digest import digest
from commpress.torch_private import default_store
from commpress.work import run

AgreeOver = dist.ProcessGroup | DeviceMesh

_DIGITS = 12  # of the digest, hexadecimal: as a number it is exact in float64
_ASKED = 0.005  # seconds between two questions to a store
_SEQUENCE = 0x1FFF  # far from the first messages, which may follow at once


def own_transport(
    process_group: dist.ProcessGroup | None = None,
    *,
    timeout: timedelta | None = None,
    device: torch.device | None = None,
    votes: bool = False,
) -> Any:
    """A transport among the ranks of ``process_group``, so that its messages meet no others: over
    MPI if the group is.

    Else over a new group, of Gloo or NCCL below "commpress", which would check every message; with
    NCCL also over connections of the hosts. Collective over those ranks. None where
    torch.distributed is not initialised: there is nobody to talk to. ``timeout``: of every wait;
    None: that of the group. ``device``: of the tensors, for NCCL; None: the group's, or the current
    one. ``votes``: for numbers of the host alone.
    """
    if timeout is not None and not (isinstance(timeout, timedelta) and timeout > timedelta()):
        raise InvalidArgument(
            f"timeout is {timeout!r}, expected a positive datetime.timedelta, such as "
            "timedelta(seconds=60)"
        )
    if not initialized():
        return None
    patience = timeout_of(process_group) if timeout is None else timeout
    communicator = getattr(process_group or dist.group.WORLD, "communicator", None)
    if communicator is not None:
        transport: Any = MpiTransport(communicator, timeout=patience)
        require_same_kernels(transport)
        return transport
    linger_at_exit()
    outlive(process_group or dist.group.WORLD)
    # macOS has no epoll: torch's own collectives carry rows there
    if plainly_gloo(process_group) and hasattr(select, "epoll"):
        transport = socket_transport(process_group, timeout=patience)
        require_same_kernels(transport)
        return transport
    ranks = list(ranks_of(process_group))
    backend = plain_backend(dist.get_backend(process_group))
    make = partial(
        dist.new_group, ranks, timeout=patience, backend=backend, use_local_synchronization=True
    )
    group, connections = connections_of(partial(yielding, make), len(ranks) - 1)
    config = str(dist.get_backend_config(group))  # such as cpu:gloo,cuda:nccl
    if "nccl" not in config:
        transport = TorchTransport(group, timeout=patience, connections=connections)
        require_same_kernels(transport)
        return transport
    store = dist.PrefixStore(f"commpress/{group.group_name}", default_store())
    # a store may outlive its groups, and the next one of these ranks may have the same name
    store = dist.PrefixStore(str(store.add(f"made/{group.rank()}", 1)), store)
    control = host_transport(store, group.rank(), ranks, patience)
    require_same_kernels(control)
    if votes:
        return control
    if "cpu:" not in config and (device is None or device.type != "cuda"):
        bound = getattr(process_group or dist.group.WORLD, "bound_device_id", None)
        device = bound or torch.device("cuda", torch.cuda.current_device())
    return TorchTransport(
        group,
        timeout=patience,
        connections=connections,
        control=control,
        device=device if device is not None and device.type == "cuda" else None,
    )


def initialized() -> bool:
    """True if this process is in a process group of torch."""
    return bool(dist.is_initialized())


def on_reform(process_group: dist.ProcessGroup | None, owner: Any) -> None:
    """Let ``owner.reform(change)`` be called when the ranks of the group change, where a group can
    (``group.reform``)."""
    if can_reform(process_group):
        _changing(process_group).on_reform(owner)


def can_reform(process_group: dist.ProcessGroup | None) -> bool:
    """True if the ranks of the group may change while it lives."""
    return initialized() and hasattr(_changing(process_group), "on_reform")


def enroll(channel: Any, process_group: dist.ProcessGroup | None) -> None:
    """Have a group whose ranks may change connect ``channel`` anew when they do."""
    if can_reform(process_group):
        _changing(process_group).enroll(channel)


def _changing(process_group: dist.ProcessGroup | None) -> Any:
    return process_group or dist.group.WORLD


def ranks_of(group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Global ranks of a group; (0,) where torch.distributed is not initialised."""
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) if initialized() else (0,)


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout that a group was made with; the default group's where it was made without one, as
    by a device mesh."""
    known = [
        found
        for each in (group, dist.group.WORLD)
        if each is not None and (found := _timeout(each)) is not None
    ]
    usual = (default_pg_timeout, default_pg_nccl_timeout)
    return next(
        (each for each in known if each not in usual), known[0] if known else default_pg_timeout
    )


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Note: torch tells it by way of the options of a group's backends only."""
    if isinstance(given := getattr(group, "timeout", None), timedelta):  # "commpress"
        return given
    for device in ("cpu", "cuda"):
        # no backend for it, or one without options
        with contextlib.suppress(RuntimeError, AttributeError):
            found: timedelta = group._get_backend(torch.device(device)).options._timeout
            return found
    return None


def socket_transport(
    group: dist.ProcessGroup | None = None, *, timeout: timedelta
) -> SocketTransport:
    """Over connections of our own among the ranks of a group, by which they tell each other where
    they are."""
    ranks = list(ranks_of(group))

    def tell(here: bytes) -> list[bytes]:
        mine = torch.tensor(list(here), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in ranks]
        dist.all_gather(every, mine, group=group)
        return [bytes(row.tolist()) for row in every]

    check = getattr(group or dist.group.WORLD, "check_peers", nothing)
    return SocketTransport(Mesh(dist.get_rank(group), ranks, tell, timeout, check), timeout=timeout)


def host_transport(
    store: dist.Store,
    rank: int,
    world: Sequence[int],
    timeout: timedelta,
    check: Callable[[], object] = nothing,
) -> SocketTransport:
    """Over connections of our own, whose places the ranks tell each other by way of ``store``.

    ``world``: their global numbers. ``check`` is called while ranks are awaited, and raises if one
    of them is gone.
    """

    def share(here: bytes) -> list[bytes]:
        store.set(f"place/{rank}", here.decode())
        keys = [f"place/{peer}" for peer in range(len(world))]
        until = time.monotonic() + timeout.total_seconds()
        while not store.check(keys) and time.monotonic() < until:
            check()
            time.sleep(_ASKED)
        return [store.get(key) for key in keys]

    return SocketTransport(Mesh(rank, world, share, timeout, check), timeout=timeout)


# ---------------------------------------------------------------- who must stay equal


def consensus_over(
    agree_over: AgreeOver | None,
    process_group: dist.ProcessGroup | None,
) -> Consensus | None:
    """None where nobody is named. Collective over those ranks, who are to have ``process_group``
    among them."""
    if agree_over is None:
        return None
    if not isinstance(agree_over, AgreeOver):
        raise InvalidArgument(
            f"agree_over is {agree_over!r}, expected a process group or a DeviceMesh of all ranks "
            "that must stay equal"
        )
    if not dist.is_initialized():
        raise InvalidArgument(
            "agree_over is given, but torch.distributed is not initialised: call "
            "init_process_group before"
        )
    ranks = _ranks(agree_over)
    missing = sorted(
        set(dist.get_process_group_ranks(process_group or dist.group.WORLD)) - set(ranks)
    )
    if missing:
        raise InvalidArgument(
            f"agree_over has the ranks {ranks}, but gradients are exchanged with ranks {missing} "
            "too: pass a group or mesh of all ranks that must stay equal, such as the whole mesh "
            "of data and tensor parallelism"
        )
    return Consensus(own_transport(group_of(agree_over), votes=True))


def _ranks(agree_over: AgreeOver) -> list[int]:
    if isinstance(agree_over, DeviceMesh):
        return sorted(agree_over.mesh.flatten().tolist())
    return sorted(dist.get_process_group_ranks(agree_over))


def group_of(agree_over: AgreeOver) -> dist.ProcessGroup:
    """Return the process group; a mesh with several dimensions gets a new one, unless it is the
    world."""
    ranks = _ranks(agree_over)
    if not isinstance(agree_over, DeviceMesh):
        return agree_over
    if agree_over.ndim == 1:
        return agree_over.get_group()
    if len(ranks) == dist.get_world_size() and dist.group.WORLD is not None:
        return dist.group.WORLD
    return dist.new_group(
        ranks, backend=dist.get_backend(agree_over.get_group(0)), use_local_synchronization=True
    )


# ---------------------------------------------------------------- kernels


def require_same_kernels(transport: Transport) -> None:
    """One small collective; raises ``Mismatch`` on every rank if the digests of kernel sources
    differ."""
    if transport.size == 1:
        return
    mine = float(int(digest()[:_DIGITS], 16))
    every = run(gathered([mine], transport=transport, sequence=_SEQUENCE))[:, 0]
    ranks = {
        number: [r for r, each in enumerate(every) if each == number] for number in every.tolist()
    }
    if len(ranks) == 1:
        return
    usual = max(ranks.values(), key=len)
    found = "; ".join(f"ranks {of} have {int(number):0{_DIGITS}x}" for number, of in ranks.items())
    raise Mismatch(
        "ranks would compute different bits: the digests of their kernels' sources differ "
        f"({found}). Install the same version of commpress on every host, or the same checkout.",
        ranks=tuple(r for of in ranks.values() if of is not usual for r in of),
    )
