"""torch's own all-reduce behind the hook, for steps that a trial or a plan leaves uncompressed."""

import torch
import torch.distributed as dist

from commpress.integrations.counters import Counters
from commpress.integrations.layouts import Layouts


class Plain:
    """As torch's own hook does it. The first step after a trial carries what compression still owes."""

    def __init__(self, group: dist.ProcessGroup, counters: Counters, layouts: Layouts) -> None:
        self.group, self.counters, self.layouts = group, counters, layouts
        self.sent_bytes = 0  # as a ring sends them
        self.owing = False  # the next step has residuals to pay

    def reduce(self, bucket: dist.GradBucket, *, last: bool) -> torch.futures.Future[torch.Tensor]:
        size, counters, buffer = self.group.size(), self.counters, bucket.buffer()
        if self.owing:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                self.layouts.pay(parameter, gradient.view(-1), self.group.rank())
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
