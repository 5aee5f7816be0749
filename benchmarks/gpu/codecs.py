"""Codecs on the device: their bytes, their speed, and what a bucket costs the host."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from codec import CODECS, Buffers
from commpress.codecs import codec_named, policy_of
from commpress.codecs.family import NAMES
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.kernels import devices, reference
from commpress.kernels.cpu import compiled
from commpress.kernels.cpu.digest import FAMILIES
from commpress.kernels.cuda import machine_code, modules
from commpress.kernels.cuda import row_codec as cuda
from commpress.work import Steps
from gpu.machine import Machine
from gpu.runner import Report

ROOT = Path(__file__).resolve().parents[2]
COMPOSED = ("bits2", "bits4", "shift4", "topk-64", "randk-64", "topk-64+bits2")
# on a twin: CUDA's source, compiled for the processor
SHIMMED = {"int8": reference.INT8, "none": reference.FP32}
MEBI = 1 << 20
BUCKET = 25 * MEBI // 4  # floats: DDP's usual bucket
SHARES = {"sign": 0.8, "int8": 0.7, "int4": 0.7}  # of the speed of a copy, at the largest size
LARGE = 16 * MEBI  # floats from which on kernels, and not launches, take the time
WAITS = 1.0  # of the host per bucket


# ---------------------------------------------------------------- compiling


def compiling(machine: Machine, report: Report) -> None:
    """Kernels compiled on first use, all families at once, those of the CPU too, and loaded again
    by other processes.

    Then as a package has them that ships machine code for this card.
    """
    names = ["sign", "int8"] if machine.twin else [*CODECS, *COMPOSED[:-1]]
    with tempfile.TemporaryDirectory() as folder:
        _compiling(machine, report, names, ("first use", "again"))
        with report.line("shipped", must=False):
            _build(machine, report, Path(folder))
            _compiling(machine, report, names, ("shipped",))


def _build(machine: Machine, report: Report, folder: Path) -> None:
    """Machine code for this card in a folder, from which every process after this one loads it."""
    modules.FOLDER, start = folder, perf_counter()
    if machine.twin:
        modules.FAMILIES = (reference.FP16,)
    # by a process of its own: one with CUDA cannot be forked
    with ProcessPoolExecutor(1, get_context("fork")) as pool:
        nbytes = pool.submit(_built, machine.twin, folder).result()
    report("shipped: made", perf_counter() - start, "s")
    report("shipped: size", nbytes / 1e6, "MB")


def _built(twin: bool, folder: Path) -> int:
    card = 80 if twin else int("".join(map(str, torch.cuda.get_device_capability())))
    return sum(path.stat().st_size for path in machine_code.build(folder, (card,)))


def _compiling(
    machine: Machine, report: Report, names: Sequence[str], waves: Sequence[str]
) -> None:
    for wave in waves:
        start = perf_counter()
        with ProcessPoolExecutor(min(len(names), os.cpu_count() or 1), get_context("fork")) as pool:
            bitcode = pool.map(compiled.bitcode, FAMILIES)
            waiting = {name: pool.submit(_used, machine, name) for name in names}
            for name, work in waiting.items():
                with report.line(f"{wave}: {name}"):
                    report(f"{wave}: {name}", work.result(), "s")
            with report.line(f"{wave}: kernels of the CPU"):
                report(f"{wave}: bitcode of the CPU", sum(map(len, bitcode)) / 1e6, "MB")
        report(f"{wave}: all", perf_counter() - start, "s")


def _used(machine: Machine, name: str) -> float:
    """Seconds until a process that begins has encoded and decoded once."""
    codec = CODECS.get(name) or codec_named(name)
    torch.ones(1, device=machine.device).sum().item()  # wakes the device
    start = perf_counter()
    assert hasattr(codec, "kind"), name
    for call, *_ in Buffers(1 << 14, machine.device).operations(codec).values():
        call()
    machine.synchronize()
    return perf_counter() - start


# ---------------------------------------------------------------- bits


def bits(machine: Machine, report: Report) -> None:
    """Bytes of the law by every kernel, and an all-reduce with the bits of the CPU for every
    codec."""
    with report.line("tests/kernel"):
        _tests(report)
    names = [*SHIMMED, "powersgd-4"] if machine.twin else [*NAMES, *COMPOSED, "powersgd-4"]
    with _kernels(machine):
        for name in names:
            with report.line(f"all-reduce: {name}"):
                here, there = (
                    _reduced(name, machine.device),
                    _reduced(name, torch.device("cpu"), plain=True),
                )
                # torch's batched products, which add in another order
                if name.startswith("powersgd"):
                    worst = max(
                        float((a - b).abs().max() / b.abs().max())
                        for a, b in zip(here, there, strict=True)
                    )
                    report(f"all-reduce: {name}, error", worst, limit=1e-3, bound="most")
                else:
                    report(
                        f"all-reduce: {name}, elements with other bits",
                        differing(here, there),
                        limit=0,
                        bound="most",
                    )


def differing(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> int:
    """Floats that have not the same bits."""
    return sum(
        int((a.view(torch.int32) != b.view(torch.int32)).sum())
        for a, b in zip(some, others, strict=True)
    )


def _tests(report: Report) -> None:
    import pytest

    class Counted:
        def __init__(self) -> None:
            self.outcomes = dict.fromkeys(("passed", "failed", "skipped"), 0)

        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[report.outcome] += 1
            if report.failed:  # at once: the step may run out of time
                print(f"{report.nodeid}\n{report.longreprtext}", flush=True)

    counted, folder = Counted(), str(ROOT / "tests" / "kernel")
    chosen = "(card or cuda_device) and not speed"
    workers = ["-n", str(min(8, os.cpu_count() or 1))] if find_spec("xdist") else []
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", *workers, "-k", chosen, f"--rootdir={ROOT}", folder],
        plugins=[counted],
    )
    report(
        "tests of kernels that failed",
        counted.outcomes["failed"],
        limit=0,
        bound="most",
        note=str(counted.outcomes),
    )
    if code not in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        raise RuntimeError(f"pytest ended with {code!r}")


@contextmanager
def _kernels(machine: Machine) -> Iterator[None]:
    """Kernels of the device. On a twin the plans of CUDA, executed on the processor from the same
    source."""
    if not machine.twin:
        yield
        return
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from cuda_shim import Shim

    with tempfile.TemporaryDirectory() as folder:
        shim, execute = Shim(Path(folder), SHIMMED.values()), cuda.execute
        cuda.execute = shim.execute
        try:
            yield
        finally:
            cuda.execute = execute


def _reduced(name: str, device: torch.device, *, plain: bool = False) -> list[torch.Tensor]:
    """Means and residuals of three ranks after three steps, on the host."""
    spans = [Span("matrix", 0, 40_000), Span("vector", 40_000, 5003)]
    channels = [Channel(transport) for transport in Loopback(3).transports()]
    exchanges = [
        Exchanges(policy_of(name, min_numel=0), 3, channel.workspace) for channel in channels
    ]
    found: list[torch.Tensor] = []

    def reduce() -> None:
        for step in range(3):
            draw = torch.Generator().manual_seed(step)
            buffers = [torch.randn(45_003, generator=draw).to(device) for _ in channels]
            done = simulate(
                [
                    e.of(("all",), lambda: (spans, [(200, 200), (5003,)]), device).steps(
                        c, x, c.call(8, step)
                    )
                    for e, c, x in zip(exchanges, channels, buffers, strict=True)
                ]
            )
            for outcomes in done:
                settle(outcomes, taken=True)
            found.extend(x.cpu() for x in buffers)

    low_rank = name.startswith("powersgd")
    if plain or device.type != "cpu" or low_rank:
        reduce()
    else:
        with devices.instead(cuda):
            reduce()
    for each in exchanges:
        found += [
            kept.cpu()
            for key, kept, _ in sorted(each.residuals.places(), key=lambda place: place[0])
        ]
    return found


# ---------------------------------------------------------------- speed


def kernels(machine: Machine, report: Report) -> None:
    """Encode, decode, mean and serve as shares of the speed of a copy, and against torch's
    operations."""
    sizes = [machine.size(n * MEBI, n << 8) for n in (1, 16, 256)]
    names = ["sign", "int8"] if machine.twin else list(CODECS)
    for numel in sizes:
        copied = machine.copied(numel)
        report(f"copy of {_size(numel)}", copied / 1e9, "GB/s")
        buffers = Buffers(numel, machine.device)
        for name in names:
            with report.line(f"{name}, {_size(numel)}"):
                codec = codec_named("sign") if name == "sign" else CODECS[name]
                for operation, (call, elements, moved) in buffers.operations(codec).items():
                    share = moved * elements / machine.seconds(call, times=7) / copied
                    limit = (
                        SHARES.get(name)
                        if numel >= LARGE * 16 and operation in ("encode", "decode")
                        else None
                    )
                    report(f"{name} {operation}, {_size(numel)}", share, "of copy", limit=limit)
        with report.line(f"torch's operations, {_size(numel)}"):
            sequence = partial(_by_torch, buffers.x, buffers.residual)
            encode = buffers.operations(codec_named("sign"))["encode"][0]
            report(
                f"sign encode against torch's operations, {_size(numel)}",
                machine.seconds(sequence, times=3) / machine.seconds(encode, times=7),
                "x",
                limit=None if machine.twin else 1.0,
            )
        if numel >= LARGE or machine.twin:
            with report.line(f"Triton, {_size(numel)}", must=False):
                _against_triton(machine, report, buffers, numel)
        del buffers


def _size(numel: int) -> str:
    return f"{numel // MEBI} Mi" if numel >= MEBI else f"{numel}"


def _by_torch(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One sign and one scale: the operations, one after the other, with which hooks and optimizers
    of others do it."""
    c = x + residual
    scale = c.norm() / c.numel() ** 0.5
    positive = c >= 0
    left = c - torch.where(positive, scale, -scale)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=x.device)
    packed = (positive.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    return packed, residual.copy_(left)


def _against_triton(machine: Machine, report: Report, buffers: Buffers, numel: int) -> None:
    if machine.twin:
        report("Triton", 0.0, note="not on a twin: it has no compiler for the processor")
        return
    from gpu.triton_sign import encode

    packed = torch.empty(numel // 8, dtype=torch.uint8, device=machine.device)
    scales = torch.empty(numel // 2048, device=machine.device)
    call = partial(encode, buffers.x, buffers.residual, packed, scales)
    ours = buffers.operations(codec_named("sign"))["encode in place"][0]
    report(
        f"sign encode against the same in Triton, {_size(numel)}",
        machine.seconds(call, times=7) / machine.seconds(ours, times=7),
        "x",
        limit=0.95,
    )


# ---------------------------------------------------------------- what the host does


def launches(machine: Machine, report: Report) -> None:
    """Launches, copies and waits of the host for one bucket of 25 MiB, by the profiler."""
    machine.join()
    channel = Channel.among()
    for name in ("sign", "int8", "none"):
        with report.line(name):
            reduce = _bucket(machine, channel, name)
            seen = machine.counted(reduce)
            report(f"{name}: launches per bucket", seen.launches)
            report(f"{name}: copies per bucket", seen.copies)
            report(
                f"{name}: waits of the host per bucket",
                seen.waits,
                limit=None if machine.twin else WAITS,
                bound="most",
            )
            report(f"{name}: one bucket", 1e3 * machine.seconds(reduce), "ms")


def _bucket(machine: Machine, channel: Channel, codec: str) -> Callable[[], object]:
    """The exchange of one bucket."""
    numel = machine.size(BUCKET, BUCKET >> 8)
    exchanges = Exchanges(policy_of(codec, min_numel=0), channel.size, channel.workspace)
    exchange = exchanges.of(("all",), lambda: ([Span("w", 0, numel)], [(numel,)]), machine.device)
    buffer = torch.randn(numel, device=machine.device)

    def steps() -> Steps[None]:
        call = channel.call(exchange.sequences)
        settle((yield from exchange.steps(channel, buffer, call)), taken=True)

    return lambda: channel.run(steps())
