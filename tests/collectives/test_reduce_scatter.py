"""The compressed reduce-scatter and the all-gather of quantised shards, on simulated ranks: every
oracle, odd lengths."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import ByName, codec_named, policy_of
from commpress.codecs.family import NAMES
from commpress.collectives import reduce_scatter
from commpress.collectives.allreduce import Call, Workspace
from commpress.collectives.frame import HEADER
from commpress.collectives.reduce_scatter import Part, deals, decode_rows, gather_rows, reduce_rows
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.feedback import ErrorFeedback
from commpress.kernels.pieces import NUMEL, RESIDUAL, aligned
from commpress.kernels.reference import row_bytes
from recorded import Recorded
from test_allreduce import check_telescoping, gradients
from variants import few

# first dimension is dealt out
SHAPES = {"embed": (33, 8), "fc": (16, 24), "bias": (5,), "one": (1, 3)}


def layout(shapes, ranks):
    """Parts as FSDP2 lays them out: each rank ⌈first dimension / ranks⌉ slices of every
    parameter."""
    parts, at = [], 0
    for name, shape in shapes.items():
        width = -(-shape[0] // ranks) * int(np.prod(shape[1:], dtype=int))
        parts.append(Part(name, at, width, int(np.prod(shape))))
        at += width
    return parts


class World:
    """Ranks that reduce and gather buffers of ``numel`` elements, all parameters in a row."""

    def __init__(self, ranks, codec, shapes=SHAPES, *, feedback=True):
        self.size, self.parts, self.step = ranks, layout(shapes, ranks), 0
        self.stride = self.parts[-1].at + self.parts[-1].width
        self.numels = [part.numel for part in self.parts]
        self.numel = sum(self.numels)
        self.plans = [
            deals(self.parts, policy_of(codec), rank=r, ranks=ranks, feedback=feedback)
            for r in range(ranks)
        ]
        self.feedbacks = [
            [
                ErrorFeedback.zeros(d.every.pieces) if d.every.pieces.residual_numel else None
                for d in plan
            ]
            for plan in self.plans
        ]
        self.transports = [Recorded(t) for t in Loopback(ranks).transports()]
        self.calls = [
            (plan, Call(transport, Workspace(checksum=True)))
            for plan, transport in zip(self.plans, self.transports, strict=True)
        ]

    def rows(self, x):
        """``x`` as FSDP2 hands it over: row r holds slice r of every parameter, zeros where there
        is none."""
        rows = torch.zeros(self.size, self.stride, dtype=x.dtype)
        for part, values in zip(self.parts, x.split(self.numels), strict=True):
            padded = torch.zeros(self.size * part.width, dtype=x.dtype)
            padded[: part.numel] = values
            rows[:, part.at : part.at + part.width] = padded.view(self.size, part.width)
        return rows

    def whole(self, rows):
        """The inverse of ``rows``."""
        columns = [torch.cat([row[p.at : p.at + p.width] for row in rows]) for p in self.parts]
        return torch.cat([c[: p.numel] for c, p in zip(columns, self.parts, strict=True)])

    def run(self, steps):
        """``steps`` of each rank, with what all calls have in common."""
        self.step += 1
        now = {"sequence": 100 * self.step, "key": self.step}
        return simulate(
            [steps(r, plan, call._replace(**now)) for r, (plan, call) in enumerate(self.calls)]
        )

    def reduce(self, inputs, gain=1.0):
        """The mean, put together from what each rank owns."""
        outs = [torch.zeros(self.stride) for _ in range(self.size)]

        def steps(r, plan, call):
            buffer = self.rows(inputs[r]).view(-1)
            return reduce_rows(buffer, outs[r], self.feedbacks[r], plan, call._replace(gain=gain))

        outcomes = self.run(steps)
        self.finite = [all(o.finite for o in rank) for rank in outcomes]
        for outcome in (o for rank in outcomes for o in rank):
            outcome.commit() if outcome.finite else outcome.discard()
        return [self.whole(outs)]

    def gather(self, rows, bases=None):
        outs = [torch.zeros(self.size * len(rows[0])) for _ in range(self.size)]
        self.run(lambda r, *call: gather_rows(rows[r], outs[r], *call, base=bases and bases[r]))
        return outs

    def sent(self):
        return [f.sent for feedbacks in self.feedbacks for f in feedbacks if f is not None]

    def total_residual(self):
        """The mean over the ranks; float64."""
        total = {p.name: np.zeros(p.numel) for p in self.parts}
        for plan, feedbacks in zip(self.plans, self.feedbacks, strict=True):
            for deal, feedback in zip(plan, feedbacks, strict=True):
                if feedback is None:
                    continue
                pieces = deal.every.pieces
                feedback.settle(pieces)
                for (name, offset), line in zip(deal.every.keys, pieces.table, strict=True):
                    if line[RESIDUAL] >= 0:
                        sent = feedback.sent[line[RESIDUAL] :][: line[NUMEL]].double().numpy()
                        total[name][offset : offset + line[NUMEL]] += sent / self.size
        return np.concatenate([*total.values()])


def integers(world, seed):
    """Inputs whose sums are exact."""
    return [torch.round(x * 8) for x in gradients(world.size, world.numel, seed)]


def in_small_messages(monkeypatch, message):
    monkeypatch.setattr(reduce_scatter, "PIECE", 40)
    monkeypatch.setattr(reduce_scatter, "MESSAGE", message)


@pytest.mark.parametrize("ranks", [1, 3, 7, 33])
def test_the_codec_none_gives_the_exact_mean(ranks):
    world = World(ranks, "none")
    inputs = integers(world, 1)
    assert torch.equal(world.reduce(inputs)[0], torch.stack(inputs).sum(0) / ranks)


@pytest.mark.parametrize(("codec", "ranks"), few(sorted(NAMES), [2, 3, 4]))
def test_nothing_is_lost(ranks, codec, monkeypatch):
    """In several messages."""
    in_small_messages(monkeypatch, 200 * ranks)
    world = World(ranks, codec)
    assert len(world.plans[0]) > 1 or ranks > 3
    check_telescoping(world, 12)
    assert codec != "none" or not world.total_residual().any()


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 9),
    codec=st.sampled_from(sorted(NAMES)),
    first=st.integers(1, 40),
    rest=st.integers(1, 40),
)
def test_any_shape(ranks, codec, first, rest):
    check_telescoping(World(ranks, codec, {"w": (first, rest), "b": (first,)}), 1)


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize(
    ("codec", "bound"),
    [("none", 0.0), ("bf16", 2**-8), ("int8", 0.5 / 127), ("int4", 0.5 / 7), ("fp8", 2**-4)],
)
def test_gathered_weights_are_the_same_bits_on_every_rank(ranks, codec, bound):
    world = World(ranks, codec)
    (x, *_) = gradients(1, world.numel, 0)
    outs = world.gather(list(world.rows(x)))
    assert all(torch.equal(out, outs[0]) for out in outs)
    got = world.whole(outs[0].view(ranks, -1))
    for a, b in zip(got.split(world.numels), x.split(world.numels), strict=True):
        assert float((a - b).abs().max()) <= bound * float(b.abs().max()) * 1.0001


def test_bfloat16_gives_what_float32_and_a_cast_give(monkeypatch):
    """Rows and outputs of half the width, added to or not, and rows that are kept: in several
    messages."""
    in_small_messages(monkeypatch, 600)
    world = World(3, "int4", feedback=False)
    assert len(world.plans[0]) > 1
    narrow = world.rows(gradients(1, world.numel, 0)[0].bfloat16())
    (out, *_) = world.gather(list(narrow.float()))
    held = torch.randn(out.numel(), generator=torch.Generator().manual_seed(1)).bfloat16()
    for start, options in ((torch.zeros_like(held), {}), (held, {"add": True})):
        outs, kept = [start.clone() for _ in range(3)], [[], [], []]

        def steps(r, plan, call, outs=outs, kept=kept, options=options):
            return gather_rows(narrow[r], outs[r], plan, call, kept=kept[r], **options)

        world.run(steps)
        for r in range(3):
            again = torch.zeros(out.numel())
            decode_rows(kept[r], again, plan=world.plans[r], workspace=Workspace())
            assert torch.equal(again, out)
            assert torch.equal(outs[r], (start.float() + out).bfloat16())


def test_differences_converge_to_the_weights():
    world = World(3, "int4")
    rows = list(world.rows(gradients(1, world.numel, 0)[0]))
    bases, errors = [torch.zeros_like(r) for r in rows], []
    held = torch.zeros(3 * len(rows[0]))
    for _ in range(4):
        held += world.gather(rows, bases)[0]
        bases = list(held.view(3, -1))
        errors.append(float((held - torch.cat(rows)).abs().max()))
    assert all(b < 0.2 * a for a, b in itertools.pairwise(errors) if a > 1e-6)
    assert errors[1] > 0
    assert errors[3] < 1e-2 * errors[0]


def test_a_rank_that_is_not_finite_spoils_nobodys_residual():
    world = World(3, "int4")
    world.reduce(gradients(3, world.numel, 0))
    before, inputs = [sent.clone() for sent in world.sent()], gradients(3, world.numel, 1)
    inputs[1][7] = float("inf")
    world.reduce(inputs)
    assert world.finite == [False] * 3
    assert all(map(torch.equal, world.sent(), before))


def test_gain_scales_the_output_and_the_residual():
    """With gain = 1 / loss scale, residuals are in unscaled units."""
    one, two = World(2, "int8"), World(2, "int8")
    for step in range(3):
        inputs = gradients(2, one.numel, step)
        scaled = two.reduce([64.0 * x for x in inputs], gain=1 / 64)[0]
        assert torch.equal(one.reduce(inputs)[0], scaled)
    assert np.array_equal(one.total_residual(), two.total_residual())


def test_bytes_are_what_the_codec_says():
    world = World(4, ByName({"bias": "none"}, "int8"))
    world.reduce(gradients(4, world.numel, 0))
    want = HEADER
    for part in world.parts:
        codec = codec_named("none" if part.name == "bias" else "int8")
        width = -(-part.width // 8) * 8
        want += aligned(row_bytes(codec.kind, width, codec.block))
    assert [t.sent_bytes for t in world.transports] == [3 * want] * 4
    assert [t.operations for t in world.transports] == [["all_to_all"]] * 4


@pytest.mark.parametrize(("nodes", "local"), [(3, 2), (2, 4)])
def test_two_hops_with_the_codec_none_equal_one(nodes, local):
    """First to the rank with the owner's place in this node, then to the owner."""
    world, policy = World(nodes * local, "none"), policy_of("none")
    parts, stride, inputs = world.parts, world.stride, integers(world, 5)
    switches = [Loopback(local) for _ in range(nodes)]
    between = [Loopback(nodes) for _ in range(local)]

    def hop(buffer, out, plan, transport):
        return reduce_rows(buffer, out, [None] * len(plan), plan, Call(transport, Workspace()))

    def rank_steps(rank):
        node, place = divmod(rank, local)
        bases = [[n * local + i for n in range(nodes)] for i in range(local)]
        first = deals(parts, policy, rank=place, ranks=local, stride=stride, bases=bases)
        second = reduce_scatter.second_hop(parts, policy, bases[place], rank=node)
        middle, out = torch.zeros(nodes * stride), torch.zeros(stride)
        buffer = world.rows(inputs[rank]).view(-1)
        yield from hop(buffer, middle, first, switches[node].transport(place))
        yield from hop(middle, out, second, between[place].transport(node))
        return out

    outs = simulate([rank_steps(rank) for rank in range(world.size)])
    assert torch.equal(world.whole(outs), torch.stack(inputs).sum(0) / world.size)
