"""Reduction of gradients from autograd to the ranks that own them: hooks fill buckets, which are
reduced in order.

Note: waiting. The end of a backward waits for its reductions, as DistributedDataParallel does. So
no gradient is written while the worker reads it, and a GradScaler sees whether the gradients of all
ranks are finite before ``step``.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from commpress.collectives.agreement import Consensus
from commpress.collectives.allreduce import Call, Outcome, settle
from commpress.collectives.channel import Channel
from commpress.collectives.reduce_scatter import reduce_rows
from commpress.errors import InvalidArgument
from commpress.integrations.zero.bucket import FlatGroup, Reduction
from commpress.optim.backward import BackwardBuckets
from commpress.optim.layout import alike, is_cut, local, settle_gradient
from commpress.torch_private import LossScale
from commpress.work import Steps, run

AHEAD = 2  # pending reductions before a backward waits


class Gradients(BackwardBuckets):
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
        self.step = 0  # number of the current step, which seeds stochastic codecs
        self._local = False
        self._again: set[tuple[int, int]] = set()  # gradients to send after all others
        self._marker = min(
            (m.parameter for b in buckets for m in b.members), key=lambda p: (is_cut(p), p.numel())
        )
        super().__init__([[member.parameter for member in bucket.members] for bucket in buckets])

    @torch.no_grad()
    def _came(self, b: int, i: int) -> None:
        """Take a gradient; one that comes again in the same backward is added, or sent after all
        others if its bucket has been sent."""
        if self._stage == 1 or i not in self._arrived[b]:
            super()._came(b, i)
        elif b < self._next or not self.syncing:
            self._again.add((b, i))
        else:
            self._add(b, i)

    def _add(self, b: int, i: int) -> None:
        """Add a gradient to the one in its bucket, which has not been sent."""
        self._again.discard((b, i))
        bucket, member = self.buckets[b], self.buckets[b].members[i]
        gradient, member.parameter.grad = member.parameter.grad, None
        assert bucket.buffer is not None
        assert gradient is not None
        member.view(bucket.buffer).add_(local(gradient))

    @torch.no_grad()
    def finish(self) -> None:
        for b, i in [each for each in self._again if each[0] >= self._next]:
            self._add(b, i)
        super().finish()
        if self._again:
            super().finish()
        self._again.clear()

    @contextmanager
    def across(self) -> Iterator[None]:
        """Take all backwards inside the context as one: what a backward would send at its end is
        sent at the end of the context."""
        ending = partial(self.finish)
        self._ending = weakref.ref(ending)
        try:
            yield
        except BaseException:
            self._again.clear()
            self._reset()  # the error may keep this frame, and with it the ending
            raise
        ending()

    def accumulated(self, b: int, i: int) -> None:
        self._local = True
        if self._stage == 1:
            self.place(b, i)

    @torch.no_grad()
    def place(self, b: int, i: int) -> None:
        """Copy the gradient to its place in the bucket's buffer, where it stays (stage 1), or is
        sent and freed."""
        bucket, member = self.buckets[b], self.buckets[b].members[i]
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

    def launch(self, b: int) -> torch.futures.Future[Any]:
        bucket = self.buckets[b]
        key = self.step + (bucket.reduction.times << 20)
        steps = self._reduce(bucket, self._channel.call(bucket.sequences, key, self._gain()))
        waits = len(bucket.reduce_plan) if bucket.exchange is None else bucket.exchange.waits
        assert bucket.buffer is not None
        return self._channel.submit(steps, bucket.buffer, waits=waits)

    def _reduce(self, bucket: FlatGroup, call: Call) -> Steps[None]:
        """Set ``bucket.reduced`` to the mean over the ranks of this rank's row of the buffer, or
        add it."""
        assert bucket.buffer is not None
        source, gain = bucket.buffer, call.gain
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
            outcomes = yield from self._mean_of_all(bucket, source, out, call)
        else:
            outcomes = yield from reduce_rows(
                source,
                out,
                bucket.feedbacks,
                bucket.reduce_plan,
                call if bucket.lossy_gradients else call._replace(gain=1.0),
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
        call: Call,
    ) -> Steps[list[Outcome]]:
        """Set ``out`` to the call's gain times this rank's row of the mean over the ranks, which
        replaces the contents of ``buffer``."""
        assert bucket.exchange is not None
        outcomes = yield from bucket.exchange.steps(self._channel, buffer, call)
        finite = all(outcome.finite for outcome in outcomes)
        torch.mul(
            buffer[bucket.first :][: bucket.width], call.gain if finite else float("nan"), out=out
        )
        return outcomes

    def _reset(self) -> None:
        super()._reset()
        self._local = False

    def ended(self) -> None:
        if self._scaler is not None:
            self._tell_scaler()

    def _tell_scaler(self) -> None:
        """Report to a GradScaler, which searches ``parameter.grad`` for infinity, whether all
        ranks' gradients are finite, by the gradient of the smallest parameter."""
        if self._marker.grad is None:
            self._marker.grad = torch.zeros_like(self._marker)
        if not self.agreed():
            self._marker.grad.fill_(float("inf"))

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
