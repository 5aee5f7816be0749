"""Hybrid sharding with FSDP2: torch shards inside a node, and compressed averages keep replicas on
other nodes equal."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from commpress.alarm import Peers
from commpress.choice import Now, PerLayer, Seen, check_layers, choice_of
from commpress.codecs import Codec, Policy
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel, Counters
from commpress.collectives.exchange import Exchange, Exchanges, Tensors
from commpress.collectives.handover import Divided, Handover
from commpress.collectives.state import Stateful
from commpress.collectives.transports.factory import AgreeOver, consensus_over, on_reform
from commpress.errors import InvalidArgument
from commpress.feedback import check_feedback
from commpress.integrations.fsdp.fsdp2 import MIN_NUMEL
from commpress.integrations.fsdp.nonfinite import BadGradients
from commpress.integrations.fsdp.param_groups import ParamGroup, column_mesh, param_groups_of
from commpress.integrations.fsdp.policies import check_dtype, policy_for


class ReplicatedState(Divided, Stateful):
    """Average gradients over ``replicate``, too, with compression. The result has residuals and
    counters.

    Shard over one dimension of a mesh and pass the other here: ``fully_shard(module,
    mesh=mesh["shard"])`` and ``compress_hsdp(model, mesh["replicate"])``. (On a mesh of two
    dimensions torch averages over replicas itself and has no extension point for it.) Replicas must
    start with equal weights. Residuals of this rank's shard take 4 bytes per parameter, divided by
    the ranks of a node, and the same again divided by the replicas.

    States fit other numbers of replicas, with the same shards. Other options as in
    ``compress_fsdp``; with ``PerLayer`` the replicas of a shard choose together, for its part of
    every layer.

    ``agree_over``: a process group or DeviceMesh of all ranks that must stay equal and run backward
    together, if these are more than ``replicate``: with tensor parallelism the whole mesh. They
    decide about each group of parameters together.
    """

    def __init__(
        self,
        model: nn.Module,
        replicate: DeviceMesh | dist.ProcessGroup,
        codec: str | Codec | Policy | PerLayer = "fp8",
        *,
        min_numel: int = MIN_NUMEL,
        error_feedback: bool = True,
        on_nonfinite: Literal["skip", "propagate", "raise"] = "skip",
        agree_over: AgreeOver | None = None,
    ) -> None:
        check_feedback(error_feedback)
        group = replicate.get_group() if isinstance(replicate, DeviceMesh) else replicate
        self.bad = BadGradients(on_nonfinite, dist.get_rank(group))
        param_groups = param_groups_of(model)
        if agree_over is None and (mesh := column_mesh(param_groups)) is not None:
            raise InvalidArgument(
                f"agree_over is None, but tensor parallelism shards parameters, too, on {mesh}: "
                "pass the whole mesh, including replicas, as in agree_over=mesh"
            )
        whole = {
            name: p.numel()
            for each in param_groups
            for name, p in zip(each.names, each.parameters, strict=True)
        }

        def named(codec: str | Codec | Policy) -> Policy:
            return _OfWhole(policy_for(model, codec, min_numel=min_numel), whole)

        self.choice = choice_of(codec, named, tries=False)
        assert self.choice.usual is not None
        self._now = Now(self.choice.usual)
        self.counters = Counters()
        self.channel = Channel.among(group)
        self.handover = Handover(self.channel)
        self.consensus = consensus_over(agree_over, group)
        # replicas of other shards have other parameters
        held = self.channel.size * param_groups[0].group.size()
        check_layers(codec, held, self.consensus)
        self.exchanges = Exchanges(
            self.choice.usual,
            self.channel.size,
            self.channel.workspace,
            feedback=error_feedback,
            any_rank=isinstance(codec, PerLayer),
        )
        trained = [each for each in param_groups if any(p.requires_grad for p in each.parameters)]
        self.averages = [_Average(each, self) for each in trained]
        for average in self.averages:
            average.param_group.module.set_all_reduce_hook(average)
        on_reform(None, self)

    def average(self, of: "_Average", shard: torch.Tensor) -> None:
        check_dtype(shard, f"the gradients of {of.param_group.name}")
        if shard.numel() != of.numel:
            raise InvalidArgument(
                f"{of.param_group.name} has {shard.numel()} gradients, expected {of.numel}: torch "
                "leaves out parameters without one. Call "
                "model.set_reduce_scatter_unused_params(True) (torch 2.13)"
            )
        if of.calls >= self.steps_done:
            self._begin(of.calls)
        buffer = shard if shard.dtype == torch.float32 else shard.float()
        own, exchange = buffer.clone() if self._now.looks else None, of.exchange
        outcomes = self.channel.run(
            exchange.steps(self.channel, buffer, self.channel.call(exchange.sequences, of.calls))
        )
        of.calls += 1
        finite = all(outcome.finite for outcome in outcomes)
        if finite and own is not None:
            seen = Seen(exchange.spans, own, None, outcomes, exchange.plans)
            self.choice.observe(of.calls - 1, seen)
        if self.consensus is not None:
            finite = self.channel.run(self.consensus.agreed(finite))
        settle(outcomes, taken=finite)
        if not finite:
            name = f"gradients of {of.param_group.name}"
            self.bad.refuse(shard, self.counters, name, of.calls - 1)
        elif buffer is not shard:
            shard.copy_(buffer)
        self.counters.bucket(
            sum(m.pieces.numel for m in exchange.messages), exchange.messages, self.channel.size
        )
        self.counters.steps, self.counters.wire_bytes = self.steps_done, self.channel.sent_bytes
        self.counters.wire_seconds = self.channel.waited

    def _begin(self, step: int) -> None:
        """Choose the codecs of a new step, on every replica at its first average."""
        self.steps_done = step + 1
        if self.channel.size > 1:
            self._now = self.channel.run(self.choice.at(step, Peers(self.channel)))
            assert self._now.policy is not None
            self.exchanges.use(self._now.policy)
            self.counters.choice = self.choice.why or self.counters.choice

    def schedule(self) -> dict[str, Any]:
        return self.choice.saved()

    def check(self, schedule: Mapping[str, Any]) -> None:
        """Accept every schedule: a choice may continue from any other."""

    def follow(self, schedule: Mapping[str, Any], change: Change | None = None) -> None:
        """Continue the count of rounds, by which codecs draw, and the choice."""
        self.choice.load(schedule)
        for average in self.averages:
            average.calls = self.steps_done

    def numels(self) -> dict[str, int]:
        """Return the number of elements of this rank's shards."""
        spans = (span for average in self.averages for span in average.tensors()[0])
        return {span.name: span.numel for span in spans}


