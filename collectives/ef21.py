"""EF21: every rank sends how its gradient has changed against what the others believe it to be.

    d = x − h        y = Q(d)        h ← h + y        rows of y to their owners                 (all-to-all)
    z = mean(y) + s  o = Q(z)        s ← z − o        v ← v + o        x := v                   (all-gather)

``h`` is this rank's gradient as the others know it, ``v`` the mean as all know it, s what the owner has not passed on yet:
v = mean(h) − s at any time. A gradient that stays is known ever more exactly, and nothing that was left out long ago is sent
late, as it is with a residual: the choice for biased sparsifiers far from noise. It needs three floats per element.
"""

from dataclasses import dataclass

import torch

from commpress.codecs.codec import Codec, codec_named
from commpress.collectives.allreduce import Workspace, check_buffer, reduce_message
from commpress.collectives.buckets import Message, one_message
from commpress.collectives.transport import Transport
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.work import Steps


@dataclass
class Estimates:
    """For one buffer on one rank; float32."""

    own: torch.Tensor  # h
    mean: torch.Tensor  # v, the same on every rank
    message: Message
    feedback: ErrorFeedback  # its ``reduced`` is s; its ``sent`` stays zero
    workspace: Workspace

    @classmethod
    def zeros(
        cls, numel: int, *, codec: str | Codec, transport: Transport, device: torch.device | str = "cpu"
    ) -> "Estimates":
        codec = codec_named(codec)
        if codec.lossless or not codec.feedback:
            raise InvalidArgument(
                f"codec is {codec.spec!r}, which {'leaves nothing behind' if codec.lossless else 'is noise of zero mean'}: "
                "EF21 is for codecs that leave something out, such as 'topk-64'"
            )
        message = one_message(numel, codec, transport.size, name="ef21")
        own, mean = torch.zeros(2, numel, dtype=torch.float32, device=device)
        return cls(own, mean, message, ErrorFeedback.zeros(message.pieces, device), Workspace())


def ef21_allreduce(
    buffer: torch.Tensor, estimates: Estimates, *, transport: Transport, sequence: int = 0
) -> Steps[bool]:
    """Replace ``buffer`` by the estimate of its mean over all ranks, after one exchange.

    Returns whether all ranks were finite; if not, buffer and estimates are unchanged.
    """
    check_buffer(buffer)
    difference = buffer - estimates.own
    message, workspace = estimates.message, estimates.workspace
    work = difference.clone()
    outcome = yield from reduce_message(
        work, estimates.feedback, message=message, transport=transport, workspace=workspace, sequence=sequence, key=sequence
    )
    if not outcome.finite or outcome.proposed is None:
        outcome.discard()
        return outcome.finite
    outcome.proposed.settle(message.pieces)
    difference -= outcome.proposed.sent  # what the others have just heard
    outcome.proposed.sent.zero_()
    outcome.commit()
    estimates.own += difference
    estimates.mean += work
    buffer.copy_(estimates.mean)
    return True
