"""Real ranks over Gloo give, bit for bit, what the simulated hierarchy gives."""

import numpy as np
import pytest
import torch.distributed as dist

from commpress.codecs import ByName, SignCodec
from commpress.codecs.family import EXACT, NAMES
from commpress.codecs.policy import Same
from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import Span
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import hierarchy_of, reduce_routes, routes
from commpress.errors import CommunicationError, Mismatch
from commpress.work import run
from test_gloo import TIMEOUT, Rank
from ways import transport_by

SPANS = [
    Span("weight", 0, 3001),
    Span("norm", 3001, 64),
    Span("bias", 3065, 37),
    Span("one", 3102, 1),
]
STEPS = 3


class NodeRank(Rank):
    numel = 3103

    def __init__(self, transport, topology, codec) -> None:
        self.rank, self.hierarchy = transport.rank, hierarchy_of(topology, transport)
        policy = ByName({"norm": EXACT, "bias": NAMES["int8"]}, Same(codec))
        self.plan = routes(SPANS, policy, self.hierarchy)
        self.feedbacks = [route.zeros() for route in self.plan]
        self.workspace, self.outputs = Workspace(checksum=True), []

    def reduce(self, buffer, **options):
        return reduce_routes(
            buffer, self.feedbacks, plan=self.plan, hierarchy=self.hierarchy, **options
        )

    def result(self):
        residuals = []
        for route, feedbacks in zip(self.plan, self.feedbacks, strict=True):
            for index, feedback in feedbacks.items():
                if feedback is not None:  # exact tensors leave nothing behind
                    feedback.settle(route.between[index].pieces)
                    residuals += [feedback.sent, feedback.reduced]
        return [t.numpy() for t in self.outputs + residuals]


def real(topology, codec, way):
    transport = transport_by(way, TIMEOUT)
    rank = NodeRank(transport, topology, codec)
    for step in range(STEPS):
        run(rank.steps(step))
    return rank.result()


def simulated(topology, codec):
    ranks = [NodeRank(t, topology, codec) for t in Loopback(topology.size).transports()]
    for step in range(STEPS):
        simulate([rank.steps(step) for rank in ranks])
    return [rank.result() for rank in ranks]


@pytest.mark.parametrize("topology", ["2x2", "3,1", "1,2", "0 3|1 2"])
@pytest.mark.parametrize(
    "codec", [NAMES["sign"], SignCodec(block=0), NAMES["ternary"], EXACT], ids=lambda c: c.spec
)
def test_real_ranks_equal_the_simulation(pool, topology, codec):
    topology = Topology.parse(topology)
    results = pool.run(real, topology, codec, "sockets", size=topology.size)
    for arrays, twins in zip(results, simulated(topology, codec), strict=True):
        for array, twin in zip(arrays, twins, strict=True):
            np.testing.assert_array_equal(array.view(np.uint32), twin.view(np.uint32))


@pytest.mark.parametrize("topology", [Topology.of(2, 2), Topology.of(1, 3)], ids=str)
def test_torchs_own_collectives_equal_the_simulation(pool, topology):
    results = pool.run(real, topology, NAMES["sign"], "collectives", size=4)
    for arrays, twins in zip(results, simulated(topology, NAMES["sign"]), strict=True):
        for array, twin in zip(arrays, twins, strict=True):
            np.testing.assert_array_equal(array.view(np.uint32), twin.view(np.uint32))


def disagreeing(topology, way):
    """Rank 3 brings another codec: its node sees it first, the others hear of it when that node
    goes."""
    transport = transport_by(way, TIMEOUT / 20)
    rank = NodeRank(transport, topology, NAMES["int8" if dist.get_rank() == 3 else "sign"])
    run(rank.steps(0))


def test_a_disagreement_is_an_error_on_every_rank(pool):
    outcomes = pool.outcomes(disagreeing, Topology.of(2, 2), "sockets", size=4)
    assert all(isinstance(outcome, CommunicationError) for outcome in outcomes)
    assert isinstance(outcomes[2], Mismatch)
    assert "int8" in str(outcomes[2])
    assert outcomes[2].ranks == (1,)
