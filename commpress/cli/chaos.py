"""Faults made in the ranks of a training command by a schedule: what they cost and what was
lost."""

import argparse
import heapq
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from commpress.cli import harness
from commpress.cli.fault_schedule import LAUNCHER, Fault
from commpress.cli.history import History, Hit, Verdict
from commpress.cli.hosts import Hosts
from commpress.cli.refusals import faults_of
from commpress.cli.victims import Ended, LauncherStore, Victim, free_port, none_left
from commpress.collectives.transports.run_key import VARIABLE, new_run_key, run_key

SOAK = (sys.executable, "-m", "commpress.cli.soak")
TICK = 0.02  # seconds between two looks at the processes
RUNS, RESTS = 1, 4  # ticks of a slowed process
ENDING = 10.0  # seconds between SIGTERM and SIGKILL
SETTLE = 5  # steps that all commit together before the run is over


def run(options: argparse.Namespace) -> int:
    """Exit status 0: nothing hung, was lost, committed twice or unequal; 1: something was, or a bar
    does not hold."""
    faults = faults_of(options)
    try:
        with ExitStack() as stack:
            stack.enter_context(none_left())
            folder = Path(
                options.logs
                or stack.enter_context(tempfile.TemporaryDirectory(prefix="commpress-chaos-"))
            )
            folder.mkdir(parents=True, exist_ok=True)
            hosts = None
            if options.hosts:
                hosts = stack.enter_context(
                    Hosts(options.ranks + 1, rate=options.rate, delay=options.delay, name="rank")
                )
            chaos = Chaos(options, faults, folder, hosts)
            with harness.ProgressBar("chaos", lines=10) as progress:
                chaos.run(progress)
            return _report(options, chaos)
    except Ended as asked:
        print(f"commpress: chaos ended by {signal.Signals(asked.number).name}", file=sys.stderr)
        return 128 + asked.number


