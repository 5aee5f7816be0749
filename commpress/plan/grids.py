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

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import numpy as np

from commpress.codecs import Codec, codec_named
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
STATE = 16  # bytes of a parameter on a rank: weight, gradient, two moments


class Numel(NamedTuple):
    """Parameters: matrices, which tensor parallelism divides, vectors, which it does not, and
    experts."""

    matrices: int = 0
    vectors: int = 0
    experts: int = 0

    @classmethod
    def of(cls, shapes: Sequence[Shape]) -> "Numel":
        found = [0, 0, 0]
        for shape in shapes:
            found[2 if "expert" in shape.name else len(shape.sizes) < 2] += shape.numel
        return cls(*found)

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
    element: int = 4  # bytes of an activation, and of a gradient that is not compressed
    kept: tuple[float, float] = KEPT
    interleave: int = 1  # stages of a pipeline on each rank
    largest: int = 0  # elements of the largest parameter
    experts_per_token: int = 1
    experts: int = 0  # of a block, all ranks together; 0: many

    def __post_init__(self) -> None:
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
        """Costs of computing each block; the last has the head's, too."""
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
            block = re.match(r"(.+?\.)??\d+(?![^.])", shape.name)
            (numbered.setdefault(block[0], []) if block else last if numbered else first).append(
                shape
            )
        inside = [shape for shapes in numbered.values() for shape in shapes]
        flat = [s for s in inside if len(s.sizes) == 1] or inside or model.shapes
        width = Counter(shape.sizes[-1] for shape in flat).most_common(1)[0][0]
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
        pp, dp, ep, sp, tp = self.grid
        return several({"pp": pp, "dp": dp * ep * sp, "tp": tp})

    @property
    def call(self) -> str:
        """Lines to copy into a program: the mesh and what it compresses. For axes of sequences and
        experts, another mesh of the same ranks has their groups."""
        ranks = f"torch.tensor({list(self.order)})"
        if self.order == tuple(range(self.grid.size)):
            ranks = f"torch.arange({self.grid.size})"
        lines = [*wrap(f"ranks = {ranks}", 96), f"mesh = {device_mesh(self.mesh)}"]
        if self.grid.sp > 1 or self.grid.ep > 1:
            lines.append(f"parts = {device_mesh(self.grid._asdict())}")
        dims = ", ".join(
            f'"{name}": "{getattr(self.dims, name)}"'
            for name in ("dp", "pp")
            if self.mesh.get(name, 1) > 1
        )
        if self.grid.ep > 1:
            names = [f'"{name}"' for name in ("dp", "sp") if getattr(self.grid, name) > 1]
            same = f"parts[{', '.join(names)}]" + "._flatten()" * (len(names) > 1)
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
        names = ("order", "mesh", "layers", "batches", "seconds", "memory")
        content = {"grid": self.grid._asdict(), "dims": asdict(self.dims)}
        FILE.write(path, content | {name: getattr(self, name) for name in names})

    @property
    def kinds(self) -> int:
        """Ways of parallelism beside data."""
        return sum(n > 1 for name, n in zip(AXES, self.grid, strict=True) if name != "dp")


def device_mesh(sizes: Mapping[str, int]) -> str:
    """The call that makes a ``DeviceMesh`` of these dimensions; axes of one rank are left out."""
    kept = several(sizes)
    shape, names = ", ".join(map(str, kept.values())), str(tuple(kept)).replace("'", '"')
    return f'DeviceMesh("cpu", ranks.view({shape}), mesh_dim_names={names})'


def several(sizes: Mapping[str, int]) -> dict[str, int]:
    """The dimensions of more than one rank, or one of all."""
    return {name: n for name, n in sizes.items() if n > 1} or {"dp": 1}


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
    places = np.arange(grid.size) if order is None else np.asarray(order)
    speed = np.ones(grid.size) if speeds is None else np.asarray(speeds, float)
    return _Prediction(grid, work, links, costs, dims or MeshDims(), places, speed).step(limit)


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
    took, step = (forward, backward), (1, -1)
    orders = [list(_one_forward_one_backward(size - stage, count)) for stage in range(size)]
    arrived = {(end, turns, i): 0.0 for end, turns in ((0, 0), (size - 1, 1)) for i in range(count)}
    free, at, line = [0.0] * size, [0] * size, [[0.0] * size, [0.0] * size]
    while any(at[stage] < 2 * count for stage in range(size)):
        for stage in range(size):
            while at[stage] < 2 * count and (stage, *orders[stage][at[stage]]) in arrived:
                turns, i = orders[stage][at[stage]]
                free[stage] = max(free[stage], arrived[stage, turns, i]) + took[turns][stage]
                at[stage] += 1
                to = stage + step[turns]
                if 0 <= to < size:
                    sent = max(line[turns][stage], free[stage]) + edges[min(stage, to)]
                    line[turns][stage] = arrived[to, turns, i] = sent
    return max(free)


