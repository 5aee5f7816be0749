"""Compressed reduce-scatter of FSDP2, with one object per parameter group, which has the group's
residuals."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commpress.choice import Seen
from commpress.codecs import Policy
from commpress.codecs.whole_tensors import travels_whole
from commpress.collectives.allreduce import Call, Outcome, settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel, any_rank
from commpress.collectives.exchange import Round
from commpress.collectives.powersgd import RowsOnly
from commpress.collectives.reduce_scatter import Deal, Part, deals, reduce_rows, second_hop
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.integrations.fsdp.param_groups import ParamGroup
from commpress.integrations.fsdp.policies import Lossless, check_dtype
from commpress.integrations.fsdp.whole_parameters import WholeParameters
from commpress.kernels.devices import knows
from commpress.torch_private import fsdp_communication
from commpress.work import Steps, overlapped

_, _ReduceScatter = fsdp_communication()


@dataclass(frozen=True)
class Hop:
    """One exchange of rows on the way to a gradient's owner."""

    channel: Channel
    policy: Policy
    residuals: ResidualStore
    # rows sent to each rank of the channel; () in the last hop of two: ``own``
    rows: tuple[tuple[int, ...], ...] = ()
    own: tuple[int, ...] = ()  # rows that this rank has after the first hop


@dataclass
class _Leg:
    hop: Hop
    plan: list[Deal]
    feedbacks: list[ErrorFeedback | None]
    numel: int  # received elements


