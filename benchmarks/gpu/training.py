"""Whole training steps on the device: under DDP, with several ranks on one card, under FSDP2, with
our optimizers."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
import optimizer as arithmetic
from commpress.cli.gpt import GPT
from commpress.cli.ranks import LocalRanks
from commpress.cli.ranks import Report as Told
from commpress.codecs import policy_of
from commpress.collectives.allreduce import Call, settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchange, Exchanges
from commpress.optim.optimizer import RoundKind
from commpress.work import Steps, future_on
from gpu.codecs import differing
from gpu.machine import Card, Machine, Twin
from gpu.runner import Report

WHOLE = 1.03  # of the step with AdamW(fused), at most
Step = Callable[[], object]


def gpt(machine: Machine, *, layers: int = 12, seed: int = 0) -> GPT:
    """124 million parameters; on a twin some thousand."""
    torch.manual_seed(seed)
    sizes: dict[str, int] = {
        "width": 768,
        "layers": layers,
        "heads": 12,
        "length": 512,
        "vocabulary": 25_152,
    }
    if machine.twin:
        sizes = {"width": 32, "layers": 1, "heads": 2, "length": 16, "vocabulary": 256}
    return GPT(**sizes).to(machine.device)


def step_of(
    machine: Machine, model: nn.Module, inner: Any, seed: int = 0, *, rows: int = 8
) -> Step:
    """Forward, backward and update with words drawn once."""
    net = model.module if isinstance(model, DistributedDataParallel) else model
    length, words = machine.size(512, 16), machine.size(25_152, 256)
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(words, (machine.size(rows, 2), length + 1), generator=draw).to(
        machine.device
    )
    assert isinstance(net, nn.Module)

    def step() -> None:
        with torch.autocast(machine.device.type, torch.bfloat16):
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        inner.step()
        inner.zero_grad()

    return step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# ---------------------------------------------------------------- DDP


class Hook:
    """The hook of DDP in one rank, whose gradients ``commpress.compress`` would let pass: it sends
    all of them to itself."""

    def __init__(self, codec: str) -> None:
        self.channel = Channel.among()
        self.exchanges = Exchanges(policy_of(codec), self.channel.size, self.channel.workspace)
        self.keys = itertools.count()

    def reduce(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, gradients = bucket.buffer(), bucket.gradients()
        first, names = buffer.data_ptr(), tuple(str(id(p)) for p in bucket.parameters())

        def where() -> tuple[list[Span], list[torch.Size]]:
            each = zip(names, gradients, strict=True)
            return [Span(name, (g.data_ptr() - first) // 4, g.numel()) for name, g in each], [
                g.shape for g in gradients
            ]

        exchange = self.exchanges.of(names, where, buffer.device)
        done = future_on(buffer.device)
        steps = self._reduced(
            buffer, exchange, self.channel.call(exchange.sequences, next(self.keys)), done
        )
        self.channel.submit(steps, buffer, waits=exchange.waits)
        return done

    def _reduced(
        self,
        buffer: torch.Tensor,
        exchange: Exchange,
        call: Call,
        done: torch.futures.Future[Any],
    ) -> Steps[None]:
        try:
            outcomes = yield from exchange.steps(self.channel, buffer, call)
            settle(outcomes, taken=all(outcome.finite for outcome in outcomes))
        except Exception as error:
            done.set_exception(error)
            raise
        done.set_result(buffer)


def ddp(machine: Machine, report: Report) -> None:
    """A step of a GPT of 124 M parameters in one rank: alone, with DDP, and with a hook that
    compresses every bucket."""
    machine.join()
    alone = gpt(machine)
    report("parameters", sum(p.numel() for p in alone.parameters()) / 1e6, "M")
    computing = machine.seconds(step_of(machine, alone, adamw(alone)), times=machine.size(10, 2))
    report("step without DDP", 1e3 * computing, "ms")
    del alone
    wrapped = DistributedDataParallel(gpt(machine))
    plain = machine.seconds(step_of(machine, wrapped, adamw(wrapped)), times=machine.size(10, 2))
    report("step with plain DDP", 1e3 * plain, "ms")
    del wrapped
    for codec in ("sign", "int8") if not machine.twin else ("int8",):
        with report.line(codec):
            wrapped = DistributedDataParallel(gpt(machine))
            hook = Hook(codec)
            wrapped.register_comm_hook(None, hook.reduce)
            step = step_of(machine, wrapped, adamw(wrapped))
            took = machine.seconds(step, times=machine.size(10, 2))
            report(f"step with {codec}", 1e3 * took, "ms")
            report(
                f"plain over {codec}",
                plain / took,
                "x",
                note="the network takes no time: what compressing costs",
            )
            working = (
                hook.channel.workspace.encode_seconds
                + hook.channel.workspace.decode_seconds
                + hook.channel.waited
            )
            report(
                f"{codec}: host's time in the hook, per step",
                1e3 * working / (machine.size(10, 2) + 2),
                "ms",
            )
            report(f"{codec}: exposed time, per step", 1e3 * (took - computing), "ms")
            with report.line(f"{codec}: profiler"):
                seen = machine.counted(step)
                report(f"{codec}: waits of the host per step", seen.waits)
                report(f"{codec}: launches per step", seen.launches)
            hook.channel.close()
            del wrapped, hook


# ---------------------------------------------------------------- several ranks on one card


def ranks(machine: Machine, report: Report) -> None:
    """Two and four ranks on one card by Gloo and pinned memory: the bits of the CPU, and the time
    of a step."""
    for size in (2, 4) if not machine.twin else (2,):
        with report.line(f"{size} ranks"), LocalRanks(size, forked=True) as pool:
            for what, value, unit, limit in pool.call(_on_one_card, machine.twin, _nothing):
                report(f"{size} ranks: {what}", value, unit, limit=limit, bound="most")


def _on_one_card(
    rank: int, size: int, twin: bool, told: Told
) -> list[tuple[str, float, str, float | None]]:
    machine, found = Twin() if twin else Card(), list[tuple[str, float, str, float | None]]()
    channel = Channel.among()
    for codec in ("sign", "int8", "topk-64"):
        here, there = (
            _means(channel, codec, device) for device in (machine.device, torch.device("cpu"))
        )
        found.append(
            (f"{codec}: elements with other bits than by the CPU", differing(here, there), "", 0)
        )
    for codec in ("plain DDP", "sign", "int8"):
        wrapped = DistributedDataParallel(gpt(machine, layers=4))
        if codec != "plain DDP":
            commpress.compress(wrapped, codec, min_numel=0)
        step = step_of(machine, wrapped, adamw(wrapped), rank, rows=4)
        dist.barrier()
        took = machine.seconds(step, times=machine.size(4, 1), warm=machine.size(2, 1))
        found.append((f"step with {codec}", 1e3 * took, "ms", None))
        weights = (
            torch.cat([p.detach().flatten() for p in wrapped.parameters()])
            .cpu()
            .view(torch.int32)
            .double()
        )
        spread = torch.stack([weights.min(), weights.max(), weights.sum()])
        most = spread.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(spread, dist.ReduceOp.MIN)
        found.append(
            (f"weights that differ between ranks, {codec}", float((most != spread).sum()), "", 0)
        )
    return found


def _means(channel: Channel, codec: str, device: torch.device) -> list[torch.Tensor]:
    """Of three steps, on the host."""
    exchanges = Exchanges(policy_of(codec, min_numel=0), channel.size, channel.workspace)
    exchange = exchanges.of(("all",), lambda: ([Span("w", 0, 100_003)], [(100_003,)]), device)
    means = []
    for step in range(3):
        x = torch.randn(
            100_003, generator=torch.Generator().manual_seed(8 * step + channel.rank)
        ).to(device)
        call = channel.call(exchange.sequences, step)
        settle(channel.run(exchange.steps(channel, x, call)), taken=True)
        means.append(x.cpu())
    return means


def _nothing(*_: object) -> None:
    """Ranks report at their end."""


def fsdp(machine: Machine, report: Report) -> None:
    """FSDP2 with two ranks on the card: gradients and weights compressed, against its own
    collectives."""
    for name, gradients, weights, overlap in (
        ("int8", "int8", "int8", True),
        ("int8, without overlap", "int8", "int8", False),
        ("int4", "int4", "int8", True),
        ("plain", None, None, True),
    ):
        with report.line(name, must=gradients is not None), LocalRanks(2, forked=True) as pool:
            task = machine.twin, gradients, weights, overlap
            took, share = pool.call(_sharded, task, _nothing)
            report(f"step with {name}", 1e3 * took, "ms")
            if gradients is not None:
                report(f"bytes with {name}", share, "of plain", limit=1.0, bound="most")


def _sharded(
    rank: int, size: int, task: tuple[bool, Any, Any, bool], told: Told
) -> tuple[float, float]:
    twin, gradients, weights, overlap = task
    machine: Machine = Twin() if twin else Card()
    model = gpt(machine, layers=4)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    state = None
    if gradients is not None:
        state = commpress.compress_fsdp(model, gradients, weights, overlap=overlap)
    step = step_of(machine, model, adamw(model), rank, rows=4)
    took = machine.seconds(step, times=machine.size(4, 1), warm=machine.size(2, 1))
    return took, state.wire_bytes / state.logical_bytes if state is not None else 1.0


# ---------------------------------------------------------------- optimizers


def optimizers(machine: Machine, report: Report) -> None:
    """Steps of the optimizers on 124 M parameters, and whole training steps with them, against
    AdamW(fused=True)."""
    kinds: dict[str, Callable[[GPT], Step]] = {
        "AdamW(fused)": lambda net: adamw(net).step,
        "1-bit Adam, exact": lambda net: arithmetic.arithmetic(
            commpress.OneBitAdam, net, RoundKind.EXACT
        ),
        "1-bit Adam, compressed": lambda net: arithmetic.arithmetic(
            commpress.OneBitAdam, net, RoundKind.COMPRESSED
        ),
        "0/1 Adam, synchronising": lambda net: arithmetic.arithmetic(
            commpress.ZeroOneAdam, net, RoundKind.COMPRESSED
        ),
        "0/1 Adam, local": lambda net: arithmetic.arithmetic(
            commpress.ZeroOneAdam, net, RoundKind.LOCAL
        ),
        "1-bit LAMB, compressed": lambda net: arithmetic.arithmetic(
            commpress.OneBitLamb, net, RoundKind.COMPRESSED
        ),
    }
    net = gpt(machine)
    computing = machine.seconds(step_of(machine, net, _Still(net)), times=machine.size(6, 1))
    report("forward and backward", 1e3 * computing, "ms")
    base = 0.0
    for name, make in kinds.items():
        with report.line(name):
            net = gpt(machine)
            for p in net.parameters():
                p.grad = 1e-3 * torch.randn_like(p)
            took = machine.seconds(make(net), times=machine.size(10, 1))
            base = base or took
            report(f"{name}, alone", 1e3 * took, "ms")
            limit = None if machine.twin or name.startswith("AdamW") else WHOLE
            report(
                f"{name}, whole step",
                (computing + took) / (computing + base),
                "of AdamW's",
                limit=limit,
                bound="most",
            )


class _Still:
    """An optimizer that does nothing but forget gradients."""

    def __init__(self, net: nn.Module) -> None:
        self.zero_grad = net.zero_grad

    def step(self) -> None:
        """Weights stay."""
