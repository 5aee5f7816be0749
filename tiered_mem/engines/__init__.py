"""Ways to read and write files in the background, behind one interface; ``choose`` measures which is best here."""

from commpress.tiered_mem.engines.engine import Engine, Transfer
from commpress.tiered_mem.engines.probe import NAMES, available, choose, start

__all__ = ["Engine", "Transfer", "NAMES", "available", "choose", "start"]
