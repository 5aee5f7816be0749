"""the cost of watching a run: figures of every step, an endpoint and a timeline, all at once,
against none

Trains a GPT under DistributedDataParallel with compressed gradients twice, in rounds of a few
steps: unwatched, and with Metrics after every step (callback and endpoint, norms every 100 steps)
and a Timeline of encode, wire, decode and compute.
  step               milliseconds, median of the slowest rank's
  difference         of the two, as a share of a step; on a busy machine its scatter is larger than
                     itself
  accounted          what watching does in a step, each part timed alone: spans times the cost of
                     one, plus reading the counters; as a share of an unwatched step

  python benchmarks observe                                4 local processes
  python benchmarks observe --ranks 2 --check              exit status 1 if more than 1 % is
                                                           accounted for
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli import harness, training
from commpress.cli.option_groups import option
from commpress.codecs import codec_named
from shared_options import add_measuring

MOST = 0.01
SPANS = 20_000  # recorded to time one
WARM = 3


@dataclass
class Measured:
    """Of rank 0 but for the seconds, which are the slowest rank's."""

    off_seconds: float
    on_seconds: float
    spans: float  # per step
    span_seconds: float  # to record one
    counter_seconds: float  # to read counters and serve sinks, per step
    parameters: int

    @property
    def difference(self) -> float:
        return self.on_seconds / self.off_seconds - 1

    @property
    def accounted(self) -> float:
        return (self.spans * self.span_seconds + self.counter_seconds) / self.off_seconds


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--codec NAME", None, "sign")
    add_measuring(
        parser,
        rounds=9,
        steps=4,
        batch=4,
        check=f"watching accounts for at most {MOST:.0%} of a step",
    )


def run(options: argparse.Namespace) -> int:
    codec_named(options.codec)
    training.load_of(options)
    return harness.run(options, bench, cells, judge=judge)


def cells(m: Measured) -> dict[str, str]:
    return {
        "parameters": f"{m.parameters / 1e6:.1f} M",
        "step ms": f"{1e3 * m.off_seconds:.2f}",
        "watched ms": f"{1e3 * m.on_seconds:.2f}",
        "difference %": f"{100 * m.difference:+.2f}",
        "spans": f"{m.spans:.0f}",
        "us per span": f"{1e6 * m.span_seconds:.2f}",
        "counters us": f"{1e6 * m.counter_seconds:.0f}",
        "accounted %": f"{100 * m.accounted:.3f}",
    }


def judge(measured: list[Measured]) -> list[tuple[str, bool]]:
    (m,) = measured
    says = f"watching accounts for {100 * m.accounted:.3f} % of a step, at most {100 * MOST:.0f} %"
    return [(says, m.accounted <= MOST)]


# ---------------------------------------------------------------- on every rank


class Watched(training.Trainee):
    """Everything is on; what it does after the step belongs to the step."""

    def __init__(
        self,
        name: str,
        ddp: DistributedDataParallel,
        state: commpress.CompressedState,
        load: training.Load,
    ) -> None:
        super().__init__(name, ddp, torch.optim.AdamW(ddp.parameters(), lr=3e-4, fused=True), load)
        self.timeline, self.endpoint = commpress.Timeline(), commpress.MetricsEndpoint()
        self.watch = commpress.watch(self.timeline, state, model=ddp, optimizer=self.optimizer)
        self.metrics = commpress.Metrics(state, to=[self.endpoint])
        self.reading: list[float] = []

    def step(self) -> float:
        took = super().step()
        start = perf_counter()
        self.metrics.step()
        self.reading.append(perf_counter() - start)
        return took + self.reading[-1]

    def end(self) -> None:
        self.watch.end()
        self.endpoint.close()


def bench(rank: int, size: int, options: argparse.Namespace) -> Iterator[Measured]:
    load = training.load_of(options)
    ddps = [DistributedDataParallel(load.model()) for _ in range(2)]
    states = [commpress.compress(ddp, options.codec) for ddp in ddps]
    off = training.Trainee(
        "off", ddps[0], torch.optim.AdamW(ddps[0].parameters(), lr=3e-4, fused=True), load
    )
    on = Watched("on", ddps[1], states[1], load)
    for one in (off, on):
        one.train(WARM)
    parameters = sum(p.numel() for p in ddps[0].parameters())
    before = len(on.timeline)
    seconds, _ = training.timed({"off": off, "on": on}, load)
    spans = (len(on.timeline) - before) / (load.rounds * load.steps)
    on.end()
    plain, watched = (float(seconds[name].median()) for name in ("off", "on"))
    yield Measured(plain, watched, spans, cost_of_a_span(), median(on.reading), parameters)


def cost_of_a_span() -> float:
    timeline = commpress.Timeline()
    start = perf_counter()
    for i in range(SPANS):
        timeline.flight("wire", start, what={"bytes": i})
    return (perf_counter() - start) / SPANS
