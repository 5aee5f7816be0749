"""what the host does for a card, counted without one: waits, launches and copies per bucket, layer
and step

The card is made of host memory (benchmarks/gpu/card_twin.py); FSDP2's layers are those of two ranks
on the processor, without threads of their own, as on a card. Nothing is timed: counts are the same
on every machine. With --before the cells have the counts of another checkout in front.

  python benchmarks traces
  python benchmarks traces --json traces.json
  python benchmarks traces --before traces.json --docs docs/gpu.md --check
"""

import argparse
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.cli import harness, terminal
from commpress.cli.option_groups import option
from commpress.cli.ranks import LocalRanks
from commpress.cli.ranks import Report as Told
from commpress.codecs import policy_of
from commpress.collectives import frame
from commpress.collectives.allreduce import settle
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.exchange import Exchanges
from commpress.collectives.transports.loopback import simulate
from commpress.errors import InvalidArgument
from commpress.tiered_mem import Options
from gpu.card_twin import CARD, CardGroup, CardTwin, card_twin
from shared_options import add_output

RANKS, LAYERS, WIDTH, NUMEL = 4, 4, 64, 65_576
OPENS, CLOSES = "<!-- python benchmarks traces enters its table below -->", "<!-- end of it -->"
SMALL = Options(
    chunk_bytes=64 << 10, pack_below=8 << 10, pack_bytes=32 << 10, segment_bytes=4 << 20
)
Row = dict[str, Any]
COLUMNS = {
    "waits, caller": "waits of the caller",
    "waits, threads": "waits of the worker",
    "launches": "launches",
    "copies": "copies",
    "KiB pageable": "bytes by pageable memory",
    "KiB pinned": "bytes by pinned memory",
}
OFF = "% of bytes off 16"


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--before FILE", says="of --json of another checkout, shown in front")
    option(parser, "--docs PAGE", says="enter the table into this page")
    add_output(parser, check="nothing crosses by pageable memory and all rows are aligned")


def run(options: argparse.Namespace) -> int:
    rows = [*buckets(), *layers_of_fsdp(), *offloaded(), *streamed()]
    before = {}
    if options.before:
        kept = json.loads(Path(options.before).read_text())["rows"]
        before = {row["what"]: row for row in kept}
    shown = [beside(row, before.get(row["what"])) for row in rows]
    print(terminal.table(shown))
    if options.docs:
        enter(Path(options.docs), shown)
    return harness.deliver(options, rows, judge=judge)


def judge(rows: list[Row]) -> list[tuple[str, bool]]:
    pageable = sum(row["KiB pageable"] or 0 for row in rows)
    off = max(row[OFF] or 0 for row in rows)
    return [
        (f"{pageable:g} KiB by pageable memory", pageable == 0),
        (f"{off:g} % of bytes in rows off 16", off == 0),
    ]


def beside(row: Row, before: Row | None) -> Row:
    """The counts as text, those of another checkout in front of them where they differ."""

    def cell(key: str) -> str:
        now = "" if row[key] is None else f"{row[key]:g}"
        then = now if before is None or before.get(key) is None else f"{before[key]:g}"
        return now if then == now else f"{then} → {now}"

    return {"what": row["what"]} | {key: cell(key) for key in (*COLUMNS, OFF)}


