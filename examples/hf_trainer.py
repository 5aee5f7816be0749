"""Train a small masked language model with Hugging Face's Trainer and a compressed optimizer.

BERT, built from a configuration with random weights, on bytes of Python's standard library: nothing
is downloaded.

    torchrun --nproc-per-node 2 examples/hf_trainer.py
    torchrun --nproc-per-node 2 examples/hf_trainer.py --gradients  # any optimizer, gradients in
                                                                    one bit
"""

import argparse
import gc

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import commpress
from commpress.cli.gpt import standard_library

MASK = 256


class Masked(torch.utils.data.Dataset):
    """Windows of the text with 15 % of their bytes hidden; window and mask follow from the
    index."""

    def __init__(self, length: int, count: int) -> None:
        self.text, self.length, self.count = standard_library(), length, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        draws = torch.Generator().manual_seed(index)
        at = int(torch.randint(len(self.text) - self.length, (1,), generator=draws))
        labels = self.text[at : at + self.length].long()
        hidden = torch.rand(self.length, generator=draws) < 0.15
        return {
            "input_ids": labels.masked_fill(hidden, MASK),
            "labels": labels.masked_fill(~hidden, -100),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--gradients",
        action="store_true",
        help="AdamW with compressed gradients instead of 0/1 Adam",
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", default="hf-trainer-output")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=MASK + 1,
            hidden_size=options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=4,
            intermediate_size=4 * options.width,
            max_position_embeddings=options.length,
        )
    )
    arguments = TrainingArguments(
        options.output,
        use_cpu=not torch.cuda.is_available(),
        max_steps=options.steps,
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        warmup_steps=options.steps // 10,
        logging_steps=max(options.steps // 10, 1),
        save_steps=max(options.steps // 2, 1),
        max_grad_norm=1.0,
        report_to=[],
        ddp_find_unused_parameters=False,
    )
    momentum = {
        "optimizer_cls_and_kwargs": (commpress.ZeroOneAdam, {"lr": arguments.learning_rate})
    }
    trainer = Trainer(
        model,
        arguments,
        train_dataset=Masked(options.length, 16 * options.steps),
        callbacks=[commpress.hf.Compress("sign" if options.gradients else None)],
        **({} if options.gradients else momentum),
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(trainer.state.log_history[-2])
    # free DDP before its group: otherwise torch may wait forever (docs/limits.md)
    trainer.accelerator.free_memory()
    del trainer
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
