"""Weights that are published from the card."""

from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch

from commpress.integrations.weights import own_part
from commpress.weights import Publisher
from gpu.machine import Machine
from gpu.runner import Report

SHARES = 0.0, 0.01, 1.0  # of the weights, that change from one version to the next


def published(machine: Machine, report: Report) -> None:
    """Versions of weights on the card: their files are those of the same weights on the host."""
    numel = machine.size(1 << 27, 1 << 16)
    with TemporaryDirectory(prefix="commpress-gpu-") as place:
        host, card = (Path(place, name) for name in ("host", "card"))
        _publish(torch.device("cpu"), numel, host, apart=False)
        scans = _publish(machine.device, numel, card, apart=True)
        for share, seconds in zip(SHARES, scans, strict=True):
            what = f"training stands still, {100 * share:g} % changed"
            report(what, 1e3 * seconds, "ms", note=f"{2 * numel / 1e9 / seconds:.1f} GB/s")
        names = [
            path.name for path in host.iterdir() if path.name.startswith("v") and "-" in path.name
        ]
        unlike = [n for n in names if _content(host / n) != _content(card / n)]
        report("files of codes", len(names), limit=1 + len(SHARES))
        report("of them unlike the host's", len(unlike), limit=0, bound="most")


def _publish(device: torch.device, numel: int, to: Path, *, apart: bool) -> list[float]:
    """Seconds in which each version after the first held training up."""
    draw = torch.Generator().manual_seed(0)
    kinds = {"bfloat16": numel, "float16": 100_003, "float32": 65_537}
    weights = {
        kind: torch.randn(n, generator=draw).to(device, getattr(torch, kind))
        for kind, n in kinds.items()
    }
    with (
        mock.patch.object(own_part, "is_device", return_value=apart),  # the twin's card is none
        Publisher(weights, to) as publisher,
    ):
        publisher.publish()
        seconds = []
        for share in SHARES:
            for value in weights.values():
                moved = torch.rand(value.shape, generator=draw) < share
                value += value * moved.to(device, value.dtype) * 2.0**-7
            seconds.append(publisher.publish().scan_seconds)
    return seconds


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
