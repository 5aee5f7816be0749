"""Headers before the rows of a message: written, and compared with those that came, where the rows
lie. ``collectives.frame`` says what they hold; ``cuda.headers`` does the same on a GPU."""

import torch

HEADER = 64  # bytes
# the bytes in which headers of one message may differ: the flags, and from SUM on the checksum
FLAGS, SUM = 4, 60
# the sender's numbers are not finite; it asks all others for a vote after this step
NOT_FINITE, ASKS = 1, 2


def stamp(message: torch.Tensor, header: torch.Tensor, flags: torch.Tensor) -> None:
    """Write ``header`` (uint8[64]) before every row, with the flags that any element of ``flags``
    (uint8) has."""
    message[:, :HEADER] = header
    message[:, FLAGS] = _either(flags)


def compare(message: torch.Tensor, header: torch.Tensor) -> torch.Tensor:
    """Return uint8[2]: the flag of numbers that are not finite, set too if a row has another header
    than ``header``, and that of ranks that ask for a vote."""
    differ = message[:, :SUM] != header[:SUM]
    differ[:, FLAGS] = False
    flags = _either(message[:, FLAGS]) | (NOT_FINITE if differ.any() else 0)
    return torch.tensor([flags & NOT_FINITE, flags & ASKS], dtype=torch.uint8)


def _either(flags: torch.Tensor) -> int:
    found = 0
    for flag in flags.tolist():
        found |= flag
    return found
