"""FSDP2's all-gather of parameters, compressed: one object per unit. The sharded parameters themselves are only read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from commpress.codecs import Codec, Policy, codec_named, policy_of
from commpress.collectives.reduce_scatter import Deal, deals, gather_rows
from commpress.collectives.transport import Transport
from commpress.integrations.roles import Lossless, check_dtype
from commpress.integrations.units import Unit
from commpress.work import Steps, run

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


@dataclass(frozen=True)
class Difference:
    """Weights travel as differences from what all ranks hold already, in ``codec``; where nothing changed, not at all.

    What is lost is part of the next difference, so errors do not add up. Every rank keeps a copy of all parameters in the
    dtype in which they are gathered: memory that full sharding saves. After loading other weights, ``forget`` the copies
    (``ShardedState.forget_weights``) or let them converge in a few steps.
    """

    codec: str | Codec = "int4"

    def __post_init__(self) -> None:
        codec_named(self.codec)


class CompressedAllGather(AllGather):
    """Gathers the parameters of one unit; every rank, the owner too, gets the decoded ones."""

    def __init__(
        self, unit: Unit, owner: Any, policy: Policy, transport: Transport, *, difference: bool
    ) -> None:
        self.unit, self.owner, self.policy, self.transport = unit, owner, policy, transport
        self.difference = difference
        self.parts = unit.parts(trainable=False)
        self.stride = sum(part.width for part in self.parts)
        self.held: torch.Tensor | None = None  # what all ranks hold, with ``difference``
        self.restored: torch.Tensor | None = None  # the own row of it, from a checkpoint
        self._last: torch.Tensor | None = None
        exact = [part for part in self.parts if policy.choose(part.name, part.numel).lossless]
        self._values = [slice(part.at, part.at + part.width) for part in exact]  # what never travels as a difference
        self._plans: dict[tuple[torch.dtype, bool], list[Deal]] = {}

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        check_dtype(input_tensor, f"the parameters of {self.unit.name}")
        if group.size() != self.unit.ranks:  # between forward and backward, among the ranks of a node: exact
            self.owner.gathered_exactly(output_tensor, group.size())
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        steps = self._difference if self.difference else self._whole
        sequence = self.owner.sequence(2 + 2 * len(self._plan(input_tensor.dtype)))
        job = steps(input_tensor, output_tensor, sequence, self.owner.key())
        worker = self.owner.worker
        if worker is None:
            run(job)
            return None
        return _Pending(worker.submit(job))

    # ------------------------------------------------------------ steps

    def _whole(self, row: torch.Tensor, out: torch.Tensor, sequence: int, key: int) -> Steps[None]:
        yield from self._gathered(row, out, self._plan(row.dtype), sequence, key)

    def _difference(self, row: torch.Tensor, out: torch.Tensor, sequence: int, key: int) -> Steps[None]:
        plan, exact = self._plan(row.dtype), self._plan(row.dtype, exact=True)
        if self.held is None:
            whole = row if self.restored is None else self.restored.to(row)
            self.held = torch.empty_like(out)
            yield from self._gathered(whole, self.held, exact, sequence, key)
            self.restored, self._last = None, whole.clone()
            sequence += len(exact)
        same = self._last is not None and torch.equal(row, self._last)
        changed = yield from self.owner.any_rank(not same, self.transport, sequence)
        if changed:
            step = self.owner.borrow(out.numel(), out.device)
            rows = self.held.view(self.unit.ranks, -1)
            for columns in self._values:
                rows[:, columns] = 0
            base = rows[self.transport.rank].float()
            finite = yield from gather_rows(
                row.float(), step, plan=plan, transport=self.transport, workspace=self.owner.gathering, sequence=sequence + 1,
                key=key, base=base,
            )  # fmt: skip
            self.held.add_(step)
            self.owner.give_back(step)
            self.owner.gathered(out, plan, self.transport, headers=1)
            self._last = row.clone()
            out.copy_(self.held)
            if not all(finite):
                self.forget()
            return
        self.owner.gathered(out, [], self.transport, headers=1)
        out.copy_(self.held)

    def _gathered(
        self, row: torch.Tensor, out: torch.Tensor, plan: list[Deal], sequence: int, key: int
    ) -> Steps[None]:
        whole = out if out.dtype == torch.float32 else self.owner.borrow(out.numel(), out.device)
        yield from gather_rows(
            row.float(), whole, plan=plan, transport=self.transport, workspace=self.owner.gathering, sequence=sequence,
            key=key,
        )  # fmt: skip
        if whole is not out:
            out.copy_(whole)
            self.owner.give_back(whole)
        self.owner.gathered(out, plan, self.transport)

    def own_row(self) -> torch.Tensor | None:
        """This rank's part of what all hold: with all ranks' parts, and nothing else, it comes back bit for bit."""
        if self.held is None:
            return self.restored
        return self.held.view(self.unit.ranks, -1)[self.transport.rank].clone()

    def forget(self) -> None:
        """The next gather sends all weights exactly."""
        self.held = self.restored = self._last = None

    def _plan(self, dtype: torch.dtype, *, exact: bool = False) -> list[Deal]:
        if (dtype, exact) not in self._plans:
            policy = policy_of("none") if exact else self.policy
            self._plans[dtype, exact] = deals(
                self.parts, Lossless(policy, dtype), rank=self.transport.rank, ranks=self.unit.ranks, stride=self.stride,
                feedback=False,
            )  # fmt: skip
        return self._plans[dtype, exact]


class _Pending(dist.Work):
    """FSDP2 waits for what an all-gather returns before it copies the parameters out, also where it did not ask for it."""

    def __init__(self, future: torch.futures.Future[None]) -> None:
        super().__init__()
        self.future = future

    def wait(self, timeout: Any = None) -> bool:
        self.future.wait()
        return True
