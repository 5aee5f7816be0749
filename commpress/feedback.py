"""Residuals: what compression leaves behind, as plain tensors that the caller owns.

Note: the invariant. With R = mean over ranks of the sent residuals + the reduced residuals side by side,
Σ outputs + R_T = Σ mean(inputs) + R_0. Nothing is lost, only late.

Note: the lazy residual. Where a row has one scale, the tensor holds the compensated value c and ``sent_scale`` the
scale s of its row; the residual is c − s·sgn(c), formed when c is next read. So encoding stays one pass over memory although
the scale is a sum over the row. ``settle`` makes such a residual plain.

Note: EF21 keeps its estimates in the same place: ``sent`` is then minus what the others know of this rank's gradient, and
``known`` what all know of the mean. R = mean(sent) + reduced is then −known, so a checkpoint of R holds the estimates too.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from commpress.errors import InvalidArgument, StateMismatch
from commpress.kernels.devices import arithmetic
from commpress.kernels.pieces import NUMEL, RESIDUAL, SHARD, WIDTH, Pieces

Key = tuple[str, int]  # parameter name, offset of the piece in it
Residual = tuple[torch.Tensor, ...]  # sent, reduced and, with EF21, known


@dataclass
class ErrorFeedback:
    """For one message on one rank; float32, laid out as ``pieces`` says."""

    sent: torch.Tensor  # [pieces.residual_numel]: residual of what this rank sent
    reduced: torch.Tensor  # [pieces.shard]: residual of the rows that this rank reduces and sends back
    sent_scale: torch.Tensor | None = None  # [pieces · rows], lazy scales
    reduced_scale: torch.Tensor | None = None  # [pieces]
    known: torch.Tensor | None = None  # [pieces.residual_numel], the same on every rank; EF21 only
    joined: bool = False  # see ``join``

    @classmethod
    def zeros(cls, pieces: Pieces, device: torch.device | str = "cpu", *, ef21: bool = False) -> "ErrorFeedback":
        def new(numel: int) -> torch.Tensor:
            if torch.device(device).type == "cpu":  # NumPy asks for huge pages, torch does not: a tenth of the encoder's time
                return torch.from_numpy(np.zeros(numel, np.float32))
            return torch.zeros(numel, dtype=torch.float32, device=device)

        feedback = cls(new(pieces.residual_numel), new(pieces.shard if pieces.residual_numel else 0))
        if pieces.row_scales and pieces.residual_numel:
            count = len(pieces.table)
            feedback.sent_scale = new(count * pieces.rows)
            feedback.reduced_scale = new(count)
        if ef21:
            feedback.known = new(pieces.residual_numel)
        return feedback

    def settle(self, pieces: Pieces) -> None:
        """Make lazy residuals plain."""
        if self.sent_scale is not None and self.reduced_scale is not None:
            kernels = arithmetic(self.sent.device, pieces)
            kernels.settle(self.sent, self.sent_scale, pieces)
            kernels.settle(self.reduced, self.reduced_scale, pieces, shard=True)
            self.sent_scale.zero_()
            self.reduced_scale.zero_()

    def take(self, other: "ErrorFeedback") -> None:
        """Become ``other``, which becomes what this was: a residual is committed by exchanging references."""
        for name in ("sent", "reduced", "sent_scale", "reduced_scale", "known"):
            mine, theirs = getattr(self, name), getattr(other, name)
            setattr(self, name, theirs)
            setattr(other, name, mine)

    def join(self, pieces: Pieces, rank: int, divisor: float = 0.0) -> None:
        """Let what this rank owes as the owner of rows be part of what it sends: tensors that travel whole have none.

        ``divisor``: of the sum of what is sent, where that is not the number of rows.
        """
        if self.joined:
            return
        for index in range(len(pieces.table)):
            sent, reduced, *_ = _Place(self, pieces, index).every()
            add_reduced(sent, reduced, rank, divisor or pieces.rows)
            reduced.zero_()
        self.joined = True


def add_reduced(part: torch.Tensor, reduced: torch.Tensor, rank: int, size: float) -> None:
    """Add to ``part``, of which a mean over the ranks is taken, what ``rank`` owes as the owner of rows."""
    own = part[rank * reduced.numel() :][: reduced.numel()]
    own += size * reduced[: own.numel()]


def check_feedback(value: object, *, ef21: bool = False) -> None:
    """``ef21``: whether who asks knows estimates too. Any string is true, and would be taken for a residual."""
    if isinstance(value, bool) or (ef21 and value == "ef21"):
        return
    expected = "True, False or 'ef21'" if ef21 else "True or False; EF21 is an option of commpress.compress(ddp, ...) only"
    raise InvalidArgument(f"error_feedback is {value!r}, expected {expected}")


@dataclass
class _Place:
    feedback: ErrorFeedback
    pieces: Pieces
    index: int

    def sent(self) -> torch.Tensor:
        line = self.pieces.table[self.index]
        return self.feedback.sent[line[RESIDUAL] : line[RESIDUAL] + line[NUMEL]]

    def reduced(self) -> torch.Tensor:
        line = self.pieces.table[self.index]
        return self.feedback.reduced[line[SHARD] : line[SHARD] + line[WIDTH]]

    def known(self) -> torch.Tensor | None:
        line = self.pieces.table[self.index]
        return None if self.feedback.known is None else self.feedback.known[line[RESIDUAL] : line[RESIDUAL] + line[NUMEL]]

    def every(self) -> "Residual":
        known = self.known()
        return (self.sent(), self.reduced()) if known is None else (self.sent(), self.reduced(), known)


class ResidualStore:
    """All residuals of one state on one rank, found by (parameter name, offset) whatever message carries them today.

    ``attach`` is called when a message is first seen. If its pieces were part of other messages before, their residuals
    move over unchanged; if they were loaded from a checkpoint, they start from there.
    """

    def __init__(self, *, ef21: bool = False) -> None:
        self.ef21 = ef21
        self._places: dict[Key, _Place] = {}
        self._loaded: dict[Key, Residual] = {}

    def attach(self, keys: Sequence[Key], pieces: Pieces, device: torch.device) -> ErrorFeedback | None:
        if not pieces.residual_numel:
            return None
        feedback = ErrorFeedback.zeros(pieces, device, ef21=self.ef21)
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
            self._places[key] = place
        return feedback

    def settle(self) -> None:
        for place in self._places.values():
            place.feedback.settle(place.pieces)

    def places(self) -> list[tuple[Key, torch.Tensor, torch.Tensor]]:
        """(key, sent, reduced) of every piece, in the same order on every rank; views, plain residuals.

        Loaded pieces that no message has brought yet are among them: saving right after loading loses nothing.
        """
        return [(key, kept[0], kept[1]) for key, kept in self.every().items()]

    def every(self) -> dict[Key, Residual]:
        """As ``places``, with what EF21 knows."""
        self.settle()
        every = self._loaded | {key: place.every() for key, place in self._places.items()}
        return {key: every[key] for key in sorted(every)}

    def pay(self, name: str, out: torch.Tensor, rank: int, size: int) -> None:
        """Add what is owed of parameter ``name`` to ``out``, its gradient on this rank, and owe nothing of it any more.

        An exact mean over the ranks then carries all of it: R = mean(sent) + the reduced residuals side by side. With EF21
        nothing is owed, only known.
        """
        for (whose, offset), sent, reduced in [] if self.ef21 else self.places():
            if whose == name:
                part = out[offset : offset + sent.numel()]
                part += sent
                add_reduced(part, reduced, rank, size)
                sent.zero_()
                reduced.zero_()

    def scale(self, name: str, factor: torch.Tensor, rank: int) -> None:
        """Count what is owed of parameter ``name`` in other units from now on: multiplied by ``factor``, element by element."""
        for (whose, offset), sent, reduced in self.places():
            if whose == name:
                part = factor.view(-1)[offset : offset + sent.numel()]
                sent.mul_(part)
                own = part[rank * reduced.numel() :][: reduced.numel()]
                reduced[: own.numel()].mul_(own)

    def decay(self, names: Container[str], factor: float) -> None:
        """Owe only ``factor`` times as much of these parameters."""
        for (name, _), sent, reduced in self.places():
            if name in names:
                sent.mul_(factor)
                reduced.mul_(factor)

    def take(self, names: Container[str]) -> dict[Key, Residual]:
        """Hand over what is owed of these parameters: here it is not known any more."""
        taken = {key: kept for key, kept in self.every().items() if key[0] in names}
        for key in taken:
            self._places.pop(key, None)
            self._loaded.pop(key, None)
        return taken

    def bring(self, residuals: Mapping[Key, Residual]) -> None:
        """Owe this too, of pieces that are not known; it waits for a message that brings them."""
        self._loaded |= residuals

    def move_to(self, other: "ResidualStore") -> None:
        """The other store owes it from now on."""
        other.load({key: tuple(r.clone() for r in every) for key, every in self.every().items()})
        self.load({})

    def check(self, residuals: Mapping[Key, Residual]) -> None:
        """Raise ``StateMismatch`` unless ``load`` can take them."""
        for key in residuals.keys() & self._places.keys():
            self._check(key, self._places[key], *residuals[key])

    def load(self, residuals: Mapping[Key, Residual]) -> None:
        """Replace all residuals; pieces that no message has brought yet wait for it. All or nothing."""
        self.check(residuals)
        self.settle()
        self._loaded = dict(residuals)
        for key, place in self._places.items():
            place.feedback.joined = False
            for tensor in place.every():
                tensor.zero_()
            if key in self._loaded:
                self._fill(key, place, *self._loaded.pop(key))

    @classmethod
    def _fill(cls, key: Key, place: _Place, sent: torch.Tensor, reduced: torch.Tensor, *known: torch.Tensor) -> None:
        cls._check(key, place, sent, reduced)
        place.sent().copy_(sent)
        place.reduced().copy_(reduced)
        if (mine := place.known()) is not None:
            mine.copy_(known[0] if known else -sent)  # of R alone: sent is R on every rank, reduced zero

    @staticmethod
    def _check(key: Key, place: _Place, sent: torch.Tensor, reduced: torch.Tensor, *known: torch.Tensor) -> None:
        for name, mine, theirs in (("sent", place.sent(), sent), ("reduced", place.reduced(), reduced)):
            if mine.shape != theirs.shape:
                raise StateMismatch(
                    f"the {name} residual of parameter {key[0]!r} at offset {key[1]} has {theirs.numel()} elements, "
                    f"expected {mine.numel()}: the checkpoint is of another model or world size. On another world size "
                    "save with elastic_state_dict()."
                )
