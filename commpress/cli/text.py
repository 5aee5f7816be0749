"""Real text that every machine with Python has: the source of its standard library."""

import sysconfig
from functools import cache
from pathlib import Path

import torch


@cache
def standard_library(megabytes: float = 4.0) -> torch.Tensor:
    """The first ``megabytes`` of the library's modules in alphabetical order, as bytes (uint8)."""
    folder, parts, size = Path(sysconfig.get_paths()["stdlib"]), [], 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= megabytes * 1e6:
            break
    return torch.frombuffer(bytearray(b"\n".join(parts)[: int(megabytes * 1e6)]), dtype=torch.uint8)


def batch(text: torch.Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows and the same windows one byte later."""
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    windows = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]
