"""One training run of the demo: a small GPT under DistributedDataParallel, its losses and the bytes it sent."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import text
from commpress.cli.gpt import GPT
from commpress.cli.wire import sent_bytes
from commpress.codecs import ByName, Codec, Policy

RUNS = ("plain", "bf16", "commpress")
HELD_OUT = 400_000  # bytes at the end of the text that nobody trains on
WINDOWS = 32  # held-out windows per rank


@dataclass(frozen=True)
class Settings:
    """One run. Equal settings start from equal weights and see equal batches, whatever the run."""

    run: str = "commpress"
    steps: int = 3000
    seed: int = 0
    width: int = 32
    layers: int = 2
    length: int = 32
    batch: int = 4  # windows per rank
    lr: float = 0.02  # peak, of SGD with momentum
    codec: str | Codec | Policy = "sign"
    head_codec: str = "int8"  # of the output layer, whose gradients are the spikiest
    error_feedback: bool | Literal["ef21"] = True
    min_numel: int = 256
    exact_steps: int = 450
    exclude: tuple[str, ...] = ()


@dataclass
class Result:
    """The same on every rank, but for ``counters``."""

    settings: Settings
    parameters: int
    losses: list[float]  # of each step, mean over the ranks, in nats per byte
    sent: list[int]  # bytes that left a rank up to each step, mean over the ranks
    counted: bool  # by the kernel on each socket; else what the algorithm must send, without TCP's headers
    held_out_loss: float
    seconds: float
    ranks: int
    counters: dict[str, Any] = field(default_factory=dict)  # commpress's own, of this rank

    @property
    def samples_per_second(self) -> float:
        return len(self.losses) * self.settings.batch * self.ranks / self.seconds

    @property
    def final_loss(self) -> float:
        """Mean over the last twentieth of the steps."""
        last = self.losses[-max(len(self.losses) // 20, 1) :]
        return sum(last) / len(last)

    @property
    def bytes_per_step(self) -> float:
        return self.sent[-1] / len(self.sent)


Report = Callable[[int, float, int, float], None]  # steps done, loss, bytes sent so far, samples per second


def train(rank: int, size: int, settings: Settings, report: Report | None = None) -> Result:
    """Train on the default process group, which is initialised and has ``size`` ranks."""
    torch.manual_seed(settings.seed)
    model = GPT(width=settings.width, layers=settings.layers, length=settings.length)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    state = _attach(ddp, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _warm_and_decay(step, settings.steps))
    library, draws = text.standard_library(), torch.Generator().manual_seed(settings.seed * 4096 + rank)
    losses: list[float] = []
    sent: list[int] = []
    dist.barrier()
    before, start = sent_bytes(), perf_counter()
    for step in range(settings.steps):
        loss = ddp(*text.batch(library[:-HELD_OUT], settings.batch, settings.length, draws))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sent.append(_sent(before, step + 1, state, settings.run, ddp))
        if report is not None:
            report(step + 1, losses[-1], sent[-1], (step + 1) * settings.batch * size / (perf_counter() - start))
    dist.barrier()
    seconds = perf_counter() - start
    held_out_loss = _held_out_loss(model, library[-HELD_OUT:], settings.length, rank)
    means = torch.tensor([losses, sent, [held_out_loss] * len(losses)], dtype=torch.float64)
    dist.all_reduce(means)
    means /= size
    return Result(
        settings,
        parameters=sum(p.numel() for p in model.parameters()),
        losses=means[0].tolist(),
        sent=[round(b) for b in means[1].tolist()],
        counted=before is not None,
        held_out_loss=float(means[2, 0]),
        seconds=seconds,
        ranks=size,
        counters=state.counters.as_dict() if state else {},
    )


def by_run(results: list[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.settings.run, []).append(result)
    return groups


def _attach(ddp: DistributedDataParallel, settings: Settings) -> "commpress.CompressedState | None":
    if settings.run == "plain":
        return None
    if settings.run == "bf16":
        ddp.register_comm_hook(None, bf16_hook)
        return None
    if settings.run != "commpress":
        raise commpress.errors.InvalidArgument(f"run is {settings.run!r}, expected one of {', '.join(RUNS)}")
    return commpress.compress(
        ddp, ByName({"^head": settings.head_codec}, settings.codec), min_numel=settings.min_numel,
        error_feedback=settings.error_feedback, exact_steps=settings.exact_steps, exclude=settings.exclude, seed=settings.seed,
    )  # fmt: skip


def bf16_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's own hook under another name: DDP refuses that name without NCCL, though Gloo adds bfloat16 as well."""
    return bf16_compress_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def _warm_and_decay(step: int, steps: int) -> float:
    """Factor of the learning rate: up over the first 20 steps, down to zero over all of them."""
    return min(1.0, (step + 1) / 20) * (1 - step / steps)


def _sent(
    before: int | None, steps: int, state: "commpress.CompressedState | None", run: str, ddp: DistributedDataParallel
) -> int:
    """Bytes sent since ``before``; where the kernel does not tell, those of a ring all-reduce or the state's own count."""
    if before is not None:
        return (sent_bytes() or before) - before
    if state is not None:
        return state.counters.wire_bytes
    size = dist.get_world_size()
    width = 4 if run == "plain" else 2
    return steps * 2 * (size - 1) * width * sum(p.numel() for p in ddp.parameters()) // size


def _held_out_loss(model: GPT, held_out: torch.Tensor, length: int, rank: int) -> float:
    """Of this rank's share of the held-out windows, the same whatever the seed."""
    with torch.no_grad():
        return float(model(*text.batch(held_out, WINDOWS, length, torch.Generator().manual_seed(rank))))
