"""A race: ways of training one model take turns on the same ranks, each for the same time from the
same start."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import connections
from commpress.cli.contenders import contender, torch_rank
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.training import HELD_OUT, ONE_BUCKET, attach
from commpress.codecs import LowRankCodec, codec_named

# steps before the race, of a model that is thrown away: kernels, connections, PowerSGD's third step
WARM = 4
WINDOWS, HELD_OUT_BATCH = 64, 16  # held-out windows per rank, and how many at once
RISING = 10  # steps, or a tenth of the race, over which the learning rate rises
LAST = 0.1  # of the peak of the learning rate, at the end
DILOCO: dict[str, Any] = {"every": 30, "outer": commpress.Nesterov(0.7, 0.9), "codec": None}
Show = Callable[[float, list[float], int], None]  # share that is over, losses, bytes sent


@dataclass(frozen=True)
class Course:
    """The model and the data of all, and how long they train: ``seconds``, or ``steps`` where that
    is not 0."""

    width: int = 384
    layers: int = 3
    length: int = 64
    batch: int = 8  # windows per rank
    seconds: float = 50.0
    steps: int = 0
    paced: float = 0.0  # bits per second of each connection; 0: the network is what it is
    error_feedback: bool = True  # of ways that are a codec

    def model(self, seed: int) -> GPT:
        torch.manual_seed(seed)
        return GPT(width=self.width, layers=self.layers, length=self.length)

    def windows(self, draws: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(standard_library()[:-HELD_OUT], self.batch, self.length, draws)


@dataclass(frozen=True)
class Lane:
    """One run: equal seeds start from equal weights and see equal batches, whatever the way."""

    course: Course
    name: str
    lr: float
    seed: int = 0


@dataclass
class Finish:
    """Results of a run, the same on every rank but for ``counters``."""

    name: str
    what: str
    ours: bool
    lr: float
    seed: int
    ranks: int
    parameters: int
    held_out_loss: float
    sent_bytes: float | None  # by each rank, mean; None where the kernel does not tell
    counters: dict[str, Any] = field(default_factory=dict)  # commpress's own, of this rank
    seconds: float = 0.0  # of the clock, which all ways share
    times: list[float] = field(default_factory=list)  # when each step was done
    # of each step, mean over the ranks, in nats per byte
    losses: list[float] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.losses)


class RaceClock:
    """The time of one run, kept by the process that all ranks ask before each step: so all stop
    after the same one."""

    def __init__(self, lane: Lane, size: int, show: Show) -> None:
        self.course, self.size, self.show = lane.course, size, show
        self.start = self.end = 0.0
        # of each step: of the time when it began; None: it is not to be
        self.shares: list[float | None] = []
        self.times: list[float] = []
        self.said: dict[int, list[float]] = {}

    def answer(self, rank: int, step: int, loss: float | None, sent: int) -> float | None:
        """The share of the run that is over when ``step`` begins, None if it is not to; ``loss`` is
        that of the step before."""
        now = perf_counter()
        if not self.shares:
            self.start = now
        if loss is not None:
            self.said.setdefault(step - 1, []).append(loss)
            if len(self.said[step - 1]) == 1:
                self.times.append(now - self.start)
        if step == len(self.shares):
            took = (now - self.start) / self.course.seconds
            done = step / self.course.steps if self.course.steps else took
            self.shares.append(None if done >= 1 else done)
        if rank == 0:
            self.show(min(self.shares[step] or 1.0, 1.0) if step else 0.0, self.losses, sent)
        return self.shares[step]

    @property
    def losses(self) -> list[float]:
        """Mean over the ranks, of the steps that all have done."""
        done = [losses for losses in self.said.values() if len(losses) == self.size]
        return [sum(losses) / self.size for losses in done]


def time_it(pool: Any, lane: Lane, size: int, show: Show) -> Finish:
    """Run one lane on a pool of ranks."""
    clock = RaceClock(lane, size, show)

    def answer(rank: int, *asked: Any) -> float | None:
        if asked:
            return clock.answer(rank, *asked)
        clock.end = perf_counter()
        return None

    finish: Finish = pool.call(run, lane, lambda *_: None, answer=answer)
    finish.seconds, finish.times, finish.losses = clock.end - clock.start, clock.times, clock.losses
    return finish


# ---------------------------------------------------------------- on every rank


class Racer:
    """A model on this rank with the way in which it is trained."""

    def __init__(self, lane: Lane) -> None:
        who, lr = contender(lane.name), lane.lr
        self.model = lane.course.model(lane.seed)
        self.wrapped: torch.nn.Module = self.model
        self.state: commpress.CompressedState | None = None
        self.finish: Callable[[], object] = lambda: None  # brings all ranks to the same weights
        if who.own:
            own = DILOCO if who.name == "diloco" else {}
            local = commpress.LocalUpdates(self._adamw(lr), **own)
            self.optimizer: torch.optim.Optimizer = local
            self.finish = local.drain
            return
        size = ONE_BUCKET if torch_rank(who.name) else None
        ddp = DistributedDataParallel(
            self.model, gradient_as_bucket_view=True, init_sync=False, bucket_cap_mb=size
        )
        self.wrapped = ddp
        if who.name == "zero-one":
            zero_one = commpress.ZeroOneAdam(
                list(self.model.named_parameters()),
                lr=lr,
                weight_decay=0.01,
                exact_codec="log3",
                spiky_codec="log3",
                exact_steps=8,
                variance_updates=2,
            )
            self.optimizer, self.finish = commpress.overlap(ddp, zero_one), zero_one.synchronize
            return
        self.optimizer = self._adamw(lr)
        codec = None
        # the output layer has the spikiest gradients; at low rank it is a matrix like others
        if who.ours and not isinstance(codec_named(who.name), LowRankCodec):
            codec = commpress.ByName({"^head": "int8"}, who.name)
        feedback = lane.course.error_feedback
        self.state = attach(
            ddp, who.name, codec, min_numel=256, error_feedback=feedback, seed=lane.seed
        )

    def _adamw(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.01, fused=True)

    def step(self, windows: tuple[torch.Tensor, torch.Tensor], lr: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = self.wrapped(*windows)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def warm(rank: int, size: int, lanes: list[Lane], report: Callable[[float, str], None]) -> None:
    """A few steps of each way: what is compiled and connected once is not in anybody's time."""
    # a warning would go between the lines of the table
    logging.getLogger("commpress").setLevel(logging.ERROR)
    for i, lane in enumerate(lanes):
        report(i / len(lanes), lane.name)
        racer, draws = Racer(lane), torch.Generator().manual_seed(rank)
        for _ in range(WARM):
            racer.step(lane.course.windows(draws), 1e-6)
        racer.finish()


