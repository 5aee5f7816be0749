"""FSDP2 on real ranks: what is trained, what is sent, what is refused."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.collectives.topology import Topology
from fsdp_twin import WIDTH, Net, Plan, Session, Trained, both, equal, shard
from ranks import caught
from state_worlds import apart
from variants import few, seldom

EXACT = {"codec": "none", "weights": "none"}
WITH_MATRICES = commpress.ByName(
    {"up.weight": "powersgd-1", "head": "none", "norm": "none"}, "powersgd-2"
)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(**EXACT, dtype=torch.bfloat16, reduce_dtype=torch.float32, clip=0.5),
        Plan(**EXACT, reshard=False, recompute=True, accumulate=3, sync_last=True, divide=4.0),
        Plan(**EXACT, accumulate=2, options={"overlap": False}),
        seldom(Plan(codec="none", weights=None, force_sum=True)),
        seldom(Plan(codec=None, weights="none")),
        Plan(
            codec="none",
            weights=commpress.Difference("none"),
            dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        ),
    ],
    ids=str,
)
def test_exact_codecs_give_the_bits_of_plain_fsdp2(pool, plan):
    """Two ranks: a sum of two does not depend on the order."""
    for plain, ours in pool.run(both, plan, size=2):
        equal(plain, ours)


def exactly(*plans: Plan) -> list[tuple[Trained, Trained]]:
    return [both(plan) for plan in plans]


def test_exact_codecs_give_the_bits_of_plain_fsdp2_on_four_ranks(pool):
    """All ranks see the same data: sums of four equal numbers are exact in any order. Also
    resharded to pairs after forward."""
    plans = [Plan(**EXACT, same_data=True, reshard=reshard) for reshard in (True, 2)]
    for results in pool.run(exactly, *plans, size=4):
        for plain, ours in results:
            equal(plain, ours)


def test_resharded_to_pairs_weights_travel_compressed_once_and_exactly_inside_a_pair(pool):
    results = pool.run(exactly, Plan(reshard=2), Plan(weights="none", reshard=2), size=4)
    for (plain, ours), (_, exact) in results:
        for name in plain.parameters:
            assert torch.equal(ours.parameters[name], results[0][0][1].parameters[name]), name
            torch.testing.assert_close(
                ours.parameters[name], plain.parameters[name], atol=0.12, rtol=0.2
            )
        assert ours.sent[3] == exact.sent[3]
        assert 0.4 * exact.sent[2] < ours.sent[2] < 0.8 * exact.sent[2]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(codec="int4", weights=commpress.Difference("int4")),
        Plan(dtype=torch.bfloat16, clip=1.0),
        Plan(codec="int4", accumulate=3, sync_last=True),
        Plan(
            codec="int4",
            weights=commpress.Difference("int4"),
            dtype=torch.bfloat16,
            accumulate=2,
            recompute=True,
        ),
        seldom(Plan(codec="sign", weights="fp8")),
        seldom(Plan(codec="int8", weights="shift8")),
    ],
    ids=str,
)
def test_trains_close_to_plain_fsdp2_alike_on_all_ranks_and_really_compressed(pool, plan, size):
    results = pool.run(both, plan, size=size)
    first = results[0][1]
    for plain, ours in results:
        for name in plain.parameters:
            assert torch.equal(ours.parameters[name], first.parameters[name]), name
            assert not torch.equal(ours.parameters[name], plain.parameters[name]) or name.endswith(
                "bias"
            ), name
            torch.testing.assert_close(
                ours.parameters[name], plain.parameters[name], atol=0.12, rtol=0.2
            )
        assert ours.norms == first.norms
        for before, after in zip(plain.norms, ours.norms, strict=True):
            assert abs(after / before - 1) < 0.2
        gradients, logical, weights, logical_weights = ours.sent
        assert 0 < gradients < logical
        assert 0 < weights < logical_weights
        assert min(ours.compressed) > 0


@pytest.mark.parametrize(
    "plan",
    [
        Plan(codec="int4", weights=commpress.Difference("int4")),
        Plan(codec=commpress.ByName({"up.weight": "powersgd-1", "norm": "none"}, "powersgd-2")),
    ],
    ids=str,
)
def test_bytes_are_counted_to_the_last(pool, plan):
    for _, sent, counted in pool.run(count_bytes, plan, size=2):
        assert sent == counted


def count_bytes(plan):
    """Bytes that went through the transport against those of the counters."""
    from commpress.collectives.transports.sockets import SocketTransport

    sent, real = (
        [0],
        {name: getattr(SocketTransport, name) for name in ("all_to_all", "all_gather")},
    )

    def counting(name):
        def call(self, out, inp, tag):
            sent[0] += inp.shape[1] * (self.size - 1)
            return real[name](self, out, inp, tag)

        return call

    for name in real:
        setattr(SocketTransport, name, counting(name))
    try:
        session = Session(plan)
        sent[0] = 0  # the agreement at the start
        session.run()
        for parameter in session.model.parameters():
            parameter.full_tensor()  # by torch: not counted
        return dist.get_rank(), sent[0], session.state.wire_bytes
    finally:
        for name, call in real.items():
            setattr(SocketTransport, name, call)


# ---------------------------------------------------------------- two hops


def two_hops(plan: Plan) -> tuple[Trained, Trained, dict[str, Any]]:
    options = {"topology": (Topology(((0, 1), (2, 3))), plan.options["inside"])}
    plain, _ = both(Plan(**{**plan.__dict__, "options": {}, "weights": None}))
    session = Session(Plan(**{**plan.__dict__, "options": options, "weights": None})).run()
    return plain, session.trained(), session.state.state_dict()


def test_two_exact_hops_equal_plain_fsdp2(pool):
    plan = Plan(codec="none", same_data=True, options={"inside": "none"})
    for plain, ours, _ in pool.run(two_hops, plan, size=4):
        equal(plain, ours)


def test_two_hops_train_alike_on_all_ranks(pool):
    results = pool.run(two_hops, Plan(codec="int4", options={"inside": "int8"}), size=4)
    for plain, ours, state in results:
        for name in plain.parameters:
            assert torch.equal(ours.parameters[name], results[0][1].parameters[name]), name
            torch.testing.assert_close(
                ours.parameters[name], plain.parameters[name], atol=0.12, rtol=0.2
            )
        assert state["residuals"]
        assert state["between"]
        assert 0 < ours.sent[0] < ours.sent[1]


# ---------------------------------------------------------------- what goes wrong


def poisoned(plan: Plan) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    session = Session(plan).run()
    before = session.state.state_dict()
    x = torch.zeros(2, dtype=torch.long)
    loss = session.model(x).square().mean() * (float("inf") if dist.get_rank() == 1 else 1.0)
    error = caught(loss.backward)
    after = session.state.state_dict()
    for state in (before, after):
        assert state["residuals"]
        assert bool(state["bases"]) == (plan.codec != "int4")
    same = not any(apart(before[kind], after[kind]) for kind in ("residuals", "between", "bases"))
    gradients = torch.cat([p.grad.to_local().flatten() for p in session.model.parameters()])
    session.optimizer.zero_grad()
    session.step(99)
    return (
        type(error).__name__,
        same,
        bool((gradients == 0).all()),
        bool(gradients.isnan().all()),
        session.losses[-1],
    )


@pytest.mark.parametrize(
    ("policy", "error", "codec", "size"),
    [
        ("skip", "NoneType", WITH_MATRICES, 2),
        ("skip", "NoneType", WITH_MATRICES, 4),
        ("propagate", "NoneType", "int4", 2),
        ("raise", "NonFiniteGradient", "int4", 2),
    ],
)
def test_a_rank_that_is_not_finite_changes_no_residual(pool, policy, error, codec, size):
    """Ranks of the runs on four form two nodes, with residuals between them."""
    nodes = {"topology": Topology(((0, 1), (2, 3)))} if size == 4 else {}
    plan = Plan(codec=codec, options={"on_nonfinite": policy} | nodes)
    for result in pool.run(poisoned, plan, size=size):
        assert result[:4] == (error, True, policy != "propagate", policy == "propagate")
        assert result[4] == result[4]


def overflowing(gradients: Any, overlap: bool, bad: bool) -> tuple[Any, ...]:
    """Two steps, one in which the gradient of the embedding alone overflows on a rank, and two
    more."""
    torch.set_num_threads(1)
    plan = Plan(codec=gradients, weights=None, scale=1024.0, options={"overlap": overlap})
    session = Session(plan)
    session.step(0)
    session.step(1)
    before, same = session.state.state_dict(), True
    if bad:
        infinite = float("inf") if dist.get_rank() == 1 else 1.0
        handle = session.model.tokens.register_forward_hook(
            lambda m, a, out: out.register_hook(lambda g: g * infinite) and out
        )
        session.step(50)
        handle.remove()
        after = session.state.state_dict()
        for kind in ("residuals", "bases"):
            same = same and all(torch.equal(after[kind][k], v) for k, v in before[kind].items())
    session.step(2)
    session.step(3)
    skipped = session.state.gradients.skipped_buckets
    return session.trained(), session.state.state_dict(), same, skipped, session.scaler.get_scale()


@pytest.mark.parametrize(
    ("gradients", "overlap"), few(["int4", WITH_MATRICES], [True, False]), ids=str
)
def test_a_step_that_the_scaler_skips_leaves_no_trace_in_any_group(pool, gradients, overlap):
    """Only one group's gradients are not finite; the others' are lost as well, so their residuals
    must not move on."""
    disturbed, plain = (
        pool.run(overflowing, gradients, overlap, bad, size=2) for bad in (True, False)
    )
    for (ours, state, same, skipped, scale), (theirs, other, _, _, usual) in zip(
        disturbed, plain, strict=True
    ):
        assert same
        assert skipped == 1
        assert scale == usual / 2
        for name, value in theirs.parameters.items():
            assert torch.equal(ours.parameters[name], value)
        assert any(kept.any() for kept in state["residuals"].values())
        assert all(
            torch.equal(other["residuals"][key], kept) for key, kept in state["residuals"].items()
        )


def aborted() -> bool:
    """A backward that ends with an error, after some groups were reduced, leaves nothing behind."""
    session = Session(Plan(codec="int4", weights=None, scale=1024.0))
    session.step(0)
    before = session.state.state_dict()["residuals"]

    def stop(gradient: torch.Tensor) -> None:
        raise RuntimeError("stopped")

    handle = session.model.blocks[0].register_forward_hook(
        lambda m, a, out: out.register_hook(stop) and out
    )
    with pytest.raises(RuntimeError, match="stopped"):
        session.backward(7)
    handle.remove()
    session.model(torch.zeros(2, dtype=torch.long))
    after = session.state.state_dict()["residuals"]
    return all(torch.equal(before[key], after[key]) for key in before) and bool(before)


def test_an_aborted_backward_leaves_no_trace_with_a_scaler(pool):
    assert all(pool.run(aborted, size=2))


def refusals() -> dict[str, str]:
    """Errors, by what they should say."""
    compress, x = commpress.compress_fsdp, torch.zeros(2, dtype=torch.long)
    with torch.device("meta"):
        without_values = fully_shard(Net())
    model, alone = shard(Plan()), shard(Plan())
    for each in (model, alone):
        compress(each)
    alone.blocks[0](torch.zeros(2, WIDTH)).sum().backward()  # works: a unit by itself
    model.blocks[1].norm.weight.requires_grad_(False)
    calls = {
        "fully_shard(module) first": lambda: compress(Net()),
        "'int9'": lambda: compress(shard(Plan()), "int9"),
        "both None": lambda: compress(shard(Plan()), None, None),
        "'ignore'": lambda: compress(shard(Plan()), on_nonfinite="ignore"),
        "materialise the model first": lambda: compress(without_values),
        "requires_grad was changed": lambda: model(x).sum().backward(),
        "Every rank must use the same codec": lambda: compress(
            shard(Plan()), "int8" if dist.get_rank() else "int4"
        ),
    }
    return {words: str(caught(call)) for words, call in calls.items()}


def test_what_cannot_work_is_refused_with_the_cure(pool):
    for said in pool.run(refusals, size=2):
        assert len(said) == 7
        assert [message for words, message in said.items() if words not in message] == []


def sharded_together() -> tuple[list[tuple[str, ...]], torch.Tensor, torch.Tensor, float]:
    """Groups of a model whose first and last layer one ``fully_shard`` took; weights without and
    with commpress; its ratio."""
    torch.set_num_threads(1)
    weights, names, ratio = [], [], 0.0
    for codec in (None, "none", "int8"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        fully_shard([model[0], model[2]], reshard_after_forward=False)
        fully_shard(model)
        state = commpress.compress_fsdp(model, codec, codec) if codec else None
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(3):
            model(
                torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            ).square().mean().backward()
            adam.step()
            adam.zero_grad()
        weights.append(torch.cat([p.full_tensor().detach().view(-1) for p in model.parameters()]))
        if state is not None:
            names, ratio = [group.names for group in state.param_groups], state.counters.ratio
    assert state is not None
    assert state.counters.steps == 3
    return names, weights[0], weights[1], ratio


def test_modules_that_one_fully_shard_took_are_one_group(pool):
    for names, plain, exact, ratio in pool.run(sharded_together, size=2):
        assert names == [("1.weight", "1.bias"), ("0.weight", "0.bias", "2.weight", "2.bias")]
        torch.testing.assert_close(exact, plain, rtol=1e-5, atol=1e-6)
        assert ratio > 3
