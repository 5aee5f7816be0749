"""FSDP2's reduce-scatter, compressed: one object per unit, which owns the unit's residuals."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commpress.codecs import Policy
from commpress.collectives.allreduce import Outcome, settle
from commpress.collectives.reduce_scatter import Deal, deals, reduce_rows, second_hop
from commpress.collectives.transports.transport import Transport
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.integrations.fsdp.param_groups import Unit
from commpress.integrations.fsdp.policies import Lossless, check_dtype
from commpress.kernels import knows
from commpress.kernels.rotation import rotate
from commpress.torch_private import fsdp_communication
from commpress.work import Steps, run

_, _ReduceScatter = fsdp_communication()


@dataclass(frozen=True)
class Hop:
    """One exchange on the way to a gradient's owner."""

    transport: Transport
    policy: Policy
    residuals: ResidualStore
    rows: tuple[tuple[int, ...], ...] = ()  # what each rank of the transport is sent; () in the last hop of two: ``own``
    own: tuple[int, ...] = ()  # the rows that the first hop left here
    rotated: bool = False  # blocks are turned by a Hadamard matrix before they are quantised


@dataclass
class _Leg:
    hop: Hop
    plan: list[Deal]
    feedbacks: list[ErrorFeedback | None]
    numel: int  # elements that arrive


