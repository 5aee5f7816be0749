"""Run by torchrun on two ranks: ranks of other people's trainers train by themselves; asserts what
must hold. The argument is a folder."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

import commpress
from tiny_gpt2 import Words, arguments, lightning, model, same, same_everywhere

HALF, BATCH = 7, 6
OPTIONS = {
    "every": 4,
    "codec": "int4",
    "outer": commpress.Nesterov(),
    "overlap": 1,
    "fragments": 2,
    "exact_steps": 2,
}

# ---------------------------------------------------------------- Hugging Face's Trainer


def trained(folder, *, resume=None):
    given = arguments(folder, max_steps=14, save_steps=HALF, logging_steps=2, max_grad_norm=1.0)
    callback = commpress.hf.LocalTraining(**OPTIONS)
    trainer = Trainer(model(), given, train_dataset=Words(256), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback, same_everywhere(trainer.model)


def hugging_face(folder):
    trainer, callback, weights = trained(folder)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(entry["commpress/sent_mb"] for entry in logs) > 0, logs
    assert callback.local.counters.steps == 14
    assert callback.local.counters.exchanges >= 8
    _, again, resumed = trained(folder, resume=str(folder / "checkpoint-7"))
    assert again.local.counters.steps == 7
    same(weights, resumed, "Trainer, resumed")
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-7"))
    same(weights, same_everywhere(trainer.model), "Trainer, resumed after a whole run")


# ---------------------------------------- a loop of one's own, Accelerate, Lightning: the same bits


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
        )
        # of each rank: nobody averages or broadcasts it
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1 + dist.get_rank()
        return (self.layers(x) - 1).square().mean()


DATA = torch.randn(2 * BATCH * HALF, 32, generator=torch.Generator().manual_seed(3))


def rows():
    return DATA[dist.get_rank() :: 2]


def updates(net):
    return commpress.LocalUpdates(torch.optim.AdamW(net.parameters(), lr=1e-2), **OPTIONS)


def bare():
    net = Net()
    local = updates(net)
    for _ in range(2):
        for x in rows().split(BATCH):
            net(x).backward()
            local.step()
            local.zero_grad()
        local.drain()
    local.close()
    return same_everywhere(net).clone()


def accelerated(folder, expected):
    accelerator, net = Accelerator(cpu=True), Net()
    ddp, local = accelerator.prepare(net, updates(net))
    accelerator.backward(ddp(rows()[:BATCH]))
    with pytest.raises(commpress.CommpressError, match="keep_local"):  # DDP's own all-reduce
        local.step()
    for resume, attached in ((False, False), (True, False), (False, True), (True, True)):
        accelerator.free_memory()
        accelerator, net = Accelerator(cpu=True), Net()
        if attached:
            commpress.hf.DistributedCompression().attach(accelerator)
        ddp, local = accelerator.prepare(net, updates(net))
        if not attached:
            commpress.keep_local(ddp)
            commpress.hf.RankFiles(local).attach(accelerator)
        if resume:
            accelerator.load_state(str(folder))
        for half in range(resume, 2):
            for x in rows().split(BATCH):
                accelerator.backward(ddp(x))
                local.step()
                local.zero_grad()
            if half == 0:
                accelerator.save_state(str(folder))
        local.optimizer.drain()
        same(same_everywhere(net), expected, f"Accelerate, {attached}, resumed: {resume}")
        assert int(net.calls) == HALF * 2 * (1 + dist.get_rank()) or resume  # buffers of each rank


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def in_lightning(folder, expected):
    for resume in (None, folder / "epoch=0-step=7.ckpt"):
        callback, module = commpress.lightning.LocalTraining(**OPTIONS), Module()
        saves = ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=True)
        loader = DataLoader(TensorDataset(rows()), batch_size=BATCH)
        lightning(callback, saves, max_epochs=2, log_every_n_steps=0).fit(
            module, loader, ckpt_path=resume
        )
        assert callback.local.counters.steps == (7 if resume else 14)
        same(same_everywhere(module), expected, f"Lightning, resumed: {resume}")
    state = torch.load(folder / "epoch=0-step=7.ckpt", weights_only=True)["state_dict"]
    assert len(state) == 5, "weights of a module as always"


def main(folder):
    hugging_face(folder / "hf")
    expected = bare()
    accelerated(folder / "accelerate", expected)
    in_lightning(folder / "lightning", expected)
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
