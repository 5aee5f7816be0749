"""Call sites of a process group: the same call in every backward, with its exchange and its
residual.

Note: the call site. DDP reduces its buckets in the same order in every backward, so the n-th
compressed reduction of a backward, with its number of elements, is one site and has one residual.
After DDP has rebuilt its buckets, at its first step, sites change and the residuals of old ones are
dropped. The hook (``commpress.compress``) keys residuals by parameter and loses nothing. Two models
need two groups. Outside a backward there is no such order: a metric between two gradients would
receive the residual of another tensor. Reductions there are compressed without residuals, by codecs
that need none (``GroupOptions``), and so is every all-gather. Nor is there one in a backward that
another backward calls, as reentrant checkpoints do: each counts from 0. Reductions there are exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from commpress.collectives import exact_rows
from commpress.collectives.allreduce import Call, Outcome, Workspace, settle
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange
from commpress.collectives.reduce_scatter import Deal, gather_rows, reduce_rows
from commpress.feedback import ErrorFeedback
from commpress.work import Steps

Run = Callable[[Channel, torch.Tensor, torch.Tensor, Call, int], Steps[bool]]


@dataclass(eq=False)
class Site:
    """One call site.

    ``run(channel, inp, out, call, factor)`` writes ``factor`` times the mean of ``inp`` to ``out``,
    or gathers it there, and returns whether all numbers were finite on all ranks. If not, ``out``
    is NaN on all ranks, and no residual has changed.
    """

    name: str
    sequences: int  # sequence numbers of one call
    waits: int | None  # number of waits in the steps, if known in advance
    run: Run
    # frees the buffers kept for this site, which will not be called again
    forget: Callable[[Workspace], None]
    calls: int = 0
    last_backward: int = 0


def reduce_site(name: str, exchange: Exchange) -> Site:
    """All-reduces, in one level or two."""

    def run(
        channel: Channel, inp: torch.Tensor, out: torch.Tensor, call: Call, factor: int
    ) -> Steps[bool]:
        buffer = _floats(inp, call.workspace)
        if buffer.dtype != inp.dtype:
            buffer.copy_(inp.view(-1))
        outcomes = yield from exchange.steps(channel, buffer, call)
        return _taken(outcomes, buffer, out, factor, call.workspace)

    return Site(name, exchange.sequences, exchange.waits, run, exchange.forget)


def scatter_site(
    name: str, plan: Sequence[Deal], feedbacks: Sequence[ErrorFeedback | None]
) -> Site:
    """Reduce-scatters."""

    def run(
        channel: Channel, inp: torch.Tensor, out: torch.Tensor, call: Call, factor: int
    ) -> Steps[bool]:
        mean = _floats(out, call.workspace)
        outcomes = yield from reduce_rows(inp.view(-1), mean, feedbacks, plan, call)
        return _taken(outcomes, mean, out, factor, call.workspace)

    return _dealt(name, plan, run)


def gather_site(name: str, plan: Sequence[Deal]) -> Site:
    """All-gathers; all ranks get the same bits, also for their own rows."""

    def run(
        channel: Channel, inp: torch.Tensor, out: torch.Tensor, call: Call, factor: int
    ) -> Steps[bool]:
        finite = yield from gather_rows(inp.view(-1), out.view(-1), plan, call)
        if not all(finite):
            out.fill_(float("nan"))
        return all(finite)

    return _dealt(name, plan, run)


def exact_gather_site(name: str, plan: Sequence[exact_rows.ExactMessage]) -> Site:
    """Lossless all-gathers."""

    def run(
        channel: Channel, inp: torch.Tensor, out: torch.Tensor, call: Call, factor: int
    ) -> Steps[bool]:
        yield from exact_rows.gather_exactly(inp.view(-1), out.view(-1), plan, call)
        return True

    def forget(workspace: Workspace) -> None:
        workspace.forget_rows({message.size for message in plan})

    return Site(name, 2 * len(plan), None, run, forget)


def _dealt(name: str, plan: Sequence[Deal], run: Run) -> Site:
    """Calls in which each rank has an equal row."""

    def forget(workspace: Workspace) -> None:
        for deal in plan:
            workspace.forget(deal.every)

    return Site(name, len(plan), len(plan), run, forget)


def _floats(tensor: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Return a tensor flat, or a borrowed float32 buffer of its length if it has another dtype: one
    for each call, since calls of one site may overlap outside a backward."""
    if tensor.dtype == torch.float32:
        return tensor.view(-1)
    return workspace.borrow(tensor.numel(), torch.float32, tensor.device)


def _taken(
    outcomes: list[Outcome],
    mean: torch.Tensor,
    out: torch.Tensor,
    factor: int,
    workspace: Workspace,
) -> bool:
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
    if mean.dtype != out.dtype:
        workspace.give_back(mean)
    return finite