class CompressedReduceScatter(_ReduceScatter):  # type: ignore[misc,valid-type]
    """Averages the gradients of one unit: quantised rows to their owners, sums in float32."""

    def __init__(self, unit: Unit, owner: Any, hops: Sequence[Hop]) -> None:
        self.unit, self.owner, self.hops = unit, owner, hops
        self.parts = unit.parts(trainable=True)
        self.stride = sum(part.width for part in self.parts)
        self.calls = 0
        self._legs: dict[torch.dtype, list[_Leg]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        numel = int(size[0])
        if self._lends(numel, device):
            return self.owner.borrow(numel, dtype, device)
        return torch.empty(numel, dtype=dtype, device=device)

    def _lends(self, numel: int, device: torch.device) -> bool:
        """Whether this is a buffer of whole gradients, which nobody reads once they are reduced."""
        return device.type == "cpu" and self.unit.ranks > 1 and numel == self.stride * self.unit.ranks

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
        legs = self._legs_for(input_tensor.dtype)
        sequence = self.owner.sequence(sum(len(leg.plan) for leg in legs) + 1)
        factor, late = _factor(op, self.unit.ranks), self.owner.late
        if op == dist.ReduceOp.SUM or self.unit.gradients_in_use:  # torch divides the output, or somebody reads it, at once
            late = None
        if late is not None and torch._C._current_graph_task_id() < 0:  # a pipeline reduces between its backwards
            self.owner.outside_backward()
            late = None
        in_place = late is None and output_tensor.dtype == torch.float32
        out = output_tensor if in_place else self.owner.borrow(output_tensor.numel(), torch.float32, output_tensor.device)
        vote = None if self.owner.consensus is None else self.owner.consensus.reserve()
        steps = self._reduced(input_tensor, out, output_tensor.dtype, legs, key, factor, sequence, vote)
        self.owner.reduced(self, input_tensor, [(leg.hop.transport, leg.plan) for leg in legs])
        if late is not None:
            output_tensor.zero_()
            late.submit(steps, partial(self._land, out, output_tensor.dtype))
            return
        finite = run(steps)
        if not finite:
            self.owner.not_finite(self, output_tensor)
        elif out is not output_tensor:
            output_tensor.copy_(out)
        if out is not output_tensor:
            self.owner.give_back(out)

    def _land(self, out: torch.Tensor, dtype: torch.dtype, finite: bool) -> None:
        """Add to the gradients what torch took for zeros, rounded as torch would have."""
        if not finite:
            self.owner.not_finite(self, out)
        values = out.to(dtype).float()  # adding bfloat16 to float32 is slow
        parameters = dict(zip(self.unit.names, self.unit.parameters, strict=True))
        for part in self.parts:
            gradient = parameters[part.name].grad
            if gradient is None:
                raise InvalidArgument(
                    f"the gradient of {part.name} was taken away before backward had ended: pass overlap=False to compress_fsdp"
                )
            local = gradient.to_local()  # type: ignore[attr-defined]
            local.add_(values[part.at : part.at + local.numel()].view(local.shape))
        self.owner.give_back(out)

    def _reduced(
        self,
        gradients: torch.Tensor,
        out: torch.Tensor,
        dtype: torch.dtype,
        legs: list[_Leg],
        key: int,
        factor: float,
        sequence: int,
        vote: int | None,
    ) -> Steps[bool]:
        """out := the reduced gradients, to be given out in ``dtype``; whether all ranks were finite, else residuals stay."""
        gain, borrow, lent = self.owner.gain(), self.owner.borrow, []
        if any(part.width * self.unit.ranks != part.numel for part in self.parts):
            out.zero_()  # what lies behind the last slice of a parameter
        buffer = gradients
        if not knows(gradients.device, gradients.dtype) or legs[0].hop.rotated:
            buffer = borrow(gradients.numel(), torch.float32, gradients.device).copy_(gradients)
            lent.append(buffer)
        outcomes: list[Outcome] = []
        for i, leg in enumerate(legs):
            last = i == len(legs) - 1
            target = out
            if not last:
                target = borrow(leg.numel, torch.float32, buffer.device)
                lent.append(target)
            if leg.hop.rotated:
                rotate(buffer, [deal.every.pieces for deal in leg.plan])
            outcomes += yield from reduce_rows(
                buffer, target, leg.feedbacks, plan=leg.plan, transport=leg.hop.transport, workspace=self.owner.reducing,
                sequence=sequence, key=key, gain=gain if i == 0 else 1.0,
            )  # fmt: skip
            sequence += len(leg.plan)
            if leg.hop.rotated:
                rotate(target, [deal.own for deal in leg.plan])
            if not last and not all(outcome.finite for outcome in outcomes):
                target.fill_(float("nan"))  # so that all nodes hear of it
            buffer = target
        finite = all(outcome.finite for outcome in outcomes)
        if finite and factor != gain:
            out.mul_(factor / gain)
        if finite and dtype == torch.float16:  # a mean that does not fit
            fits = bool(torch.isfinite(out.to(dtype)).all())
            finite = not (yield from self.owner.any_rank(not fits, self.hops[0].transport, sequence))
        if self.owner.consensus is not None:
            finite = yield from self.owner.consensus.agreed(finite, gradients.device, number=vote)
        settle(outcomes, taken=finite)
        for buffer in (*lent, *((gradients,) if self._lends(gradients.numel(), gradients.device) else ())):
            self.owner.give_back(buffer)
        return finite

    def _check(self, input_tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        check_dtype(input_tensor, f"the gradients of {self.unit.name}")
        if group.size() != self.unit.ranks:
            raise InvalidArgument(
                f"the gradients of {self.unit.name} are reduced among {group.size()} ranks, expected {self.unit.ranks}"
            )
        if input_tensor.numel() != self.stride * self.unit.ranks:
            raise InvalidArgument(
                f"{input_tensor.numel()} gradients of {self.unit.name} came, expected {self.stride * self.unit.ranks}: "
                "parameters without a gradient are left out, or requires_grad was changed after compress_fsdp. For the first "
                "call model.set_reduce_scatter_unused_params(True) (torch 2.13), for the second compress_fsdp when it is done"
            )

    def _legs_for(self, dtype: torch.dtype) -> list[_Leg]:
        if dtype not in self._legs:
            device = self.unit.parameters[0].device
            legs = []
            for hop in self.hops:
                options: dict[str, Any] = {"stride": self.stride, "feedback": self.owner.error_feedback}
                policy, rank = Lossless(hop.policy, dtype), hop.transport.rank
                if hop.own:
                    policy = hop.policy  # type: ignore[assignment]
                    plan = second_hop(self.parts, policy, hop.own, rank=rank, **options)
                else:
                    plan = deals(self.parts, policy, rank=rank, ranks=hop.transport.size, bases=hop.rows, **options)
                feedbacks = [hop.residuals.attach(deal.every.keys, deal.every.pieces, device) for deal in plan]
                rows = len(hop.rows[rank]) if hop.rows else 1
                legs.append(_Leg(hop, plan, feedbacks, rows * self.stride))
            self._legs = {dtype: legs}
        return self._legs[dtype]


def _factor(op: Any, ranks: int) -> float:
    """What a mean must be multiplied by to be what ``op`` means."""
    kind, factor = op, 1.0
    if not isinstance(op, dist.ReduceOp.RedOpType):
        kind, factor = op.__getstate__()
    if kind == dist.ReduceOp.AVG:
        return 1.0
    if kind == dist.ReduceOp.SUM:
        return float(ranks)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return float(ranks) * float(factor)
    raise InvalidArgument(f"gradients are to be reduced with {op}, expected AVG, SUM or PREMUL_SUM")
