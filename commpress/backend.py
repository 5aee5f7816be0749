"""Register the process-group backends "commpress" and "commpress_mpi": no other import of the
package has an effect.

import commpress.backend                                       # torch >= 2.14: not needed
torch.distributed.init_process_group("commpress")              # over Gloo and NCCL
commpress.init_process_group("commpress_mpi")                  # over MPI, under mpirun
"""

from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from commpress.errors import InvalidArgument
from commpress.integrations.process_group.group import ProcessGroup
from commpress.integrations.process_group.group_options import GroupOptions

__all__ = ["GroupOptions", "ProcessGroup", "register"]


_INNER: dict[str, Literal["torch", "mpi"]] = {"commpress": "torch", "commpress_mpi": "mpi"}


def _make(inner: Literal["torch", "mpi"], name: str, options: Any, pg_options: Any) -> ProcessGroup:
    """Make a new group when torch asks for one; ``pg_options`` are the caller's."""
    # a reconfigurable group connects only when its members are named
    asked = getattr(options, "enable_reconfigure", False)
    if asked and inner == "mpi":
        raise InvalidArgument(
            f"enable_reconfigure is True, but the ranks of a {name!r} group cannot change: leave "
            "the option out"
        )
    return ProcessGroup(
        dist.HashStore() if asked else options.store,
        0 if asked else options.group_rank,
        1 if asked else options.group_size,
        options.timeout,
        pg_options=pg_options,
        global_ranks=None if asked else options.global_ranks_in_group,
        name=name,
        inner=inner,
        formed=not asked,
    )


def register() -> None:
    """Register both backends with torch, once. The entry point "torch.distributed.backends" names
    this function."""
    if hasattr(dist.Backend, "COMMPRESS"):
        return
    for name, inner in _INNER.items():
        make = partial(_make, inner, name)
        dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu", "cuda"])


register()
