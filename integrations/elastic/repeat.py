"""Marks of a step's beginning: what a repeat needs so that it computes what the first attempt would
have.

Weights and the state of optimizers need no copy, for they change only after every exchange of the
step has succeeded. What changes before are random numbers, buffers, and gradients.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from commpress.errors import InvalidArgument
from commpress.torch_private import forget_found, put_scales, scales_of


class RandomState:
    """Generators of Python, NumPy and torch, as they were."""

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )
        self.cuda = (
            torch.cuda.get_rng_state_all()
            if torch.cuda.is_available() and torch.cuda.is_initialized()
            else []
        )

    def put_back(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


def _hooked(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> Any:
    try:
        return optimizer.register_step_post_hook(hook)
    except AttributeError as error:
        raise InvalidArgument(
            f"state has a {type(optimizer).__name__}, which is only put before an optimizer, "
            "expected the optimizer itself: of Accelerate's, optimizer.optimizer"
        ) from error


class StepMark:
    """Beginning of a step of these objects. ``applied`` tells whether an optimizer has changed
    weights since.

    Note: an optimizer says so when its step is over. One of commpress that raises has changed
    nothing, and counts its steps.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        every = list(objects)
        modules = [each for each in every if isinstance(each, torch.nn.Module)]
        self._optimizers = [each for each in every if isinstance(each, torch.optim.Optimizer)]
        self._buffers = list({id(b): b for module in modules for b in module.buffers()}.values())
        self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        self._parameters = list(
            {id(p): p for module in modules for p in module.parameters()}.values()
        )
        self._scalers = [
            each for each in every if isinstance(each, torch.amp.GradScaler) and each.is_enabled()
        ]
        self._scales = list(map(scales_of, self._scalers))
        self._random = RandomState()
        self._counts: list[int] = []
        self._stepped = False
        self._hooks = [_hooked(each, self._has_stepped) for each in self._optimizers]

    def _has_stepped(self, *_: object) -> None:
        self._stepped = True

    def begin(self) -> None:
        """A step begins here."""
        self._random, self._stepped = RandomState(), False
        self._counts = [getattr(each, "steps_done", 0) for each in self._optimizers]
        self._scales = list(map(scales_of, self._scalers))
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._kept, self._buffers)

    @property
    def applied(self) -> bool:
        return self._stepped or self._counts != [
            getattr(each, "steps_done", 0) for each in self._optimizers
        ]

    def undo(self) -> None:
        """Buffers and scales are as they were, and there are no gradients."""
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._kept)
        for scaler, scales in zip(self._scalers, self._scales, strict=True):
            put_scales(scaler, scales)
        self.forget()

    def forget(self) -> None:
        """No gradients, and nothing that a GradScaler has found in them: what comes next must not
        add to those of a step that failed, nor take its own for unscaled."""
        for parameter in self._parameters:
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for scaler in self._scalers:
            forget_found(scaler)

    def draw_again(self) -> None:
        """Random numbers are those that the step began with."""
        self._random.put_back()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
