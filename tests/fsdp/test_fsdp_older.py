"""The older FullyShardedDataParallel with a communication hook, on real ranks."""

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import commpress
from fsdp_twin import Block, Net
from test_fsdp_others import raised_by, trained

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about this class


def older(strategy="FULL_SHARD"):
    return FullyShardedDataParallel(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )


def beside_plain(codec, strategy):
    torch.set_num_threads(1)
    losses, models, state = [], [], None
    for ours in (False, True):
        torch.manual_seed(0)
        model = older(strategy)
        if ours:
            state = commpress.FlatShardState(codec)
            model.register_comm_hook(state, commpress.compressed_reduce_scatter_hook)
        losses.append(trained(model))
        with FullyShardedDataParallel.summon_full_params(model):
            models.append({n: p.detach().clone() for n, p in model.named_parameters()})
    saved = state.state_dict()
    state.load_state_dict(saved)
    return losses, models, state.counters.as_dict(), len(saved["residuals"])


@pytest.mark.parametrize(
    ("codec", "strategy"), [("none", "FULL_SHARD"), ("int8", "SHARD_GRAD_OP"), ("int8", "NO_SHARD")]
)
def test_the_hook_averages_as_torch_does_or_in_few_bits(pool, codec, strategy):
    results = pool.run(beside_plain, codec, strategy, size=2)
    for losses, (plain, ours), counters, residuals in results:
        for name in plain:
            assert torch.equal(ours[name], results[0][1][1][name]), name
            if codec == "none":
                assert torch.equal(ours[name], plain[name]), name
            else:
                torch.testing.assert_close(ours[name], plain[name], atol=0.12, rtol=0.2)
        if codec != "none":
            assert losses[0] != losses[1]
            # one for each unit, or each row of it
            assert residuals == (3 if strategy == "NO_SHARD" else 6)
            assert counters["steps"] == 4
            assert 0 < counters["wire_bytes"] < 0.5 * counters["logical_bytes"]


def raising():
    model = older()
    state = commpress.FlatShardState("int8", on_nonfinite="raise")
    model.register_comm_hook(state, commpress.compressed_reduce_scatter_hook)
    return raised_by(model)


def test_the_policy_raise_raises_on_every_rank_after_backward(pool):
    assert pool.run(raising, size=2) == [[(1, True)]] * 2
