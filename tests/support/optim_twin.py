"""Replicas of a few parameters in one process, each with its optimizer, stepped in lockstep over
the simulation."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch

from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.kernels.pieces import width_of
from commpress.optim import tensor_states
from commpress.optim.optimizer import CompressedOptimizer
from commpress.optim.replicated import ReplicatedOptimizer
from recorded import Recorded

SHAPES = ((40, 50), (700,), (7,))
# for equations: gradients count in full, and nobody wakes up
boundless = mock.patch.object(tensor_states, "REACH", math.inf)
Gradients = list[list[torch.Tensor | None]]  # [rank][parameter]


def start(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def noise(size: int, step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> Gradients:
    """Gradients with a common part and one of each rank's own."""
    common = start(shapes, 1000 + step)
    return [
        [c + 0.5 * own for c, own in zip(common, start(shapes, 7919 * (r + 1) + step), strict=True)]
        for r in range(size)
    ]


def mean(gradients: Gradients) -> list[torch.Tensor]:
    """In rank order, as the exact codec adds."""
    result = []
    for parts in zip(*gradients, strict=True):
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        result.append(total / len(parts))
    return result


class Replicas:
    """``make(parameters, transport)`` builds the optimizer of one rank."""

    def __init__(
        self,
        make: Callable[[list[torch.nn.Parameter], Any], Any],
        size: int,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.size, self.shapes = size, shapes
        self.parameters = [
            [torch.nn.Parameter(p.to(dtype)) for p in start(shapes)] for _ in range(size)
        ]
        self.optimizers = [
            make(p, Recorded(t))
            for p, t in zip(self.parameters, Loopback(size).transports(), strict=True)
        ]

    def step(self, gradients: Gradients) -> list[bool]:
        for parameters, mine in zip(self.parameters, gradients, strict=True):
            for p, g in zip(parameters, mine, strict=True):
                p.grad = None if g is None else g.to(p.dtype)
        with torch.no_grad():
            return simulate([o.steps() for o in self.optimizers])

    def agree(self) -> bool:
        """True if weights, and moments that all ranks have, are the same in every bit."""
        whole = isinstance(self.optimizers[0], ReplicatedOptimizer)
        first, *others = (
            [*parameters, *((o.momentum, o.variance) if whole else ())]
            for parameters, o in zip(self.parameters, self.optimizers, strict=True)
        )
        return all(equal(first, each) for each in others)

    def momentum(self) -> np.ndarray:
        return flat(self.optimizers[0]._momenta)

    def divisor(self) -> np.ndarray:
        """s, in whose units momentum travels once the variance is frozen."""
        states = self.optimizers[0].tensors
        return flat([states.divisor(i) for i in range(len(self.shapes))])

    def owed(self) -> np.ndarray:
        """R, the total residual of compressed rounds, side by side like ``flat``."""
        return owed(self.optimizers)

    def elastic(self) -> list[dict[str, Any]]:
        with torch.no_grad():
            return simulate([o.elastic_steps() for o in self.optimizers])


def beside_adam(group: Replicas, steps: int, **options: Any) -> list[torch.nn.Parameter]:
    """Parameters of torch's AdamW after the same steps that ``group`` takes."""
    twin = [torch.nn.Parameter(p) for p in start(group.shapes)]
    adam = torch.optim.AdamW(twin, fused=True, **options)
    for step in range(steps):
        gradients = noise(group.size, step, group.shapes)
        assert group.step(gradients) == [True] * group.size
        adam_step(adam, twin, gradients)
    return twin


def adam_step(
    adam: torch.optim.Optimizer, twin: Sequence[torch.nn.Parameter], gradients: Gradients
) -> None:
    """A step of torch's optimizer with the mean of the ranks' gradients, one for each parameter of
    ``twin``."""
    for p, g in zip(twin, mean(gradients), strict=True):
        p.grad = g
    adam.step()


def telescoped(group: Replicas, steps: range, beta1: float) -> Iterator[np.ndarray]:
    """(1 − β1)·Σ d_t + β1·d_T after each step, where d is how far the momentum is from the one of
    exact means."""
    s, total = group.divisor(), 0.0
    exact = group.momentum() / s
    for step in steps:
        gradients = noise(group.size, step, group.shapes)
        group.step(gradients)
        exact = beta1 * exact + (1 - beta1) * np.mean([flat(g) for g in gradients], axis=0) / s
        difference = group.momentum() / s - exact
        total = total + difference
        assert group.agree()
        yield (1 - beta1) * total + beta1 * difference


def fill(parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for p, value in zip(parameters, values, strict=True):
        p.data.copy_(value)


def flat(tensors: Sequence[torch.Tensor | None]) -> np.ndarray:
    return np.concatenate([t.detach().double().view(-1).numpy() for t in tensors if t is not None])


def owed(optimizers: Sequence[CompressedOptimizer]) -> np.ndarray:
    first, size = optimizers[0]._flat, len(optimizers)
    total = {
        name: np.zeros(numel) for name, (_, numel) in zip(first.names, first.places, strict=True)
    }
    for rank, optimizer in enumerate(optimizers):
        for (name, offset), sent, reduced in optimizer.quantized.residuals.places():
            part = total[name][offset : offset + sent.numel()]
            part += sent.double().numpy() / size
            own = part[rank * width_of(sent.numel(), size) :][: reduced.numel()]
            own += reduced.double().numpy()[: own.size]
    return np.concatenate([total[name] for name in first.names])


def state_of(replicas: Replicas) -> list[Any]:
    """Every number that a skipped step must leave alone."""
    return [
        [p.detach().clone() for p in parameters]
        + [o.momentum.clone(), o.variance.clone()]
        + [t.clone() for key in o.quantized.residuals.places() for t in key[1:]]
        for parameters, o in zip(replicas.parameters, replicas.optimizers, strict=True)
    ]


def equal(a: Any, b: Any) -> bool:
    """True if tensors, or lists of them, are the same in every bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(map(equal, a, b))
