"""Optimizers under DistributedDataParallel: a bucket's round starts while backward still computes
the next bucket.

The hook keeps DDP from averaging gradients. For each bucket it writes the optimizer's messages and
submits the round to a worker; ``step()`` waits for rounds that are not done. Gradients stay local:
clip with ``max_grad_norm``.

Note: threads. The sum of gradient and momentum runs inside the hook, on autograd's thread, so that
nothing reads a gradient after backward has returned; encoding, waiting and decoding run on the
worker.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from commpress.collectives.allreduce import Outcome
from commpress.errors import InvalidArgument
from commpress.integrations.ddp.local import own_gradients
from commpress.integrations.ddp.names import averaged_parameters
from commpress.optim.optimizer import CompressedOptimizer, RoundKind
from commpress.optim.replicated import ReplicatedOptimizer
from commpress.torch_private import LossScale, check_unhooked, check_wrapped
from commpress.work import Steps


def overlap(
    ddp: DistributedDataParallel,
    optimizer: CompressedOptimizer,
    *,
    grad_scaler: torch.amp.GradScaler | None = None,
) -> CompressedOptimizer:
    """Let ``optimizer`` do all communication of ``ddp``, during backward if possible; return the
    optimizer.

    Optimizers with divided state communicate in ``step()``, and gradients stay local until then.

    With ``max_grad_norm`` rounds wait for ``step()``, because the norm needs every gradient. Pass
    the ``grad_scaler`` of mixed precision here or to the optimizer. Parameters of ``ddp`` that the
    optimizer does not have raise an error, because nothing would average them.
    """
    if hasattr(optimizer, "optimizer"):  # accelerate's wrapper
        optimizer, grad_scaler = (
            optimizer.optimizer,
            grad_scaler or getattr(optimizer, "scaler", None),
        )
    check_wrapped(ddp)
    if not isinstance(optimizer, CompressedOptimizer):
        raise InvalidArgument(
            f"optimizer is a {type(optimizer).__name__}, which averages gradients during backward "
            "and cannot have them from DistributedDataParallel: run the model without it"
            if averages(optimizer)
            else f"optimizer is a {type(optimizer).__name__}, expected OneBitAdam, ZeroOneAdam, "
            "OneBitLamb, ShardedOneBitAdam or "
            "ShardedZeroOneAdam; other optimizers need averaged gradients: commpress.compress(ddp)"
        )
    has = optimizer.flat.index if optimizer.flat else {}
    missing = [name for name, p in averaged_parameters(ddp) if p.requires_grad and id(p) not in has]
    if missing:
        raise InvalidArgument(
            f"the optimizer does not have {len(missing)} parameters of ddp, such as "
            f"{missing[0]!r}, so nobody would average them: construct it with all parameters that "
            "require gradients"
        )
    if grad_scaler is not None:
        optimizer.grad_scaler = grad_scaler
    if not isinstance(optimizer, ReplicatedOptimizer):
        if all(hook is not own_gradients for hook, _ in ddp._comm_hooks):
            check_unhooked(ddp)
            ddp.register_comm_hook(None, own_gradients)
        return optimizer
    # DDP accepts one hook and never removes it
    registered = [
        state for _, state in ddp._comm_hooks if isinstance(state, BucketRounds) and state.optimizer
    ]
    if not registered:
        check_unhooked(ddp)
    optimizer.bucket_rounds = registered[0] if registered else BucketRounds(optimizer)
    optimizer.bucket_rounds.optimizer = optimizer
    if not registered:
        ddp.register_comm_hook(optimizer.bucket_rounds, momentum_hook)
    return optimizer


def averages(optimizer: torch.optim.Optimizer) -> bool:
    """True if the optimizer averages gradients itself, so that DDP must not."""
    return getattr(optimizer, "averages_gradients", False)


def momentum_hook(
    state: "BucketRounds", bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Start the round of one bucket; return DDP's local gradients."""
    state.start(bucket)
    return own_gradients(None, bucket)


class BucketRounds:
    """Rounds that backward has started and ``step`` has not finished."""

    def __init__(self, optimizer: ReplicatedOptimizer) -> None:
        self.optimizer = optimizer
        self._futures: dict[tuple[int, ...], torch.futures.Future[list[Outcome]]] = {}
        self._kind: RoundKind | None = None
        self._scale = LossScale()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the optimizer out of a saved DDP model: call ``overlap`` again with that of the
        loaded one."""
        return {"optimizer": None}

    @torch.compiler.disable  # sockets and threads are nothing to trace
    def start(self, bucket: dist.GradBucket) -> None:
        o = self.optimizer
        if o.channel.size == 1 or o.max_grad_norm is not None or o.flat is None:
            return
        with torch.no_grad():
            o.flat.check()
            kind = self._round()
            if kind is RoundKind.LOCAL:
                return
            # others may be added later
            every = zip(bucket.parameters(), bucket.gradients(), strict=True)
            gradients = {o.flat.index[id(p)]: g for p, g in every if id(p) in o.flat.index}
            indices = tuple(gradients)
            if not indices:
                return
            self._take_back(indices)
            gain = 1.0 / self._scale.of(o.grad_scaler)
            for group, at in o.groups():
                members = set(at)
                mine = [i for i in indices if i in members]
                if mine:
                    o.begin(kind, group, mine, gain, {i: gradients[i] for i in mine})
            self._kind = kind
            waits = o.exchange(kind, indices).waits
            self._futures[indices] = o.channel.submit(
                o.reduce(kind, indices), bucket.buffer(), waits=waits
            )

    def _round(self) -> RoundKind:
        o = self.optimizer
        o.facts.see(o.steps_done, max(float(group["lr"]) for group in o.param_groups))
        return o.round()

    def _take_back(self, indices: tuple[int, ...]) -> None:
        """Drop the started round of a bucket: a second backward before ``step`` holds the sum of
        both."""
        for key in [key for key in self._futures if not set(key).isdisjoint(indices)]:
            self._discard(key)

    def take_back(self) -> None:
        """Drop all started rounds, because parameters were added or a window closed. ``step`` sends
        again."""
        for key in list(self._futures):
            self._discard(key)

    def drop(self) -> None:
        """Forget started rounds, because the ranks have changed. The hand-over settles their
        proposals."""
        self._futures.clear()

    def _discard(self, key: tuple[int, ...]) -> None:
        for outcome in self._futures.pop(key).wait():
            outcome.discard()

    def wait(self) -> Steps[None]:
        """Wait until the worker is idle, and the channel's buffers are the caller's."""
        yield from self._futures.values()

    def finish(self, kind: RoundKind) -> Steps[tuple[list[Outcome], set[int]]]:
        """Return the outcomes of started rounds and their parameters; none if started as another
        kind of round."""
        futures, self._futures = self._futures, {}
        outcomes: list[Outcome] = []
        for future in futures.values():
            yield future
            outcomes += future.value()
        if kind is not self._kind:
            for outcome in outcomes:
                outcome.discard()
            return [], set()
        return outcomes, {i for key in futures for i in key}
