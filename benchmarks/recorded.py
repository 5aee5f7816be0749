"""A transport that counts what passes it, for benchmarks and tests."""

from collections import Counter
from dataclasses import dataclass, field

import torch

from commpress.collectives.frame import HEADER, Rows
from commpress.collectives.transports.transport import InFront, Transport
from commpress.work import Work


@dataclass
class Recorded(InFront):
    """Counts what leaves this rank: messages and bytes, headers included, own row not."""

    inner: Transport
    messages: int = 0
    sent_bytes: int = 0
    operations: list[str] = field(default_factory=list)
    messages_to: Counter[int] = field(default_factory=Counter)  # by rank
    bytes_to: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.stand_for(self.inner)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._count("all_to_all", dict.fromkeys(range(self.size), inp.shape[1]))
        return self.inner.all_to_all(out, inp, tag)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, tag: int) -> Work:
        self._count("all_gather", dict.fromkeys(range(self.size), inp.shape[1]))
        return self.inner.all_gather(out, inp, tag)

    def exchange(self, out: Rows, inp: Rows, wanted: torch.Tensor, tag: int) -> Work:
        self._count(
            "exchange", {r: HEADER + payload.numel() for r, payload in inp.payloads.items()}
        )
        return self.inner.exchange(out, inp, wanted, tag)

    def _count(self, operation: str, lengths: dict[int, int]) -> None:
        for rank, length in lengths.items():
            if rank != self.rank:
                self.messages += 1
                self.sent_bytes += length
                self.messages_to[rank] += 1
                self.bytes_to[rank] += length
        self.operations.append(operation)
