"""The ranks that a demo or benchmark runs on: those a launcher started, or local processes of our
own."""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from commpress.cli.hosts import Hosts
from commpress.cli.refusals import launched
from commpress.errors import CommpressError, InvalidArgument
from commpress.integrations.trainers.launch import init_process_group

Report = Callable[..., None]


def on_ranks(function: Callable[..., Any], options: argparse.Namespace, report: Report) -> Any:
    """``function(rank, size, options, report)`` on every rank; the result of rank 0, and None on a
    launcher's others.

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
        result = function(rank, size, options, report if rank == 0 else lambda *_: None)
        dist.barrier()  # nobody closes a connection that another still waits on
        return result if rank == 0 else None
    finally:
        dist.destroy_process_group()


def check_size(size: int) -> None:
    if size < 2:
        raise InvalidArgument(
            f"got {size} rank, expected at least 2: there is nothing to reduce among fewer"
        )


class LocalRanks:
    """Processes on this machine, one rank each, over Gloo on the loopback interface; used for
    several calls.

    ``forked`` from this process, which must have no threads and no CUDA yet, they need not import
    anything anew. With ``hosts`` each rank is on a host of its own.
    """

    def __init__(
        self, size: int, *, threads: int = 1, forked: bool = False, hosts: Hosts | None = None
    ) -> None:
        check_size(size)
        self._folder = tempfile.TemporaryDirectory(prefix="commpress-")
        rendezvous = f"file://{Path(self._folder.name) / 'rendezvous'}"
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        if not forked:
            resource_tracker.ensure_running()  # here, on no host that may be gone before it
        for rank in range(size):
            ours, theirs = context.Pipe()
            job = (rank, size, threads, rendezvous, hosts is None, theirs)
            context.set_executable(sys.executable if hosts is None else hosts.python(rank))
            process = context.Process(target=_serve, args=job, daemon=True)
            with _undisturbed():
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        context.set_executable(sys.executable)

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
            pipe.close()
        self._folder.cleanup()

    def call(
        self,
        function: Callable[..., Any],
        settings: Any,
        report: Report,
        *,
        answer: Callable[..., Any] | None = None,
    ) -> Any:
        """``function(rank, size, settings, report)`` on every rank; the result of rank 0.

        With ``answer`` any rank's call of ``report`` returns what ``answer(rank, ...)`` does in
        this process.
        """
        for pipe in self._pipes:
            # a rank that has ended: its exit code is told below
            with contextlib.suppress(BrokenPipeError):
                pipe.send((function, settings))
        if answer is None:

            def answer(rank: int, *values: Any) -> None:
                if rank == 0:
                    report(*values)

        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            for ready in wait(
                [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            ):
                rank = self._pipes.index(ready)  # type: ignore[arg-type]
                try:
                    what, value = self._pipes[rank].recv()
                except EOFError:
                    self._processes[rank].join()
                    sys.exit(
                        f"commpress: rank {rank} ended with exit code "
                        f"{self._processes[rank].exitcode}"
                    )
                if what == "refused":
                    raise CommpressError(f"rank {rank}: {value}")
                if what == "error":
                    sys.exit(f"commpress: rank {rank} failed\n{value}")
                if what == "ask":
                    self._pipes[rank].send(answer(rank, *value))
                else:
                    results[rank] = value
        return results[0]


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Processes that are started inside never see Ctrl-C: they inherit that it is blocked. Who
    started them ends them, once they are started: a Ctrl-C that another thread takes meanwhile
    interrupts the end of this context."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    came: list[int] = []
    here = threading.current_thread() is threading.main_thread()
    handler = here and signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if here:
            signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


def _serve(
    rank: int, size: int, threads: int, rendezvous: str, local: bool, pipe: Connection
) -> None:
    """Do the jobs that come."""
    if local and sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(threads)

    def ask(*values: object) -> Any:
        pipe.send(("ask", values))
        return pipe.recv()

    try:
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size)
        while (job := pipe.recv()) is not None:
            function, settings = job
            result = function(rank, size, settings, ask)
            dist.barrier()
            pipe.send(("result", result if rank == 0 else None))
        dist.destroy_process_group()
    except (EOFError, KeyboardInterrupt):  # whoever started us is gone or is ending us
        return
    except CommpressError as error:
        pipe.send(("refused", str(error)))
    except Exception:
        pipe.send(("error", traceback.format_exc()))
