"""torch's own all-reduce behind the hook: for steps that a trial or a plan leaves uncompressed, and
for what no codec knows."""

from typing import Any

import torch
import torch.distributed as dist

from commpress.integrations.observe.counters import Counters
from commpress.work import Done, Work

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Plain:
    """The average as torch's own hook takes it."""

    def __init__(self, group: dist.ProcessGroup, counters: Counters) -> None:
        self.group, self.counters = group, counters
        self.sent_bytes = 0  # as a ring sends them

    @staticmethod
    def compressible(bucket: dist.GradBucket) -> bool:
        """True if codecs know such gradients; else their bucket travels as torch sends it: float64,
        complex, sparse.

        Complex gradients come as pairs of real numbers.
        """
        buffer = bucket.buffer()
        return (
            not buffer.is_sparse
            and buffer.dtype in DTYPES
            and not any(p.is_complex() for p in bucket.parameters())
        )

    def reduce(self, bucket: dist.GradBucket, *, last: bool) -> torch.futures.Future[torch.Tensor]:
        self.counters.steps += last
        self.counters.plain_steps += last
        work: Any = self._begin(bucket.buffer())
        return work.get_future().then(lambda future: future.value()[0])

    def average(self, buffer: torch.Tensor) -> Work:
        """Begin it, in the order of the calls, among the group's other collectives."""
        if self.group.size() == 1:
            return Done()
        self.counters.plain_elements += values_of(buffer).numel()
        return self._begin(buffer)

    def _begin(self, buffer: torch.Tensor) -> Work:
        self._count(buffer)
        return dist.all_reduce(buffer.div_(self.group.size()), group=self.group, async_op=True)

    def _count(self, buffer: torch.Tensor) -> None:
        size, numel = self.group.size(), values_of(buffer).numel()
        nbytes = 2 * (size - 1) * numel * buffer.element_size() // size
        if buffer.is_sparse:  # everybody's, with their places
            nbytes = (size - 1) * (buffer._values().nbytes + buffer._indices().nbytes)
        self.sent_bytes += nbytes
        self.counters.wire_bytes += nbytes
        self.counters.logical_bytes += 8 * (size - 1) * numel // size
        self.counters.exact_elements += numel


def values_of(buffer: torch.Tensor) -> torch.Tensor:
    """Its elements; of a sparse one those that it has."""
    return buffer._values() if buffer.is_sparse else buffer
