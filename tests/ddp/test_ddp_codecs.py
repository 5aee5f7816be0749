"""PowerSGD and top-k under DDP: ranks alike, buckets of no matter, states exact and elastic."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import ByName
from commpress.errors import InvalidArgument, StateMismatch
from variants import seldom

WAYS = {
    "powersgd": {"codec": "powersgd-2"},
    "topk": {"codec": "topk-8", "exact_steps": 1},
}
every = pytest.mark.parametrize("way", WAYS)
BOTH = ByName({"0.weight": "powersgd-2"}, "topk-8")
MATRICES = ByName({"2.weight": "powersgd-4", "0.weight": "powersgd-2+fp8"}, "sign")
WHOLE = WAYS | {"both": {"codec": BOTH}, "matrices": {"codec": MATRICES}}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 10)
    ).to(dtype)


def train(steps, way="powersgd", *, dtype=torch.float32, load=None, bucket=25, bad=None, **options):
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(net(dtype), bucket_cap_mb=bucket)
    state = commpress.compress(ddp, **{**WHOLE[way], **options})
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if load:
        ddp.module.load_state_dict(load[rank]["model"])
        state.load_state_dict(
            *([one["state"] for one in load] if load[0].get("elastic") else [load[rank]["state"]])
        )
    losses = []
    for step in range(state.step, state.step + steps):
        draw = torch.Generator().manual_seed(step * 7 + rank)
        x, y = (
            torch.randn(16, 48, generator=draw).to(dtype),
            torch.randn(16, 10, generator=draw).to(dtype),
        )
        loss = (ddp(x) - y).square().mean() * (float("inf") if step == bad and rank == 1 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = {name: p.detach().clone() for name, p in ddp.module.state_dict().items()}
    return {
        "model": model,
        "losses": losses,
        "state": state.state_dict(),
        "elastic_state": state.elastic_state_dict(),
        "counters": state.counters.as_dict(),
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@every
@pytest.mark.parametrize("size", [2, 4])
def test_the_hook_keeps_ranks_equal_and_compresses(pool, way, size):
    results = pool.run(train, 8, way, size=size)
    assert all(same(results[0]["model"], other["model"]) for other in results)
    counters = results[0]["counters"]
    assert counters["ratio"] > 3
    steps = 7 if way == "topk" else 8
    assert counters["compressed_elements"] == steps * (48 * 96 + 96 * 96 + 96 * 10)
    assert all(0 < error < 1 for error in counters["errors"].values())
    assert set(counters["errors"]) == {"0.weight", "2.weight", "4.weight"}


@every
def test_buckets_do_not_change_a_bit(pool, way):
    wide, narrow = (pool.run(_train_bucket, way, bucket)[0] for bucket in (25, 0.01))
    assert same(wide["model"], narrow["model"])


def _train_bucket(way, megabytes):
    return train(4, way, bucket=megabytes)


def test_a_basis_of_another_rank_is_refused(pool):
    half = pool.run(train, 2)
    outcomes = pool.outcomes(_resume_wider, half)
    assert all(
        isinstance(one, StateMismatch) and "basis of parameter" in str(one) for one in outcomes
    )


def _resume_wider(saved):
    return train(1, codec="powersgd-3", load=saved)


def test_any_feedback_but_true_and_false_is_refused(pool):
    for words in pool.run(_refusals)[0]:
        assert words.startswith("error_feedback is 'ef21', expected True or False")


def _refusals():
    ddp, words = DistributedDataParallel(net()), []
    for make in (
        lambda: commpress.compress(ddp, "topk-8", error_feedback="ef21"),
        lambda: commpress.OneBitAdam(net().parameters(), exact_steps=2, error_feedback="ef21"),
    ):
        with pytest.raises(InvalidArgument) as error:
            make()
        words.append(str(error.value))
    return words


@every
def test_the_hook_survives_a_bad_gradient(pool, way):
    results = pool.run(_train_bad, 5, way)
    assert same(results[0]["model"], results[1]["model"])
    assert results[0]["counters"]["skipped_steps"] == 1
    assert all(torch.isfinite(p).all() for p in results[0]["model"].values())


def _train_bad(steps, way):
    return train(steps, way, bad=2)


def test_terngrad_end_to_end(pool):
    """No residual, noise that follows from seed and step: a resumed run draws the same."""
    whole, half = pool.run(_train_terngrad, 6, None), pool.run(_train_terngrad, 3, None)
    resumed = pool.run(_train_terngrad, 3, half)
    assert same(whole[0]["model"], whole[1]["model"])
    assert same(whole[0]["model"], resumed[0]["model"])
    assert whole[0]["counters"]["ratio"] > 6  # two bits there and five back
    assert not whole[0]["state"]["residuals"]
    assert np.mean(whole[0]["losses"][3:]) < np.mean(whole[0]["losses"][:3])


def _train_terngrad(steps, saved):
    return train(steps, codec="terngrad", load=saved)


# ---------------------------------------------------------------- matrices in two levels


def _train_levels(steps, topology, saved=None):
    return train(steps, codec=MATRICES, topology=topology, load=saved)


@pytest.mark.parametrize("topology", ["2x2", "3,1"])
def test_matrices_travel_in_two_levels_beside_rows(pool, topology):
    flat, levels = (pool.run(_train_levels, 3, each, size=4) for each in (None, topology))
    assert all(same(levels[0]["model"], other["model"]) for other in levels)
    # the same means, added in another order; rows differ: nodes have slices
    for name in ("0.weight", "2.weight"):
        moved = flat[0]["model"][name] - net().state_dict()[name]
        apart = flat[0]["model"][name] - levels[0]["model"][name]
        assert apart.norm() < 0.2 * moved.norm(), "means of the same gradients"
    between, sent = (levels[0]["counters"][name] for name in ("between_bytes", "wire_bytes"))
    assert 0 < between < sent
    assert between < 0.8 * flat[0]["counters"]["wire_bytes"]


# ---------------------------------------------------------------- rows in two levels


def _train_nodes(steps, topology, way="topk", saved=None, bad=None):
    return train(steps, way, topology=topology, load=saved, bad=bad)


NODES = [seldom("2x2", "topk"), ("3,1", "topk"), ("2x2", "both")]


@pytest.mark.parametrize(("topology", "way"), NODES)
def test_what_nodes_send_resumes_bit_for_bit_and_is_less(pool, topology, way):
    whole, flat = (pool.run(_train_nodes, 6, each, way, size=4) for each in (topology, None))
    half = pool.run(_train_nodes, 3, topology, way, size=4)
    resumed = pool.run(_train_nodes, 3, topology, way, half, size=4)
    for one, other in zip(whole, resumed, strict=True):
        assert same(whole[0]["model"], one["model"])
        assert same(one["model"], other["model"])
        was, now = one["state"]["residuals"], other["state"]["residuals"]
        assert was.keys() == now.keys()
        assert all(same(was[key], now[key]) for key in was)
    assert 0 < whole[0]["counters"]["between_bytes"] < 0.6 * flat[0]["counters"]["wire_bytes"]


def _reload_nodes(topology, way, states):
    ddp = DistributedDataParallel(net())
    state = commpress.compress(ddp, **WHOLE[way], topology=topology)
    state.load_state_dict(*states)
    return state.elastic_state_dict()


OTHERS = [
    ("2x2", None, 2, "topk"),
    (None, "2,1", 3, "both"),
    ("2x2", "2,1", 3, "matrices"),
    seldom("2x2", "2,1", 3, "topk"),
]


@pytest.mark.parametrize(("before", "after", "size", "way"), OTHERS)
def test_what_nodes_know_fits_other_nodes(pool, before, after, size, way):
    states = [result["elastic_state"] for result in pool.run(_train_nodes, 3, before, way, size=4)]
    again = pool.run(_reload_nodes, after, way, states, size=size)
    was, now = _owed(states), _owed(again)
    assert was.keys() == now.keys()
    for key in was:
        assert was[key].any()
        torch.testing.assert_close(was[key], now[key], rtol=1e-5, atol=1e-7)
    assert same(states[0]["bases"], again[0]["bases"])


# ---------------------------------------------------------------- what makes no sense


def _owed(states):
    """R of every parameter, from the elastic states of all ranks."""
    totals = {}
    for state in states:
        for key, shard in state["shards"].items():
            total = totals.setdefault(key, torch.zeros(shard["numel"]))
            total[shard["start"] : shard["start"] + shard["values"].numel()] = shard["values"]
    return totals


@pytest.mark.parametrize("size", [1, 2])
def test_what_makes_no_sense_is_refused_on_one_rank_as_on_two(pool, size):
    """A matrix keeps its residual whole, rows slice by slice: one cannot follow the
    other."""
    with pytest.raises(
        InvalidArgument,
        match=r"'powersgd/4/2' keeps what it leaves behind in whole matrices.*leave one",
    ):
        pool.run(_refused, {"codec": "auto:powersgd-4,int8", "topology": "1,1"}, size=size)


def _refused(options):
    commpress.compress(DistributedDataParallel(net()), **options)
