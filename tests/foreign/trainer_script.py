"""Run on ranks: what people do with a Trainer and with Accelerate. Arguments: what to do, a folder,
and kinds of optimizers.

save     on some ranks: train, train again, save and go on with Accelerate, Trainer and Lightning
resume   on another number of ranks: go on from what was saved; train compiled
alone    on one rank
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import Trainer

import commpress
from commpress.schedules import DoublingIntervals
from tiny_gpt2 import Words, arguments, flat, lightning, model, same, same_everywhere

COMMON = {"lr": 1e-3, "min_numel": 64, "betas": (0.9, 0.98)}
WINDOWS = {"sync": DoublingIntervals(2, 1, longest=4), "variance_updates": 1}
KINDS = {
    "onebit": (commpress.OneBitAdam, COMMON | {"exact_steps": 2}),
    "lamb": (commpress.OneBitLamb, COMMON | {"exact_steps": 2}),
    "zero-one": (commpress.ZeroOneAdam, COMMON | WINDOWS),
    "sharded-onebit": (commpress.ShardedOneBitAdam, COMMON | {"exact_steps": 2}),
    "sharded-zero-one": (commpress.ShardedZeroOneAdam, COMMON | WINDOWS),
    "gradients": None,
}
ELASTIC = ("zero-one", "gradients")


class Watched(commpress.hf.Compress):
    """Remembers what it loaded, before it moves."""

    loaded = None

    def _load(self, into):
        super()._load(into)
        self.loaded = into.state_dict()  # a copy of what is left behind


def trained(folder, *, steps=4, optimizer=None, resume=None, **options):
    given = arguments(folder, max_steps=steps, save_steps=4, logging_steps=2, **options)
    callback = Watched(None if optimizer else "sign")
    kind = {"optimizer_cls_and_kwargs": optimizer} if optimizer else {}
    trainer = Trainer(model(), given, train_dataset=Words(96), callbacks=[callback], **kind)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, callback


def twice(folder, optimizer=None):
    """A Trainer keeps its DDP model from one train() to the next, and DDP takes one hook."""
    trainer, callback = trained(folder, optimizer=optimizer)
    first, state = flat(trainer.model), callback.state
    steps = state.counters.steps
    trainer.train()
    assert callback.state is state or optimizer
    assert callback.state.counters.steps > (0 if optimizer else steps)
    assert not torch.equal(first, same_everywhere(trainer.model))


def compiled(folder, backend):
    eager, _ = trained(folder / "eager")
    graphs = {"torch_compile": True, "torch_compile_backend": backend}
    trainer, callback = trained(folder / "compiled", **graphs)
    assert callback.state.counters.steps == 4
    assert callback.state.counters.compressed_elements > 0
    torch.testing.assert_close(
        same_everywhere(trainer.model), flat(eager.model), rtol=1e-3, atol=1e-4
    )


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
        first = range(4 * step, 4 * step + 4)
        numbers = [i * dist.get_world_size() + dist.get_rank() for i in first]
        ids = torch.stack([Words(96)[number]["input_ids"] for number in numbers])
        accelerator.backward(wrapped(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == save_after:
            accelerator.save_state(str(folder))
    return same_everywhere(raw), loaded


def total(states):
    """Σ over ranks of what is owed, divided by their number, from the residuals of every rank; rows
    of owners owe nothing."""
    states = [s["commpress"]["quantized"] if "commpress" in s else s for s in states]
    means = []
    for name in sorted(
        states[0]["residuals"], key=lambda name: (name.split("@")[0], int(name.split("@")[1]))
    ):
        parts = [s["residuals"][name] for s in states]
        mean = sum(part["sent"] for part in parts) / len(parts)
        reduced = torch.cat([part["reduced"] for part in parts])[: mean.numel()]
        means.append(mean + reduced if reduced.numel() else mean)
    return torch.cat(means)


def gathered(state):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def saved_total(folder):
    files = sorted(folder.glob("commpress-*.pt"))
    return total([torch.load(file, weights_only=True) for file in files])


# ---------------------------------------------------------------- every optimizer of ours


def saved_by_a_trainer(folder, kind, *, resume):
    """Four steps, saved then; or six, and gone on with from the fourth: other scripts do that with
    the other optimizers."""
    whole, _ = trained(folder, steps=6 if resume else 4, optimizer=kind)
    if resume:
        resumed, _ = resumed_by_a_trainer(folder, kind)
        same(flat(whole.model), flat(resumed.model), folder)


def resumed_by_a_trainer(folder, kind):
    """From the fourth step on, on any number of ranks."""
    return trained(folder, steps=6, optimizer=kind, resume=folder / "checkpoint-4")


class Net(LightningModule):
    """Its data follow from rank and step."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
        self.kind = kind or (torch.optim.SGD, {"lr": 0.05})

    def training_step(self, batch, index):
        generator = torch.Generator().manual_seed(100 * self.trainer.global_step + dist.get_rank())
        return self.net(torch.randn(6, 32, generator=generator)).square().mean()

    def configure_optimizers(self):
        cls, options = self.kind
        return cls(self.net.parameters(), **options)


