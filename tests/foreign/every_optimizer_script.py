"""The Trainer with each of our optimizers, on the backend "commpress"; the argument is a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer

import commpress
import commpress.backend
from tiny_gpt2 import Words, arguments, flat, model, same_everywhere

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
    place = {"optimizer": torch.optim.AdamW, "store": store, "chunk_mb": 0.05}
    every = {
        torch.optim.AdamW: {"lr": 1e-3},  # what the others are compared with
        commpress.OneBitAdam: WARM,
        commpress.ZeroOneAdam: WARM,
        commpress.OneBitLamb: WARM,
        commpress.ShardedOneBitAdam: WARM,
        commpress.ShardedZeroOneAdam: WARM,
        commpress.Offloaded: {**place, "lr": 1e-3},
    }
    moves = {}
    for kind, options in every.items():
        given = {"max_steps": 3, "save_strategy": "no", "max_grad_norm": 0.0}
        net = model()
        before = flat(net).clone()
        Trainer(
            net,
            arguments(folder / kind.__name__, lr_scheduler_type="linear", **given),
            train_dataset=Words(64),
            callbacks=[commpress.hf.Compress()],
            optimizer_cls_and_kwargs=(kind, options),
        ).train()
        weights = same_everywhere(net)
        moves[kind.__name__] = weights - before
        assert torch.isfinite(weights).all()
        assert not torch.equal(weights, before), f"{kind.__name__} has learnt nothing"
        assert dist.get_backend() == "commpress"
        check(kind.__name__, moves[kind.__name__], moves["AdamW"])
    dist.destroy_process_group()
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
