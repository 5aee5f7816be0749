"""Shift along the ranks of a sequence: a tensor goes to rank r + by, another comes from rank r −
by, encoded on the way."""

from dataclasses import dataclass, field
from itertools import accumulate

import torch

from commpress.collectives.all_to_all.executor import Executor, Scratch
from commpress.collectives.all_to_all.routes import Lengths, direct
from commpress.collectives.frame import FLAT, Frame
from commpress.collectives.transports.transport import Transport
from commpress.integrations.pipeline.edge_codec import EdgeCodec, decode_into, encoded
from commpress.work import Steps, Work


@dataclass(frozen=True)
class SequencePlace:
    """One rank's part of a sequence: ``lengths`` are the positions that each rank of ``transport``
    has, in their order."""

    transport: Transport
    lengths: tuple[int, ...]
    scratch: Scratch = field(default_factory=Scratch, repr=False)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def start(self, rank: int) -> int:
        """The first position of a rank."""
        return [0, *accumulate(self.lengths)][rank]


def shift(
    out: torch.Tensor,
    inp: torch.Tensor,
    place: SequencePlace,
    *,
    by: int,
    sequence: int,
    sends: bool = True,
    receives: bool = True,
) -> Steps[None]:
    """Bytes to rank + ``by`` round the ring, into ``out`` those of rank − ``by``. Who does not send
    says so on both sides."""
    me, size = place.rank, place.size
    to, come_from = (me + by) % size, (me - by) % size
    if to == me:
        out.copy_(inp)
    elif sends or receives:
        counts = [[0] * size, [0] * size]
        counts[0][to], counts[1][come_from] = sends * inp.numel(), receives * out.numel()
        what = Frame(FLAT, size, "uint8", 0, sequence, by % size)
        plan = direct(
            Lengths(me, tuple(counts[0]), tuple(counts[1])),
            (to,) if sends else (),
            (come_from,) if receives else (),
            FLAT,
            0,
        )
        yield from Executor(what, place.transport, place.scratch).run(plan, out, inp)


class Begun:
    """Steps whose first message is on its way while something else is computed; ``finish`` waits
    for it and goes on."""

    def __init__(self, steps: Steps[None]) -> None:
        self.steps = steps
        self.work: Work | None = next(steps, None)

    def finish(self) -> Steps[None]:
        while self.work is not None:
            yield self.work
            self.work = next(self.steps, None)


def packed(tensors: tuple[torch.Tensor, ...], codec: EdgeCodec | None) -> torch.Tensor:
    """One message of several tensors, as they are without a codec."""
    exact = [codec is None or not t.numel() for t in tensors]
    return torch.cat(
        [
            t.detach().contiguous().view(-1).view(torch.uint8)
            if as_is or codec is None
            else encoded(t, codec)
            for t, as_is in zip(tensors, exact, strict=True)
        ]
    )


def packed_size(
    shapes: tuple[torch.Size, ...], dtype: torch.dtype, codec: EdgeCodec | None
) -> tuple[int, ...]:
    """Bytes of each tensor in a message."""
    return tuple(
        s.numel() * dtype.itemsize
        if codec is None or not s.numel()
        else codec.size(s.numel(), s[-1])
        for s in shapes
    )


def unpacked(
    message: torch.Tensor,
    shapes: tuple[torch.Size, ...],
    dtype: torch.dtype,
    codec: EdgeCodec | None,
) -> tuple[torch.Tensor, ...]:
    tensors = []
    for part, shape in zip(message.split(packed_size(shapes, dtype, codec)), shapes, strict=True):
        tensor = torch.empty(shape, dtype=dtype, device=message.device)
        if codec is None or not tensor.numel():
            tensor.view(-1).view(torch.uint8).copy_(part)
        else:
            decode_into(tensor, part, codec)
        tensors.append(tensor)
    return tuple(tensors)
