"""Rows on a device over a transport of host memory: by way of pinned buffers, which are kept."""

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from commpress.collectives.frame import Rows
from commpress.collectives.transports.transport import InFront, Transport
from commpress.work import Handed, Work


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


class Staged(InFront):
    """Any transport of host memory, for tensors on a device. Headers of ``Rows`` are on the
    host."""

    def __init__(self, inner: Transport, scratch: Scratch | None = None) -> None:
        self.stand_for(inner)
        self.scratch = scratch or Scratch(pinned=True)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        host, sent = self._like(out), self._copy(inp)
        return _Staging(self.scratch, self.inner.all_to_all(host, sent, tag), [(out, host)], [sent])

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        host, sent = self._like(out), self._copy(inp)
        return _Staging(self.scratch, self.inner.all_gather(host, sent, tag), [(out, host)], [sent])

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        host = {r: self._like(payload) for r, payload in out.payloads.items()}
        sent = {r: self._copy(payload) for r, payload in inp.payloads.items()}
        work = self.inner.exchange(Rows(out.headers, host), Rows(inp.headers, sent), wanted, tag)
        back = [(payload, host[r]) for r, payload in out.payloads.items()]
        return _Staging(self.scratch, work, back, list(sent.values()))

    def _like(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.scratch.take(tensor.numel(), torch.device("cpu")).view(tensor.shape)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the host, as far as its stream has come: waits for that."""
        host = self._like(tensor)
        host.copy_(tensor)
        return host


class _Staging(NamedTuple):
    scratch: Scratch
    work: Work
    back: Sequence[tuple[torch.Tensor, torch.Tensor]]
    sent: Sequence[torch.Tensor]

    def wait(self) -> None:
        self.work.wait()
        self.scratch.give(*self.sent)
        for device, host in self.back:
            device.copy_(host, non_blocking=True)
            self.scratch.give(host, used_by=device.device)
