"""Whole tensors at their owners, where every rank has some rows of each: rows go to the owners, and
rows of what owners make of them come back.

Rank r has the rows that ``torch.chunk`` cuts for it. Nothing is added up: an owner puts the rows of
all ranks one after the other. Tensors cross in turns, so that an owner needs room for the tensors
of one turn alone.
"""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from commpress.codecs import Codec
from commpress.codecs.policy import Same
from commpress.collectives.allreduce import Outcome
from commpress.collectives.buckets import MESSAGE, Message, Span
from commpress.collectives.channel import Channel
from commpress.collectives.owners import dealt_out
from commpress.collectives.reduce_scatter import (
    Deal,
    Line,
    Part,
    Scatter,
    line_of,
    longest_row,
    reduce_rows,
    side_by_side,
)
from commpress.work import Steps


class Whole(NamedTuple):
    """One tensor of a turn."""

    number: int
    name: str
    numel: int
    width: int  # elements of the rows of one rank, of which the last may have fewer, or none
    owner: int
    at: int  # first element in a buffer of this rank's rows
    place: int  # first element in the owner's buffer of whole tensors


class Turn(NamedTuple):
    tensors: list[Whole]
    rows: int  # elements of a buffer of rows
    whole: int  # elements of the longest buffer of whole tensors


def turns(
    named: Sequence[tuple[str, Sequence[int]]], owners: Sequence[int], ranks: int
) -> list[Turn]:
    """Divide tensors into turns: in each as many of every owner as hold a message, at least one."""
    longest, result = max(MESSAGE // ranks, 1), [Turn([], 0, 0)]
    held, turn = [0] * ranks, [0] * ranks
    for i, ((name, shape), owner) in enumerate(zip(named, owners, strict=True)):
        numel, width = prod(shape), -(-shape[0] // ranks) * prod(shape[1:])
        if held[owner] and held[owner] + numel > longest:
            turn[owner] += 1
            held[owner] = 0
            result += [Turn([], 0, 0)] * (turn[owner] == len(result))
        tensors, rows, whole = result[turn[owner]]
        added = Whole(i, name, numel, width, owner, rows, held[owner])
        held[owner] += -(-numel // 8) * 8
        result[turn[owner]] = Turn(
            [*tensors, added], rows + -(-width // 8) * 8, max(whole, held[owner])
        )
    return result


class OwnedRows(Scatter):
    """Exchange in one direction: to the owners, or back.

    Residuals are of the elements that this rank sends; no other rank sends these.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        codec: Codec,
        channel: Channel,
        device: torch.device,
        *,
        back: bool,
        feedback: bool = True,
    ) -> None:
        self.turns, self.codec, self.back = turns, codec, back
        spans = [Span(each.name, 0, each.numel) for turn in turns for each in turn.tensors]
        super().__init__(spans, Same(codec), channel, device, feedback=feedback)

    def extend(self, spans: Sequence[Span]) -> None:
        self.parts += [Part(name, 0, numel, numel) for name, _, numel in spans]
        self.recut()

    def dealt(self) -> list[Deal]:
        plans = [self._plan(turn.tensors) for turn in self.turns]
        ends = [sum(map(len, plans[:i])) for i in range(len(plans) + 1)]
        self._messages = [slice(*pair) for pair in pairwise(ends)]
        return [deal for plan in plans for deal in plan]

    def _plan(self, tensors: Sequence[Whole]) -> list[Deal]:
        rank, ranks = self.channel.rank, self.channel.size
        widths, owners = [each.width for each in tensors], [each.owner for each in tensors]
        plan = []
        for cuts in dealt_out(widths, owners, ranks):
            mine = [[self._line(tensors[i], rank, *at) for i, *at in row] for row in cuts]
            every = [
                [self._line(tensors[i], r, *at, whole=True) for i, *at in cuts[rank]]
                for r in range(ranks)
            ]
            size = longest_row(mine)
            sent, came = (every, mine) if self.back else (mine, every)
            lines = [line for row in sent for line in row]
            # ranks have more or fewer elements: what all agree about is how it is cut
            pieces = replace(
                side_by_side(sent, size), numel=sum(at[-1] for row in cuts for at in row)
            )
            label = zlib.crc32(repr((self.back, tensors, cuts)).encode())
            keys = tuple(line.key for line in lines)
            message = Message(keys, pieces, self.codec.spec, label, pieces)
            plan.append(Deal(message, side_by_side(came, size), ranks, moved=True))
        return plan

    def _line(
        self, tensor: Whole, rank: int, first: int, count: int, *, whole: bool = False
    ) -> Line:
        """Describe elements of the rows of ``rank``, in its buffer or in the owner's."""
        begin = rank * tensor.width + first
        numel = min(max(tensor.numel - begin, 0), count)
        source = tensor.place + begin if whole else tensor.at + first
        values = source if numel else 0, numel, self.codec
        return line_of(tensor.name, begin, values, width=count, place=0, feedback=self.feedback)

    def move(
        self, turn: int, buffer: torch.Tensor, out: torch.Tensor, *, key: int
    ) -> Steps[list[Outcome]]:
        """Move the tensors of a turn from ``buffer`` to ``out``; the caller commits or discards the
        outcomes."""
        messages = self._messages[turn]
        plan = self.plan[messages]
        call = self.channel.call(len(plan), key)
        return reduce_rows(buffer, out, self._feedbacks[messages], plan, call)
