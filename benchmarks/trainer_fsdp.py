"""tokens a second of the Trainer of transformers with FSDP2, as it is and with one line more

Hosts (network namespaces) train a GPT-2 of 10.7 M parameters by the Trainer, whose arguments say
fsdp=True, in turns: a few steps of each way, then the next round. Accelerate shards on GPUs only;
here it is told to do so on CPUs, by gloo.
  plain   callbacks=[]
  int8    callbacks=[commpress.hf.Compress(codec="int8", weights="int8")]
  int4    callbacks=[commpress.hf.Compress(codec="int4", weights="int8")]
"tokens/s" of all ranks together, by the median step of the slowest rank; "MB sent/rank" in a step
is what the kernel counted, of everything. --bf16 trains in mixed precision, whose collectives are
half as large.

  python benchmarks trainer_fsdp --check --json trainer.json
  python benchmarks trainer_fsdp --rate 100mbit --ways plain,int4 --bf16
"""

import argparse
import logging
import os
import tempfile
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import commpress
from commpress.cli import harness, ranks, terminal
from commpress.cli.connections import sent_bytes
from commpress.cli.gpt import standard_library
from commpress.cli.hosts import Hosts
from commpress.cli.option_groups import option
from commpress.errors import InvalidArgument
from commpress.units import parse_rate, parse_time
from shared_options import add_output

WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "int8": {"codec": "int8", "weights": "int8"},
    "int4": {"codec": "int4", "weights": "int8"},
}
FASTER = 1.9  # than plain, with --check
WARM = 2  # steps of each turn that are not timed


@dataclass(frozen=True)
class Setting:
    """Everything that ranks need to train one turn."""

    way: str
    steps: int
    width: int
    layers: int
    length: int
    batch: int
    bf16: bool


@dataclass
class Turn:
    """A way's step in one round."""

    step_seconds: float
    sent_bytes: float
    loss: float
    parameters: int


@dataclass
class Measured:
    way: str
    step_seconds: float
    tokens: float  # per second, of all ranks
    sent_bytes: float
    loss: float
    parameters: int
    against: float = 1.0  # times the tokens of plain


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--ways A,B", None, "plain,int8")
    option(parser, "--ranks N", int, 4, "hosts")
    option(parser, "--rate R", None, "1gbit", "of each link")
    option(parser, "--delay T", None, "0ms", "of each link, one way; needs netem")
    option(parser, "--rounds N", int, 2, "turns of each way")
    option(parser, "--steps N", int, 8, "timed, of each turn")
    option(parser, "--width N", int, 384, "of the model")
    option(parser, "--layers N", int, 6, "of the model")
    option(parser, "--length N", int, 64, "tokens of a row")
    option(parser, "--batch N", int, 1, "rows of each rank")
    option(parser, "--bf16", says="bf16=True of TrainingArguments")
    add_output(
        parser, check=f"int8 trains at least {FASTER} times as many tokens a second as plain"
    )


def run(options: argparse.Namespace) -> int:
    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise InvalidArgument(f"--ways has {unknown[0]!r}, expected some of {', '.join(WAYS)}")
    if options.rounds < 1 or options.steps < 1:
        raise InvalidArgument("--rounds and --steps must be at least 1")
    rate, delay = parse_rate(options.rate), parse_time(options.delay)
    model = (options.width, options.layers, options.length, options.batch, options.bf16)
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    with (
        Hosts(options.ranks, rate=rate, delay=delay) as hosts,
        ranks.LocalRanks(options.ranks, hosts=hosts) as pool,
    ):
        for number in range(options.rounds):
            for way in ways:
                turn = pool.call(train, Setting(way, options.steps, *model), lambda *_: None)
                turns[way].append(turn)
                print(
                    f"round {number + 1}, {way}: {1e3 * turn.step_seconds:.0f} ms a step",
                    flush=True,
                )
    found = {way: _measured(way, turns[way], options) for way in ways}
    for each in found.values():
        each.against = each.tokens / found["plain"].tokens if "plain" in found else 1.0
    print(terminal.table(list(map(cells, found.values()))))
    return harness.deliver(options, list(found.values()), judge=judge)


def _measured(way: str, turns: list[Turn], options: argparse.Namespace) -> Measured:
    seconds = median(turn.step_seconds for turn in turns)
    tokens = options.ranks * options.batch * options.length / seconds
    sent = median(turn.sent_bytes for turn in turns)
    return Measured(way, seconds, tokens, sent, turns[-1].loss, turns[-1].parameters)


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of Python's standard library, byte by byte."""

    def __init__(self, length: int) -> None:
        self.text, self.length = standard_library(), length

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = self.text[number * self.length : (number + 1) * self.length].long()
        return {"input_ids": row, "labels": row}


def train(rank: int, size: int, setting: Setting, report: Any) -> Turn:
    """One turn of a way by the Trainer."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "ACCELERATE_USE_CPU": "true",
    }  # the group is there
    import transformers  # takes seconds, and the other benchmarks do without

    from accelerate_on_cpus import shard_trainer_on_cpus

    transformers.logging.set_verbosity_error()
    logging.getLogger("commpress").setLevel(logging.WARNING)

    class Clock(transformers.TrainerCallback):
        """Times of steps, and bytes sent."""

        def __init__(self) -> None:
            self.seen: list[tuple[float, int]] = []

        def on_step_end(self, *args: Any, **things: Any) -> None:
            self.seen.append((perf_counter(), sent_bytes() or 0))

    sizes: dict[str, Any] = {"n_positions": setting.length, "n_embd": setting.width}
    sizes |= {"n_layer": setting.layers, "n_head": max(setting.width // 64, 1)}
    sizes |= {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    shards: dict[str, Any] = {"fsdp": True}
    shards |= {"fsdp_config": {"transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    parameters = sum(p.numel() for p in model.parameters())
    chosen, clock = WAYS[setting.way], Clock()
    callbacks = [] if chosen is None else [commpress.hf.Compress(**chosen)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            max_steps=WARM + setting.steps,
            per_device_train_batch_size=setting.batch,
            **shards,
            bf16=setting.bf16,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Text(setting.length), callbacks=[*callbacks, clock]
        )
        shard_trainer_on_cpus(trainer)
        result = trainer.train()
    times = torch.tensor([time for time, _ in clock.seen])
    took = times[WARM:] - times[WARM - 1 : -1]
    dist.all_reduce(took, dist.ReduceOp.MAX)
    sent = (clock.seen[-1][1] - clock.seen[WARM - 1][1]) / setting.steps
    return Turn(float(took.median()), sent, result.training_loss, parameters)


def cells(each: Measured) -> dict[str, str]:
    return {
        "way": each.way,
        "step ms": f"{1e3 * each.step_seconds:.0f}",
        "tokens/s": f"{each.tokens:.0f}",
        "against plain": f"{each.against:.2f}",
        "MB sent/rank": f"{each.sent_bytes / 1e6:.1f}",
        "loss": f"{each.loss:.3f}",
    }


def judge(found: list[Measured]) -> list[tuple[str, bool]]:
    return [
        (
            f"int8 trains {each.against:.2f} times the tokens of plain (bar {FASTER})",
            each.against >= FASTER,
        )
        for each in found
        if each.way == "int8"
    ]
