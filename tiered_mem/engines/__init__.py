"""Engines that read and write files in the background, behind one interface; ``choose`` measures
which is the fastest here."""

from commpress.tiered_mem.engines.selection import NAMES, available, choose, start
from commpress.tiered_mem.engines.transfer import PIECE, DiskEngine, Transfer

__all__ = ["PIECE", "DiskEngine", "Transfer", "NAMES", "available", "choose", "start"]
