"""Runs the production collectives on a modelled cluster and says how long they take and what they
send.

The generators are those of ``collectives``; their kernels are ``SizedKernels``, their transport is
``SizedTransport``. A rank has two threads, as under DDP: one computes forward and backward, the
other drives the collectives in the order that ``work.Worker`` does, buckets begun as autograd fills
them.
"""

import mmap
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import Message
from commpress.collectives.channel import AT_ONCE
from commpress.feedback import ErrorFeedback
from commpress.kernels.devices import instead
from commpress.plan.clock import Process, Signal
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs, SizedKernels
from commpress.plan.network import Network, SizedTransport, Traffic, when_all
from commpress.work import Steps

LONG = 4096  # bytes from which on what torch itself copies and adds is charged instead of done
ALONE = 0  # limit of jobs under way at once: each has a thread of its own, as in a library


@dataclass(eq=False)
class Job:
    """Steps of one collective, and how often they still wait, where that is known beforehand."""

    steps: Steps[Any]
    left: int | None = None
    ready: Signal = field(default_factory=Signal)
    done: Signal = field(default_factory=Signal)
    waits: list[Signal] = field(default_factory=list)  # of its present wait


Build = Callable[[SizedTransport, Workspace, torch.Tensor], Sequence[Job]]


@dataclass(frozen=True)
class Training:
    """Computation of one rank in a step: seconds on a core of its own, divided at the backward's
    buckets."""

    forward: float
    backward: float
    optimizer: float
    # of the backward up to each bucket, in the order in which they fill; they sum to 1
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Simulated:
    """One step, or one call; traffic is that of one rank."""

    seconds: float
    compute_seconds: float  # of the same step without communication
    traffic: Traffic
    ranks: int

    @property
    def exposed_seconds(self) -> float:
        return self.seconds - self.compute_seconds


class SizedWorkspace(Workspace):
    """Rows whose payload nobody touches, so that it takes no memory; residuals without elements."""

    def new_rows(self, size: int, rows: int, device: torch.device) -> torch.Tensor:
        return _untouched(rows * size, torch.uint8).view(rows, size)

    def residual(
        self, message: Message, device: torch.device, like: ErrorFeedback | None = None
    ) -> ErrorFeedback:
        return no_residual()


def no_residual() -> ErrorFeedback:
    nothing = torch.empty(0)
    return ErrorFeedback(nothing, nothing, nothing, nothing, joined=True)


def simulate_calls(
    cluster: Cluster, costs: Costs, build: Build, numel: int, *, calls: int = 1
) -> Simulated:
    """``calls`` collectives back to back; seconds are those of one. ``build`` makes the jobs of one
    call on a buffer of ``numel`` elements."""
    run = _Run(cluster, costs, build, numel)
    jobs = [job for _ in range(calls) for job in run.jobs()]
    for job in jobs:
        job.ready.fire()
    return run.result(run.follow(jobs, limit=1), 0.0, calls)


def simulate_step(
    cluster: Cluster,
    costs: Costs,
    build: Build,
    numel: int,
    training: Training,
    *,
    limit: int = AT_ONCE,
) -> Simulated:
    """One DDP step: ``build`` makes the job of each bucket, in the order in which backward fills
    them."""
    run = _Run(cluster, costs, build, numel)
    jobs = run.jobs()
    if len(jobs) not in (0, len(training.shares)):
        raise ValueError(f"{len(jobs)} buckets, but shares of {len(training.shares)}")
    run.follow(jobs, limit=limit)
    ended = run.clock.follow(run.train(training, jobs))
    return run.result(ended, compute_seconds(cluster, costs, training))


def compute_seconds(cluster: Cluster, costs: Costs, training: Training) -> float:
    """Seconds of a step without communication."""
    network = Network(cluster, costs)
    network.compute(training.forward + training.backward + training.optimizer)
    return network.clock.run()


class _Run:
    def __init__(self, cluster: Cluster, costs: Costs, build: Build, numel: int) -> None:
        self.network, self.build = Network(cluster, costs), build
        self.clock, self.workspace = self.network.clock, SizedWorkspace()
        self.buffer = _untouched(numel, torch.float32)

    def jobs(self) -> Sequence[Job]:
        kernels = self.network.kernels
        with instead(kernels):
            made = self.build(self.network.transport, self.workspace, self.buffer)
        kernels.seconds = 0.0
        return made

    def train(self, training: Training, jobs: Sequence[Job]) -> Process:
        network = self.network
        network.computing = True
        yield network.compute(training.forward)
        for i, share in enumerate(training.shares):
            yield network.compute(training.backward * share)
            if jobs:
                jobs[i].ready.fire()
        network.computing = False
        for job in jobs:
            yield job.done
        yield network.compute(training.optimizer)

    def follow(self, jobs: Sequence[Job], *, limit: int) -> Signal:
        """Begin to drive jobs; the signal says that all have ended."""
        threads = [[job] for job in jobs] if limit == ALONE else [jobs]
        ended = Signal()
        when_all(
            [self.clock.follow(self.drive(each, limit=max(limit, 1))) for each in threads],
            ended.fire,
        )
        return ended

    def drive(self, jobs: Sequence[Job], *, limit: int) -> Process:
        """Follow ``work.Worker``: new jobs while fewer than ``limit`` are under way, then the
        oldest that has something to send after its wait, then the oldest of all."""
        pending, running = deque(jobs), list[Job]()
        while pending or running:
            if pending and len(running) < limit and (pending[0].ready.done or not running):
                job = pending.popleft()
                yield job.ready
                running.append(job)
            else:
                job = next((each for each in running if each.left != 1), running[0])
                yield from job.waits
                if job.left is not None:
                    job.left -= 1
            waits = self._step(job.steps)
            yield from self.network.pay()
            if waits is None:
                running.remove(job)
                job.done.fire()
            else:
                job.waits = waits

    def _step(self, steps: Steps[Any]) -> list[Signal] | None:
        """Step a generator to its next wait; None at its end."""
        kernels = self.network.kernels
        with instead(kernels), torch.no_grad(), _Weighed(kernels):
            try:
                work = next(steps)
            except StopIteration:
                return None
            return self.network.waited_for(work)

    def result(self, end: Signal, compute: float, calls: int = 1) -> Simulated:
        """Run until nothing is left to happen; the figures of one call, at its ``end``."""
        finished: list[float] = []
        end.then(lambda: finished.append(self.clock.now))
        self.clock.run()
        traffic = self.network.traffic.over(calls)
        return Simulated(finished[0] / calls, compute, traffic, self.network.cluster.size)


def _untouched(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are touched, and so may be more than the machine
    has."""
    if numel * dtype.itemsize < 1 << 20:
        return torch.zeros(numel, dtype=dtype)
    noreserve = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    pages = mmap.mmap(
        -1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve
    )
    return torch.frombuffer(pages, dtype=dtype)


class _Weighed(TorchDispatchMode):
    """Long copies and additions of torch itself, such as the sums inside a node, are charged by the
    byte and not done."""

    def __init__(self, kernels: SizedKernels) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        passes = {"copy_": 2, "add_": 3}.get(func.overloadpacket.__name__)
        if passes and (into := args[0]).dim():
            sizes = [each.numel() for each in args if isinstance(each, torch.Tensor)]
            # headers are short, and real; residuals have no elements
            if into.shape[-1] * into.element_size() > LONG or min(sizes) == 0 < max(sizes):
                self.kernels.moved(passes * max(sizes) * into.element_size())
                return into
        return func(*args, **(kwargs or {}))
