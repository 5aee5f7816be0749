"""Muon on a GPT-2 of transformers: the losses of torch's Muon on the mean gradient, from codes.

``python tests/foreign/test_muon_model.py`` prints the table of docs/optimizers.md.
"""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.collectives.transports.loopback import Loopback, simulate

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")
RANKS, BATCH, STEPS = 4, 4, 240
LR, ADAMW = 0.02, {"lr": 3e-3}


def groups(model):
    """Matrices of hidden layers, and what AdamW trains: embeddings, biases and norms."""
    hidden = [p for name, p in model.named_parameters() if ".h." in name and p.ndim == 2]
    known = {id(p) for p in hidden}
    return hidden, [p for p in model.parameters() if id(p) not in known]


def batches(seed):
    """Words of each rank in each step: sequences that follow a rule, with noise."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        ids = torch.randint(50, (RANKS * BATCH, 16), generator=draw)
        for at in range(2, 16):
            follows = (3 * ids[:, at - 1] + ids[:, at - 2]) % 50
            noisy = torch.rand(RANKS * BATCH, generator=draw) < 0.1
            ids[:, at] = torch.where(noisy, ids[:, at], follows)
        yield ids.split(BATCH)


def rate(step):
    """Linear decay, as most runs have."""
    return 1 - step / STEPS


def trained(seed, **codecs):
    """Mean loss of the last steps, weights of all ranks and bytes that a rank sent a step, over
    replicas in one process; without ``codecs`` by torch's optimizers on the mean gradient."""
    from tiny_gpt2 import flat, model

    torch.manual_seed(seed)
    size = RANKS if codecs else 1
    models = [model(layers=2) for _ in range(size)]
    optimizers = []
    for each, transport in zip(models, Loopback(size).transports(), strict=True):
        hidden, rest = groups(each)
        if codecs:
            every = [{"params": hidden, "lr": LR}, {"params": rest, "use_muon": False, **ADAMW}]
            optimizers.append([commpress.Muon(every, transport=transport, **codecs)])
        else:
            adamw = torch.optim.AdamW(rest, fused=True, **ADAMW)
            optimizers.append([torch.optim.Muon(hidden, lr=LR), adamw])
    every = [(g, g["lr"]) for mine in optimizers for o in mine for g in o.param_groups]
    losses = []
    for step, parts in enumerate(batches(seed)):
        for group, lr in every:
            group["lr"] = lr * rate(step)
        for mine in optimizers:
            for o in mine:
                o.zero_grad()
        losses.append(0.0)
        for rank, ids in enumerate(parts):
            loss = models[rank % size](input_ids=ids, labels=ids).loss
            (loss if codecs else loss / RANKS).backward()
            losses[-1] += loss.item() / RANKS
        if codecs:
            with torch.no_grad():
                simulate([o.steps() for (o,) in optimizers])
        else:
            for o in optimizers[0]:
                o.step()
    sent = optimizers[0][0].counters.wire_bytes / STEPS if codecs else 0.0
    return sum(losses[-20:]) / 20, [flat(each) for each in models], sent


@pytest.mark.slow  # tests/optim/test_muon.py, ranks have the same bits and nothing is lost
@pytest.mark.parametrize("seed", [0])
def test_codes_follow_the_loss_of_torch(seed):
    wanted, _, _ = trained(seed)
    exact, _, dense = trained(seed, codec=None, update_codec=None)
    found, weights, sent = trained(seed, codec="int8", update_codec="int4")
    assert wanted < 3.0, "nothing was learnt"
    assert exact == pytest.approx(wanted, rel=0.005)
    assert found == pytest.approx(wanted, rel=0.01)
    assert all(torch.equal(weights[0], other) for other in weights[1:])
    assert sent < dense / 2


# ---------------------------------------------------------------- under fully_shard


def divided_groups(model):
    """Matrices of hidden layers, also those fused in one tensor; and what AdamW trains."""
    blocks = [
        name for name in dict(model.named_parameters()) if ".layers." in name or ".h." in name
    ]
    hidden, rest = [], {"params": [], "use_muon": False, **ADAMW}
    for name, p in model.named_parameters():
        if name not in blocks or p.ndim < 2 or "gate.weight" in name:
            rest["params"].append(p)
        else:
            half = p.shape[-2] // 2
            split = {"split": (half, half)} if "gate_up" in name else {}
            hidden.append({"params": [p], "use_muon": True, "lr": LR, "weight_decay": 0.0, **split})
    return [*hidden, rest]


