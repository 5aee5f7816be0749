"""Run on two ranks: mixture-of-experts models of transformers in a Trainer, their experts divided.
Argument: a folder."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import commpress
from test_expert_models import LENGTH, VOCABULARY, mixtral, qwen


class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


ADAM = {"lr": 1e-3, "eps": 1e-4}
KINDS = {
    "adamw": (torch.optim.AdamW, ADAM),
    "onebit": (commpress.OneBitAdam, ADAM | {"exact_steps": 2}),
    "zero_one": (commpress.ZeroOneAdam, ADAM | {"sync": 2, "exact_steps": 2}),
}


LONG = {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}


def run(make, kind, folder, *, resume=False, limit=1.0, copies=None):
    """Weights of this rank, half-way and in the end."""
    torch.manual_seed(0)
    model = make()
    commpress.moe.parallelise(model, copies=copies)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=6,
        save_steps=3,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        seed=1,
        max_grad_norm=limit,
        **(LONG if copies else {}),
    )
    callback = commpress.hf.DividedExperts() if kind == "adamw" else commpress.hf.Compress()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Words(),
        optimizer_cls_and_kwargs=KINDS[kind],
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    assert arguments.max_grad_norm == limit
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def main(folder):
    torch.set_num_threads(1)
    for make, kinds, copies in (
        (mixtral, KINDS, None),
        (qwen, ["adamw"], None),
        (qwen, ["adamw"], {1: 2}),
    ):
        for kind in kinds:
            place = folder / f"{make.__name__}-{kind}{'-copies' * bool(copies)}"
            first = run(make, kind, place, limit=0.5, copies=copies)
            again = run(make, kind, place, resume=True, limit=0.5, copies=copies)
            for name, value in first.items():
                assert torch.equal(value, again[name]), (kind, name)
                theirs = [torch.empty_like(value) for _ in range(2)]
                dist.all_gather(theirs, value)
                assert torch.equal(theirs[0], theirs[1]) == (".experts.experts." not in name), (
                    kind,
                    name,
                )
    print("all is well")
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main(Path(sys.argv[1]))
