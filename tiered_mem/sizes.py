"""Sizes in bytes as people write them."""

import re

from commpress.errors import InvalidArgument

UNITS = {"": 1, "B": 1}
UNITS |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
UNITS |= {f"{prefix}IB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}


def parse_bytes(size: str | int) -> int:
    """'32MiB' or '1000000' or 1000000 as a number of bytes."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"(\d+\.?\d*)\s*([A-Za-z]*)", str(size).strip())
    if not match or match[2].upper() not in UNITS:
        raise InvalidArgument(f"size is {size!r}, expected a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB or nothing")
    return int(float(match[1]) * UNITS[match[2].upper()])


def show_bytes(size: float) -> str:
    """1536 as '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