def _one_forward_one_backward(ahead: int, count: int) -> Iterator[tuple[int, int]]:
    """(0: forward, 1: backward; micro-batch) of a stage that is so many forwards ahead."""
    ahead = min(ahead, count)
    yield from ((0, i) for i in range(ahead))
    for i in range(count):
        yield 1, i
        if ahead + i < count:
            yield 0, ahead + i


# ---------------------------------------------------------------- one grid


@dataclass
class _Prediction:
    grid: Grid
    work: MeshWork
    links: PairLinks
    costs: Costs
    dims: MeshDims
    order: np.ndarray
    speed: np.ndarray  # of each rank

    def __post_init__(self) -> None:
        grid, work = self.grid, self.work
        # [stage, replica]
        self.speeds = self.speed[self.order].reshape(grid.pp, grid.dp * grid.ep, -1).min(axis=2)
        self.layers = tuple(stages(work.costs, self.speeds.min(axis=1).tolist()))
        self.ranges = list(pairwise(np.cumsum([0, *self.layers]).tolist()))
        sparse = [sum(block.experts > 0 for block in work.blocks[a:b]) for a, b in self.ranges]
        self.blocks = {"tp": self.layers, "sp": self.layers, "ep": sparse}  # that send, by stage
        # micro-batches
        self.counts = shares(work.batch // work.micro, self.speeds.min(axis=0).tolist(), least=1)
        self.turns = max(self.counts)
        self.tokens = work.micro * work.length / grid.sp  # of a micro-batch on a rank
        self.activation = self.tokens * work.width * work.element  # bytes
        self.held = [self._elements(stage) for stage in range(grid.pp)]
        self.sent: dict[str, float] = dict.fromkeys(AXES, 0.0)
        self.leaving = 0.0

    def step(self, limit: float) -> MeshStep:
        work, grid = self.work, self.grid
        usual = work.batch / len(self.counts) / work.micro
        share = np.array([sum(work.costs[a:b]) for a, b in self.ranges]) / sum(work.costs)
        per_block = self._rings() | {"ep": self._experts()}
        # [forward and backward, stage]: seconds of a micro-batch beside computing
        each = (np.outer(both, self.blocks[axis]) for axis, both in per_block.items())
        beside = sum(each, np.zeros((2, grid.pp)))
        edges = self._edges()
        most = 0.0
        for speed, count in zip(self.speeds.T, self.counts, strict=True):
            own = np.outer((work.forward, work.backward), share * grid.pp / usual) / speed
            took = self._pipeline(own + beside, edges, count)
            if took > most:
                most, bare = took, self._pipeline(own + beside, [0.0] * len(edges), count)
                alone, window = count * own.sum(axis=0), own[1, -1]
        busiest = int(np.argmax(alone + self.turns * beside.sum(axis=0)))
        parts = {"compute": float(alone[busiest])}
        for axis, both in per_block.items():
            parts[axis] = self.turns * self.blocks[axis][busiest] * sum(both)
        parts["bubble"] = max(bare - sum(parts.values()), 0.0)
        parts["pp"] = most - bare
        parts["dp"] = self._gradients(window if grid.pp == 1 else 0.0)
        numel = max(sum(n.whole for n in (work.first, *work.blocks, work.last)), 1)
        parts["compute"] += work.optimizer * max(map(sum, self.held)) / numel
        return MeshStep(
            grid,
            self.dims,
            tuple(self.order.tolist()),
            sum(parts.values()),
            parts,
            self.sent,
            self.leaving,
            max(map(self._memory, range(grid.pp))),
            self.layers,
            tuple(count * work.micro for count in self.counts),
            limit,
        )

    def _pipeline(self, passes: np.ndarray, edges: list[float], count: int) -> float:
        """Seconds of 1F1B. Several stages on each rank are shorter, and so is the wait for them."""
        forward, backward = passes.tolist()
        took = pipeline_seconds(forward, backward, edges, count)
        steady = count * float(passes.sum(axis=0).max())
        return steady + max(took - steady, 0.0) / self.work.interleave

    def _sends(
        self, axis: str, source: np.ndarray, sink: np.ndarray, nbytes: Any, times: float
    ) -> float:
        """Seconds of transfers that begin at once; counts their bytes, so many times a step."""
        nbytes = np.broadcast_to(nbytes, len(source))
        self.sent[axis] += float(np.bincount(source, nbytes).max()) * times
        self.leaving += self.links.leaving(source, sink, nbytes) * times
        return self.links.seconds(source, sink, nbytes)

    # ----------------------------------- traffic of a micro-batch: (forward, backward) of one block

    def _rings(self) -> dict[str, tuple[float, float]]:
        """Passes to the next of a group: activations of tensor, keys and values of sequence
        parallelism."""
        found, blocks = {}, self.turns * max(self.layers)
        for axis, turns, size, forward, backward in (
            ("tp", 2 * (self.grid.tp - 1), 1, 2, 2),
            ("sp", self.grid.sp - 1, 2, 1, 2),
        ):
            groups, took = self.grid.groups(self.order, axis), 0.0
            if turns:
                ends = groups.ravel(), np.roll(groups, -1, 1).ravel()
                nbytes = size * self.activation / self.grid.tp
                took = turns * self._sends(
                    axis, *ends, nbytes, (forward + backward) * turns * blocks
                )
            found[axis] = forward * took, backward * took
        return found

    def _experts(self) -> tuple[float, float]:
        if self.grid.ep == 1:
            return 0.0, 0.0
        work = self.work
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
        self._sends("ep", source, sink, nbytes, self.turns * max(self.blocks["ep"]))
        coded = ways[0].coded(self.costs)
        there, back = (hop_seconds(each, self.links) + coded for each in passes)
        return there, back

    def _edges(self) -> list[float]:
        """Seconds of each stage's activations on their way to the next."""
        codec, numel = codec_named(self.dims.pp), int(self.tokens) * self.work.width
        nbytes, cost = _row(codec, numel, 1, self.work.element), 0.0
        if not codec.lossless:
            each = self.costs.of(codec.kind)
            cost = numel * (each.encode + each.decode)
        lanes, times = self.order.reshape(self.grid.pp, -1), self.turns * self.work.interleave
        return [
            cost + self._sends("pp", here, there, nbytes, (1 + (stage > 0)) * times)
            for stage, (here, there) in enumerate(pairwise(lanes))
        ]

    # ------------------------------------------------------------ once per step

    def _gradients(self, window: float) -> float:
        """Exposed seconds of averaging what ranks hold alike."""
        took, nbytes = 0.0, 0.0
        alike = zip((("dp", "ep", "sp"), ("dp", "sp")), zip(*self.held, strict=True), strict=True)
        for axes, numel in alike:
            # pp is outermost, so groups lie in the order of stages
            groups = self.grid.groups(self.order, *axes)
            if max(numel) and groups.shape[1] > 1:
                took += self._reduced(groups, numel)
                nbytes += self.work.element * max(numel)
        last = took / max(nbytes / BUCKETS, 1.0)  # of the last bucket, when backward is done
        return max(took - window, min(last, took))

    def _reduced(self, groups: np.ndarray, numel: Sequence[float]) -> float:
        """Every member sends a row to every other of its group, and gets the means back."""
        codec, n = codec_named(self.dims.dp), groups.shape[1]
        rows = [_row(codec, k, n, self.work.element) for k in numel]
        a, b = np.nonzero(~np.eye(n, dtype=bool))
        source, sink = groups[:, a].ravel(), groups[:, b].ravel()
        self._sends("dp", source, sink, max(rows), 2)
        took = 2 * self.links.seconds(source, sink, np.repeat(rows, len(source) // len(rows)))
        if codec.lossless:
            return took
        cost = self.costs.of(codec.kind)
        return took + max(numel) * (cost.encode + cost.add + cost.encode / n + cost.decode)

    # ------------------------------------------------------------ memory

    def _elements(self, stage: int) -> tuple[float, float]:
        """Elements of this stage that all data-parallel ranks have, and those of experts."""
        a, b = self.ranges[stage]
        every = [*self.work.blocks[a:b]]
        every += [self.work.first] * (stage == 0) + [self.work.last] * (stage == self.grid.pp - 1)
        alike, experts = zip(*(numel.on_a_rank(self.grid) for numel in every), strict=True)
        return sum(alike), sum(experts)

    def _memory(self, stage: int) -> float:
        """State and what compression keeps; activations of the micro-batches that are under way on
        this stage."""
        work, grid = self.work, self.grid
        numel, (whole, divided) = sum(self.held[stage]), work.kept
        under_way = self.layers[stage] * min(grid.pp - stage, self.turns)
        each = self.activation * (whole + divided / grid.tp)
        largest = 4 * work.largest / grid.tp
        return (
            STATE * numel
            + self._averaging(numel, grid.dp * grid.ep * grid.sp)
            + max(each * under_way + largest, TEMPORARIES * largest)
        )

    def _averaging(self, numel: float, n: int) -> float:
        """Bytes of ``compress`` between ``n`` ranks: buckets, residuals, and messages of the
        buckets that are under way at once."""
        if n == 1:
            return 0.0
        codec, gradient = codec_named(self.dims.dp), self.work.element
        bucket = min(max(BUCKETS / gradient, self.work.largest / self.grid.tp), numel)
        message = n * _row(codec, bucket, n, 4)
        copies = 4.0 * bucket if gradient < 4 else 0.0  # kernels add in float32
        # as they are, and as they will be
        residuals = 0.0 if codec.lossless else 8 * numel * (1 + 1 / n)
        at_once = min(AT_ONCE, numel / bucket)
        return gradient * numel + residuals + at_once * ((2 + 1 / n) * message + copies)


def _row(codec: Codec, numel: float, rows: int, element: int) -> float:
    """Bytes of one of so many rows of these elements."""
    return element * numel / rows if codec.lossless else codec.row_bytes(-(-int(numel) // rows))
