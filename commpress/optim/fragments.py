"""Fragments of a locally trained model: parameters exchanged together, with their shared weights.

A ``StoredFragment`` keeps shared weights, outer state and residuals in a tiered store between
exchanges:

the step before it leaves   read ahead
it leaves                   Θ and the outer state are borrowed, residuals copied to where codecs
                            want them
it arrives                  Θ and the outer state change in place, residuals go back; what has no
                            room goes to the disk

The weights at which it left are there, too, while it is under way.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

from commpress.checksum import checksum_of
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.errors import CommunicationError, InvalidArgument
from commpress.feedback import Key
from commpress.optim.layout import LocalWeights
from commpress.optim.outer import Outer, State, TorchOuter
from commpress.schedules import Pace
from commpress.tiered_mem import TieredStore, show_bytes
from commpress.tiered_mem.arena import padded
from commpress.work import Steps

LEFT = "left"  # name in a store
# whether the mean counts, the reported pace, when the headers of all ranks were there, and the
# square of the ranks' spread
Arrived = tuple[bool, Pace | None, float, float | None]


class Fragment:
    """Weights that are exchanged together: their shared state (Θ and the outer state) and the
    trained change."""

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
        self._left: list[torch.Tensor] = []  # copies of the parameters, see ``remember``

    @property
    def names(self) -> tuple[tuple[int, str], ...]:
        """Names that identify its exchange."""
        return tuple((self.number, span.name) for span in self.spans)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(each.shape) for each in self.locals]

    @property
    def work(self) -> torch.Tensor:
        """Buffer of the change Δ, on the parameters' device."""
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
        """Keep ``weights`` and ``state`` in memory inside the context; with ``write``, save
        changes."""
        yield

    def attach(self, exchanges: Exchanges) -> Exchange:
        """Return the exchange, with its residuals in memory until ``detach``."""
        return exchanges.of(self.names, lambda: (self.spans, self.shapes), self.device)

    def detach(self, exchanges: Exchanges) -> None:
        """Release residuals until the next ``attach``."""

    def bring(self, exchanges: Exchanges) -> None:
        """Bring residuals to memory until ``put_back``, for a checkpoint."""

    def put_back(self, exchanges: Exchanges) -> None:
        """Release residuals until the next ``attach`` or ``bring``."""

    def prefetch(self) -> None:
        """Read ahead for the next exchange."""

    # ------------------------------------------------------------ ranks that are to be equal

    def average(self, exact: Exchanges, channel: Channel) -> Steps[None]:
        """Replace ``work`` by its float32 mean over the ranks, the same bits on each."""
        exchange = exact.of(self.names, lambda: (self.spans, self.shapes), self.device)
        call = channel.call(exchange.sequences)
        outcomes = yield from exchange.steps(channel, self.work, call)
        settle(outcomes, taken=True)

    def mean_of_all(self, flat: torch.Tensor, exact: Exchanges, channel: Channel) -> Steps[None]:
        """Replace ``flat``, as long as the weights, by its mean over the ranks, using ``work``."""
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
        """Set ``work`` to Θ, or ``weights``, rounded to the parameters' dtype, minus the
        parameters."""
        weights = self.weights if weights is None else weights
        for shared, out, each in zip(
            self.views(weights), self.views(self.work), self.locals, strict=True
        ):
            with each.opened(write=False) as p:
                torch.sub(shared.to(out.device, p.dtype).float(), p.to(out.device), out=out)

    def set_change(self, change: torch.Tensor) -> None:
        """Set parameters to Θ − change."""
        for shared, moved, each in zip(
            self.views(self.weights), self.views(change), self.locals, strict=True
        ):
            with each.opened(write=True) as p:
                p.copy_(shared - moved.to(shared.device))

    def remember(self) -> None:
        """Keep the parameters at which a change leaves until ``forget``."""
        self._left = []
        for each in self.locals:
            with each.opened(write=False) as p:
                self._left.append(p.detach().clone())

    @contextmanager
    def remembered(self) -> Iterator[list[torch.Tensor]]:
        """Yield the parameters as they were when the change left; none if nothing is kept."""
        yield self._left

    def forget(self) -> None:
        self._left = []

    def recall(self, flat: torch.Tensor) -> None:
        """Take what ``remember`` kept from a checkpoint."""
        every = zip(self.views(flat), self.locals, strict=True)
        self._left = [view.to(self.device, each.dtype, copy=True) for view, each in every]

    def carry_over(self, share: float = 1.0) -> None:
        """Set parameters to Θ and ``share`` of what was trained since the change left, or to Θ
        where they are not finite."""
        finite = self.finite()
        with self.remembered() as left:
            every = zip(self.views(self.weights), left, self.locals, strict=True)
            for shared, before, each in every:
                with each.opened(write=True) as p:
                    trained = p.float() - before.to(p.device).float() if finite else 0.0
                    p.copy_(shared.to(p.device) + share * trained)
        self.forget()

    def merge(self, alpha: float) -> None:
        """Set parameters to α · parameters + (1 − α) · Θ, or to Θ where they are not finite."""
        if alpha and not self.finite():
            alpha = 0.0
        for shared, each in zip(self.views(self.weights), self.locals, strict=True):
            with each.opened(write=True) as p:
                if alpha:
                    torch.lerp(shared.to(device=p.device, dtype=p.dtype), p, alpha, out=p)
                else:
                    p.copy_(shared)

    def finite(self) -> bool:
        for each in self.locals:
            with each.opened(write=False) as p:
                # a sum is finite if every element is, but for one that is too large: one pass
                if not isfinite(p.sum()) and not torch.isfinite(p).all():
                    return False
        return True

    def digest(self) -> int:
        """Return a 64-bit hash of Θ and the parameters' names."""
        with self.opened():
            bits = self.weights.detach().cpu().numpy()
            return checksum_of(bits.data.cast("B"), self.layout) if bits.size else self.layout

    def halves(self) -> tuple[float, float]:
        """Return ``digest`` as two numbers that float64 holds exactly."""
        digest = self.digest()
        return float(digest >> 32), float(digest & 0xFFFFFFFF)


