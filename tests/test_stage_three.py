"""Stage 3, a model streamed over a group: what a rank has and what a step moves, against the formulas of ZeRO (Ψ parameters,
P ranks, float32, AdamW). Stages 1 and 2 are in test_partitioned.py.

    in stores      16 Ψ / P            parameters 4, gradients 4, moments 8
    in memory      two units
    network        3 · 4 Ψ (P − 1) / P a step: gathered for forward and for backward, gradients scattered
    disk           (4 + 4 + 4 + 12) Ψ / P read and (4 + 12) Ψ / P written: forward, backward, gradients, update
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commpress
from stream_twin import open_store

WIDTH, LAYERS, STEPS = 128, 40, 2


def measured(folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    numel, ranks = sum(p.numel() for p in model.parameters()), dist.get_world_size()
    most = 0
    with open_store(f"{folder}/{dist.get_rank()}", host="500KiB") as store:
        streamed = commpress.stream(model, store=store, chunk_mb=0.0164)
        optimizer = commpress.Offloaded(
            model.parameters(), torch.optim.AdamW, store=store, chunk_mb=0.0164, host_budget=0, lr=1e-3
        )

        def look(*_):
            nonlocal most
            most = max(most, sum(unit.nbytes for unit in streamed.units if unit.present))

        for layer in model:
            layer.register_forward_hook(look)
            layer.weight.register_post_accumulate_grad_hook(look)

        def counters():
            return torch.tensor([streamed.transport.sent_bytes, *store.traffic()])

        for step in range(1 + STEPS):
            if step == 1:  # in the first there are no moments to read yet
                before = counters()
            loss = model(torch.randn(2, WIDTH)).square().mean()
            store.evict(list(store)).wait()  # what was used last would be used first, and not be read
            loss.backward()
            store.evict(list(store)).wait()
            held = sum(store.info(name).nbytes for name in store)
            optimizer.step()
        sent, read, written = ((counters() - before) / STEPS).tolist()
        scratch = streamed.channel.scratch.bytes
        unit = max(unit.nbytes for unit in streamed.units)
        return numel / ranks, (held, sent, read, written), (most, scratch, unit)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_memory_and_bytes_equal_the_formulas(pool, tmp_path, ranks):
    for part, (held, sent, read, written), (most, scratch, unit) in pool.run(measured, str(tmp_path), size=ranks):
        assert held == pytest.approx(16 * part, rel=0.05)
        assert sent == pytest.approx(3 * 4 * part * (ranks - 1), rel=0.05)
        assert read == pytest.approx((4 + 4 + 4 + 12) * part, rel=0.05)
        assert written == pytest.approx((4 + 12) * part, rel=0.05)
        assert most <= 2 * unit
        assert scratch <= 10 * unit
