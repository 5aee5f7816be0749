"""Run by torchrun on two ranks: a Trainer whose ranks train by themselves; asserts what must hold. The argument is a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import commpress
from tiny_gpt2 import Words, model


def trained(folder, *, resume=None):
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=14, save_steps=7, logging_steps=2, per_device_train_batch_size=4, learning_rate=1e-3,
        report_to=[], disable_tqdm=True, max_grad_norm=1.0, lr_scheduler_type="constant", seed=1,
    )  # fmt: skip
    callback = commpress.hf.LocalTraining(every=4, codec="int4", outer=commpress.Nesterov(), overlap=1, fragments=2)
    trainer = Trainer(model(), arguments, train_dataset=Words(256), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    weights = torch.cat([p.detach().view(-1) for p in trainer.model.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(everywhere, weights)
    assert torch.equal(everywhere[0], everywhere[1]), "replicas differ"
    return trainer, callback, weights


def main(folder):
    trainer, callback, weights = trained(folder / "local")
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(entry["commpress/sent_mb"] for entry in logs) > 0, logs
    assert callback.local.counters.steps == 14
    assert callback.local.counters.exchanges >= 8
    _, again, resumed = trained(folder / "local", resume=str(folder / "local" / "checkpoint-7"))
    assert again.local.counters.steps == 7
    assert torch.equal(weights, resumed), f"the resumed run differs by {(weights - resumed).abs().max()}"
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