def enter(page: Path, rows: list[Row]) -> None:
    text = page.read_text()
    first, opens, rest = text.partition(OPENS)
    _, closes, last = rest.partition(CLOSES)
    if not opens or not closes:
        raise InvalidArgument(f"{page} has no lines {OPENS!r} and {CLOSES!r}: the table goes there")
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *(list(row.values()) for row in rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    page.write_text(f"{first}{opens}\n\n{table}\n\n{closes}{last}")


def counted(what: str, counts: Counter[str], share: int) -> Row:
    """A row with the counts of each of ``share`` buckets, layers or steps."""
    found: Row = {"what": what}
    for key, name in COLUMNS.items():
        found[key] = counts[name] / share / (1024 if key.startswith("KiB") else 1)
    rows = counts["bytes of rows"]
    found[OFF] = round(100 * counts["bytes of rows off 16"] / rows, 1) if rows else None
    return found


# ---------------------------------------------------------------- a hook's bucket


def buckets() -> Iterator[Row]:
    for codec in ("sign", "int8", "none"):
        with card_twin() as twin:
            channels = [Channel(transport) for transport in CardGroup(RANKS).transports()]
            exchanges = [
                Exchanges(policy_of(codec, min_numel=0), RANKS, channel.workspace)
                for channel in channels
            ]
            for step in range(2):
                given = [torch.ones(NUMEL).to(CARD) for _ in channels]
                twin.counts.clear()
                reduce(exchanges, channels, given, step)
            what = f"a bucket of {NUMEL} elements, {codec}, {RANKS} ranks of NCCL"
            yield counted(what, twin.counts, RANKS)


def reduce(
    exchanges: list[Exchanges], channels: list[Channel], given: list[torch.Tensor], step: int
) -> None:
    parts = zip(exchanges, channels, given, strict=True)
    steps = [
        exchange.of(("w",), lambda: ([Span("w", 0, NUMEL)], [(NUMEL,)]), CARD).steps(
            channel, buffer, channel.call(8, step)
        )
        for exchange, channel, buffer in parts
    ]
    for outcomes in simulate(steps):
        settle(outcomes, taken=True)


# ---------------------------------------------------------------- FSDP2


def layers_of_fsdp() -> list[Row]:
    with LocalRanks(2) as pool:
        return list(pool.call(_layers, None, lambda *_: None))


def _layers(rank: int, size: int, _: None, told: Told) -> list[Row]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    commpress.compress_fsdp(model, "int8", "int8", min_numel=0)
    counts, caller = Counter[str](), threading.current_thread()

    def wait_for(*_: object) -> None:
        """Count: here the host would wait for a card."""
        mine = threading.current_thread() is caller
        counts[f"waits of the {'caller' if mine else 'worker'}"] += 1

    rows = []
    with mock.patch.object(frame, "wait_for", wait_for):
        for _step in range(2):
            counts.clear()
            loss = model(torch.ones(8, WIDTH)).sum()
            forward = Counter(counts)
            counts.clear()
            loss.backward()
            rows = [
                counted("a layer of FSDP2 in forward, int8 both ways", forward, LAYERS),
                counted("a layer of FSDP2 in backward", counts, LAYERS),
            ]
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(1.0)
            model.zero_grad()
    dist.barrier()
    unknown = dict.fromkeys([*list(COLUMNS)[2:], OFF])
    return [row | unknown for row in rows]


# ---------------------------------------------------------------- memory beyond the card


@contextmanager
def opened() -> Iterator[tuple[CardTwin, commpress.TieredStore, nn.Module]]:
    """A card, a store beside it, and a model on it."""
    with (
        card_twin() as twin,
        tempfile.TemporaryDirectory(prefix="commpress-traces-") as folder,
        commpress.TieredStore.open(
            folder, host="8MiB", device="1MiB", options=SMALL, engine="threads"
        ) as store,
    ):
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        for layer in layers:
            layer.weight = nn.Parameter(layer.weight.detach().to(CARD))
        yield twin, store, nn.Sequential(*layers)


def trained(
    twin: CardTwin, store: commpress.TieredStore, model: nn.Module, **more: Any
) -> list[Counter[str]]:
    """Counts of forward, backward and ``step`` in the third step."""
    given: dict[str, Any] = {"store": store, "chunk_mb": 0.02, "lr": 1e-3, "fused": True, **more}
    optimizer = commpress.Offloaded(model.parameters(), torch.optim.AdamW, **given)
    x, counts = torch.ones(8, WIDTH).to(CARD), list[Counter[str]]()

    def part(call: Callable[[], Any]) -> Any:
        twin.counts.clear()
        result = call()
        counts.append(Counter(twin.counts))
        return result

    for _ in range(3):
        counts.clear()
        loss = part(lambda: model(x).square().mean())
        part(loss.backward)
        part(optimizer.step)
        optimizer.zero_grad()
    optimizer.close()
    return counts


def offloaded() -> Iterator[Row]:
    with opened() as (twin, store, model):
        *_, step = trained(twin, store, model)
    yield counted("a chunk in the step of Offloaded", step, LAYERS)


def streamed() -> Iterator[Row]:
    for gradients in ("step", "backward"):
        with opened() as (twin, store, model):
            commpress.stream(model, store=store, blocks=[nn.Linear], chunk_mb=0.02)
            more = {"gradients": gradients} if gradients == "backward" else {}
            forward, backward, step = trained(twin, store, model, **more)
        if gradients == "step":
            yield counted("a block of a streamed model in forward", forward, LAYERS)
            yield counted("in backward", backward, LAYERS)
            yield counted("in its update", step, LAYERS)
        else:
            yield counted("in backward with its update", backward + step, LAYERS)
