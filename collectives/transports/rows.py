"""Rows that travel between ranks: a header and a payload each, and their bytes where they lie in
memory of the host.

Note: not by way of NumPy, after which torch refuses to resize a tensor's memory, as FSDP does.
"""

import ctypes
import os
from collections.abc import Mapping
from typing import NamedTuple

import torch

from commpress.errors import InvalidArgument

HEADER = 64  # bytes; ``frame`` tells what they are
# bytes: a length from a peer that is more is none
LONGEST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Rows(NamedTuple):
    """A header and a payload of any length for each rank in ``payloads``; a payload may be
    empty."""

    headers: torch.Tensor  # uint8[size, HEADER]
    payloads: Mapping[int, torch.Tensor]  # uint8[n], contiguous, by rank


def rows_of(message: torch.Tensor) -> Rows:
    """The rows of uint8[size, row], taken apart."""
    return Rows(message[:, :HEADER], dict(enumerate(message[:, HEADER:])))


def rows_in(message: torch.Tensor) -> list[memoryview]:
    """The memory of the rows of uint8[n, row], whose elements are contiguous."""
    if message.device.type != "cpu":
        raise InvalidArgument(
            f"rows are on {message.device}: expected tensors on the CPU, or on CUDA, which go by "
            "way of it"
        )
    (count, width), step = message.shape, message.stride(0)
    if not count:
        return []
    memory = _memory(message.data_ptr(), (count - 1) * step + width)
    return [memory[r * step : r * step + width] for r in range(count)]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, which must outlive it."""
    return _memory(tensor.data_ptr(), tensor.nbytes)


def _memory(address: int, count: int) -> memoryview:
    return memoryview((ctypes.c_char * count).from_address(address)).cast("B")
