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

import commpress
from commpress.cli import connections
from commpress.cli.contenders import contender
from commpress.cli.gpt import batch
from commpress.cli.training import HELD_OUT, Load, Trainee, under_ddp
from commpress.codecs import LowRankCodec, codec_named

# steps before the race, of a model that is thrown away: kernels, connections, PowerSGD's third step
WARM = 4
WINDOWS, HELD_OUT_BATCH = 64, 16  # held-out windows per rank, and how many at once
RISING = 10  # steps, or a tenth of the race, over which the learning rate rises
LAST = 0.1  # of the peak of the learning rate, at the end
DILOCO: dict[str, Any] = {"every": 30, "outer": commpress.Nesterov(0.7, 0.9), "codec": None}
Show = Callable[[float, list[float], int], None]  # share that is over, losses, bytes sent


@dataclass(frozen=True)
class Lane:
    """One run, of ``load.steps`` steps, or as many as fit into ``seconds`` where that is 0. Equal
    seeds start from equal weights and see equal batches, whatever the way."""

    load: Load
    name: str
    lr: float
    seconds: float = 50.0
    paced: float = 0.0  # bits per second of each connection; 0: the network is what it is
    error_feedback: bool = True  # of ways that are a codec


@dataclass
class Finish:
    """Results of a run, the same on every rank but for ``counters``."""

    name: str
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
        self.lane, self.size, self.show = lane, size, show
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
            took, steps = (now - self.start) / self.lane.seconds, self.lane.load.steps
            done = step / steps if steps else took
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


def racer(lane: Lane) -> Trainee:
    """The model of this rank, in the way in which it is trained."""
    name, load, lr = lane.name, lane.load, lane.lr
    if name in ("diloco", "local"):  # they exchange by themselves
        model = load.model()
        adamw = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        own = DILOCO if name == "diloco" else {}
        local = commpress.LocalUpdates(adamw, **own)
        made = Trainee(name, model, local, load)
        made.finish = local.drain
        return made
    if name == "zero-one":
        made = under_ddp("plain", load, lr)
        zero_one = commpress.ZeroOneAdam(
            list(bare(made).named_parameters()),
            lr=lr,
            weight_decay=0.01,
            exact_codec="log3",
            spiky_codec="log3",
            exact_steps=8,
            variance_updates=2,
        )
        made.optimizer = commpress.overlap(made.wrapped, zero_one)  # type: ignore[arg-type]
        made.finish = zero_one.synchronize
        return made
    codec = None
    # the output layer has the spikiest gradients; at low rank it is a matrix like others
    if contender(name).ours and not isinstance(codec_named(name), LowRankCodec):
        codec = commpress.ByName({"^head": "fp8"}, name)
    more = {"min_numel": 256, "error_feedback": lane.error_feedback}
    return under_ddp(name, load, lr, codec=codec, **more)


def bare(trainee: Trainee) -> torch.nn.Module:
    """The model itself."""
    model: torch.nn.Module = getattr(trainee.wrapped, "module", trainee.wrapped)
    return model


def warm(rank: int, size: int, lanes: list[Lane], report: Callable[[float, str], None]) -> None:
    """A few steps of each way: what is compiled and connected once is not in anybody's time."""
    # a warning would go between the lines of the table
    logging.getLogger("commpress").setLevel(logging.ERROR)
    for i, lane in enumerate(lanes):
        report(i / len(lanes), lane.name)
        made = racer(lane)
        learn(made, 1e-6, WARM)
        made.finish()


def learn(trainee: Trainee, lr: float, steps: int = 1) -> float:
    """Steps at this learning rate; returns the last loss."""
    for group in trainee.optimizer.param_groups:
        group["lr"] = lr
    return [trainee.learn(trainee.load.windows(trainee.draws)) for _ in range(steps)][-1]


def run(rank: int, size: int, lane: Lane, ask: Callable[..., Any]) -> Finish:
    made = racer(lane)
    gc.collect()  # sockets of the way before
    dist.barrier()
    before = connections.sent_bytes()
    step, loss, sent = 0, None, 0
    while (share := ask(step, loss, sent)) is not None:
        if lane.paced:
            connections.pace(lane.paced)  # in every step: some connections open in the first
        loss = learn(made, lane.lr * schedule(step, share))
        step += 1
        sent = (connections.sent_bytes() or 0) - (before or 0)
    made.finish()
    dist.barrier()
    if rank == 0:
        ask()
    sent = (connections.sent_bytes() or 0) - (before or 0)
    loss = held_out_loss(made, rank)
    means = torch.tensor([loss, sent], dtype=torch.float64)
    dist.all_reduce(means)
    return Finish(
        lane.name,
        lane.lr,
        lane.load.seed,
        size,
        sum(p.numel() for p in made.wrapped.parameters()),
        float(means[0]) / size,
        float(means[1]) / size if before is not None else None,
        made.hook.counters.as_dict() if made.hook is not None else {},
    )


def schedule(step: int, share: float) -> float:
    """Factor of the learning rate: up over ``RISING`` steps or a tenth of the run, then down in a
    line."""
    up = max((step + 1) / RISING, 10 * share)
    return min(up, 1.0) * (1 - (1 - LAST) * share)


def held_out_loss(trainee: Trainee, rank: int) -> float:
    """Loss on this rank's share of the held-out windows, the same for every way."""
    held_out, draws = trainee.corpus[-HELD_OUT:], torch.Generator().manual_seed(rank)
    parts, length, model = range(WINDOWS // HELD_OUT_BATCH), trainee.load.length, bare(trainee)
    with torch.no_grad():
        losses = [float(model(*batch(held_out, HELD_OUT_BATCH, length, draws))) for _ in parts]
    return sum(losses) / len(parts)
