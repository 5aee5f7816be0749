"""Whole tensors divided among the ranks: each has one owner, for arithmetic that needs all of a
tensor at once, as that of a matrix does.

Messages are those of ``reduce_scatter``. A rank's row has the pieces of the tensors that it owns;
as all rows of a message are equally long, tensors should be dealt so that ranks own about as many
elements.
"""

from collections.abc import Sequence

import torch

from commpress.codecs import Codec
from commpress.codecs.policy import Same
from commpress.collectives.buckets import MESSAGE, PIECE, Span
from commpress.collectives.channel import Channel
from commpress.collectives.reduce_scatter import Deal, Line, Part, Scatter, deal_of, line_of


class Owners(Scatter):
    """Exchange of tensors of which number i belongs to rank owners[i]: means go to the owners, and
    what owners have goes to everybody.

    ``numel``: elements of this rank's row, where each of its tensors begins at its part's ``at``.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        owners: Sequence[int],
        codec: Codec,
        channel: Channel,
        device: torch.device,
        *,
        feedback: bool = True,
    ) -> None:
        self.owners, self.codec = list(owners), codec
        super().__init__(spans, Same(codec), channel, device, feedback=feedback)

    def extend(self, spans: Sequence[Span]) -> None:
        lengths = [0] * self.channel.size
        for span, owner in zip(spans, self.owners, strict=True):
            width = -(-span.numel // 8) * 8
            self.parts.append(Part(span.name, lengths[owner], width, span.numel, span.source))
            lengths[owner] += width
        self.numel = max(lengths[self.channel.rank], 8)
        self.recut()

    def dealt(self) -> list[Deal]:
        widths = [part.numel for part in self.parts]
        nothing = [line_of("", 0, (0, 0, self.codec), width=8, place=0, feedback=False)]
        return [
            deal_of(
                [[self._line(*cut) for cut in row] or nothing for row in rows],
                self.channel.rank,
                self.numel,
                [self.codec],
            )
            for rows in dealt_out(widths, self.owners, self.channel.size)
        ]

    def _line(self, i: int, first: int, numel: int) -> Line:
        part = self.parts[i]
        return line_of(
            part.name,
            first,
            ((part.source or 0) + first, numel, self.codec),
            width=numel,
            place=part.at + first,
            feedback=self.feedback,
        )

    def own(self) -> list[int]:
        """Return the numbers of the tensors of this rank."""
        return [i for i, owner in enumerate(self.owners) if owner == self.channel.rank]

    def view(self, row: torch.Tensor, i: int) -> torch.Tensor:
        """View tensor i, of this rank, in its row."""
        return row[self.parts[i].at :][: self.parts[i].numel]

    @property
    def sent_bytes(self) -> int:
        """Bytes, headers included, that this rank sends in one ``reduce`` or one ``gather``."""
        return (self.channel.size - 1) * sum(deal.size for deal in self.plan)


def dealt_out(
    widths: Sequence[int], owners: Sequence[int], ranks: int
) -> list[list[list[tuple[int, int, int]]]]:
    """Cut tensors, of which ``widths`` elements go to one rank each, into messages. Return, by
    message and rank, which tensor a piece is of, its first element and their number."""
    longest = max(MESSAGE // ranks, 1)
    rows: list[list[list[tuple[int, int, int]]]] = [[] for _ in range(ranks)]
    held = [longest] * ranks
    for i, (width, owner) in enumerate(zip(widths, owners, strict=True)):
        for first in range(0, width, PIECE):
            numel = min(PIECE, width - first)
            if held[owner] + numel > longest:
                rows[owner].append([])
                held[owner] = 0
            held[owner] += numel
            rows[owner][-1].append((i, first, numel))
    count = max(map(len, rows))
    return [[row[i] if i < len(row) else [] for row in rows] for i in range(count)]
