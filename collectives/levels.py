"""Two levels for a channel: the hierarchy with its counters, and residuals to save and load.

Residuals belong to slices, keyed by (parameter name, first element of the slice), and a slice's R
is the sum of the nodes' sent residuals / divisor + the reduced ones. An elastic checkpoint holds R
of the same flat pieces as without a topology, so either loads the other's.
"""

import logging
from dataclasses import replace

import torch

from commpress.codecs import Codec, policy_of
from commpress.collectives.buckets import PIECE, Span
from commpress.collectives.channel import Channel, Counted
from commpress.collectives.links import choose
from commpress.collectives.measured_links import Links
from commpress.collectives.residual_state import Residuals
from commpress.collectives.topology import Topology, agree
from commpress.collectives.two_level import Hierarchy, hierarchy_of, routes
from commpress.feedback import Key, ResidualStore
from commpress.kernels.pieces import NUMEL, RESIDUAL, WIDTH
from commpress.work import run

log = logging.getLogger("commpress")


class Levels:
    """A hierarchy whose bytes are counted and whose waits are timed."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self._inside = Counted(hierarchy.inside)
        self._between = {
            index: Counted(transport) for index, transport in hierarchy.between.items()
        }
        self.hierarchy = replace(hierarchy, inside=self._inside, between=self._between)

    def __str__(self) -> str:
        return str(self.hierarchy.topology)

    @property
    def sent_bytes(self) -> int:
        return self._inside.sent_bytes + self.between_bytes

    @property
    def between_bytes(self) -> int:
        """Bytes that left the node."""
        return sum(transport.sent_bytes for transport in self._between.values())

    @property
    def waited(self) -> float:
        """Seconds spent waiting for peers and the network."""
        return sum(transport.seconds for transport in (self._inside, *self._between.values()))

    # ------------------------------------------------------------ checkpoints

    def lengths(self, numels: dict[str, int]) -> dict[Key, int]:
        """Return the number of elements of every slice of this rank."""
        return {key: length for key, _, length, _ in self._slices(numels)}

    def parts(self, store: ResidualStore, numels: dict[str, int]) -> dict[Key, torch.Tensor]:
        """Return this rank's part of each flat piece; the mean of the parts over the ranks is R."""
        whole = {name: torch.zeros(numel) for name, numel in numels.items()}
        self._add(store, whole)
        return {
            (name, at): vector[at : at + PIECE]
            for name, vector in whole.items()
            for at in range(0, len(vector), PIECE)
        }

    def pay(self, store: ResidualStore, name: str, out: torch.Tensor) -> None:
        """Add the residual of a parameter to its gradient on this rank and zero it, as
        ``ResidualStore.pay`` does."""
        for sent, reduced in self._add(store, {name: out}):
            sent.zero_()
            reduced.zero_()

    def _add(
        self, store: ResidualStore, whole: dict[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Add this rank's part of R to vectors of these parameters; return the residuals that were
        read."""
        own = {key: (sent, reduced) for key, sent, reduced in store.places()}
        size, divisor = self.hierarchy.topology.size, self.hierarchy.divisor
        added = []
        for key, index, length, width in self._slices(
            {name: len(vector) for name, vector in whole.items()}
        ):
            if key in own:
                sent, reduced = own[key]
                name, start = key
                part = whole[name][start : start + length]
                part += size / divisor * sent
                row = part[self.hierarchy.between[index].rank * width :][:width]
                row += size * reduced[: row.numel()]
                added.append(own[key])
        return added

    def share(self, totals: dict[Key, torch.Tensor]) -> Residuals:
        """Make residuals whose R is ``totals``: equal sent residuals on all nodes, reduced ones
        zero."""
        pieces: dict[str, dict[int, torch.Tensor]] = {}
        for (name, offset), total in totals.items():
            pieces.setdefault(name, {})[offset] = total
        whole = {
            name: torch.cat([parts[at] for at in sorted(parts)]) for name, parts in pieces.items()
        }
        weight = self.hierarchy.divisor / len(self.hierarchy.topology.nodes)
        shared: Residuals = {}
        for key, _, length, width in self._slices(
            {name: len(vector) for name, vector in whole.items()}
        ):
            total = whole[key[0]][key[1] : key[1] + length]
            shared[key] = (weight * total, torch.zeros(width))
        return shared

    def _slices(self, numels: dict[str, int]) -> list[tuple[Key, int, int, int]]:
        """List (key, index, elements, elements per row) of this rank's slices of these
        parameters."""
        found = []
        for name, numel in numels.items():
            for route in routes([Span(name, 0, numel)], policy_of("sign"), self.hierarchy):
                for index, message in route.between.items():
                    for key, line in zip(message.keys, message.pieces.table, strict=True):
                        if line[RESIDUAL] >= 0:
                            found.append((key, index, int(line[NUMEL]), int(line[WIDTH])))
        return found


def divide(channel: Channel, topology: Topology | str | Links, numel: int, codec: Codec) -> None:
    """Give ``channel`` two levels from now on, unless one level is the only one or, by measured
    ``Links``, faster for ``numel`` elements; collective, before any work. "auto" reads each rank's
    launcher."""
    given = (
        Topology.parse(topology) if isinstance(topology, str) and topology != "auto" else topology
    )
    note = ""
    if isinstance(given, Links):
        note = choose(numel, codec, given)
        log.info(
            "buffers of %d elements on nodes %s: %s is the faster all-reduce",
            numel,
            given.topology,
            note,
        )
        given = given.topology
    agreed = run(agree(channel.inner, given if isinstance(given, Topology) else None, note=note))
    if not agreed.layered:
        level = logging.DEBUG if topology == "auto" else logging.WARNING
        log.log(
            level,
            (
                "one node, or one rank on every node: there is one level only, gradients are "
                "reduced flat"
            ),
        )
    if agreed.layered and note != "flat":
        channel.levels = Levels(hierarchy_of(agreed, channel.inner))
        channel.at_once = 1  # see ``two_level``: a rank sends before it waits
