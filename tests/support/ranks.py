"""Rank processes that tests run functions on.

Starting a process with torch costs seconds, joining a process group milliseconds: the processes
stay, and every call gets a process group of its own, over a file in a temporary directory and never
a port.
"""

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from commpress.errors import InvalidArgument

CACHES = {
    "debug:": "_clear_sharding_prop_cache",
    "_redistribute:": "clear_redistribute_planner_cache",
    "_redistribute:_gen_transform_infos": "cache_clear",
    "_collective_utils:MeshTopoInfo.build_from_mesh": "cache_clear",
}
# until a rank that has not answered counts as silent: a loaded machine with two cores needs many
SECONDS = 120
GROUP = timedelta(seconds=60)
QUIET = 16  # threads of a rank that keeps none of a group
# threads of a rank: what a test does not end keeps some, and those of a Gloo group wake every 10 ms
CROWD = 30
LOADED = [  # what most ranks use: each that imports it anew takes seconds
    "ranks",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.debug",
    "torch._dynamo",
    "commpress.backend",
    "commpress.integrations.ddp",
    "commpress.integrations.fsdp",
    "commpress.integrations.zero",
    "torch.distributed.pipelining",
    "transformers.trainer",
]
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(LOADED)
OTHER = forkserver.ForkServer()
OTHER.set_forkserver_preload(LOADED)


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """The error that a call raises, for a rank to return."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def refused(calls: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The message with which each call is refused."""
    said = {}
    for name, call in calls.items():
        with pytest.raises(InvalidArgument) as refusal:
            call()
        said[name] = str(refusal.value)
    return said


def nonsense(*options: dict[str, Any]) -> Callable[..., Any]:
    """A test with each of these ``options``, on one rank and on two: its first key is what a
    refusal names."""
    sizes = pytest.mark.parametrize("size", [1, 2])
    return lambda test: sizes(pytest.mark.parametrize("options", options, ids=str)(test))


class SilentRank(AssertionError):
    """A rank did not answer in time, or its process ended."""


class Ranks:
    """``size`` processes; a call uses the first so many of them.

    Forked from a process that has torch loaded they start in no time. Such ranks hash strings
    alike, so that none of them finds out that the order of a set differs from rank to rank: rank 0
    comes from a process that hashes them otherwise.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._calls = 0
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []

    def run(
        self, function: Callable[..., Any], *args: Any, size: int = 2, seconds: float = SECONDS
    ) -> list[Any]:
        """``function(*args)`` on ranks 0 … size − 1 of a new default group; the results of all, or
        the first error."""
        outcomes = self.outcomes(function, *args, size=size, seconds=seconds)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int = 2,
        seconds: float = SECONDS,
        lost: Collection[int] = (),
    ) -> list[Any]:
        """As ``run``, with the exception in place of the result where a rank raised, its traceback
        as a note.

        Ranks in ``lost`` are expected to die or stop: nobody waits for them, and their place holds
        None.
        """
        self._start()
        self._calls += 1
        file = Path(self._folder.name, f"rendezvous-{self._calls}")
        for rank in range(size):
            self._pipes[rank].send((function, args, rank, size, str(file)))
        outcomes = self._collect(
            [r for r in range(size) if r not in lost], time.monotonic() + seconds, seconds
        )
        return [outcomes.get(rank) for rank in range(size)]

    def close(self) -> None:
        """End the processes without asking them: a process group they may be stuck in would not let
        them go."""
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        if any(_threads(process.pid) > CROWD for process in self._processes):
            self.close()
        if self._processes:
            return
        for server in (forkserver, OTHER):  # they import side by side
            server.ensure_running()
        for rank in range(self._size):
            ours, theirs = FORKS.Pipe()
            process: Any = FORKS.Process(
                target=_serve, args=(theirs, str(self._stack(rank))), daemon=True
            )
            with contextlib.nullcontext() if rank else _hashing_otherwise():
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, wanted: Sequence[int], deadline: float, seconds: float) -> dict[int, Any]:
        outcomes: dict[int, Any] = {}
        waiting = {self._pipes[rank]: rank for rank in wanted}
        while waiting:
            ready = connection.wait(list(waiting), max(deadline - time.monotonic(), 0))
            if not ready:
                self._fail([*waiting.values()], f"silent for {seconds:g} s", outcomes)
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join(10)
                    self._fail(
                        [rank], f"ended with exit code {self._processes[rank].exitcode}", outcomes
                    )
        return outcomes

    def _fail(self, ranks: Sequence[int], what: str, outcomes: dict[int, Any]) -> None:
        """Name the ranks, say where they are and which others had an error; the processes are of no
        further use."""
        for rank in ranks:
            if self._processes[rank].is_alive():
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = "".join(
            f"\nrank {r} is at\n{self._stack(r).read_text()}"
            for r in ranks
            if self._stack(r).exists()
        )
        errors = "".join(
            f"\nrank {r} raised {e!r} {' '.join(e.__notes__)}"
            for r, e in outcomes.items()
            if isinstance(e, BaseException)
        )
        self.close()
        raise SilentRank(f"rank {', '.join(map(str, ranks))}: {what}{stacks}{errors}")

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name, f"stack-{rank}")


def _threads(pid: int) -> int:
    """Threads of a process; none where nobody can tell."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _hashing_otherwise() -> Iterator[None]:
    """Processes that start in here are forked from a server that hashes strings in its own way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "connect_to_new_process", OTHER.connect_to_new_process)
        patch.setattr(forkserver, "get_inherited_fds", OTHER.get_inherited_fds)
        yield


def _serve(pipe: connection.Connection, stack: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # of what there is now, nothing becomes garbage: a collection takes milliseconds
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(stack, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        while True:
            try:
                _answer(pipe, _call(*pipe.recv()))
            except (EOFError, BrokenPipeError, KeyboardInterrupt):  # the tests are over
                return


def _answer(pipe: connection.Connection, outcome: Any) -> None:
    try:
        pipe.send(outcome)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        pipe.send(error)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, file: str
) -> Any:
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=GROUP
        )
        # a function that fails at once must not take its connections from a rank that is still
        # making them
        dist.barrier()
        return function(*args)
    except Exception as error:
        error.add_note(f"on rank {rank} of {size}:\n{''.join(traceback.format_exception(error))}")
        _let_go(error)
        return error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch counts a default group that could not be made, too
        dist.distributed_c10d._world.group_count = 0
        _forget_meshes()
        if _threads(os.getpid()) > QUIET:
            # groups that a forgotten cycle holds, and their threads; it costs more than most calls
            gc.collect()


def _forget_meshes() -> None:
    """DTensor's caches hold meshes, which equal those of later calls, and these hold groups that
    are gone."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    for place, clear in CACHES.items():
        module, _, name = place.partition(":")
        with contextlib.suppress(AttributeError, ImportError):  # another torch has other caches
            attrgetter(f"{name}.{clear}".strip("."))(
                importlib.import_module(f"torch.distributed.tensor.{module}")
            )()


def _let_go(error: BaseException | None) -> None:
    """Of what its frames hold, while the group is still there: the end of a DDP model that outlives
    its group may hang."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def meet(place: str, count: int) -> None:
    """Wait, inside a rank, until ``count`` ranks are here. Not over connections, which may be
    broken by now."""
    store = dist.distributed_c10d._get_default_store()
    store.add(place, 1)
    while store.add(place, 0) < count:
        time.sleep(0.005)
