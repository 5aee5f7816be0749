"""One training run twice: under DistributedDataParallel on real ranks, and its twin on replicas in
one process.

The twin knows nothing of buckets, hooks, threads or networks: it takes each parameter's gradients,
reduces them as one bucket over the simulation and steps every replica. Both must agree in every
bit.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import Codec, Policy, policy_of
from commpress.collectives.allreduce import Call, Workspace, reduce_bucket
from commpress.collectives.buckets import Span, messages
from commpress.collectives.topology import Topology
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.collectives.two_level import hierarchy_of, reduce_routes, routes
from commpress.feedback import ResidualStore

WIDTH, CLASSES, ROWS = 48, 8, 6
MIN_NUMEL = 256
WRAPPERS = {torch.float16: fp16_compress_wrapper, torch.bfloat16: bf16_compress_wrapper}


class Net(nn.Module):
    """Two branches, of which a forward takes none, one or both; weights are compressed, biases and
    norms exact."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(24, WIDTH)
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: torch.Tensor, branches: str = "left right") -> torch.Tensor:
        h = self.embed(x).relu()
        for name in branches.split():
            h = h + getattr(self, name)(h).tanh()
        return self.head(self.norm(h))


def both(rank: int, step: int) -> str:
    return "left right"


def one_each(rank: int, step: int) -> str:
    """Every branch is used by some rank at every step, but not by all."""
    return ("left", "right")[(rank + step) % 2]


def none_at_times(rank: int, step: int) -> str:
    """At every third step nobody takes the right branch."""
    return "left" if step % 3 == 2 else one_each(rank, step)


@dataclass(frozen=True)
class Plan:
    """A training run, in words that travel to other processes."""

    codec: str | Codec | Policy = "sign"
    steps: int = 6
    first: int = 0  # number of the first step, where a run continues another
    accumulate: int = 1  # backward passes per step, all but the last under no_sync
    dtype: torch.dtype = torch.float32
    wrapped: torch.dtype | None = None  # torch's wrapper around the hook
    named: bool = True  # parameters have their names, not numbers
    branches: Callable[[int, int], str] = both
    ddp: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    scale: float = 0.0  # a GradScaler's first scale; 0: no scaler
    bad: tuple[int, ...] = ()  # steps at which rank 1 brings an infinite gradient
    poisoned: str = ""  # the one parameter whose gradient that is; empty: all
    ends: tuple[int, ...] = ()  # step at which each rank's data ends, under DDP.join
    left_out: tuple[int, ...] = ()  # steps that are not taken, for a run to compare with
    seed: int = 0


@dataclass
class Trained:
    """All that one rank has at the end."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    residuals: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]]
    scales: list[float] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def made(plan: Plan) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(plan.seed)
    model = Net().to(plan.dtype)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(plan: Plan, rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(((plan.seed * 97 + step) * 97 + part) * 97 + rank)
    x, y = (
        torch.randn(ROWS, 24, generator=generator),
        torch.randn(ROWS, CLASSES, generator=generator),
    )
    return x.to(plan.dtype), y.to(plan.dtype)


def loss_of(model: nn.Module, plan: Plan, rank: int, step: int, part: int) -> torch.Tensor:
    x, y = batch(plan, rank, step, part)
    loss = (model(x, plan.branches(rank, step)) - y).square().mean()
    if step in plan.bad and rank == 1 and not plan.poisoned:
        return loss * float("inf")
    return loss


def steps_of(plan: Plan) -> list[int]:
    return [
        step for step in range(plan.first, plan.first + plan.steps) if step not in plan.left_out
    ]


def has_data(plan: Plan, rank: int, step: int) -> bool:
    return not plan.ends or step < plan.ends[rank]


def parts_of(plan: Plan, step: int) -> int:
    """torch itself fails if the first backward of a static graph is under no_sync."""
    return 1 if plan.ddp.get("static_graph") and step == plan.first else plan.accumulate


# ---------------------------------------------------------------- on a real rank


class Session:
    """One rank's model, optimizer, hook and scaler."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank = plan, dist.get_rank(plan.ddp.get("process_group"))
        self.model, self.optimizer = made(plan)
        self.ddp = DistributedDataParallel(self.model, **plan.ddp)
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=plan.scale, growth_interval=2)
            if plan.scale
            else None
        )
        self.log = Log()
        options = {
            "min_numel": MIN_NUMEL,
            "exclude": plan.exclude,
            "grad_scaler": self.scaler,
        } | plan.state
        if plan.wrapped is None and plan.named:
            self.state = commpress.compress(self.ddp, plan.codec, **options)
        else:
            names = self.model.named_parameters() if plan.named else None
            self.state = commpress.CompressedState(plan.codec, named_parameters=names, **options)
            hook = commpress.compressed_allreduce_hook
            if plan.wrapped is not None:
                hook = WRAPPERS[plan.wrapped](hook)
                # DDP refuses the name of torch's bfloat16 wrapper without NCCL
                hook.__name__ = "wrapped"
            self.ddp.register_comm_hook(self.state, hook)
        self.losses: list[float] = []
        self.scales: list[float] = []

    def backward(self, step: int) -> None:
        handle = None
        if self.plan.poisoned and step in self.plan.bad and self.rank == 1:
            parameter = self.model.get_parameter(self.plan.poisoned)
            handle = parameter.register_hook(lambda gradient: gradient * float("inf"))
        parts = parts_of(self.plan, step)
        for part in range(parts):
            last = part == parts - 1
            with nullcontext() if last else self.ddp.no_sync():
                loss = loss_of(self.ddp, self.plan, self.rank, step, part)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
        self.losses.append(loss.item())
        if handle:
            handle.remove()

    def step(self, step: int) -> None:
        self.backward(step)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scales.append(self.scaler.get_scale())
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def trained(self) -> Trained:
        parameters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        residuals = {
            key: (sent.clone(), reduced.clone())
            for key, sent, reduced in self.state.residuals.places()
        }
        counters = self.state.counters.as_dict()
        return Trained(self.losses, parameters, residuals, self.scales, counters, self.log.lines)


