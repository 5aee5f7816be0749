"""Trainer with an optimizer in a store, and with a streamed model, beside the plain one; the
argument is a folder."""

import sys
from pathlib import Path

import torch
from transformers import Trainer

import commpress
from tiny_gpt2 import Words, arguments, flat, model, same

ADAM = {"lr": 1e-3, "betas": (0.9, 0.98)}


def trained(folder, net, kind, resume=None, **more):
    options = {"save_steps": 3, "max_grad_norm": 0.0, "gradient_accumulation_steps": 2} | more
    given = arguments(folder, max_steps=6, lr_scheduler_type="linear", logging_steps=1, **options)
    trainer = Trainer(net, given, train_dataset=Words(64), optimizer_cls_and_kwargs=kind)
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder):
    store = commpress.TieredStore.open(folder / "store", host="64MiB")

    def kind(prefix):
        place = {"store": store, "prefix": prefix, "chunk_mb": 0.05}
        return commpress.Offloaded, {"optimizer": torch.optim.AdamW, **place, **ADAM}

    net, other, third, fourth = model(2), model(2), model(2), model(2)
    wanted = trained(folder / "plain", other, (torch.optim.AdamW, ADAM))
    assert trained(folder / "offloaded", net, kind("first")) == wanted
    same(flat(net), flat(other), "offloaded")

    checkpoint = str(folder / "offloaded" / "checkpoint-3")
    again = trained(folder / "again", third, kind("second"), resume=checkpoint)
    assert again[-1] == wanted[-1]
    same(flat(third), flat(other), "resumed")

    streamed = commpress.stream(fourth, store=store, chunk_mb=0.05)
    assert trained(folder / "streamed", fourth, kind("third"), save_strategy="no") == wanted
    state = streamed.state_dict()
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())
    print("all is well")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
