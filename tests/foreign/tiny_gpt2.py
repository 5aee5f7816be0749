"""A tiny GPT-2 without dropout and random words to learn by heart, for scripts that a launcher
runs; and trainers of others that print nothing."""

import os
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments


class Words(torch.utils.data.Dataset):
    def __init__(self, count, vocabulary=50, length=16):
        self.count, self.vocabulary, self.length = count, vocabulary, length

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocabulary, (self.length,), generator=draw)
        return {"input_ids": ids, "labels": ids}


def model(layers=1):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": layers, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def arguments(folder: Any, **options: Any) -> TrainingArguments:
    """Of a Trainer on the processor."""
    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "seed": 1}
    rate = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    return TrainingArguments(
        str(folder), **quiet | rate | {"per_device_train_batch_size": 4} | options
    )


def lightning(*callbacks: Any, **options: Any) -> Any:
    """Lightning's Trainer on the processors of all ranks."""
    from lightning.pytorch import Trainer

    switches = ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    given = {"accelerator": "cpu", "devices": ranks, "strategy": "ddp", "num_sanity_val_steps": 0}
    return Trainer(callbacks=list(callbacks), **given | dict.fromkeys(switches, False) | options)


def flat(module: torch.nn.Module) -> torch.Tensor:
    """All weights, whole."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in module.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def same_everywhere(module: torch.nn.Module) -> torch.Tensor:
    """The weights, which all ranks have."""
    weights = flat(module)
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(weights, other) for other in everywhere), "replicas differ"
    return weights


def same(one: torch.Tensor, other: torch.Tensor, what: object = "") -> None:
    assert torch.equal(one, other), f"{what}: they differ by {(one - other).abs().max()}"
