"""Compressed all-gather of FSDP2, with one object per parameter group. Sharded parameters are only
read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from commpress.codecs import Codec, Policy, codec_named, policy_of
from commpress.codecs.exponents import ExponentCodec
from commpress.collectives import exact_rows
from commpress.collectives.allreduce import Call
from commpress.collectives.channel import Channel, any_rank
from commpress.collectives.reduce_scatter import Deal, deals, decode_rows, gather_rows
from commpress.errors import InvalidArgument
from commpress.integrations.fsdp.param_groups import ParamGroup
from commpress.integrations.fsdp.policies import Lossless, check_dtype
from commpress.kernels.devices import knows
from commpress.torch_private import all_gather_single, fsdp_communication
from commpress.work import Steps

_AllGather, _ = fsdp_communication()


@dataclass(frozen=True)
class Difference:
    """Send weights as differences from the copies on all ranks, in ``codec``; send nothing if they
    are unchanged.

    Each difference includes the error of the previous one, so errors do not add up. Every rank
    keeps a copy of all parameters in the dtype of gathering, memory that full sharding would save.
    After loading other weights, drop the copies (``ShardedState.forget_weights``) or let them
    converge in a few steps.
    """

    codec: str | Codec = "int4"

    def __post_init__(self) -> None:
        codec_named(self.codec)


class CompressedAllGather(_AllGather):  # type: ignore[misc,valid-type]
    """Gather one group of parameters; every rank, including the owner, gets the decoded values.

    Note: when nothing is sent. Weights do not change between forward and backward, so backward uses
    what forward has received, without communication. In forward they have changed if gradients were
    reduced in between. Otherwise (evaluation, accumulation, frozen parameters) each rank compares
    its row, and a header from every rank to all tells whether any has changed.
    """

    def __init__(
        self,
        param_group: ParamGroup,
        owner: Any,
        policy: Policy,
        channel: Channel,
        *,
        difference: bool,
        keep: bool,
    ) -> None:
        self.param_group, self.owner, self.policy, self.channel = (
            param_group,
            owner,
            policy,
            channel,
        )
        self.difference = difference
        self.parts = param_group.parts(trainable=False)
        self.stride = sum(part.width for part in self.parts)
        self.held: torch.Tensor | None = None  # the copy on all ranks, with ``difference``
        self.restored: torch.Tensor | None = None  # this rank's row of it, from a checkpoint
        self._rows: list[Any] = []  # last received rows, still encoded, without ``difference``
        self._last: torch.Tensor | None = None  # this rank's row as last sent
        self._reduced = -1  # number of reductions of gradients at that time
        self._backwards = 0
        exact = [part for part in self.parts if policy.choose(part.name, part.numel).lossless]
        self.keep = keep and len(exact) < len(self.parts)  # keeping exact rows would save nothing
        # parts that are never sent as differences
        self._values = [slice(part.at, part.at + part.width) for part in exact]
        self._plans: dict[tuple[torch.dtype, bool], list[Deal]] = {}

    def allocate(
        self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        check_dtype(input_tensor, f"the parameters of {self.param_group.name}")
        # among the ranks of a smaller mesh after forward: exact
        if group.size() != self.param_group.ranks:
            self.owner.gathered_exactly(output_tensor, group.size())
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        backward = torch._C._current_graph_task_id() >= 0
        if not backward:
            self.owner.prefetcher.met(self.param_group)
        reduced = self.owner.reductions(self.param_group, self._backwards)
        self._backwards += backward and self.param_group.reduces
        fresh, self._reduced = reduced != self._reduced, reduced
        steps = self._difference if self.difference else self._whole
        call = self.channel.call(2 + 2 * len(self._plan(input_tensor.dtype)), self.owner.step)
        job = steps(input_tensor, output_tensor, call, backward, fresh)
        if self.owner.background:
            return Gathering(self.channel.submit(job, input_tensor, output_tensor))
        self.channel.run(job)
        return None

    # ------------------------------------------------------------ steps

    def _whole(
        self,
        row: torch.Tensor,
        out: torch.Tensor,
        call: Call,
        backward: bool,
        fresh: bool,
    ) -> Steps[None]:
        plan = self._plan(row.dtype)
        keep, kept = self.keep and self.param_group.gathered_twice, bool(self._rows)
        changed = not kept or (yield from self._changed(row, call, backward, fresh))
        whole = (
            out
            if knows(out.device, out.dtype)
            else self.channel.workspace.borrow(out.numel(), torch.float32, out.device)
        )
        if changed:
            self._give_back()
            if keep:
                self._note(row)
            yield from self._gathered(
                row, whole, plan, call.after(1), kept=self._rows if keep else None
            )
        else:
            self._decode(row, whole, plan)
        if whole is not out:
            out.copy_(whole)
            self.channel.workspace.give_back(whole)
        headers = int(kept and not backward and not fresh)
        self.owner.gathered(out, plan if changed else [], self.param_group.ranks, headers=headers)

    def _difference(
        self,
        row: torch.Tensor,
        out: torch.Tensor,
        call: Call,
        backward: bool,
        fresh: bool,
    ) -> Steps[None]:
        plan, exact = self._plan(row.dtype), self._plan(row.dtype, exact=True)
        direct = knows(out.device, out.dtype)
        step = (
            out if direct else self.channel.workspace.borrow(out.numel(), torch.float32, out.device)
        )
        sent: list[Deal] = []
        if self.held is None:
            whole = row if self.restored is None else self.restored.to(row)
            row = row.clone()  # a view of ``out``
            yield from self._gathered(whole, step, exact, call)
            self.held, self.restored = torch.empty_like(out).copy_(step), None
            self._note(whole)
            sent, call, backward, fresh = exact, call.after(len(exact)), False, False
        changed = yield from self._changed(row, call, backward, fresh)
        finite = True
        if changed:
            rows = self.held.view(self.param_group.ranks, -1)
            for columns in self._values:
                rows[:, columns] = 0
            base = rows[self.channel.rank].float()
            self._note(row)
            if direct:
                finite = yield from self._gathered(
                    row.float(), self.held, plan, call.after(1), base=base, add=True
                )
            else:
                finite = yield from self._gathered(
                    row.float(), step, plan, call.after(1), base=base
                )
                self.held.add_(step)
        out.copy_(self.held)
        if not direct:
            self.channel.workspace.give_back(step)
        headers = int(not backward and not fresh)
        self.owner.gathered(
            out, [*sent, *(plan if changed else [])], self.param_group.ranks, headers=headers
        )
        if not finite:
            self.forget()

    def _changed(self, row: torch.Tensor, call: Call, backward: bool, fresh: bool) -> Steps[bool]:
        """Return whether any rank's weights differ from those last sent. See the class's note."""
        if backward or fresh:
            return fresh and not backward
        same = self._last is not None and torch.equal(_bits(row), _bits(self._last))
        return (yield from any_rank(not same, self.channel, call.sequence, row.device))

    def _gathered(
        self,
        row: torch.Tensor,
        out: torch.Tensor,
        plan: list[Deal],
        call: Call,
        **options: Any,
    ) -> Steps[bool]:
        """Run ``gather_rows`` for any dtype; return whether all was finite."""
        wide = row
        if not knows(row.device, row.dtype):
            wide = self.channel.workspace.borrow(row.numel(), torch.float32, row.device).copy_(row)
        finite = yield from gather_rows(
            wide,
            out,
            plan,
            call,
            **options,
        )
        if wide is not row:
            self.channel.workspace.give_back(wide)
        return all(finite)

    def _decode(self, row: torch.Tensor, out: torch.Tensor, plan: list[Any]) -> None:
        decode_rows(self._rows, out, plan=plan, workspace=self.channel.workspace)

    def _give_back(self) -> None:
        self.channel.workspace.give_rows(*self._rows)
        self._rows = []

    def _note(self, row: torch.Tensor) -> None:
        """Remember this rank's row, which is a view of memory that will be overwritten."""
        if self._last is None or self._last.dtype != row.dtype:
            self._last = torch.empty_like(row)
        self._last.copy_(row)

    def kept_bytes(self) -> int:
        """Return the bytes kept from forward to backward, or from step to step."""
        ranks, dtype = self.param_group.ranks, self.param_group.gathered_dtype
        if self.difference:
            return dtype.itemsize * self.stride * ranks
        if not (self.keep and self.param_group.gathered_twice):
            return 0
        chosen = [(part, self.policy.choose(part.name, part.numel)) for part in self.parts]
        return ranks * sum(
            dtype.itemsize * part.width if codec.lossless else codec.row_bytes(part.width)
            for part, codec in chosen
        )

    def own_row(self) -> torch.Tensor | None:
        """Return this rank's row of the common copy: the rows of all ranks restore it bit for
        bit."""
        if self.held is None:
            return self.restored
        return self.held.view(self.param_group.ranks, -1)[self.channel.rank].clone()

    def forget(self) -> None:
        """Let the next gather send all weights, with ``difference`` exactly."""
        self.held = self.restored = self._last = None
        self._rows, self._reduced = [], -1

    def _plan(self, dtype: torch.dtype, *, exact: bool = False) -> list[Any]:
        if (dtype, exact) not in self._plans:
            policy = policy_of("none") if exact else self.policy
            self._plans[dtype, exact] = deals(
                self.parts,
                Lossless(policy, dtype),
                rank=self.channel.rank,
                ranks=self.param_group.ranks,
                stride=self.stride,
                feedback=False,
            )
        return self._plans[dtype, exact]


