"""Rows on a device over a transport of host memory: by way of pinned buffers, which are kept."""

from collections import defaultdict
from collections.abc import Sequence

import torch

from commpress.collectives.transports.rows import Rows
from commpress.collectives.transports.transport import InFront, Transport
from commpress.work import Work


class HostBuffers:
    """Buffers of the host, pinned where there is CUDA, that lie ready by shape."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)

    def take(self, like: torch.Tensor) -> torch.Tensor:
        free = self._free[tuple(like.shape)]
        return (
            free.pop()
            if free
            else torch.empty(like.shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())
        )

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the host, as far as its stream has come: waits for that."""
        host = self.take(tensor)
        host.copy_(tensor)
        return host

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._free[tuple(tensor.shape)].append(tensor)


class Staged(InFront):
    """Any transport of host memory, for tensors on a device."""

    def __init__(self, inner: Transport, buffers: HostBuffers | None = None) -> None:
        self.stand_for(inner)
        self.buffers = buffers or HostBuffers()

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        host, sent = self.buffers.take(out), self.buffers.copy(inp)
        return _Staging(self.buffers, self.inner.all_to_all(host, sent, tag), [(out, host)], [sent])

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        host, sent = self.buffers.take(out), self.buffers.copy(inp)
        return _Staging(self.buffers, self.inner.all_gather(host, sent, tag), [(out, host)], [sent])

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        take, copy = self.buffers.take, self.buffers.copy
        host = Rows(take(out.headers), {r: take(p) for r, p in out.payloads.items()})
        sent = Rows(copy(inp.headers), {r: copy(p) for r, p in inp.payloads.items()})
        back = [
            (out.headers, host.headers),
            *((p, host.payloads[r]) for r, p in out.payloads.items()),
        ]
        work = self.inner.exchange(host, sent, wanted.cpu(), tag)
        return _Staging(self.buffers, work, back, [sent.headers, *sent.payloads.values()])


class _Staging:
    def __init__(
        self,
        buffers: HostBuffers,
        work: Work,
        back: list[tuple[torch.Tensor, torch.Tensor]],
        sent: list[torch.Tensor],
    ) -> None:
        self.buffers, self.work, self.back, self.sent = buffers, work, back, sent

    def wait(self) -> None:
        self.work.wait()
        for device, host in self.back:
            device.copy_(host)
        self.buffers.give([*(host for _, host in self.back), *self.sent])
