"""Run on two ranks: mixture-of-experts models of transformers in a Trainer, their experts divided.
Argument: a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer

import commpress
from test_expert_models import LENGTH, VOCABULARY, mixtral, qwen
from tiny_gpt2 import Words, arguments

ADAM = {"lr": 1e-3, "eps": 1e-4}
KINDS = {
    "adamw": (torch.optim.AdamW, ADAM),
    "onebit": (commpress.OneBitAdam, ADAM | {"exact_steps": 2}),
    "zero_one": (commpress.ZeroOneAdam, ADAM | {"sync": 2, "exact_steps": 2}),
}
LONG = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}
RUNS = [("mixtral", mixtral, kind, None) for kind in KINDS] + [("qwen", qwen, "adamw", {1: 2})]


def run(make, kind, folder, *, resume=False, limit=0.5, copies=None):
    """Weights of this rank in the end."""
    torch.manual_seed(0)
    model = make()
    commpress.moe.parallelise(model, copies=copies)
    options = {"max_steps": 6, "save_steps": 3, "max_grad_norm": limit} | (LONG if copies else {})
    given = arguments(folder, per_device_train_batch_size=2, **options)
    callback = commpress.hf.DividedExperts() if kind == "adamw" else commpress.hf.Compress()
    trainer = Trainer(
        model,
        given,
        train_dataset=Words(64, VOCABULARY, LENGTH),
        optimizer_cls_and_kwargs=KINDS[kind],
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    assert given.max_grad_norm == limit
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(folder):
    torch.set_num_threads(1)
    for name, make, kind, copies in RUNS:
        place = folder / f"{name}-{kind}"
        first = run(make, kind, place, copies=copies)
        again = run(make, kind, place, resume=True, copies=copies)
        for key, value in first.items():
            assert torch.equal(value, again[key]), (name, kind, key)
            theirs = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(theirs, value)
            divided = ".experts.experts." in key
            assert torch.equal(theirs[0], theirs[1]) == (not divided), (name, kind, key)
    print("all is well")
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
