"""Run by torchrun: what people do with a Trainer and with Accelerate. Arguments: what to do, and a folder.

save     on some ranks: train, train again, train compiled, save and go on with Accelerate
resume   on another number of ranks: go on from what was saved
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

import commpress
from tiny_gpt2 import Words, model


def flat(module):
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def the_same_everywhere(weights):
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    return all(torch.equal(weights, theirs) for theirs in everywhere)


class Watched(commpress.hf.Compress):
    """Remembers what it loaded, before it moves."""

    loaded = None

    def _load(self, into):
        super()._load(into)
        self.loaded = into.state_dict()


def trainer_of(folder, *, steps=4, optimizer=None, **options):
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=steps, save_steps=4, logging_steps=2, per_device_train_batch_size=4,
        learning_rate=1e-3, report_to=[], disable_tqdm=True, lr_scheduler_type="constant", seed=1, **options,
    )  # fmt: skip
    callback = Watched(codec="sign")
    kind = {"optimizer_cls_and_kwargs": optimizer} if optimizer else {}
    return Trainer(model(), arguments, train_dataset=Words(96), callbacks=[callback], **kind), callback


def twice(folder, optimizer=None):
    """A Trainer keeps its DDP model from one train() to the next, and DDP takes one hook."""
    trainer, callback = trainer_of(folder, optimizer=optimizer)
    trainer.train()
    first, state = flat(trainer.model), callback.state
    steps = state.counters.steps
    trainer.train()
    second = flat(trainer.model)
    assert callback.state is state or optimizer
    assert callback.state.counters.steps > (0 if optimizer else steps)
    assert not torch.equal(first, second)
    assert the_same_everywhere(second)


def compiled(folder):
    eager, _ = trainer_of(folder / "eager")
    eager.train()
    trainer, callback = trainer_of(folder / "compiled", torch_compile=True, torch_compile_backend="aot_eager")
    trainer.train()
    assert callback.state.counters.steps == 4
    assert callback.state.counters.compressed_elements > 0
    weights = flat(trainer.model)
    assert the_same_everywhere(weights)
    torch.testing.assert_close(weights, flat(eager.model), rtol=1e-3, atol=1e-4)


def accelerated(folder, steps, *, load=None, save_after=None):
    """Weights in the end, and what the state held when it was loaded."""
    accelerator = Accelerator(cpu=True)
    compression = commpress.hf.DistributedCompression(codec="sign").attach(accelerator)
    raw = model()
    wrapped, optimizer = accelerator.prepare(raw, torch.optim.SGD(raw.parameters(), lr=0.05))
    if load is not None:
        accelerator.load_state(str(load))
    loaded = compression.state.state_dict()
    for step in steps:
        ids = torch.stack([Words(96)[(4 * step + i) * dist.get_world_size() + dist.get_rank()]["input_ids"] for i in range(4)])
        accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == save_after:
            accelerator.save_state(str(folder))
    assert the_same_everywhere(flat(raw))
    return flat(raw), loaded


def total(states):
    """Σ over ranks of what is owed, divided by their number, from one residual of every rank."""
    name = "transformer.wte.weight@0"
    size = len(states)
    mean = sum(s["residuals"][name]["sent"] for s in states) / size
    return mean + torch.cat([s["residuals"][name]["reduced"] for s in states])[: mean.numel()]


def gathered(state):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def saved_total(folder):
    return total([torch.load(file, weights_only=True) for file in sorted(folder.glob("commpress-*.pt"))])


def save(folder):
    twice(folder / "twice")
    twice(folder / "momentum", (commpress.OneBitAdam, {"lr": 1e-3, "warmup_steps": 2}))
    compiled(folder / "graphs")
    whole, _ = accelerated(folder / "accelerate", range(6), save_after=3)
    resumed, _ = accelerated(folder / "accelerate", range(4, 6), load=folder / "accelerate")
    assert torch.equal(whole, resumed)


def resume(folder):
    checkpoint = folder / "twice" / "checkpoint-4"
    trainer, callback = trainer_of(folder / "twice", steps=6)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert the_same_everywhere(flat(trainer.model))
    owed = saved_total(checkpoint)
    assert owed.abs().max() > 0
    torch.testing.assert_close(total(gathered(callback.loaded)), owed)
    _, loaded = accelerated(folder, range(4, 6), load=folder / "accelerate")
    torch.testing.assert_close(total(gathered(loaded)), saved_total(folder / "accelerate"))


if __name__ == "__main__":
    {"save": save, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
    if dist.get_rank() == 0:
        print("all is well")
    dist.destroy_process_group()