compress_hsdp = ReplicatedState  # the public name


class _Average:
    """Hook that averages over replicas this rank's shard from a group's reduce-scatter."""

    def __init__(self, param_group: ParamGroup, owner: ReplicatedState) -> None:
        self.param_group, self.owner, self.calls = param_group, owner, 0
        self.numel = sum(part.width for part in param_group.parts(trainable=True))

    @property
    def exchange(self) -> Exchange:
        group = self.param_group
        device = group.parameters[0].device
        return self.owner.exchanges.of(tuple(group.names), self.tensors, device)

    def tensors(self) -> Tensors:
        """Return this rank's shard of every parameter that has one."""
        shards = {
            name: p.to_local()
            for name, p in zip(self.param_group.names, self.param_group.parameters, strict=True)
        }
        parts = [
            part for part in self.param_group.parts(trainable=True) if shards[part.name].numel()
        ]
        spans = [Span(part.name, part.at, shards[part.name].numel()) for part in parts]
        return spans, [shards[part.name].shape for part in parts]

    def __call__(self, shard: torch.Tensor) -> None:
        self.owner.average(self, shard)


class _OfWhole:
    """Policy that chooses by the size of the whole parameter, so that all ranks of a node choose
    alike."""

    def __init__(self, policy: Policy, numels: dict[str, int]) -> None:
        self.policy, self.numels = policy, numels

    def choose(self, name: str, numel: int) -> Codec:
        return self.policy.choose(name, self.numels[name])
