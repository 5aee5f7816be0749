"""How a store lays out its tensors: chosen by who opens it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from commpress.errors import InvalidArgument
from commpress.tiered_mem.layer import PAGE

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Options:
    """``chunk_bytes``: the largest request the disk sees. ``pack_below``: smaller tensors share chunks."""

    chunk_bytes: int = 4 << 20
    pack_below: int = 256 << 10
    pack_bytes: int = 1 << 20
    segment_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("chunk_bytes", "pack_bytes", "segment_bytes"):
            if getattr(self, name) < PAGE or getattr(self, name) % PAGE:
                raise InvalidArgument(f"{name} is {getattr(self, name)}, expected a multiple of {PAGE}")
        if not 0 <= self.pack_below <= self.pack_bytes <= self.chunk_bytes:
            raise InvalidArgument(
                f"pack_below {self.pack_below} <= pack_bytes {self.pack_bytes} <= chunk_bytes {self.chunk_bytes} must hold"
            )


def paths_of(directory: Paths) -> list[Path]:
    return [Path(p) for p in ([directory] if isinstance(directory, (str, os.PathLike)) else directory)]
