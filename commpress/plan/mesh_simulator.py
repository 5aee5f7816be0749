"""A step on a grid of parallelism whose data-parallel dimension runs the production collectives on
simulated time.

Tensors, sequences, experts and the pipeline are those of ``grids.predicted``; what averages
gradients is simulated among one group of ranks that hold the same, on the share of their nodes'
lines that the other groups leave them.
"""

from dataclasses import replace

import numpy as np

from commpress.errors import InvalidArgument
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs
from commpress.plan.grids import Grid, MeshDims, MeshStep, MeshWork, predicted
from commpress.plan.model import Shape, bucket_of
from commpress.plan.pair_links import PairLinks
from commpress.plan.simulator import Training
from commpress.plan.way_names import RINGS
from commpress.plan.ways import simulate_buckets

BUCKETS = 16  # at most: more of them change little and take long to simulate


def simulate_mesh(
    cluster: Cluster, costs: Costs, work: MeshWork, grid: Grid, way: str, *, bucket_mb: float = 25.0
) -> MeshStep:
    """Seconds, parts and bytes of a step; ``way`` is a ring of a library or a codec, as in
    ``ways``."""
    links = PairLinks.of_cluster(cluster)
    step = predicted(grid, work, links, costs, MeshDims("none" if way in RINGS else way))
    if grid.dp * grid.ep * grid.sp == 1:
        return step
    bare = predicted(grid, replace(work, gradient=0), links, costs)  # all but the gradients
    numel = int(predicted(grid, replace(work, gradient=1), links, costs).sent["dp"] / 2)
    group = _group(cluster, grid)
    numel = numel * group.size // (group.size - 1)
    count = max(min(int(4e-6 * numel / bucket_mb), BUCKETS), 1)
    buckets = [bucket_of([Shape(str(i), (numel // count,))]) for i in range(count)]
    last = work.backward * grid.dp * grid.ep * work.micro / work.batch if grid.pp == 1 else 0.0
    training = Training(0.0, last, 0.0, (1 / count,) * count)
    found = simulate_buckets(group, costs, way, buckets, training)
    parts = {**bare.parts, "dp": found.exposed_seconds}
    between = bare.between + found.traffic.between * cluster.kinds[0][0].ranks
    return replace(
        step,
        seconds=sum(parts.values()),
        parts=parts,
        sent={**bare.sent, "dp": found.traffic.nbytes},
        between=between,
    )


def _group(cluster: Cluster, grid: Grid) -> Cluster:
    """The nodes as one group of data-parallel ranks has them."""
    if len(cluster.kinds) > 1:
        raise InvalidArgument(
            f"a grid on {len(cluster.kinds)} kinds of nodes is not simulated, expected one: use "
            "plan --mesh"
        )
    node, _ = cluster.kinds[0]
    group = grid.groups(np.arange(grid.size), "dp", "ep", "sp")[0]
    _, counts = np.unique(cluster.node_of[group], return_counts=True)
    if counts.min() != counts.max():
        raise InvalidArgument(
            f"{grid} has {counts.tolist()} ranks of a data-parallel group on nodes, expected as "
            "many on each"
        )
    ranks = int(counts[0])
    share = ranks / node.ranks
    mine = replace(
        node,
        ranks=ranks,
        nic=node.nic * share,
        inside=node.inside * share,
        cores=node.cores * share,
    )
    return replace(cluster, kinds=((mine, len(counts)),))