def run(rank: int, size: int, lane: Lane, ask: Callable[..., Any]) -> Finish:
    course, who = lane.course, contender(lane.name)
    racer, draws = Racer(lane), torch.Generator().manual_seed(lane.seed * 4096 + rank)
    gc.collect()  # sockets of the way before
    dist.barrier()
    before = connections.sent_bytes()
    step, loss, sent = 0, None, 0
    while (share := ask(step, loss, sent)) is not None:
        if course.paced:
            connections.pace(course.paced)  # in every step: some connections open in the first
        loss = racer.step(course.windows(draws), lane.lr * schedule(step, share))
        step += 1
        sent = (connections.sent_bytes() or 0) - (before or 0)
    racer.finish()
    dist.barrier()
    if rank == 0:
        ask()
    sent = (connections.sent_bytes() or 0) - (before or 0)
    loss = held_out_loss(racer.model, course.length, rank)
    means = torch.tensor([loss, sent], dtype=torch.float64)
    dist.all_reduce(means)
    return Finish(
        who.name,
        who.what,
        who.ours,
        lane.lr,
        lane.seed,
        size,
        sum(p.numel() for p in racer.model.parameters()),
        float(means[0]) / size,
        float(means[1]) / size if before is not None else None,
        racer.state.counters.as_dict() if racer.state is not None else {},
    )


def schedule(step: int, share: float) -> float:
    """Factor of the learning rate: up over ``RISING`` steps or a tenth of the run, then down in a
    line."""
    up = max((step + 1) / RISING, 10 * share)
    return min(up, 1.0) * (1 - (1 - LAST) * share)


def held_out_loss(model: GPT, length: int, rank: int) -> float:
    """Of this rank's share of the held-out windows, the same for every way."""
    held_out, draws = standard_library()[-HELD_OUT:], torch.Generator().manual_seed(rank)
    parts = range(WINDOWS // HELD_OUT_BATCH)
    with torch.no_grad():
        losses = [float(model(*batch(held_out, HELD_OUT_BATCH, length, draws))) for _ in parts]
    return sum(losses) / len(parts)
