"""The machines a benchmark runs on, as the simulator sees them: links, network stack and kernels,
measured on the ranks."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch.distributed as dist

from commpress.cli import harness, probe
from commpress.collectives.measured_links import Links
from commpress.plan.cluster import Cluster, measured_cluster
from commpress.plan.costs import BEYOND, Cost, Costs, measure_costs

PAYLOAD, ROUNDS = 4 << 20, 5


@dataclass(frozen=True)
class Machines:
    links: Links
    costs: Costs

    def cluster(self) -> Cluster:
        return measured_cluster(self.links)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"summary": self.summary()}

    def summary(self) -> str:
        cluster = self.cluster()
        node = cluster.node
        latency = cluster.latency if self.links.between else cluster.inside_latency
        cores = f", {cluster.machine_cores:.0f} cores for all" if cluster.machine_cores else ""
        return (
            f"{cluster.size} ranks: {min(node.nic, node.inside) / 1e6:.1f} MB/s, latency "
            f"{1e6 * latency:.0f} us; of a core {1e6 * cluster.message_seconds:.0f} us for a "
            f"message, {1e9 * cluster.byte_seconds:.2f} ns for a byte{cores}"
        )


@dataclass(kw_only=True)
class Forecast:
    """A step's time as it was measured, beside what was predicted."""

    seconds: float
    predicted_seconds: float
    chosen: bool = False  # by the plan

    @property
    def off(self) -> float:
        return self.predicted_seconds / self.seconds - 1


def links(rank: int, size: int) -> Links:
    """Collective."""
    options = Namespace(topology="auto", bytes=PAYLOAD, rounds=ROUNDS, pairs=False)
    return probe.measure(rank, size, options, lambda share, what: None)[0]


def kernels(codecs: Sequence[str], numel: int = BEYOND) -> Costs:
    """Collective. On all ranks at once, since busy cores slow each other down; the slowest rank's
    count.

    ``numel``: of the buffer, which caches hold if it is short and used again and again. What a call
    takes whatever its size is then in what each element takes.
    """
    dist.barrier()
    own = measure_costs(codecs, numel=numel)
    figures = {str(kind): list(astuple(cost)) for kind, cost in own.codecs.items()}
    found = harness.slowest(figures | {"others": [own.memory, own.product, own.call]})
    costs = {kind: Cost(*found[str(kind)].tolist()) for kind in own.codecs}
    memory, product, call = found["others"].tolist()
    return Costs(costs, memory, product, call if numel >= BEYOND else 0.0)
