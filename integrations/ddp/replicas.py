"""Replicas of a model whose parameters are DTensors: gradients are averaged between ranks with the
same shards.

DistributedDataParallel supports plain tensors only. Here parameters stay DTensors: hooks collect
the local gradients in buckets, in the reverse order of parameters like DDP, and pass each to a
``CompressedState``.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable

from commpress.errors import InvalidArgument
from commpress.integrations.ddp.hook import CompressedState
from commpress.optim.layout import alike, local, settle_gradient

BUCKET_BYTES = 25 << 20


class LocalBucket:
    """Bucket of gradients with the methods of ``dist.GradBucket`` that a state calls."""

    def __init__(self, number: int, members: Sequence[torch.Tensor], *, last: bool) -> None:
        shards = [local(p) for p in members]
        self.members, self.number, self.last = list(members), number, last
        self.flat = torch.zeros(
            sum(s.numel() for s in shards), dtype=shards[0].dtype, device=shards[0].device
        )
        self.views = [
            v.view(s.shape)
            for v, s in zip(self.flat.split([s.numel() for s in shards]), shards, strict=True)
        ]
        self.arrived: set[int] = set()

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> torch.Tensor:
        return self.flat

    def parameters(self) -> list[torch.Tensor]:
        return self.members

    def gradients(self) -> list[torch.Tensor]:
        return self.views

    @property
    def full(self) -> bool:
        return len(self.arrived) == len(self.members)

    def fetch(self, i: int) -> None:
        """Copy a parameter's gradient into the bucket, zeros if it has none."""
        settle_gradient(self.members[i])
        gradient = self.members[i].grad
        if gradient is None:
            self.views[i].zero_()
        else:
            self.views[i].copy_(local(gradient))

    def give_back(self) -> None:
        """Write the means into the gradients."""
        for p, mean in zip(self.members, self.views, strict=True):
            if p.grad is None:
                p.grad = alike(mean.clone(), p)
            else:
                local(p.grad).copy_(mean)


class Replicas:
    """Averages the gradients of ``parameters`` in each backward, or in ``synchronize``; ``grad``
    then holds the means.

    ``in_backward``: False if a step has many backwards, as in a pipeline.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], state: CompressedState, *, in_backward: bool
    ) -> None:
        self.state, self.in_backward, self.syncing = state, in_backward, True
        self.buckets = _buckets([p for p in parameters if p.requires_grad])
        self._next = 0
        self._ending: weakref.ref[Any] | None = None
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        # versions of parameters at the first gradient that is not averaged yet
        self._owed: list[int] | None = None
        for bucket in self.buckets:
            for i, p in enumerate(bucket.members):
                hook = _weakly(self._arrived, bucket, i) if in_backward else _weakly(self._owes)
                p.register_post_accumulate_grad_hook(hook)

    def watch(self, stage: torch.nn.Module) -> None:
        """Check before each forward of ``stage`` that parameters were not updated by unaveraged
        gradients."""
        stage.register_forward_pre_hook(_weakly(self._check_averaged))

    @torch.no_grad()
    def start_alike(self, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        """Copy parameters and buffers from the first rank with the same shards, as DDP does."""
        first = dist.get_process_group_ranks(group)[0]
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(local(tensor), first, group=group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the next backward outside averages the sum."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average all present gradients; collective. Call it once, after the last backward of a
        step."""
        if self.in_backward and self.syncing:
            raise InvalidArgument(
                "synchronize is for gradients of backwards under no_sync() or a pipeline: call it "
                "inside no_sync(), once, or leave it out, for backward averages by itself"
            )
        self._finish()
        self._owed = None

    def _versions(self) -> list[int]:
        return [p._version for bucket in self.buckets for p in bucket.members]

    def _owes(self) -> None:
        if self._owed is None:
            self._owed = self._versions()

    def _check_averaged(self) -> None:
        if self._owed is not None and self._owed != self._versions():
            raise InvalidArgument(
                "parameters of a pipeline's stage have moved by gradients of this replica alone, "
                "which are not those of the others by now: call states.synchronize() on every rank "
                "between schedule.step() and optimizer.step()"
            )

    @torch.no_grad()
    def _arrived(self, bucket: LocalBucket, i: int) -> None:
        if not self.syncing:
            return
        # the first gradient of a backward; an aborted one does not count
        if self._ending is None or self._ending() is None:
            self._clear()
            ending = partial(self._finish)
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)
        bucket.fetch(i)
        bucket.arrived.add(i)
        while self._next < len(self.buckets) - 1 and self.buckets[self._next].full:
            self._launch()

    def _clear(self) -> None:
        """Wait for running buckets, then forget all arrived gradients."""
        for future in self._futures:
            future.wait()
        self._futures.clear()
        self._next = 0
        for bucket in self.buckets:
            bucket.arrived.clear()

    def _launch(self) -> None:
        bucket: Any = self.buckets[self._next]
        self._next += 1
        self._futures.append(self.state.reduce(bucket))

    @torch.no_grad()
    def _finish(self) -> None:
        """Send the remaining buckets, wait for all, and write the means."""
        self._ending = None
        if not self.in_backward or not self.syncing:
            self._clear()
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            for i in range(len(bucket.members)):
                if i not in bucket.arrived:
                    bucket.fetch(i)
            self._launch()
        self._clear()
        for bucket in self.buckets:
            bucket.give_back()


def _weakly(method: Callable[..., None], *given: Any) -> Callable[..., None]:
    """Return a hook that calls ``method`` with ``given`` while its owner lives: modules and
    parameters must not keep it alive."""
    reference = weakref.WeakMethod(method)

    def hook(*_: object) -> None:
        if (call := reference()) is not None:
            call(*given)

    return hook


def _buckets(parameters: Sequence[torch.Tensor]) -> list[LocalBucket]:
    """Make buckets in the likely order of backward, each with one dtype and device."""
    plans: list[list[torch.Tensor]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], int]] = {}
    for p in reversed(parameters):
        key, nbytes = (p.dtype, p.device), local(p).numel() * p.element_size()
        members, held = open_.get(key, ([], BUCKET_BYTES))
        if held + nbytes > BUCKET_BYTES:
            members, held = [], 0
            plans.append(members)
        members.append(p)
        open_[key] = members, held + nbytes
    if not plans:
        raise InvalidArgument(
            "the model has no parameter that requires a gradient: there is nothing to average"
        )
    return [LocalBucket(i, members, last=i == len(plans) - 1) for i, members in enumerate(plans)]
