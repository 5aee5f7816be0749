"""Parameters concatenated in one flat buffer, which is divided into one row for each rank.

    flat  [ P · width ]   values that the model uses; parameters are views of it
    shard [ width ]       values that this rank updates: its row of ``flat``, or a float32 master

Note: vectors. torch's kernels compute the last few elements of a tensor one by one, and these may
be rounded differently from elements in vectors. So the inner optimizer gets each parameter's range
in this rank's row as a tensor, and rows are cut at multiples of ``ALIGN`` from the parameter's
beginning: every element is computed as in the whole parameter.

Note: one codec per bucket. A row may begin and end inside a parameter, so parameters with different
codecs are in different buckets. PowerSGD gives every rank the mean of the whole bucket, from which
it takes its row.

Note: DTensors. A parameter stands for this rank's shard of it. Offsets are those of the largest
shards, so that they are equal for all shard peers. Parameters that shard peers replicate are in
other buckets than those they shard, so that messages, and their results, are equal.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import increment_version

from commpress.codecs import Codec
from commpress.codecs.family import EXACT
from commpress.codecs.policy import Policy, Same
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.collectives.allreduce import Outcome
from commpress.collectives.buckets import WIDTHS, Span
from commpress.collectives.exchange import Exchanges, Reduce
from commpress.collectives.reduce_scatter import Deal, Part, deals
from commpress.errors import InvalidArgument
from commpress.feedback import ErrorFeedback
from commpress.optim.layout import is_cut, largest_shard, local, move_to, version_of

Numbered = tuple[torch.Tensor, str, int]  # a parameter, its name, its number among all
ALIGN = 64  # elements; see the note on vectors


@dataclass(frozen=True)
class Member:
    """One parameter, or this rank's shard of it, and its offset in the buffer."""

    parameter: torch.Tensor
    name: str
    index: int  # among all parameters of the optimizer
    first: int

    @property
    def shape(self) -> torch.Size:
        return local(self.parameter).shape

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.first : self.first + self.shape.numel()].view(self.shape)


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """The elements of one parameter that this rank owns."""

    member: Member
    start: int  # first element in the parameter, or in this rank's shard of it
    place: slice  # in this rank's row
    weight: torch.Tensor  # view of ``shard``: the parameter of the inner optimizer

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same elements of a tensor with the parameter's shape, or the shard's."""
        return whole.reshape(-1)[self.start : self.start + self.weight.numel()]


@dataclass
class Reduction:
    """Result of reducing one bucket's gradients since the last step; written by the worker."""

    times: int = 0
    finite: bool = True
    outcomes: list[Outcome] = field(default_factory=list)


