"""A model of transformers under FSDP2 with codecs of whole tensors: the weights that it gets under DDP."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from tiny_models import LENGTH, VOCABULARY, gpt2
from variants import first

CODEC = commpress.ByName({"ln_|bias": "none", "mlp.c_fc": "sketch-8"}, "powersgd-2")


def train(model, steps=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def both():
    """Names of weights that differ, and how many bytes crossed for each that torch would have sent."""
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
    different = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), theirs[n])]
    return different, state.gradients.wire_bytes / state.gradients.logical_bytes


@pytest.mark.parametrize("size", first(1, [3, 2]))
def test_gpt2_with_tied_embeddings_gets_the_weights_of_ddp(pool, size):
    pytest.importorskip("transformers")
    for different, share in pool.run(both, size=size):
        assert different == []
        assert share < 0.7
