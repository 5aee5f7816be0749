"""Runs the production collectives on a modelled cluster and says how long they take and what they
send.

The generators are those of ``collectives``; their kernels are ``SizedKernels``, their transport is
``SizedTransport``. A rank has two threads, as under DDP: one computes forward and backward, the
other drives the collectives in the order that ``work.Worker`` does: the oldest wait first, buckets
begun as autograd fills them.
"""

import mmap
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commpress.collectives.allreduce import Workspace
from commpress.collectives.buckets import Message
from commpress.feedback import ErrorFeedback
from commpress.kernels.devices import instead
from commpress.plan.clock import Clock, Process, Signal
from commpress.plan.cluster import Cluster
from commpress.plan.costs import Costs, SizedKernels
from commpress.plan.network import Network, SizedTransport, Traffic, when_all
from commpress.work import Steps

LONG = 4096  # bytes from which on what torch itself copies and adds is charged instead of done
Build = Callable[[SizedTransport, Workspace, torch.Tensor], Sequence[Steps[Any]]]


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
    """One step, or one call. Traffic is that of one rank, the class that sends most to other
    nodes."""

    seconds: float
    compute_seconds: float  # of the same step without communication, of the slowest class
    traffic: Traffic
    ranks: int
    classes: int

    @property
    def exposed_seconds(self) -> float:
        return self.seconds - self.compute_seconds


class SizedWorkspace(Workspace):
    """Rows whose payload nobody touches, so that it takes no memory; residuals without elements."""

    def rows(self, size: int, rows: int, device: torch.device) -> torch.Tensor:
        free = self._free[rows, size, device]
        return free.pop() if free else _untouched(rows * size, torch.uint8).view(rows, size)  # type: ignore[return-value]

    def residual(
        self, message: Message, device: torch.device, like: ErrorFeedback | None = None
    ) -> ErrorFeedback:
        return no_residual()


def no_residual() -> ErrorFeedback:
    return ErrorFeedback(torch.empty(0), torch.empty(0), torch.empty(0), torch.empty(0))


def simulate_calls(
    cluster: Cluster, costs: Costs, build: Build, numel: int, *, calls: int = 1, alike: bool = True
) -> Simulated:
    """``calls`` collectives back to back; seconds are those of one. ``build`` makes the steps of
    one call."""
    run = _Run(cluster, costs, build, numel, alike=alike)
    ends: list[Signal] = []
    for cls in range(len(run.network.classes.every)):
        ready = Signal()
        ready.fire()
        jobs = [job for _ in range(calls) for job in run.jobs(cls)]
        ends.append(
            run.clock.follow(
                run.drive(cls, [_SimulatedJob(ready, job, Signal()) for job in jobs], limit=1)
            )
        )
    seconds = run.finish(ends)
    return run.result(seconds / calls, 0.0, calls)


def simulate_step(
    cluster: Cluster,
    costs: Costs,
    build: Build,
    numel: int,
    training: Training,
    *,
    limit: int = 4,
    alike: bool = True,
) -> Simulated:
    """One DDP step: ``build`` makes the steps of each bucket, in the order in which backward fills
    them."""
    run = _Run(cluster, costs, build, numel, alike=alike)
    ends: list[Signal] = []
    for cls in range(len(run.network.classes.every)):
        steps = run.jobs(cls)
        jobs = [_SimulatedJob(Signal(), job, Signal()) for job in steps]
        if len(jobs) not in (0, len(training.shares)):
            raise ValueError(f"{len(jobs)} buckets, but shares of {len(training.shares)}")
        run.clock.follow(run.drive(cls, jobs, limit=limit))
        ends.append(run.clock.follow(run.train(cls, training, jobs)))
    seconds = run.finish(ends)
    return run.result(seconds, run.alone(training), 1)


class _SimulatedJob(NamedTuple):
    ready: Signal
    steps: Steps[Any]
    done: Signal


class _Run:
    def __init__(
        self, cluster: Cluster, costs: Costs, build: Build, numel: int, *, alike: bool
    ) -> None:
        self.clock = Clock()
        self.network = Network(cluster, self.clock, alike=alike)
        self.build = build
        self.buffer = _untouched(numel, torch.float32)
        self.kernels = [SizedKernels(costs, charged) for charged in self.network.kernel_seconds]
        self.workspaces = [SizedWorkspace() for _ in self.kernels]

    def jobs(self, cls: int) -> Sequence[Steps[Any]]:
        with instead(self.kernels[cls]):
            jobs = self.build(self.network.transport(cls), self.workspaces[cls], self.buffer)
        self.network.kernel_seconds[cls].seconds = 0.0
        return jobs

    def train(self, cls: int, training: Training, jobs: Sequence[_SimulatedJob]) -> Process:
        computing = self.network.computing
        computing[cls] = True
        yield self.network.compute(cls, training.forward)
        for i, share in enumerate(training.shares):
            yield self.network.compute(cls, training.backward * share)
            if jobs:
                jobs[i].ready.fire()
        computing[cls] = False
        for job in jobs:
            yield job.done
        yield self.network.compute(cls, training.optimizer)

    def drive(self, cls: int, jobs: Sequence[_SimulatedJob], *, limit: int) -> Process:
        """As ``work.Worker``: new jobs while fewer than ``limit`` are under way, then the oldest
        wait."""
        pending, running = deque(jobs), deque[tuple[_SimulatedJob, list[Signal]]]()

        def advance(job: _SimulatedJob) -> Process:
            waits = self._step(cls, job.steps)
            yield from self.network.pay(cls)
            if waits is None:
                job.done.fire()
            else:
                running.append((job, waits))

        while pending or running:
            while pending and len(running) < limit and (pending[0].ready.done or not running):
                job = pending.popleft()
                yield job.ready
                yield from advance(job)
            if running:
                job, waits = running.popleft()
                yield from waits
                yield from advance(job)

    def _step(self, cls: int, steps: Steps[Any]) -> list[Signal] | None:
        """Step a generator to its next wait; None at its end."""
        with instead(self.kernels[cls]), torch.no_grad(), _Weighed(self.kernels[cls]):
            try:
                work = next(steps)
            except StopIteration:
                return None
            return self.network.waited_for(work)

    def finish(self, ends: list[Signal]) -> float:
        finished: list[float] = []
        when_all(ends, lambda: finished.append(self.clock.now))
        self.clock.run()
        if not finished:
            raise RuntimeError(
                "the simulation stands still: a rank waits for a message that nobody sends"
            )
        return finished[0]

    def alone(self, training: Training) -> float:
        clock = Clock()
        network = Network(self.network.cluster, clock)
        seconds = training.forward + training.backward + training.optimizer
        for cls in range(len(network.classes.every)):
            network.compute(cls, seconds)
        return clock.run()

    def result(self, seconds: float, compute: float, calls: int) -> Simulated:
        most = max(self.network.traffic, key=lambda t: (t.between, t.nbytes))
        traffic = Traffic(most.messages / calls, most.nbytes / calls, most.between / calls)
        return Simulated(seconds, compute, traffic, self.network.cluster.size, len(self.kernels))


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
        name = func.overloadpacket.__name__
        if name in ("copy_", "add_"):
            run = args[0].shape[-1] * args[0].element_size() if args[0].dim() else 0
            if run > LONG:  # headers are short, and real
                self.kernels.moved(
                    (2 if name == "copy_" else 3) * args[0].numel() * args[0].element_size()
                )
                return args[0]
        return func(*args, **(kwargs or {}))
