"""Residuals: compression errors that later messages carry (error feedback), in plain tensors of the
caller.

Note: the invariant. Let R be the mean over ranks of the sent residuals plus the concatenation of
the reduced residuals; then Σ outputs + R_T = Σ mean(inputs) + R_0. Nothing is lost, only late.

Note: the lazy residual. If a row has one scale, the tensor holds the compensated value c and
``sent_scale`` the scale s of its row; the residual c − s·sgn(c) is computed when it is next read.
So encoding is a single pass over memory although the scale is a sum over the row. ``settle``
computes such residuals now.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from commpress.errors import InvalidArgument, StateMismatch
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import (
    BLOCK,
    COLUMN,
    HASH,
    KIND,
    NUMEL,
    RESIDUAL,
    SHARD,
    SOURCE,
    WIDTH,
    Piece,
    Pieces,
    cut,
)

Key = tuple[str, int]  # parameter name, offset of the piece in it
Residual = tuple[torch.Tensor, torch.Tensor]  # sent, reduced


@dataclass
class ErrorFeedback:
    """Residuals of one message on one rank, in float32, in the layout of ``pieces``."""

    sent: torch.Tensor  # [pieces.residual_numel]: residual of what this rank sent
    # [pieces.shard]: residual of the rows that this rank reduces and sends back
    reduced: torch.Tensor
    sent_scale: torch.Tensor | None = None  # [pieces · rows], lazy scales
    reduced_scale: torch.Tensor | None = None  # [pieces]
    joined: bool = False  # see ``join``

    @property
    def layout(self) -> str:
        """Name of the codec in which residuals are stored, "" for float32; proposed residuals have
        the same."""
        return ""

    @property
    def device(self) -> torch.device:
        return self.sent.device

    @property
    def nbytes(self) -> int:
        every = (self.sent, self.reduced, self.sent_scale, self.reduced_scale)
        return sum(tensor.nbytes for tensor in every if tensor is not None)

    def floats(self) -> torch.Tensor:
        """Return the sent residual element by element; call ``settle`` first."""
        return self.sent

    def like(self, pieces: Pieces) -> "ErrorFeedback":
        """Return an empty feedback to be proposed in place of this one."""
        return ErrorFeedback.zeros(pieces, self.device)

    @contextmanager
    def encoding(
        self, new: "ErrorFeedback", workspace: Any, *, key: int
    ) -> Iterator[dict[str, torch.Tensor | None]]:
        """Yield the arguments for an encoder that adds these residuals and writes the ``new`` ones.
        ``key`` seeds its random numbers."""
        yield {
            "residual": self.sent,
            "residual_scale": self.sent_scale,
            "new_residual": new.sent,
            "new_scale": new.sent_scale,
        }

    def serving(self, new: "ErrorFeedback") -> dict[str, torch.Tensor | None]:
        """Give the same arguments for the encoder of the reduced row."""
        return {
            "residual": self.reduced,
            "residual_scale": self.reduced_scale,
            "new_residual": new.reduced,
            "new_scale": new.reduced_scale,
        }

    @classmethod
    def zeros(cls, pieces: Pieces, device: torch.device | str = "cpu") -> "ErrorFeedback":
        def new(numel: int) -> torch.Tensor:
            # NumPy requests huge pages, torch does not: they save a tenth of the encoder's time
            if torch.device(device).type == "cpu":
                return torch.from_numpy(np.zeros(numel, np.float32))
            return torch.zeros(numel, dtype=torch.float32, device=device)

        feedback = cls(
            new(pieces.residual_numel), new(pieces.shard if pieces.residual_numel else 0)
        )
        if pieces.row_scales and pieces.residual_numel:
            count = len(pieces.table)
            feedback.sent_scale = new(count * pieces.rows)
            feedback.reduced_scale = new(count)
        return feedback

    def settle(self, pieces: Pieces) -> None:
        """Compute lazy residuals."""
        if self.sent_scale is not None and self.reduced_scale is not None:
            kernels = arithmetic(self.sent.device, pieces)
            kernels.settle(self.sent, self.sent_scale, pieces)
            kernels.settle(self.reduced, self.reduced_scale, pieces, shard=True)
            self.sent_scale.zero_()
            self.reduced_scale.zero_()

    def take(self, other: "ErrorFeedback") -> None:
        """Swap tensors with ``other``: commits a residual without a copy."""
        for name in ("sent", "reduced", "sent_scale", "reduced_scale"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    def join(self, pieces: Pieces, rank: int, divisor: float = 0.0) -> None:
        """Add the reduced residual to the sent one, for a codec of whole tensors, in which no rank
        reduces rows.

        ``divisor``: number by which sums are divided, if it is not the number of rows.
        """
        if self.joined:
            return
        for index in range(len(pieces.table)):
            sent, reduced, *_ = _Place(self, pieces, index).every()
            add_reduced(sent, reduced, rank, divisor or pieces.rows)
            reduced.zero_()
        self.joined = True


@dataclass
class CodedFeedback(ErrorFeedback):
    """Feedback that stores the sent residual in a codec, with floats only during encoding.

    It serves messages without a way back, as of a reduce-scatter. An unbiased codec adds noise of
    zero mean to the residual.
    """

    # [1, row.row_bytes]
    codes: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.uint8))
    # layout of the pieces that have a residual, in the order of ``sent``
    row: Pieces = field(default_factory=lambda: cut([], 1))

    @classmethod
    def of(cls, pieces: Pieces, kind: int, block: int, device: torch.device) -> "CodedFeedback":
        if pieces.shard:
            raise InvalidArgument(
                "residuals in a codec serve only messages without a way back, as of a "
                "reduce-scatter: keep residuals of this message in float32"
            )
        lines = pieces.table[pieces.table[:, RESIDUAL] >= 0][:, [RESIDUAL, NUMEL, HASH]].tolist()
        return cls._of(
            cut([Piece(at, numel, kind, block, mark, False) for at, numel, mark in lines], 1),
            device,
        )

    @classmethod
    def _of(cls, row: Pieces, device: torch.device) -> "CodedFeedback":
        codes = torch.zeros(1, row.row_bytes, dtype=torch.uint8, device=device)
        return cls(
            torch.zeros(0, device=device), torch.zeros(0, device=device), codes=codes, row=row
        )

    @property
    def layout(self) -> str:
        return f"{self.row.table[0, KIND]}/{self.row.table[0, BLOCK]}"

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def like(self, pieces: Pieces) -> "ErrorFeedback":
        return self._of(self.row, self.device)

    def settle(self, pieces: Pieces) -> None:
        """Do nothing: residuals in a codec are never lazy."""

    def floats(self) -> torch.Tensor:
        floats = torch.zeros(self.row.numel, dtype=torch.float32, device=self.device)
        arithmetic(self.device).decode(self.codes, floats, self.row)
        return floats

    def take(self, other: ErrorFeedback) -> None:
        assert isinstance(other, CodedFeedback)
        self.codes, other.codes = other.codes, self.codes

    @contextmanager
    def encoding(
        self, new: ErrorFeedback, workspace: Any, *, key: int
    ) -> Iterator[dict[str, torch.Tensor | None]]:
        assert isinstance(new, CodedFeedback)
        kernels, floats = (
            arithmetic(self.device),
            workspace.lend(self.row.numel, torch.float32, self.device),
        )
        kernels.decode(self.codes, floats, self.row)
        yield {"residual": floats, "new_residual": floats}
        # required by the call; the encoder of the message has already found NaN and infinity
        flag = torch.zeros(1, dtype=torch.uint8, device=self.device)
        kernels.encode(floats, new.codes, flag, self.row, key=key)
        workspace.take_back(floats)

    def one(self, place: int) -> tuple[torch.Tensor, Pieces]:
        """Return the codes of the residual that begins at element ``place``, and their layout."""
        (line,) = np.flatnonzero(self.row.table[:, SOURCE] == place)
        table = self.row.table[line : line + 1].copy()
        first = int(table[0, COLUMN])
        end = (
            int(self.row.table[line + 1, COLUMN])
            if line + 1 < len(self.row.table)
            else self.row.row_bytes
        )
        table[0, [SOURCE, COLUMN]] = 0
        return self.codes[:, first:end], replace(
            self.row, table=table, numel=int(table[0, NUMEL]), row_bytes=end - first
        )


def add_reduced(part: torch.Tensor, reduced: torch.Tensor, rank: int, size: float) -> None:
    """Add the reduced residual of ``rank`` to its shard of ``part``, times ``size``, because the
    mean over the ranks is taken later."""
    own = part[rank * reduced.numel() :][: reduced.numel()]
    own += size * reduced[: own.numel()]


def check_feedback(value: object) -> None:
    """Refuse anything but a bool, because any string would count as true."""
    if not isinstance(value, bool):
        raise InvalidArgument(f"error_feedback is {value!r}, expected True or False")


@dataclass
class _Place:
    feedback: ErrorFeedback
    pieces: Pieces
    index: int

    def sent(self) -> torch.Tensor:
        """Return a view of the sent residual, or a decoded copy: write it back by ``put``."""
        line = self.pieces.table[self.index]
        if isinstance(self.feedback, CodedFeedback):
            codes, row = self.feedback.one(int(line[RESIDUAL]))
            values = torch.zeros(row.numel, device=codes.device)
            arithmetic(codes.device).decode(codes, values, row)
            return values
        return self.feedback.sent[line[RESIDUAL] : line[RESIDUAL] + line[NUMEL]]

    def put(self, sent: torch.Tensor) -> None:
        if not isinstance(self.feedback, CodedFeedback):
            view = self.sent()
            if view.data_ptr() != sent.data_ptr():
                view.copy_(sent)
            return
        codes, row = self.feedback.one(int(self.pieces.table[self.index, RESIDUAL]))
        flag = torch.zeros(1, dtype=torch.uint8, device=codes.device)
        arithmetic(codes.device).encode(sent.to(codes.device).float(), codes, flag, row)

    def codes(self) -> torch.Tensor:
        assert isinstance(self.feedback, CodedFeedback)
        return self.feedback.one(int(self.pieces.table[self.index, RESIDUAL]))[0]

    def reduced(self) -> torch.Tensor:
        line = self.pieces.table[self.index]
        return self.feedback.reduced[line[SHARD] : line[SHARD] + line[WIDTH]]

    def every(self) -> "Residual":
        return self.sent(), self.reduced()


class ResidualStore:
    """Residuals of one state on one rank, by (parameter name, offset), independent of messages.

    A message calls ``attach`` before it is first sent. It takes over, unchanged, the residuals of
    its pieces from other messages or from a checkpoint.

    ``kind`` and ``block`` identify a codec in which residuals are stored instead of float32
    (``CodedFeedback``).
    """

    def __init__(self, *, kind: int | None = None, block: int = 0) -> None:
        self.kind, self.block = kind, block
        self._places: dict[Key, _Place] = {}
        self._loaded: dict[Key, Residual] = {}
        self._codes: dict[Key, torch.Tensor] = {}  # loaded in their codec

    def attach(
        self, keys: Sequence[Key], pieces: Pieces, device: torch.device
    ) -> ErrorFeedback | None:
        if not pieces.residual_numel:
            return None
        if self.kind is None:
            feedback = ErrorFeedback.zeros(pieces, device)
        else:
            feedback = CodedFeedback.of(pieces, self.kind, self.block, device)
        for i, key in enumerate(keys):
            if pieces.table[i, RESIDUAL] < 0:
                continue
            place = _Place(feedback, pieces, i)
            if key in self._places:
                before = self._places[key]
                before.feedback.settle(before.pieces)
                self._fill(key, place, *before.every())
            elif key in self._loaded:
                self._fill(key, place, *self._loaded[key])
                del self._loaded[key]
            elif key in self._codes:
                self._fill_codes(key, place)
            self._places[key] = place
        return feedback

    def settle(self) -> None:
        for place in self._places.values():
            place.feedback.settle(place.pieces)

    def places(self) -> list[tuple[Key, torch.Tensor, torch.Tensor]]:
        """Return (key, sent, reduced) of every piece, as views, in the same order on every rank.

        They include loaded pieces without a message, so that saving right after loading loses
        nothing.
        """
        return [(key, kept[0], kept[1]) for key, kept in self.every().items()]

    def every(self) -> dict[Key, Residual]:
        """Return (sent, reduced) by key, as in ``places``."""
        self.settle()
        every = self._loaded | {key: place.every() for key, place in self._places.items()}
        return {key: every[key] for key in sorted(every)}

    def codes(self) -> dict[Key, torch.Tensor]:
        """Return views of the residuals in their codec, for an exact resume."""
        return self._codes | {
            key: place.codes() for key, place in self._places.items() if self.kind is not None
        }

    def load_codes(self, codes: Mapping[Key, torch.Tensor]) -> None:
        """Replace all residuals by those of ``codes``."""
        self.load({})
        self._codes = dict(codes)
        for key, place in self._places.items():
            if key in self._codes:
                self._fill_codes(key, place)

    def _fill_codes(self, key: Key, place: _Place) -> None:
        codes, mine = self._codes.pop(key), place.codes()
        if codes.shape != mine.shape:
            raise StateMismatch(
                f"the residual of parameter {key[0]!r} at offset {key[1]} has {codes.numel()} "
                f"bytes, expected {mine.numel()}: the checkpoint is of another model, world size "
                "or error_feedback="
            )
        mine.copy_(codes)

    def of(self, key: Key, numel: int) -> Residual:
        """Return the residuals of one piece; zeros if it is unknown."""
        if key in self._places:
            place = self._places[key]
            place.feedback.settle(place.pieces)
            return place.every()
        return self._loaded.get(key) or (torch.zeros(numel), torch.zeros(0))

    def add_to(self, name: str, out: torch.Tensor, rank: int, size: int) -> None:
        """Add this rank's share of the residual R of parameter ``name`` to ``out``.

        The mean over the ranks is R = mean(sent) + the reduced residuals side by side.
        """
        for (parameter, offset), sent, reduced in self.places():
            if parameter == name:
                part = out[offset : offset + sent.numel()]
                part += sent
                add_reduced(part, reduced, rank, size)

    def pay(self, name: str, out: torch.Tensor, rank: int, size: int) -> None:
        """Add the share to a gradient that is sent exactly, as ``add_to`` does, and set the
        residual to zero."""
        self.add_to(name, out, rank, size)
        self.clear((name,))

    def clear(self, names: Container[str]) -> None:
        """Set the residuals of these parameters to zero."""
        for key, sent, reduced in self.places():
            if key[0] in names:
                sent.zero_()
                reduced.zero_()
                self._written(key, sent)

    def scale(self, name: str, factor: torch.Tensor, rank: int) -> None:
        """Multiply the residuals of parameter ``name`` by ``factor``, element by element."""
        for (parameter, offset), sent, reduced in self.places():
            if parameter == name:
                part = factor.view(-1)[offset : offset + sent.numel()]
                sent.mul_(part)
                own = part[rank * reduced.numel() :][: reduced.numel()]
                reduced[: own.numel()].mul_(own)
                self._written((parameter, offset), sent)

    def decay(self, names: Container[str], factor: float) -> None:
        """Multiply the residuals of these parameters by ``factor``."""
        for key, sent, reduced in self.places():
            if key[0] in names:
                sent.mul_(factor)
                reduced.mul_(factor)
                self._written(key, sent)

    def _written(self, key: Key, sent: torch.Tensor) -> None:
        """Store ``sent`` of ``places`` after a change."""
        if key in self._places:
            self._places[key].put(sent)

    def take(self, names: Container[str]) -> dict[Key, Residual]:
        """Remove the residuals of these parameters from the store, and return them."""
        taken = {key: kept for key, kept in self.every().items() if key[0] in names}
        for key in taken:
            self._places.pop(key, None)
            self._loaded.pop(key, None)
        return taken

    def bring(self, residuals: Mapping[Key, Residual]) -> None:
        """Add residuals of unknown pieces; they wait for a message that attaches them."""
        self._loaded |= residuals

    def add(self, key: Key, first: int, more: torch.Tensor, numel: int, width: int) -> None:
        """Add to the sent residual of a piece, known or not, from element ``first`` on."""
        sent, reduced = self.of(key, numel)
        sent[first : first + more.numel()] += more.to(sent.device)
        self._written(key, sent)
        if key not in self._places:
            self._loaded[key] = (sent, reduced if reduced.numel() else torch.zeros(width))

    def become(self, residuals: Mapping[Key, Residual]) -> None:
        """Replace everything by residuals of pieces with other bounds; each waits for its
        message."""
        self._places.clear()
        self._codes.clear()
        self._loaded = dict(residuals)

    def move_to(self, other: "ResidualStore") -> None:
        """Move all residuals into another store."""
        other.load({key: (sent.clone(), reduced.clone()) for key, sent, reduced in self.places()})
        self.load({})

    def merge(self, other: "ResidualStore") -> None:
        """Add all residuals of another store, with pieces cut for the same ranks."""
        for key, sent, reduced in other.places():
            mine = self.of(key, sent.numel())
            if not mine[1].numel():
                mine = mine[0], torch.zeros_like(reduced)
            for own, more in zip(mine, (sent, reduced), strict=True):
                own += more.to(own.device)
            self._written(key, mine[0])
            if key not in self._places:
                self._loaded[key] = mine

    def check(self, residuals: Mapping[Key, Residual]) -> None:
        """Raise ``StateMismatch`` unless ``load`` can take these residuals."""
        for key in residuals.keys() & self._places.keys():
            self._check(key, self._places[key], *residuals[key])

    def load(self, residuals: Mapping[Key, Residual]) -> None:
        """Replace all residuals, or none if one does not fit; those without a message wait for
        it."""
        self.check(residuals)
        self.settle()
        self._codes.clear()
        self._loaded = dict(residuals)
        for key, place in self._places.items():
            place.feedback.joined = False
            for tensor in place.every():
                tensor.zero_()
            place.put(place.sent().zero_())
            if key in self._loaded:
                self._fill(key, place, *self._loaded.pop(key))

    @classmethod
    def _fill(cls, key: Key, place: _Place, sent: torch.Tensor, reduced: torch.Tensor) -> None:
        cls._check(key, place, sent, reduced)
        place.put(sent)
        place.reduced().copy_(reduced)

    @staticmethod
    def _check(key: Key, place: _Place, sent: torch.Tensor, reduced: torch.Tensor) -> None:
        for name, mine, theirs in (
            ("sent", place.sent(), sent),
            ("reduced", place.reduced(), reduced),
        ):
            if mine.shape != theirs.shape:
                raise StateMismatch(
                    f"the {name} residual of parameter {key[0]!r} at offset {key[1]} has "
                    f"{theirs.numel()} elements, expected {mine.numel()}: the checkpoint is of "
                    "another model or world size. On another world size save with "
                    "elastic_state_dict()."
                )
