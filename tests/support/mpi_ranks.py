"""Rank processes under mpirun that tests run functions on; as ``ranks`` has them over Gloo.

Run by mpirun, this file is one rank: it connects to the tests over a socket in the file system and
does what it is told.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import sources

SECONDS = 120
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def mpirun() -> str | None:
    """The one beside this Python, as wheels install it, else the machine's."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def command(size: int, *rest: str, options: Collection[str] = ()) -> list[str]:
    return [mpirun() or "mpirun", *options, "-n", str(size), sys.executable, *rest]


def environment(**more: str) -> dict[str, str]:
    """Ours, with no trace of another launcher."""
    ours = {
        k: v
        for k, v in os.environ.items()
        if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return ours | ENVIRONMENT | more


class MpiRanks:
    """``size`` processes of one MPI job; a call uses the first so many of them."""

    def __init__(self, size: int, *, options: Collection[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mpi-")
        self._size, self._options, self._key = (
            size,
            options,
            bytes(multiprocessing.current_process().authkey),
        )
        self._job: subprocess.Popen[str] | None = None
        self._pipes: dict[int, Connection] = {}
        self._output = Path(self._folder.name, "output")

    def run(
        self, function: Callable[..., Any], *args: Any, size: int = 2, lost: Collection[int] = ()
    ) -> list[Any]:
        """``function(comm, *args)`` on the first ``size`` ranks, ``comm`` theirs; all results, or
        the first error."""
        self._start()
        for rank in range(self._size):
            self._pipes[rank].send((function, args, size))
        waiting = {self._pipes[r]: r for r in range(self._size) if r not in lost}
        outcomes: dict[int, Any] = {}
        deadline = time.monotonic() + SECONDS
        while waiting:
            ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
            assert ready, f"MPI ranks {[*waiting.values()]} are silent\n{self._output.read_text()}"
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise AssertionError(
                        f"MPI rank {rank} ended\n{self._output.read_text()}"
                    ) from None
        for outcome in outcomes.values():
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcomes.get(rank) for rank in range(size)]

    def close(self) -> int | None:
        """The exit status of mpirun, if it was started."""
        for pipe in self._pipes.values():
            pipe.close()
        if self._job is not None:
            try:
                self._job.wait(30)
            except subprocess.TimeoutExpired:
                self._job.terminate()
                self._job.wait(30)
        self._folder.cleanup()
        return None if self._job is None else self._job.returncode

    def _start(self) -> None:
        if self._job is not None:
            return
        address = str(Path(self._folder.name, "socket"))
        with Listener(address, "AF_UNIX", backlog=self._size, authkey=self._key) as listener:
            with self._output.open("w") as output:
                self._job = subprocess.Popen(
                    command(self._size, __file__, address, options=self._options),
                    env=environment(MPI_RANKS_KEY=self._key.hex()),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            for _ in range(self._size):
                pipe = listener.accept()
                self._pipes[pipe.recv()] = pipe


def serve(address: str, key: bytes) -> None:
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    multiprocessing.current_process().authkey = key  # tensors that are sent are fetched from here
    world = MPI.COMM_WORLD
    with Client(address, "AF_UNIX", authkey=key) as pipe:
        pipe.send(world.rank)
        while True:
            try:
                function, args, size = pipe.recv()
            except EOFError:
                return
            comm = world.Split(0 if world.rank < size else MPI.UNDEFINED)
            try:
                outcome = function(comm, *args) if comm != MPI.COMM_NULL else None
            except Exception as error:
                error.add_note(
                    f"on MPI rank {world.rank}:\n{''.join(traceback.format_exception(error))}"
                )
                outcome = error
            pipe.send(outcome)


if __name__ == "__main__":
    sys.path += map(str, (*sources.ROOMS, sources.ROOT / "benchmarks"))
    serve(sys.argv[1], bytes.fromhex(os.environ["MPI_RANKS_KEY"]))
