"""Campaign against ranks that train: killed at some byte that they send, alone or two at once, as
they join or give."""

import faulthandler
import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import policy_of
from commpress.integrations.elastic import loop, snapshots
from commpress.integrations.process_group.group_options import GroupOptions
from history import History, Verdict

RANKS, WIDTH, BATCH = 4, 256, 8
STEPS = 1 << 30  # without end
CALM = 3  # steps that all commit together before a fault
PATIENCE = 60.0  # seconds until a run hangs
SENT_PER_STEP = 1 << 17  # bytes among which the last one is drawn: some steps' worth
# likewise, of a newcomer since its start, and of a donor since it began to give
JOINING, GIVING = 1 << 16, 1 << 19
Meeting = tuple[int, int, int, int, float]
FAULTS = {"one": 7, "two": 1, "newcomer": 1, "donor": 1}  # how often of ten


@dataclass(frozen=True)
class Kill:
    """One fault and what came of it; seconds.

    - one: a rank is killed, and one that starts anew takes its place; two: two at once.
    - newcomer: the one that takes its place is killed as well, while it joins or soon after.
    - donor: a rank is killed while it gives its state to the newcomer.
    """

    workload: str
    kind: str
    # that the last victim sent after it was told, the last of which is its last; -1: a signal ended
    # it
    bytes: int
    victims: tuple[int, ...]
    survive: float
    back: float


# ---------------------------------------------------------------- what is trained


