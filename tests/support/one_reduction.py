"""One all-reduce in two levels, without an object that keeps residuals."""

from collections.abc import Sequence

import torch

from commpress.codecs import Codec, codec_named, policy_of
from commpress.collectives.allreduce import Call, Workspace, check_buffer
from commpress.collectives.buckets import Span
from commpress.collectives.two_level import Feedbacks, Hierarchy, reduce_routes, routes
from commpress.work import Steps


def hierarchical_allreduce(
    buffer: torch.Tensor,
    feedbacks: Sequence[Feedbacks] | None = None,
    *,
    codec: str | Codec,
    hierarchy: Hierarchy,
    sequence: int = 0,
) -> Steps[bool]:
    """Replace ``buffer`` (float32, contiguous) by the mean over all ranks, compressed between nodes
    by ``codec``.

    Returns whether all ranks were finite; if not, buffer and feedback are unchanged. ``feedbacks``
    come from ``feedback_for``. Uses one sequence number per message of ``PIECE`` elements.
    """
    check_buffer(buffer)
    plan = routes(
        [Span("", 0, buffer.numel())],
        policy_of(codec_named(codec)),
        hierarchy,
        feedback=feedbacks is not None,
    )
    # a later message may turn out not to be finite
    copy = buffer.clone() if len(plan) > 1 else None
    outcomes = yield from reduce_routes(
        buffer,
        feedbacks or [{}] * len(plan),
        plan=plan,
        hierarchy=hierarchy,
        call=Call(hierarchy.inside, Workspace(), sequence, sequence),
    )
    finite = all(outcome.finite for outcome in outcomes)
    if finite:
        for outcome in outcomes:
            outcome.commit()
    elif copy is not None:
        buffer.copy_(copy)
    return finite


def feedback_for(
    numel: int, codec: str | Codec, hierarchy: Hierarchy, device: torch.device | str = "cpu"
) -> list[Feedbacks]:
    """Make zero residuals of this rank for buffers of ``numel`` elements: about numel / ranks per
    node."""
    plan = routes([Span("", 0, numel)], policy_of(codec_named(codec)), hierarchy)
    return [route.zeros(device) for route in plan]
