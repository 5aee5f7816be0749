"""DistributedDataParallel whose ranks keep their own gradients, for local updates where a framework
insists on the wrapper."""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.optim.inner_optimizers import ALONE
from commpress.torch_private import check_unhooked, check_wrapped
from commpress.work import future_on


def keep_local(ddp: DistributedDataParallel) -> None:
    """Leave gradients as each rank computed them: nothing is sent in backward. Call it before the
    first backward.

    Nor are buffers, such as running means, sent in forward: each rank keeps its own, and a file
    holds those of who writes it.
    """
    check_wrapped(ddp)
    if ddp not in ALONE:
        check_unhooked(ddp)
        ddp.register_comm_hook(None, own_gradients)
        ddp.broadcast_buffers = False
        ALONE.add(ddp)


def own_gradients(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP gets its own gradients back."""
    buffer = bucket.buffer()
    future = future_on(buffer.device)
    future.set_result(buffer)
    return future
