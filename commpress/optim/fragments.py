"""Fragments of a model that is trained locally: parameters that are exchanged together, with their
shared weights."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from commpress.checksum import checksum_of
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.errors import CommunicationError, InvalidArgument
from commpress.optim.local_weights import LocalWeights
from commpress.optim.outer import Outer, State
from commpress.schedules import Pace
from commpress.work import Steps

Arrived = tuple[bool, Pace | None]  # whether the mean counts, and the pace that ranks told


class Fragment:
    """Weights that are exchanged together: what is shared of them (Θ and the outer state), and what
    has been trained since."""

    def __init__(
        self, number: int, locals_: Sequence[LocalWeights], outer: Outer, *, host: bool
    ) -> None:
        self.number, self.locals = number, list(locals_)
        self.device = self.locals[0].device
        if any(each.device != self.device for each in self.locals):
            raise InvalidArgument(
                f"parameters of fragment {number} are on several devices: give each device its "
                "own fragments"
            )
        self.spans, at = list[Span](), 0
        for each in self.locals:
            self.spans.append(Span(each.name, at, each.numel))
            at += each.numel
        self.numel = at
        self.layout = zlib.crc32(
            repr([(each.name, tuple(each.shape)) for each in self.locals]).encode()
        )
        self.steps = self.tokens = 0
        # Θ
        self.weights = torch.empty(at, dtype=torch.float32, device="cpu" if host else self.device)
        self.read(self.weights)
        self.state: State = outer.state(self.weights)
        self._work: torch.Tensor | None = None

    @property
    def names(self) -> tuple[tuple[int, str], ...]:
        """Names by which its exchange is known."""
        return tuple((self.number, span.name) for span in self.spans)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(each.shape) for each in self.locals]

    @property
    def work(self) -> torch.Tensor:
        """Δ on its way, where the parameters are."""
        if self._work is None:
            self._work = torch.empty(self.numel, dtype=torch.float32, device=self.device)
        return self._work

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[s.source : s.source + s.numel].view(one.shape)
            for s, one in zip(self.spans, self.locals, strict=True)
        ]

    # ------------------------------------------------------------ where Θ and the outer state lie

    @contextmanager
    def opened(self, *, write: bool = False) -> Iterator[None]:
        """``weights`` and ``state`` are in memory; with ``write`` their changes are kept."""
        yield

    def attach(self, exchanges: Exchanges) -> Exchange:
        """Its exchange, with its residuals in memory until ``detach``."""
        return exchanges.of(self.names, lambda: (self.spans, self.shapes), self.device)

    def detach(self, exchanges: Exchanges) -> None:
        """It is not needed before the next ``attach``."""

    def bring(self, exchanges: Exchanges) -> None:
        """Its residuals are in memory until ``put_back``, for a checkpoint."""

    def put_back(self, exchanges: Exchanges) -> None:
        """They are not needed before the next ``attach`` or ``bring``."""

    def prefetch(self) -> None:
        """It is needed soon."""

    # ------------------------------------------------------------ ranks that are to be equal

    def average(self, exact: Exchanges, channel: Channel) -> Steps[None]:
        """``work`` := its mean over the ranks in float32, the same bits on each."""
        exchange = exact.of(self.names, lambda: (self.spans, self.shapes), self.device)
        outcomes = yield from exchange.steps(
            channel, self.work, sequence=channel.take(exchange.sequences), key=0
        )
        settle(outcomes, taken=True)

    def mean_of_all(self, flat: torch.Tensor, exact: Exchanges, channel: Channel) -> Steps[None]:
        """``flat``, as long as the weights, := its mean over the ranks, by way of ``work``."""
        self.work.copy_(flat)
        yield from self.average(exact, channel)
        flat.copy_(self.work)

    # ------------------------------------------------------------ the rank's own weights

    @torch.no_grad()
    def read(self, out: torch.Tensor) -> None:
        for view, each in zip(self.views(out), self.locals, strict=True):
            with each.opened(write=False) as p:
                view.copy_(p)

    def change(self, weights: torch.Tensor | None = None) -> None:
        """``work`` := Θ, or ``weights``, as the parameters would hold it, minus the parameters."""
        weights = self.weights if weights is None else weights
        for shared, out, each in zip(
            self.views(weights), self.views(self.work), self.locals, strict=True
        ):
            with each.opened(write=False) as p:
                out.copy_(shared.to(device=out.device, dtype=p.dtype)).sub_(p.to(out.device))

    def set_change(self, change: torch.Tensor) -> None:
        """Parameters := Θ − change."""
        for shared, moved, each in zip(
            self.views(self.weights), self.views(change), self.locals, strict=True
        ):
            with each.opened(write=True) as p:
                p.copy_(shared - moved.to(shared.device))

    def merge(self, alpha: float) -> None:
        """Parameters := α · parameters + (1 − α) · Θ, or Θ where they are not finite."""
        if alpha and not self.finite():
            alpha = 0.0
        for shared, each in zip(self.views(self.weights), self.locals, strict=True):
            with each.opened(write=True) as p:
                if alpha:
                    p.copy_(torch.lerp(shared.to(device=p.device, dtype=p.dtype), p, alpha))
                else:
                    p.copy_(shared)

    def finite(self) -> bool:
        for each in self.locals:
            with each.opened(write=False) as p:
                if not torch.isfinite(p).all():
                    return False
        return True

    def digest(self) -> int:
        """64 bits of Θ, and of which parameters it is."""
        with self.opened():
            bits = self.weights.detach().cpu().numpy()
            return checksum_of(bits.data.cast("B"), self.layout) if bits.size else self.layout

    def halves(self) -> tuple[float, float]:
        """The 64 bits of ``digest`` in two numbers that float64 holds exactly."""
        digest = self.digest()
        return float(digest >> 32), float(digest & 0xFFFFFFFF)


@dataclass(eq=False)
class Flight:
    """An exchange under way: its fragment leaves after one step and arrives after another, however
    long the network takes."""

    fragment: Fragment
    due: int  # step after which it arrives
    # to be run, or ``future``, if it runs in the background; neither from a checkpoint
    steps: Steps[Arrived] | None = None
    future: torch.futures.Future[Arrived] | None = None
    taken: bool = True  # whether the mean, in ``fragment.work``, counts; once ``arrival`` has run
    trained: tuple[int, int] = (0, 0)  # steps and tokens that its change came from
    finite: bool = True  # whether this rank's change was, as it left
    alpha: float = 0.0  # share of the rank's own weights when it arrives
    long: bool = False  # of a round of every="auto" that needs an outer momentum
    # of the slowest rank, as far as it was measured; once ``arrival`` has run
    pace: Pace | None = None
    error: CommunicationError | None = None

    def arrival(self) -> Steps[bool]:
        """``taken``, once the mean is there."""
        if self.error is not None:
            raise self.error
        try:
            if self.future is not None:
                self.taken, self.pace = self.future.wait()
            elif self.steps is not None:
                self.taken, self.pace = yield from self.steps
        except CommunicationError as error:
            self.error = error
            raise
        self.steps = self.future = None
        return self.taken

    def give_up(self) -> None:
        """It never arrives anywhere: its change goes with the next exchange."""
        self.fragment.steps, self.fragment.tokens = (
            of + left
            for of, left in zip(
                (self.fragment.steps, self.fragment.tokens), self.trained, strict=True
            )
        )


def cut(
    weights: Sequence[LocalWeights], fragments: int | Sequence[Sequence[torch.Tensor]]
) -> list[list[LocalWeights]]:
    """Parts of these weights: so many of about equal size, or those given as lists of
    parameters."""
    if isinstance(fragments, int):
        if not 1 <= fragments <= len(weights):
            raise InvalidArgument(
                f"fragments is {fragments}, expected 1 to {len(weights)}, the number of parameters"
            )
        return _even(list(weights), fragments)
    of = {id(each.parameter): each for each in weights}
    parts = [[id(p) for p in part if id(p) in of or p.requires_grad] for part in fragments]
    if sorted(one for part in parts for one in part) != sorted(of) or not all(parts):
        raise InvalidArgument(
            "fragments do not hold each trained parameter of inner once: every list must, and no "
            "other. For streamed parameters give a number"
        )
    return [[of[one] for one in part] for part in parts]


def _even(weights: list[LocalWeights], count: int) -> list[list[LocalWeights]]:
    """Consecutive parts of about equal size, none empty, of the same parameters on all ranks that
    have shards of them."""
    parts: list[list[LocalWeights]] = []
    left, rest = sum(each.parameter.numel() for each in weights), list(weights)
    for more in range(count, 0, -1):
        part = [rest.pop(0)]
        size = part[0].parameter.numel()
        while len(rest) > more - 1 and (
            more == 1 or size + rest[0].parameter.numel() / 2 <= left / more
        ):
            size += rest[0].parameter.numel()
            part.append(rest.pop(0))
        left -= size
        parts.append(part)
    return parts
