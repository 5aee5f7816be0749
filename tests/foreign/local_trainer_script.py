"""Train a GPT-2 by Hugging Face's Trainer in hidden rounds, on the ranks of a launcher."""

import sys

import torch
import torch.distributed as dist
from transformers import Trainer

import commpress.hf
import tiny_gpt2


def main(folder: str) -> None:
    torch.set_num_threads(1)
    model = tiny_gpt2.model()
    before = [p.detach().clone() for p in model.parameters()]
    local = commpress.hf.LocalTraining()
    args = tiny_gpt2.arguments(folder, max_steps=20, save_strategy="no")
    Trainer(model, args, train_dataset=tiny_gpt2.Words(400), callbacks=[local]).train()
    gain, size = local.local.counters.gain, dist.get_world_size()
    assert 1 <= gain <= size**0.5
    assert (gain == 1) == (size == 1)
    assert {group["lr"] for group in local.local.inner.param_groups} == {1e-3}
    assert not any(map(torch.equal, model.parameters(), before))
    mine = tiny_gpt2.flat(model)
    of_first = mine.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(mine, of_first)
    print("all is well")


if __name__ == "__main__":
    main(sys.argv[1])
