"""torch's own all-reduce behind the hook, for steps that a trial or a plan leaves uncompressed."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from commpress.feedback import ResidualStore
from commpress.integrations.counters import Counters


class Plain:
    """As DDP has it without a hook. The first step after a trial carries what compression still owes."""

    def __init__(self, group: dist.ProcessGroup, residuals: ResidualStore, counters: Counters) -> None:
        self.group, self.residuals, self.counters = group, residuals, counters
        self.sent_bytes = 0  # as a ring sends them
        self.owing = False  # the next step has residuals to pay

    def reduce(
        self, bucket: dist.GradBucket, names: Mapping[int, str], *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        size, counters, buffer = self.group.size(), self.counters, bucket.buffer()
        if self.owing:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if id(parameter) in names:
                    self.residuals.pay(names[id(parameter)], gradient.view(-1), self.group.rank(), size)
            self.owing = not last
        nbytes = 2 * (size - 1) * buffer.numel() * buffer.element_size() // size
        self.sent_bytes += nbytes
        counters.wire_bytes += nbytes
        counters.logical_bytes += 8 * (size - 1) * buffer.numel() // size
        counters.exact_elements += buffer.numel()
        if last:
            counters.steps, counters.plain_steps = counters.steps + 1, counters.plain_steps + 1
        work = dist.all_reduce(buffer.div_(size), group=self.group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])
