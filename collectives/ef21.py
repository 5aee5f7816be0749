"""EF21: every rank sends how its gradient has changed against what the others believe it to be.

    d = g·x − h      y = Q(d)       h ← h + y        rows of y to their owners          (all-to-all)
    z = mean(y) + s  o = Q(z)       s ← z − o        v ← v + o        x := v / g        (all-gather)

``h`` is this rank's gradient as the others know it, ``v`` the mean as all know it, s what the owner
has not passed on yet: v = mean(h) − s at any time. A gradient that stays is known ever more
exactly, and nothing that was left out long ago is sent late, as it is with a residual: the choice
for biased sparsifiers far from noise. It needs three floats per element.

With a topology nodes take the place of ranks: h is of a node's sum, kept slice by slice by the
ranks that own these, and v comes to the others of the node as it is (``two_level``).

Note: the same message as with a residual. −h lies where the residual of what was sent does, so the
encoder compensates with it and proposes −h − y + g·x; taking g·x off again leaves the new −h.
"""

from typing import Any

import torch

from commpress.codecs.codec import Codec
from commpress.collectives.allreduce import Outcome, Workspace, reduce_message
from commpress.collectives.buckets import Message
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.kernels.pieces import Pieces
from commpress.work import Steps


def check_codec(codec: Codec) -> None:
    if codec.lossless or not codec.feedback:
        why = "leaves nothing behind" if codec.lossless else "is noise of zero mean"
        raise InvalidArgument(
            f"codec is {codec.spec!r}, which {why}: EF21 is for codecs that leave something out, "
            "such as 'topk-64'"
        )


def reduce_changes(
    buffer: torch.Tensor,
    feedback: ErrorFeedback | None,
    *,
    message: Message,
    gain: float = 1.0,
    scale: float = 1.0,
    **others: Any,
) -> Steps[Outcome]:
    """As ``reduce_message``, where ``feedback`` holds estimates: ``buffer`` becomes what all know
    of its mean.

    Pieces without feedback travel as ever.
    """
    steps = reduce_message(buffer, feedback, message=message, gain=gain, scale=scale, **others)
    return as_changes(
        steps, buffer, feedback, others["workspace"], pieces=message.pieces, gain=gain, scale=scale
    )


def as_changes(
    steps: Steps[Outcome],
    buffer: torch.Tensor,
    feedback: ErrorFeedback | None,
    workspace: Workspace,
    *,
    pieces: Pieces,
    gain: float = 1.0,
    scale: float = 1.0,
) -> Steps[Outcome]:
    """``steps``, an exchange of ``buffer`` that has not begun, as one of changes: the mean change
    it finds becomes the mean."""
    if feedback is None:
        return (yield from steps)
    scratch = workspace.rows(4 * pieces.residual_numel, 1, buffer.device)
    given = scratch.view(torch.float32).view(-1)
    for source, numel, kept in pieces.residual_runs:
        given[kept : kept + numel].copy_(buffer[source : source + numel])
    outcome = yield from steps
    if outcome.finite and outcome.proposed is not None:
        _take_up(buffer, given, feedback, outcome.proposed, pieces, gain, scale)
    workspace.give_rows(scratch)
    return outcome


def _take_up(
    buffer: torch.Tensor,
    given: torch.Tensor,
    old: ErrorFeedback,
    new: ErrorFeedback,
    pieces: Pieces,
    gain: float,
    scale: float,
) -> None:
    """new: what is known after this message; buffer: from the mean change to the mean."""
    assert old.known is not None
    new.settle(pieces)
    new.sent.add_(given, alpha=-gain * scale)
    new.known = torch.empty_like(old.known) if new.known is None else new.known
    for source, numel, kept in pieces.residual_runs:
        change, known = buffer[source : source + numel], new.known[kept : kept + numel]
        torch.add(old.known[kept : kept + numel], change, alpha=gain, out=known)
        torch.div(known, gain, out=change)
