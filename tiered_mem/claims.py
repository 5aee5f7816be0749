"""Which places on disk must stay as they are: those that a manifest lists, and those that cannot be trusted."""

from collections.abc import Iterable

from commpress.tiered_mem.files import Disk
from commpress.tiered_mem.manifest import Extent


class Claims:
    """Guarded by the store's lock."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.generation = 0  # of the last commit
        self.committed: set[Extent] = set()
        self.coming: set[Extent] = set()  # of the commit under way
        self.snapshots: dict[str, set[Extent]] = {}
        self._held: list[set[Extent]] = []  # being read by somebody who copies them
        self.lost: set[Extent] = set()  # damaged, or of a manifest that may or may not be there: never free in this run

    def release(self, extents: Iterable[Extent]) -> None:
        """The current state needs these places no more; they are free if nothing else claims them."""
        claimed = (self.lost, self.committed, self.coming, *self.snapshots.values(), *self._held)
        self.disk.free(set(extents).difference(*claimed))

    def hold(self, extents: set[Extent]) -> set[Extent]:
        """Nobody frees these places until ``let_go``, whatever manifest goes."""
        self._held.append(extents)
        return extents

    def let_go(self, extents: set[Extent], current: set[Extent]) -> None:
        self._held = [held for held in self._held if held is not extents]
        self.release(extents - current)
