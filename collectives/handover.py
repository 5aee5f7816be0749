"""Hand-over of residuals when ranks come and go.

    R = (1/P)·Σ eᵢ + s               eᵢ: sent residual of rank i; s: reduced residuals, row by row
    P → P' ranks                     eᵢ ← (P'/P)·eᵢ for survivors, 0 for newcomers; s: the same
                                     numbers, cut into P' rows
    R' = R − (1/P)·Σ eⱼ − sⱼ         if ranks j died: their part is lost once, and counted
    j leaves                         the others add its part of R to their sent residuals, a range
                                     of every piece each; R' = R

Note: nothing changes before all messages have arrived. Ranks describe their residuals and send the
parts of rows that change owners; the caller (``group.reform``) commits once every rank has got this
far.

Note: in doubt. If a rank dies in the last message of a round, some ranks have finished it and
others have not. A rank that begins a round has finished the one before, so they differ by one round
at most, and a rank that is behind has sent everything that the others took: its proposal counts. A
hand-over is such a round itself: the next one finishes or repeats an interrupted one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import torch

from commpress.collectives.agreement import gathered
from commpress.collectives.allreduce import Workspace
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Settlements
from commpress.collectives.frame import FLAT, Frame, Rows, pack_rows, stamp_rows, verify_rows
from commpress.errors import InvalidArgument, Mismatch
from commpress.feedback import Key, Residual, ResidualStore, add_reduced
from commpress.kernels.pieces import width_of
from commpress.work import Steps

AT_ONCE = 64 << 20  # bytes from one rank to another in one message
NEW = -1  # count of settled rounds of a new rank

Stores = Mapping[str, ResidualStore]
Place = tuple[str, str, int]  # store, parameter, offset of the piece


@dataclass(frozen=True)
class Standing:
    """State of a rank after a hand-over that is not committed yet."""

    behind: bool  # this rank is new, or had not settled a round that others had
    shared: dict[str, Any]  # from a rank that is not behind
    tensors: dict[str, torch.Tensor]  # likewise, by name; empty unless ``behind``


@dataclass
class _Said:
    """Report of one rank: its row, its pieces and the state that all ranks share."""

    rank: int  # rank that its rows were cut for; NEW without rows
    size: int
    pieces: dict[Place, int]  # elements
    shared: dict[str, Any]
    tensors: dict[str, list[int]]  # shapes

    def packed(self) -> torch.Tensor:
        pieces = [[*place, numel] for place, numel in self.pieces.items()]
        said = msgpack.packb([self.rank, self.size, pieces, self.shared, self.tensors])
        return torch.frombuffer(bytearray(said), dtype=torch.uint8)

    @classmethod
    def of(cls, packed: torch.Tensor) -> "_Said":
        rank, size, pieces, shared, tensors = msgpack.unpackb(
            packed.numpy().tobytes(), strict_map_key=False
        )
        found = {(store, name, at): numel for store, name, at, numel in pieces}
        return cls(rank, size, found, shared, tensors)


class Handover(Settlements):
    """Counts an owner's settled rounds and knows how its residuals are cut into rows."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel
        self.rank, self.size = channel.rank, channel.size
        self.lost = 0  # ranks that were gone before they had handed over their residuals
        self._left: set[int] = set()  # ranks that have handed over
        # settled rounds after the proposal, and the function that commits it
        self._proposed: tuple[int, Callable[[], None]] | None = None

    # ------------------------------------------------------------ a change

    def steps(
        self,
        change: Change,
        stores: Stores,
        workspace: Workspace,
        *,
        shared: Mapping[str, Any] | None = None,
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> Steps[Standing]:
        """Hand residuals over among the present ranks of the channel; collective. ``with_it``
        returns the function that commits.

        A round under way in ``workspace`` is committed if another rank has finished it, else
        discarded. ``shared`` and ``tensors`` (float32) are the state that all ranks have in common:
        ranks that are behind receive it. If this raises, or fails on another rank, call it again
        with the next change.
        """
        if change.was is None:
            self._begin_anew(stores, workspace)
        heads = yield from self._gathered([float(self.settled), float(self.taken)])
        top, source = int(heads[:, 0].max()), int(heads[:, 0].argmax())
        behind = self.settled < top
        self._settle_doubt(stores, workspace, top, source, taken=bool(heads[source, 1]))

        shapes = {name: list(tensor.shape) for name, tensor in (tensors or {}).items()}
        me = _Said(
            self.rank if self.settled != NEW else NEW,
            self.size,
            _pieces(stores),
            dict(shared or {}),
            shapes,
        )
        every = yield from self._told(me)
        pieces = dict(
            sorted({place: numel for each in every for place, numel in each.pieces.items()}.items())
        )

        needy = [rank for rank in range(change.size) if heads[rank, 0] < top]
        gift = (
            _flat((tensors or {}).values()) if change.rank == source and needy else torch.empty(0)
        )
        own = {
            place: stores[place[0]].of(place[1:], numel)[1] for place, numel in me.pieces.items()
        }
        parts = {
            rank: _flat(
                [*_common_parts(own, me, change.size, rank, pieces), *[gift] * (rank in needy)]
            )
            for rank in range(change.size)
        }
        came = yield from self._exchanged(parts)
        rows = {place: torch.zeros(width_of(numel, change.size)) for place, numel in pieces.items()}
        given: dict[str, torch.Tensor] = {}
        for rank, each in enumerate(every):
            rest = came[rank].view(torch.float32)
            for place, part in _in_common(each, change.size, change.rank, pieces):
                first = part.start - row_of(change.rank, change.size, pieces[place]).start
                rows[place][first : first + len(part)], rest = rest[: len(part)], rest[len(part) :]
            if rank == source and behind:
                for name, shape in each.tensors.items():
                    count = torch.Size(shape).numel()
                    given[name], rest = rest[:count].view(shape).clone(), rest[count:]

        stayed = [each for each in every if each.rank != NEW]
        before = stayed[0].size if stayed else change.size
        gone = set(range(before)) - {each.rank for each in stayed} - self._left
        kept: dict[str, dict[Key, Residual]] = {}
        for name, store in stores.items():
            mine = {
                place[1:]: (numel, rows[place])
                for place, numel in pieces.items()
                if place[0] == name
            }
            kept[name] = {key: (store.of(key, numel)[0], row) for key, (numel, row) in mine.items()}

        def commit() -> None:
            for name, store in stores.items():
                for sent, *_ in kept[name].values():
                    sent.mul_(change.size / before)
                store.become(kept[name])
            self.rank, self.size, self.taken = change.rank, change.size, True
            self.lost += len(gone) if me.rank != NEW else 0
            self._left.clear()

        self._propose(top, commit)
        return Standing(behind, every[source].shared, given)

    def with_it(self, then: Callable[[], None]) -> Callable[[], None]:
        """Return a function that commits this hand-over and then calls ``then``."""
        assert self._proposed is not None
        settled, commit = self._proposed

        def both() -> None:
            commit()
            then()

        self._proposed = settled, both
        return both

    def leaving(self, ranks: Sequence[int], stores: Stores) -> Steps[None]:
        """Hand the residuals of ``ranks``, which are about to leave, to the others; collective.

        Each rank that stays adds a range of every piece to its sent residual.
        """
        stay = [rank for rank in range(self.channel.size) if rank not in ranks]
        leaves = self.rank in ranks
        me = _Said(self.rank, self.size, _pieces(stores) if leaves else {}, {}, {})
        every = yield from self._told(me)
        whole: dict[Place, torch.Tensor] = {}
        for place, numel in me.pieces.items():
            sent, reduced = stores[place[0]].of(place[1:], numel)
            whole[place] = sent[:numel].clone()
            add_reduced(whole[place], reduced, self.rank, self.size)
        parts = {
            rank: _flat(part[slice_of(i, len(stay), part.numel())] for part in whole.values())
            for i, rank in enumerate(stay)
        }
        came = yield from self._exchanged(parts)

        def commit() -> None:
            if leaves:
                for store in stores.values():
                    store.load({})
            for rank, rest in came.items() if not leaves else ():
                flat = rest.view(torch.float32)
                for (name, parameter, offset), numel in every[rank].pieces.items():
                    at = slice_of(stay.index(self.rank), len(stay), numel)
                    part, flat = flat[: at.stop - at.start], flat[at.stop - at.start :]
                    stores[name].add(
                        (parameter, offset), at.start, part, numel, width_of(numel, self.size)
                    )
            self._left.update(ranks)
            self.taken = True

        settle = self._propose(self.settled, commit)
        yield from self._gathered([float(self.settled)])
        settle()

    # ------------------------------------------------------------ what they have in common

    def _begin_anew(self, stores: Stores, workspace: Workspace) -> None:
        """Begin as a newcomer, without residuals."""
        workspace.settle(taken=False)
        for store in stores.values():
            store.become({})
        self._proposed, self.settled, self.taken = None, NEW, True
        self._left.clear()

    def _settle_doubt(
        self, stores: Stores, workspace: Workspace, top: int, source: int, *, taken: bool
    ) -> None:
        """Finish the open round if ``source`` has finished it, else discard it."""
        proposed, self._proposed = self._proposed, None
        if proposed is not None and proposed[0] == top:
            proposed[1]()
        elif self.settled in (top, NEW):  # if nothing is settled yet, a new rank is not behind
            workspace.settle(taken=False)
        elif self.settled == top - 1:
            workspace.settle(taken=taken)
            self.settled, self.taken = top, taken
        else:
            raise Mismatch(
                f"rank {self.channel.rank} has settled {self.settled} rounds and rank {source} "
                f"{top}, and ranks that train together differ by one at most: reform after a "
                "failure before anything else",
                ranks=(source,),
            )

    def _propose(self, before: int, commit: Callable[[], None]) -> Callable[[], None]:
        """Return the function that commits, to be called once every rank has got here; until then
        the next change decides."""

        def settle() -> None:
            self._proposed, self.settled = None, before + 1
            commit()

        self._proposed = before + 1, settle
        return settle

    # ------------------------------------------------------------ messages

    def _gathered(self, values: list[float]) -> Steps[np.ndarray]:
        return gathered(values, transport=self.channel.transport, sequence=self.channel.take())

    def _told(self, me: _Said) -> Steps[list[_Said]]:
        """Exchange the reports of all ranks."""
        size = self.channel.size
        came = yield from self._exchanged(dict.fromkeys(range(size), me.packed()))
        return [_Said.of(came[rank]) for rank in range(size)]

    def _exchanged(self, parts: Mapping[int, torch.Tensor]) -> Steps[dict[int, torch.Tensor]]:
        """Exchange flat tensors of any length between all ranks; return the bytes that came, by
        rank."""
        parts = {rank: part.view(torch.uint8) for rank, part in parts.items()}
        channel, none = self.channel, torch.empty(0, dtype=torch.uint8)
        me, peers = channel.rank, [rank for rank in range(channel.size) if rank != channel.rank]
        lengths = yield from self._gathered(
            [float(parts.get(rank, none).numel()) for rank in range(channel.size)]
        )
        came = {rank: torch.empty(int(lengths[rank, me]), dtype=torch.uint8) for rank in peers}
        longest = int(lengths.max()) if peers else 0
        for at in range(0, longest, AT_ONCE):
            there = {rank: parts.get(rank, none)[at : at + AT_ONCE] for rank in peers}
            here = {rank: came[rank][at : at + AT_ONCE] for rank in peers}
            frame = Frame(
                FLAT, channel.size, "hand-over", 0, channel.take(), checked=channel.transport.checks
            )
            said = {
                rank: frame._replace(numel=there[rank].numel(), back=here[rank].numel())
                for rank in peers
            }
            wanted = {
                rank: frame._replace(numel=here[rank].numel(), back=there[rank].numel())
                for rank in peers
            }
            headers, expected = pack_rows(said, channel.size), pack_rows(wanted, channel.size)
            if frame.checked:
                stamp_rows(headers, there)
            answers = torch.zeros_like(headers)
            yield channel.transport.exchange(
                Rows(answers, here), Rows(headers, there), expected, 2 * frame.sequence
            )
            verify_rows(answers, here, wanted, expected, channel.transport)
        return came | {me: parts.get(me, none)}


def cannot_follow(owner: object, why: str) -> InvalidArgument:
    """Return the error that ``reform`` raises, on all ranks alike, if each lost rank took a part of
    the owner with it."""
    return InvalidArgument(
        f"the ranks have changed, and {type(owner).__name__} cannot go on: {why}. Construct it "
        "anew for the ranks that there are, and load a snapshot, as commpress.elastic(build=..., "
        "snapshots=...) does"
    )


class Divided:
    """Owner whose state is divided over the ranks: ``reform`` raises, because it cannot go on among
    others."""

    def reform(self, change: Change) -> Callable[[], None]:
        raise cannot_follow(self, "every rank has a part of it")


def row_of(rank: int, size: int, numel: int) -> range:
    """Elements of a piece that the owner of row ``rank`` reduces."""
    width = width_of(numel, size)
    return range(min(rank * width, numel), min((rank + 1) * width, numel))


def slice_of(i: int, count: int, numel: int) -> slice:
    """Return the i-th of ``count`` parts of a piece, of about equal length."""
    return slice(i * numel // count, (i + 1) * numel // count)


def _pieces(stores: Stores) -> dict[Place, int]:
    return {
        (name, *key): every[0].numel()
        for name, store in stores.items()
        for key, every in store.every().items()
    }


def _in_common(
    of: _Said, size: int, rank: int, pieces: Mapping[Place, int]
) -> Iterator[tuple[Place, range]]:
    """Yield the elements of every piece that lie both in the old row of the report's rank and in
    the new row of ``rank``."""
    for place, numel in pieces.items():
        if place in of.pieces:
            old, new = row_of(of.rank, of.size, numel), row_of(rank, size, numel)
            yield (
                place,
                range(
                    max(old.start, new.start), max(old.start, new.start, min(old.stop, new.stop))
                ),
            )


def _common_parts(
    own: Mapping[Place, torch.Tensor], me: _Said, size: int, rank: int, pieces: Mapping[Place, int]
) -> Iterator[torch.Tensor]:
    for place, part in _in_common(me, size, rank, pieces):
        first = part.start - row_of(me.rank, me.size, pieces[place]).start
        yield own[place][first : first + len(part)]


def _flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors on the host."""
    return torch.cat([torch.empty(0), *(tensor.detach().reshape(-1).cpu() for tensor in tensors)])
