"""DeepSpeed's 1-bit optimizers under DDP, to be compared with: up to its release 0.19.6, which is
the last that has them.

They ask an engine whether gradients are to be averaged in backward; here that is DDP's flag. Where
CuPy has no GPU, the few functions of it that they call are NumPy's, which share memory with torch's
CPU tensors alike.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from commpress.errors import MissingPackage


class Engine:
    """The parts of DeepSpeed's engine that the optimizers ask for."""

    mpu, local_rank = None, 0

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp

    @property
    def enable_backward_allreduce(self) -> bool:
        return bool(self.ddp.require_backward_grad_sync)

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value: bool) -> None:
        self.ddp.require_backward_grad_sync = value


def optimizer(
    family: str, ddp: DistributedDataParallel, betas: tuple[float, float], exact: int, updates: int
) -> torch.optim.Optimizer:
    """``exact``: first steps of 1-bit Adam that average gradients; ``updates``: of 0/1 Adam's
    variance at each interval.

    Its first step only makes buffers; it is taken here, so that none of the run's gradients is
    lost.
    """
    module, name, more = {
        "onebit": ("adam", "OnebitAdam", {"freeze_step": exact + 1}),  # with the step below
        "zero-one": ("zoadam", "ZeroOneAdam", {"var_update_scaler": updates}),
    }[family]
    _stand_in()
    try:
        found = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{module}")
    except ImportError as error:
        raise MissingPackage(
            "DeepSpeed's 1-bit optimizers were not found: pip install deepspeed==0.19.6 (later "
            "releases do not have them)"
        ) from error
    comm = importlib.import_module("deepspeed.comm")
    comm.init_distributed(dist_backend="gloo", verbose=False)
    importlib.import_module("deepspeed.runtime.comm.nccl").dist = _Gathers(comm)  # type: ignore[attr-defined]
    made: torch.optim.Optimizer = getattr(found, name)(
        [p for p in ddp.parameters() if p.requires_grad],
        deepspeed=Engine(ddp),
        lr=1e-4,
        betas=betas,
        weight_decay=0.01,
        **more,
    )
    for p in ddp.parameters():
        p.grad = torch.zeros_like(p)
    made.step()
    made.zero_grad()
    return made


def communicates(made: torch.optim.Optimizer) -> str:
    """The content of its next messages: "exact" gradients or "compressed" momentum."""
    return "exact" if made.deepspeed.enable_backward_allreduce else "compressed"  # type: ignore[attr-defined]


class _Exported:
    """A capsule as NumPy wants it: behind a method."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU


class _Gathers:
    """Their calls, for Gloo: it gathers a scale into tensors of one element only from such a
    tensor."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def all_gather(self, into: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> Any:
        return self.comm.all_gather(into, tensor.reshape(into[0].shape), group=group)


def _stand_in() -> None:
    if torch.cuda.is_available() or "cupy" in sys.modules:
        return
    fake: Any = ModuleType("cupy")
    fake.packbits, fake.unpackbits, fake.split, fake.zeros = (
        np.packbits,
        np.unpackbits,
        np.split,
        np.zeros,
    )
    fake.from_dlpack = lambda capsule: np.from_dlpack(_Exported(capsule))
    stream = SimpleNamespace(synchronize=lambda: None)
    fake.cuda = SimpleNamespace(
        Device=lambda index: SimpleNamespace(use=lambda: None), get_current_stream=lambda: stream
    )
    sys.modules["cupy"] = fake