class LosslessAllGather(CompressedAllGather):
    """Gather one group of parameters bit for bit, with coded exponents."""

    def __init__(
        self, param_group: ParamGroup, owner: Any, channel: Channel, *, keep: bool
    ) -> None:
        policy = policy_of(ExponentCodec())
        super().__init__(param_group, owner, policy, channel, difference=False, keep=False)
        dtype, device = param_group.gathered_dtype, param_group.parameters[0].device
        if dtype not in exact_rows.KINDS or device.type != "cpu":
            raise InvalidArgument(
                f"weights is 'exact', but {param_group.name} is gathered in {dtype} on {device}, "
                "expected bfloat16 or float32 on the CPU: gather in bfloat16 "
                "(MixedPrecisionPolicy(param_dtype=torch.bfloat16)), or pass weights=None"
            )
        self.keep = keep
        self._rows: list[exact_rows.Received] = []
        self._messages = exact_rows.exact_messages(self.stride, param_group.ranks, dtype)

    def _gathered(  # type: ignore[override]
        self,
        row: torch.Tensor,
        out: torch.Tensor,
        plan: list[exact_rows.ExactMessage],
        call: Call,
        kept: list[exact_rows.Received] | None = None,
    ) -> Steps[bool]:
        yield from exact_rows.gather_exactly(row, out, plan, call, learn=True, kept=kept)
        return True

    def _decode(self, row: torch.Tensor, out: torch.Tensor, plan: list[Any]) -> None:
        channel = self.channel
        exact_rows.decode_rows(
            self._rows, row, out, plan=plan, rank=channel.rank, workspace=channel.workspace
        )

    def _give_back(self) -> None:
        exact_rows.give_back(self._rows, self.channel.workspace)
        self._rows = []

    def kept_bytes(self) -> int:
        if not (self.keep and self.param_group.gathered_twice):
            return 0
        return self.param_group.ranks * sum(message.first for message in self._messages)

    def _plan(self, dtype: torch.dtype, *, exact: bool = False) -> list[Any]:
        return self._messages


def _bits(row: torch.Tensor) -> torch.Tensor:
    """View the bits, so that −0 differs from 0 and a NaN equals itself."""
    return row.view(torch.int32 if row.itemsize == 4 else torch.int16)


class Gathering(dist.Work):
    """Work of a gather. FSDP2 waits for the work that an all-gather returns before it copies the
    parameters, even if it did not request asynchronous work."""

    def __init__(self, future: torch.futures.Future[None]) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True