class CompressedReduceScatter(_ReduceScatter):  # type: ignore[misc,valid-type]
    """Average the gradients of one parameter group: send quantized rows to their owners, which sum
    in float32.

    Gradients with a codec of whole tensors are averaged separately, on every rank
    (``whole_parameters``).
    """

    def __init__(
        self, param_group: ParamGroup, owner: Any, channel: Channel, hops: Sequence[Hop]
    ) -> None:
        self.param_group, self.owner, self.channel, self.hops = (
            param_group,
            owner,
            channel,
            list(hops),
        )
        self.parts = param_group.parts(trainable=True)
        self.stride = sum(part.width for part in self.parts)
        self.calls = 0
        policy, shapes = hops[-1].policy, param_group.shapes
        whole = [
            p for p in self.parts if travels_whole(policy.choose(p.name, p.numel), shapes[p.name])
        ]
        self.in_rows = [part for part in self.parts if part not in whole]
        self.whole = None
        if whole:
            self.whole = WholeParameters(
                param_group,
                whole,
                policy,
                channel,
                residuals=owner.residuals,
                feedback=owner.error_feedback,
                any_rank=owner.most > 0,
            )
        self._legs: dict[torch.dtype, list[_Leg]] = {}

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        numel = int(size[0])
        if self._lends(numel, device):
            return self.channel.workspace.borrow(numel, dtype, device)
        return torch.empty(numel, dtype=dtype, device=device)

    def _lends(self, numel: int, device: torch.device) -> bool:
        """Return whether this is a buffer of whole gradients, which is not read after the
        reduction."""
        return (
            device.type == "cpu"
            and self.param_group.ranks > 1
            and numel == self.stride * self.param_group.ranks
        )

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._check(input_tensor, group)
        key, self.calls = self.owner.begin(self), self.calls + 1
        legs, workspace = self._legs_for(input_tensor.dtype), self.channel.workspace
        numbers = sum(len(leg.plan) for leg in legs) + (
            self.whole.exchange.sequences if self.whole else 0
        )
        call = self.channel.call(numbers + 1, key, self.owner.gain())
        factor, deferred = _factor(op, self.param_group.ranks), self.owner.deferred
        if op == dist.ReduceOp.SUM or self.param_group.gradients_in_use:
            deferred = None  # torch divides or a hook reads the output at once
        # a pipeline reduces between its backwards
        if deferred is not None and torch._C._current_graph_task_id() < 0:
            self.owner.outside_backward()
            deferred = None
        round = self.owner.round()
        if round is not None and output_tensor.device.type != "cpu":
            deferred = None  # a round is closed by the caller, whose stream has not waited yet
        in_place = deferred is None and output_tensor.dtype == torch.float32
        out = (
            output_tensor
            if in_place
            else workspace.borrow(output_tensor.numel(), torch.float32, output_tensor.device)
        )
        vote = None if self.owner.consensus is None else self.owner.consensus.reserve()
        if round is not None:
            round.begin(out)
        steps = self._reduced(
            input_tensor, out, output_tensor.dtype, legs, call, factor, vote, round
        )
        if deferred is not None:
            output_tensor.zero_()
            take = partial(self._add, out, output_tensor.dtype, legs)
            deferred.submit(self.channel, steps, input_tensor, out, take=take)
            return
        alone = self.owner.deferred is None  # else queued after running ones, which share buffers
        finite = (
            self.channel.run(steps)
            if alone
            else self.channel.submit(steps, input_tensor, out).wait()
        )
        if not finite:
            self.owner.not_finite(self, output_tensor)
        elif out is not output_tensor:
            output_tensor.copy_(out)
        if out is not output_tensor:
            workspace.give_back(out)
        self._count(output_tensor.dtype, legs)

    def _add(self, out: torch.Tensor, dtype: torch.dtype, legs: list[_Leg], finite: bool) -> None:
        """Add the results to the gradients, which are zeros so far, rounded as torch would have."""
        if not finite:
            self.owner.not_finite(self, out)
        values = out.to(dtype).float()  # adding bfloat16 to float32 is slow
        parameters = dict(zip(self.param_group.names, self.param_group.parameters, strict=True))
        for part in self.parts:
            gradient = parameters[part.name].grad
            if gradient is None:
                raise InvalidArgument(
                    f"the gradient of {part.name} was removed before the end of backward: pass "
                    "overlap=False to compress_fsdp"
                )
            local = gradient.to_local()  # type: ignore[attr-defined]
            local.add_(values[part.at : part.at + local.numel()].view(local.shape))
        self.channel.workspace.give_back(out)
        self._count(dtype, legs)

    def _reduced(
        self,
        gradients: torch.Tensor,
        out: torch.Tensor,
        dtype: torch.dtype,
        legs: list[_Leg],
        call: Call,
        factor: float,
        vote: int | None,
        round: Round | None,
    ) -> Steps[bool]:
        """Write the reduced gradients, to be returned in ``dtype``, to ``out``; return whether
        those of all ranks were finite, else residuals do not change.

        In a ``round`` they change only if all its exchanges were finite.
        """
        gain, workspace, device = call.gain, self.channel.workspace, gradients.device
        if any(part.width * self.param_group.ranks != part.numel for part in self.parts):
            out.zero_()  # padding after the last slice of a parameter
        jobs, means = [self._rows(gradients, out, legs, call)], None
        call = call.after(sum(len(leg.plan) for leg in legs))
        if self.whole is not None:
            means = workspace.borrow(self.whole.numel, torch.float32, device)
            jobs.append(self.whole.steps(gradients, means, call))
            call = call.after(self.whole.exchange.sequences)
        # with levels the number of waits may differ between ranks: see ``two_level``
        limit = 2 if self.channel.levels is None else 1
        outcomes = [
            outcome for found in (yield from overlapped(jobs, limit=limit)) for outcome in found
        ]
        finite = all(outcome.finite for outcome in outcomes)
        if finite and self.owner.choice.looks(self.calls - 1):
            self._observe(gradients, gain, outcomes)
        if finite and factor != gain:
            out.mul_(factor / gain)
        if finite and self.whole is not None and means is not None:
            self.whole.deliver(means, out, factor)
        if finite and dtype == torch.float16:  # the mean may overflow
            fits = bool(torch.isfinite(out.to(dtype)).all())
            finite = not (yield from any_rank(not fits, self.channel, call.sequence, device))
        if self.owner.consensus is not None:
            finite = yield from self.owner.consensus.agreed(finite, number=vote)
        if round is None:
            settle(outcomes, taken=finite)
        else:
            yield from round.end(out, finite, outcomes)
        if means is not None:
            workspace.give_back(means)
        if self._lends(gradients.numel(), device):
            workspace.give_back(gradients)
        return finite

    def _observe(self, gradients: torch.Tensor, gain: float, outcomes: Sequence[Outcome]) -> None:
        """Show the choice this rank's own gradients, before the outcomes are settled."""
        choice, workspace = self.owner.choice, self.channel.workspace
        spans = [
            Span(part.name, row * self.stride + part.at, _in_row(part, row))
            for part in self.in_rows
            for row in range(self.param_group.ranks)
        ]
        own = gradients.float() * gain
        compensated = own.clone() if self.owner.alarm is not None else None
        if compensated is not None:
            _compensate(compensated, outcomes)
        choice.observe(self.calls - 1, Seen(spans, own, compensated, outcomes))
        if self.whole is not None:
            whole = workspace.borrow(self.whole.numel, torch.float32, gradients.device)
            self.whole.collect(gradients, whole)
            exchange = self.whole.exchange
            seen = Seen(exchange.spans, whole.mul_(gain), None, outcomes, exchange.plans)
            choice.observe(self.calls - 1, seen)
            workspace.give_back(whole)

    def _rows(
        self,
        gradients: torch.Tensor,
        out: torch.Tensor,
        legs: list[_Leg],
        call: Call,
    ) -> Steps[list[Outcome]]:
        """Write gain · the mean of gradients that travel in rows to ``out``, hop by hop."""
        workspace, lent, buffer = self.channel.workspace, [], gradients
        if not knows(gradients.device, gradients.dtype):
            buffer = workspace.borrow(gradients.numel(), torch.float32, gradients.device).copy_(
                gradients
            )
            lent.append(buffer)
        outcomes: list[Outcome] = []
        for i, leg in enumerate(legs):
            last = i == len(legs) - 1
            target = out
            if not last:
                target = workspace.borrow(leg.numel, torch.float32, buffer.device)
                lent.append(target)
            outcomes += yield from reduce_rows(
                buffer,
                target,
                leg.feedbacks,
                leg.plan,
                call._replace(transport=leg.hop.channel.transport),
            )
            call = call.after(len(leg.plan))._replace(gain=1.0)
            if not last and not all(outcome.finite for outcome in outcomes):
                target.fill_(float("nan"))  # reports it to all nodes
            buffer = target
        workspace.give_back(*lent)
        return outcomes

    def _count(self, dtype: torch.dtype, legs: list[_Leg]) -> None:
        """Count a call that has ended."""
        counters, ranks = self.owner.gradients, self.param_group.ranks
        counters.logical_bytes += dtype.itemsize * self.stride * (ranks - 1)
        for leg in legs:
            counters.messages += len(leg.plan)
        counters.elements(legs[-1].plan)
        if self.whole is not None:
            counters.messages += len(self.whole.exchange.messages)
            counters.compressed_elements += self.whole.numel
        self.owner.reduced()

    def _check(self, input_tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        check_dtype(input_tensor, f"the gradients of {self.param_group.name}")
        if group.size() != self.param_group.ranks:
            raise InvalidArgument(
                f"the gradients of {self.param_group.name} are reduced among {group.size()} ranks, "
                f"expected {self.param_group.ranks}"
            )
        if input_tensor.numel() != self.stride * self.param_group.ranks:
            raise InvalidArgument(
                f"{self.param_group.name} has {input_tensor.numel()} gradients, expected "
                f"{self.stride * self.param_group.ranks}: torch leaves out parameters without a "
                "gradient, or requires_grad was changed after compress_fsdp. In the first case "
                "call model.set_reduce_scatter_unused_params(True) (torch 2.13), in the second "
                "call compress_fsdp after the change"
            )

    def quantised(self) -> list[int]:
        """Return the number of elements with residuals on this rank, by hop."""
        result = []
        for hop in self.hops:
            rows = hop.own or range(self.param_group.ranks)
            lossy = [
                part
                for part in self.in_rows
                if (codec := hop.policy.choose(part.name, part.numel)).feedback
                and not codec.lossless
            ]
            result.append(sum(_in_row(part, row) for part in lossy for row in rows))
        return result

    def go_on_with(self, policy: Policy) -> None:
        """Use other codecs from the next call on; residuals stay, by parameter."""
        for leg in (leg for legs in self._legs.values() for leg in legs):
            for deal in leg.plan:
                self.channel.workspace.forget(deal.every)
        if self.whole is not None:
            self.whole.use(policy)
        self.hops = [*self.hops[:-1], replace(self.hops[-1], policy=policy)]
        self._legs = {}

    def _legs_for(self, dtype: torch.dtype) -> list[_Leg]:
        if dtype not in self._legs:
            device = self.param_group.parameters[0].device
            legs = []
            for hop in self.hops:
                options: dict[str, Any] = {
                    "stride": self.stride,
                    "feedback": self.owner.error_feedback,
                }
                policy, rank = (
                    Lossless(RowsOnly(hop.policy), dtype, self.owner.grad_scaler is not None),
                    hop.channel.rank,
                )
                if hop.own:
                    plan = second_hop(
                        self.in_rows, RowsOnly(hop.policy), hop.own, rank=rank, **options
                    )
                else:
                    plan = deals(
                        self.in_rows,
                        policy,
                        rank=rank,
                        ranks=hop.channel.size,
                        bases=hop.rows,
                        **options,
                    )
                feedbacks = [
                    hop.residuals.attach(deal.every.keys, deal.every.pieces, device)
                    for deal in plan
                ]
                rows = len(hop.rows[rank]) if hop.rows else 1
                legs.append(_Leg(hop, plan, feedbacks, rows * self.stride))
            self._legs = {dtype: legs}
        return self._legs[dtype]


def _in_row(part: Part, row: int) -> int:
    """Return the elements of a parameter in a row, without padding."""
    return min(max(part.numel - row * part.width, 0), part.width)


def _compensate(gradients: torch.Tensor, outcomes: Sequence[Outcome]) -> None:
    """Add the residuals of the last step to gradients in rows."""
    for outcome in outcomes:
        if outcome.feedback is not None:
            outcome.feedback.settle(outcome.message.pieces)
            owed = outcome.feedback.floats()
            for start, numel, kept in outcome.message.pieces.residual_runs:
                gradients[start : start + numel] += owed[kept : kept + numel]


def _factor(op: Any, ranks: int) -> float:
    """Return the factor that turns a mean into the result of ``op``."""
    kind, factor = op, 1.0
    if not isinstance(op, dist.ReduceOp.RedOpType):
        kind, factor = op.__getstate__()
    if kind == dist.ReduceOp.AVG:
        return 1.0
    if kind == dist.ReduceOp.SUM:
        return float(ranks)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return float(ranks) * float(factor)
    raise InvalidArgument(f"the reduction of gradients is {op}, expected AVG, SUM or PREMUL_SUM")