class Attached(commpress.lightning.Compress):
    """Remembers what it has after it has loaded, before it moves."""

    def on_train_start(self, trainer, module):
        super().on_train_start(trainer, module)
        self.loaded = self.state.state_dict()


def fitted(folder, kind, *, checkpoint=None, elastic=False):
    """Eleven steps in one epoch, each checkpoint after the seventh in the middle of a window of 0/1
    Adam."""
    module, callback = Net(kind), Attached(None if kind else "sign", elastic=elastic)
    keep = ModelCheckpoint(dirpath=folder, filename="seven", every_n_train_steps=7)
    callbacks = [callback] if checkpoint else [callback, keep]
    trainer = lightning(*callbacks, max_steps=11, enable_checkpointing=checkpoint is None)
    loader = DataLoader(torch.zeros(300, 1), batch_size=1)
    trainer.fit(module, loader, ckpt_path=None if checkpoint is None else str(checkpoint))
    return same_everywhere(module), callback


def saved_by_lightning(folder, kind):
    whole, _ = fitted(folder, kind)
    resumed, _ = fitted(folder, kind, checkpoint=folder / "seven.ckpt")
    same(whole, resumed, folder)
    if folder.name in ELASTIC:
        fitted(folder / "elastic", kind, elastic=True)


def resumed_by_lightning(folder, kind):
    callbacks = torch.load(folder / "seven.ckpt")["callbacks"]
    (ranks,) = (state["ranks"] for key, state in callbacks.items() if key == "Attached")
    owed = total([{"commpress": part} if "quantized" in part else part for part in ranks])
    assert owed.abs().max() > 0
    for way in ("", "elastic") if folder.name in ELASTIC else ("",):
        weights, callback = fitted(folder, kind, checkpoint=folder / way / "seven.ckpt")
        torch.testing.assert_close(total(gathered(callback.loaded)), owed)
        assert torch.isfinite(weights).all()


def save(folder, kinds):
    twice(folder / "twice")
    twice(folder / "momentum", (commpress.OneBitAdam, {"lr": 1e-3, "exact_steps": 2}))
    for name in kinds:
        saved_by_a_trainer(folder / "trainer" / name, KINDS[name], resume=name == "lamb")
        saved_by_lightning(folder / "lightning" / name, KINDS[name])
    whole, _ = accelerated(folder / "accelerate", range(6), save_after=3)
    resumed, _ = accelerated(folder / "accelerate", range(4, 6), load=folder / "accelerate")
    same(whole, resumed, "Accelerate")


def resume(folder, kinds):
    for name in kinds:
        place = folder / "trainer" / name
        trainer, callback = resumed_by_a_trainer(place, KINDS[name])
        owed = saved_total(place / "checkpoint-4")
        same_everywhere(trainer.model)
        assert owed.abs().max() > 0
        torch.testing.assert_close(total(gathered(callback.loaded)), owed)
        resumed_by_lightning(folder / "lightning" / name, KINDS[name])
    _, loaded = accelerated(folder, range(4, 6), load=folder / "accelerate")
    torch.testing.assert_close(total(gathered(loaded)), saved_total(folder / "accelerate"))
    # the backward in graphs too takes seconds: where the slow kinds are tried
    compiled(folder / "graphs", "aot_eager" if "onebit" in kinds else "eager")


def alone(folder, kinds):
    """On one rank the whole optimizers pay what was owed, and sharded ones have every rank's
    part."""
    for name in {"onebit", "sharded-zero-one"}.intersection(kinds):
        place = folder / "trainer" / name
        trainer, callback = resumed_by_a_trainer(place, KINDS[name])
        torch.testing.assert_close(total([callback.loaded]), saved_total(place / "checkpoint-4"))
        assert trainer.optimizer.optimizer.steps_done == 6
        assert trainer.optimizer.optimizer.relative_residual() > 0 or name == "onebit"
        trained(place, steps=6, optimizer=KINDS[name], resume=place / "checkpoint-6")


if __name__ == "__main__":
    {"save": save, "resume": resume, "alone": alone}[sys.argv[1]](Path(sys.argv[2]), sys.argv[3:])
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("all is well")
    if dist.is_initialized():
        dist.destroy_process_group()
