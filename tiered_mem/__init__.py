"""Tensors that live on the fastest tier with room; see ``TieredStore``."""

from commpress.tiered_mem.blocks import Pending
from commpress.tiered_mem.layer import FileLayer
from commpress.tiered_mem.store import FileRange, Info, Options, TieredStore, Usage
from commpress.units import parse_bytes, show_bytes

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
