"""Residuals as data: they follow their parameters through other messages, checkpoints and
mistakes."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.codecs import SignCodec, codec_named
from commpress.codecs.family import EXACT, NAMES
from commpress.codecs.policy import ByName, Same
from commpress.collectives.allreduce import Call, Workspace, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import StateMismatch
from commpress.feedback import ErrorFeedback, ResidualStore
from commpress.kernels.pieces import Piece, cut, width_of
from variants import few

CPU = torch.device("cpu")
NUMELS = {"a": 1, "b": 77, "c": 8, "d": 2500, "e": 640, "f": 333}
LAZY = SignCodec(block=0)  # one scale per row: its residuals are lazy


def grouped(names, policy, ranks, *, feedback=True):
    """The messages of one bucket that holds the tensors ``names``, and where each lies in it."""
    spans, at = [], 0
    for name in names:
        spans.append(Span(name, at, NUMELS[name]))
        at += NUMELS[name]
    return messages(spans, policy, ranks, feedback=feedback), spans


def attach(store, names, ranks=2, codec=LAZY):
    plan, _ = grouped(names, Same(codec), ranks)
    return [store.attach(m.keys, m.pieces, CPU) for m in plan]


def fill(feedbacks, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for feedback in feedbacks:
        for tensor in (
            feedback.sent,
            feedback.reduced,
            feedback.sent_scale,
            feedback.reduced_scale,
        ):
            if tensor is not None:
                tensor.copy_(torch.randn(tensor.shape, generator=generator).abs() + 0.1)


def copied(store):
    return {key: (sent.clone(), reduced.clone()) for key, sent, reduced in store.places()}


def assert_same(one, two):
    assert one.keys() == two.keys()
    for key in one:
        assert torch.equal(one[key][0], two[key][0]), key
        assert torch.equal(one[key][1], two[key][1]), key


# ---------------------------------------------------------------- one message


def test_settling_makes_a_lazy_residual_plain_once():
    """Row by row c − s·sgn(c); what is plain stays as it is."""
    # rows of 16 and 8 elements
    pieces = cut([Piece(0, 20, LAZY.kind, 0), Piece(20, 5, NAMES["sign"].kind, 2048)], 2)
    feedback = ErrorFeedback.zeros(pieces)
    assert feedback.reduced.numel() == width_of(20, 2) + width_of(5, 2)
    feedback.sent.copy_(torch.tensor([3.0, -3.0] * 10 + [9.0] * 5))
    feedback.sent_scale.copy_(torch.tensor([1.0, 2.0, 0.0, 0.0]))
    feedback.reduced[:16] = -4.0
    feedback.reduced_scale.copy_(torch.tensor([0.5, 0.0]))
    for _ in range(2):
        feedback.settle(pieces)
        assert feedback.sent.tolist() == [2.0, -2.0] * 8 + [1.0, -1.0] * 2 + [9.0] * 5
        assert feedback.reduced.tolist() == [-3.5] * 16 + [0.0] * 8


def test_taking_exchanges_without_copying():
    pieces = cut([Piece(0, 100, LAZY.kind, 0)], 2)
    old, new = ErrorFeedback.zeros(pieces), ErrorFeedback.zeros(pieces)
    before = [vars(old).copy(), vars(new).copy()]
    old.take(new)
    assert all(vars(old)[name] is before[1][name] for name in vars(old))
    assert all(vars(new)[name] is before[0][name] for name in vars(new))


# ---------------------------------------------------------------- other messages


@settings(max_examples=50, deadline=None)
@given(
    order=st.permutations(list(NUMELS)),
    cuts=st.sets(st.integers(1, 5)),
    codec=st.sampled_from([LAZY, *NAMES.values()]),
)
def test_regrouping_moves_every_residual_bitwise(order, cuts, codec):
    store = ResidualStore()
    fill(filter(None, attach(store, list(NUMELS), codec=codec)))
    before = copied(store)
    edges = [0, *sorted(cuts), len(order)]
    for start, stop in pairwise(edges):
        attach(store, order[start:stop], codec=codec)
    assert_same(copied(store), before)
    assert set(before) == (set() if codec.lossless else {(name, 0) for name in NUMELS})


def test_after_regrouping_the_new_message_holds_the_residual():
    """Views of what the next step reads, not of what the old message held."""
    store = ResidualStore()
    fill(attach(store, ["b", "d"]))
    before = copied(store)
    (feedback,) = attach(store, ["d"])
    assert torch.equal(feedback.sent, before["d", 0][0])
    feedback.sent += 1
    assert torch.equal(copied(store)["d", 0][0], before["d", 0][0] + 1)
    assert torch.equal(copied(store)["b", 0][0], before["b", 0][0])


@pytest.mark.parametrize(
    ("codec", "ranks"),
    few([*NAMES.values(), LAZY, SignCodec("l1", 0)], [2, 3, 1]),
    ids=lambda value: getattr(value, "spec", None),
)
def test_no_bit_depends_on_which_tensors_travel_together(codec, ranks):
    """Twelve steps in one bucket of six tensors equal twelve steps in buckets that change on the
    way."""
    layouts = [
        [list(NUMELS)],
        [["f", "a"], ["e", "d", "c", "b"]],
        [["d"], ["c", "b", "a"], ["e", "f"]],
    ]
    policy = ByName({"e": NAMES["int4"], "c": EXACT}, Same(codec))

    def train(layout_of_step):
        stores, workspaces = (
            [ResidualStore() for _ in range(ranks)],
            [Workspace() for _ in range(ranks)],
        )
        outputs, sequence = [], 0
        for step in range(12):
            inputs = gradients(step, ranks)
            for names in layout_of_step(step):
                plan, spans = grouped(names, policy, ranks)
                buffers = [torch.cat([inputs[r][n] for n in names]) for r in range(ranks)]
                feedbacks = [
                    [stores[r].attach(m.keys, m.pieces, CPU) for m in plan] for r in range(ranks)
                ]
                outcomes = simulate(
                    [
                        reduce_bucket(
                            buffers[r],
                            feedbacks[r],
                            messages=plan,
                            call=Call(
                                transport=t, workspace=workspaces[r], sequence=sequence, key=step
                            ),
                        )
                        for r, t in enumerate(Loopback(ranks).transports())
                    ]
                )
                for outcome in (o for rank in outcomes for o in rank):
                    outcome.commit()
                sequence += len(plan)
                outputs += [
                    (step, s.name, r, buffers[r][s.source : s.source + s.numel])
                    for s in spans
                    for r in range(ranks)
                ]
        outputs.sort(key=lambda output: output[:3])
        return outputs, [copied(store) for store in stores]

    fixed, moved = train(lambda step: layouts[0]), train(lambda step: layouts[step // 2 % 3])
    for one, two in zip(fixed[0], moved[0], strict=True):
        assert torch.equal(one[3], two[3]), one[:3]
    for one, two in zip(fixed[1], moved[1], strict=True):
        assert_same(one, two)


def gradients(step, ranks):
    generator = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(numel, generator=generator) for name, numel in NUMELS.items()}
        for _ in range(ranks)
    ]


def test_pieces_without_feedback_have_no_place():
    store = ResidualStore()
    plan, _ = grouped(["a", "b"], ByName({"a": EXACT}, Same(LAZY)), 2)
    assert [store.attach(m.keys, m.pieces, CPU) is None for m in plan] == [False]
    assert [key for key, _, _ in store.places()] == [("b", 0)]
    plan, _ = grouped(["c", "d"], Same(LAZY), 2, feedback=False)
    assert [store.attach(m.keys, m.pieces, CPU) for m in plan] == [None]
    assert attach(store, ["e", "f"], codec=EXACT) == [None]
    assert [key for key, _, _ in store.places()] == [("b", 0)]


# ---------------------------------------------------------------- loading


def saved(names, seed):
    store = ResidualStore()
    fill(attach(store, names), seed)
    return copied(store)


def test_what_was_loaded_waits_for_its_message_and_is_saved_meanwhile():
    store, state = ResidualStore(), saved(["a", "b", "d"], 1)
    store.load(state)
    assert_same(copied(store), state)
    attach(store, ["d"])
    assert_same(copied(store), state)
    attach(store, ["b", "a"])
    assert_same(copied(store), state)
    attach(store, ["b", "d", "a"])
    assert_same(copied(store), state)


def test_loading_replaces_everything_and_does_not_alias_the_state():
    """A residual that the state does not name is zero afterwards, also where a lazy scale stood."""
    store, state = ResidualStore(), saved(["b", "d"], 1)
    feedbacks = attach(store, ["a", "b"])
    fill(feedbacks)
    store.load(state)
    residuals, before = copied(store), state["b", 0][0].clone()
    assert not any(part.any() for part in residuals["a", 0])
    assert_same({key: residuals[key] for key in state}, state)
    for feedback in feedbacks:
        feedback.sent += 1
    assert torch.equal(state["b", 0][0], before)


@pytest.mark.parametrize(("which", "name"), [(0, "sent"), (1, "reduced")])
def test_a_residual_of_another_shape_is_named_and_nothing_changes(which, name):
    store, state = ResidualStore(), saved(["b", "d"], 1)
    fill(attach(store, ["b", "d"]))
    before = copied(store)
    wrong = list(state["d", 0])
    wrong[which] = torch.zeros(13)
    state["d", 0] = tuple(wrong)
    expected = [2500, width_of(2500, 2)][which]
    with pytest.raises(
        StateMismatch,
        match=f"the {name} residual of parameter 'd' .* has 13 elements, expected {expected}",
    ):
        store.load(state)
    assert_same(copied(store), before)


def test_a_waiting_residual_of_another_world_size_is_refused_when_its_message_comes():
    store = ResidualStore()
    store.load(saved(["d"], 1))
    with pytest.raises(StateMismatch, match=r"another model or world size.*elastic_state_dict"):
        attach(store, ["d"], ranks=3)


def test_a_parameter_that_changes_its_codec_keeps_its_residual():
    """Residuals are plain numbers: from one scale per row to blocks and back."""
    store = ResidualStore()
    fill(attach(store, ["d"]))
    before = copied(store)
    for codec in ("int8", "sign", LAZY):
        attach(store, ["d"], codec=codec_named(codec))
        assert_same(copied(store), before)


# ---------------------------------------------------------------- paying


def test_what_is_owed_is_paid_once_and_in_full():
    """The mean of what the ranks add is R = mean(sent) + the reduced residuals side by side; then
    nothing is owed."""
    ranks, numel = 3, NUMELS["d"]
    width, stores = width_of(numel, ranks), [ResidualStore() for _ in range(ranks)]
    for r, store in enumerate(stores):
        fill(attach(store, ["d"], ranks), seed=r)
    residuals = [copied(store)["d", 0] for store in stores]
    reduced = torch.cat([part for _, part in residuals])[: ranks * width]
    owed = sum(sent for sent, _ in residuals) / ranks + reduced[:numel]
    outs = [torch.zeros(numel) for _ in range(ranks)]
    for r, (store, out) in enumerate(zip(stores, outs, strict=True)):
        store.pay("another", out, r, ranks)
        assert not out.any()
        store.pay("d", out, r, ranks)
    torch.testing.assert_close(sum(outs) / ranks, owed)
    for r, store in enumerate(stores):
        assert not any(part.any() for part in copied(store)["d", 0])
        again = torch.zeros(numel)
        store.pay("d", again, r, ranks)
        assert not again.any()
