"""Run on two ranks: Trainer with compressed gradients and optimizers; asserts what must hold. The
argument is a folder."""

import shutil
import sys
from pathlib import Path

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

import commpress
from commpress.schedules import AfterSteps, DoublingIntervals
from tiny_gpt2 import Words, arguments, model, same, same_everywhere

COMMON = {"lr": 1e-3, "min_numel": 64, "betas": (0.9, 0.98)}
WINDOWS = {"sync": DoublingIntervals(4, 100), "variance_updates": 2}
KINDS = {
    "onebit": (commpress.OneBitAdam, COMMON | {"exact_steps": AfterSteps(4)}),
    "zero-one": (commpress.ZeroOneAdam, COMMON | WINDOWS),
    "gradients": None,
}


class Reporter(TrainerCallback):
    """Stands where TensorBoard does: before ours, unless ours is moved."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **things):
        self.seen.append(dict(logs))


def trained(folder, optimizer=None, *, resume=None, clip=0.0, **options):
    steps = {"max_steps": 14, "save_steps": 7, "logging_steps": 2}
    given = arguments(folder, **steps, max_grad_norm=clip, **options)
    samples, reporter = [], Reporter()
    options = {} if optimizer else {"codec": "sign", "exact_steps": 3}
    callback = commpress.hf.Compress(metrics=[samples.append], **options)
    kind = {"optimizer_cls_and_kwargs": optimizer} if optimizer else {}
    trainer = Trainer(
        model(), given, train_dataset=Words(256), callbacks=[reporter, callback], **kind
    )
    commpress.hf.report_first(trainer)
    trainer.train(resume_from_checkpoint=resume)
    assert any("commpress/encode_ms" in logs for logs in reporter.seen), "reporters get our numbers"
    assert sum(sample.steps for sample in samples) == callback.state.counters.steps
    return trainer, callback, same_everywhere(trainer.model)


def main(folder):
    for name, kind in KINDS.items():
        trainer, callback, weights = trained(folder / name, kind)
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert all("commpress/bytes_per_step" in entry for entry in logs), logs
        assert logs[-1]["commpress/bytes_per_step"] < logs[0]["commpress/bytes_per_step"] / 3, logs
        assert logs[-1]["commpress/encode_ms"] > 0
        assert logs[-1]["commpress/residual" if kind else "commpress/error"] > 0
        assert callback.state.counters.steps == 14
        checkpoint = folder / name / "checkpoint-7"
        assert (checkpoint / f"commpress-{dist.get_rank()}.pt").exists()
        _, again, resumed = trained(folder / name, kind, resume=str(checkpoint))
        assert again.state.counters.steps == 7
        same(weights, resumed, f"{name}, resumed")

    trainer, callback, _ = trained(folder / "clip", KINDS["onebit"], clip=0.5)
    assert callback.state.max_grad_norm == trainer.args.max_grad_norm == 0.5
    assert callback.state.facts.norm_ratio > 0
    resumes_from_another_folder(folder / "gradients", folder / "elsewhere", weights)
    print("all is well")


def resumes_from_another_folder(run, folder, weights):
    """The checkpoint that the arguments name is read, and left as it is."""
    checkpoint, ranks = run / "checkpoint-7", range(dist.get_world_size())
    if dist.get_rank() == 0:  # of another run, with the same name
        shutil.copytree(run / "checkpoint-14", folder / "checkpoint-7")
    dist.barrier()
    before = [(checkpoint / f"commpress-{rank}.pt").read_bytes() for rank in ranks]
    named = {"resume": str(checkpoint), "resume_from_checkpoint": str(checkpoint)}
    _, _, resumed = trained(folder, **named, save_only_model=True)
    same(weights, resumed, "resumed from another folder")
    dist.barrier()
    assert before == [(checkpoint / f"commpress-{rank}.pt").read_bytes() for rank in ranks]
    assert all((folder / "checkpoint-14" / f"commpress-{rank}.pt").exists() for rank in ranks)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
