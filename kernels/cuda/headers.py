"""Headers before the rows of a message on CUDA, one launch each way: ``collectives.frame`` says
what they hold."""

import numpy as np
import torch

from commpress.kernels.cuda.modules import HEADERS
from commpress.kernels.cuda.row_codec import Launch, Scalars, address, execute

THREADS, HEADER = 256, 64


def stamp(message: torch.Tensor, header: torch.Tensor, flags: torch.Tensor) -> None:
    """Write ``header`` (uint8[64] on the host) before every row, with the flags that any element of
    ``flags`` (uint8 on the device) has."""
    grid = -(-message.shape[0] * HEADER // THREADS)
    marks = address(flags), np.int32(flags.numel())
    args = (*_rows(message), *marks, *_words(header))
    execute(Launch("stamp", HEADERS, grid, THREADS, args, message.device))


def compare(message: torch.Tensor, header: torch.Tensor) -> torch.Tensor:
    """Return uint8[2] on the device: the flag of numbers that are not finite, set too if a row has
    another header than ``header``, and that of ranks that ask for a vote."""
    found = torch.empty(2, dtype=torch.uint8, device=message.device)
    args = (*_rows(message), address(found), *_words(header))
    execute(Launch("compare", HEADERS, 1, THREADS, args, message.device))
    return found


def _rows(message: torch.Tensor) -> Scalars:
    return address(message), np.int64(message.stride(0)), np.int32(message.shape[0])


def _words(header: torch.Tensor) -> Scalars:
    return tuple(np.frombuffer(header.numpy(), np.int64))
