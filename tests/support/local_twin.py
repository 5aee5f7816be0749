"""Ranks of local updates in one process, over the simulation, and the numbers that they train."""

import copy
from dataclasses import dataclass

import numpy as np
import torch

from commpress.codecs import policy_of
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import Average
from commpress.schedules import Hidden

SHAPES = [(24, 16), (5,), (7, 4, 2), (300,)]
RATE = 0.25


def drawn(seed, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]


def dyadic(seed):
    """Numbers whose sums are exact in float32."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(-64, 64, shape, generator=draw) / 64.0 for shape in SHAPES]


def equal(a, b):
    """True if tensors, or lists of them, are the same in every bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return len(a) == len(b) and all(map(equal, a, b))


def flat(tensors):
    return np.concatenate([t.detach().double().numpy().ravel() for t in tensors])


def options_of(*, min_numel=None, alpha=None, **options):
    """Options of ``LocalUpdates``: ``min_numel`` is one of codecs, ``alpha`` of ``overlap``."""
    if min_numel is not None and options.get("codec") is not None:
        options["codec"] = policy_of(options["codec"], min_numel=min_numel)
    return options | ({} if alpha is None else {"overlap": (options.get("overlap", 0), alpha)})


@dataclass(frozen=True)
class HiddenOf(Hidden):
    """Hidden rounds of so many steps, whatever the seconds."""

    steps: int = 2

    def interval(self, step, lr, facts):
        return self.steps


class Ranks:
    """So many ranks of this process, each with parameters, an inner SGD and local updates."""

    def __init__(
        self, size=3, *, start=None, dtype=torch.float32, inner=None, keeps=None, **options
    ):
        begin = drawn(0, dtype) if start is None else start
        self.parameters = [[torch.nn.Parameter(p.clone()) for p in begin] for _ in range(size)]
        make = inner or (lambda p: torch.optim.SGD(p, lr=RATE))
        switch = Loopback(size)
        options = options_of(**{"codec": None, "every": 4, "outer": Average()} | options)
        self.local = []
        for r, p in enumerate(self.parameters):
            keep = {} if keeps is None else {"store": keeps[r]}
            self.local.append(
                LocalUpdates(make(p), process_group=switch.transport(r), **options, **keep)
            )

    def inner_step(self, gradients):
        for mine, local, given_ in zip(self.parameters, self.local, gradients, strict=True):
            for p, g in zip(mine, given_, strict=True):
                p.grad = g.clone()
            for optimizer in local.inner:
                optimizer.step()

    def step(self, gradients, tokens=None):
        self.inner_step(gradients)
        tokens = [1] * len(self.local) if tokens is None else tokens
        simulate([local.steps(tokens=n) for local, n in zip(self.local, tokens, strict=True)])

    def drain(self):
        simulate([local.draining() for local in self.local])

    def saved(self):
        """Exact states of all ranks, and their parameters."""
        states = copy.deepcopy(simulate([local.saving() for local in self.local]))
        return states, [[p.detach().clone() for p in mine] for mine in self.parameters]

    def go_on(self, states, weights):
        """From what ``saved`` gave."""
        for mine, saved in zip(self.parameters, weights, strict=True):
            for p, w in zip(mine, saved, strict=True):
                p.data.copy_(w)
        for local, state in zip(self.local, states, strict=True):
            local.load_state_dict(state)

    def shared(self):
        return np.concatenate([f.weights.double().numpy() for f in self.local[0].fragments])

    def agree(self):
        return len({local.digest() for local in self.local}) == 1


def noise(size, step, make=drawn):
    return [make(1000 * (step + 1) + r) for r in range(size)]
