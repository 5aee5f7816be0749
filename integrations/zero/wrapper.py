"""An optimizer around another one: what ``Partitioned`` and ``Offloaded`` have in common."""

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch

from commpress.errors import InvalidArgument, NonFiniteGradient
from commpress.integrations.zero.options import check_clipping, check_optimizer

log = logging.getLogger("commpress")


class Wrapper(torch.optim.Optimizer):
    """``param_groups`` are the user's, with the options of ``optimizer``; who does the arithmetic reads them in each step."""

    where = ""  # the gradients lie, for messages

    def __init__(
        self,
        params: Any,
        optimizer: type[torch.optim.Optimizer],
        options: dict[str, Any],
        *,
        max_grad_norm: float | None,
        on_nonfinite: Literal["skip", "raise"],
    ) -> None:
        check_optimizer(optimizer)
        check_clipping(max_grad_norm, on_nonfinite)
        self._built = False
        self.max_grad_norm, self.on_nonfinite = max_grad_norm, on_nonfinite
        self.steps_done = self.skipped_steps = 0
        super().__init__(params, optimizer([torch.zeros(1, 1)], **options).defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            raise InvalidArgument(
                "add_param_group after construction: the layout is fixed already. Pass all groups to the constructor, or make "
                f"a second {type(self).__name__} for the new parameters"
            )
        super().add_param_group(param_group)

    def _skip(self) -> None:
        self.skipped_steps += 1
        if self.on_nonfinite == "raise":
            raise NonFiniteGradient(
                f"the gradients of step {self.steps_done} hold NaN or infinity{self.where}. Nothing was changed. Look for the "
                "cause in the loss, or pass on_nonfinite='skip'."
            )
        if self.skipped_steps <= 3 or self.skipped_steps % 100 == 0:
            log.warning(
                "step %d was skipped: gradients held NaN or infinity%s (%d so far)",
                self.steps_done, self.where, self.skipped_steps,
            )  # fmt: skip


def loss_of(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def clip_factor(limit: float, norm: torch.Tensor) -> torch.Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What a parameter group says of how to step, as a schedule may have changed it, for who does the arithmetic."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