def furthest(kind):
    """The furthest move of an element in a step, and the furthest of a twin where an element stood
    still in all steps, in units of a step's mean size; how many tensors hold several matrices."""
    from tiny_models import MODELS, SHARED, loss_of
    from tiny_models import model as made

    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    experts |= {"num_key_value_heads": 2, "shared_expert_intermediate_size": 32}
    model = MODELS[kind]() if kind in MODELS else made("Qwen2MoeForCausalLM", **SHARED | experts)
    twin = copy.deepcopy(model)
    for block in model.transformer.h if kind == "gpt2" else model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = commpress.Muon(divided_groups(model))
    alone = commpress.Muon(divided_groups(twin), transport=Loopback(1).transport(0))
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    begin = [q.detach().clone() for _, q in pairs]
    far, sizes = 0.0, {}
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, 100 * step + dist.get_rank(), early=False).backward()
        before = [(p.detach().full_tensor().clone(), q.detach().clone()) for p, q in pairs]
        for p, q in pairs:
            q.grad = p.grad.full_tensor()
        optimizer.step()
        alone.step()
        for i, ((p, q), (was, had)) in enumerate(zip(pairs, before, strict=True)):
            size = (q.detach() - had).square().mean().sqrt().item()
            if size:
                far = max(far, (p.detach().full_tensor() - was).abs().max().item() / size)
                sizes[i] = size
    still = 0.0
    for i, size in sizes.items():
        p, q = pairs[i]
        stood = p.detach().full_tensor() == begin[i]
        still = max(still, ((q.detach() - begin[i]).abs() * stood).max().item() / size)
    return far, still, sum(p.ndim == 3 for p, _ in pairs)


SLOW = pytest.mark.slow  # the others of each kind


@pytest.mark.parametrize(
    ("kind", "size", "fused"),
    [
        ("qwen2_moe", 3, 4),  # fused matrices and others
        *(pytest.param("gpt2", size, 0, marks=SLOW) for size in (1, 2, 3)),
        *(pytest.param("qwen2_moe", size, 4, marks=SLOW) for size in (1, 2)),
    ],
)
def test_no_weight_of_a_sharded_model_jumps_and_none_stands_still(pool, kind, size, fused):
    """None that a twin has moved by two steps, for what int4 rounds away comes later."""
    for far, still, tensors in pool.run(furthest, kind, size=size):
        assert 1 < far < 20
        assert still < 2
        assert tensors == fused


def beside_partitioned():
    """Weights by Muon alone, and by Muon for matrices beside Partitioned for the rest."""
    from tiny_gpt2 import flat, model

    found = []
    for alone in (True, False):
        torch.manual_seed(0)
        net = model(layers=2)
        hidden, rest = groups(net)
        exact = {"lr": LR, "codec": None, "update_codec": None}
        if alone:
            optimizers = [
                commpress.Muon(
                    [{"params": hidden}, {"params": rest, "use_muon": False, **ADAMW}], **exact
                )
            ]
        else:
            adamw = commpress.Partitioned(rest, torch.optim.AdamW, fused=True, **ADAMW)
            optimizers = [commpress.Muon(hidden, **exact), adamw]
        for _, parts in zip(range(4), batches(0), strict=False):
            ids = parts[dist.get_rank()]
            net(input_ids=ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        found.append(flat(net))
    owned = [m.weight.numel() for b in adamw.buckets for m in b.ranges]
    return *found, sum(owned), sum(p.numel() for p in rest)


def test_matrices_beside_partitioned_have_the_bits_of_muon_alone(pool):
    results = pool.run(beside_partitioned, size=2)
    for alone, beside, owned, every in results:
        assert torch.equal(alone, beside)
        assert torch.equal(alone, results[0][0])
        assert owned < 0.6 * every


def table():
    torch.set_num_threads(1)
    print("| codec, update_codec | loss, three seeds | KB a step and rank |\n| --- | --- | --- |")
    exact = {"codec": None, "update_codec": None}
    coded = [{"codec": "int8", "update_codec": codec} for codec in ("int4", "sign")]
    for codecs in ({}, exact, *coded):
        runs = [trained(seed, **codecs) for seed in range(3)]
        losses = ", ".join(f"{loss:.3f}" for loss, *_ in runs)
        name = ", ".join(map(str, codecs.values())) or "torch.optim.Muon"
        print(f"| {name} | {losses} | {runs[0][2] / 1e3:.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(table())
