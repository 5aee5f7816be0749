"""Training of one small GPT in several ways: equal weights and batches, bytes counted, rounds of a
few steps in turns."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import harness
from commpress.cli.connections import sent_bytes
from commpress.cli.contenders import FLOOR, torch_rank
from commpress.cli.gpt import GPT, batch, standard_library

HELD_OUT = 400_000  # bytes at the end of the text that nobody trains on
# MB. PowerSGD's hook chains collectives in callbacks: with several buckets ranks may order them
# differently.
ONE_BUCKET = 1 << 20
Windows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Load:
    """The work of every way, and how often it is done. Windows are per rank and step."""

    rounds: int
    steps: int
    width: int
    layers: int
    length: int
    batch: int
    seed: int = 0

    def model(self) -> GPT:
        torch.manual_seed(self.seed)
        return GPT(width=self.width, layers=self.layers, length=self.length)

    def windows(self, draws: torch.Generator) -> Windows:
        return batch(standard_library()[:-HELD_OUT], self.batch, self.length, draws)


def load_of(options: argparse.Namespace, *, seed: int = 0) -> Load:
    names = ("rounds", "steps", "width", "layers", "length", "batch")
    return Load(**{name: getattr(options, name) for name in names}, seed=seed)


class Trainee:
    """One model with its optimizer; all of a load start from equal weights and see equal batches.

    ``wrapped`` is what is called with a batch and returns the loss: the model, or what was put
    around it. ``finish`` brings all ranks to the same weights.
    """

    def __init__(
        self, name: str, wrapped: nn.Module, optimizer: torch.optim.Optimizer, load: Load
    ) -> None:
        self.name, self.wrapped, self.optimizer, self.load = name, wrapped, optimizer, load
        self.corpus = standard_library()
        self.draws = torch.Generator().manual_seed(load.seed * 4096 + dist.get_rank())
        self.sent, self.loss = 0, float("nan")
        self.hook: commpress.CompressedState | None = None  # of ours
        self.finish: Callable[[], object] = lambda: None

    def learn(self, windows: Windows) -> float:
        """One step; returns its loss."""
        loss = self.wrapped(*windows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def step(self) -> float:
        """Seconds; all ranks begin together."""
        windows = self.load.windows(self.draws)
        dist.barrier()
        start = perf_counter()
        self.loss = self.learn(windows)
        return perf_counter() - start

    def train(self, steps: int) -> list[float]:
        """Barriers part the counts of two rounds: a send is done when the kernel holds its bytes,
        which may leave later."""
        dist.barrier()
        before = sent_bytes()
        took = [self.step() for _ in range(steps)]
        dist.barrier()
        if before is not None:
            self.sent += (sent_bytes() or before) - before
        return took


def timed(
    trainees: Mapping[str, Trainee], load: Load
) -> tuple[dict[str, torch.Tensor], dict[str, float | None]]:
    """The slowest rank's seconds [round, step] of each, and bytes sent per step, mean over the
    ranks, where known."""
    for trainee in trainees.values():
        trainee.sent = 0
    rounds = {name: partial(trainee.train, load.steps) for name, trainee in trainees.items()}
    seconds = harness.slowest(harness.interleaved(rounds, load.rounds))
    sent = torch.tensor([t.sent for t in trainees.values()]) / (
        load.rounds * load.steps * dist.get_world_size()
    )
    dist.all_reduce(sent)
    counted = sent_bytes() is not None
    return seconds, {
        name: float(s) if counted else None for name, s in zip(trainees, sent, strict=True)
    }


# ---------------------------------------------------------------- ways


def under_ddp(
    name: str, load: Load, lr: float, bucket_mb: float | None = None, **options: Any
) -> Trainee:
    """A model under DistributedDataParallel and AdamW, with the hook that ``attach`` gives it."""
    size = ONE_BUCKET if torch_rank(name) else bucket_mb
    ddp = DistributedDataParallel(
        load.model(), gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=size
    )
    made = Trainee(name, ddp, torch.optim.AdamW(ddp.parameters(), lr=lr, fused=True), load)
    made.hook = attach(ddp, name, **options)
    return made


def attach(
    ddp: DistributedDataParallel, name: str, codec: Any = None, **options: Any
) -> "commpress.CompressedState | None":
    """Give ``ddp`` the hook that a way names: one of torch's, or commpress's with ``codec``, else
    the codec of that name. Return the state of ours."""
    hooks: dict[str, Any] = {
        "compute": _no_communication,
        "hook": default_hooks.allreduce_hook,
        "bf16": _bf16,
    }
    if name in hooks:
        ddp.register_comm_hook(None, hooks[name])
    elif rank := torch_rank(name):
        state = powerSGD_hook.PowerSGDState(
            ddp.process_group, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif name not in (FLOOR, "plain"):
        return commpress.compress(ddp, codec or name, **options)
    return None


def _no_communication(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook under another name: DDP refuses that name without NCCL, though Gloo adds
    bfloat16 as well."""
    return default_hooks.bf16_compress_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
