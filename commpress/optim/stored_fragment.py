"""Fragments of local updates whose shared weights, outer state and residuals lie in a tiered store
between their exchanges.

the step before it leaves   read ahead
it leaves                   Θ and the outer state are borrowed, residuals copied to where codecs
                            want them
it arrives                  Θ and the outer state change in place, residuals go back; what has no
                            room goes to the disk
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from commpress.collectives.exchange import Exchange, Exchanges
from commpress.errors import InvalidArgument
from commpress.feedback import Key
from commpress.optim.fragments import Fragment
from commpress.optim.local_weights import LocalWeights
from commpress.optim.outer import Outer, TorchOuter
from commpress.tiered_mem import TieredStore, show_bytes
from commpress.tiered_mem.arena import padded


class StoredFragment(Fragment):
    """See ``Fragment``. ``weights`` and ``state`` have no elements unless they are opened, or the
    fragment is attached."""

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
        self._plain: dict[str, Any] = {}  # of the outer state, what is not as long as the weights
        self._stored: list[str] = []  # names of that which is
        # of residuals, in the order in which they lie in the store
        self._pieces: list[tuple[Key, list[int]]] = []
        self._borrowed: ExitStack | None = None
        self._attached = False
        store.put(self._name("weights"), self.weights)
        self._store_state(dict(self.state))
        self.weights, self.state = self.weights[:0].clone(), dict(self._plain)

    def _name(self, what: str) -> str:
        return f"{self._prefix}/{what}"

    def names_in_store(self) -> list[str]:
        return [*self._shared_names(), *self._residual_names()]

    def _residual_names(self) -> list[str]:
        """Of residuals in pieces no longer than the weights, so that these need the largest
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
        """The tensors that were borrowed are empty from now on."""
        stack, self._borrowed = self._borrowed, None
        if stack is not None:
            stack.close()

    def prefetch(self) -> None:
        if not self._attached:
            self.store.prefetch(self.names_in_store())

    # ------------------------------------------------------------ residuals

    def attach(self, exchanges: Exchanges) -> Exchange:
        if not self._attached:
            # first: they are the largest, and nothing that is borrowed divides the memory now
            self.bring(exchanges)
            self._borrow(write=False)
            self._attached = True
        return super().attach(exchanges)

    def detach(self, exchanges: Exchanges) -> None:
        self._let_go()
        self._attached, self._work = False, None
        self.put_back(exchanges)

    def bring(self, exchanges: Exchanges) -> None:
        """Residuals to ``exchanges``, unless they are there."""
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
        """Residuals to the store; ``exchanges`` has none of these weights any more."""
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
        """Number of those that are as long as the weights and borrowed at once."""
        return 1 + len(self._stored)


def check_room(fragments: Sequence[Fragment], store: TieredStore, *, overlap: bool) -> None:
    """Raise ``InvalidArgument`` if tensors of a fragment may find no room in the store's host
    memory.

    n tensors that are borrowed leave up to n + 1 gaps, and the next finds room wherever they lie if
    one gap is as large as it. With ``overlap`` a checkpoint reads another fragment while one is on
    its way.
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
