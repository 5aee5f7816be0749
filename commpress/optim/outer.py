"""Outer steps of local updates: how the mean change of a round moves the shared weights.

    Δ = Σᵢ wᵢ·(Θ − θᵢ) / Σᵢ wᵢ         the mean change, signed as a gradient

Rules work on flat float32 tensors, in place, the same on every rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from commpress.codecs import Policy
from commpress.collectives.all_gather_mean import GatherMeans
from commpress.collectives.allreduce import Call, Outcome
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges, FlatExchange
from commpress.collectives.pairwise import PairMean, PairMeans, square_sum
from commpress.errors import InvalidArgument
from commpress.work import Steps

State = dict[str, Any]  # tensors by name, as long as the weights


class Outer(ABC):
    """Rule of the outer step. ``buffers`` names its state between rounds, 4 bytes per parameter
    each.

    The rule also chooses how changes are exchanged: ``exchanges`` makes the exchanges, ``exchange``
    runs one. ``equal``: whether the shared weights are the same on every rank afterwards.
    """

    buffers: ClassVar[tuple[str, ...]] = ()
    equal: ClassVar[bool] = True
    spread_of: ClassVar[str] = "the mean change"

    def state(self, weights: torch.Tensor) -> State:
        """Return the state for these weights before the first round."""
        return {name: torch.zeros_like(weights) for name in self.buffers}

    def exchanges(self, policy: Policy, channel: Channel, *, feedback: bool) -> Exchanges:
        """Make the exchanges of a run, with residuals. Raises for a policy that the rule cannot
        use."""
        return Exchanges(policy, channel.size, channel.workspace, feedback=feedback)

    def exchange(
        self,
        exchange: Exchange,
        channel: Channel,
        change: torch.Tensor,
        weights: torch.Tensor,
        shares: Sequence[float],
        call: Call,
    ) -> Steps[list[Outcome]]:
        """Replace ``change`` by the input of ``step``, here the mean weighted by ``shares``, which
        are 1 on average.

        May run in the background: ``weights`` are read only until ``step``.
        """
        if isinstance(exchange, FlatExchange):  # it weights decoded changes
            return (yield from exchange.steps(channel, change, call, shares))
        share = shares[channel.rank]
        if share == 0:
            change.zero_()  # it may be non-finite
        elif share != 1:
            change.mul_(share)
        return (yield from exchange.steps(channel, change, call))

    def spread(
        self,
        exchange: Exchange,
        change: torch.Tensor,
        weights: Sequence[float],
        squares: Sequence[float],
    ) -> tuple[float, float]:
        """Return the mean square over the ranks of ‖Δᵢ − Δ̄‖, and ‖Δ̄‖². ``change``: Δ̄;
        ``squares``: ‖Δᵢ‖²."""
        mean = square_sum(change)
        around = sum(w * s for w, s in zip(weights, squares, strict=True)) / sum(weights) - mean
        return max(around, 0.0), mean

    def ready(self, weights: torch.Tensor, state: State) -> None:
        """Give ``state`` the buffers of this rule, and forget what another rule left in it."""
        for name in self.buffers:
            if name not in state:
                state[name] = torch.zeros_like(weights)
        for name, each in state.items():
            if name not in self.buffers and torch.is_tensor(each):
                each.zero_()

    @abstractmethod
    def step(self, weights: torch.Tensor, change: torch.Tensor, state: State, lr: float) -> None:
        """Move ``weights``. ``change`` may be overwritten; ``lr`` is the present inner learning
        rate."""


@dataclass(frozen=True)
class Average(Outer):
    """Local SGD: Θ ← Θ − Δ, the mean of the ranks' weights."""

    def step(self, weights: torch.Tensor, change: torch.Tensor, state: State, lr: float) -> None:
        weights.sub_(change)


@dataclass(frozen=True)
class WithMomentum(Outer):
    """An outer step that keeps a momentum buffer.

    - ``lr``: the outer learning rate (η, α).
    - ``momentum``: of the outer step (μ, β).
    """

    lr: float = 0.7
    momentum: float = 0.9
    buffers: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        _check_momentum(self.momentum)


@dataclass(frozen=True)
class Nesterov(WithMomentum):
    """DiLoCo: m ← μ·m + Δ, Θ ← Θ − η·(Δ + μ·m)."""

    def step(self, weights: torch.Tensor, change: torch.Tensor, state: State, lr: float) -> None:
        m = state["momentum"].mul_(self.momentum).add_(change)
        weights.sub_(change.add_(m, alpha=self.momentum), alpha=self.lr)


@dataclass(frozen=True)
class SlowMo(WithMomentum):
    """Slow momentum: u ← β·u + Δ/γ, Θ ← Θ − α·γ·u with γ the inner learning rate."""

    lr: float = 1.0
    momentum: float = 0.5

    def step(self, weights: torch.Tensor, change: torch.Tensor, state: State, lr: float) -> None:
        # the last step of a schedule: changes are zero, and Δ/γ would divide by zero
        if lr <= 0:
            return
        u = state["momentum"].mul_(self.momentum).add_(change, alpha=1.0 / lr)
        weights.sub_(u, alpha=self.lr * lr)


