"""Base class of counters that become dictionaries for reports."""

from dataclasses import asdict
from typing import Any, ClassVar


class Totals:
    """A dataclass of counters. ``derived``: properties to include in its dictionary."""

    derived: ClassVar[tuple[str, ...]] = ("ratio",)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), **{name: getattr(self, name) for name in self.derived}}  # type: ignore[call-overload]
