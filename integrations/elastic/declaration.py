"""Declaration of a rank when all agree on who is there: steps that it has committed, and whether
others may take its state."""

from collections.abc import Mapping
from dataclasses import dataclass

from commpress.collectives.change import COMMITTED, Change

_HEALED, _HALFWAY, _LEAVES = 1, 2, 4


@dataclass(frozen=True)
class Declaration:
    """Declaration of one rank, as it makes it to the others.

    - ``healed``: it has the state of the run; a newcomer does not before it is healed.
    - ``halfway``: its last step ended with an error after the optimizer's part of it.
    - ``leaves``: it stays until the others have taken over what it owes, and then goes.
    """

    steps: int
    healed: bool = True
    halfway: bool = False
    leaves: bool = False

    def packed(self) -> bytes:
        flags = _HEALED * self.healed | _HALFWAY * self.halfway | _LEAVES * self.leaves
        return COMMITTED.pack(self.steps) + bytes([flags])

    @classmethod
    def of(cls, said: bytes) -> "Declaration | None":
        """The one that was said; None if something else was."""
        if len(said) <= COMMITTED.size:
            return None
        (steps,), flags = COMMITTED.unpack_from(said), said[COMMITTED.size]
        return cls(
            steps,
            healed=bool(flags & _HEALED),
            halfway=bool(flags & _HALFWAY),
            leaves=bool(flags & _LEAVES),
        )

    @classmethod
    def all(cls, change: Change) -> Mapping[int, "Declaration"]:
        """Of the ranks from now on that have said it."""
        return {
            rank: each
            for rank, said in enumerate(change.said)
            if (each := cls.of(said)) is not None
        }

    @classmethod
    def healed_before(cls, change: Change) -> list[int]:
        """Survivors that have the state of the run: newcomers that came just before may not be
        healed."""
        return [
            rank
            for rank, each in cls.all(change).items()
            if rank in change.survivors and each.healed
        ]

    @classmethod
    def donors(cls, change: Change) -> list[int]:
        """Ranks whose state is the run's: of the survivors that are healed those who have committed
        most, and the whole of it where somebody has; else the first, as the others may have come
        further in that step, or less far."""
        able = {
            rank: each
            for rank, each in cls.all(change).items()
            if rank in cls.healed_before(change)
        }
        most = max((each.steps for each in able.values()), default=0)
        first = {rank: each for rank, each in able.items() if each.steps == most}
        return [rank for rank, each in first.items() if not each.halfway] or list(first)[:1]

    @classmethod
    def leavers(cls, change: Change) -> list[int]:
        """Ranks that are about to leave."""
        return [rank for rank, each in cls.all(change).items() if each.leaves]
