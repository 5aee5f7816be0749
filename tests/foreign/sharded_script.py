"""Run by torchrun on two ranks: sharded optimizers and loss scales in Trainer, Accelerate and
Lightning; gets a folder."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer

import commpress
import tiny_gpt2
from commpress.errors import InvalidArgument, StateMismatch
from commpress.schedules import DoublingIntervals
from tiny_gpt2 import Words, arguments, flat, lightning, same, same_everywhere

COMMON = {"lr": 1e-3, "min_numel": 64, "betas": (0.9, 0.98)}
KINDS = {
    "onebit": (commpress.ShardedOneBitAdam, COMMON | {"exact_steps": 4}),
    "zero-one": (
        commpress.ShardedZeroOneAdam,
        COMMON | {"sync": DoublingIntervals(4, 100), "variance_updates": 2},
    ),
}


def model(lora=False):
    net = tiny_gpt2.model()
    return get_peft_model(net, LoraConfig(r=4, target_modules=["c_attn"])) if lora else net


def trained(folder, kind, *, resume=None, clip=0.0, scaler=None, bad=(), steps=12, lora=False):
    given = arguments(folder, max_steps=steps, save_steps=6, logging_steps=4, max_grad_norm=clip)
    options = {"codec": "sign", "exact_steps": 3} if kind is None else {}
    callback = commpress.hf.Compress(**options)
    kind = {} if kind is None else {"optimizer_cls_and_kwargs": kind}
    trainer = Trainer(model(lora), given, train_dataset=Words(256), callbacks=[callback], **kind)
    trainer.accelerator.scaler = scaler
    loss_of, losses = trainer.compute_loss, iter(range(steps))

    def poisoned(*args, **options):
        overflows = next(losses) in bad and dist.get_rank() == 1
        return loss_of(*args, **options) * (float("inf") if overflows else 1.0)

    trainer.compute_loss = poisoned
    trainer.train(resume_from_checkpoint=resume)
    return trainer, callback, same_everywhere(trainer.model)


def in_a_trainer(folder):
    for name, kind in KINDS.items():
        trainer, callback, weights = trained(folder / name, kind)
        counters = callback.state.counters
        assert isinstance(callback.state, kind[0])
        assert counters.compressed_rounds > 0
        assert len(trainer.optimizer.param_groups[-1]["params"]) > 0
        _, again, resumed = trained(folder / name, kind, resume=str(folder / name / "checkpoint-6"))
        assert again.state.counters.steps == 6
        same(weights, resumed, f"{name}, resumed")
    trainer, callback, _ = trained(folder / "lora", KINDS["onebit"], clip=0.5, lora=True)
    filled = [bool(group["params"]) for group in trainer.optimizer.param_groups]
    assert filled == [True, False], "an empty group"
    assert callback.state.max_grad_norm == 0.5
    assert callback.state.facts.norm_ratio > 0
    with pytest.raises(InvalidArgument, match="without DistributedDataParallel"):
        trained(
            folder / "partitioned",
            (commpress.Partitioned, {"optimizer": torch.optim.AdamW}),
            steps=1,
        )
    for kind in (None, KINDS["onebit"], (commpress.OneBitAdam, COMMON | {"exact_steps": 4})):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trained(folder / "scaler", kind, scaler=scaler, bad=(3, 8), steps=10)
        assert scaler.get_scale() == 256.0, "both overflows of rank 1 halved every rank's scale"


def in_accelerate(folder):
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank()))

    def built():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        commpress.hf.DistributedCompression().attach(accelerator)
        net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 16))
        net, ours = accelerator.prepare(
            net, commpress.ShardedOneBitAdam(net.parameters(), exact_steps=2, lr=1e-3)
        )
        return accelerator, net, ours

    def train(accelerator, net, ours, steps):
        for step in steps:
            bad = step == 3 and dist.get_rank() == 1
            accelerator.backward(net(x).square().mean() * (float("inf") if bad else 1.0))
            ours.step()
            ours.zero_grad()

    accelerator, net, ours = built()
    train(accelerator, net, ours, range(5))
    assert ours.optimizer.counters.skipped_steps == 1
    assert accelerator.scaler.get_scale() == 512.0
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    train(accelerator, net, ours, range(5, 8))
    again, other, resumed = built()
    alone = torch.load(folder / "optimizer.bin", weights_only=True)
    if dist.get_rank() == 1:
        resumed.optimizer.load_state_dict(alone)
        with pytest.raises(
            StateMismatch, match="is of rank 0 of 2, this is rank 1 of 2, which owns other parts"
        ):
            next(resumed.optimizer.steps())
    again.load_state(folder)
    train(again, other, resumed, range(5, 8))
    same(same_everywhere(net), same_everywhere(other), "Accelerate, resumed")


class Module(LightningModule):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
        self.kind, self.scales = kind, []

    def training_step(self, batch, index):
        bad = index == 2 and dist.get_rank() == 1
        return self.net(batch[0]).square().mean() * (float("inf") if bad else 1.0)

    def on_train_batch_end(self, outputs, batch, index):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())

    def configure_optimizers(self):
        cls, options = self.kind
        return cls(self.net.parameters(), **options)


def in_lightning(folder):
    data = torch.randn(84, 32, generator=torch.Generator().manual_seed(3))
    for kind in (*KINDS.values(), (torch.optim.SGD, {"lr": 1e-3})):
        plain = kind[0] is torch.optim.SGD
        callback = commpress.lightning.Compress("sign" if plain else None)
        module, scaler = Module(kind), torch.amp.GradScaler("cpu", init_scale=1024.0)
        trainer = lightning(
            callback,
            default_root_dir=folder,
            max_epochs=1,
            plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
            enable_checkpointing=False,
            use_distributed_sampler=True,
        )
        trainer.fit(module, DataLoader(TensorDataset(data), batch_size=6))
        assert module.scales == [1024.0, 1024.0] + [512.0] * 5, module.scales
        assert plain or isinstance(callback.state, kind[0])
        same_everywhere(module)


class Gradually(BaseFinetuning):
    """The last layer from the beginning, the middle one from the second epoch on, the first from
    the third."""

    def freeze_before_training(self, module):
        self.freeze(module.net[:2])

    def finetune_function(self, module, epoch, optimizer):
        if epoch in LATE:
            self.unfreeze_and_add_param_group(
                module.net[LATE[epoch][0]], optimizer, lr=LATE[epoch][1]
            )

    def on_fit_start(self, trainer, module):
        """Lightning freezes again when it resumes, and restores the groups only: plain AdamW would
        leave them frozen too."""
        super().on_fit_start(trainer, module)
        for group in trainer.optimizers[0].param_groups:
            for p in group["params"]:
                p.requires_grad = True


LATE = {1: (1, 3e-3), 2: (0, 5e-3)}  # epoch: layer, learning rate


class Tuned(LightningModule):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        self.kind = kind

    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[0].flip(1)).square().mean()

    def configure_optimizers(self):
        cls, options = self.kind
        return cls([p for p in self.parameters() if p.requires_grad], **options)


def adamw_that_grows(data, epochs):
    """On the batches of both ranks at once."""
    module = Tuned(None)
    adam = torch.optim.AdamW(
        module.net[2].parameters(), lr=1e-3, betas=COMMON["betas"], weight_decay=0.0
    )
    for epoch in range(epochs):
        if epoch in LATE:
            adam.add_param_group(
                {"params": list(module.net[LATE[epoch][0]].parameters()), "lr": LATE[epoch][1]}
            )
        for batch in data.split(12):
            module.zero_grad()
            module.training_step([batch], 0).backward()
            adam.step()
    return flat(module.net)


def layers_unfrozen_late(folder):
    data = torch.randn(48, 16, generator=torch.Generator().manual_seed(3))
    rows = TensorDataset(data[int(os.environ["RANK"]) :: 2])

    def tuned(kind, epochs, resume=None):
        module = Tuned(kind)
        saves = ModelCheckpoint(folder / str(epochs), filename="{epoch}", save_top_k=-1)
        callbacks = (commpress.lightning.Compress(), Gradually(), saves)
        trainer = lightning(*callbacks, default_root_dir=folder, max_epochs=epochs)
        trainer.fit(module, DataLoader(rows, batch_size=6), ckpt_path=resume)
        return same_everywhere(module.net), trainer.optimizers[0]

    cls, options = KINDS["onebit"]
    weights, optimizer = tuned((cls, options | {"exact_steps": 100}), 4)
    assert [group["added_at"] for group in optimizer.param_groups] == [0, 4, 8]
    torch.testing.assert_close(weights, adamw_that_grows(data, 4), rtol=1e-5, atol=1e-6)
    weights, optimizer = tuned((cls, options), 5)
    assert optimizer.counters.compressed_rounds > 0
    resumed, _ = tuned((cls, options), 5, resume=folder / "5" / "epoch=1.ckpt")
    same(weights, resumed, "unfrozen late, resumed")


def main(folder):
    in_a_trainer(folder)
    in_accelerate(folder / "accelerate")
    in_lightning(folder)
    layers_unfrozen_late(folder / "late")
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
