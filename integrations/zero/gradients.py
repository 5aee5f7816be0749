"""Reduction of gradients from autograd to the ranks that own them: hooks fill buckets, which are
reduced in order.

Note: waiting. The end of a backward waits for its reductions, as DistributedDataParallel does. So
no gradient is written while the worker reads it, and a GradScaler sees whether the gradients of all
ranks are finite before ``step``.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable

from commpress.collectives.agreement import Consensus
from commpress.collectives.allreduce import Outcome, settle
from commpress.collectives.channel import Channel
from commpress.collectives.reduce_scatter import reduce_rows
from commpress.errors import InvalidArgument
from commpress.integrations.zero.bucket import FlatGroup, Reduction
from commpress.optim.layout import alike, is_cut, local, settle_gradient
from commpress.torch_private import LossScale
from commpress.work import Steps, run

AHEAD = 2  # pending reductions before a backward waits


class Gradients:
    """Reduce gradients: after ``synchronize``, ``bucket.reduced`` of every bucket is the mean
    gradient of this rank's row.

    With ``sink`` the means of every backward are passed to it instead, one by one, and not kept.
    ``consensus``: all ranks that must take the same decisions, if these are more than the
    channel's.
    """

    def __init__(
        self,
        buckets: Sequence[FlatGroup],
        channel: Channel,
        *,
        stage: int,
        scaler: torch.amp.GradScaler | None = None,
        consensus: Consensus | None = None,
        sink: Callable[[Any, torch.Tensor], None] | None = None,
    ) -> None:
        self._sink, self._consensus = sink, consensus
        self.buckets, self._channel = buckets, channel
        self._stage, self._scaler, self._scale = stage, scaler, LossScale()
        self.syncing = True
        self.step = 0  # number of the current step, which seeds stochastic codecs
        self._next, self._local = 0, False
        # reference to the callback at the end of the current backward
        self._ending: weakref.ref[Any] | None = None
        self._futures: list[torch.futures.Future[Any]] = []
        self._marker = min(
            (m.parameter for b in buckets for m in b.members), key=lambda p: (is_cut(p), p.numel())
        )
        self._hooks = [
            self._hook(bucket, i) for bucket in buckets for i in range(len(bucket.members))
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, bucket: FlatGroup, i: int) -> torch.utils.hooks.RemovableHandle:
        owner = weakref.ref(self)  # the parameters must not keep their optimizer alive

        def arrived(parameter: torch.Tensor) -> None:
            if (me := owner()) is not None:
                me._arrived(bucket, i)

        return bucket.members[i].parameter.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, bucket: FlatGroup, i: int) -> None:
        if not self.syncing:
            self._local = True
            if self._stage == 1:
                self._place(bucket, i)
            return
        self.drop_aborted()
        if self._ending is None:
            ending = partial(self.finish)
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)
        self._place(bucket, i)
        bucket.arrived.add(i)
        while self._next < len(self.buckets) and self._full(self.buckets[self._next]):
            self._launch(self.buckets[self._next])
            self._next += 1

    def drop_aborted(self) -> None:
        """Reset after a backward that ended with an error, in which case autograd frees the
        callback of its end."""
        if self._ending is None or self._ending() is not None:
            return
        self._wait()
        self._next, self._local, self._ending = 0, False, None
        for bucket in self.buckets:
            bucket.arrived.clear()

    def _full(self, bucket: FlatGroup) -> bool:
        return len(bucket.arrived) == len(bucket.members)

    @torch.no_grad()
    def _place(self, bucket: FlatGroup, i: int) -> None:
        """Copy the gradient to its place in the bucket's buffer, where it stays (stage 1), or is
        sent and freed."""
        member = bucket.members[i]
        settle_gradient(member.parameter)
        gradient = member.parameter.grad
        if bucket.buffer is None:
            bucket.buffer = self._fresh_buffer(bucket)
        view = member.view(bucket.buffer)
        if gradient is None:
            view.zero_()
            return
        if gradient.layout != torch.strided:
            raise InvalidArgument(
                f"the gradient of {member.name!r} is sparse: build its module with sparse=False"
            )
        if local(gradient).data_ptr() != view.data_ptr():
            view.copy_(local(gradient))
        member.parameter.grad = alike(view, member.parameter) if self._stage == 1 else None

    def _fresh_buffer(self, bucket: FlatGroup) -> torch.Tensor:
        numel = bucket.numel
        if self._stage == 1:
            return torch.zeros(numel, dtype=bucket.dtype, device=bucket.device)
        while len(self._futures) > AHEAD:
            self._futures.pop(0).wait()
        return self._channel.workspace.lend(numel, bucket.dtype, bucket.device).zero_()

    def _launch(self, bucket: FlatGroup) -> None:
        sequence = self._channel.take(bucket.sequences)
        key = self.step + (bucket.reduction.times << 20)
        steps = self._reduce(bucket, sequence, key, self._gain())
        waits = len(bucket.reduce_plan) if bucket.exchange is None else bucket.exchange.waits
        assert bucket.buffer is not None
        self._futures.append(self._channel.submit(steps, bucket.buffer, waits=waits))

    def _reduce(self, bucket: FlatGroup, sequence: int, key: int, gain: float) -> Steps[None]:
        """Set ``bucket.reduced`` to the mean over the ranks of this rank's row of the buffer, or
        add it."""
        assert bucket.buffer is not None
        source = bucket.buffer
        if source.dtype != torch.float32 or (bucket.exchange is not None and self._stage == 1):
            source = self._channel.workspace.lend(
                source.numel(), torch.float32, bucket.device
            ).copy_(source)
        if bucket.reduced is None and self._sink is None:
            bucket.reduced = torch.zeros(bucket.width, dtype=torch.float32, device=bucket.device)
        reduction = bucket.reduction
        adds = self._stage == 2 and reduction.times > 0 and self._sink is None
        # outcomes of an earlier backward of this step: part of the mean, or replaced
        settle(reduction.outcomes, taken=adds and reduction.finite)
        out = None if adds else bucket.reduced
        if out is None:
            out = self._channel.workspace.lend(bucket.width, torch.float32, bucket.device)
        if bucket.exchange is not None:
            outcomes = yield from self._mean_of_all(bucket, source, out, sequence, key, gain)
        else:
            outcomes = yield from reduce_rows(
                source,
                out,
                bucket.feedbacks,
                plan=bucket.reduce_plan,
                transport=self._channel.transport,
                workspace=self._channel.workspace,
                sequence=sequence,
                key=key,
                gain=gain if bucket.lossy_gradients else 1.0,
            )
        if source is not bucket.buffer:
            self._channel.workspace.take_back(source)
        # a half-precision value times the gain may not be representable in half precision
        if gain != 1.0 and not bucket.lossy_gradients:
            out[: bucket.owned].mul_(gain)
        if self._sink is not None:
            self._sink(bucket, out)
        elif adds:
            assert bucket.reduced is not None
            bucket.reduced[: bucket.owned] += out[: bucket.owned]
        if out is not bucket.reduced:
            self._channel.workspace.take_back(out)
        reduction.times += 1
        reduction.outcomes = outcomes
        reduction.finite = all(o.finite for o in outcomes) and (reduction.finite or not adds)
        if self._stage == 2:
            self._channel.workspace.take_back(bucket.buffer)
            bucket.buffer = None

    def _mean_of_all(
        self,
        bucket: FlatGroup,
        buffer: torch.Tensor,
        out: torch.Tensor,
        sequence: int,
        key: int,
        gain: float,
    ) -> Steps[list[Outcome]]:
        """Set ``out`` to ``gain`` times this rank's row of the mean over the ranks, which replaces
        the contents of ``buffer``."""
        assert bucket.exchange is not None
        outcomes = yield from bucket.exchange.steps(
            self._channel, buffer, sequence=sequence, key=key, gain=gain
        )
        finite = all(outcome.finite for outcome in outcomes)
        torch.mul(buffer[bucket.first :][: bucket.width], gain if finite else float("nan"), out=out)
        return outcomes

    def finish(self) -> None:
        """Reduce the remaining buckets, with zeros for parameters without a gradient, and wait for
        all."""
        self._ending = None
        for bucket in self.buckets[self._next :]:
            for i in range(len(bucket.members)):
                if i not in bucket.arrived:
                    self._place(bucket, i)
            self._launch(bucket)
        self._wait()
        self._next, self._local = 0, False
        for bucket in self.buckets:
            bucket.arrived.clear()
        if self._scaler is not None:
            self._tell_scaler()

    def _tell_scaler(self) -> None:
        """Report to a GradScaler, which searches ``parameter.grad`` for infinity, whether all
        ranks' gradients are finite, by the gradient of the smallest parameter."""
        if self._marker.grad is None:
            self._marker.grad = torch.zeros_like(self._marker)
        if not self.agreed():
            self._marker.grad.fill_(float("inf"))

    def _wait(self) -> None:
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()

    def synchronize(self) -> None:
        """Reduce, before a step, gradients that were computed under ``no_sync`` or without a
        backward."""
        self.drop_aborted()
        if self._local or any(bucket.reduction.times == 0 for bucket in self.buckets):
            self.finish()

    def forget(self, *, taken: bool) -> None:
        """Forget the means, which were used; residuals change only if the step was taken."""
        self.drop_aborted()
        for bucket in self.buckets:
            settle(bucket.reduction.outcomes, taken=taken)
            bucket.reduction = Reduction()
        if self._stage == 2:
            self._marker.grad = None

    def _gain(self) -> float:
        return 1.0 / self._scale.of(self._scaler)

    def agreed(self) -> bool:
        """Return whether all ranks' gradients are finite: each message has the flags of all its
        senders, and then shard peers vote."""
        finite = all(bucket.reduction.finite for bucket in self.buckets)
        return finite if self._consensus is None else run(self._consensus.agreed(finite))
