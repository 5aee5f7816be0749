"""Change of the ranks of a group: what ``reform`` returns, on every rank alike but for its own
number."""

import struct
from dataclasses import dataclass, replace

from commpress.errors import InvalidArgument

COMMITTED = struct.Struct("<Q")  # the beginning of what a rank that counts its steps says


@dataclass(frozen=True)
class Change:
    """Ranks of a group before and from now on, as one of them sees it.

    - ``epoch``: of the group from now on; each reform has a higher one.
    - ``rank``: of this process from now on.
    - ``size_before``: of the group that goes on. Where two meet that is the one that has trained
      longer; the ranks of the other are newcomers in it.
    - ``sources``: of each rank from now on its rank before, None for a newcomer. Survivors keep
      their order, newcomers follow.
    - ``said``: what each of them gave to ``reform(say=...)``. Who trains begins it with the steps
      that it has committed (``COMMITTED``).
    """

    epoch: int
    rank: int
    size_before: int
    sources: tuple[int | None, ...]
    said: tuple[bytes, ...]

    def __post_init__(self) -> None:
        survivors = [source for source in self.sources if source is not None]
        if (
            not 0 <= self.rank < len(self.sources)
            or len(self.said) != len(self.sources)
            or list(self.sources[: len(survivors)]) != sorted(set(survivors))
            or not all(0 <= source < self.size_before for source in survivors)
        ):
            raise InvalidArgument(
                f"{self!r} is no change of a group: expected sources that ascend below "
                "size_before, None behind them, and a rank and a word for each of them"
            )

    @property
    def size(self) -> int:
        """Ranks from now on."""
        return len(self.sources)

    @property
    def was(self) -> int | None:
        """This process's rank before; None for a newcomer."""
        return self.sources[self.rank]

    @property
    def survivors(self) -> tuple[int, ...]:
        """Ranks from now on that were there before."""
        return tuple(rank for rank, source in enumerate(self.sources) if source is not None)

    @property
    def new(self) -> tuple[int, ...]:
        """Ranks from now on that are newcomers."""
        return tuple(rank for rank, source in enumerate(self.sources) if source is None)

    @property
    def lost(self) -> tuple[int, ...]:
        """Ranks before that are gone."""
        return tuple(sorted(set(range(self.size_before)) - set(self.sources)))

    @property
    def committed(self) -> tuple[int | None, ...]:
        """Steps that each rank from now on has committed; None where it said nothing of them."""
        return tuple(
            COMMITTED.unpack_from(word)[0] if len(word) >= COMMITTED.size else None
            for word in self.said
        )

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks from now on that were there before and have committed less than another of these.

        What was sent in the step that they have not committed was taken by others: it counts.
        """
        told = {rank: self.committed[rank] or 0 for rank in self.survivors}
        return tuple(rank for rank in told if told[rank] < max(told.values()))

    def after(self, earlier: "Change") -> "Change":
        """Both in one: who was there before ``earlier`` and who is there after this one."""
        sources = [None if source is None else earlier.sources[source] for source in self.sources]
        return replace(self, size_before=earlier.size_before, sources=tuple(sources))
