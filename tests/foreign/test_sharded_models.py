"""A model of transformers under FSDP2 with codecs of whole tensors: the weights that it gets under
DDP."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from tiny_models import LENGTH, VOCABULARY, gpt2
from variants import first

CODEC = commpress.ByName({"ln_|bias": "none", "mlp.c_fc": "powersgd-1"}, "powersgd-2")


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def both():
    """Names of weights that differ, and how many bytes crossed for each that torch would have
    sent."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = DistributedDataParallel(gpt2())
    commpress.compress(whole, CODEC, min_numel=0)
    train(whole)
    torch.manual_seed(0)
    model = gpt2()
    for block in (*model.transformer.h, model):
        fully_shard(block)
    state = commpress.compress_fsdp(model, CODEC, None)
    train(model)
    theirs = dict(whole.module.named_parameters())
    different = [
        n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), theirs[n])
    ]
    return different, state.gradients.wire_bytes / state.gradients.logical_bytes


@pytest.mark.parametrize("size", first(1, [3, 2]))
def test_gpt2_with_tied_embeddings_gets_the_weights_of_ddp(pool, size):
    pytest.importorskip("transformers")
    for different, share in pool.run(both, size=size):
        assert different == []
        assert share < 0.7


def with_ranks_of_layers():
    """The choice of a run, its largest move of an element, and elements that stand still although
    plain FSDP2 moves them."""
    torch.set_num_threads(1)
    ends, rules = [], {}
    for codec in (None, commpress.PerLayer("powersgd-4+fp8", 3)):
        torch.manual_seed(0)
        model = gpt2()
        for block in (*model.transformer.h, model):
            fully_shard(block)
        start = {n: p.full_tensor().detach().clone() for n, p in model.named_parameters()}
        state = None if codec is None else commpress.compress_fsdp(model, codec, None)
        train(model, steps=8)
        rules = {} if state is None else state.choice.rules
        ends.append({n: p.full_tensor().detach() - start[n] for n, p in model.named_parameters()})
    plain, ours = ends
    asleep = sum(int(((ours[n] == 0) & (plain[n].abs() > 1e-3)).sum()) for n in ours)
    return rules, max(float(each.abs().max()) for each in ours.values()), asleep


@pytest.mark.parametrize("size", first(1, [3, 2]))
def test_gpt2_with_a_rank_for_every_matrix(pool, size):
    pytest.importorskip("transformers")
    results = pool.run(with_ranks_of_layers, size=size)
    for rules, most, asleep in results:
        assert rules == results[0][0]
        assert len(set(rules.values())) > 1, "matrices differ"
        assert most < 9e-3, "eight steps"
        assert asleep == 0


def alarmed(alarm):
    """Weights of all ranks after training beside an alarm, the largest move of an element in one
    step, and alarms."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = gpt2()
    for block in (*model.transformer.h, model):
        fully_shard(block)
    state = commpress.compress_fsdp(model, "int4", "int8", alarm=alarm)
    most, before = 0.0, [p.full_tensor().clone() for p in model.parameters()]
    for _ in range(8):
        train(model, steps=1)
        after = [p.full_tensor().clone() for p in model.parameters()]
        most = max(
            most, *(float((a - b).detach().abs().max()) for a, b in zip(after, before, strict=True))
        )
        before = after
    return [p.detach() for p in before], most, 0 if state.alarm is None else state.alarm.sounded


def test_an_alarm_watches_gpt2_and_all_ranks_change_codecs_alike(pool):
    pytest.importorskip("transformers")
    plain, watched = (pool.run(alarmed, alarm) for alarm in (None, commpress.Alarm(every=1)))
    sounded = pool.run(alarmed, commpress.Alarm("int8", every=1, growth=1e-3, pause=2))
    for (weights, *_), (same, *_), (other, most, count) in zip(
        plain, watched, sounded, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True)), (
            "looking changes nothing"
        )
        assert count >= 1
        assert any(not torch.equal(a, b) for a, b in zip(weights, other, strict=True))
        assert most < 20 * 1e-3
    assert all(torch.equal(a, b) for a, b in zip(sounded[0][0], sounded[1][0], strict=True))
