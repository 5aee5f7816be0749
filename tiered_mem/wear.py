"""How much the store writes, against what a drive endures: drive writes per day, and a budget."""

import time
from dataclasses import dataclass, field

from commpress.errors import DiskFull
from commpress.tiered_mem.sizes import show_bytes

DAY = 86400.0


@dataclass
class Wear:
    """Counted in the manifest, so it goes on from run to run (what a crashed run wrote after its last commit is lost)."""

    capacity: int  # bytes of the disks
    per_day: int | None = None  # budget
    written: int = 0
    born: float = field(default_factory=time.time)
    days: dict[str, int] = field(default_factory=dict)  # by UTC date

    def allow(self, nbytes: int) -> None:
        if self.per_day is not None and (today := self.days.get(_today(), 0)) + nbytes > self.per_day:
            raise DiskFull(
                f"the write budget of {show_bytes(self.per_day)} a day is spent ({show_bytes(today)} written today): what "
                "was committed is intact; raise writes_per_day=, or give more memory so that less is written",
                missing=today + nbytes - self.per_day,
            )

    def count(self, nbytes: int) -> None:
        self.written += nbytes
        self.days[_today()] = self.days.get(_today(), 0) + nbytes
        while len(self.days) > 30:
            del self.days[min(self.days)]

    @property
    def drive_writes_per_day(self) -> float:
        """Mean over the life of the store, at least an hour; compare with the DWPD of the drive's data sheet."""
        return self.written / self.capacity / (max(3600.0, time.time() - self.born) / DAY)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
