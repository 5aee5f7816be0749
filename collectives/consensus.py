"""One verdict for all ranks that must stay equal, where these are more than the ranks that exchange
gradients.

The ranks of a data-parallel group read from each other's headers whether the numbers of all were
finite. Under tensor parallelism a replicated weight lives in several such groups, and one that
skips a step while another takes it drifts apart from it. So the groups vote before anything is
committed: one number from every rank, in a small collective.
"""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from commpress.collectives.scalars import gathered
from commpress.collectives.transports.factory import own_transport
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument
from commpress.work import Steps

AgreeOver = dist.ProcessGroup | DeviceMesh


class Consensus:
    """Votes over ``transport``. Every rank votes once on the same thing, also one that has nothing
    to exchange."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self._votes = transport, 0

    def reserve(self) -> int:
        """The number of the next vote, taken in the same order on every rank."""
        self._votes += 1
        return self._votes - 1

    def agreed(self, finite: bool, *, number: int | None = None) -> Steps[bool]:
        """True on every rank if all ranks say so; ``number`` if it was reserved before."""
        every = yield from self.gathered([float(finite)], number=number)
        return bool(every.all())

    def gathered(self, values: Sequence[float], *, number: int | None = None) -> Steps[np.ndarray]:
        """These numbers of every rank: float64[ranks, len(values)]."""
        sequence = self.reserve() if number is None else number
        return gathered(values, transport=self.transport, sequence=sequence)


def consensus_over(
    agree_over: AgreeOver | None,
    process_group: dist.ProcessGroup | None,
    *,
    timeout: timedelta | None,
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
    return Consensus(own_transport(group_of(agree_over), timeout=timeout, votes=True))


def _ranks(agree_over: AgreeOver) -> list[int]:
    if isinstance(agree_over, DeviceMesh):
        return sorted(agree_over.mesh.flatten().tolist())
    return sorted(dist.get_process_group_ranks(agree_over))


def group_of(agree_over: AgreeOver) -> dist.ProcessGroup:
    """Of a mesh with several dimensions there is none yet, unless it is the world."""
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
