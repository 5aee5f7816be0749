"""What a store tells of itself: where a tensor is, bytes by tier, hits and misses."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch

from commpress.tiered_mem.blocks import Block
from commpress.tiered_mem.files import Disk
from commpress.tiered_mem.manifest import DTYPES
from commpress.tiered_mem.residency import Residency


@dataclass(frozen=True)
class Info:
    """One tensor: what it is and where its newest bytes are."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    tier: Literal["device", "host", "disk"]
    dirty: bool  # newer in memory than on disk
    pinned: bool


@dataclass(frozen=True)
class Place:
    """A part of a tensor on disk."""

    file: str
    offset: int
    nbytes: int


@dataclass
class Counters:
    """``hits`` found their tensor in memory, ``misses`` waited for it; ``prefetched`` blocks were read ahead."""

    hits: int = 0
    misses: int = 0
    prefetched: int = 0
    stall_seconds: float = 0.0


@dataclass(frozen=True)
class Usage:
    """Bytes by tier. ``fragmentation`` is the share of the bytes taken on disk that no tensor fills."""

    host: int
    host_capacity: int
    device: int
    device_capacity: int
    disk: int
    disk_reserved: int
    tensors: int
    fragmentation: float


def info(block: Block, name: str, residency: Residency) -> Info:
    entry = block.entries[name]
    tier: Literal["device", "host", "disk"] = "disk"
    if block.slot is not None:
        tier = "device" if block.arena is residency.device else "host"
    return Info(name, entry.shape, DTYPES[entry.dtype], entry.nbytes, tier, dirty=block.dirty, pinned=block.pinned)


def places(block: Block, disk: Disk) -> list[Place]:
    return [Place(disk.place(chunk.extent), chunk.extent.offset, chunk.nbytes) for chunk in block.chunks]


def usage(blocks: Collection[Block], residency: Residency) -> Usage:
    host, device, disk = residency.host, residency.device, residency.disk
    taken = sum(chunk.extent.length for block in blocks for chunk in block.chunks)
    filled = sum(block.live for block in blocks if block.chunks)
    return Usage(
        host=host.used,
        host_capacity=host.capacity,
        device=device.used if device else 0,
        device_capacity=device.capacity if device else 0,
        disk=disk.used,
        disk_reserved=disk.reserved,
        tensors=sum(block.live for block in blocks),
        fragmentation=1 - filled / taken if taken else 0.0,
    )
