"""Start torch.distributed under any launcher: torchrun, mpirun or srun."""

import os
import re
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from commpress.collectives.transports import interface
from commpress.collectives.transports.mpi import told_by_rank_0
from commpress.errors import InvalidArgument
from commpress.integrations.trainers.launcher import LaunchedRank, place

_OURS = ("commpress", "commpress_mpi")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(backend: str | None = None, **options: Any) -> LaunchedRank:
    """Call ``torch.distributed.init_process_group`` under torchrun, mpirun or srun, or for one
    process without a launcher.

    Rank and size come from the launcher, and so does the meeting point: ``MASTER_ADDR`` and
    ``MASTER_PORT`` if they are set; under mpirun rank 0 opens a port and broadcasts it by MPI
    (mpi4py); under SLURM the first node of the step, with a port computed from the job's number.
    torchrun's six variables are set for later readers. If ranks are on several machines and
    ``GLOO_SOCKET_IFNAME`` is not set, it is set to the interface that reaches ``MASTER_ADDR``.

    ``backend`` (None: torch's choice) and ``options`` are passed to torch.
    """
    _check_backend(backend)
    where = place() or LaunchedRank("nobody", 0, 1, 0, 1)
    named = "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ
    store = None
    if not named and where.launcher == "torchrun":
        raise InvalidArgument(
            "RANK and WORLD_SIZE are set but MASTER_ADDR and MASTER_PORT are not: set or unset "
            "all four"
        )
    if not named:
        store = _store(where, options.get("timeout", default_pg_timeout))
        os.environ |= {"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)}
    os.environ |= dict(zip(_TORCHRUN, map(str, where[1:]), strict=False))
    interface.name_interface()
    dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.size, **options)
    if torch.cuda.is_available() and where.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(where.local_rank)
    return where


def _check_backend(backend: str | None) -> None:
    for part in (backend or "").split(","):
        asked, known = part.rpartition(":")[2].lower(), [*dist.Backend.backend_list, *_OURS]
        if not asked or asked in dist.Backend.backend_list or dist.is_backend_available(asked):
            continue
        near = get_close_matches(asked, known, n=1)
        cure = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        if asked in _OURS:
            cure = "import commpress.backend, which registers it"
        raise InvalidArgument(f"backend is {backend!r}, which is unknown to torch: {cure}")


def _store(where: LaunchedRank, timeout: Any) -> dist.TCPStore:
    """Connect to the store, which rank 0 serves. ``multi_tenant`` shares it with later users of the
    same address and port in this process."""

    def serve(host: str, port: int) -> dist.TCPStore:
        return dist.TCPStore(
            host,
            port,
            where.size,
            where.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )

    if where.size == 1:
        return serve("127.0.0.1", 0)
    if where.launcher == "SLURM":
        job = int(os.environ.get("SLURM_JOB_ID", 0)) + int(os.environ.get("SLURM_STEP_ID", 0))
        nodes = os.environ.get("SLURM_STEP_NODELIST", os.environ.get("SLURM_NODELIST", ""))
        return serve(
            os.environ.get("MASTER_ADDR", first_host(nodes)),
            int(os.environ.get("MASTER_PORT", 20000 + job % 12000)),
        )
    if where.rank == 0:
        host = os.environ.get("MASTER_ADDR") or (
            "127.0.0.1" if where.local_size == where.size else own_address()
        )
        store = serve(host, int(os.environ.get("MASTER_PORT", 0)))
        told_by_rank_0(f"{host} {store.port}")
        return store
    host, port = told_by_rank_0("").split()
    return serve(host, int(port))


def first_host(nodes: str) -> str:
    """Return the first name in SLURM's short form, such as node[003-007,9],other4."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?([^,\[]*)", nodes)
    if not match:
        raise InvalidArgument(
            f"SLURM's list of nodes is {nodes!r}: set MASTER_ADDR to the first node of the step"
        )
    return match[1] + (match[2] or "") + match[3]


def own_address() -> str:
    """Return an address of this machine that other machines can reach."""
    address, _ = interface.own_address()
    if interface.is_loopback(address) and not interface.named():
        way_out = interface.route_to()
        if way_out is None:
            raise InvalidArgument(
                "this machine's address is unknown: set MASTER_ADDR to one that others can reach"
            )
        return way_out[0]
    return address
