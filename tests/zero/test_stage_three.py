"""Stage 3, a model streamed over a group: what a rank has and what a step moves, against the
formulas of ZeRO (Ψ parameters, P ranks, float32, AdamW). Stages 1 and 2 are in test_partitioned.py.

    in stores      16 Ψ / P            parameters 4, gradients 4, moments 8
    in memory      two units
    network        3 · 4 Ψ (P − 1) / P a step: gathered for forward and for backward, gradients
                   scattered
    PCIe           2 · 4 Ψ / P up, 4 Ψ / P down: the own row of each parameter twice, its gradient
    disk           (4 + 4 + 4 + 12) Ψ / P read and (4 + 12) Ψ / P written: forward, backward,
                   gradients, update
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import commpress
from small_store import open_store

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
            model.parameters(),
            torch.optim.AdamW,
            store=store,
            chunk_mb=0.0164,
            resident={"host": 0},
            lr=1e-3,
        )

        def look(*_):
            nonlocal most
            most = max(most, sum(unit.nbytes for unit in streamed.groups if unit.present))

        for layer in model:
            layer.register_forward_hook(look)
            layer.weight.register_post_accumulate_grad_hook(look)

        def counters():
            crossing = store.crossing
            return torch.tensor(
                [streamed.transport.sent_bytes, *store.traffic(), crossing.up, crossing.down]
            )

        for step in range(1 + STEPS):
            if step == 1:  # in the first there are no moments to read yet
                before = counters()
            loss = model(torch.randn(2, WIDTH)).square().mean()
            # what was used last would be used first, and not be read
            store.evict(list(store)).wait()
            loss.backward()
            store.evict(list(store)).wait()
            held = sum(store.info(name).nbytes for name in store)
            optimizer.step()
            optimizer.finish()  # and what the update has left
            store.evict(list(store)).wait()
        sent, *moved = ((counters() - before) / STEPS).tolist()
        scratch = streamed.channel.workspace.lent_bytes
        unit = max(unit.nbytes for unit in streamed.groups)
        return numel / ranks, (held, sent, *moved), (most, scratch, unit)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_memory_and_bytes_equal_the_formulas(pool, tmp_path, ranks):
    for part, (held, sent, read, written, up, down), (most, scratch, unit) in pool.run(
        measured, str(tmp_path), size=ranks
    ):
        assert held == pytest.approx(16 * part, rel=0.05)
        assert sent == pytest.approx(3 * 4 * part * (ranks - 1), rel=0.05)
        assert read == pytest.approx((4 + 4 + 4 + 12) * part, rel=0.05)
        assert written == pytest.approx((4 + 12) * part, rel=0.05)
        assert (up, down) == (
            pytest.approx(2 * 4 * part, rel=0.05),
            pytest.approx(4 * part, rel=0.05),
        )
        assert most <= 2 * unit
        assert scratch <= 10 * unit


def test_bytes_between_host_and_device_in_half_precision(tmp_path):
    """One rank, bfloat16: 2 · 2 bytes per parameter up, for forward and backward, and 2 down, the
    gradient."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))).bfloat16()
    numel = sum(p.numel() for p in model.parameters())
    with open_store(tmp_path / "store", host="2MiB") as store:
        commpress.stream(model, store=store, chunk_mb=0.0164)
        optimizer = commpress.Offloaded(
            model.parameters(), torch.optim.AdamW, store=store, chunk_mb=0.0164, lr=1e-3
        )
        for _ in range(2):
            before = store.crossing.up, store.crossing.down
            model(torch.randn(2, WIDTH).bfloat16()).float().square().mean().backward()
            optimizer.step()
        assert (store.crossing.up - before[0], store.crossing.down - before[1]) == (
            2 * 2 * numel,
            2 * numel,
        )
