"""Folding all parts at once has the bits of Gloo's ring."""

import pytest
import torch
import torch.distributed as dist

from commpress.integrations.process_group.ring_order import Fold, chunk
from variants import few

SIZES = [1, 2, 5, 7, 21, 64, 1000, 4099, 700_001, 3_000_000]


def part_of(rank, numel, dtype):
    return (torch.randn(numel, generator=torch.Generator().manual_seed(numel + rank)) * 50).to(
        dtype
    )


def parts_of(numel, dtype, size):
    return [part_of(rank, numel, dtype) for rank in range(size)]


def gloo_sums(dtype):
    size, found = dist.get_world_size(), []
    for numel in SIZES:
        x = part_of(dist.get_rank(), numel, dtype)
        dist.all_reduce(x)
        found.append(x)
        rows = part_of(dist.get_rank(), numel * size, dtype)
        out = torch.empty(numel, dtype=dtype)
        dist.reduce_scatter_tensor(out, rows)
        found.append(out)
    return found


@pytest.mark.parametrize(
    ("size", "dtype"), few([3, 4], [torch.float32, torch.bfloat16, torch.float16]), ids=str
)
def test_the_fold_has_the_bits_of_gloo(pool, dtype, size):
    found = pool.run(gloo_sums, dtype, size=size)
    for i, numel in enumerate(SIZES):
        fold = Fold(0, dtype, size)
        parts, total = parts_of(numel, dtype, size), torch.empty(numel, dtype=dtype)
        fold(parts, total, 0, chunk(numel, dtype.itemsize, size))
        parts = parts_of(numel * size, dtype, size)
        for rank in range(size):
            assert torch.equal(found[rank][2 * i], total), f"all_reduce of {numel}"
            out = torch.empty(numel, dtype=dtype)
            mine = [p[rank * numel : (rank + 1) * numel] for p in parts]
            fold(mine, out, rank * numel, chunk(numel * size, dtype.itemsize, size))
            assert torch.equal(found[rank][2 * i + 1], out), f"reduce_scatter of {numel}"
