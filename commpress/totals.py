"""Totals that objects count, as dictionaries for whoever writes them down."""

from dataclasses import asdict
from typing import Any, ClassVar


class Totals:
    """A dataclass of counters. ``derived``: properties that follow from them and belong to what is
    written down."""

    derived: ClassVar[tuple[str, ...]] = ("ratio",)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), **{name: getattr(self, name) for name in self.derived}}  # type: ignore[call-overload]
