"""Repetition of steps: marks of their beginning, rehearsals, builds, and causes of failures.

Weights and the state of optimizers need no copy, because they change only after every exchange of
the step has succeeded. Random numbers, buffers and gradients change earlier.
"""

import gc
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from commpress.collectives.channel import Channel
from commpress.errors import CommunicationError, InvalidArgument
from commpress.integrations.elastic.sampler import Batches
from commpress.integrations.elastic.shared_state import SharedState
from commpress.optim.optimizer import CompressedOptimizer
from commpress.torch_private import forget_found, put_scales, scales_of


def fault_of(error: BaseException) -> CommunicationError | None:
    """The failed communication behind an error, if there is one."""
    seen: Sequence[BaseException | None] = [error]
    while seen and seen[0] is not None:
        if isinstance(seen[0], CommunicationError):
            return seen[0]
        seen = [seen[0].__cause__ or seen[0].__context__]
    return None


def without_frames(error: BaseException | None) -> None:
    """Drop the traceback of an error and of its causes, because frames refer to the local variables
    of their functions."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            waiting += [each.__cause__, each.__context__]


class RandomState:
    """Saved random states of Python, NumPy and torch."""

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
            f"state has a {type(optimizer).__name__}, which is only a wrapper of an optimizer, "
            "expected the optimizer itself, with Accelerate optimizer.optimizer"
        ) from error


class StepMark:
    """Beginning of a step of these objects. ``applied`` is True if an optimizer has changed weights
    since.

    Note: it is found by a hook after an optimizer's step. Optimizers of commpress that raise have
    changed nothing, and count their steps.
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
        """Mark the beginning of a step."""
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
        """Restore buffers and scales, and drop gradients."""
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._kept)
        for scaler, scales in zip(self._scalers, self._scales, strict=True):
            put_scales(scaler, scales)
        self.forget()

    def forget(self) -> None:
        """Drop gradients and a GradScaler's findings, so that the next step neither adds to the
        gradients of a failed one nor takes its own for unscaled."""
        for parameter in self._parameters:
            parameter.grad = None
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        for scaler in self._scalers:
            forget_found(scaler)

    def draw_again(self) -> None:
        """Restore the random numbers at the step's beginning."""
        self._random.put_back()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


STEPS = 2


class Rehearsal:
    """First steps of replicas, in which DDP builds its buckets; they are run without effect before
    newcomers may join."""

    def __init__(self, replicas: Sequence[DistributedDataParallel], mark: StepMark) -> None:
        self._mark = mark
        self.steps = STEPS + any(each.static_graph for each in replicas) if replicas else 0

    def over(self, steps: int) -> bool:
        """Return whether replicas that have committed ``steps`` steps are past their first ones."""
        return steps >= self.steps

    def end(self) -> None:
        """Record that replicas are past their first steps."""
        self.steps = 0

    def run(
        self,
        train_step: Callable[..., Any],
        state: SharedState,
        batches: Batches,
        owners: Iterable[Any],
    ) -> None:
        """Run the first steps alone, or on all ranks together; call ``end`` when all have. It then
        restores, even after an error, ``state``, the position in the data, random numbers, and the
        local state of ``owners`` of residuals."""
        document, tensors = state.taken_apart()
        shared = [each.clone() for each in tensors]
        own = [(load, deepcopy(save())) for save, load in map(_own_state, owners) if save and load]
        self._mark.begin()
        try:
            for _ in range(self.steps):
                batches.ready()
                train_step(*batches.next())
        finally:
            state.load(document, shared)
            for load, saved in own:
                load(saved)
            self._mark.undo()
            self._mark.draw_again()
            batches.restart()


def _own_state(owner: Any) -> tuple[Any, Any]:
    """Return functions that get and set the state of this rank alone."""
    if isinstance(owner, CompressedOptimizer):
        return owner.rank_state, owner.load_rank_state
    return getattr(owner, "state_dict", None), getattr(owner, "load_state_dict", None)


Made = tuple[Callable[..., Any], Mapping[str, Any]]


class Build:
    """A user's ``build``, called with the random numbers of the run's beginning, so that each call
    makes the same objects.

    Objects made over the group since a call belong to that build, and are dropped before the next
    one.
    """

    def __init__(self, build: Callable[[], Made], registry: Any) -> None:
        self.build, self._random = build, RandomState()
        self._registry, self._before, self._built = registry, registry.mark(), False

    def __call__(self) -> Made:
        now, self._built = RandomState(), True
        self._random.put_back()
        try:
            return self.build()
        finally:
            now.put_back()

    def let_go(self, objects: Mapping[str, Any]) -> None:
        """Release the built objects; pending errors and hooks may still refer to them for a
        while."""
        if not self._built:
            return
        self._built = False
        for each in objects.values():
            if isinstance(getattr(each, "channel", None), Channel) and hasattr(each, "close"):
                each.close()
        self._registry.return_to(self._before)
        gc.collect()
