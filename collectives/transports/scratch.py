"""Bytes that outlive a call, on the host and on devices."""

import threading

import numpy as np
import torch

from commpress.work import Handed


class Scratch:
    """Bytes that outlive a call: a fresh allocation costs ten times a copy.

    ``pinned``: those of the host are, where there is CUDA, and travel to and from devices.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned and torch.cuda.is_available()
        self._free: dict[torch.device, list[Handed[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def take(self, numel: int, device: torch.device) -> torch.Tensor:
        """uint8[numel], aligned to 64 bytes or so, its content whatever was there before."""
        with self._lock:
            free = self._free.setdefault(device, [])
            for i, buffer in enumerate(free):
                if buffer.what.numel() >= numel:
                    idle = free.pop(i)
                    return (idle.reclaim() if device.type == "cpu" else idle.take())[:numel]
        step = max(1 << numel.bit_length() >> 3, 4096)  # few lengths, at most a quarter too long
        length = -(-max(numel, 1) // step) * step
        if self._pinned and device.type == "cpu":
            return torch.empty(length, dtype=torch.uint8, pin_memory=True)[:numel]
        if device.type == "cpu":  # NumPy asks for huge pages, torch does not
            return torch.from_numpy(np.empty(length, np.uint8))[:numel]
        return torch.empty(length, dtype=torch.uint8, device=device)[:numel]

    def give(self, *buffers: torch.Tensor, used_by: torch.device | None = None) -> None:
        """Back, once this thread and its stream, on ``used_by`` where that is not where the buffer
        lies, are all that read or write them; a buffer of an operation that failed is never
        given."""
        for buffer in buffers:
            whole = buffer.as_strided((buffer.untyped_storage().nbytes(),), (1,), 0)
            with self._lock:
                free = self._free.setdefault(buffer.device, [])
                free.append(Handed(whole, used_by or whole.device))
                free.sort(key=lambda each: each.what.numel())