def train(plan: Plan) -> Trained:
    session = Session(plan)
    with session.ddp.join() if plan.ends else nullcontext():
        for step in steps_of(plan):
            if has_data(plan, session.rank, step):
                session.step(step)
    return session.trained()


class Log(logging.Handler):
    """Lines of our logger, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("commpress")
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


# ---------------------------------------------------------------- in one process


def twin(plan: Plan, size: int) -> list[Trained]:
    """The same run on ``size`` replicas here; without scaler and counters. In a bad step all
    gradients are zero."""
    replicas = [made(plan) for _ in range(size)]
    stores, losses = [ResidualStore() for _ in range(size)], [[] for _ in range(size)]
    policy = policy_of(plan.codec, min_numel=MIN_NUMEL, exclude=plan.exclude)
    for count, step in enumerate(steps_of(plan)):
        for rank, (model, _) in enumerate(replicas):
            if not has_data(plan, rank, step):
                continue
            for part in range(parts_of(plan, step)):
                loss = loss_of(model, plan, rank, step, part)
                loss.backward()
            losses[rank].append(loss.item())
        exact = plan.first + count < plan.state.get("exact_steps", 0)
        if step in plan.bad:
            for model, _ in replicas:
                for parameter in model.parameters():
                    parameter.grad.zero_()
        else:
            models = [model for model, _ in replicas]
            reduce_gradients(models, stores, policy_of("none") if exact else policy, plan, count)
        for _, optimizer in replicas:
            optimizer.step()
            optimizer.zero_grad()
    return [
        Trained(
            losses[rank],
            {name: p.detach() for name, p in model.named_parameters()},
            {key: (sent, reduced) for key, sent, reduced in stores[rank].places()},
        )
        for rank, (model, _) in enumerate(replicas)
    ]


def reduce_gradients(
    models: list[nn.Module], stores: list[ResidualStore], policy: Policy, plan: Plan, count: int
) -> None:
    """Every parameter by itself; one that nobody used keeps its None, as in
    DistributedDataParallel."""
    key = plan.first + count
    feedback = plan.state.get("error_feedback", True)
    for i, name in enumerate(dict(models[0].named_parameters())):
        parameters = [dict(model.named_parameters())[name] for model in models]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        narrow = plan.wrapped or plan.dtype
        buffers = [g.flatten().to(narrow).float() for g in grads]
        spans = [Span(name, 0, buffers[0].numel())]
        if topology := plan.state.get("topology"):
            outcomes = in_two_levels(spans, buffers, stores, policy, Topology.parse(topology), key)
        else:
            parts = messages(spans, policy, len(models), feedback=feedback)
            outcomes = simulate(
                [
                    reduce_bucket(
                        buffer,
                        [store.attach(m.keys, m.pieces, buffer.device) for m in parts],
                        messages=parts,
                        call=Call(transport=transport, workspace=Workspace(), sequence=i, key=key),
                    )
                    for buffer, store, transport in zip(
                        buffers, stores, Loopback(len(models)).transports(), strict=True
                    )
                ]
            )
        for outcome in (o for rank in outcomes for o in rank):
            assert outcome.finite, "the twin takes only steps that are finite"
            outcome.commit()
        used = any(p.grad is not None for p in parameters)
        for parameter, buffer in zip(parameters, buffers, strict=True):
            mean = buffer.to(narrow).to(parameter.dtype).view_as(parameter)
            parameter.grad = mean if used else None


def in_two_levels(spans, buffers, stores, policy, topology, key):
    ranks = []
    for buffer, store, transport in zip(
        buffers, stores, Loopback(topology.size).transports(), strict=True
    ):
        hierarchy = hierarchy_of(topology, transport)
        parts = routes(spans, policy, hierarchy)
        feedbacks = [
            {i: store.attach(m.keys, m.pieces, buffer.device) for i, m in route.between.items()}
            for route in parts
        ]
        ranks.append(
            reduce_routes(
                buffer,
                feedbacks,
                plan=parts,
                hierarchy=hierarchy,
                call=Call(transport=hierarchy.inside, workspace=Workspace(), sequence=0, key=key),
            )
        )
    return simulate(ranks)


def assert_equal(results: list[Trained], twins: list[Trained], *, losses: bool = True) -> None:
    """Parameters, residuals and losses, bit for bit, on every rank."""
    assert len(results) == len(twins)
    for rank, (one, two) in enumerate(zip(results, twins, strict=True)):
        assert not losses or one.losses == two.losses, f"losses of rank {rank}"
        assert one.parameters.keys() == two.parameters.keys()
        for name in one.parameters:
            assert torch.equal(one.parameters[name], two.parameters[name]), f"{name} of rank {rank}"
        assert one.residuals.keys() == two.residuals.keys()
        for key in one.residuals:
            for a, b in zip(one.residuals[key], two.residuals[key], strict=True):
                assert torch.equal(a, b), f"residual {key} of rank {rank}"
