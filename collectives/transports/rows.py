"""Rows that travel between ranks: a header and a payload for each, of any length, and to some ranks only."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from commpress.collectives.frame import HEADER


class Rows(NamedTuple):
    """A header and a payload of any length for each rank in ``payloads``; a payload may be empty."""

    headers: torch.Tensor  # uint8[size, HEADER]
    payloads: Mapping[int, torch.Tensor]  # uint8[n], contiguous, by rank


def rows_of(wire: torch.Tensor) -> Rows:
    """The rows of uint8[size, row], taken apart."""
    return Rows(wire[:, :HEADER], dict(enumerate(wire[:, HEADER:])))
