"""PowerSGD and top-k under DDP: ranks alike, buckets of no matter, states exact and elastic."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import ByName, LowRankCodec
from commpress.errors import InvalidArgument, StateMismatch
from variants import seldom

WAYS = {
    "powersgd": {"codec": "powersgd-2"},
    "topk": {"codec": "topk-8", "exact_steps": 1, "measure_every": 1},
}
every = pytest.mark.parametrize("way", WAYS)
BOTH = ByName({"0.weight": "powersgd-2"}, "topk-8")
WHOLE = WAYS | {"both": {"codec": BOTH, "measure_every": 1}}


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


def test_full_rank_follows_the_plain_run(pool):
    full = pool.run(_train_full, 6)[0]
    plain = pool.run(_train_plain, 6)[0]
    for name in plain["model"]:
        torch.testing.assert_close(full["model"][name], plain["model"][name], atol=1e-5, rtol=1e-4)


def _train_full(steps):
    return train(steps, codec=LowRankCodec(96, min_rate=0.1))


def _train_plain(steps):
    return train(steps, codec="none")


@every
def test_bf16_gradients(pool, way):
    results = pool.run(_train_bf16, 6, way)
    assert same(results[0]["model"], results[1]["model"])
    assert all(np.isfinite(results[0]["losses"]))


def _train_bf16(steps, way):
    return train(steps, way, dtype=torch.bfloat16)


@every
def test_a_resumed_run_continues_bit_for_bit(pool, way):
    whole = pool.run(train, 6, way)
    half = pool.run(train, 3, way)
    resumed = pool.run(_resume, 3, way, half)
    assert same(whole[0]["model"], resumed[0]["model"])
    for rank in (0, 1):
        was, now = whole[rank]["state"], resumed[rank]["state"]
        assert same(was["bases"], now["bases"])
        assert all(same(was["residuals"][key], now["residuals"][key]) for key in was["residuals"])


def _resume(steps, way, saved):
    return train(steps, way, load=saved)


@every
def test_an_elastic_state_fits_more_ranks(pool, way):
    """R is kept: the mean of the new sent residuals is that of the old."""
    half = pool.run(train, 3, way)
    saved = [
        {"model": one["model"], "state": one["elastic_state"], "elastic": True}
        for one in (*half, *half)
    ]
    loaded = pool.run(_load_elastic, way, saved, size=4)
    for key in half[0]["state"]["residuals"]:
        owed = [one["state"]["residuals"][key] for one in half]
        mean = sum(one["sent"] for one in owed) / 2
        mean += torch.cat([one["reduced"] for one in owed])[: mean.numel()]
        for residuals in loaded:
            torch.testing.assert_close(residuals[key]["sent"], mean, atol=1e-6, rtol=1e-5)


def _load_elastic(way, saved):
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(net())
    state = commpress.compress(ddp, **WAYS[way])
    state.load_state_dict(*[one["state"] for one in saved[:2]])
    ddp.module.load_state_dict(saved[rank]["model"])
    return state.state_dict()["residuals"]


def test_a_basis_of_another_rank_is_refused(pool):
    half = pool.run(train, 2)
    outcomes = pool.outcomes(_resume_wider, half)
    assert all(
        isinstance(one, StateMismatch) and "basis of parameter" in str(one) for one in outcomes
    )


def _resume_wider(saved):
    return train(1, codec="powersgd-3", load=saved)


def test_estimates_of_an_older_version_are_refused_by_name(pool):
    outcomes = pool.outcomes(_resume_estimates, pool.run(train, 2, "topk"))
    assert all(
        isinstance(one, StateMismatch) and "holds estimates of EF21" in str(one) for one in outcomes
    )


def _resume_estimates(saved):
    for one in saved:
        one["state"]["ef21"] = True
    return train(1, "topk", load=saved)


def test_any_feedback_but_true_and_false_is_refused(pool):
    for words in pool.run(_refusals)[0]:
        assert words.startswith("error_feedback is 'ef21', expected True or False")


def _refusals():
    ddp, sharded, words = DistributedDataParallel(net()), fully_shard(net()), []
    for make in (
        lambda: commpress.compress(ddp, "topk-8", error_feedback="ef21"),
        lambda: commpress.compress_fsdp(sharded, codec="int8", error_feedback="ef21"),
        lambda: commpress.FlatShardState("int8", error_feedback="ef21"),
        lambda: commpress.OneBitAdam(net().parameters(), exact_steps=2, error_feedback="ef21"),
    ):
        with pytest.raises(InvalidArgument) as error:
            make()
        words.append(str(error.value))
    return words


def test_a_loss_scale_skips_an_overflow(pool):
    """Residuals in unscaled units: the scale that grows or falls changes nothing but rounding."""
    results = pool.run(_train_scaled, 8)
    assert same(results[0]["model"], results[1]["model"])
    plain = pool.run(train, 8, "topk")[0]
    for name, value in results[0]["model"].items():
        torch.testing.assert_close(value, plain["model"][name], atol=1e-5, rtol=1e-4)


def _train_scaled(steps):
    rank = torch.distributed.get_rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    ddp = DistributedDataParallel(net())
    commpress.compress(ddp, **WAYS["topk"], grad_scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step * 7 + rank)
        x, y = torch.randn(16, 48, generator=draw), torch.randn(16, 10, generator=draw)
        for again in (True, False) if step == 2 else (False,):  # step 2 overflows at first
            optimizer.zero_grad()
            loss = (ddp(x) - y).square().mean()
            scaler.scale(loss * (float("inf") if again and rank == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
    return {"model": {name: p.detach().clone() for name, p in ddp.module.state_dict().items()}}


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

MATRICES = ByName({"2.weight": "powersgd-4", "0.weight": "powersgd-2"}, "sign")


def _train_levels(steps, topology, saved=None):
    return train(steps, codec=MATRICES, topology=topology, measure_every=0, load=saved)


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


def test_matrices_in_two_levels_resume_bit_for_bit(pool):
    whole = pool.run(_train_levels, 6, "2x2", size=4)
    half = pool.run(_train_levels, 3, "2x2", size=4)
    resumed = pool.run(_train_levels, 3, "2x2", half, size=4)
    assert same(whole[0]["model"], resumed[0]["model"])


# ---------------------------------------------------------------- rows in two levels


def _train_nodes(steps, topology, way="topk", saved=None, bad=None):
    return train(steps, way, topology=topology, measure_every=0, load=saved, bad=bad)


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


def test_a_bad_gradient_leaves_no_trace_in_what_nodes_know(pool):
    bad, without = (
        pool.run(_train_nodes, steps, "2,1", "topk", None, 2, size=3) for steps in (3, 2)
    )
    for one, other in zip(bad, without, strict=True):
        assert one["counters"]["skipped_steps"] == 1
        assert same(one["model"], other["model"])
        was, now = one["state"]["residuals"], other["state"]["residuals"]
        assert any(tensor.any() for kept in was.values() for tensor in kept.values())
        assert all(same(was[key], now[key]) for key in was)


def _reload_nodes(topology, way, states):
    ddp = DistributedDataParallel(net())
    state = commpress.compress(ddp, **WHOLE[way], topology=topology)
    state.load_state_dict(*states)
    return state.elastic_state_dict()


OTHERS = [("2x2", None, 2, "topk"), (None, "2,1", 3, "both"), seldom("2x2", "2,1", 3, "topk")]


@pytest.mark.parametrize(("before", "after", "size", "way"), OTHERS)
def test_what_nodes_know_fits_other_nodes(pool, before, after, size, way):
    states = [result["elastic_state"] for result in pool.run(_train_nodes, 3, before, way, size=4)]
    again = pool.run(_reload_nodes, after, way, states, size=size)
    was, now = _owed(states), _owed(again)
    assert was.keys() == now.keys()
    for key in was:
        assert was[key].any()
        torch.testing.assert_close(was[key], now[key], rtol=1e-5, atol=1e-7)


def test_residuals_of_other_nodes_are_refused(pool):
    half = pool.run(_train_nodes, 2, "2,1", size=3)
    for topology in ("1,2", None):
        outcomes = pool.outcomes(_load_into, half, {"topology": topology} | WAYS["topk"], size=3)
        assert all(isinstance(one, StateMismatch) for one in outcomes)


def _load_into(saved, options):
    state = commpress.compress(DistributedDataParallel(net()), **options)
    state.load_state_dict(saved[torch.distributed.get_rank()]["state"])


# ---------------------------------------------------------------- what makes no sense


def _owed(states):
    """R of every parameter, from the elastic states of all ranks."""
    totals = {}
    for state in states:
        for key, shard in state["shards"].items():
            total = totals.setdefault(key, torch.zeros(shard["numel"]))
            total[shard["start"] : shard["start"] + shard["values"].numel()] = shard["values"]
    return totals


def _reload(topology, states):
    ddp = DistributedDataParallel(net())
    state = commpress.compress(ddp, MATRICES, topology=topology)
    state.load_state_dict(*states)
    return state.elastic_state_dict()


@pytest.mark.parametrize(
    ("before", "after", "size"), [("2x2", None, 2), (None, "2,1", 3), ("2x2", "2,1", 3)]
)
def test_what_matrices_owe_fits_other_nodes(pool, before, after, size):
    states = [result["elastic_state"] for result in pool.run(_train_levels, 3, before, size=4)]
    again = pool.run(_reload, after, states, size=size)
    was, now = _owed(states), _owed(again)
    assert {key.split("@")[0] for key in was} == {"0.weight", "2.weight", "4.weight"}
    assert was.keys() == now.keys()
    for key in was:
        torch.testing.assert_close(was[key], now[key], rtol=1e-5, atol=1e-7)
    assert all(value.any() for value in was.values())
    assert same(states[0]["bases"], again[0]["bases"])


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
