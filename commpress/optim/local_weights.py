"""Weights that a rank trains by itself, as local updates read and write them, wherever they lie."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument
from commpress.optim.parameters import check_parameter


class LocalWeights:
    """This rank's part of ``parameter``: all of it, its shard of a distributed one, or what
    ``source`` holds of it."""

    def __init__(
        self, name: str, parameter: torch.Tensor, source: torch.Tensor | None = None
    ) -> None:
        check_parameter(name, parameter)
        self.name, self.parameter = name, parameter
        self.source = source = parameter if source is None else source
        here = local_part(source)
        self.shape, self.dtype, self.device = here.shape, here.dtype, here.device
        if here.numel() and here.untyped_storage().nbytes() < here.numel() * here.element_size():
            raise InvalidArgument(
                f"parameter {name!r} holds no values now, they lie elsewhere: give LocalUpdates "
                "the optimizer that knows where, commpress.Offloaded for a model that "
                "commpress.stream streams"
            )

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @contextmanager
    def opened(self, *, write: bool) -> Iterator[torch.Tensor]:
        """The values in memory. ``write``: changes are kept."""
        here = local_part(self.source)
        if here.shape != self.shape or here.dtype != self.dtype:
            raise InvalidArgument(
                f"parameter {self.name!r} is now {tuple(here.shape)} of {here.dtype}, it was "
                f"{tuple(self.shape)} of {self.dtype}: construct LocalUpdates after converting or "
                "sharding the model, and step outside of its forward"
            )
        yield here


class WeightHolder(ABC):
    """Optimizer whose weights do not lie in its parameters alone: other ranks or a store have
    parts, or copies, of them."""

    averaged = False  # somebody else sees to it that replicas do not train apart

    @property
    @abstractmethod
    def inner_channel(self) -> Channel | None:
        """To the ranks that have the other parts and average gradients in every step; None if there
        are none."""

    @abstractmethod
    def local_weights(self) -> list[LocalWeights]:
        """This rank's part of all that is trained. Names and lengths are those of every replica's
        corresponding rank."""

    @abstractmethod
    def settle_weights(self) -> None:
        """Before weights are read: what is under way is finished."""

    @abstractmethod
    def weights_written(self) -> None:
        """Copies follow. Collective over the ranks of ``inner_channel``."""


def local_part(p: Any) -> torch.Tensor:
    """The same memory as a plain tensor: the local shard of a distributed one."""
    with torch.no_grad():
        here: torch.Tensor = p.to_local() if hasattr(p, "to_local") else p
        return here.detach()
