"""Communication hook for gradients of the older FullyShardedDataParallel. Use FSDP2 in new
programs."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd import Variable

from commpress.codecs import Codec, codec_named, policy_of
from commpress.collectives.allreduce import Outcome, Workspace, reduce_bucket, settle
from commpress.collectives.buckets import Message, Span, messages
from commpress.collectives.channel import Channel, Counters
from commpress.collectives.handover import Divided
from commpress.collectives.reduce_scatter import Deal, Part, deals, reduce_rows
from commpress.collectives.residual_state import exact_state, residuals_of
from commpress.collectives.transports.factory import on_reform
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback, ResidualStore, check_feedback
from commpress.integrations.fsdp.nonfinite import BadGradients
from commpress.integrations.fsdp.policies import check_dtype


class FlatShardState(Divided):
    """State of ``compressed_reduce_scatter_hook``: call ``fsdp.register_comm_hook(state, hook)`` on
    the root.

    Construct it on every rank of ``process_group`` (default: all). torch tells the hook neither a
    gradient's unit nor the places of its parameters, so units are identified by their order in
    backward, and one codec serves all. A backward with another order, or with units missing, raises
    an error: residuals would be added to other parameters.

    - ``codec``: codec of every unit's gradient.
    - ``checksum``: check every message, if the transport does not.

    Other options as in ``CompressedState``.
    """

    def __init__(
        self,
        codec: str | Codec = "fp8",
        *,
        process_group: dist.ProcessGroup | None = None,
        error_feedback: bool = True,
        on_nonfinite: Literal["skip", "propagate", "raise"] = "skip",
        checksum: bool = False,
    ) -> None:
        check_feedback(error_feedback)
        self.codec, self.error_feedback = codec_named(codec), error_feedback
        self.step, self.counters, self.residuals = 0, Counters(), ResidualStore()
        self.channel = Channel.among(process_group, workspace=Workspace(checksum=checksum))
        self.transport = self.channel.transport
        self.bad = BadGradients(on_nonfinite, self.channel.rank)
        # elements of each unit's gradient, in the order of the first backward
        self._order: list[int] | None = None
        self._seen: list[int] = []  # units of the running backward
        self._plans: dict[tuple[int, bool], tuple[Any, list[ErrorFeedback | None]]] = {}
        on_reform(None, self)

    def reduce(self, gradient: torch.Tensor, shard: torch.Tensor | None) -> None:
        check_dtype(gradient, "a flat gradient")
        unit = self._next_unit(gradient.numel())
        if self.transport.size == 1:
            if shard is not None:
                shard.copy_(gradient)
            return
        buffer = gradient.float()
        plan, feedbacks = self._plan(unit, gradient, sharded=shard is not None)
        call = self.channel.call(len(plan), self.step)
        if shard is None:
            outcomes: list[Outcome] = self.channel.run(reduce_bucket(buffer, feedbacks, plan, call))
            target, result = gradient, buffer
        else:
            result = (
                shard
                if shard.dtype == torch.float32
                else torch.zeros(shard.numel(), device=shard.device)
            )
            outcomes = self.channel.run(reduce_rows(buffer, result, feedbacks, plan, call))
            target = shard
        finite = all(outcome.finite for outcome in outcomes)
        settle(outcomes, taken=finite)
        if not finite:
            self.bad.refuse(target, self.counters, f"gradients of unit {unit}", self.step)
        elif target is not result:
            target.copy_(result)
        self._count(gradient, plan)

    def _next_unit(self, numel: int) -> int:
        if not self._seen and torch._C._current_graph_task_id() >= 0:
            Variable._execution_engine.queue_callback(self._end)
        unit = len(self._seen)
        self._seen.append(numel)
        if self._order is not None and self._seen != self._order[: len(self._seen)]:
            came, self._seen = self._seen, []
            raise InvalidArgument(
                f"backward had units of {came} elements, but the first one {self._order}: every "
                "unit must take part in every backward, in the same order. Use fully_shard "
                "(FSDP2), which names its parameters"
            )
        return unit

    def _end(self) -> None:
        came, self._seen = self._seen, []
        if self._order is None:
            self._order = came
        if came != self._order:
            raise InvalidArgument(
                f"backward had {len(came)} units, but the first one {len(self._order)}: every unit "
                "must take part in every backward. Use fully_shard (FSDP2), which names its "
                "parameters"
            )
        self.step += 1
        self.counters.steps = self.step

    def _plan(
        self, unit: int, gradient: torch.Tensor, *, sharded: bool
    ) -> tuple[Any, list[ErrorFeedback | None]]:
        if (unit, sharded) not in self._plans:
            name, policy, size = f"unit {unit:05d}", policy_of(self.codec), self.transport.size
            plan: list[Deal] | list[Message]
            if sharded:
                part = Part(name, 0, gradient.numel() // size, gradient.numel())
                plan = deals(
                    [part],
                    policy,
                    rank=self.transport.rank,
                    ranks=size,
                    feedback=self.error_feedback,
                )
                carried = [deal.every for deal in plan]
            else:
                plan = carried = messages(
                    [Span(name, 0, gradient.numel())], policy, size, feedback=self.error_feedback
                )
            feedbacks = [self.residuals.attach(m.keys, m.pieces, gradient.device) for m in carried]
            self._plans[unit, sharded] = plan, feedbacks
        return self._plans[unit, sharded]

    def _count(self, gradient: torch.Tensor, plan: Any) -> None:
        carried = [deal.every if isinstance(deal, Deal) else deal for deal in plan]
        self.counters.bucket(gradient.numel(), carried, self.transport.size)
        self.counters.wire_bytes, self.counters.wire_seconds = (
            self.channel.sent_bytes,
            self.channel.waited,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part, for a bitwise resume at the same world size: every rank saves
        and loads its own."""
        return exact_state(self.residuals, self.transport, self.step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, residuals = residuals_of([state], self.transport)
        self.residuals.load(residuals)


def compressed_reduce_scatter_hook(
    state: FlatShardState, gradient: torch.Tensor, shard: torch.Tensor | None = None
) -> None:
    """Average a unit's flat gradient: into ``shard`` if the strategy shards, in place if it does
    not (NO_SHARD)."""
    if not isinstance(state, FlatShardState):
        raise InvalidArgument(
            f"state is a {type(state).__name__}, expected a FlatShardState: "
            "fsdp.register_comm_hook(commpress.FlatShardState('int8'), "
            "commpress.compressed_reduce_scatter_hook)"
        )
    state.reduce(gradient, shard)
