"""PowerSGD under DDP: ranks alike, buckets of no matter, checkpoints exact and elastic."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import LowRankCodec
from commpress.errors import StateMismatch


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 10)).to(dtype)


def train(steps, *, codec="powersgd-2", dtype=torch.float32, load=None, bucket=25, bad=None, **options):
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(net(dtype), bucket_cap_mb=bucket)
    state = commpress.compress(ddp, codec, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    if load:
        ddp.module.load_state_dict(load[rank]["model"])
        state.load_state_dict(*([one["state"] for one in load] if load[0].get("elastic") else [load[rank]["state"]]))
    losses = []
    for step in range(state.step, state.step + steps):
        draw = torch.Generator().manual_seed(step * 7 + rank)
        x, y = torch.randn(16, 48, generator=draw).to(dtype), torch.randn(16, 10, generator=draw).to(dtype)
        loss = (ddp(x) - y).square().mean() * (float("inf") if step == bad and rank == 1 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model = {name: p.detach().clone() for name, p in ddp.module.state_dict().items()}
    return {
        "model": model, "losses": losses, "state": state.state_dict(), "elastic_state": state.elastic_state_dict(),
        "counters": state.counters.as_dict(),
    }  # fmt: skip


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("size", [2, 4])
def test_the_hook_keeps_ranks_equal_and_compresses(pool, size):
    results = pool.run(train, 8, size=size)
    assert all(same(results[0]["model"], other["model"]) for other in results)
    counters = results[0]["counters"]
    assert counters["ratio"] > 3
    assert counters["compressed_elements"] == 8 * (48 * 96 + 96 * 96 + 96 * 10)
    assert all(0 < error < 1 for error in counters["errors"].values())
    assert set(counters["errors"]) == {"0.weight", "2.weight", "4.weight"}


def test_buckets_do_not_change_a_bit(pool):
    wide, narrow = (pool.run(_train_bucket, bucket)[0] for bucket in (25, 0.01))
    assert same(wide["model"], narrow["model"])


def _train_bucket(megabytes):
    return train(4, bucket=megabytes)


def test_full_rank_follows_the_plain_run(pool):
    full = pool.run(_train_full, 6)[0]
    plain = pool.run(_train_plain, 6)[0]
    for name in plain["model"]:
        torch.testing.assert_close(full["model"][name], plain["model"][name], atol=1e-5, rtol=1e-4)


def _train_full(steps):
    return train(steps, codec=LowRankCodec(96, min_rate=0.1))


def _train_plain(steps):
    return train(steps, codec="none")


def test_bf16_gradients(pool):
    results = pool.run(_train_bf16, 6)
    assert same(results[0]["model"], results[1]["model"])
    assert all(np.isfinite(results[0]["losses"]))


def _train_bf16(steps):
    return train(steps, dtype=torch.bfloat16)


def test_a_resumed_run_continues_bit_for_bit(pool):
    whole = pool.run(train, 6)
    half = pool.run(train, 3)
    resumed = pool.run(_resume, 3, half)
    assert same(whole[0]["model"], resumed[0]["model"])
    assert same(whole[1]["state"]["bases"], resumed[1]["state"]["bases"])


def _resume(steps, saved):
    return train(steps, load=saved)


def test_an_elastic_state_fits_more_ranks(pool):
    """R is kept: the mean of the new sent residuals is that of the old."""
    half = pool.run(train, 3)
    saved = [{"model": one["model"], "state": one["elastic_state"], "elastic": True} for one in (*half, *half)]
    before = {k: sum(one["state"]["residuals"][k]["sent"] for one in half) / 2 for k in half[0]["state"]["residuals"]}
    loaded = pool.run(_load_elastic, saved, size=4)
    for residuals in loaded:
        for key, mean in before.items():
            torch.testing.assert_close(residuals[key]["sent"], mean, atol=1e-6, rtol=1e-5)


def _load_elastic(saved):
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(net())
    state = commpress.compress(ddp, "powersgd-2")
    state.load_state_dict(*[one["state"] for one in saved[:2]])
    ddp.module.load_state_dict(saved[rank]["model"])
    return state.state_dict()["residuals"]


def test_a_basis_of_another_rank_is_refused(pool):
    half = pool.run(train, 2)
    outcomes = pool.outcomes(_resume_wider, half)
    assert all(isinstance(one, StateMismatch) and "basis of parameter" in str(one) for one in outcomes)


def _resume_wider(saved):
    return train(1, codec="powersgd-3", load=saved)


def test_the_hook_survives_a_bad_gradient(pool):
    results = pool.run(_train_bad, 5)
    assert same(results[0]["model"], results[1]["model"])
    assert results[0]["counters"]["skipped_steps"] == 1
    assert all(torch.isfinite(p).all() for p in results[0]["model"].values())


def _train_bad(steps):
    return train(steps, bad=2)
