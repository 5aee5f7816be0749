"""Grids of data, tensor, pipeline, expert and sequence parallelism, and a model of what a step
costs on each.

A pure function of a model's sizes, links and an order of ranks. Per micro-batch and block of
layers, of T tokens on a rank:

    tensor     4 rings of T·width elements, two in forward, two in backward
    sequence   3 (sp − 1) shifts of 2·T·width/tp elements: keys and values twice, their gradients
               once
    experts    tokens to each node and rank that they have experts on and sums back, twice
               (``expert_way.py``)
    pipeline   T·width elements to the next stage and as many back, while others compute

and once per step the gradients of what a rank holds, twice (n − 1)/n of them among the n ranks that
hold the same, in a codec: as each rank sends them to all others and gets means back. Without a
pipeline the last backward hides what it can of that. Transfers of one kind begin at once on all
ranks (``PairLinks.seconds``), computing does not wait for a pipeline's transfers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

from commpress.codecs import codec_named
from commpress.collectives.channel import AT_ONCE
from commpress.documents import Document
from commpress.errors import InvalidArgument
from commpress.plan.costs import Costs
from commpress.plan.expert_way import ExpertWay, hop_seconds
from commpress.plan.grid import AXES as AXES
from commpress.plan.grid import Grid as Grid
from commpress.plan.grid import MeshDims as MeshDims
from commpress.plan.model import Model, Shape
from commpress.plan.pair_links import PairLinks
from commpress.plan.uneven import shares, stages

BUCKETS = float(25 << 20)  # bytes of gradients that travel together
# copies of its largest parameter that AdamW makes where it is neither fused nor foreach
TEMPORARIES = 3
NEAR = 0.03  # of its step that a grid with more kinds of parallelism must save
FILE = Document("commpress mesh", 1, 1 << 20, "commpress plan --mesh")
# elements that a block keeps for backward per token and width: on every rank of tp, and divided
# among them
KEPT = (5.0, 12.0)


class Numel(NamedTuple):
    """Parameters: matrices, which tensor parallelism divides, vectors, which it does not, and
    experts."""

    matrices: int = 0
    vectors: int = 0
    experts: int = 0

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> "Numel":
        expert = [shape for shape in shapes if "expert" in shape.name]
        other = [shape for shape in shapes if "expert" not in shape.name]
        flat = sum(shape.numel for shape in other if len(shape.sizes) < 2)
        return cls(
            sum(shape.numel for shape in other) - flat, flat, sum(shape.numel for shape in expert)
        )

    @property
    def whole(self) -> int:
        return sum(self)

    def on_a_rank(self, grid: Grid) -> tuple[float, float]:
        """(elements that all data-parallel ranks have, elements of experts)."""
        return self.matrices / grid.tp + self.vectors, self.experts / (grid.tp * grid.ep)


@dataclass(frozen=True)
class MeshWork:
    """A model as a grid divides it, and a step of it. Seconds are of one rank for its share of all
    ranks' work."""

    first: Numel  # before the blocks: embeddings
    blocks: tuple[Numel, ...]
    last: Numel  # after them: the head
    width: int
    batch: int  # sequences of a step on all ranks together
    length: int  # tokens of a sequence
    forward: float
    backward: float
    optimizer: float = 0.0  # for the whole model
    micro: int = 1  # sequences of a micro-batch
    element: int = 4  # bytes of an activation
    gradient: int = 4  # bytes of a gradient that is not compressed
    state: int = 16  # bytes of a parameter on a rank: weight, gradient, two moments
    kept: tuple[float, float] = KEPT
    interleave: int = 1  # stages of a pipeline on each rank
    largest: int = 0  # elements of the largest parameter
    experts_per_token: int = 1
    experts: int = 0  # of a block, all ranks together; 0: many

    def __post_init__(self) -> None:
        for name in ("width", "batch", "length", "micro", "interleave", "experts_per_token"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}, expected at least 1")
        if not self.blocks:
            raise InvalidArgument(
                "the model has no numbered blocks: names such as blocks.0.weight say what stages "
                "are made of"
            )

    @cached_property
    def has_experts(self) -> bool:
        return any(block.experts for block in self.blocks)

    @cached_property
    def costs(self) -> list[float]:
        """Of computing, each block's; the last has the head's, too."""
        found = [float(b.matrices + b.experts) or 1.0 for b in self.blocks]
        return [*found[:-1], found[-1] + self.last.matrices]

    @classmethod
    def of(
        cls, model: Model, seconds: float, *, batch: int, length: int, **more: Any
    ) -> "MeshWork":
        """``seconds`` as a plan has them: of one rank for its share. Blocks are what the first
        number in names counts."""
        numbered: dict[str, list[Shape]] = {}
        first: list[Shape] = []
        last: list[Shape] = []
        for shape in model.shapes:
            parts = shape.name.split(".")
            at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
            if at is not None:
                numbered.setdefault(".".join(parts[: at + 1]), []).append(shape)
            else:
                (last if numbered else first).append(shape)
        inside = [shape for shapes in numbered.values() for shape in shapes]
        flat = [s for s in inside if len(s.sizes) == 1] or inside
        width = Counter(shape.sizes[-1] for shape in flat).most_common(1)[0][0] if flat else 1
        return cls(
            Numel.of(first),
            tuple(map(Numel.of, numbered.values())),
            Numel.of(last),
            width,
            batch,
            length,
            0.95 * seconds / 3,
            0.95 * seconds * 2 / 3,
            0.05 * seconds,
            largest=max(s.numel for s in model.shapes),
            **more,
        )

    def fits(self, grid: Grid) -> str:
        """Reason that the model cannot be divided like this, or nothing."""
        replicas = grid.dp * grid.ep
        if grid.pp * self.interleave > len(self.blocks):
            return f"{len(self.blocks)} blocks make no {grid.pp * self.interleave} stages"
        if self.width % grid.tp:
            return f"width {self.width} is no multiple of tp {grid.tp}"
        if self.length % grid.sp:
            return f"length {self.length} is no multiple of sp {grid.sp}"
        if grid.ep > 1 and not self.has_experts:
            return "no parameter is named after experts"
        if self.experts % grid.ep:
            return f"{self.experts} experts are no multiple of ep {grid.ep}"
        if self.batch % (replicas * self.micro):
            return f"a batch of {self.batch} is no multiple of {replicas} replicas × {self.micro}"
        return ""


