"""Rows as experts get them: received tokens by source, or by expert; and choices dropped by a
capacity."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch

from commpress.collectives.all_to_all.tokens import Bags, Placement, TokenRoutes, moved
from commpress.collectives.transports.staged import Scratch
from commpress.errors import InvalidArgument

Layout = Literal["flat", "expert_major"]


def within_capacity(wanted: np.ndarray, experts: int, factor: float) -> np.ndarray:
    """Return the choices with those beyond an expert's capacity, its even share of one rank's
    choices times ``factor``, replaced by -1.

    First choices precede second ones, and earlier tokens later ones.
    """
    count, k = wanted.shape
    most = -(-count * k * factor // experts)
    choices = wanted.T.reshape(-1)
    order = np.argsort(choices, kind="stable")
    starts = np.searchsorted(choices[order], np.arange(-1, experts))
    place = np.empty(len(choices), np.int64)
    place[order] = np.arange(len(choices)) - starts[choices[order] + 1]
    return np.where(place < most, choices, -1).reshape(k, count).T


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Rows of tokens for a rank's experts, as indices into the received rows.

    ``flat``: a row for each token, by source and token. ``expert_major``: a row for each token and
    expert, by expert, then source and token; each expert's rows are padded with zeros to a multiple
    of ``pad``.
    """

    layout: Layout
    counts: np.ndarray  # int64[experts of this rank]: rows, without padding
    starts: np.ndarray  # first row of each expert, and the end of the last
    index: torch.Tensor | None  # int64: received row for each row; None: the same order
    place: torch.Tensor | None  # flat: int64, the inverse
    filled: torch.Tensor | None  # int64: rows of padding
    # expert_major: int64[rows], choice of each row; flat: bool[rows, k], this rank's choices
    slots: torch.Tensor
    # flat: int64[rows, k], number among this rank's experts; -1: another rank's
    local: torch.Tensor
    sums: Bags | None  # expert_major: rows to sum for each received row

    @classmethod
    def of(
        cls, routes: TokenRoutes, placement: Placement, rank: int, layout: str, pad: int = 1
    ) -> "ExpertRows":
        if layout not in get_args(Layout):
            raise InvalidArgument(f"layout is {layout!r}, expected 'flat' or 'expert_major'")
        mine = placement.owner[routes.experts] == rank
        local = np.where(mine, placement.local[routes.experts], -1)
        token, slot = np.nonzero(mine)
        expert = local[token, slot]
        counts = np.bincount(expert, minlength=len(placement.on(rank)))
        flat = torch.from_numpy(local)
        if layout == "flat":
            starts, come = np.concatenate([[0], counts.cumsum()]), routes.order
            inverse = None if come is None else torch.argsort(come)
            choices = torch.from_numpy(mine)
            return cls("flat", counts, starts, come, inverse, None, choices, flat, None)
        starts = np.concatenate([[0], (-(-counts // pad) * pad).cumsum()])
        order = np.argsort(expert, kind="stable")
        sorted_ = expert[order]
        place = starts[sorted_] + np.arange(len(order)) - (counts.cumsum() - counts)[sorted_]
        arrival = np.arange(routes.received) if routes.order is None else routes.order.numpy()
        index, slots = np.zeros(starts[-1], np.int64), np.zeros(starts[-1], np.int64)
        index[place], slots[place] = arrival[token[order]], slot[order]
        empty = np.setdiff1d(np.arange(starts[-1]), place) if starts[-1] > len(place) else None
        back = np.empty(len(order), np.int64)  # row of each pair in the order of choices
        back[order] = place
        return cls(
            "expert_major",
            counts,
            starts,
            torch.from_numpy(index),
            None,
            None if empty is None else torch.from_numpy(empty),
            torch.from_numpy(slots),
            flat,
            Bags.of(arrival[token], routes.received, back),
        )

    @property
    def heights(self) -> np.ndarray:
        """Rows of each expert of this rank with padding, int64."""
        return np.diff(self.starts)

    @property
    def count(self) -> int:
        return len(self.local) if self.layout == "flat" else int(self.starts[-1])

    def to(self, device: torch.device) -> "ExpertRows":
        if self.local.device == device:
            return self
        return moved(self, device, "index", "place", "filled", "slots", "local", "sums")

    def rows(self, tokens: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [count, width] for the experts from received tokens; zeros in padding and at the
        end."""
        out = torch.empty(count, tokens.shape[1], dtype=dtype, device=tokens.device)
        if self.index is None:
            out[: self.count] = tokens
        elif tokens.dtype == dtype:
            torch.index_select(tokens, 0, self.index, out=out[: self.count])
        else:
            out[: self.count] = tokens.index_select(0, self.index)
        out[self.count :] = 0
        if self.filled is not None:
            out[self.filled] = 0
        return out

    def sums_of(
        self, rows: torch.Tensor, scratch: Scratch, held: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return a row for each received token, in the order of arrival: the sum over the experts
        of this rank.

        Memory that it needs is appended to ``held``, for the caller to return to ``scratch``.
        """
        if self.sums is not None:
            return self.sums.sum(rows[: self.count])
        if self.place is None:
            return rows[: self.count]
        held.append(scratch.take(rows.dtype.itemsize * self.count * rows.shape[1], rows.device))
        back = held[-1].view(rows.dtype).view(self.count, rows.shape[1])
        torch.index_select(rows[: self.count], 0, self.place, out=back)
        return back

    def gates(self, arrived: torch.Tensor, count: int) -> torch.Tensor:
        """Return the gates of the rows: [count, k], zero for choices of other ranks; by expert
        [count]."""
        if self.layout == "flat":
            found = arrived if self.index is None else arrived.index_select(0, self.index)
            out = found.new_zeros(count, arrived.shape[1])
            out[: self.count] = torch.where(self.slots, found, 0)
            return out
        assert self.index is not None
        out = arrived.new_zeros(count)
        out[: self.count] = arrived[self.index, self.slots]
        if self.filled is not None:
            out[self.filled] = 0
        return out

    def gates_back(self, rows: torch.Tensor, arrived: torch.Tensor) -> None:
        """Set ``arrived`` [n, k] to the gradients of gates from those of the rows."""
        arrived.zero_()
        if self.layout == "flat":
            found = torch.where(self.slots, rows[: self.count], 0)
            if self.index is None:
                arrived.copy_(found)
            else:
                arrived[self.index] = found.to(arrived.dtype)
            return
        assert self.index is not None
        own = torch.ones(self.count, dtype=torch.bool, device=rows.device)
        if self.filled is not None:
            own[self.filled] = False
        arrived[self.index[own], self.slots[own]] = rows[: self.count][own].to(arrived.dtype)
