"""What a wrapping optimizer accepts: options, and which of the user's parameters it trains."""

from collections.abc import Sequence
from typing import Any

import torch

from commpress.errors import InvalidArgument
from commpress.integrations.zero.shards import local
from commpress.optim.parameters import check_parameter

Place = tuple[torch.Tensor, str, int]


def check_optimizer(optimizer: Any) -> None:
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise InvalidArgument(
            f"optimizer is {optimizer!r}, expected a class such as torch.optim.AdamW; its options follow"
        )
    if any(base.__module__.split(".")[0] == "commpress" for base in optimizer.__mro__):
        raise InvalidArgument(
            f"optimizer is {optimizer.__name__}, which communicates by itself: use it alone, or name an element-wise one, such "
            "as AdamW, SGD or Adagrad"
        )


def check_clipping(max_grad_norm: float | None, on_nonfinite: str) -> None:
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise InvalidArgument(f"max_grad_norm is {max_grad_norm!r}, expected a positive number or None")
    if on_nonfinite not in ("skip", "raise"):
        raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip' or 'raise'")


def trainable(
    groups: Sequence[dict[str, Any]], *, cut: bool = False
) -> tuple[list[list[Place]], list[tuple[str, torch.Tensor]]]:
    """(parameter, name, number) of what is trained, by group; and what is frozen. ``cut``: DTensors are welcome."""
    result: list[list[Place]] = []
    frozen: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    for group in groups:
        result.append([])
        names = group.get("param_names") or [f"#{len(seen) + i:05d}" for i in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if id(parameter) in seen:
                raise InvalidArgument(
                    f"parameter {name!r} is in params twice: pass a tied parameter once, as model.parameters() does"
                )
            if parameter.requires_grad:
                _check(name, parameter, cut)
                result[-1].append((parameter, name, len(seen)))
            else:
                frozen.append((name, parameter))
            seen.add(id(parameter))
    if not any(result):
        raise InvalidArgument("params has no parameter that requires a gradient")
    return result, frozen


def _check(name: str, parameter: torch.Tensor, cut: bool) -> None:
    check_parameter(name, parameter, cut=cut)
    whole = hasattr(parameter, "home") or local(parameter).is_contiguous()  # streamed ones are elsewhere
    if parameter.numel() == 0 or not whole:
        raise InvalidArgument(
            f"parameter {name!r} of shape {tuple(parameter.shape)} is empty or not contiguous, expected contiguous values"
        )
