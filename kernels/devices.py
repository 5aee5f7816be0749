"""Kernels by device: modules with the same functions, arguments and results, chosen by the device
of the tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from commpress.errors import InvalidArgument
from commpress.kernels import adam, lamb, low_rank, registered_rows
from commpress.kernels.cpu import adam as cpu_adam
from commpress.kernels.cpu import lamb as cpu_lamb
from commpress.kernels.cpu import low_rank as cpu_low_rank
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.cuda import adam as cuda_adam
from commpress.kernels.cuda import row_codec as cuda
from commpress.kernels.pieces import Pieces

_INSTEAD: ContextVar[Any] = ContextVar("kernels instead of the real ones", default=None)


@contextmanager
def instead(kernels: Any) -> Iterator[None]:
    """Use ``kernels`` in place of those of any device, in this thread and context: a simulation
    does not compute."""
    token = _INSTEAD.set(kernels)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def arithmetic(device: torch.device, pieces: Pieces | None = None) -> Any:
    """Return the codecs of rows on ``device``, with the same bytes everywhere: those for
    ``pieces``, or by default the built-in ones."""
    if (given := _INSTEAD.get()) is not None:
        return given
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"tensors are on {device}, expected a CPU or CUDA device: move them there"
        )
    if pieces is not None and pieces.registered:
        return registered_rows
    return cpu if device.type == "cpu" else cuda


def knows(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels of ``device`` encode from, decode to and add to tensors of
    ``dtype``."""
    return device.type in ("cpu", "cuda") and dtype in (torch.float32, torch.bfloat16)


def low_rank_arithmetic(device: torch.device) -> Any:
    """Return PowerSGD's matrix products: compiled loops on the CPU, torch's batched products
    elsewhere."""
    if (given := _INSTEAD.get()) is not None:
        return given
    return cpu_low_rank if device.type == "cpu" else low_rank


def adam_arithmetic(device: torch.device) -> Any:
    """Return Adam's passes over flat buffers: compiled loops on the CPU, kernels on CUDA, torch's
    operations elsewhere."""
    return {"cpu": cpu_adam, "cuda": cuda_adam}.get(device.type, adam)


def lamb_arithmetic(device: torch.device) -> Any:
    """Return LAMB's passes over layers, like ``adam_arithmetic``."""
    return cpu_lamb if device.type == "cpu" else lamb
