"""Steps with more than one rank or device: accumulation among owners of state, a rank that is
killed, rows that NCCL copies byte by byte, tensors on a second device."""

import os
import signal
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import commpress
from commpress.cli.ranks import LocalRanks
from commpress.cli.ranks import Report as Told
from commpress.codecs import policy_of
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import PeerFailure
from commpress.kernels.pieces import ALIGNED
from gpu import codecs
from gpu.machine import Card, Machine, Twin
from gpu.runner import Report

SOON = 10.0  # seconds until a rank knows that another one was killed
SLOWER = 1.05  # aligned rows against the others, at most
PATIENT = timedelta(seconds=20)


def _nothing(*_: object) -> None:
    """Ranks report at their end."""


# ---------------------------------------------------------------- ZeRO-2


def zero2(machine: Machine, report: Report) -> None:
    """ZeRO-2 of two ranks with two backwards a step, on the card and on the processor."""
    for codec in ("none", "int8"):
        with report.line(codec), LocalRanks(2, forked=True) as pool:
            wrong = pool.call(_accumulated, (machine.twin, codec), _nothing)
            what = f"{codec}: weights with other bits than the processor's"
            report(what, wrong, limit=0, bound="most")


def _accumulated(rank: int, size: int, task: tuple[bool, str], told: Told) -> int:
    """Gradients are given, and SGD's rate is a power of two: no device rounds otherwise."""
    twin, codec = task
    machine: Machine = Twin() if twin else Card()
    shapes = [(machine.size(1 << 20, 1 << 9), 4), (1003,)]
    found = []
    for device in (machine.device, torch.device("cpu")):
        draw = torch.Generator().manual_seed(3)
        given = [nn.Parameter(torch.randn(shape, generator=draw).to(device)) for shape in shapes]
        inner = commpress.Partitioned(given, torch.optim.SGD, lr=0.25, codec=codec, stage=2)
        own = torch.Generator().manual_seed(5 + rank)
        for _ in range(2):
            for part in range(2):
                with inner.no_sync() if part == 0 else nullcontext():
                    factors = [torch.randn(p.shape, generator=own).to(device) for p in given]
                    losses = [(p * f).sum() for p, f in zip(given, factors, strict=True)]
                    torch.stack(losses).sum().backward()
            inner.step()
            inner.zero_grad()
        found.append([p.detach().cpu() for p in given])
        inner.close()
    return codecs.differing(*found)


# ---------------------------------------------------------------- a rank that is killed


def killed_rank(machine: Machine, report: Report) -> None:
    """Two ranks on the card, one of which is killed in a step: the other one names it."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="commpress-gpu-") as folder:
        ours, theirs = context.Pipe()
        task = machine.twin, Path(folder, "group"), theirs
        ranks = [context.Process(target=_stepping, args=(rank, *task)) for rank in range(2)]
        for process in ranks:
            process.start()
        theirs.close()
        try:
            with report.line("two ranks", must=machine.twin):
                if not ours.poll(40):
                    raise TimeoutError("rank 0 still waits 40 s after the ranks began")
                seconds, named, what = ours.recv()
                report("seconds until the error", seconds, "s", limit=SOON, bound="most")
                report("the error names rank 1", named, limit=1, note=what[:200])
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _stepping(rank: int, twin: bool, file: Path, pipe: Connection) -> None:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    machine: Machine = Twin() if twin else Card()
    if not twin:
        torch.cuda.set_device(0)
    backend = "gloo" if twin else "cpu:gloo,cuda:nccl"
    join = partial(dist.init_process_group, init_method=f"file://{file}", timeout=PATIENT)
    join(backend, rank=rank, world_size=2)
    channel = Channel.among(timeout=PATIENT, device=machine.device)
    exchanges, numel = Exchanges(policy_of("int8"), 2, channel.workspace), 1 << 20
    exchange = exchanges.of(("w",), lambda: ([Span("w", 0, numel)], [(numel,)]), machine.device)
    buffer = torch.ones(numel, device=machine.device)
    for step in range(3):
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            call = channel.call(exchange.sequences, step)
            settle(channel.run(exchange.steps(channel, buffer, call)), taken=True)
        except PeerFailure as error:
            pipe.send((time.monotonic() - begin, float(error.ranks == (1,)), str(error)))
            os._exit(0)  # NCCL's own threads may wait on


# ---------------------------------------------------------------- rows


def aligned_rows(machine: Machine, report: Report) -> None:
    """All-to-alls of two NCCL ranks on one card, of rows at multiples of 16 bytes and of others."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    with report.line("two ranks", must=machine.twin), LocalRanks(2, forked=True) as pool:
        aligned, others = pool.call(_exchanged, machine.twin, _nothing)
        report("rows at multiples of 16 bytes", 1e3 * aligned, "ms")
        report("rows of 8 bytes less", 1e3 * others, "ms")
        limit = None if machine.twin else SLOWER
        report("aligned rows against the others", aligned / others, "x", limit=limit, bound="most")


def _exchanged(rank: int, size: int, twin: bool, told: Told) -> tuple[float, float]:
    machine: Machine = Twin() if twin else Card()
    if not twin:
        torch.cuda.set_device(0)
    group = dist.new_group(backend=machine.backend, timeout=PATIENT)
    took = []
    for nbytes in (machine.size(64 << 20, 1 << 12), machine.size(64 << 20, 1 << 12) - ALIGNED // 2):
        out, inp = (
            torch.zeros(size, nbytes, dtype=torch.uint8, device=machine.device) for _ in range(2)
        )
        call = partial(dist.all_to_all_single, out, inp, group=group)
        took.append(machine.seconds(call, times=machine.size(15, 2)))
    return took[0], took[1]


# ---------------------------------------------------------------- a second device


def second_device(machine: Machine, report: Report) -> None:
    """A bucket on a device that is not the current one, where there are two."""
    if not machine.twin and torch.cuda.device_count() < 2:
        report("devices", torch.cuda.device_count(), note="not here: there is one")
        return
    device = machine.device if machine.twin else torch.device("cuda", 1)
    channel = Channel(Loopback(1).transport(0))
    for codec in ("sign", "int8"):
        with report.line(codec):
            here, there = (_worked(channel, codec, each) for each in (device, torch.device("cpu")))
            what = f"{codec}: elements with other bits than by the CPU"
            report(what, codecs.differing([here], [there]), limit=0, bound="most")


def _worked(channel: Channel, codec: str, device: torch.device) -> torch.Tensor:
    """The mean of one rank by its worker's thread, on the host."""
    exchanges, numel = Exchanges(policy_of(codec, min_numel=0), 1, channel.workspace), 100_003
    exchange = exchanges.of(("w",), lambda: ([Span("w", 0, numel)], [(numel,)]), device)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(device)
    call = channel.call(exchange.sequences)
    settle(channel.submit(exchange.steps(channel, x, call), x).wait(), taken=True)
    return x.cpu()
