"""Groups of different size for sequences of different length: long ones on many ranks, short ones
on few, at once (FlexSP)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from commpress.codecs import Codec
from commpress.collectives.channel import Channel
from commpress.collectives.transports.transport import Transport, part_of
from commpress.errors import InvalidArgument, check_counts
from commpress.integrations.sequence.sequence_parallel import SequenceParallel


@dataclass(frozen=True)
class RankShare:
    """Sequences of one group of ranks, by their number."""

    ranks: tuple[int, ...]
    sequences: tuple[int, ...]


def divide_sequences(
    lengths: Sequence[int],
    ranks: int,
    most: int,
    *,
    linear: float = 0.0,
    node: int = 1,
    inside: float = 0.0,
    between: float = 0.0,
) -> list[RankShare]:
    """Groups of 1, 2, 4, … ranks, and the sequences of each, so that the last is done as early as a
    greedy search finds.

    ``most``: positions that one rank has room for, so a sequence needs length / most ranks. One of
    n positions takes (n² + linear·n + travel·n·(w − 1)/w) / w on w ranks, where travel is
    ``inside`` for groups of up to ``node`` ranks and ``between`` for larger ones: in positions that
    one could attend to while one position travels. Every way to cut the ranks into powers of two is
    tried, longest sequences first.
    """
    check_counts(ranks=ranks, most=most)
    if not lengths or ranks < 1 or max(lengths) > most * _power(ranks):
        raise InvalidArgument(
            f"lengths are up to {max(lengths, default=0)}, and {_power(ranks)} of {ranks} ranks "
            f"with room for {most} each are the largest group: cut sequences, or let ranks have "
            "more"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    best: tuple[float, int, list[list[int]], tuple[int, ...]] | None = None
    for widths in _partitions(ranks, _power(ranks)):
        given: list[list[int]] = [[] for _ in widths]
        busy = [0.0] * len(widths)
        for i in order:
            able = [g for g, width in enumerate(widths) if lengths[i] <= most * width]
            if not able:
                break
            ends = [
                busy[g]
                + _seconds(lengths[i], widths[g], linear, inside if widths[g] <= node else between)
                for g in able
            ]
            g = able[ends.index(min(ends))]
            busy[g] = min(ends)
            given[g].append(i)
        else:
            if best is None or (max(busy), -len(widths)) < best[:2]:
                best = max(busy), -len(widths), given, widths
    assert best is not None  # the partition that begins with the largest group holds every sequence
    shares, first = [], 0
    for width, sequences in zip(best[3], best[2], strict=True):
        shares.append(RankShare(tuple(range(first, first + width)), tuple(sequences)))
        first += width
    return shares


def _seconds(length: int, width: int, linear: float, travel: float) -> float:
    return length * (length + linear + travel * (width - 1) / width) / width


def _power(ranks: int) -> int:
    """The largest power of two that is not above."""
    return 1 << ranks.bit_length() - 1


def _partitions(ranks: int, largest: int) -> Iterator[tuple[int, ...]]:
    """Powers of two that add up to ``ranks``, the largest first: so groups lie at multiples of
    their size."""
    if ranks == 0:
        yield ()
        return
    while largest:
        if largest <= ranks:
            for rest in _partitions(ranks - largest, largest):
                yield (largest, *rest)
        largest //= 2


class SequenceGroups:
    """``SequenceParallel`` of every group that ``divide_sequences`` may name, over one transport;
    made on all ranks."""

    def __init__(
        self,
        codec: str | Codec = "none",
        *,
        gradient_codec: str | Codec | None = None,
        process_group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
    ) -> None:
        channel = Channel.among(process_group) if transport is None else Channel(transport)
        self.groups: dict[tuple[int, ...], SequenceParallel] = {}
        width = 1
        while width <= channel.size:
            for first in range(0, channel.size - width + 1, width):
                ranks = tuple(range(first, first + width))
                part = part_of(channel.inner, ranks)
                if part is not None:
                    own = SequenceParallel(
                        codec, gradient_codec=gradient_codec, channel=Channel(part)
                    )
                    self.groups[ranks] = own
            width *= 2

    def of(self, shares: Sequence[RankShare]) -> tuple[SequenceParallel, tuple[int, ...]]:
        """This rank's group in one step, and the sequences that it has there."""
        for share in shares:
            if share.ranks in self.groups:
                return self.groups[share.ranks], share.sequences
        raise InvalidArgument(
            f"no group of {[share.ranks for share in shares]} is one of this rank's, "
            f"{list(self.groups)}"
        )
