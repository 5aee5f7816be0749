"""DistributedDataParallel without its hook again, once nothing is to be compressed any more.

A hook costs even where it only calls torch's own all-reduce: DDP divides by the number of ranks while it copies gradients into
buckets, but leaves that to a hook, which has to pass over every bucket once more. DDP cannot give a hook back, but it makes a
reducer without one whenever it is unpickled, and that is what is asked for here, between two steps.
"""

import logging
from typing import Any, Protocol

from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("commpress")


class Trying(Protocol):
    compresses: bool

    @property
    def settled(self) -> bool: ...


def unhook_after(ddp: DistributedDataParallel, trial: Trying) -> None:
    """In the first forward after the trial, if it ends without compression: a hook cannot take itself away."""

    def look(*_: object) -> None:
        if trial.settled:
            handle.remove()
            if not trial.compresses:
                unhook(ddp)

    handle = ddp.register_forward_pre_hook(look)


def can_unhook(ddp: DistributedDataParallel) -> bool:
    """Not where a reducer holds more than its buckets: a static graph, mixed precision by DDP, torch.compile's own reducer."""
    more = (ddp.static_graph, ddp.mixed_precision is not None, getattr(ddp, "_use_python_reducer", False))
    return not any(more) and len(ddp._comm_hooks) == 1 and hasattr(ddp, "_ddp_init_helper")


def unhook(ddp: DistributedDataParallel) -> None:
    """Local; every rank does so between the same two backwards, because buckets are agreed on anew after the next."""
    if not can_unhook(ddp):
        log.info("the hook stays, and calls torch's all-reduce: this DDP cannot do without it")
        return
    whole: Any = ddp
    whole._remove_autograd_hooks()
    whole._comm_hooks.clear()
    whole._has_rebuilt_buckets = False
    parameters, sparse = whole._build_params_for_reducer()
    whole._ddp_init_helper(parameters, sparse, whole._build_debug_param_to_name_mapping(parameters), False)