@dataclass(frozen=True)
class MeshStep:
    """A step of one grid; seconds of its parts that nothing hides, and bytes of one rank."""

    grid: Grid
    dims: MeshDims
    order: tuple[int, ...]  # the rank of each place, in the order of ``AXES``
    seconds: float
    parts: Mapping[str, float]  # compute, bubble and the axes
    sent: Mapping[str, float]  # by axis, bytes of the rank that sends most
    between: float  # bytes out of the busiest node
    memory: float  # bytes of the rank that has most
    layers: tuple[int, ...]  # blocks of each stage
    batches: tuple[int, ...]  # sequences of each replica
    limit: float = field(default=np.inf)

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit

    @property
    def mesh(self) -> dict[str, int]:
        """Dimensions of the mesh that ``compress`` takes: ranks that average the same gradients are
        one."""
        named = {
            "pp": self.grid.pp,
            "dp": self.grid.dp * self.grid.ep * self.grid.sp,
            "tp": self.grid.tp,
        }
        return {name: n for name, n in named.items() if n > 1} or {"dp": 1}

    @property
    def call(self) -> str:
        """Lines to copy into a program: the mesh and what it compresses. For axes of sequences and
        experts, another mesh of the same ranks has their groups."""
        natural = self.order == tuple(range(self.grid.size))
        ranks = (
            f"torch.arange({self.grid.size})" if natural else f"torch.tensor({list(self.order)})"
        )
        lines = [*wrap(f"ranks = {ranks}", 96), f"mesh = {device_mesh(self.mesh)}"]
        if self.grid.sp > 1 or self.grid.ep > 1:
            lines.append(f"parts = {device_mesh(self.grid._asdict())}")
        given = {
            name: getattr(self.dims, name) for name in ("dp", "pp") if self.mesh.get(name, 1) > 1
        }
        dims = ", ".join(f'"{name}": "{codec}"' for name, codec in given.items())
        if self.grid.ep > 1:
            names = [name for name in ("dp", "sp") if getattr(self.grid, name) > 1]
            same = f'parts["{names[0]}"]' if len(names) == 1 else 'parts["dp", "sp"]._flatten()'
            same = f", replicas={same}.get_group()" if names else ""
            lines += [
                f'commpress.moe.parallelise(model, process_group=parts["ep"].get_group(){same},',
                f'                          codec=("{self.dims.ep}", "{self.dims.ep}"))',
                (
                    "model = torch.nn.parallel.DistributedDataParallel(model, "
                    'process_group=mesh["dp"].get_group())'
                ),
            ]
        return "\n".join(
            [*lines, f"states = commpress.compress(model, mesh=mesh, dims={{{dims}}})"]
        )

    def save(self, path: str | Path) -> None:
        FILE.write(
            path,
            {
                "grid": self.grid._asdict(),
                "dims": asdict(self.dims),
                "order": self.order,
                "mesh": self.mesh,
                "layers": self.layers,
                "batches": self.batches,
                "seconds": self.seconds,
                "memory": self.memory,
            },
        )

    @property
    def kinds(self) -> int:
        """Ways of parallelism beside data."""
        return sum(n > 1 for name, n in zip(AXES, self.grid, strict=True) if name != "dp")


