"""PowerSGD over ranks: all matrices of a bucket in two exact means, of P and of Q, one message
each.

    M = g·x + e        P = mean(M·Q)      P̂ = orthonormal(P)
    Qᵢ = Mᵀ·P̂          e ← M − P̂·Qᵢᵀ     Q = mean(Qᵢ)         x = P̂·Qᵀ / g

With a codec of factors both means are compressed. P̂ is as good as its codec; the errors of Q stay
in the residuals, δᵢ of what this rank sent and s of what it reduced: e ← e + P̂·(δᵢ + ranks·s)ᵀ.

Note: the local residual. Each rank keeps the error of its own Qᵢ, not that of the mean. The means
of both are equal, and so are the outputs; but the difference of two ranks' global residuals is the
sum of the differences of all their gradients, a random walk, while the local one is a projection of
M and stays bounded.

Every rank computes P̂ and x for itself; the kernels see to it that they agree
(``kernels.cpu.low_rank``). Q, made orthonormal, is the basis that the next step starts from, found
by the parameter's name like a residual.
"""

import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import ClassVar

import numpy as np
import torch

from commpress.codecs.codec import Codec
from commpress.codecs.family import EXACT
from commpress.codecs.policy import Policy, Same
from commpress.codecs.whole_tensors import LowRankCodec, WholeTensorCodec
from commpress.collectives.allreduce import Call, Outcome, reduce_message
from commpress.collectives.buckets import PIECE, Message, Span, messages
from commpress.collectives.frame import HEADER
from commpress.errors import StateMismatch
from commpress.feedback import ErrorFeedback
from commpress.kernels.devices import low_rank_arithmetic
from commpress.kernels.matrices import (
    LEFT,
    LOW_RANK,
    MARK,
    PLACE,
    RANK,
    RIGHT,
    SOURCE,
    TALL,
    WIDE,
    Matrices,
    Matrix,
    stack,
)
from commpress.kernels.pieces import NUMEL, RESIDUAL, Pieces, width_of
from commpress.work import Steps

# averages a factor, given its message and sequence number, and returns whether it was finite; adds
# this rank's errors to the last argument
Mean = Callable[[torch.Tensor, Message, int, torch.Tensor | None], Steps[bool]]
# parameter → float32[rank, columns], orthonormal rows, the same on every rank
Bases = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RowsOnly:
    """``policy`` for tensors that do not travel as matrices."""

    policy: Policy

    def choose(self, name: str, numel: int) -> Codec:
        codec = self.policy.choose(name, numel)
        return codec.rows if isinstance(codec, WholeTensorCodec) else codec


@dataclass(eq=False)
class MatrixPlan:
    """Plan for the matrices of one bucket: how they travel, their basis, and scratch for their
    factors."""

    MESSAGES: ClassVar[int] = 2  # sequence numbers of one call: P and Q

    names: tuple[str, ...]
    matrices: Matrices
    message: Message  # names and places of residuals; its layout is never sent
    left: Message
    right: Message
    factors: Codec
    basis: torch.Tensor
    p: torch.Tensor
    q: torch.Tensor

    def sent_bytes(self, ranks: int) -> int:
        """Bytes that one rank sends to its peers in one call, headers included."""
        rows = [cut for m in (self.left, self.right) for cut in (m.pieces, m.mean)]
        return (ranks - 1) * sum(HEADER + cut.row_bytes for cut in rows)


@dataclass
class LowRankOutcome(Outcome):
    plan: MatrixPlan | None = None

    def commit(self) -> None:
        super().commit()
        if self.plan is not None:
            self.plan.basis.copy_(self.plan.q)


def matrices_of(
    spans: Sequence[Span], shapes: Sequence[Sequence[int]], policy: Policy
) -> list[tuple[Codec, list[tuple[Span, tuple[int, int, int]]]]]:
    """List the spans that travel as matrices, those of one codec of factors and of equal shapes
    side by side."""
    found: dict[str, tuple[Codec, list[tuple[Span, tuple[int, int, int]]]]] = {}
    for span, shape in zip(spans, shapes, strict=True):
        codec = policy.choose(span.name, span.numel)
        if isinstance(codec, LowRankCodec) and (matrix := codec.matrix(shape)) is not None:
            alike = found.setdefault(codec.factors.spec, (codec.factors, []))
            alike[1].append((span, matrix))
    return [
        (factors, sorted(matrices, key=lambda one: (one[1], one[0].source)))
        for _, (factors, matrices) in sorted(found.items())
    ]


