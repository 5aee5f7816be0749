"""Topologies: the ranks that share a node, given explicitly or read from the launcher's
environment, and agreed by all ranks.

``Topology`` is data. ``agree`` is the one exchange: every rank reports its place (or the nodes it
was given), all see the same reports, and so all reach the same topology or the same error.
"""

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgpack
import torch

from commpress.collectives.allreduce import Workspace, exchange
from commpress.collectives.frame import ALL_TO_ALL, HEADER, Frame
from commpress.collectives.nodes import Topology as Topology
from commpress.collectives.transports.transport import Transport
from commpress.errors import CommunicationError, InvalidArgument, Mismatch
from commpress.work import Steps

PLACE = 448  # bytes of a rank's report
GIVEN = "topology="  # source of a place if the caller gave the nodes


class Place(NamedTuple):
    """Place of one rank."""

    source: str  # launcher or variable that it was read from
    node: str  # equal for ranks of one node; with GIVEN, the whole topology
    local_rank: int = -1  # −1: unknown
    local_size: int = -1

    def pack(self) -> bytes:
        node = (
            self.node
            if len(self.node) <= 300
            else f"{self.node[:280]}… {zlib.crc32(self.node.encode()):08x}"
        )
        return msgpack.packb([self.source, node, self.local_rank, self.local_size]).ljust(
            PLACE, b"\0"
        )

    @classmethod
    def unpack(cls, data: bytes) -> "Place":
        unpacker = msgpack.Unpacker(max_buffer_size=PLACE)
        unpacker.feed(data)
        try:
            source, node, local_rank, local_size = unpacker.unpack()
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CommunicationError(
                f"a rank sent {data[:16]!r}… where its place was expected"
            ) from error
        return cls(str(source), str(node), int(local_rank), int(local_size))


# ---------------------------------------------------------------- launchers


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """Place of this process: the innermost launcher decides, or the host name without one.

    torchrun and SLURM number nodes. MPI numbers ranks inside a host; the host's name says which.
    """

    def number(name: str) -> int:
        text = environment[name]
        if not re.fullmatch(r"\d{1,9}", text):
            raise InvalidArgument(
                f"{name} is {text!r}, expected a number: unset it, or pass topology="
            )
        return int(text)

    host = socket.gethostname()
    if {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"} <= environment.keys():
        return Place(
            "torchrun", str(number("GROUP_RANK")), number("LOCAL_RANK"), number("LOCAL_WORLD_SIZE")
        )
    for source, rank, size in (
        ("Open MPI", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("MPI", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ):
        if {rank, size} <= environment.keys():
            return Place(source, host, number(rank), number(size))
    if {"SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID"} <= environment.keys():
        node = number("SLURM_NODEID")
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get(
            "SLURM_TASKS_PER_NODE", ""
        )
        counts = slurm_tasks(tasks)
        return Place(
            "SLURM", str(node), number("SLURM_LOCALID"), counts[node] if node < len(counts) else -1
        )
    return Place("host name", host)


def slurm_tasks(text: str) -> list[int]:
    """Parse SLURM's notation: '2(x3),1' is [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if not match:
            raise InvalidArgument(
                f"SLURM_TASKS_PER_NODE is {text!r}, expected something like '2(x3),1': pass "
                "topology="
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


# ---------------------------------------------------------------- agreement


def agree(
    transport: Transport,
    topology: Topology | None = None,
    *,
    note: str = "",
    environment: Mapping[str, str] = os.environ,
    sequence: int = 0,
) -> Steps[Topology]:
    """Agree on the topology of all ranks of ``transport``: ``topology`` if given, else from their
    environments; collective.

    ``note``: further text that must be equal on all ranks with a given topology.
    """
    size = transport.size
    if topology is not None and topology.size != size:
        raise InvalidArgument(
            f"topology {str(topology)!r} has {topology.size} ranks, the group has {size}: name "
            "them all"
        )
    mine = (
        Place(GIVEN, f"{topology} {note}".strip()) if topology is not None else place(environment)
    )
    rows = torch.zeros(size, HEADER + PLACE, dtype=torch.uint8)
    rows[:, HEADER:] = torch.frombuffer(bytearray(mine.pack()), dtype=torch.uint8)
    frame, out = Frame(ALL_TO_ALL, size, "topology", 0, sequence), torch.zeros_like(rows)
    flag = torch.zeros(1, dtype=torch.uint8)
    yield from exchange(out, rows, frame, flag, transport, Workspace(checksum=True))
    places = [Place.unpack(row.tobytes()) for row in out[:, HEADER:].numpy()]
    return topology_of(places, topology)


def topology_of(places: Sequence[Place], given: Topology | None = None) -> Topology:
    """Build the topology from the places of all ranks; an error names ranks that contradict each
    other."""
    for what, said in (("source", [p.source for p in places]), (GIVEN, [p.node for p in places])):
        odd = tuple(r for r, text in enumerate(said) if text != said[0])
        if odd and (what == "source" or places[0].source == GIVEN):
            raise Mismatch(
                f"the nodes are not the same on every rank: rank 0 has {places[0].source} "
                f"{places[0].node!r}, rank {odd[0]} has {places[odd[0]].source} "
                f"{places[odd[0]].node!r}. Start all ranks by one launcher, or pass the same "
                "topology= on every rank.",
                ranks=odd,
            )
    if given is not None:
        return given
    nodes: dict[str, list[int]] = {}
    for rank, where in enumerate(places):
        nodes.setdefault(where.node, []).append(rank)
    for node, ranks in nodes.items():
        locals_ = [places[r].local_rank for r in ranks if places[r].local_rank >= 0]
        sizes = {places[r].local_size for r in ranks}
        if len(set(locals_)) < len(locals_) or len(sizes) > 1 or 0 <= min(sizes) < len(ranks):
            raise Mismatch(
                f"node {node!r} has ranks {ranks} with local ranks {locals_} of {sorted(sizes)} "
                f"according to {places[ranks[0]].source}: two nodes seem to have one name. Pass "
                "topology= on every rank (None: flat).",
                ranks=tuple(ranks),
            )
    return Topology(tuple(map(tuple, nodes.values())))
