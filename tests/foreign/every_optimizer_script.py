"""The Trainer with each of our optimizers, on the backend "commpress"; the argument is a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import commpress
import commpress.backend
from tiny_gpt2 import Words, model

WARM = {"lr": 1e-3, "warmup_steps": 1}


def main(folder):
    dist.init_process_group("commpress")  # before TrainingArguments: Accelerate knows no backend but Gloo on CPUs
    store = commpress.TieredStore.open(folder / f"store{dist.get_rank()}", host="64MiB")
    every = {
        commpress.OneBitAdam: WARM,
        commpress.ZeroOneAdam: WARM,
        commpress.OneBitLamb: WARM,
        commpress.ShardedOneBitAdam: WARM,
        commpress.ShardedZeroOneAdam: WARM,
        commpress.Offloaded: {"optimizer": torch.optim.AdamW, "store": store, "chunk_mb": 0.05, "lr": 1e-3},
    }
    for kind, options in every.items():
        arguments = TrainingArguments(
            str(folder / kind.__name__), use_cpu=True, max_steps=3, per_device_train_batch_size=4, report_to=[],
            disable_tqdm=True, logging_steps=1, save_strategy="no", max_grad_norm=0.0, seed=1,
        )  # fmt: skip
        net = model()
        before = torch.cat([p.detach().view(-1).clone() for p in net.parameters()])
        trainer = Trainer(
            net, arguments, train_dataset=Words(64), callbacks=[commpress.hf.Compress()],
            optimizer_cls_and_kwargs=(kind, options),
        )  # fmt: skip
        trainer.train()
        weights = torch.cat([p.detach().view(-1) for p in net.parameters()])
        first = weights.clone()
        dist.broadcast(first, 0)
        assert torch.equal(weights, first), f"{kind.__name__}: replicas differ"
        assert torch.isfinite(weights).all()
        assert not torch.equal(weights, before), f"{kind.__name__} has learnt nothing"
        assert dist.get_backend() == "commpress"
        del trainer, net
    dist.destroy_process_group()
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
