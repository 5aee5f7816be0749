"""The ranks that a demo or benchmark runs on: those a launcher started, or local processes of our own."""

import argparse
import contextlib
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commpress.errors import InvalidArgument
from commpress.integrations.trainers.launch import init_process_group, place

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
Report = Callable[..., None]


def launched() -> bool:
    """True if torchrun, mpirun or srun started this process as one of several."""
    there = [name for name in _TORCHRUN if name in os.environ]
    missing = [name for name in _TORCHRUN if name not in os.environ]
    if missing and ("RANK" in there or "WORLD_SIZE" in there):
        raise InvalidArgument(
            f"{', '.join(there)} set but {', '.join(missing)} not: a launcher sets all four, unset them for local ranks"
        )
    where = place()
    return where is not None and (where.launcher == "torchrun" or where.size > 1)


def add_options(parser: argparse.ArgumentParser, *, ranks: int = 4) -> None:
    says = f"local processes (default {ranks}); a launcher's own number wins"
    parser.add_argument("--ranks", type=int, default=ranks, metavar="N", help=says)
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each rank (default 1)")


def on_ranks(function: Callable[..., Any], options: argparse.Namespace, report: Report) -> Any:
    """``function(rank, size, options, report)`` on every rank; the result of rank 0, and None on a launcher's others.

    ``report`` is called in this process with what rank 0 reports; on other ranks it does nothing.
    """
    if not launched():
        with LocalRanks(options.ranks, threads=options.threads) as pool:
            return pool.call(function, options, report)
    torch.set_num_threads(options.threads)
    init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        check_size(size)
        result = function(rank, size, options, report if rank == 0 else _silent)
        dist.barrier()  # nobody closes a connection that another still waits on
        return result if rank == 0 else None
    finally:
        dist.destroy_process_group()


def _silent(*values: object) -> None:
    """The report of ranks that nobody listens to."""


def check_size(size: int) -> None:
    if size < 2:
        raise InvalidArgument(f"got {size} rank, expected at least 2: there is nothing to reduce among fewer")


class LocalRanks:
    """Processes on this machine, one rank each, over Gloo on the loopback interface; used for several calls."""

    def __init__(self, size: int, *, threads: int = 1) -> None:
        check_size(size)
        self._folder = tempfile.TemporaryDirectory(prefix="commpress-")
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, threads, rendezvous, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "LocalRanks":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if kind is None:
                with contextlib.suppress(OSError):  # it has left already
                    pipe.send(None)
                process.join(30)
            process.terminate()
            process.join()
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], settings: Any, report: Report) -> Any:
        """``function(rank, size, settings, report)`` on every rank; the result of rank 0."""
        for pipe in self._pipes:
            pipe.send((function, settings))
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            for ready in wait([pipe for rank, pipe in enumerate(self._pipes) if rank not in results]):
                rank = self._pipes.index(ready)  # type: ignore[arg-type]
                try:
                    what, value = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join()
                    sys.exit(f"commpress: rank {rank} ended with exit code {self._processes[rank].exitcode}")
                if what == "error":
                    sys.exit(f"commpress: rank {rank} failed\n{value}")
                if what == "report":
                    report(*value)
                else:
                    results[rank] = value
        return results[0]


def _serve(rank: int, size: int, threads: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(threads)
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
        while (job := pipe.recv()) is not None:
            function, settings = job
            report: Report = (lambda *values: pipe.send(("report", values))) if rank == 0 else _silent
            result = function(rank, size, settings, report)
            dist.barrier()
            pipe.send(("result", result if rank == 0 else None))
        dist.destroy_process_group()
    except (EOFError, KeyboardInterrupt):  # whoever started us is gone or is ending us
        return
    except Exception:
        pipe.send(("error", traceback.format_exc()))
