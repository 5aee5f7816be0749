"""Ranks that share a node: from every launcher's variables, from the caller, and agreed by all
ranks or refused by all."""

import socket
from contextlib import suppress
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from commpress.collectives.topology import (
    PLACE,
    Place,
    Topology,
    agree,
    place,
    slurm_tasks,
    topology_of,
)
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.transports.torch import TorchTransport
from commpress.errors import CommunicationError, InvalidArgument, Mismatch
from commpress.work import run
from test_gloo import TIMEOUT
from ways import WAYS, transport_by

HOST = socket.gethostname()


def torchrun(group: int, local: int, count: int = 2) -> dict[str, str]:
    return {
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(group),
        "RANK": "7",
    }


def agreed(environments, topologies=None):
    transports = Loopback(len(environments)).transports()
    given = topologies or [None] * len(environments)
    return simulate(
        [
            agree(t, g, environment=e)
            for t, g, e in zip(transports, given, environments, strict=True)
        ]
    )


# ---------------------------------------------------------------- a topology


def test_ways_to_write_it():
    assert Topology.parse("2x2") == Topology.of(2, 2) == Topology(((0, 1), (2, 3)))
    assert Topology.parse("3, 1") == Topology(((0, 1, 2), (3,)))
    assert Topology.parse("2 0|3 1") == Topology(((0, 2), (1, 3)))
    assert Topology.parse(str(Topology.of(3, 1, 2))) == Topology.of(3, 1, 2)


@given(st.permutations(range(6)), st.lists(st.integers(1, 5), max_size=3))
def test_order_does_not_matter(ranks, cuts):
    edges = sorted({0, 6, *cuts})
    nodes = [ranks[a:b] for a, b in pairwise(edges)]
    topology = Topology(tuple(map(tuple, nodes)))
    assert topology == Topology(tuple(map(tuple, reversed(nodes))))
    for rank in range(6):
        assert topology.nodes[topology.node(rank)][topology.local_rank(rank)] == rank
        assert rank in next(node for node in nodes if rank in node)


def test_what_is_to_be_gained():
    assert [Topology.of(*s).layered for s in ((4,), (1, 1), (2, 1), (2, 2))] == [
        False,
        False,
        True,
        True,
    ]
    assert (Topology.of(2, 3).size, Topology.of(2, 3).widest) == (5, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Topology(((0, 1), (1, 2))),
        lambda: Topology(((0,), ())),
        lambda: Topology(()),
        lambda: Topology.of(2, 0),
        lambda: Topology.of(),
        lambda: Topology.parse("two"),
        lambda: Topology.parse("9" * 30),
        lambda: Topology.parse("9" * 30 + "x9"),
        lambda: Topology.of(2).node(2),
        lambda: place(torchrun(0, 0) | {"LOCAL_RANK": "first"}),
        lambda: slurm_tasks("2(y3)"),
    ],
)
def test_what_is_no_topology_is_refused(make):
    with pytest.raises(InvalidArgument, match=r"expected"):
        make()


# ---------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            torchrun(1, 0) | {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"},
            Place("torchrun", "1", 0, 2),
        ),
        (
            {
                "OMPI_COMM_WORLD_LOCAL_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "SLURM_PROCID": "0",
            },
            Place("Open MPI", HOST, 3, 4),
        ),
        (
            {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_RANK": "5"},
            Place("MPI", HOST, 1, 2),
        ),
        (
            {
                "SLURM_PROCID": "6",
                "SLURM_NODEID": "3",
                "SLURM_LOCALID": "0",
                "SLURM_TASKS_PER_NODE": "2(x3),1",
            },
            Place("SLURM", "3", 0, 1),
        ),
        (
            {"SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"},
            Place("SLURM", "3", 0, -1),
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Place("host name", HOST)),
    ],
)
def test_what_a_launcher_says(environment, expected):
    """The innermost decides: torchrun below srun, whose workers see both."""
    assert place(environment) == expected
    assert slurm_tasks("2(x3),1,4(x2)") == [2, 2, 2, 1, 4, 4]


# ---------------------------------------------------------------- agreement


