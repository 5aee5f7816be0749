"""the tiered store's reads and writes beside fio's

All take turns over the same bytes, as commpress bench io measures them, checksums on; medians.
  store     GB/s of the store: write flushes tensors that are newer in memory, read prefetches
            tensors that are on disk
  min-max   the slowest and the fastest round
  fio       the best of its engines io_uring, libaio and psync at the same depth, and which it was
  of fio    the store's share of that

  python benchmarks store_io --engine io_uring --check
  python benchmarks store_io --directory /nvme/tmp --size 2GiB --chunks 4MiB,16MiB
"""

import argparse
import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from commpress.cli import bench_io, harness, refusals, terminal
from commpress.cli.option_groups import declare
from commpress.errors import CommpressError, InvalidArgument
from commpress.tiered_mem import parse_bytes
from shared_options import add_output

ENOUGH = 0.95  # of fio
ENGINES = ("io_uring", "libaio", "psync")


@dataclass
class BesideFio(bench_io.ChunkRates):
    fio: float = 0.0  # bytes per second of its fastest engine
    fio_engine: str = ""

    @property
    def of_fio(self) -> float:
        return self.store / self.fio


def options(parser: argparse.ArgumentParser) -> None:
    declare(parser, "@io")
    add_output(parser, check="the store reaches 95 % of fio")


def run(options: argparse.Namespace) -> int:
    refusals.bench_io(options)
    if shutil.which("fio") is None:
        raise InvalidArgument("store_io compares with fio: apt-get install fio")
    rows: list[BesideFio] = []
    with bench_io.begun(options) as (folder, engine, _):
        table = terminal.Table(cells)
        for chunk, figures in bench_io.measured(options, folder, engine, partial(calls, options)):
            for verb in ("write", "read"):
                best = max((median(figures[f"{name} {verb}"]), name) for name in ENGINES)
                if not best[0]:
                    raise CommpressError(f"fio has none of the engines {', '.join(ENGINES)} here")
                rows.append(BesideFio(chunk, verb, *bench_io.spread(figures, verb), *best))
                table(rows[-1])
    return harness.deliver(options, rows, judge=judge, engine=engine)


def cells(row: BesideFio) -> dict[str, str]:
    beside = {"fio": bench_io.gb(row.fio), "its engine": row.fio_engine}
    return {**bench_io.cells(row), **beside, "of fio": f"{100 * row.of_fio:.0f}%"}


def judge(rows: list[BesideFio]) -> list[tuple[str, bool]]:
    return [
        (
            f"{row.verb} at {row.chunk >> 20} MiB is {100 * row.of_fio:.0f} % of fio, 95 % "
            "expected",
            row.of_fio >= ENOUGH,
        )
        for row in rows
    ]


def calls(options: argparse.Namespace, folder: Path, chunk: int, direct: bool) -> bench_io.Calls:
    """One pass of each engine and direction, over a file of fio's own beside the store's."""
    return {
        f"{engine} {verb}": partial(one_pass, options, folder / "fio", chunk, direct, engine, verb)
        for engine in ENGINES
        for verb in ("write", "read")
    }


def one_pass(
    options: argparse.Namespace, file: Path, chunk: int, direct: bool, engine: str, verb: str
) -> float:
    """Bytes per second; psync gets ``depth`` threads instead of a queue.

    fio rounds its time up to whole milliseconds, half a millisecond too long on average, of the 30
    that 512 MiB take on a fast device: that half is taken off.
    """
    jobs, queue = (options.depth, 1) if engine == "psync" else (1, options.depth)
    part = parse_bytes(options.size) // jobs
    command = f"""
        fio --name=b --rw={verb} --bs={chunk} --size={part} --offset_increment={part}
        --ioengine={engine} --iodepth={queue} --numjobs={jobs} --direct={int(direct)}
        --thread --fallocate=none --group_reporting --output-format=json
    """.split()
    ran = subprocess.run([*command, f"--filename={file}"], capture_output=True, text=True)
    if ran.returncode:
        return 0.0
    found = json.loads(ran.stdout[ran.stdout.index("{") :])["jobs"][0][verb]
    return float(found["io_bytes"] / max(found["runtime"] - 0.5, 0.5) * 1e3)
