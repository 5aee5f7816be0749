"""DistributedDataParallel whose ranks keep their own gradients, for local updates in frameworks
that require the wrapper."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.optim.inner_optimizers import ALONE
from commpress.torch_private import check_unhooked, check_wrapped
from commpress.work import future_on


def keep_local(ddp: DistributedDataParallel) -> None:
    """Keep each rank's gradients local: nothing is sent in backward. Call it before the first
    backward.

    Buffers, such as running means, are not sent in forward either: each rank keeps its own, and a
    checkpoint has those of the rank that saved it.
    """
    check_wrapped(ddp)
    if ddp not in ALONE:
        check_unhooked(ddp)
        ddp.register_comm_hook(None, own_gradients)
        ddp.broadcast_buffers = False
        ALONE.add(ddp)


def own_gradients(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return DDP's local gradients unchanged."""
    buffer = bucket.buffer()
    future = future_on(buffer.device)
    future.set_result(buffer)
    return future