def test_all_ranks_agree_on_what_launchers_say():
    ranks = [torchrun(0, 0), torchrun(1, 0), torchrun(0, 1), torchrun(1, 1)]
    assert agreed(ranks) == [Topology(((0, 2), (1, 3)))] * 4
    uneven = [torchrun(0, 0, 1), torchrun(1, 0, 2), torchrun(1, 1, 2)]
    assert agreed(uneven) == [Topology.of(1, 2)] * 3
    some = [torchrun(0, 1, 4), torchrun(1, 3, 4)]  # of a node's ranks
    assert agreed(some) == [Topology.of(1, 1)] * 2
    assert agreed([{}] * 4, [Topology.of(2, 2)] * 4) == [Topology.of(2, 2)] * 4


ONE = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}


@pytest.mark.parametrize(
    ("environments", "given", "ranks", "says"),
    [
        (
            [{}] * 4,
            [Topology.of(2, 2)] * 2 + [Topology.of(1, 1, 2)] * 2,
            (2, 3),
            r"rank 0 has topology= '0 1\|2 3', rank 2 has topology= '0\|1\|2 3'",
        ),
        (
            [torchrun(0, 0), torchrun(0, 1)],
            [Topology.of(1, 1), None],
            (1,),
            "rank 1 has torchrun",
        ),
        ([torchrun(0, 0), {}], None, (1,), "rank 0 has torchrun '0', rank 1 has host name"),
        ([ONE, ONE], None, (0, 1), r"local ranks \[0, 0\] of \[1\] according to Open MPI"),
    ],
)
def test_ranks_that_contradict_each_other_are_named(environments, given, ranks, says):
    with pytest.raises(Mismatch, match=says) as error:
        agreed(environments, given)
    assert error.value.ranks == ranks


def test_two_nodes_of_one_name_and_a_topology_of_another_size_are_found():
    with pytest.raises(Mismatch, match="two nodes seem to have one name"):
        topology_of([Place("SLURM", "0", 0, 1), Place("SLURM", "0", 1, 2)])
    with pytest.raises(InvalidArgument, match="has 3 ranks, the group has 2"):
        agreed([{}] * 2, [Topology.of(3)] * 2)


@given(st.binary(max_size=PLACE))
def test_bytes_that_are_no_place_are_refused(data):
    with suppress(CommunicationError):
        assert isinstance(Place.unpack(data), Place)


@given(st.text(max_size=1000))
def test_places_of_any_name_travel(name):
    data = Place(GIVEN := "x", name, 3, 4).pack()
    assert len(data) == PLACE
    back = Place.unpack(data)
    assert (back.source, back.local_rank, back.local_size) == (GIVEN, 3, 4)
    assert back.node == name or len(name.encode()) > 280


# ---------------------------------------------------------------- real ranks


def on_gloo(given):
    transport = TorchTransport(dist.group.WORLD, timeout=TIMEOUT)
    rank = dist.get_rank()
    return run(agree(transport, given, environment=torchrun(rank % 2, rank // 2)))


def test_over_gloo(pool):
    assert pool.run(on_gloo, None, size=4) == [Topology(((0, 2), (1, 3)))] * 4
    assert pool.run(on_gloo, Topology.of(3, 1), size=4) == [Topology.of(3, 1)] * 4


def subsets(way):
    """Transports among the even and the odd ranks."""
    transport = transport_by(way, TIMEOUT)
    even, odd = transport.subset([0, 2]), transport.subset([3, 1])
    assert (even is None) != (odd is None)
    mine, out = even or odd, torch.zeros(2, 72, dtype=torch.uint8)
    row = torch.full((1, 72), dist.get_rank(), dtype=torch.uint8)
    mine.all_gather(out, row, 0).wait()
    return mine.rank, out[:, -1].tolist(), mine.peer(0)


@pytest.mark.parametrize("way", WAYS)
def test_subsets_of_a_group(pool, way):
    names = {0: ([0, 2], "rank 0"), 1: ([1, 3], "rank 0 (global rank 1)")}
    assert pool.run(subsets, way, size=4) == [(r // 2, *names[r % 2]) for r in range(4)]