class Chaos:
    """A run: processes, what was done to them, and what they have written."""

    def __init__(
        self, options: argparse.Namespace, faults: list[Fault], folder: Path, hosts: Hosts | None
    ) -> None:
        self.options, self.faults, self.hosts = options, faults, hosts
        command = options.command or [*SOAK, "--step-seconds", str(options.step_seconds)]
        self.victims = [Victim(i, command, folder, hosts) for i in range(options.ranks)]
        self.store = LauncherStore(hosts)
        # the store is open to whoever reaches its port
        self.key = {} if run_key() else {VARIABLE: new_run_key()}
        self.history, self.hits = History(), list[Hit]()
        self.made: list[str] = []  # faults that were made, and what ended by itself
        self.ends: list[str] = []
        # clock: all train; faults may come from now on; no more of them
        self.start = self.begin = self.end = 0.0
        self.hung = ""
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._slowed: dict[int, float] = {}  # victim → until
        self._away: set[int] = set()  # started again, and nothing committed since
        self._pending: set[int] = set()  # ended, to be started again

    # ---------------------------------------------------------------- the run

    def run(self, progress: harness.ProgressBar) -> None:
        for victim in self.victims:
            victim.start(self._environment(victim.number))
            self.history.follow(victim.events, victim.number, victim.life)
        if not self._all_train():
            return
        self.start = start = time.monotonic()
        calm = min(
            self.options.calm, *(fault.at for fault in self.faults[:1]), self.options.seconds
        )
        self.begin, last = start + calm, start + self.options.seconds
        waiting = [replace(fault, at=start + fault.at) for fault in self.faults]
        now = time.monotonic()
        while now < last and not self._over():
            while waiting and waiting[0].at <= now and self._may(waiting[0]):
                self._make(waiting.pop(0), now - start)
            self._tick(now)
            if self.hung:
                break
            steps = max((commit.step for commit in self.history.commits), default=0)
            alive = sum(victim.alive for victim in self.victims)
            progress(
                (now - start) / self.options.seconds,
                f"step {steps}, {alive} of {len(self.victims)} alive",
            )
            time.sleep(TICK)
            now = time.monotonic()
        self.end = now
        if not self.hung and not self._over():
            self._settle()
        self._finish()

    def _all_train(self) -> bool:
        """True as soon as all ranks have committed a step, False if that does not come to pass."""
        began = time.monotonic()
        while True:
            self.history.read()
            if {commit.victim for commit in self.history.commits} == set(range(len(self.victims))):
                return True
            for victim in self.victims:
                if not victim.alive:
                    self.hung = (
                        f"rank {victim.number} ended before all had committed a step: "
                        f"{victim.last_words()}"
                    )
                    return False
            if time.monotonic() - began > 2 * self.options.patience:
                self.hung = (
                    f"not all ranks had committed a step after {2 * self.options.patience:g} s"
                )
                return False
            time.sleep(TICK)

    def _tick(self, now: float) -> None:
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        for number, until in list(self._slowed.items()):
            victim = self.victims[number]
            resting = now < until and int(now / TICK) % (RUNS + RESTS) >= RUNS
            if victim.alive and resting != victim.stopped:
                victim.send(signal.SIGSTOP if resting else signal.SIGCONT)
            if now >= until:
                del self._slowed[number]
        for commit in self.history.read():
            if commit.life == self.victims[commit.victim].life:
                self._came_back(commit.victim, commit.clock)
        for victim in self.victims:
            self._ended(victim, now)
        newest = max((commit.clock for commit in self.history.commits), default=now)
        if now - newest > self.options.patience:
            self._hangs(newest, now)

    def _settle(self) -> None:
        """Mend everything, and wait until all ranks have committed some steps together."""
        for number in list(self._slowed):
            self._slowed[number] = 0.0
        began, since = (
            time.monotonic(),
            max((commit.step for commit in self.history.commits), default=0),
        )
        while time.monotonic() - began < self.options.patience and not self.hung:
            self._tick(time.monotonic())
            together: dict[int, set[int]] = {}
            for commit in self.history.commits:
                together.setdefault(commit.step, set()).add(commit.victim)
            if (
                sum(len(who) == len(self.victims) for step, who in together.items() if step > since)
                >= SETTLE
            ):
                return
            if self._over() or (self.options.no_restart and time.monotonic() - began > 2):
                return
            time.sleep(TICK)
        if not self.hung:
            self.hung = (
                f"{self.options.patience:g} s after the last fault not all ranks train together"
            )

    def _finish(self) -> None:
        """Ask the processes to end; then make them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for victim in self.victims:
                if victim.alive:
                    if victim.stopped:
                        victim.send(signal.SIGCONT)
                    victim.send(number)
            until = time.monotonic() + ENDING
            while time.monotonic() < until and any(victim.alive for victim in self.victims):
                time.sleep(TICK)
        self.history.read()

    def _over(self) -> bool:
        """The command has done all its work: every process has ended well."""
        return all(
            victim.process is not None and victim.process.poll() == 0 for victim in self.victims
        )

    # ---------------------------------------------------------------- faults

    def _may(self, fault: Fault) -> bool:
        """A fault waits while so many are away that the rest would be no majority, or while its
        victim is."""
        if fault.victim == LAUNCHER:
            return True
        victim = self.victims[fault.victim]
        if (
            not victim.alive
            or fault.victim in self._away
            or victim.stopped
            or fault.victim in self._slowed
        ):
            return False
        gone = (
            {v.number for v in self.victims if not v.alive or v.stopped}
            | self._away
            | {fault.victim}
        )
        return fault.kind == "slow" or 2 * (len(self.victims) - len(gone)) > len(self.victims)

    def _make(self, fault: Fault, at: float) -> None:
        now = time.monotonic()
        lasts = fault.seconds if fault.kind != "kill" else 0.0
        self.made.append(f"{at:7.1f} s  {fault}")
        self.hits.append(Hit(fault.kind, fault.victim, now, now + lasts))
        target: Victim | LauncherStore = (
            self.store if fault.victim == LAUNCHER else self.victims[fault.victim]
        )
        host = len(self.victims) if fault.victim == LAUNCHER else fault.victim
        if fault.kind == "kill":
            target.send(signal.SIGKILL)
        elif fault.kind == "stop":
            target.send(signal.SIGSTOP)
            self._in(lasts, lambda: target.send(signal.SIGCONT))
        elif fault.kind == "slow" and fault.victim != LAUNCHER:
            self._slowed[fault.victim] = now + lasts
        elif fault.kind == "cut" and self.hosts is not None:
            hosts = self.hosts
            hosts.cut(host, fault.share)
            self._in(lasts, lambda: hosts.restore(host))

    def _in(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._number), call))

    def _ended(self, victim: Victim, now: float) -> None:
        """Start a process again that is gone, by a fault or by itself."""
        process = victim.process
        if process is None or process.poll() in (None, 0) or victim.number in self._pending:
            return
        status = process.poll()
        killed = any(
            hit.kind == "kill" and hit.victim == victim.number and hit.back is None
            for hit in self.hits
        )
        if not (killed and status == -signal.SIGKILL):
            ended = f"rank {victim.number} ended with status {status}: {victim.last_words()}"
            self.ends.append(ended)
            self.made.append(f"{now - self.start:7.1f} s  {ended}")
        self._away.add(victim.number)
        self._slowed.pop(victim.number, None)
        if not self.options.no_restart:
            self._pending.add(victim.number)
            self._in(self.options.restart_after, lambda: self._again(victim))

    def _again(self, victim: Victim) -> None:
        self._pending.discard(victim.number)
        victim.start(self._environment(victim.number, again=True))
        self.history.follow(victim.events, victim.number, victim.life)
        now = time.monotonic()
        self.hits = [
            replace(hit, restarted=now) if hit.victim == victim.number and hit.back is None else hit
            for hit in self.hits
        ]

    def _came_back(self, number: int, clock: float) -> None:
        self._away.discard(number)
        self.hits = [
            replace(hit, back=clock)
            if hit.victim == number and hit.back is None and clock > hit.end
            else hit
            for hit in self.hits
        ]

    def _hangs(self, newest: float, now: float) -> None:
        """Say so, and let every process write where it is."""
        self.hung = f"no step was committed for {now - newest:.0f} s"
        for victim in self.victims:
            if victim.alive:
                victim.send(signal.SIGCONT)
                victim.send(signal.SIGABRT)

    def _environment(self, number: int, *, again: bool = False) -> dict[str, str]:
        """torchrun's variables; who starts again begins alone, and finds the others in the
        store."""
        store = f"{self.store.address}:{self.store.port}"
        common = {
            "COMMPRESS_STORE": store,
            "COMMPRESS_HASH_EVERY": str(self.options.hash_every),
            "OMP_NUM_THREADS": "1",
        }
        common |= self.key
        if self.hosts is None:
            common["GLOO_SOCKET_IFNAME"] = "lo"
        if again:
            alone = "127.0.0.1" if self.hosts is None else self.hosts.addresses[number]
            return common | {
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": alone,
                "MASTER_PORT": str(free_port()),
                "COMMPRESS_JOIN": store,
            }
        per_host = 1 if self.hosts is not None else len(self.victims)
        return common | {
            "RANK": str(number),
            "WORLD_SIZE": str(len(self.victims)),
            "LOCAL_RANK": str(number % per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self.store.address,
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }


# ---------------------------------------------------------------- the report


def _report(options: argparse.Namespace, chaos: Chaos) -> int:
    verdict = Verdict(chaos.history, chaos.hits, len(chaos.victims), chaos.begin, chaos.end)
    print("\n".join(chaos.made))
    print("\n".join(_lines(chaos, verdict)))
    bars = list(_always(chaos, verdict))
    if options.check:
        bars += _bars(options, verdict)
    if options.json:
        harness.write_json(options.json, _content(options, chaos, verdict, bars))
    print()
    return harness.verdict(bars)


def _lines(chaos: Chaos, verdict: Verdict) -> Iterator[str]:
    if not chaos.begin:
        return
    seconds, usual, steps = chaos.end - chaos.begin, verdict.usual, verdict.disturbed_steps
    yield (
        f"goodput        {verdict.goodput:.1%}: {steps} steps in {seconds:.0f} s; undisturbed one "
        f"in {usual:.3f} s"
    )
    yield f"participation  {verdict.participation:.1%} of {verdict.ranks} ranks"
    pauses = [pause.seconds for pause in verdict.pauses]
    if pauses:
        yield (
            f"pauses         {len(pauses)}: median {median(pauses):.2f} s, longest "
            f"{max(pauses):.2f} s"
        )
    if healing := verdict.healing:
        yield (
            f"healing        {len(healing)}: median {median(healing):.1f} s, longest "
            f"{max(healing):.1f} s from a new start"
        )
    lost, twice = verdict.samples_lost, verdict.samples_twice
    said = (
        "the ranks say nothing of samples"
        if lost is None
        else f"{lost} samples lost, {twice} used twice"
    )
    yield (
        f"lost           {len(verdict.skipped)} steps, {len(verdict.repeated)} committed twice; "
        f"{said}"
    )
    compared = verdict.hashed_steps
    yield (
        f"weights        equal on all ranks after {compared - len(verdict.unequal)} of {compared} "
        "compared steps"
    )


def _always(chaos: Chaos, verdict: Verdict) -> Iterator[tuple[str, bool]]:
    """Bars of every run."""
    yield (f"nothing hangs{f': {chaos.hung}' if chaos.hung else ''}", not chaos.hung)
    if not chaos.begin:
        return
    yield (f"no step lost{_some(verdict.skipped)}", not verdict.skipped)
    yield (f"no step committed twice{_some(verdict.repeated)}", not verdict.repeated)
    yield (f"weights equal on all ranks{_some(verdict.unequal)}", not verdict.unequal)
    if verdict.samples_lost is not None:
        yield ("no sample lost", not verdict.samples_lost)
        yield ("no sample used twice", not verdict.samples_twice)


def _some(steps: list[int]) -> str:
    return f": {', '.join(map(str, steps[:8]))}{' …' if len(steps) > 8 else ''}" if steps else ""


def _bars(options: argparse.Namespace, verdict: Verdict) -> Iterator[tuple[str, bool]]:
    least, most = options.min_goodput, options.min_participation
    yield (f"goodput {verdict.goodput:.1%} ≥ {least:g} %", 100 * verdict.goodput >= least)
    yield (
        f"participation {verdict.participation:.1%} ≥ {most:g} %",
        100 * verdict.participation >= most,
    )
    pauses = [pause.seconds for pause in verdict.pauses]
    if pauses:
        yield (
            f"median pause {median(pauses):.2f} s ≤ {options.median_pause:g} s",
            median(pauses) <= options.median_pause,
        )
        yield (
            f"longest pause {max(pauses):.2f} s ≤ {options.longest_pause:g} s",
            max(pauses) <= options.longest_pause,
        )
    if verdict.healing:
        slowest = max(verdict.healing)
        yield (
            f"longest healing {slowest:.1f} s ≤ {options.longest_healing:g} s",
            slowest <= options.longest_healing,
        )
    yield (f"{verdict.hashed_steps} steps compared", verdict.hashed_steps > 0)


def _content(
    options: argparse.Namespace, chaos: Chaos, verdict: Verdict, bars: list[tuple[str, bool]]
) -> dict[str, Any]:
    figures = {
        name: getattr(verdict, name)
        for name in (
            "goodput",
            "participation",
            "usual",
            "disturbed_steps",
            "hashed_steps",
            "unequal",
            "skipped",
            "repeated",
            "samples_lost",
            "samples_twice",
            "healing",
        )
    }
    return {
        **harness.machine(),
        "settings": harness.settings(options),
        "figures": figures,
        "bars": bars,
        "hung": chaos.hung,
        "faults": chaos.made,
        "ends": chaos.ends,
        "hits": [harness.row(hit) for hit in chaos.hits],
        "pauses": [harness.row(pause) for pause in verdict.pauses],
    }