def device_mesh(sizes: Mapping[str, int]) -> str:
    """The call that makes a ``DeviceMesh`` of these dimensions; axes of one rank are left out."""
    kept = {name: n for name, n in sizes.items() if n > 1} or {"dp": 1}
    shape, names = ", ".join(map(str, kept.values())), ", ".join(f'"{name}"' for name in kept)
    return (
        f'DeviceMesh("cpu", ranks.view({shape}), '
        f"mesh_dim_names=({names}{',' if len(kept) == 1 else ''}))"
    )


def every_grid(size: int, work: MeshWork) -> list[Grid]:
    """All that divide ``size`` ranks and this model."""
    of = [n for n in range(1, size + 1) if size % n == 0]
    found = [
        Grid(pp, size // (pp * ep * sp * tp), ep, sp, tp)
        for pp, ep, sp, tp in product(of, repeat=4)
        if size % (pp * ep * sp * tp) == 0
    ]
    return [grid for grid in found if not work.fits(grid)]


def predicted(
    grid: Grid,
    work: MeshWork,
    links: PairLinks,
    costs: Costs,
    dims: MeshDims | None = None,
    *,
    order: Sequence[int] | np.ndarray | None = None,
    speeds: Sequence[float] | None = None,
    limit: float = np.inf,
) -> MeshStep:
    """``order``: the rank of each place (ascending); ``speeds``: of each rank (all 1), which divide
    layers and batches."""
    if grid.size != links.size or (why := work.fits(grid)):
        raise InvalidArgument(
            why if grid.size == links.size else f"{grid} has {grid.size} ranks, links {links.size}"
        )
    return _Prediction(grid, work, links, costs, dims or MeshDims(), order, speeds).step(limit)


def chosen(found: Sequence[MeshStep]) -> MeshStep:
    """The one with the fewest kinds of parallelism beside data among those within ``NEAR`` of the
    fastest that fits."""
    able = [step for step in found if step.fits]
    if not able:
        least = min(found, key=lambda step: step.memory)
        raise InvalidArgument(
            f"no grid fits: the least is {least.memory / 1e9:.2f} GB on a rank, of {least.grid}"
        )
    near = min(step.seconds for step in able) / (1 - NEAR)
    return min(
        (step for step in able if step.seconds <= near),
        key=lambda step: (step.kinds, step.seconds, step.memory),
    )


# ---------------------------------------------------------------- a pipeline


def pipeline_seconds(
    forward: Sequence[float], backward: Sequence[float], edges: Sequence[float], count: int
) -> float:
    """1F1B of ``count`` micro-batches: seconds of a micro-batch on each stage, and of its way to
    the next stage and back.

    A link carries one message after the other, while stages compute.
    """
    size = len(forward)
    orders = []
    for stage in range(size):
        ahead = min(size - stage, count)
        order = [(False, i) for i in range(ahead)]
        for i in range(count):
            order.append((True, i))
            if ahead + i < count:
                order.append((False, ahead + i))
        orders.append(order)
    arrived = {(0, False, i): 0.0 for i in range(count)} | {
        (size - 1, True, i): 0.0 for i in range(count)
    }
    free, at, line = [0.0] * size, [0] * size, [[0.0] * size, [0.0] * size]
    left = 2 * count * size
    while left:
        for stage in range(size):
            while at[stage] < len(orders[stage]):
                turns, i = orders[stage][at[stage]]
                if (begin := arrived.get((stage, turns, i))) is None:
                    break
                took = backward[stage] if turns else forward[stage]
                free[stage] = end = max(free[stage], begin) + took
                at[stage] += 1
                left -= 1
                to = stage + (-1 if turns else 1)
                if 0 <= to < size:
                    edge = edges[to] if turns else edges[stage]
                    line[turns][stage] = max(line[turns][stage], end) + edge
                    arrived[to, turns, i] = line[turns][stage]
    return max(free)


# ---------------------------------------------------------------- one grid


class _Prediction:
    def __init__(
        self,
        grid: Grid,
        work: MeshWork,
        links: PairLinks,
        costs: Costs,
        dims: MeshDims,
        order: Sequence[int] | np.ndarray | None,
        speeds: Sequence[float] | None,
    ) -> None:
        self.grid, self.work, self.links, self.costs, self.dims = grid, work, links, costs, dims
        self.order = np.arange(grid.size) if order is None else np.asarray(order)
        speed = np.ones(grid.size) if speeds is None else np.asarray(speeds, float)
        # [stage, replica]
        placed = speed[self.order].reshape(grid.pp, grid.dp * grid.ep, -1).min(axis=2)
        self.stage_speeds = placed
        self.layers = tuple(stages(work.costs, [float(s) for s in placed.min(axis=1)]))
        self.ranges = np.cumsum([0, *self.layers])
        self.replicas = grid.dp * grid.ep
        units = [work.batch // work.micro // self.replicas] * self.replicas
        if speeds is not None:
            units = shares(sum(units), placed.min(axis=0).tolist(), least=1)
        self.batches = tuple(n * work.micro for n in units)
        self.counts = units
        self.tokens = work.micro * work.length / grid.sp  # of a micro-batch on a rank
        self.sent: dict[str, float] = dict.fromkeys(AXES, 0.0)
        self.leaving = 0.0

    def step(self, limit: float) -> MeshStep:
        work, grid = self.work, self.grid
        usual = work.batch / self.replicas / work.micro
        share = np.array(
            [sum(work.costs[a:b]) for a, b in zip(self.ranges, self.ranges[1:], strict=False)]
        ) / sum(work.costs)
        units = share * grid.pp / usual
        per_block = {axis: getattr(self, f"_{axis}")() for axis in ("tp", "sp", "ep")}
        extra = [
            sum(self._blocks(axis, s) * took for axis, (took, _) in per_block.items())
            for s in range(grid.pp)
        ]
        extra_back = [
            sum(self._blocks(axis, s) * took for axis, (_, took) in per_block.items())
            for s in range(grid.pp)
        ]
        edges = self._edges()
        most, bare = 0.0, 0.0
        alone: list[float] = []
        for r in range(self.replicas):
            f = [units[s] * work.forward / self.stage_speeds[s, r] for s in range(grid.pp)]
            b = [units[s] * work.backward / self.stage_speeds[s, r] for s in range(grid.pp)]
            both = (
                [f[s] + extra[s] for s in range(grid.pp)],
                [b[s] + extra_back[s] for s in range(grid.pp)],
            )
            took = self._pipeline(*both, edges, self.counts[r])
            if took > most:
                most, bare = took, self._pipeline(*both, [0.0] * len(edges), self.counts[r])
                alone = [self.counts[r] * (f[s] + b[s]) for s in range(grid.pp)]
                window = b[-1]
        busiest = int(
            np.argmax([a + self._count(extra, extra_back, s) for s, a in enumerate(alone)])
        )
        parts = {"compute": alone[busiest]}
        for axis, (there, back) in per_block.items():
            parts[axis] = max(self.counts) * self._blocks(axis, busiest) * (there + back)
        parts["bubble"] = max(bare - sum(parts.values()), 0.0)
        parts["pp"] = most - bare
        parts["dp"] = self._gradients(window if grid.pp == 1 else 0.0)
        held = max(self._held(s) for s in range(grid.pp))
        parts["compute"] += (
            work.optimizer
            * held
            / max(sum(n.whole for n in (work.first, *work.blocks, work.last)), 1)
        )
        return MeshStep(
            grid,
            self.dims,
            tuple(int(r) for r in self.order),
            sum(parts.values()),
            parts,
            self.sent,
            self.leaving,
            max(self._memory(s) for s in range(grid.pp)),
            self.layers,
            self.batches,
            limit,
        )

    def _pipeline(
        self, forward: list[float], backward: list[float], edges: list[float], count: int
    ) -> float:
        """With several stages on each rank, they are shorter, and so is what is waited for them."""
        took = pipeline_seconds(forward, backward, edges, count)
        steady = count * max(f + b for f, b in zip(forward, backward, strict=True))
        return steady + max(took - steady, 0.0) / self.work.interleave

    def _count(self, extra: list[float], extra_back: list[float], stage: int) -> float:
        return max(self.counts) * (extra[stage] + extra_back[stage])

    def _blocks(self, axis: str, stage: int) -> int:
        blocks = self.work.blocks[self.ranges[stage] : self.ranges[stage + 1]]
        return sum(bool(block.experts) for block in blocks) if axis == "ep" else len(blocks)

    # ----------------------------------- traffic of a micro-batch: (forward, backward) of one block

    def _tp(self) -> tuple[float, float]:
        took = 2 * self._ring(
            "tp", self.tokens * self.work.width * self.work.element, times=4 * self._micro_blocks()
        )
        return took, took

    def _sp(self) -> tuple[float, float]:
        n = self.grid.sp
        if n == 1:
            return 0.0, 0.0
        groups = self.grid.groups(self.order, "sp")
        nbytes = 2 * self.tokens * self.work.width / self.grid.tp * self.work.element
        took = (n - 1) * self.links.seconds(groups.ravel(), np.roll(groups, -1, 1).ravel(), nbytes)
        self._sends(
            "sp",
            groups.ravel(),
            np.roll(groups, -1, 1).ravel(),
            nbytes,
            3 * (n - 1) * self._micro_blocks(),
        )
        return took, 2 * took

    def _ep(self) -> tuple[float, float]:
        if self.grid.ep == 1:
            return 0.0, 0.0
        work, blocks = self.work, max(self._blocks("ep", s) for s in range(self.grid.pp))
        ways = [
            ExpertWay(
                tuple(group),
                tuple(self.links.node[group]),
                self.tokens,
                work.width,
                work.experts_per_token,
                work.experts,
                self.dims.ep,
                work.element,
            )
            for group in self.grid.groups(self.order, "ep").tolist()
        ]
        passes = [[way.forward for way in ways], [way.backward for way in ways]]
        every = [hop for each in passes for hops in each for hop in hops]
        source, sink, nbytes = (np.concatenate(column) for column in zip(*every, strict=True))
        times = max(self.counts) * blocks
        self.sent["ep"] += float(np.bincount(source, nbytes).max()) * times
        self.leaving += self.links.leaving_of(source, sink, nbytes) * times
        coded = ways[0].coded(self.costs)
        there, back = (hop_seconds(each, self.links) + coded for each in passes)
        return there, back

    def _micro_blocks(self) -> int:
        return max(self.counts) * max(self.layers)

    def _ring(self, axis: str, nbytes: float, *, times: int) -> float:
        groups = self.grid.groups(self.order, axis)
        n = groups.shape[1]
        if n == 1:
            return 0.0
        source, sink = groups.ravel(), np.roll(groups, -1, 1).ravel()
        self._sends(axis, source, sink, nbytes / n, 2 * (n - 1) * times)
        return 2 * (n - 1) * self.links.seconds(source, sink, nbytes / n)

    def _edges(self) -> list[float]:
        """Of each stage's activations to the next."""
        grid, codec = self.grid, codec_named(self.dims.pp)
        if grid.pp == 1:
            return []
        numel = int(self.tokens) * self.work.width
        nbytes = self.work.element * numel if codec.lossless else codec.row_bytes(numel)
        cost = (
            0.0
            if codec.lossless
            else numel * (self.costs.of(codec.kind).encode + self.costs.of(codec.kind).decode)
        )
        lanes = self.order.reshape(grid.pp, -1)
        for s in range(grid.pp - 1):
            self._sends(
                "pp",
                lanes[s],
                lanes[s + 1],
                nbytes,
                (1 + (s > 0)) * max(self.counts) * self.work.interleave,
            )
        return [
            cost + self.links.seconds(lanes[s], lanes[s + 1], nbytes) for s in range(grid.pp - 1)
        ]

    # ------------------------------------------------------------ once per step

    def _gradients(self, window: float) -> float:
        """Exposed seconds of averaging what ranks hold alike."""
        took, nbytes = 0.0, 0.0
        for axes, which in ((("dp", "ep", "sp"), 0), (("dp", "sp"), 1)):
            numel = [self._elements(s)[which] for s in range(self.grid.pp)]
            if max(numel) and int(np.prod([getattr(self.grid, axis) for axis in axes])) > 1:
                took += self._reduced(axes, numel)
                nbytes += self.work.gradient * max(numel)
        last = took / max(nbytes / BUCKETS, 1.0)  # of the last bucket, when backward is done
        return max(took - window, min(last, took))

    def _reduced(self, axes: tuple[str, ...], numel: list[float]) -> float:
        codec = codec_named(self.dims.dp)
        # pp is outermost, so groups lie in the order of stages
        groups = self.grid.groups(self.order, *axes)
        n, each = groups.shape[1], len(groups) // self.grid.pp
        rows = [
            self.work.gradient * k / n if codec.lossless else codec.row_bytes(-(-int(k) // n))
            for k in numel
        ]
        source, sink = _all_to_all(groups)
        nbytes = np.repeat(rows, each * n * (n - 1))
        self._sends("dp", source, sink, max(rows), 2 * (n - 1), flows=n - 1)
        took = 2 * self.links.seconds(source, sink, nbytes)
        if codec.lossless:
            return took
        cost, k = self.costs.of(codec.kind), max(numel)
        return took + k * (cost.encode + cost.add + cost.encode / n + cost.decode)

    def _sends(
        self,
        axis: str,
        source: np.ndarray,
        sink: np.ndarray,
        nbytes: float,
        times: float,
        *,
        flows: int = 1,
    ) -> None:
        self.sent[axis] += nbytes * times
        self.leaving += self.links.leaving(source, sink, nbytes) * times / flows

    # ------------------------------------------------------------ memory

    def _elements(self, stage: int) -> tuple[float, float]:
        every = [*self.work.blocks[self.ranges[stage] : self.ranges[stage + 1]]]
        every += [self.work.first] * (stage == 0) + [self.work.last] * (stage == self.grid.pp - 1)
        found = [numel.on_a_rank(self.grid) for numel in every]
        return sum(a for a, _ in found), sum(b for _, b in found)

    def _held(self, stage: int) -> float:
        return sum(self._elements(stage))

    def _memory(self, stage: int) -> float:
        """State and what compression keeps; activations of the micro-batches that are under way on
        this stage."""
        work, grid = self.work, self.grid
        numel, n = self._held(stage), grid.dp * grid.ep * grid.sp
        whole, divided = work.kept
        under_way = min(grid.pp - stage, max(self.counts))
        activations = (
            self.tokens
            * work.width
            * work.element
            * (whole + divided / grid.tp)
            * self.layers[stage]
            * under_way
        )
        largest = 4 * work.largest / grid.tp
        return (
            work.state * numel
            + self._averaging(numel, n)
            + max(activations + largest, TEMPORARIES * largest)
        )

    def _averaging(self, numel: float, n: int) -> float:
        """Of ``compress`` between ``n`` ranks: buckets, residuals, and messages of the buckets that
        are under way at once."""
        if n == 1 or not self.work.gradient:
            return 0.0
        codec, gradient = codec_named(self.dims.dp), self.work.gradient
        bucket = min(max(BUCKETS / gradient, self.work.largest / self.grid.tp), numel)
        at_once = min(AT_ONCE, numel / bucket)
        message = (
            4.0 * bucket if codec.lossless else float(n * codec.row_bytes(-(-int(bucket) // n)))
        )
        copies = 4.0 * bucket if gradient < 4 else 0.0  # kernels add in float32
        # as they are, and as they will be
        residuals = 0.0 if codec.lossless else 8 * numel * (1 + 1 / n)
        return gradient * numel + residuals + at_once * ((2 + 1 / n) * message + copies)


def _all_to_all(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every member to every other of its group."""
    n = groups.shape[1]
    apart = ~np.eye(n, dtype=bool)
    pairs = np.broadcast_to(groups[:, :, None], (len(groups), n, n))[:, apart]
    return pairs.ravel(), np.broadcast_to(groups[:, None, :], (len(groups), n, n))[:, apart].ravel()
