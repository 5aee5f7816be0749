"""Run by torchrun on two ranks: ranks of other people's trainers train by themselves; asserts what
must hold. The argument is a folder."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as Lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from transformers import Trainer, TrainingArguments

import commpress
from tiny_gpt2 import Words, model

HALF, BATCH = 7, 6
OPTIONS = {
    "every": 4,
    "codec": "int4",
    "outer": commpress.Nesterov(),
    "overlap": 1,
    "fragments": 2,
    "exact_steps": 2,
}


def flat(module):
    weights = torch.cat([p.detach().view(-1) for p in module.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(everywhere, weights)
    assert torch.equal(everywhere[0], everywhere[1]), "replicas differ"
    return weights.clone()


# ---------------------------------------------------------------- Hugging Face's Trainer


def trained(folder, *, resume=None):
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=14,
        save_steps=HALF,
        logging_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        seed=1,
    )
    callback = commpress.hf.LocalTraining(**OPTIONS)
    trainer = Trainer(model(), arguments, train_dataset=Words(256), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback, flat(trainer.model)


def hugging_face(folder):
    trainer, callback, weights = trained(folder)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(entry["commpress/sent_mb"] for entry in logs) > 0, logs
    assert callback.local.counters.steps == 14
    assert callback.local.counters.exchanges >= 8
    _, again, resumed = trained(folder, resume=str(folder / "checkpoint-7"))
    assert again.local.counters.steps == 7
    assert torch.equal(weights, resumed), (
        f"the resumed run differs by {(weights - resumed).abs().max()}"
    )


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


def batches():
    return DATA[dist.get_rank() :: 2].split(BATCH)


def bare():
    net = Net()
    local = commpress.LocalUpdates(torch.optim.AdamW(net.parameters(), lr=1e-2), **OPTIONS)
    for _ in range(2):
        for x in batches():
            net(x).backward()
            local.step()
            local.zero_grad()
        local.drain()
    local.close()
    return flat(net)


def prepared(attached=False):
    accelerator, net = Accelerator(cpu=True), Net()
    if attached:
        commpress.hf.DistributedCompression().attach(accelerator)
    local = commpress.LocalUpdates(torch.optim.AdamW(net.parameters(), lr=1e-2), **OPTIONS)
    return accelerator, net, *accelerator.prepare(net, local)


def accelerated(folder, expected):
    accelerator, net, ddp, local = prepared()
    accelerator.backward(ddp(batches()[0]))
    with pytest.raises(commpress.CommpressError, match="keep_local"):  # DDP's own all-reduce
        local.step()
    for resume, attached in ((False, False), (True, False), (False, True), (True, True)):
        accelerator.free_memory()
        accelerator, net, ddp, local = prepared(attached)
        if not attached:
            commpress.keep_local(ddp)
            commpress.hf.RankFiles(local).attach(accelerator)
        if resume:
            accelerator.load_state(str(folder))
        for half in range(resume, 2):
            for x in batches():
                accelerator.backward(ddp(x))
                local.step()
                local.zero_grad()
            if half == 0:
                accelerator.save_state(str(folder))
        local.optimizer.drain()
        assert torch.equal(flat(net), expected), (
            f"Accelerate, by one line: {attached}, resumed: {resume}"
        )
        assert int(net.calls) == HALF * 2 * (1 + dist.get_rank()) or resume  # buffers of each rank


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def lightning(folder, expected):
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(DATA[dist.get_rank() :: 2]), batch_size=BATCH
    )
    for resume in (None, folder / "epoch=0-step=7.ckpt"):
        callback, module = commpress.lightning.LocalTraining(**OPTIONS), Module()
        saves = ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=True)
        trainer = Lightning(
            accelerator="cpu",
            devices=2,
            strategy="ddp",
            max_epochs=2,
            callbacks=[callback, saves],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, loader, ckpt_path=resume)
        assert callback.local.counters.steps == (7 if resume else 14)
        assert torch.equal(flat(module), expected), f"Lightning, resumed: {resume}"
        state = torch.load(folder / "epoch=0-step=7.ckpt", weights_only=True)["state_dict"]
        assert len(state) == 5, "weights of a module as always"


def main(folder):
    hugging_face(folder / "hf")
    expected = bare()
    accelerated(folder / "accelerate", expected)
    lightning(folder / "lightning", expected)
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
