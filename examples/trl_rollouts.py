"""Train a policy by TRL's GRPO, and send every version of it to rollout workers elsewhere.

    python examples/trl_rollouts.py                       trainer and one worker on this machine
    python examples/trl_rollouts.py --trains runs/policy  the trainer alone, to a folder; then
                                                          commpress weights serve runs/policy
    python examples/trl_rollouts.py --reads http://trainer:9500        a worker, anywhere

The policy is a tiny GPT-2 over bytes with random weights, rewarded for vowels. After each step of
the optimizer the trainer publishes the changes in bfloat16; the worker is a plain loop around
``generate`` that loads the newest version between two prompts. Needs trl.
"""

import argparse
import multiprocessing
import tempfile
import time

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback

from commpress.weights import Publisher, Receiver

PROMPTS = ["the ", "a model ", "between ", "two "]


def policy() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=257, bos_token_id=256, eos_token_id=256, **sizes))


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with a token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"<end>": 256}
    of_bytes = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    of_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=of_bytes, eos_token="<end>", pad_token="<end>", padding_side="left"
    )


def vowels(completions: list[str], **_: object) -> list[float]:
    return [sum(letter in "aeiou" for letter in text) / 16 for text in completions]


class Publishes(TrainerCallback):
    """Publish a version after each step; the difference is written during the next one."""

    def __init__(self, model: torch.nn.Module, to: str) -> None:
        self.publisher = Publisher(model, to, dtype=torch.bfloat16)

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.publisher.publish()

    def on_step_end(self, *_: object, **__: object) -> None:
        self.publisher.publish(wait=False)

    def on_train_end(self, *_: object, **__: object) -> None:
        report = self.publisher.wait()
        self.publisher.close()
        print(
            f"version {report.version}: {report.bytes:,} bytes, "
            f"{report.dense_bytes / max(report.bytes, 1):.1f} times fewer than its weights",
            flush=True,
        )


def train(to: str, steps: int) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = policy()
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model,
            vowels,
            GRPOConfig(
                folder,
                use_cpu=True,
                bf16=False,
                max_steps=steps,
                learning_rate=1e-5,
                per_device_train_batch_size=8,
                num_generations=4,
                max_completion_length=16,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
            processing_class=tokenizer(),
            callbacks=[Publishes(model, to)],
        ).train()


def roll_out(source: str, versions: int) -> None:
    """Generate with the newest version, until ``versions`` versions were received (0: forever)."""
    model, words, receiver = policy().bfloat16().eval(), tokenizer(), Receiver(source)
    number = 0
    while versions == 0 or receiver.version < versions:
        if receiver.prepare() is None:
            time.sleep(0.05)
            continue
        receiver.install(model)
        prompt = words(PROMPTS[number % len(PROMPTS)], return_tensors="pt")
        sample = model.generate(
            **prompt, max_new_tokens=16, do_sample=True, pad_token_id=words.eos_token_id
        )
        print(f"worker, version {receiver.version}: {words.decode(sample[0])!r}", flush=True)
        number += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trains", metavar="FOLDER", help="be the trainer alone")
    parser.add_argument("--reads", metavar="SOURCE", help="be a worker alone")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.reads:
        return roll_out(options.reads, 0)
    if options.trains:
        return train(options.trains, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        Publisher(policy(), folder, dtype=torch.bfloat16).close()  # so that there is a folder
        spawn = multiprocessing.get_context("spawn")
        worker = spawn.Process(target=roll_out, args=(folder, options.steps + 1), daemon=True)
        worker.start()
        train(folder, options.steps)
        worker.join(60)


if __name__ == "__main__":
    main()
