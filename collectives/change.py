"""Change of the ranks of a group, returned by ``reform``; equal on all ranks except for
``rank``."""

import struct
from dataclasses import dataclass, replace

from commpress.errors import InvalidArgument

COMMITTED = struct.Struct("<Q")  # first bytes of the report of a rank that counts its steps


@dataclass(frozen=True)
class Change:
    """Ranks of a group before and after a reform, as one of them sees it.

    - ``epoch``: of the group after the reform; it rises with each reform.
    - ``rank``: this process's rank after the reform.
    - ``size_before``: ranks of the group that continues. If two groups merge, the one that has
      trained longer continues, and the ranks of the other are newcomers.
    - ``sources``: each rank's previous rank, None for a newcomer. Survivors keep their order,
      newcomers follow.
    - ``reports``: each rank's argument to ``reform(report=...)``. A rank that trains begins it with
      its number of committed steps (``COMMITTED``).
    """

    epoch: int
    rank: int
    size_before: int
    sources: tuple[int | None, ...]
    reports: tuple[bytes, ...]

    def __post_init__(self) -> None:
        survivors = [source for source in self.sources if source is not None]
        if (
            not 0 <= self.rank < len(self.sources)
            or len(self.reports) != len(self.sources)
            or list(self.sources[: len(survivors)]) != sorted(set(survivors))
            or not all(0 <= source < self.size_before for source in survivors)
        ):
            raise InvalidArgument(
                f"{self!r} is no change of a group: expected sources that ascend below "
                "size_before, None behind them, and a rank and a report for each of them"
            )

    @property
    def size(self) -> int:
        """Number of ranks after the reform."""
        return len(self.sources)

    @property
    def was(self) -> int | None:
        """This process's previous rank; None for a newcomer."""
        return self.sources[self.rank]

    @property
    def survivors(self) -> tuple[int, ...]:
        """Present ranks that were members before."""
        return tuple(rank for rank, source in enumerate(self.sources) if source is not None)

    @property
    def new(self) -> tuple[int, ...]:
        """Present ranks that are newcomers."""
        return tuple(rank for rank, source in enumerate(self.sources) if source is None)

    @property
    def lost(self) -> tuple[int, ...]:
        """Previous ranks that are gone."""
        return tuple(sorted(set(range(self.size_before)) - set(self.sources)))

    @property
    def committed(self) -> tuple[int | None, ...]:
        """Steps that each present rank has committed; None where it did not report them."""
        return tuple(
            COMMITTED.unpack_from(word)[0] if len(word) >= COMMITTED.size else None
            for word in self.reports
        )

    @property
    def behind(self) -> tuple[int, ...]:
        """Surviving ranks that have committed fewer steps than another survivor.

        The step that they have not committed was committed by others: it counts.
        """
        told = {rank: self.committed[rank] or 0 for rank in self.survivors}
        return tuple(rank for rank in told if told[rank] < max(told.values()))

    def after(self, earlier: "Change") -> "Change":
        """Combine two changes: from the ranks before ``earlier`` to the ranks after this one."""
        sources = [None if source is None else earlier.sources[source] for source in self.sources]
        return replace(self, size_before=earlier.size_before, sources=tuple(sources))
