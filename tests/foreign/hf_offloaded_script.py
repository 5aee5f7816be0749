"""Trainer with an optimizer in a store, and with a streamed model, beside the plain one; the
argument is a folder."""

import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import commpress
from tiny_gpt2 import Words, model

ADAM = {"lr": 1e-3, "betas": (0.9, 0.98)}


def trained(folder, net, kind, resume=None, **more):
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=4,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        learning_rate=1e-3,
        lr_scheduler_type="linear",
        gradient_accumulation_steps=2,
        logging_steps=1,
        **{"save_steps": 3, "max_grad_norm": 0.0} | more,
    )
    trainer = Trainer(net, arguments, train_dataset=Words(64), optimizer_cls_and_kwargs=kind)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder):
    store = commpress.TieredStore.open(folder / "store", host="64MiB")

    def kind(prefix):
        options = {
            "optimizer": torch.optim.AdamW,
            "store": store,
            "prefix": prefix,
            "chunk_mb": 0.05,
        }
        return commpress.Offloaded, options | ADAM

    net, other, third, fourth = model(2), model(2), model(2), model(2)
    wanted = trained(folder / "plain", other, (torch.optim.AdamW, ADAM))
    assert trained(folder / "offloaded", net, kind("first")) == wanted
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))

    again = trained(
        folder / "again", third, kind("second"), resume=str(folder / "offloaded" / "checkpoint-3")
    )
    assert again[-1] == wanted[-1]
    assert all(
        torch.equal(a, b) for a, b in zip(third.parameters(), other.parameters(), strict=True)
    )

    streamed = commpress.stream(fourth, store=store, chunk_mb=0.05)
    assert trained(folder / "streamed", fourth, kind("third"), save_strategy="no") == wanted
    state = streamed.state_dict()
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
