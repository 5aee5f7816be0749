"""Flat buffers that are lent and given back: few, as large as the largest bucket, never one per bucket."""

import threading
from collections import defaultdict

import torch

from commpress.collectives.allreduce import Workspace


class Scratch(Workspace):
    """Lends prefixes of flat buffers, for gradients and for the rows of messages alike."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._idle: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        self._lent: dict[int, torch.Tensor] = {}  # by address
        self._longest: dict[torch.dtype, int] = defaultdict(int)

    @property
    def bytes(self) -> int:
        with self._lock:
            every = [t for idle in self._idle.values() for t in idle] + list(self._lent.values())
            return sum(t.numel() * t.element_size() for t in every)

    def lend(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Its content is left over from others."""
        with self._lock:
            self._longest[dtype] = max(self._longest[dtype], numel)
            idle = self._idle[dtype, device]
            flat = idle.pop() if idle else None
            if flat is None or flat.numel() < numel:
                flat = torch.zeros(self._longest[dtype], dtype=dtype, device=device)
            self._lent[flat.data_ptr()] = flat
            return flat[:numel]

    def take_back(self, *buffers: torch.Tensor) -> None:
        with self._lock:
            for buffer in buffers:
                flat = self._lent.pop(buffer.data_ptr())
                self._idle[flat.dtype, flat.device].append(flat)

    def rows(self, size: int, rows: int, device: torch.device) -> torch.Tensor:
        return self.lend(rows * size, torch.uint8, device).view(rows, size)

    def give_wires(self, *wires: torch.Tensor) -> None:
        self.take_back(*wires)