class StoredFragment(Fragment):
    """Fragment in a store. ``weights`` and ``state`` are empty unless opened or attached."""

    def __init__(
        self,
        number: int,
        locals_: Sequence[LocalWeights],
        outer: Outer,
        *,
        store: TieredStore,
        prefix: str,
    ) -> None:
        if isinstance(outer, TorchOuter):
            raise InvalidArgument(
                "store is a TieredStore and outer makes an optimizer of torch, whose state stays "
                "in memory: use commpress.Nesterov() or SlowMo(), or store='host'"
            )
        super().__init__(number, locals_, outer, host=True)
        self.store, self._prefix = store, f"{prefix}/{number:04d}"
        self._plain: dict[str, Any] = {}  # the other entries of the outer state
        self._stored: list[str] = []  # names of entries as long as the weights
        # pieces of residuals, in the order of the store
        self._pieces: list[tuple[Key, list[int]]] = []
        self._borrowed: ExitStack | None = None
        self._attached = False
        self.forget()  # what a killed run may have left there
        store.put(self._name("weights"), self.weights)
        self._store_state(dict(self.state))
        self.weights, self.state = self.weights[:0].clone(), dict(self._plain)

    def _name(self, what: str) -> str:
        return f"{self._prefix}/{what}"

    def names_in_store(self) -> list[str]:
        return [*self._shared_names(), *self._residual_names()]

    def _residual_names(self) -> list[str]:
        """Name residuals in pieces no longer than the weights, so that weights need the most
        room."""
        numel = sum(sum(numels) for _, numels in self._pieces)
        return [self._name(f"residuals/{i}") for i in range(-(-numel // self.numel))]

    def _store_state(self, state: dict[str, Any]) -> None:
        for key, value in state.items():
            if torch.is_tensor(value) and value.numel() == self.numel:
                self.store.put(self._name(key), value)
                self._stored = sorted({*self._stored, key})
                self._plain.pop(key, None)
            else:
                self._plain[key] = value

    # ------------------------------------------------------------ Θ and the outer state

    @contextmanager
    def opened(self, *, write: bool = False) -> Iterator[None]:
        held = self._borrowed is not None
        if held and not write:
            yield
            return
        self._let_go()
        self._borrow(write=write)
        lent = {key: self.state[key] for key in self._stored}
        try:
            yield
        finally:
            new = (
                {key: value for key, value in self.state.items() if lent.get(key) is not value}
                if write
                else {}
            )
            self._let_go()
            self._store_state(new)
            if held:
                self._borrow(write=False)

    def _borrow(self, *, write: bool) -> None:
        self._borrowed = ExitStack()
        lend = [
            self._borrowed.enter_context(self.store.borrow(name, write=write))
            for name in self._shared_names()
        ]
        self.weights, self.state = (
            lend[0],
            self._plain | dict(zip(self._stored, lend[1:], strict=True)),
        )

    def _shared_names(self) -> list[str]:
        return [self._name("weights"), *(self._name(key) for key in self._stored)]

    def _let_go(self) -> None:
        """Replace borrowed tensors by empty ones."""
        stack, self._borrowed = self._borrowed, None
        if stack is not None:
            stack.close()

    def prefetch(self) -> None:
        if not self._attached:
            self.store.prefetch(self.names_in_store())

    # ------------------------------------------------------------ weights when a change left

    def remember(self) -> None:
        flat = torch.empty(self.numel)
        self.read(flat)
        self.recall(flat)

    def recall(self, flat: torch.Tensor) -> None:
        self.store.put(self._name(LEFT), flat)

    @contextmanager
    def remembered(self) -> Iterator[list[torch.Tensor]]:
        if self._name(LEFT) not in self.store:
            yield []
            return
        with self.store.borrow(self._name(LEFT), write=False) as left:
            yield self.views(left)

    def forget(self) -> None:
        if self._name(LEFT) in self.store:
            self.store.delete(self._name(LEFT))

    # ------------------------------------------------------------ residuals

    def attach(self, exchanges: Exchanges) -> Exchange:
        if not self._attached:
            # first, because they are the largest and no borrowed tensor splits the memory yet
            self.bring(exchanges)
            self._borrow(write=False)
            self._attached = True
        return super().attach(exchanges)

    def detach(self, exchanges: Exchanges) -> None:
        self._let_go()
        self._attached, self._work = False, None
        self.put_back(exchanges)

    def bring(self, exchanges: Exchanges) -> None:
        """Bring residuals to ``exchanges``, unless they are there."""
        if self._attached or not self._pieces:
            return
        flat = torch.empty(sum(sum(numels) for _, numels in self._pieces))
        for part, name in zip(flat.split(self.numel), self._residual_names(), strict=True):
            with self.store.borrow(name, write=False) as kept:
                part.copy_(kept)
        parts = iter(flat.split([numel for _, numels in self._pieces for numel in numels]))
        exchanges.residuals.bring(
            {key: tuple(next(parts) for _ in numels) for key, numels in self._pieces}
        )

    def put_back(self, exchanges: Exchanges) -> None:
        """Move residuals from ``exchanges`` to the store."""
        if self._attached:
            return
        exchanges.forget(self.names)
        residuals, before = (
            exchanges.residuals.take({span.name for span in self.spans}),
            self._residual_names(),
        )
        self._pieces = [
            (key, [tensor.numel() for tensor in kept]) for key, kept in residuals.items()
        ]
        names = self._residual_names()
        if names:
            flat = torch.cat([tensor.cpu() for kept in residuals.values() for tensor in kept])
            for name, part in zip(names, flat.split(self.numel), strict=True):
                self.store.put(name, part)
        for name in before[len(names) :]:
            self.store.delete(name)

    @property
    def tensors(self) -> int:
        """Number of tensors as long as the weights that are borrowed at once."""
        return 1 + len(self._stored)


@dataclass(eq=False)
class Flight:
    """A running exchange: its fragment leaves after one step and arrives after a fixed later
    one."""

    fragment: Fragment
    due: int  # step after which it arrives
    # steps to run, or ``future`` in the background; neither after loading a checkpoint
    steps: Steps[Arrived] | None = None
    future: torch.futures.Future[Arrived] | None = None
    taken: bool = True  # whether the mean, in ``fragment.work``, counts; once ``arrival`` has run
    trained: tuple[int, int] = (0, 0)  # steps and tokens of its change
    finite: bool = True  # whether this rank's change was finite when it left
    # when it arrives: share of the rank's own weights; None: Θ and what was trained meanwhile,
    alpha: float | None = 0.0
    kept: float = 1.0  # or this share of it
    long: bool = False  # in a round of every="auto" that needs an outer momentum
    turn: float = 0.0  # when it was to leave, in seconds of the round that is running then
    # set by ``arrival``: the slowest rank's, if measured; when the headers of all ranks were there
    pace: Pace | None = None
    met: float | None = None
    spread: float | None = None  # its square, of these ranks
    error: CommunicationError | None = None

    def arrival(self) -> Steps[bool]:
        """Wait for the mean and return ``taken``."""
        if self.error is not None:
            raise self.error
        try:
            if self.future is not None:
                self.taken, self.pace, self.met, self.spread = self.future.wait()
            elif self.steps is not None:
                self.taken, self.pace, self.met, self.spread = yield from self.steps
        except CommunicationError as error:
            self.error = error
            raise
        self.steps = self.future = None
        return self.taken

    def give_up(self) -> None:
        """Drop an exchange that arrives nowhere: its change goes with the next one."""
        self.fragment.forget()
        self.fragment.steps, self.fragment.tokens = (
            of + left
            for of, left in zip(
                (self.fragment.steps, self.fragment.tokens), self.trained, strict=True
            )
        )


def cut(
    weights: Sequence[LocalWeights], fragments: int | Sequence[Sequence[torch.Tensor]]
) -> list[list[LocalWeights]]:
    """Divide weights into ``fragments`` parts of about equal size, or into the given lists."""
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
    """Divide into consecutive non-empty parts of about equal size, the same on all ranks with
    shards."""
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


def check_room(fragments: Sequence[Fragment], store: TieredStore, *, overlap: bool) -> None:
    """Raise ``InvalidArgument`` if tensors of a fragment may find no room in the store's host
    memory.

    n borrowed tensors leave up to n + 1 gaps; the next tensor has room if one gap is as large as
    it. With ``overlap`` a checkpoint reads another fragment while one is being exchanged.
    """
    stored = [f for f in fragments if isinstance(f, StoredFragment)]
    rooms = {f.number: (2 * f.tensors * (1 + overlap) - 1) * padded(4 * f.numel) for f in stored}
    most, capacity = max(rooms.values(), default=0), store.usage().host_capacity
    if most > capacity:
        number = next(number for number, room in rooms.items() if room == most)
        raise InvalidArgument(
            f"store is one with {show_bytes(capacity)} of host memory, fragment {number} needs "
            f"{show_bytes(most)} while it is exchanged: open it with a larger host=, or pass more "
            "fragments="
        )