def plan_matrices(
    found: Sequence[tuple[Span, tuple[int, int, int]]],
    ranks: int,
    bases: Bases,
    *,
    device: torch.device,
    factors: Codec = EXACT,
    any_rank: bool = False,
) -> MatrixPlan:
    """Plan matrices, starting from their ``bases`` if known; afterwards ``bases`` points into the
    plan. ``any_rank``: bases may have more or fewer rows than the ranks of now."""
    names = tuple(span.name for span, _ in found)
    table = stack(
        Matrix(span.source, *shape, zlib.crc32(span.name.encode())) for span, shape in found
    )
    basis = torch.zeros(table.right, dtype=torch.float32, device=device)
    # bases of zeros become new random ones
    low_rank_arithmetic(device).orthonormalize_right(basis, table, 0)
    for name, (_, (_, wide, rank)), line in zip(names, found, table.table, strict=True):
        view = basis[line[RIGHT] : line[RIGHT] + rank * wide].view(rank, wide)
        if name in bases:
            check_basis(name, view, bases[name], any_rank=any_rank)
            known = bases[name][:rank]
            view[: len(known)] = known
        bases[name] = view
    label = "\n".join(f"{name} {shape}" for name, (_, shape) in zip(names, found, strict=True))
    coded = "" if factors.lossless else f"+{factors.spec}"
    spec = f"powersgd/{max(shape[2] for _, shape in found)}{coded}"

    def factor(side: str, first: int, length: int) -> Message:
        """Coded factors are cut by matrix: other matrices beside one must not change its bits."""
        spans = [Span("", 0, table.right if first == RIGHT else table.left)]
        if not factors.lossless:
            spans = [
                Span(f"{side} {name}", int(line[first]), int(line[RANK] * line[length]))
                for name, line in zip(names, table.table, strict=True)
            ]
        mark = zlib.crc32(f"{side}\n{label}".encode())
        return replace(factor_message(spans, factors, ranks), codec=spec, label=mark)

    return MatrixPlan(
        names,
        table,
        _residuals(names, table, ranks, spec),
        factor("P", LEFT, TALL),
        factor("Q", RIGHT, WIDE),
        factors,
        basis,
        torch.zeros(table.left, device=device),
        torch.zeros(table.right, device=device),
    )


def check_basis(
    name: str, mine: torch.Tensor, theirs: torch.Tensor, *, any_rank: bool = False
) -> None:
    if theirs.shape[any_rank:] != mine.shape[any_rank:] or theirs.dim() != 2:
        raise StateMismatch(
            f"the basis of parameter {name!r} has shape {tuple(theirs.shape)}, expected "
            f"{tuple(mine.shape)} (rank, columns): the state is of another model or rank"
        )


