"""Hybrid sharding with FSDP2: shards inside a node as torch sends them, replicas between nodes averaged compressed."""

import logging
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from commpress.codecs import Codec, Policy
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket, settle
from commpress.collectives.buckets import Span, messages
from commpress.collectives.checkpoint import exact_state, residuals_of
from commpress.collectives.loopback import Recorded, Timed
from commpress.collectives.transport import own_transport
from commpress.errors import InvalidArgument
from commpress.feedback import ResidualStore, check_feedback
from commpress.integrations.counters import Counters
from commpress.integrations.fsdp import MIN_NUMEL
from commpress.integrations.roles import check_dtype, policy_for
from commpress.integrations.units import Unit, units_of
from commpress.work import run

log = logging.getLogger("commpress")


def compress_hsdp(
    model: nn.Module,
    replicate: DeviceMesh | dist.ProcessGroup,
    gradients: str | Codec | Policy = "int8",
    *,
    min_numel: int = MIN_NUMEL,
    error_feedback: bool = True,
    on_nonfinite: Literal["skip", "propagate"] = "skip",
    timeout: timedelta | None = None,
    checksum: bool = False,
    seed: int = 0,
) -> "ReplicatedState":
    """Average gradients over ``replicate`` too, compressed; returns the state, which holds residuals and counters.

    Shard over one dimension of a mesh and pass the other here: ``fully_shard(module, mesh=mesh["shard"])`` and
    ``compress_hsdp(model, mesh["replicate"])``. (On a mesh of two dimensions torch averages over replicas itself and offers
    no way in.) Replicas must start with equal weights. Residuals are of this rank's shard: 4 bytes per parameter, divided
    by the ranks of a node, and as much again divided by the replicas.
    """
    if on_nonfinite not in ("skip", "propagate"):
        raise InvalidArgument(f"on_nonfinite is {on_nonfinite!r}, expected 'skip' or 'propagate'")
    group = replicate.get_group() if isinstance(replicate, DeviceMesh) else replicate
    return ReplicatedState(
        units_of(model), group, policy_for(model, gradients, min_numel=min_numel), error_feedback=error_feedback,
        on_nonfinite=on_nonfinite, timeout=timeout, checksum=checksum, seed=seed,
    )  # fmt: skip


class ReplicatedState:
    """What the hooks of all units share. See ``compress_hsdp``."""

    def __init__(
        self,
        units: list[Unit],
        group: dist.ProcessGroup,
        policy: Policy,
        *,
        error_feedback: bool,
        on_nonfinite: str,
        timeout: timedelta | None,
        checksum: bool,
        seed: int,
    ) -> None:
        check_feedback(error_feedback)
        self.policy, self.error_feedback, self.on_nonfinite, self.seed = policy, error_feedback, on_nonfinite, seed
        self.step, self.counters, self.residuals = 0, Counters(), ResidualStore()
        self.workspace = Workspace(checksum=checksum)
        self._sequence = 0
        self._timed = Timed(own_transport(group, timeout=timeout))
        self.transport = Recorded(self._timed)
        for unit in units:
            if any(p.requires_grad for p in unit.parameters):
                unit.module.set_all_reduce_hook(_Average(unit, self))

    def average(self, unit: "_Average", shard: torch.Tensor) -> None:
        check_dtype(shard, f"the gradients of {unit.unit.name}")
        if shard.numel() != unit.numel:
            raise InvalidArgument(
                f"{shard.numel()} gradients of {unit.unit.name} came, expected {unit.numel}: parameters without a gradient are "
                "left out. Call model.set_reduce_scatter_unused_params(True) (torch 2.13)"
            )
        if unit.calls >= self.step:
            self.step = unit.calls + 1
        buffer = shard if shard.dtype == torch.float32 else shard.float()
        outcomes: list[Outcome] = run(
            reduce_bucket(
                buffer, unit.feedbacks, messages=unit.messages, transport=self.transport, workspace=self.workspace,
                sequence=self._sequence, key=self.seed * 1_000_003 + unit.calls,
            )
        )  # fmt: skip
        self._sequence += len(unit.messages)
        unit.calls += 1
        finite = all(outcome.finite for outcome in outcomes)
        settle(outcomes, taken=finite)
        if not finite:
            self.counters.skipped_buckets += 1
            log.warning("gradients of %s held NaN or infinity in some replica", unit.unit.name)
            shard.fill_(0.0 if self.on_nonfinite == "skip" else float("nan"))
        elif buffer is not shard:
            shard.copy_(buffer)
        self.counters.bucket(sum(m.pieces.numel for m in unit.messages), unit.messages, self.transport.size)
        self.counters.steps, self.counters.wire_bytes = self.step, self.transport.sent_bytes
        self.counters.wire_seconds = self._timed.seconds

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for a bitwise resume with the same mesh: every rank saves and loads its own."""
        return exact_state(self.residuals, self.transport, self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, residuals = residuals_of([state], self.transport)
        self.residuals.load(residuals)


class _Average:
    """torch calls it with what a unit's reduce-scatter left on this rank."""

    def __init__(self, unit: Unit, owner: ReplicatedState) -> None:
        self.unit, self.owner, self.calls = unit, owner, 0
        spans = []
        locals_ = {name: p.to_local().numel() for name, p in zip(unit.names, unit.parameters, strict=True)}
        parts = unit.parts(trainable=True)
        for part in parts:
            if locals_[part.name]:
                spans.append(Span(part.name, part.at, locals_[part.name]))
        self.numel = sum(part.width for part in parts)
        whole = {part.name: part.numel for part in parts}
        policy = _OfWhole(owner.policy, whole)
        self.messages = messages(spans, policy, owner.transport.size, feedback=owner.error_feedback)
        device = unit.parameters[0].device
        self.feedbacks = [owner.residuals.attach(m.keys, m.pieces, device) for m in self.messages]

    def __call__(self, shard: torch.Tensor) -> None:
        self.owner.average(self, shard)


class _OfWhole:
    """Chooses by the size of the whole parameter, so that all ranks of a node choose alike."""

    def __init__(self, policy: Policy, numels: dict[str, int]) -> None:
        self.policy, self.numels = policy, numels

    def choose(self, name: str, numel: int) -> Codec:
        return self.policy.choose(name, self.numels[name])
