"""Residuals kept in a codec: against float residuals rounded by hand, over many steps, through
checkpoints, under FSDP2."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.codecs import codec_named, policy_of
from commpress.collectives.allreduce import Call, Workspace, settle
from commpress.collectives.reduce_scatter import Part, deals, reduce_rows
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, StateMismatch
from commpress.feedback import ResidualStore
from fsdp_twin import Net, Plan, Session, Trained

CPU = torch.device("cpu")
RANKS = 2


class World:
    """Ranks that reduce two parameters, their residuals kept in ``kept_in``."""

    def __init__(self, codec, kept_in):
        kept = codec_named(kept_in)
        self.parts = [Part("a", 0, 96, 191), Part("b", 96, 41, 82)]
        self.plans = [
            deals(self.parts, policy_of(codec), rank=r, ranks=RANKS) for r in range(RANKS)
        ]
        coded = {} if kept.lossless else {"kind": kept.kind, "block": kept.block}
        self.stores = [ResidualStore(**coded) for _ in range(RANKS)]
        self.attach()
        self.workspaces, self.transports = (
            [Workspace() for _ in range(RANKS)],
            Loopback(RANKS).transports(),
        )
        self.step = 0

    def attach(self):
        self.feedbacks = [
            [store.attach(d.every.keys, d.every.pieces, CPU) for d in plan]
            for store, plan in zip(self.stores, self.plans, strict=True)
        ]

    def reduce(self, inputs):
        outs = [torch.zeros(137) for _ in range(RANKS)]
        outcomes = simulate(
            [
                reduce_rows(
                    inputs[r].clone(),
                    outs[r],
                    self.feedbacks[r],
                    self.plans[r],
                    Call(self.transports[r], self.workspaces[r], self.step * 10, self.step),
                )
                for r in range(RANKS)
            ]
        )
        self.step += 1
        for rank in outcomes:
            settle(rank, taken=all(o.finite for o in rank))
        return torch.stack(outs)

    def owed(self):
        return [{key: sent.clone() for key, sent, _ in store.places()} for store in self.stores]


def gradients(seed):
    """Rows of two ranks; what lies behind the last element of a parameter is zero, as torch pads
    it."""
    every = torch.randn(RANKS, RANKS, 137, generator=torch.Generator().manual_seed(seed))
    every[:, 1, 95] = 0
    return every.view(RANKS, -1)


@pytest.mark.parametrize("codec", ["int4", "sign", "topk-8"])
def test_in_bf16_every_step_is_that_of_float_residuals_which_somebody_rounds_after_it(codec):
    coded, plain = World(codec, "bf16"), World(codec, "none")
    for step in range(4):
        inputs = gradients(step)
        assert torch.equal(coded.reduce(inputs), plain.reduce(inputs))
        for store, owed, kept in zip(plain.stores, plain.owed(), coded.owed(), strict=True):
            rounded = {key: sent.bfloat16().float() for key, sent in owed.items()}
            assert rounded.keys() == kept.keys()
            assert all(torch.equal(rounded[key], kept[key]) for key in kept)
            assert any(sent.any() for sent in kept.values())
            store.load({key: (sent, torch.zeros(0)) for key, sent in rounded.items()})


@pytest.mark.parametrize(("kept_in", "lost"), [("none", 0.0), ("shift8", 0.0), ("int8", 1.0)])
def test_small_gradients_beside_large_residuals_are_owed_in_the_mean_unless_rounded_to_nearest(
    kept_in, lost
):
    world = World("topk-8", kept_in)
    inputs = torch.full((RANKS, 2 * 137), 0.002).index_fill_(1, torch.arange(0, 274, 2), 1.0)
    total = sum(world.reduce(inputs) for _ in range(100))
    owed = world.owed()[0][("a", 0)][1::2].mean() + total[0, 1:96:2].mean()
    assert owed == pytest.approx(0.002 * 100 * (1 - lost), abs=0.02)


def test_a_step_that_is_not_finite_changes_no_byte_and_residuals_follow_their_parameters():
    world = World("int4", "shift8")
    world.reduce(gradients(0))
    before = [
        {key: codes.clone() for key, codes in store.codes().items()} for store in world.stores
    ]
    bad = gradients(1)
    bad[1, 7] = float("inf")
    world.reduce(bad)
    world.attach()  # to other messages
    for store, codes in zip(world.stores, before, strict=True):
        now = store.codes()
        assert now.keys() == codes.keys()
        assert any(codes.any() for codes in now.values())
        assert any(sent.any() for _, sent, _ in store.places())
    kept = world.owed()
    world.stores[0].decay({"a"}, 0.0)
    assert not any(sent.any() for (name, _), sent in world.owed()[0].items() if name == "a")
    assert all(
        torch.equal(sent, kept[0][key]) for key, sent in world.owed()[0].items() if key[0] == "b"
    )


def test_bytes_come_back_as_they_were_saved():
    world, other = World("int4", "shift8"), World("int4", "shift8")
    for step in range(2):
        world.reduce(gradients(step))
    for mine, theirs in zip(world.stores, other.stores, strict=True):
        saved = {key: codes.clone() for key, codes in mine.codes().items()}
        theirs.load_codes(saved)
        assert all(torch.equal(theirs.codes()[key], codes) for key, codes in saved.items())
        with pytest.raises(StateMismatch, match="bytes, expected"):
            theirs.load_codes({key: codes[:, 8:] for key, codes in saved.items()})
    other.step = world.step
    for mine, theirs in zip(world.stores, other.stores, strict=True):
        theirs.load_codes({key: codes.clone() for key, codes in mine.codes().items()})
    assert torch.equal(world.reduce(gradients(9)), other.reduce(gradients(9)))


# ---------------------------------------------------------------- FSDP2

NODES = Topology(((0, 1), (2, 3)))


def kept_bytes(*every: Plan) -> list[tuple[dict[str, int], int, list[float], bool]]:
    found = []
    for plan in every:
        session = Session(plan)
        formula = session.state.memory()
        session.run()
        stores = (session.state.residuals, session.state.residuals_between)
        real = sum(codes.nbytes for store in stores for codes in store.codes().values())
        real += sum(
            sent.nbytes for store in stores if store.kind is None for _, sent, _ in store.places()
        )
        same = all(
            formula[key] == now for key, now in session.state.memory().items() if key != "weights"
        )
        found.append((formula, real, session.losses, same))
    return found


def test_what_a_rank_keeps_is_what_the_formula_says_and_a_byte_of_a_nodes_share_is_an_eighth(pool):
    hops = {"topology": NODES}
    plans = [
        Plan(
            codec="int4",
            options=options,
            dtype=torch.bfloat16 if options is hops else None,
            steps=2,
        )
        for options in (
            {},
            hops,
            {"error_feedback": "shift8"},
            {**hops, "error_feedback": "shift8"},
        )
    ]
    for whole, node, coded, both in pool.run(kept_bytes, *plans, size=4):
        for formula, real, losses, same in (whole, node, coded, both):
            assert same
            assert real == pytest.approx(formula["residuals"], rel=0.05)
            assert losses[-1] == pytest.approx(whole[2][-1], abs=0.05)
        assert node[1] == pytest.approx(whole[1] / 2, rel=0.05)
        assert coded[1] == pytest.approx(whole[1] / 4, rel=0.1)
        assert both[1] == pytest.approx(whole[1] / 8, rel=0.1)


def resumed(plan: Plan, folder: str) -> tuple[Trained, Trained]:
    """Five steps in one go; three steps, saved by every rank and torch's distributed checkpoint,
    then two in a new session."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.set_num_threads(1)
    whole = Session(plan).run().trained()
    short = Session(replace(plan, steps=3)).run()
    torch.save(short.state.state_dict(), f"{folder}/rank{dist.get_rank()}.pt")
    model, optimizer = get_state_dict(short.model, short.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    again = Session(replace(plan, steps=2, first=3))
    model, optimizer = get_state_dict(again.model, again.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(again.model, again.optimizer, model_state_dict=model, optim_state_dict=optimizer)
    again.state.load_state_dict(torch.load(f"{folder}/rank{dist.get_rank()}.pt", weights_only=True))
    return whole, again.run().trained()


def test_a_resumed_run_with_residuals_in_a_codec_equals_the_uninterrupted_one_bit_for_bit(
    pool, tmp_path
):
    plan = Plan(codec="int4", steps=5, options={"error_feedback": "shift8"})
    for whole, again in pool.run(resumed, plan, str(tmp_path), size=2):
        assert again.losses == whole.losses[-2:]
        assert all(
            torch.equal(again.parameters[name], whole.parameters[name]) for name in whole.parameters
        )


def refused() -> None:
    plan = Plan(codec="int4", steps=1)
    session = Session(plan).run()
    other = Session(replace(plan, options={"error_feedback": "shift8"}))
    with pytest.raises(
        StateMismatch,
        match=r"saved with residuals in 'none', but this run keeps them in 'shift/8/512'",
    ):
        other.state.load_state_dict(session.state.state_dict())
    for options, message in (
        ({"error_feedback": "int4"}, "error_feedback is 'int4/256', expected True"),
        ({"error_feedback": "topk-8"}, "error_feedback is 'topk/256/2048', expected"),
        ({"error_feedback": "powersgd-2"}, "error_feedback is 'powersgd/2/2', expected"),
        (
            {"codec": "powersgd-2", "error_feedback": "shift8"},
            "compresses whole tensors, with residuals in float32",
        ),
    ):
        model = Net()
        fully_shard(model)
        with pytest.raises(InvalidArgument, match=message):
            commpress.compress_fsdp(model, **options)
    model = nn.Sequential(nn.Linear(64, 64))
    fully_shard(model)
    assert (
        commpress.compress_fsdp(model, "int4", None, error_feedback=False).memory()["residuals"]
        == 0
    )


@pytest.mark.parametrize("size", [1, 2])
def test_what_residuals_cannot_be_kept_in_is_refused_on_any_number_of_ranks(pool, size):
    pool.run(refused, size=size)