def reduce_matrices(
    buffer: torch.Tensor,
    feedback: ErrorFeedback | None,
    plan: MatrixPlan,
    call: Call,
    mean: Mean | None = None,
) -> Steps[Outcome]:
    """Replace the matrices in ``buffer`` by the approximation of their mean; ``commit`` or
    ``discard`` the outcome.

    Uses ``MESSAGES`` sequence numbers. ``mean`` averages a factor over all ranks in place.
    """
    transport, workspace, sequence, key, gain, *_ = call
    kernels, matrices, p, q = low_rank_arithmetic(buffer.device), plan.matrices, plan.p, plan.q
    proposed, asked = workspace.propose(plan.message, feedback, buffer.device), False

    def flat(
        factor: torch.Tensor, message: Message, number: int, error: torch.Tensor | None
    ) -> Steps[bool]:
        nonlocal asked
        nothing = None if error is None else ErrorFeedback.zeros(message.pieces, factor.device)
        plain = Call(transport, workspace, number, key, asks=call.asks)
        outcome = yield from reduce_message(factor, nothing, message, plain)
        asked |= outcome.asks
        if error is not None:
            add_error(outcome, message, error, transport.rank)
        return outcome.finite

    mean = mean or flat
    error = None if feedback is None or plan.factors.lossless else torch.zeros_like(q)

    start = perf_counter()
    kernels.project(
        buffer, feedback and feedback.sent, proposed.sent, p, plan.basis, matrices, gain=gain
    )
    workspace.encoded(start)
    finite = yield from mean(p, plan.left, sequence, None)
    if finite:
        start = perf_counter()
        kernels.orthonormalize_left(p, matrices)
        kernels.fold(proposed.sent, p, q, matrices, subtract=feedback is not None)
        workspace.encoded(start)
        finite = yield from mean(q, plan.right, sequence + 1, error)
    if finite:
        start = perf_counter()
        if error is not None:
            kernels.expand(p, error, buffer, matrices)
            for first, numel, kept in plan.message.pieces.residual_runs:
                proposed.sent[kept : kept + numel] += buffer[first : first + numel]
        kernels.expand(p, q, buffer, matrices, gain=1.0 / gain)
        kernels.orthonormalize_right(q, matrices, key)
        workspace.decoded(start)
    if feedback is None:
        workspace.give_residual(plan.message, proposed)
    return LowRankOutcome(
        plan.message,
        finite,
        feedback,
        proposed if feedback is not None else None,
        workspace,
        plan,
        asks=asked,
    )


def factor_message(spans: Sequence[Span], codec: Codec, ranks: int) -> Message:
    """Make one message of a factor, a piece for each span."""
    (whole,) = messages(spans, Same(codec), ranks, piece=sys.maxsize, message=sys.maxsize)
    return whole


def add_error(
    outcome: Outcome,
    whole: Message,
    error: torch.Tensor,
    rank: int,
    *,
    divisor: float = 0.0,
    scale: float = 1.0,
) -> None:
    """Add to ``error`` what coding the factor of message ``whole`` has lost on this rank, and give
    the residuals back.

    Their mean over the ranks is what the mean of the factor lacks. ``divisor`` and ``scale`` are
    those of ``average_rows``.
    """
    message, new = outcome.message, outcome.proposed
    if new is not None:
        new.settle(message.pieces)
        new.join(message.pieces, rank, divisor)
        lines = zip(message.keys, message.pieces.table, whole.pieces.table, strict=True)
        for (_, offset), line, matrix in lines:
            kept, numel, first = int(line[RESIDUAL]), int(line[NUMEL]), int(matrix[SOURCE]) + offset
            if kept >= 0:
                error[first : first + numel].add_(new.sent[kept : kept + numel], alpha=1 / scale)
        new.joined = False
        outcome.discard()


def check_bases(
    bases: Bases, loaded: Mapping[str, torch.Tensor], *, any_rank: bool = False
) -> None:
    for name, basis in loaded.items():
        if name in bases:
            check_basis(name, bases[name], basis, any_rank=any_rank)


def load_bases(bases: Bases, loaded: Mapping[str, torch.Tensor], *, any_rank: bool = False) -> None:
    """Load bases into existing plans, or keep them for later plans: those of other ranks for the
    policy that comes with them."""
    check_bases(bases, loaded, any_rank=any_rank)
    for name, basis in loaded.items():
        if name in bases and bases[name].shape == basis.shape:
            bases[name].copy_(basis)
        else:
            bases[name] = basis.clone()


def _residuals(names: Sequence[str], matrices: Matrices, ranks: int, spec: str) -> Message:
    """Cut and key residuals like those of any other codec; each matrix stays contiguous."""
    keys, lines, shard = [], [], 0
    for name, line in zip(names, matrices.table, strict=True):
        whole = int(line[TALL] * line[WIDE])
        for offset in range(0, whole, PIECE):
            numel = min(PIECE, whole - offset)
            keys.append((name, offset))
            width, source, place = (
                width_of(numel, ranks),
                line[SOURCE] + offset,
                line[PLACE] + offset,
            )
            lines.append((source, numel, width, LOW_RANK, 0, 0, 0, place, shard, line[MARK]))
            shard += width
    table = np.array(lines, np.int64).reshape(-1, 10)
    pieces = Pieces(table, ranks, 0, matrices.numel, matrices.numel, shard, False)
    return Message(tuple(keys), pieces, spec, 0, pieces)
