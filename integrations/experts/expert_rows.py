"""Rows as experts see them: received tokens by source, or by expert; and choices that a capacity
leaves out."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch

from commpress.collectives.all_to_all.tokens import Bags, Placement, TokenRoutes
from commpress.collectives.transports.staged import Scratch
from commpress.errors import InvalidArgument

Layout = Literal["flat", "expert_major"]


def within_capacity(wanted: np.ndarray, experts: int, factor: float) -> np.ndarray:
    """The choices that are left when no expert takes more than its share of one rank's tokens,
    times ``factor``; else -1.

    First choices go before second ones, and earlier tokens before later ones.
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
    """Rows in which a rank's experts get tokens, as indices into what arrives.

    ``flat``: a row for each token, by source and token. ``expert_major``: a row for each token and
    expert, by expert, then source and token; each expert's rows filled up with zeros to a multiple
    of ``pad``.
    """

    layout: Layout
    counts: np.ndarray  # int64[experts of this rank]: rows, without padding
    starts: np.ndarray  # the first row of each, and behind the last
    index: torch.Tensor | None  # int64: the arriving row behind each row; None: as they lie
    place: torch.Tensor | None  # flat: int64, the inverse
    filled: torch.Tensor | None  # int64: rows that are padding
    # expert_major: int64[rows], the choice each row is; flat: bool[rows, k], choices of this rank
    slots: torch.Tensor
    # flat: int64[rows, k], the number among this rank's experts; -1: of another rank
    local: torch.Tensor
    sums: Bags | None  # expert_major: rows to add for each that arrives

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
            starts = np.concatenate([[0], counts.cumsum()])
            inverse = None if routes.order is None else torch.argsort(routes.order)
            return cls(
                "flat",
                counts,
                starts,
                routes.order,
                inverse,
                None,
                torch.from_numpy(mine),
                flat,
                None,
            )
        starts = np.concatenate([[0], (-(-counts // pad) * pad).cumsum()])
        order = np.argsort(expert, kind="stable")
        sorted_ = expert[order]
        place = starts[sorted_] + np.arange(len(order)) - (counts.cumsum() - counts)[sorted_]
        arrival = np.arange(routes.received) if routes.order is None else routes.order.numpy()
        index, slots = np.zeros(starts[-1], np.int64), np.zeros(starts[-1], np.int64)
        index[place], slots[place] = arrival[token[order]], slot[order]
        empty = np.setdiff1d(np.arange(starts[-1]), place) if starts[-1] > len(place) else None
        back = np.empty(len(order), np.int64)  # of each pair in the order of choices
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
        """int64[experts of this rank]: rows, padding included."""
        return np.diff(self.starts)

    @property
    def count(self) -> int:
        return len(self.local) if self.layout == "flat" else int(self.starts[-1])

    def to(self, device: torch.device) -> "ExpertRows":
        if self.local.device == device:
            return self
        return replace(
            self,
            index=None if self.index is None else self.index.to(device),
            place=None if self.place is None else self.place.to(device),
            filled=None if self.filled is None else self.filled.to(device),
            slots=self.slots.to(device),
            local=self.local.to(device),
            sums=None if self.sums is None else self.sums.to(device),
        )

    def rows(self, tokens: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
        """[count, width] for the experts of what arrived; zeros behind the last and in padding."""
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
        """One row for each token that arrived, in the order of arrival: the sum over the experts of
        this rank.

        What is in ``held`` behind it goes back to ``scratch``.
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
        """Gates of the rows: [count, k], zero where the choice is another rank's; by expert
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
        """Gradients of gates, where they belong: ``arrived`` [n, k] := those of the rows."""
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
