"""Rows on a device over a transport of host memory: by way of pinned buffers, which are kept."""

from collections.abc import Sequence

import torch

from commpress.collectives.frame import Rows
from commpress.collectives.transports.scratch import Scratch
from commpress.collectives.transports.transport import InFront, Transport
from commpress.work import Work


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


class _Staging:
    def __init__(
        self,
        scratch: Scratch,
        work: Work,
        back: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sent: Sequence[torch.Tensor],
    ) -> None:
        self.scratch, self.work, self.back, self.sent = scratch, work, back, sent

    def wait(self) -> None:
        self.work.wait()
        self.scratch.give(*self.sent)
        for device, host in self.back:
            device.copy_(host, non_blocking=True)
            self.scratch.give(host, used_by=device.device)