@dataclass(frozen=True)
class SparseLoCo(Outer):
    """SparseLoCo: Θ ← Θ − α·Δ̄ (``lr`` is α) without momentum; the residual that decays, e ← β·e +
    Δ, stands in for it.

    Takes a sparse codec, such as "topk-64+bits2". Every rank sends its payload to every other, so
    traffic grows with their number; decoded changes are weighted, Δ̄ = Σ wᵢ·clip(yᵢ) / Σ wᵢ.
    ``clip``: limit the norm of each rank's block to the median over the ranks, so that no outlier
    dominates.
    """

    lr: float = 1.0
    clip: bool = True

    def __post_init__(self) -> None:
        _check_rate(self.lr)
        if not isinstance(self.clip, bool):
            raise InvalidArgument(f"clip is {self.clip!r}, expected True or False")

    def exchanges(self, policy: Policy, channel: Channel, *, feedback: bool) -> Exchanges:
        return GatherMeans(
            policy, channel.size, channel.workspace, clip=self.clip, feedback=feedback
        )

    def step(self, weights: torch.Tensor, change: torch.Tensor, state: State, lr: float) -> None:
        weights.sub_(change.mul_(self.lr))


@dataclass(frozen=True)
class Gossip(WithMomentum):
    """NoLoCo: m ← μ·m + η·(Θᵢ − x̄), Θᵢ ← Θᵢ − m, with x̄ the mean of θᵢ and the θⱼ of one partner,
    drawn anew each round.

    Θᵢ − x̄ = mean of Δ − (mean of Θ − Θᵢ): the pair's mean change, and a pull of its shared weights
    toward each other. Shared weights differ between ranks until ``LocalUpdates.drain`` averages
    them over all. With an odd number of ranks one has no partner in a round.
    """

    equal: ClassVar[bool] = False
    spread_of: ClassVar[str] = "the pair's mean weights"

    def exchanges(self, policy: Policy, channel: Channel, *, feedback: bool) -> Exchanges:
        return PairMeans(policy, channel.size, channel.workspace)

    def exchange(
        self,
        exchange: Exchange,
        channel: Channel,
        change: torch.Tensor,
        weights: torch.Tensor,
        shares: Sequence[float],
        call: Call,
    ) -> Steps[list[Outcome]]:
        shared = weights.to(change.device)
        torch.sub(shared, change, out=change)
        outcomes = yield from super().exchange(exchange, channel, change, weights, shares, call)
        torch.sub(shared, change, out=change)
        return outcomes

    def spread(
        self,
        exchange: Exchange,
        change: torch.Tensor,
        weights: Sequence[float],
        squares: Sequence[float],
    ) -> tuple[float, float]:
        """Return the square of the distance of this rank's weights from the pair's mean, relative
        to it."""
        assert isinstance(exchange, PairMean)
        return exchange.apart**2, 1.0

    def step(self, weights: torch.Tensor, change: torch.Tensor, state: State, lr: float) -> None:
        weights.sub_(state["momentum"].mul_(self.momentum).add_(change, alpha=self.lr))


class TorchOuter(Outer):
    """Any torch optimizer, made by a function of the parameters: Δ is the gradient."""

    def __init__(
        self, factory: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self.factory = factory
        # by address of the weights
        self._of: dict[int, tuple[torch.nn.Parameter, torch.optim.Optimizer]] = {}

    def state(self, weights: torch.Tensor) -> State:
        parameter = torch.nn.Parameter(weights)
        optimizer = self.factory([parameter])
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgument(
                f"outer made {type(optimizer).__name__} of a list of parameters, expected a torch "
                "optimizer, as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True) "
                "does"
            )
        self._of[weights.data_ptr()] = parameter, optimizer
        return optimizer.state[parameter]

    def ready(self, weights: torch.Tensor, state: State) -> None:
        """Do nothing: the optimizer makes its state."""

    def step(self, weights: torch.Tensor, change: torch.Tensor, state: State, lr: float) -> None:
        parameter, optimizer = self._of[weights.data_ptr()]
        parameter.grad = change
        optimizer.step()
        parameter.grad = None


def outer_of(outer: "Outer | Callable[..., torch.optim.Optimizer]") -> Outer:
    if isinstance(outer, Outer):
        return outer
    if not callable(outer) or isinstance(outer, torch.optim.Optimizer):
        raise InvalidArgument(
            f"outer is {outer!r}, expected commpress.Nesterov(), Average(), SlowMo(), SparseLoCo() "
            "or Gossip(), or a function that makes a torch optimizer of a list of parameters"
        )
    return TorchOuter(outer)


def _check_rate(lr: float) -> None:
    if not 0 < lr <= 10:
        raise InvalidArgument(
            f"lr of the outer step is {lr!r}, expected a number above 0 and at most 10, such as 0.7"
        )


def _check_momentum(momentum: float) -> None:
    if not 0 <= momentum < 1:
        raise InvalidArgument(
            f"momentum of the outer step is {momentum!r}, expected a number from 0 to below 1, "
            "such as 0.9"
        )
