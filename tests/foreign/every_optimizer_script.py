"""The Trainer with each of our optimizers, on the backend "commpress"; the argument is a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import commpress
import commpress.backend
from tiny_gpt2 import Words, model

WARM = {"lr": 1e-3, "exact_steps": 1}


def check(name, move, exact):
    """Weights move to where AdamW moves them, none jumps and none stands still; LAMB has a rate of
    its own for each layer."""
    alike = torch.cosine_similarity(move, exact, dim=0).item()
    assert alike > {"AdamW": 0.999, "Offloaded": 0.999, "OneBitLamb": 0.2}.get(name, 0.75), (
        f"{name}: cosine {alike}"
    )
    assert move.abs().max() < 3 * exact.abs().max(), f"{name}: a weight jumps by {move.abs().max()}"
    still = ((move == 0) & (exact != 0)).sum() / (exact != 0).sum()
    assert still < 0.01, f"{name}: {still:.0%} of the weights stand still"


def main(folder):
    # before TrainingArguments: Accelerate knows no backend but Gloo on CPUs
    dist.init_process_group("commpress")
    store = commpress.TieredStore.open(folder / f"store{dist.get_rank()}", host="64MiB")
    every = {
        torch.optim.AdamW: {"lr": 1e-3},  # what the others are compared with
        commpress.OneBitAdam: WARM,
        commpress.ZeroOneAdam: WARM,
        commpress.OneBitLamb: WARM,
        commpress.ShardedOneBitAdam: WARM,
        commpress.ShardedZeroOneAdam: WARM,
        commpress.Offloaded: {
            "optimizer": torch.optim.AdamW,
            "store": store,
            "chunk_mb": 0.05,
            "lr": 1e-3,
        },
    }
    moves = {}
    for kind, options in every.items():
        arguments = TrainingArguments(
            str(folder / kind.__name__),
            use_cpu=True,
            max_steps=3,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            save_strategy="no",
            max_grad_norm=0.0,
            seed=1,
        )
        net = model()
        before = torch.cat([p.detach().view(-1).clone() for p in net.parameters()])
        trainer = Trainer(
            net,
            arguments,
            train_dataset=Words(64),
            callbacks=[commpress.hf.Compress()],
            optimizer_cls_and_kwargs=(kind, options),
        )
        trainer.train()
        weights = torch.cat([p.detach().view(-1) for p in net.parameters()])
        moves[kind.__name__] = weights - before
        first = weights.clone()
        dist.broadcast(first, 0)
        assert torch.equal(weights, first), f"{kind.__name__}: replicas differ"
        assert torch.isfinite(weights).all()
        assert not torch.equal(weights, before), f"{kind.__name__} has learnt nothing"
        assert dist.get_backend() == "commpress"
        check(kind.__name__, moves[kind.__name__], moves["AdamW"])
        del trainer, net
    dist.destroy_process_group()
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
