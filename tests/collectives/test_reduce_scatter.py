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
from commpress.collectives.allreduce import Workspace
from commpress.collectives.frame import HEADER
from commpress.collectives.reduce_scatter import Part, deals, decode_rows, gather_rows, reduce_rows
from commpress.collectives.transports.loopback import Loopback, Recorded, simulate
from commpress.feedback import ErrorFeedback
from commpress.kernels.reference import row_bytes

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


def flatten(tensors, parts, ranks):
    """The buffer that FSDP2 hands over: row r holds slice r of every parameter, zeros where there
    is none."""
    rows = torch.zeros(ranks, parts[-1].at + parts[-1].width)
    for tensor, part in zip(tensors, parts, strict=True):
        padded = torch.zeros(ranks * part.width)
        padded[: part.numel] = tensor
        rows[:, part.at : part.at + part.width] = padded.view(ranks, part.width)
    return rows.view(-1)


def unflatten(rows, parts):
    return [torch.cat([row[p.at : p.at + p.width] for row in rows])[: p.numel] for p in parts]


class World:
    def __init__(self, ranks, codec, shapes=SHAPES, *, feedback=True):
        self.ranks, self.parts = ranks, layout(shapes, ranks)
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
        self.workspaces = [Workspace(checksum=True) for _ in range(ranks)]
        self.transports = [Recorded(t) for t in Loopback(ranks).transports()]
        self.step = 0

    def inputs(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return [
            [torch.randn(p.numel, generator=generator) for p in self.parts]
            for _ in range(self.ranks)
        ]

    def reduce(self, inputs, gain=1.0):
        """Means by parameter, put together from what each rank owns."""
        stride = self.parts[-1].at + self.parts[-1].width
        outs = [torch.zeros(stride) for _ in range(self.ranks)]
        outcomes = simulate(
            [
                reduce_rows(
                    flatten(inputs[r], self.parts, self.ranks),
                    outs[r],
                    self.feedbacks[r],
                    plan=self.plans[r],
                    transport=self.transports[r],
                    workspace=self.workspaces[r],
                    sequence=self.step * 100,
                    key=self.step,
                    gain=gain,
                )
                for r in range(self.ranks)
            ]
        )
        self.step += 1
        self.finite = [all(o.finite for o in rank) for rank in outcomes]
        for outcome in (o for rank in outcomes for o in rank):
            if outcome.finite:
                outcome.commit()
            else:
                outcome.discard()
        return unflatten(outs, self.parts)

    def gather(self, rows, bases=None):
        outs = [torch.zeros(self.ranks * len(rows[0])) for _ in range(self.ranks)]
        simulate(
            [
                gather_rows(
                    rows[r],
                    outs[r],
                    plan=self.plans[r],
                    transport=self.transports[r],
                    workspace=self.workspaces[r],
                    sequence=self.step * 100,
                    base=bases and bases[r],
                )
                for r in range(self.ranks)
            ]
        )
        self.step += 1
        return outs

    def residual(self):
        """The mean over the ranks, by parameter; float64."""
        total = [np.zeros(p.numel) for p in self.parts]
        index = {p.name: i for i, p in enumerate(self.parts)}
        for plan, feedbacks in zip(self.plans, self.feedbacks, strict=True):
            for deal, feedback in zip(plan, feedbacks, strict=True):
                if feedback is None:
                    continue
                feedback.settle(deal.every.pieces)
                for (name, offset), line in zip(
                    deal.every.keys, deal.every.pieces.table, strict=True
                ):
                    if line[7] >= 0:
                        part = (
                            feedback.sent[line[7] : line[7] + line[1]].double().numpy() / self.ranks
                        )
                        total[index[name]][offset : offset + line[1]] += part
        return total


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 16, 33])
def test_the_codec_none_gives_the_exact_mean(ranks):
    world = World(ranks, "none")
    inputs = [[torch.round(t * 8) for t in rank] for rank in world.inputs(1)]  # sums are exact
    for got, *each in zip(world.reduce(inputs), *inputs, strict=True):
        assert torch.equal(got, torch.stack(each).sum(0) / ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("codec", sorted(NAMES))
def test_nothing_is_lost(ranks, codec, monkeypatch):
    """Σ outputs + R_T = Σ mean(inputs), in several messages."""
    monkeypatch.setattr(reduce_scatter, "PIECE", 40)
    monkeypatch.setattr(reduce_scatter, "MESSAGE", 200 * ranks)
    world = World(ranks, codec)
    assert len(world.plans[0]) > 1 or ranks > 3
    sums = [[np.zeros(p.numel), np.zeros(p.numel)] for p in world.parts]
    for step in range(12):
        inputs = world.inputs(step)
        for (given_, got), out, *each in zip(sums, world.reduce(inputs), *inputs, strict=True):
            given_ += torch.stack(each).double().mean(0).numpy()
            got += out.double().numpy()
    for (given_, got), left in zip(sums, world.residual(), strict=True):
        np.testing.assert_allclose(got + left, given_, atol=2e-5)
        if codec == "none":
            assert not left.any()


@pytest.mark.parametrize("codec", ["int8", "int4", "sign", "bf16"])
def test_feedback_beats_none_and_the_error_is_that_of_the_codec(codec):
    """One bit > four > eight > bf16 > 0: proof that the codec ran; the sum over steps stays close
    only with feedback."""
    with_, without = World(4, codec), World(4, codec, feedback=False)
    drift = [0.0, 0.0]
    inputs = with_.inputs(3)
    exact = [torch.stack(each).mean(0) for each in zip(*inputs, strict=True)]
    sums = [[torch.zeros_like(e) for e in exact] for _ in drift]
    for _ in range(30):
        for world, total in zip((with_, without), sums, strict=True):
            for t, out in zip(total, world.reduce(inputs), strict=True):
                t += out
    for i, total in enumerate(sums):
        drift[i] = (
            sum(float((t / 30 - e).square().sum()) for t, e in zip(total, exact, strict=True))
            ** 0.5
        )
    assert 0 < drift[0] < 0.3 * drift[1]


@settings(max_examples=40, deadline=None)
@given(
    ranks=st.integers(1, 9),
    codec=st.sampled_from(sorted(NAMES)),
    first=st.integers(1, 40),
    rest=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_any_shape(ranks, codec, first, rest, seed):
    world = World(ranks, codec, {"w": (first, rest), "b": (first,)})
    inputs = world.inputs(seed)
    for out, left, *each in zip(world.reduce(inputs), world.residual(), *inputs, strict=True):
        exact = torch.stack(each).double().mean(0).numpy()
        np.testing.assert_allclose(out.double().numpy() + left, exact, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "fp8"])
def test_gathered_weights_are_the_same_bits_on_every_rank(ranks, codec):
    world = World(ranks, codec)
    tensors = world.inputs(0)[0]
    rows = flatten(tensors, world.parts, ranks).view(ranks, -1)
    outs = world.gather(list(rows))
    for out in outs[1:]:
        assert torch.equal(out, outs[0])
    got = unflatten(outs[0].view(ranks, -1), world.parts)
    for name, a, b in zip(SHAPES, got, tensors, strict=True):
        bound = {"none": 0.0, "bf16": 2**-8, "int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 2**-4}[
            codec
        ]
        assert float((a - b).abs().max()) <= bound * float(b.abs().max()) * 1.0001, name
        if codec == "none":
            assert torch.equal(a, b)


def test_bfloat16_gives_what_float32_and_a_cast_give(monkeypatch):
    """Rows and outputs of half the width, added to or not, and rows that are kept: in several
    messages."""
    monkeypatch.setattr(reduce_scatter, "PIECE", 40)
    monkeypatch.setattr(reduce_scatter, "MESSAGE", 600)
    world = World(3, "int4", feedback=False)
    assert len(world.plans[0]) > 1
    narrow = flatten(world.inputs(0)[0], world.parts, 3).bfloat16().view(3, -1)
    (out, *_) = world.gather(list(narrow.float()))
    held = torch.randn(out.numel(), generator=torch.Generator().manual_seed(1)).bfloat16()
    outs, sums, kept = (
        [torch.zeros(out.numel()).bfloat16() for _ in range(3)],
        [held.clone() for _ in range(3)],
        [[], [], []],
    )
    for targets, options in ((outs, {}), (sums, {"add": True})):
        simulate(
            [
                gather_rows(
                    narrow[r],
                    targets[r],
                    plan=world.plans[r],
                    transport=world.transports[r],
                    workspace=world.workspaces[r],
                    sequence=1000 + 100 * len(options),
                    kept=kept[r],
                    **options,
                )
                for r in range(3)
            ]
        )
    for r in range(3):
        again = torch.zeros(out.numel())
        decode_rows(kept[r], again, plan=world.plans[r], workspace=world.workspaces[r])
        assert torch.equal(again, out)
        assert torch.equal(outs[r], out.bfloat16())
        assert torch.equal(sums[r], (held.float() + out).bfloat16())


def test_differences_converge_to_the_weights():
    world = World(3, "int4")
    tensors = world.inputs(0)[0]
    rows = list(flatten(tensors, world.parts, 3).view(3, -1))
    bases, errors = [torch.zeros_like(r) for r in rows], []
    held = torch.zeros(3 * len(rows[0]))
    for _ in range(4):
        held += world.gather(rows, bases)[0]
        bases = list(held.view(3, -1))
        errors.append(float((held - torch.cat(rows)).abs().max()))
    assert all(b < 0.2 * a for a, b in itertools.pairwise(errors) if a > 1e-6)
    assert errors[1] > 0
    assert errors[3] < 1e-2 * errors[0]


def test_bytes_are_what_the_codec_says():
    world = World(4, ByName({"bias": "none"}, "int8"))
    world.reduce(world.inputs(0))
    want = HEADER
    for part in world.parts:
        codec = codec_named("none" if part.name == "bias" else "int8")
        width = -(-part.width // 8) * 8
        want += -(-row_bytes(codec.kind, width, codec.block) // 8) * 8
    assert [t.sent_bytes for t in world.transports] == [3 * want] * 4
    assert [t.operations for t in world.transports] == [["all_to_all"]] * 4


def test_a_rank_that_is_not_finite_spoils_nobodys_residual():
    world = World(3, "int4")
    world.reduce(world.inputs(0))
    before = [[f.sent.clone() for f in feedbacks] for feedbacks in world.feedbacks]
    inputs = world.inputs(1)
    inputs[1][0][7] = float("inf")
    world.reduce(inputs)
    assert world.finite == [False] * 3
    for feedbacks, old in zip(world.feedbacks, before, strict=True):
        assert all(torch.equal(f.sent, o) for f, o in zip(feedbacks, old, strict=True))


def test_gain_scales_the_output_and_the_residual():
    """With gain = 1 / loss scale, residuals are in unscaled units."""
    one, two = World(2, "int8"), World(2, "int8")
    for step in range(3):
        inputs = one.inputs(step)
        plain = one.reduce(inputs)
        scaled = two.reduce([[64.0 * t for t in rank] for rank in inputs], gain=1 / 64)
        assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(one.residual(), two.residual(), strict=True))


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 2), (2, 4)])
def test_two_hops_with_the_codec_none_equal_one(nodes, local):
    """First to the rank with the owner's place in this node, then to the owner."""
    ranks = nodes * local
    parts = layout(SHAPES, ranks)
    stride = parts[-1].at + parts[-1].width
    flat = World(ranks, "none")
    inputs = [[torch.round(t * 8) for t in rank] for rank in flat.inputs(5)]
    outs = []
    switches = [Loopback(local) for _ in range(nodes)]
    between = [Loopback(nodes) for _ in range(local)]

    def rank_steps(rank):
        node, place = divmod(rank, local)
        bases = [[n * local + i for n in range(nodes)] for i in range(local)]
        first = deals(parts, policy_of("none"), rank=place, ranks=local, stride=stride, bases=bases)
        middle, out = torch.zeros(nodes * stride), torch.zeros(stride)
        yield from reduce_rows(
            flatten(inputs[rank], parts, ranks),
            middle,
            [None] * len(first),
            plan=first,
            transport=switches[node].transport(place),
            workspace=Workspace(),
            sequence=0,
        )
        second = reduce_scatter.second_hop(parts, policy_of("none"), bases[place], rank=node)
        yield from reduce_rows(
            middle,
            out,
            [None] * len(second),
            plan=second,
            transport=between[place].transport(node),
            workspace=Workspace(),
            sequence=1,
        )
        return out

    outs = simulate([rank_steps(rank) for rank in range(ranks)])
    for got, *each in zip(unflatten(outs, parts), *inputs, strict=True):
        assert torch.equal(got, torch.stack(each).sum(0) / ranks)
