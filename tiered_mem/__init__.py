"""Named tensors on tiers of memory and disk; see ``TieredStore``."""

from typing import TYPE_CHECKING

from commpress.lazy import lazily
from commpress.units import parse_bytes, show_bytes

if TYPE_CHECKING:
    from commpress.tiered_mem.blocks import Pending
    from commpress.tiered_mem.layer import FileLayer
    from commpress.tiered_mem.store import FileRange, Info, Options, TieredStore, Usage

__all__ = [
    "FileLayer",
    "FileRange",
    "Info",
    "Options",
    "Pending",
    "TieredStore",
    "Usage",
    "parse_bytes",
    "show_bytes",
]
__getattr__ = lazily(
    __name__,
    {
        "blocks": ("Pending",),
        "layer": ("FileLayer",),
        "store": ("FileRange", "Info", "Options", "TieredStore", "Usage"),
    },
)
