"""Memory beyond the device: the store's tiers, an optimizer whose state is elsewhere, a model that
is streamed through."""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import commpress
import store_io
from commpress import cli
from commpress.tiered_mem import Options
from gpu.machine import Machine
from gpu.runner import Report

# a step against its copies over PCIe and its computing, one after the other
TOGETHER = 1.5
COPIED = 0.8  # of the speed of a copy from pinned memory
MIB = 1 << 20
SMALL = Options(
    chunk_bytes=64 << 10, pack_below=8 << 10, pack_bytes=32 << 10, segment_bytes=4 << 20
)


@contextmanager
def opened(machine: Machine, **budgets: Any) -> Iterator[commpress.TieredStore]:
    """A store in a temporary folder, with the device as its fastest tier."""
    more: dict[str, Any] = {"options": SMALL, "engine": "threads"} if machine.twin else {}
    with (
        tempfile.TemporaryDirectory(prefix="commpress-gpu-") as folder,
        commpress.TieredStore.open(folder, accelerator=machine.device, **budgets, **more) as store,
    ):
        yield store


# ---------------------------------------------------------------- the store


def store(machine: Machine, report: Report) -> None:
    """Tensors between device, pinned host memory and disk, against copies of the same bytes."""
    count, nbytes = 8, machine.size(64 * MIB, MIB // 4)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not machine.twin)
    device = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    up = nbytes / machine.seconds(lambda: device.copy_(host, non_blocking=True))
    down = nbytes / machine.seconds(lambda: host.copy_(device, non_blocking=True))
    report("copy from pinned memory to the device", up / 1e9, "GB/s")
    report("copy from the device to pinned memory", down / 1e9, "GB/s")
    names = [f"t{i}" for i in range(count)]
    with opened(
        machine, host=machine.size(2048 * MIB, 8 * MIB), device=machine.size(1024 * MIB, 4 * MIB)
    ) as tiers:
        for i, name in enumerate(names):
            tiers.put(name, torch.full((nbytes // 4,), float(i)))

        def through(on: str, *, write: bool) -> None:
            for name in names:
                with tiers.borrow(name, on=on, write=write) as tensor:  # type: ignore[arg-type]
                    tensor[:1] += float(write)

        for tier in ("device", "host"):  # loads what computes on either
            through(tier, write=True)
        limit = None if machine.twin else COPIED
        climbed = count * nbytes / machine.took(lambda: through("device", write=True))
        report("host to device", climbed / 1e9, "GB/s")
        report("host to device against the copy", climbed / up, "x", limit=limit)
        stayed = machine.took(lambda: through("device", write=True)) / count
        report("borrowing what is on the device", 1e6 * stayed, "us")
        came = count * nbytes / machine.took(lambda: through("host", write=True))
        report("device to host against the copy", came / down, "x", limit=limit)
        wrong = 0
        for i, name in enumerate(names):
            with tiers.borrow(name, write=False) as tensor:
                wrong += int(tensor[0] != i + 5) + int((tensor[1:] != i).sum())
        report("elements that are not what was put", wrong, limit=0, bound="most")
        written = count * nbytes / machine.took(lambda: (tiers.evict(names).wait(), None))
        report("to disk", written / 1e9, "GB/s")
        read = count * nbytes / machine.took(lambda: through("device", write=False))
        report("disk to device", read / 1e9, "GB/s")


def disk(machine: Machine, report: Report) -> None:
    """The store's reads and writes, beside fio's where that is installed."""
    with tempfile.TemporaryDirectory(prefix="commpress-gpu-") as folder:
        file = Path(folder, "io.json")
        sizes = ["--size", "32MiB", "--chunks", "4MiB", "--rounds", "1", "--engine", "threads"]
        if not machine.twin:
            sizes = ["--size", "1GiB", "--chunks", "4MiB,16MiB", "--rounds", "3"]
        line = ["--directory", folder, "--json", str(file), *sizes]
        if machine.twin or shutil.which("fio") is None:
            cli.main(["bench", "io", *line])
        else:
            parser = argparse.ArgumentParser()
            store_io.options(parser)
            store_io.run(parser.parse_args(line))
        for row in json.loads(file.read_text())["rows"]:
            what = f"{row['verb']} in chunks of {row['chunk'] >> 20} MiB"
            report(what, row["store"] / 1e9, "GB/s")
            if row.get("of_fio") is not None:
                report(f"{what}, of fio", row["of_fio"], limit=store_io.ENOUGH)


# ------------------------------------------------------------ an optimizer whose state is elsewhere


def layers(machine: Machine, million: float, width: int) -> nn.Sequential:
    many = max(round(million * 1e6 / width**2), 2)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(many))).to(
        machine.device
    )


def offloaded(machine: Machine, report: Report, *, million: float = 200.0) -> None:
    """A step of AdamW whose moments are in host memory or on disk, against torch's with all of them
    on the device."""
    width = machine.size(4096, 32)
    million = million if not machine.twin else 4e-3
    model, twin = layers(machine, million, width), layers(machine, million, width)
    draw = torch.Generator(machine.device).manual_seed(1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = torch.randn(p.shape, generator=draw, device=machine.device)
        q.grad = p.grad.clone()
    count = sum(p.numel() for p in model.parameters())
    report("parameters", count / 1e6, "M")
    adam: dict[str, Any] = {"lr": 1e-3, "fused": True}
    plain = torch.optim.AdamW(twin.parameters(), **adam)
    there = machine.seconds(plain.step, times=3, warm=1)
    report("AdamW on the device", 1e3 * there, "ms")
    budgets = {
        "host": machine.size(int(16 * count), 4 * MIB),
        "device": machine.size(256 * MIB, MIB),
    }
    with opened(machine, **budgets) as tiers:
        chunk = machine.size(64, 1) if not machine.twin else 0.01
        inner = commpress.Offloaded(
            model.parameters(), torch.optim.AdamW, store=tiers, chunk_mb=chunk, **adam
        )
        took = machine.seconds(inner.step, times=3, warm=1)
        report("AdamW with moments in the store", 1e3 * took, "ms")
        report("bytes of state per second", 24 * count / took / 1e9, "GB/s")
        alone = crossing(machine, 4 * count, 4 * count) + updating(machine, count)
        against(machine, report, took, alone)
        inner.close()
    worst = max(
        float((p - q).detach().abs().max())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )
    report("largest difference of a weight after four steps", worst, limit=1e-5, bound="most")


def crossing(machine: Machine, up: int, down: int) -> float:
    """Seconds in which so many bytes cross PCIe each way, one way after the other."""
    nbytes = machine.size(64 * MIB, MIB // 4)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not machine.twin)
    there = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    rise = machine.seconds(lambda: there.copy_(host, non_blocking=True))
    fall = machine.seconds(lambda: host.copy_(there, non_blocking=True))
    return (up * rise + down * fall) / nbytes


def updating(machine: Machine, count: int) -> float:
    """Seconds of the processor's update of so many elements by AdamW, from those of a part."""
    part = min(count, machine.size(1 << 26, 1 << 10))  # more than caches hold
    one = nn.Parameter(torch.zeros(part))
    one.grad = torch.ones(part)
    step = torch.optim.AdamW([one], lr=1e-3, fused=True).step
    return machine.seconds(step, times=3, warm=1) * count / part


def against(machine: Machine, report: Report, took: float, alone: float) -> None:
    """The time of a step against that of its copies over PCIe and its computing."""
    report("copies over PCIe and computing", 1e3 * alone, "ms")
    limit = None if machine.twin else TOGETHER
    report("a step against both", took / alone, "x", limit=limit, bound="most")


# ---------------------------------------------------------------- streaming


def streaming(machine: Machine, report: Report, *, million: float = 400.0) -> None:
    """Training of a model whose parameters are in the store: each layer's are on the device only
    while it computes."""
    width = machine.size(4096, 32)
    million = million if not machine.twin else 4e-3
    chunk = 64.0 if not machine.twin else 0.01
    losses: dict[str, list[float]] = {}
    x = (
        torch.randn(64, width, generator=torch.Generator().manual_seed(2)).to(machine.device)
        / width**0.5
    )
    adam: dict[str, Any] = {"lr": 1e-4, "fused": True}
    budgets = {
        "host": machine.size(int(24e6 * million), 8 * MIB),
        "device": machine.size(512 * MIB, MIB),
    }
    computing = 0.0
    for name in ("plain", "streamed"):
        model = layers(machine, million, width)
        with opened(machine, **budgets) as tiers:
            inner: Any = torch.optim.AdamW(model.parameters(), **adam)
            if name == "streamed":
                commpress.stream(model, store=tiers, blocks=[nn.Linear], chunk_mb=chunk)
                inner = commpress.Offloaded(
                    model.parameters(), torch.optim.AdamW, store=tiers, chunk_mb=chunk, **adam
                )
            step = _step(model, inner, x, losses.setdefault(name, []))
            step()
            if not machine.twin:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            took = min(machine.took(step) for _ in range(2))
            report(f"step, {name}", 1e3 * took, "ms")
            if name == "plain":
                computing = took
            else:
                count = sum(p.numel() for p in model.parameters())
                copies = crossing(machine, 8 * count, 4 * count)
                against(machine, report, took, computing + copies + updating(machine, count))
            if not machine.twin:
                report(
                    f"memory of the device at most, {name}",
                    torch.cuda.max_memory_allocated() / 2**30,
                    "GiB",
                )
            if name == "streamed":
                inner.close()
        del model, inner, step
    worst = max(
        abs(a - b) / abs(a) for a, b in zip(losses["plain"], losses["streamed"], strict=True)
    )
    report("largest difference of a loss", worst, limit=1e-4, bound="most")


def _step(
    model: nn.Module, inner: Any, x: torch.Tensor, losses: list[float]
) -> Callable[[], object]:
    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        inner.step()
        inner.zero_grad()
        losses.append(loss.item())

    return step


# ---------------------------------------------------------------- the large ones


def offloaded_billion(machine: Machine, report: Report) -> None:
    """The same with a billion parameters."""
    offloaded(machine, report, million=1000.0)


def streaming_large(machine: Machine, report: Report) -> None:
    """Streaming of a model that is three times as large as what the device is allowed."""
    streaming(machine, report, million=1600.0)


def largest(machine: Machine, report: Report) -> None:
    """Models that take a step in device, host memory and disk together, each larger than the one
    before, until one does not."""
    width, chunk = machine.size(8192, 32), machine.size(64 * MIB, MIB // 64) / MIB
    x = torch.randn(16, width, device=machine.device) / width**0.5
    budgets = {"host": machine.size(40 << 30, 8 * MIB), "device": machine.size(1 << 30, MIB)}
    for million in (1000.0, 2000.0, 4000.0, 6000.0) if not machine.twin else (2e-3, 4e-3):
        with report.line(f"{million:g} M parameters"), opened(machine, **budgets) as tiers:
            model = layers(machine, million, width)
            commpress.stream(model, store=tiers, blocks=[nn.Linear], chunk_mb=chunk)
            inner = commpress.Offloaded(
                model.parameters(),
                torch.optim.AdamW,
                store=tiers,
                chunk_mb=chunk,
                lr=1e-4,
                fused=True,
            )
            took = machine.took(_step(model, inner, x, []))
            report(
                f"{million:g} M parameters, {16e-3 * million:.3g} GB of state: a step", took, "s"
            )
            inner.close()
