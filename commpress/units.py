"""Parse and format sizes, rates, times and nodes as people write them. Nothing here loads torch."""

import re

from commpress.errors import InvalidArgument

BYTES = {"": 1, "B": 1}
BYTES |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate("KMGT")}
BYTES |= {f"{prefix}IB": 1024 ** (i + 1) for i, prefix in enumerate("KMGT")}
# share of payload in an Ethernet frame of 1500 bytes with its gap and preamble
TCP = 1448 / 1538
UNLIMITED = 1e18
TIERS = ("device", "host", "disk")
_RATE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmgt]?)(bit|B/s)", re.IGNORECASE)
_TIME = re.compile(r"(\d+\.?\d*|\.\d+)\s*(us|ms|s)")
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bytes(size: str | int) -> int:
    """Convert '32MiB', '1000000' or 1000000 to a number of bytes."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"(\d+\.?\d*)\s*([A-Za-z]*)", str(size).strip())
    if not match or match[2].upper() not in BYTES:
        raise InvalidArgument(
            f"size is {size!r}, expected a number with KiB, MiB, GiB, TiB, KB, MB, GB, TB or "
            "nothing"
        )
    return int(float(match[1]) * BYTES[match[2].upper()])


def parse_memory(text: str) -> dict[str, float]:
    """Convert 'device=24GiB,host=64GiB' to bytes by tier."""
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        tier, equals, size = part.strip().partition("=")
        if tier not in TIERS or not equals:
            raise InvalidArgument(
                f"memory is {text!r}, expected a list such as device=24GiB,host=64GiB with "
                f"{', '.join(TIERS)}"
            )
        found[tier] = parse_bytes(size)
    return found


def show_bytes(size: float) -> str:
    """Format 1536 as '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def parse_link(text: str) -> tuple[float, float]:
    """Convert '1gbit,100us' to (bytes per second of payload, seconds). 'none' is no limit; the
    default time is 50 us."""
    rate, _, delay = (part.strip() for part in text.partition(","))
    if rate == "none":
        found = UNLIMITED
    elif match := _RATE.fullmatch(rate):
        number = float(match[1]) * _PREFIX[match[2].lower()]
        found = number / 8 * TCP if match[3].lower() == "bit" else number
    else:
        raise InvalidArgument(
            f"link is {text!r}, expected a rate and a time such as '1gbit,100us', '12GB/s,5us' or "
            "'none'"
        )
    return found, parse_time(delay) if delay else 50e-6


def parse_rate(text: str) -> float:
    """Convert '100mbit' or '2.5g' to bits per second."""
    rate = text.strip().lower().removesuffix("bit")
    if not (match := _RATE.fullmatch(f"{rate}bit")) or float(match[1]) <= 0:
        raise InvalidArgument(f"rate is {text!r}, expected bits per second as 100mbit or 2.5gbit")
    return float(match[1]) * _PREFIX[match[2].lower()]


def parse_time(text: str) -> float:
    if not (match := _TIME.fullmatch(text)):
        raise InvalidArgument(
            f"time is {text!r}, expected a number with us, ms or s, such as '100us'"
        )
    return float(match[1]) * _SECONDS[match[2]]


def parse_nodes(text: str) -> tuple[int, int]:
    """Convert '8x4' to (nodes, ranks per node)."""
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text)
    if not match or int(match[1]) < 1 or int(match[2]) < 1:
        raise InvalidArgument(f"nodes are {text!r}, expected nodes x ranks of each, such as '8x4'")
    return int(match[1]), int(match[2])


def parse_count(text: str) -> int:
    """Convert '110M' to 110000000."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kKmMbBgG]?)", text.strip())
    if not match:
        raise InvalidArgument(f"the count is {text!r}, expected a number such as 110M or 1.5B")
    return int(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}[match[2].lower()])
