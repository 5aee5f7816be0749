"""Replicas of a model whose parameters are DTensors: gradients are averaged between ranks with the
same shards.

DistributedDataParallel supports plain tensors only. Here parameters stay DTensors: hooks collect
the local gradients in buckets, in the reverse order of parameters like DDP, and pass each to a
``CompressedState``.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from commpress.errors import InvalidArgument
from commpress.integrations.ddp.hook import CompressedState
from commpress.optim.backward import BackwardBuckets, weakly
from commpress.optim.layout import alike, local, settle_gradient

BUCKET_BYTES = 25 << 20
# the averaging of a model lives as long as the model, whoever keeps what ``compress`` returned
OF_MODEL: "weakref.WeakKeyDictionary[torch.nn.Module, Replicas]" = weakref.WeakKeyDictionary()


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
            if p.grad is None and p.requires_grad:
                p.grad = alike(mean.clone(), p)
            elif p.grad is not None:
                local(p.grad).copy_(mean)


class Replicas(BackwardBuckets):
    """Averages the gradients of ``parameters`` in each backward, or in ``synchronize``; ``grad``
    then holds the means.

    ``in_backward``: False if a step has many backwards, as in a pipeline.
    """

    at_end = 1  # the hook of the last bucket raises errors

    def __init__(
        self, parameters: Iterable[torch.Tensor], state: CompressedState, *, in_backward: bool
    ) -> None:
        self.state, self.in_backward = state, in_backward
        every = list(parameters)
        self._frozen = [p for p in every if not p.requires_grad]
        self.buckets = _buckets([p for p in every if p.requires_grad])
        super().__init__([bucket.members for bucket in self.buckets], hooked=in_backward)
        # versions of parameters at the first gradient that is not averaged yet
        self._owed: list[int] | None = None
        for p in (p for bucket in self.buckets for p in bucket.members if not in_backward):
            p.register_post_accumulate_grad_hook(weakly(self._owes))

    def belong_to(self, model: torch.nn.Module) -> None:
        """Average as long as ``model`` lives, in place of what did so before."""
        if (before := OF_MODEL.get(model)) is not None:
            before.close()
        OF_MODEL[model] = self

    def watch(self, stage: torch.nn.Module) -> None:
        """Check before each forward of ``stage`` that parameters were not updated by unaveraged
        gradients."""
        stage.register_forward_pre_hook(weakly(self._check_averaged))

    @torch.no_grad()
    def start_alike(self, model: torch.nn.Module, group: dist.ProcessGroup) -> None:
        """Copy parameters and buffers from the first rank with the same shards, as DDP does."""
        first = dist.get_process_group_ranks(group)[0]
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(local(tensor), first, group=group)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Average all present gradients; collective. Call it once, after the last backward of a
        step."""
        if self.in_backward and self.syncing:
            raise InvalidArgument(
                "synchronize is for gradients of backwards under no_sync() or a pipeline: call it "
                "inside no_sync(), once, or leave it out, for backward averages by itself"
            )
        self._reset()
        self.finish()
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

    def finish(self) -> None:
        for p in self._frozen:
            if p.requires_grad:
                raise InvalidArgument(
                    f"parameter {self.state.names.known(p)!r} was frozen when compress was called "
                    "and requires a gradient now, which is not averaged: call compress while all "
                    "that will train requires a gradient, and freeze it afterwards"
                )
        super().finish()

    def place(self, b: int, i: int) -> None:
        self.buckets[b].fetch(i)

    def launch(self, b: int) -> torch.futures.Future[torch.Tensor]:
        bucket: Any = self.buckets[b]
        return self.state.reduce(bucket)

    def ended(self) -> None:
        for bucket in self.buckets:
            bucket.give_back()


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
