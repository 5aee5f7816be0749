"""A Mixtral of transformers whose experts do not all fit into memory: the bits of one that has them
all."""

import pytest
import torch
import torch.distributed as dist

import commpress
from commpress.tiered_mem import Options
from test_expert_models import OPTIMIZERS, mixtral, tokens_of
from variants import first

SMALL = Options(chunk_bytes=64 << 10, pack_below=0, pack_bytes=32 << 10, segment_bytes=4 << 20)


def trained(folder, ranks):
    """Weights after four steps of two micro-batches with 3 of 12 experts in memory, and with all;
    bytes read."""
    torch.set_num_threads(1)
    found, read = [], 0
    for tiers in (True, False):
        torch.manual_seed(0)
        model = mixtral()
        if tiers:
            store = commpress.TieredStore.open(
                f"{folder}/{dist.get_rank()}", host="512KiB", engine="threads", options=SMALL
            )
            commpress.moe.parallelise(model, store=store, resident=3)
            optimizer = commpress.moe.ExpertOptimizer(
                model.parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-3
            )
        else:
            commpress.moe.parallelise(model, separate=True)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
        model = torch.nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
        for step in range(4):
            for part in range(2):
                tokens = tokens_of(10 * part + dist.get_rank(), step)
                model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.numpy() for name, value in model.state_dict().items()})
        if tiers:
            read = store.traffic()[0]
            store.close()
    return found, read


@pytest.mark.parametrize("ranks", first(1, [2, 1]))
def test_a_mixtral_with_few_experts_in_memory_has_the_same_bits(pool, tmp_path, ranks):
    for (ours, twin), read in pool.run(trained, str(tmp_path), ranks, size=ranks):
        assert ours.keys() == twin.keys()
        assert [name for name, value in twin.items() if (ours[name] != value).any()] == []
        assert read > 0
