"""Call sites of a process group: the same call in every backward, with its exchange and its
residual.

Note: the call site. DDP reduces its buckets in the same order in every backward, so the n-th
compressed reduction of a backward, with its number of elements, is one site and has one residual.
After DDP has rebuilt its buckets, at its first step, sites change and the residuals of old ones are
dropped. The hook (``commpress.compress``) keys residuals by parameter and loses nothing. Two models
need two groups. Outside a backward there is no such order: a metric between two gradients would
receive the residual of another tensor. Reductions there are compressed without residuals, by codecs
that need none (``GroupOptions``), and so is every all-gather.
"""

from abc import ABC, abstractmethod

import torch

from commpress.codecs import Codec, policy_of
from commpress.collectives import exact_rows
from commpress.collectives.allreduce import Outcome, Workspace, settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.levels import Levels
from commpress.collectives.reduce_scatter import Deal, Part, deals, gather_rows, reduce_rows
from commpress.feedback import ResidualStore
from commpress.work import Steps


class Site(ABC):
    """One call site. ``steps`` carries out the call from ``inp`` to ``out`` and returns whether all
    numbers were finite on all ranks.

    If not, ``out`` is NaN on all ranks, and no residual has changed.
    """

    sequences: int  # sequence numbers of one call
    waits: int | None  # number of waits in the steps, if known in advance

    def __init__(self, name: str, calls: int = 0) -> None:
        self.name, self.calls, self.last_backward = name, calls, 0
        self._scratch: torch.Tensor | None = None

    @abstractmethod
    def steps(
        self,
        channel: Channel,
        inp: torch.Tensor,
        out: torch.Tensor,
        *,
        sequence: int,
        key: int,
        factor: int,
    ) -> Steps[bool]:
        """Make the steps of one call. ``factor``: factor of the mean, the number of ranks for a
        sum."""

    @abstractmethod
    def forget(self, workspace: Workspace) -> None:
        """Free the buffers kept for this site, which will not be called again."""

    def _floats(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the flat tensor, or a float32 scratch of its length if it has another dtype."""
        if tensor.dtype == torch.float32:
            return tensor.view(-1)
        if self._scratch is None:
            self._scratch = torch.empty(tensor.numel(), device=tensor.device)
        return self._scratch


def _taken(outcomes: list[Outcome], mean: torch.Tensor, out: torch.Tensor, factor: int) -> bool:
    """Commit or discard a reduction; set ``out`` to ``factor`` times the mean, or NaN."""
    finite = all(outcome.finite for outcome in outcomes)
    if finite:
        if factor != 1:
            mean *= factor
        if mean.data_ptr() != out.data_ptr():
            out.view(-1).copy_(mean)
    else:
        out.fill_(float("nan"))
    settle(outcomes, taken=finite)
    return finite


class ReduceSite(Site):
    """All-reduces, in one level or two."""

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        codec: Codec,
        size: int,
        workspace: Workspace,
        residuals: ResidualStore,
        *,
        feedback: bool,
        levels: Levels | None = None,
        calls: int = 0,
    ) -> None:
        super().__init__(name, calls)
        exchanges = Exchanges(
            policy_of(codec), size, workspace, levels=levels, feedback=feedback, residuals=residuals
        )
        where = [Span(name, 0, tensor.numel())], [tensor.shape]
        self.exchange = exchanges.of((name,), lambda: where, tensor.device)
        self.sequences, self.waits = self.exchange.sequences, self.exchange.waits

    def steps(
        self,
        channel: Channel,
        inp: torch.Tensor,
        out: torch.Tensor,
        *,
        sequence: int,
        key: int,
        factor: int,
    ) -> Steps[bool]:
        buffer = self._floats(inp)
        if buffer.data_ptr() != inp.data_ptr():
            buffer.copy_(inp.view(-1))
        outcomes = yield from self.exchange.steps(channel, buffer, sequence=sequence, key=key)
        return _taken(outcomes, buffer, out, factor)

    def forget(self, workspace: Workspace) -> None:
        self.exchange.forget(workspace)


class _DealtSite(Site):
    """Calls in which each rank has an equal row."""

    def __init__(
        self,
        name: str,
        row: torch.Tensor,
        codec: Codec,
        rank: int,
        size: int,
        *,
        feedback: bool,
        calls: int,
    ) -> None:
        super().__init__(name, calls)
        part = Part(name, 0, row.numel(), row.numel() * size)
        self.plan: list[Deal] = deals(
            [part], policy_of(codec), rank=rank, ranks=size, feedback=feedback
        )
        self.sequences = self.waits = len(self.plan)

    def forget(self, workspace: Workspace) -> None:
        for deal in self.plan:
            workspace.forget(deal.every)


class ScatterSite(_DealtSite):
    """Reduce-scatters."""

    def __init__(
        self,
        name: str,
        row: torch.Tensor,
        codec: Codec,
        rank: int,
        size: int,
        residuals: ResidualStore,
        *,
        feedback: bool,
        calls: int = 0,
    ) -> None:
        super().__init__(name, row, codec, rank, size, feedback=feedback, calls=calls)
        self.feedbacks = [
            residuals.attach(deal.every.keys, deal.every.pieces, row.device) for deal in self.plan
        ]

    def steps(
        self,
        channel: Channel,
        inp: torch.Tensor,
        out: torch.Tensor,
        *,
        sequence: int,
        key: int,
        factor: int,
    ) -> Steps[bool]:
        mean = self._floats(out)
        outcomes = yield from reduce_rows(
            inp.view(-1),
            mean,
            self.feedbacks,
            plan=self.plan,
            sequence=sequence,
            key=key,
            transport=channel.transport,
            workspace=channel.workspace,
        )
        return _taken(outcomes, mean, out, factor)


class GatherSite(_DealtSite):
    """All-gathers; all ranks get the same bits, also for their own rows."""

    def __init__(
        self, name: str, row: torch.Tensor, codec: Codec, rank: int, size: int, *, calls: int = 0
    ) -> None:
        super().__init__(name, row, codec, rank, size, feedback=False, calls=calls)

    def steps(
        self,
        channel: Channel,
        inp: torch.Tensor,
        out: torch.Tensor,
        *,
        sequence: int,
        key: int,
        factor: int,
    ) -> Steps[bool]:
        finite = yield from gather_rows(
            inp.view(-1),
            out.view(-1),
            plan=self.plan,
            transport=channel.transport,
            workspace=channel.workspace,
            sequence=sequence,
            key=key,
        )
        if not all(finite):
            out.fill_(float("nan"))
        return all(finite)


class ExactGatherSite(Site):
    """Lossless all-gathers."""

    def __init__(self, name: str, row: torch.Tensor, size: int, *, calls: int = 0) -> None:
        super().__init__(name, calls)
        self.plan = exact_rows.exact_messages(row.numel(), size, row.dtype)
        self.sequences, self.waits = 2 * len(self.plan), None

    def steps(
        self,
        channel: Channel,
        inp: torch.Tensor,
        out: torch.Tensor,
        *,
        sequence: int,
        key: int,
        factor: int,
    ) -> Steps[bool]:
        yield from exact_rows.gather_exactly(
            inp.view(-1),
            out.view(-1),
            plan=self.plan,
            transport=channel.transport,
            workspace=channel.workspace,
            sequence=sequence,
        )
        return True

    def forget(self, workspace: Workspace) -> None:
        workspace.forget_rows({message.size for message in self.plan})
