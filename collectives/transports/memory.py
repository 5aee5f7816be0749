"""The bytes of tensors of the host, where they lie.

Note: not by way of NumPy, after which torch refuses to resize the tensor's memory, as FSDP does.
"""

import ctypes
import os

import torch

from commpress.errors import InvalidArgument

LONGEST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes: a length from a peer that is more is none


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Of a contiguous one, which must outlive it."""
    return _memory(tensor.data_ptr(), tensor.nbytes)


def rows_in(wire: torch.Tensor) -> list[memoryview]:
    """The rows of uint8[n, row], whose elements are contiguous."""
    if wire.device.type != "cpu":
        raise InvalidArgument(f"a Gloo group sends host memory, but rows are on {wire.device}: use a group of NCCL for them")
    (count, width), step = wire.shape, wire.stride(0)
    if not count:
        return []
    memory = _memory(wire.data_ptr(), (count - 1) * step + width)
    return [memory[r * step : r * step + width] for r in range(count)]


def _memory(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