class FlatGroup:
    """Concatenated parameters, divided into one row for each rank, and the codecs of rows."""

    def __init__(
        self,
        number: int,
        members: Sequence[Numbered],
        gradients: Codec | None = None,
        weights: Codec | None = None,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        self.number, self.rank, self.ranks = number, rank, ranks
        self.dtype, self.device = members[0][0].dtype, members[0][0].device
        self.members, at = [], 0
        for parameter, name, index in members:
            self.members.append(Member(parameter, name, index, at))
            at += -(-largest_shard(parameter).numel() // ALIGN) * ALIGN
        self.used = at
        self.width = -(-at // (ranks * ALIGN)) * ALIGN
        self.lossy_gradients, self.lossy_weights = gradients is not None, weights is not None
        natural = WIDTHS[self.dtype]
        part = [Part(f"bucket{number}", 0, self.width, self.used)]
        self.exchange: Reduce | None = None  # of gradients, for a codec of whole tensors
        self.reduce_plan: list[Deal] = []
        if not isinstance(gradients, WholeTensorCodec):
            self.reduce_plan = deals(
                part,
                Same(gradients or natural),
                rank=rank,
                ranks=ranks,
                feedback=self.lossy_gradients,
            )
        self.gather_plan = deals(
            part, Same(weights or natural), rank=rank, ranks=ranks, feedback=False
        )
        self.exact_plan = deals(part, Same(EXACT), rank=rank, ranks=ranks, feedback=False)
        self.feedbacks: list[ErrorFeedback | None] = [None] * len(self.reduce_plan)
        self.buffer: torch.Tensor | None = None  # this rank's gradients, in the layout of ``flat``
        self.reduced: torch.Tensor | None = None  # mean gradient of this rank's row, float32
        self.reduction = Reduction()

    @property
    def numel(self) -> int:
        return self.ranks * self.width

    @property
    def first(self) -> int:
        return self.rank * self.width

    @property
    def sequences(self) -> int:
        """Sequence numbers used by one reduction."""
        return len(self.reduce_plan) if self.exchange is None else self.exchange.sequences

    @property
    def owned(self) -> int:
        """Number of elements in this rank's row before the padding behind the last parameter."""
        return min(max(self.used - self.first, 0), self.width)

    def overlaps(
        self, begin: int = 0, numel: int | None = None
    ) -> Iterable[tuple[Member, int, slice]]:
        """Yield the parts of parameters in the ``numel`` elements of this rank's row from ``begin``
        on: a member, the first element in its parameter, and the slice of those elements."""
        first = self.first + begin
        last = first + (self.width if numel is None else numel)
        for m in self.members:
            start, stop = max(m.first, first), min(m.first + m.shape.numel(), last)
            if start < stop:
                yield m, start - m.first, slice(start - first, stop - first)


class ShardedBucket(FlatGroup):
    """Parameters that are sent together: in the model's dtype for the model, in float32 for the
    update."""

    def __init__(
        self,
        number: int,
        group: int,
        members: Sequence[Numbered],
        gradients: Codec | None,
        weights: Codec | None,
        *,
        rank: int,
        ranks: int,
    ) -> None:
        super().__init__(number, members, gradients, weights, rank=rank, ranks=ranks)
        self.group = group
        self.flat = torch.zeros(self.numel, dtype=self.dtype, device=self.device)
        own = self.flat[self.first :][: self.width]
        self.mastered = self.dtype != torch.float32 or self.lossy_weights
        self.shard = (
            torch.zeros(self.width, dtype=torch.float32, device=self.device)
            if self.mastered
            else own
        )
        self.own = own
        self.ranges = [
            OwnedRange(m, start, place, self.shard[place]) for m, start, place in self.overlaps()
        ]
        self._versions: list[int] = []
        with torch.no_grad():
            for member in self.members:
                view = member.view(self.flat)
                view.copy_(local(member.parameter))
                move_to(member.parameter, view)
        self.adopt()

    def attach(self, exchanges: Exchanges) -> None:
        """Take residuals, or the exchange of a codec of whole tensors."""
        if self.lossy_gradients and not self.reduce_plan:
            names = tuple(m.name for m in self.members)
            exchange = exchanges.of(names, self._tensors, self.device)
            assert isinstance(exchange, Reduce)
            self.exchange, self.feedbacks = exchange, exchange.feedbacks
            return
        attach = exchanges.residuals.attach
        self.feedbacks = [
            attach(d.every.keys, d.every.pieces, self.device) for d in self.reduce_plan
        ]

    def _tensors(self) -> tuple[list[Span], list[torch.Size]]:
        spans = [Span(m.name, m.first, m.shape.numel()) for m in self.members]
        return spans, [m.shape for m in self.members]

    def adopt(self) -> None:
        """Set the master to the values of the parameters."""
        if self.mastered:
            self.shard.copy_(self.own)
        else:
            # the owner of a separate master checks this tensor's version, not the parameters'
            increment_version(self.own)
        self.trust()

    def trust(self) -> None:
        """Record that master and parameters belong together as they are now."""
        self._versions = [version_of(m.parameter) for m in self.members]

    def changed(self) -> bool:
        """Return whether parameters were written since ``trust``, as by ``load_state_dict``."""
        return self._versions != [version_of(m.parameter) for m in self.members]

    def check(self) -> None:
        for m in self.members:
            here = local(m.parameter)
            if (
                here.numel()
                and here.data_ptr() != self.flat.data_ptr() + m.first * self.dtype.itemsize
            ):
                raise InvalidArgument(
                    f"parameter {m.name!r} is no longer in the buffer of Partitioned: move or "
                    "convert the model before constructing the optimizer, and do not assign "
                    "parameter.data afterwards"
                )


def buckets(
    groups: Sequence[Sequence[Numbered]],
    gradients: Policy,
    weights: Policy,
    *,
    rank: int,
    ranks: int,
    numel: int,
) -> list[ShardedBucket]:
    """Divide parameters into buckets of about ``numel`` elements, in the order in which backward
    will probably fill them."""
    open_: dict[tuple[object, ...], list[Numbered]] = {}
    plans: list[tuple[tuple[object, ...], list[Numbered]]] = []
    every = [(number, *member) for number, group in enumerate(groups) for member in group]
    for number, parameter, name, index in reversed(every):
        down, up = (_lossy(policy, name, parameter) for policy in (gradients, weights))
        if isinstance(up, WholeTensorCodec):
            raise InvalidArgument(
                f"weights is {up.spec!r} for parameter {name!r}, which serves only averages of "
                "whole tensors, and weights are not averaged: choose a codec of rows such as 'int8'"
            )
        codecs = (down, up) if ranks > 1 else (None, None)
        key = (number, parameter.dtype, parameter.device, *codecs, _cuts(parameter))
        held = open_.get(key)
        if (
            held is None
            or sum(largest_shard(p).numel() for p, _, _ in held) + largest_shard(parameter).numel()
            > numel
        ):
            held = open_[key] = []
            plans.append((key, held))
        held.append((parameter, name, index))
    # a bucket that is filled last would delay all after it
    plans.sort(key=lambda plan: -min(index for _, _, index in plan[1]))
    return [
        ShardedBucket(i, key[0], members, key[3], key[4], rank=rank, ranks=ranks)  # type: ignore[arg-type]
        for i, (key, members) in enumerate(plans)
    ]


def _cuts(parameter: Any) -> tuple[bool, ...]:
    """Return for each dimension of the mesh whether a parameter is sharded over it; empty if it is
    replicated."""
    cuts = (
        tuple(placement.is_shard() for placement in parameter.placements)
        if is_cut(parameter)
        else ()
    )
    return cuts if any(cuts) else ()


def _lossy(policy: Policy, name: str, parameter: torch.Tensor) -> Codec | None:
    """Return the codec, or None for exact values."""
    shape = largest_shard(parameter)
    codec = policy.choose(name, shape.numel())
    if isinstance(codec, WholeTensorCodec) and not codec.takes(shape):
        codec = codec.rows
    return None if codec.lossless else codec


def reduction_bytes(bucket: FlatGroup) -> int:
    """Return the bytes that one rank sends to its peers for the mean gradients of a bucket."""
    if bucket.exchange is None:
        return bytes_of(bucket.reduce_plan)
    return sum(plan.sent_bytes(bucket.ranks) for plan in bucket.exchange.plans)


def bytes_of(plan: Sequence[Deal]) -> int:
    """Return the bytes that one rank sends to its peers for one pass over ``plan``."""
    return sum((deal.ranks - 1) * deal.size for deal in plan)
