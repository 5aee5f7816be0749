"""What of an offloaded optimizer lies where: chosen when it is made, shown when somebody asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from commpress.errors import InvalidArgument
from commpress.integrations.zero.chunk import GRADIENT, WEIGHT, Chunk
from commpress.tiered_mem import TieredStore, parse_bytes, show_bytes

AHEAD = 2  # chunks that are read while one is updated
UNDER_WAY = AHEAD + 3  # chunks in memory beside those that stay: one updated, others read, two written
TIERS = ("device", "host", "disk")


def choose(
    chunks: Sequence[Chunk],
    store: TieredStore,
    needed: Any,
    *,
    beside: int,
    device: str | int,
    host: str | int | None,
) -> None:
    """The first chunks to the device, the next to host memory, as far as the budgets reach; ``beside``: bytes for others.

    The same ones in every step: a sweep over all would otherwise evict each just before it is needed.
    """
    usage, largest = store.usage(), max(map(needed, chunks))
    reserve = UNDER_WAY * largest + beside
    if usage.host_capacity < reserve:
        raise InvalidArgument(
            f"the store has {usage.host_capacity} bytes of host memory, {UNDER_WAY} chunks with their moments, and what is "
            f"streamed beside them, need {reserve}: open it with a larger host=, or pass a smaller chunk_mb="
        )
    room = {"device": parse_bytes(device), "host": usage.host_capacity - reserve if host is None else parse_bytes(host)}
    if room["device"] > usage.device_capacity:
        raise InvalidArgument(
            f"device_budget is {room['device']} bytes, the store has {usage.device_capacity} on its device: open it with a "
            "larger device="
        )
    if room["host"] > usage.host_capacity - reserve:
        raise InvalidArgument(
            f"host_budget is {room['host']} bytes, expected at most {usage.host_capacity - reserve}: {reserve} of the store's "
            f"{usage.host_capacity} are for what passes through"
        )
    for chunk in chunks:
        chunk.tier = "disk"
        for tier in ("device", "host"):
            if needed(chunk) <= room[tier]:
                room[tier] -= needed(chunk)
                chunk.tier = tier
                break
            room[tier] = 0


@dataclass
class Meter:
    """Seconds and bytes of the steps so far."""

    steps: int = 0
    seconds: float = 0.0
    stalled: float = 0.0
    written: int = 0

    def count(self, seconds: float, stalled: float, written: int) -> None:
        self.steps += 1
        self.seconds += seconds
        self.stalled += stalled
        self.written += written


def report(chunks: Sequence[Chunk], store: TieredStore, meter: Meter) -> str:
    """A table of bytes by kind and tier, and what a step took on average."""
    rows: dict[str, dict[str, int]] = {}
    for chunk in chunks:
        names = {"master weights": chunk.name(WEIGHT) if chunk.master != chunk.piece else ""}
        names |= {"streamed parameters": chunk.piece, "gradients": chunk.name(GRADIENT)}
        names |= {key: chunk.name(key) for key in chunk.keys}
        for kind, name in names.items():
            if name and name in store:
                info = store.info(name)
                row = rows.setdefault(kind, dict.fromkeys(TIERS, 0))
                row[info.tier] += info.nbytes
    lines = [f"{'':20}" + "".join(f"{tier:>12}" for tier in TIERS)]
    lines += [f"{kind:20}" + "".join(f"{show_bytes(row[tier]):>12}" for tier in TIERS) for kind, row in rows.items()]
    total = [sum(row[tier] for row in rows.values()) for tier in TIERS]
    lines.append(f"{'together':20}" + "".join(f"{show_bytes(one):>12}" for one in total))
    if meter.steps:
        each = meter.seconds / meter.steps
        rate = meter.written / max(meter.seconds, 1e-9) / 1e9
        lines.append(
            f"update {each:.3f} s, of which {meter.stalled / meter.steps:.3f} s waiting for reads; "
            f"{show_bytes(meter.written // meter.steps)} written, {rate:.2f} GB/s"
        )
    return "\n".join(lines)