def _model() -> nn.Sequential:
    with torch.random.fork_rng():  # data are each rank's own
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.Linear(WIDTH, 1),
        )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], float]:
    def step() -> float:
        batch = torch.randn(BATCH, WIDTH)
        loss = (model(batch) - batch.mean(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, for losses that are compared: those of Adam
    depend on its largest gradients, and so on when ranks were killed."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _hook(join: Any, steps: int) -> Any:
    ddp = DistributedDataParallel(_model())
    commpress.compress(ddp, "sign", min_numel=1)
    optimizer = _momentum(ddp)
    return commpress.elastic(
        _step(ddp, optimizer), {"model": ddp, "optimizer": optimizer}, steps=steps, join=join
    )


def _backend(join: Any, steps: int) -> Any:
    ddp = DistributedDataParallel(_model())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    return commpress.elastic(
        _step(ddp, optimizer), {"model": ddp, "optimizer": optimizer}, steps=steps, join=join
    )


def _optimizer(join: Any, steps: int) -> Any:
    model = _model()
    optimizer = commpress.OneBitAdam(model.named_parameters(), lr=1e-3)
    return commpress.elastic(
        _step(model, optimizer), {"model": model, "optimizer": optimizer}, steps=steps, join=join
    )


def _fsdp2(join: Any, steps: int) -> Any:
    def build() -> tuple[Callable[[], float], dict[str, Any]]:
        model = _model()
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        commpress.compress_fsdp(model, "int8", min_numel=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return _step(model, optimizer), {"model": model, "optimizer": optimizer}

    return commpress.elastic(
        build=build, snapshots=commpress.Snapshots("snapshots", every=5), steps=steps, join=join
    )


def _local(join: Any, steps: int) -> Any:
    model = _model()
    inner = _momentum(model)
    optimizer = commpress.LocalUpdates(
        inner, every=4, codec=policy_of("int4", min_numel=1), outer=commpress.Average()
    )
    return commpress.elastic(
        _step(model, optimizer), {"model": model, "optimizer": optimizer}, steps=steps, join=join
    )


WORKLOADS: dict[str, Callable[[Any, int], Any]] = {
    "hook": _hook,
    "backend": _backend,
    "optimizer": _optimizer,
    "fsdp2": _fsdp2,
    "local": _local,
}

# ---------------------------------------------------------------- a rank


def _rank(
    workload: str, folder: str, name: str, join: bool, meeting: Meeting, left: Any, given: Any
) -> None:
    """Train until killed. ``left``: bytes that this process may still send, 0 for any number;
    ``given``: so many once it gives its state to others. ``meeting``: rank, size, seed, steps, and
    the seconds slept after each."""
    rank, size, seed, steps, pause = meeting
    faulthandler.enable(open(f"{folder}/{name}.stacks", "w"))  # noqa: SIM115
    sys.stdout = sys.stderr = open(f"{folder}/{name}.log", "w", buffering=1)  # noqa: SIM115
    os.chdir(folder)
    os.environ |= {
        "COMMPRESS_EVENTS": f"{folder}/{name}.jsonl",
        "COMMPRESS_HASH_EVERY": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    _limit(left)
    _limit_gifts(left, given)
    backend = GroupOptions("sign", min_numel=1, only="gradients") if workload == "backend" else None
    dist.init_process_group(
        "commpress",
        init_method=f"file://{folder}/meet-{name if join else 'first'}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=20),
        pg_options=backend,
    )
    members = dist.FileStore(f"{folder}/members", -1)
    torch.manual_seed(seed)
    if not join:
        dist.group.WORLD.announce(members)  # type: ignore[union-attr]
    run = WORKLOADS[workload](members if join else None, steps)
    with open(f"{folder}/{name}.told", "w", buffering=1) as told:
        for loss in run:
            if join:  # now it is a member
                dist.group.WORLD.announce(members)  # type: ignore[union-attr]
                join = False
            local = run.state.objects["optimizer"]
            digest = [local.exchanged, local.digest()] if workload == "local" else None
            told.write(json.dumps([run.step, loss, digest]) + "\n")
            time.sleep(pause)


def _limit_gifts(left: Any, given: Any) -> None:
    """A process that has been told so may send ``given.value`` more bytes from when it begins to
    give others its state."""

    def limited(call: Any) -> Any:
        def counting(
            *arguments: Any, donors: Sequence[int], needy: Collection[int], **options: Any
        ) -> Any:
            if given.value and needy and dist.get_rank() in donors:
                left.value, given.value = given.value, 0
            return (yield from call(*arguments, donors=donors, needy=needy, **options))

        return counting

    loop.heal, snapshots.share = limited(loop.heal), limited(snapshots.share)


def _limit(left: Any) -> None:
    """Sockets of this process send ``left.value`` more bytes, in the middle of a message if it
    comes so; then it is killed."""
    whole, many = socket.socket.send, socket.socket.sendmsg

    def spend(connection: socket.socket, data: bytes) -> None:
        if left.value <= len(data):
            connection.setblocking(True)
            connection.sendall(data[: left.value])
            os.kill(os.getpid(), signal.SIGKILL)

    def send(connection: socket.socket, data: Any, *more: Any) -> int:
        if left.value:
            spend(connection, bytes(data))
        count = whole(connection, data, *more)
        left.value = max(left.value - count, 0)
        return count

    def sendmsg(connection: socket.socket, buffers: Any, *more: Any) -> int:
        if left.value:
            spend(connection, b"".join(buffers))
        count = many(connection, buffers, *more)
        left.value = max(left.value - count, 0)
        return count

    socket.socket.send, socket.socket.sendmsg = send, sendmsg  # type: ignore[assignment, method-assign]


# ---------------------------------------------------------------- the campaign


class Campaign:
    """Ranks of one workload, of which some are killed and replaced, again and again."""

    def __init__(
        self, workload: str, seed: int, folder: Path, *, steps: int = STEPS, pause: float = 0.0
    ) -> None:
        self.workload, self.seed, self.folder, self.steps, self.pause = (
            workload,
            seed,
            folder,
            steps,
            pause,
        )
        self.draws = random.Random(f"{workload} {seed}")
        self.context = multiprocessing.get_context("fork")
        self.history, self.kills = History(), list[Kill]()
        self.processes: list[Any] = [None] * RANKS
        self.left, self.given = (
            [self.context.Value("q", 0, lock=False) for _ in range(RANKS)] for _ in range(2)
        )
        self.lives = [-1] * RANKS
        folder.mkdir(parents=True)
        for rank in range(RANKS):
            self._start(rank, RANKS)

    def run(
        self,
        faults: int,
        report: Callable[[Kill], None],
        kinds: Collection[str] = tuple(FAULTS),
        *,
        after: int = 0,
    ) -> str:
        """All that happened is in ``kills`` and ``history``; what went wrong, or nothing.
        ``after``: steps before the first."""
        kinds, often = list(kinds), [FAULTS[kind] for kind in kinds]
        try:
            self._until(
                lambda: any(commit.step >= after for commit in self.history.commits),
                f"step {after} is committed",
            )
            for _ in range(faults):
                self._until(self._calm, "all ranks commit steps together")
                self.kills.append(self._fault(*self.draws.choices(kinds, often)))
                report(self.kills[-1])
            self._until(self._calm, "all ranks commit steps together")
            if self.steps != STEPS:
                self._until(
                    lambda: all(process.exitcode == 0 for process in self.processes),
                    "all ranks end",
                )
        except TimeoutError as error:
            return str(error)
        finally:
            for process in self.processes:
                process.kill()
                process.join()
            self.history.read()
        return ""

    def verdict(self) -> Verdict:
        """Figures of all that was committed so far, but for what those alone know of who were
        killed then."""
        self.history.read()
        known, last = (
            History(),
            {(commit.victim, commit.life): commit for commit in self.history.commits},
        )
        ends = {id(commit) for (victim, life), commit in last.items() if life < self.lives[victim]}
        known.commits = [commit for commit in self.history.commits if id(commit) not in ends]
        return Verdict(known, [], RANKS, 0.0, time.monotonic())

    def told(self) -> list[tuple[int, float, tuple[int, str] | None]]:
        """Step, loss, and of local updates the exchange and a hash of the shared weights, as each
        rank told of each step."""
        told: list[tuple[int, float, tuple[int, str] | None]] = []
        for file in self.folder.glob("*.told"):
            lines = [
                json.loads(line) for line in file.read_text().splitlines() if line.endswith("]")
            ]
            rank, life = map(int, file.stem.split("."))
            # it may have been the only one that knew of it
            last = lines[-1][2] if lines and life < self.lives[rank] else None
            told += [
                (step, loss, tuple(digest) if digest and digest != last else None)
                for step, loss, digest in lines
            ]
        return told

    def _start(self, rank: int, size: int, left: int = 0) -> None:
        self.lives[rank] += 1
        self.left[rank].value, self.given[rank].value = left, 0
        name, join = f"{rank}.{self.lives[rank]}", self.lives[rank] > 0
        meeting = (
            0 if join else rank,
            size,
            1000 * self.seed + RANKS * self.lives[rank] + rank,
            self.steps,
            self.pause,
        )
        arguments = (
            self.workload,
            str(self.folder),
            name,
            join,
            meeting,
            self.left[rank],
            self.given[rank],
        )
        self.processes[rank] = self.context.Process(target=_rank, args=arguments, daemon=True)
        self.processes[rank].start()
        self.history.follow(self.folder / f"{name}.jsonl", rank, self.lives[rank])

    # ---------------------------------------------------------------- faults

    def _fault(self, kind: str) -> Kill:
        victims = self.draws.sample(range(RANKS), 2 if kind == "two" else 1)
        for victim in victims:
            self.left[victim].value = self.draws.randint(1, SENT_PER_STEP)
        nbytes = [self._wait_for_the_end(victim) for victim in victims][-1]
        survive = self._survived(victims)
        if kind == "newcomer":
            self._start(victims[0], 1, int(JOINING ** self.draws.random()))
            nbytes = self._wait_for_the_end(victims[0])
            survive = max(survive, self._survived(victims))
        start = time.monotonic()
        for victim in victims:
            self._start(victim, 1)
        if kind == "donor":
            donor = self.draws.choice([rank for rank in range(RANKS) if rank not in victims])
            self.given[donor].value = int(GIVING ** self.draws.random())
            nbytes = self._wait_for_the_end(donor, PATIENCE)
            survive = max(survive, self._survived([*victims, donor]))
            victims.append(donor)
            self._start(donor, 1)
        back = [self._back(victim, start) for victim in victims]
        return Kill(self.workload, kind, nbytes, tuple(victims), survive, max(back))

    def _wait_for_the_end(self, victim: int, seconds: float = 5.0) -> int:
        """Bytes that it had left to send; -1 if it did not send them, and was killed by a signal
        instead."""
        process, nbytes = (
            self.processes[victim],
            self.left[victim].value or self.given[victim].value,
        )
        process.join(seconds)
        if process.is_alive():  # what it sends does not pass through Python
            nbytes = -1
            process.kill()
            process.join()
        self.left[victim].value = -1  # its end is no surprise
        return int(nbytes)

    def _survived(self, victims: Collection[int]) -> float:
        """Seconds until all others have committed a step."""
        begin = time.monotonic()
        others = [rank for rank in range(RANKS) if rank not in victims]
        self._until(
            lambda: all(self._first(rank, begin) for rank in others),
            f"survivors go on without ranks {victims}",
        )
        return max(self._first(rank, begin) for rank in others) - begin

    def _back(self, victim: int, start: float) -> float:
        self._until(lambda: bool(self._first(victim, start)), f"rank {victim} is healed")
        return self._first(victim, start) - start

    def _first(self, rank: int, after: float) -> float:
        """The clock of the first step that the rank committed after one; 0 if there is none."""
        return next(
            (c.clock for c in self.history.commits if c.victim == rank and c.clock > after), 0.0
        )

    def _calm(self) -> bool:
        """Every process has committed the same few steps, the last of all."""
        last: dict[int, list[int]] = {rank: [] for rank in range(RANKS)}
        for commit in self.history.commits:
            if commit.life == self.lives[commit.victim]:
                last[commit.victim].append(commit.step)
        return all(len(steps) >= CALM for steps in last.values())

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            self.history.read()
            for rank, process in enumerate(self.processes):
                if not process.is_alive() and process.exitcode and self.left[rank].value == 0:
                    raise TimeoutError(
                        f"rank {rank} ended with status {process.exitcode}: {self._said(rank)}"
                    )
            if time.monotonic() > end:
                raise TimeoutError(f"not within {PATIENCE:g} s: {what}")
            time.sleep(0.01)

    def _said(self, rank: int) -> str:
        log = self.folder / f"{rank}.{self.lives[rank]}.log"
        lines = log.read_text().strip().splitlines() if log.exists() else []
        return lines[-1][:400] if lines else "nothing"
