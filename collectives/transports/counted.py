"""A transport whose bytes are counted and whose waits are timed."""

from time import perf_counter

import torch

from commpress.collectives.transports.rows import HEADER, Rows
from commpress.collectives.transports.transport import InFront, Transport
from commpress.work import Work


class Counted(InFront):
    """Counts bytes that leave this rank, headers included, own row not, and seconds spent waiting
    for peers and the network."""

    def __init__(self, inner: Transport) -> None:
        self.stand_for(inner)
        self.sent_bytes, self.seconds = 0, 0.0

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self.sent_bytes += (self.size - 1) * inp.shape[1]
        return _TimedWork(self, self.inner.all_to_all(out, inp, tag))

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self.sent_bytes += (self.size - 1) * inp.shape[1]
        return _TimedWork(self, self.inner.all_gather(out, inp, tag))

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        self.sent_bytes += sum(
            HEADER + payload.numel() for rank, payload in inp.payloads.items() if rank != self.rank
        )
        return _TimedWork(self, self.inner.exchange(out, inp, wanted, tag))


class _TimedWork:
    def __init__(self, transport: Counted, work: Work) -> None:
        self.transport, self.work = transport, work

    def wait(self) -> None:
        start = perf_counter()
        try:
            self.work.wait()
        finally:
            self.transport.seconds += perf_counter() - start
