"""kill, stop, slow and cut off ranks of a run: what it costs

Starts COMMAND as several processes with torchrun's variables, does harm to them, and starts
again what has ended. COMMAND is a loop under commpress.elastic, which writes what it commits to
the file named in COMMPRESS_EVENTS. Without a COMMAND it is a small model whose computing is
slept, so that starting Python again does not take the survivors' cores into the figures.

  python benchmarks chaos
      two minutes of the small model
  python benchmarks chaos --seconds 3600 --faults kill,stop -- python train.py
      an hour, 125 faults
  python benchmarks chaos --hosts --rate 1gbit --faults kill,cut -- python train.py
      each rank on a host of its own
  python benchmarks chaos --schedule faults.txt --check -- python train.py
      the same faults each time, for CI

A line of a schedule: SECONDS kill|stop|slow|cut RANK|launcher [for SECONDS] [all|half|bulk]

  20 kill 1            # SIGKILL; started again a second later, to join the others
  40 stop 0 for 5      # SIGSTOP, then SIGCONT
  60 slow 2 for 10     # runs a fifth of the time
  80 cut 3 for 8 bulk  # with --hosts: packets over 600 bytes are lost; half: every second one;
                         all
  99 kill launcher     # the process that holds the store, as torchrun's agent does

Goodput: committed steps per second, as a share of those before the first fault. Participation:
ranks that took part in a step. Pause: what survivors waited longer than usual for the next
committed step. Nothing that was started stays, however this ends.
"""

import argparse
import heapq
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from statistics import median

import fault_schedule
from commpress.cli import harness, refusals, terminal
from commpress.cli.hosts import Hosts, need
from commpress.cli.on_hosts import send, start
from commpress.cli.option_groups import declare, option, some_of
from commpress.collectives.transports.run_key import VARIABLE, new_run_key, run_key
from commpress.errors import CommpressError, InvalidArgument
from fault_schedule import KINDS, LAUNCHER, SHARES, Fault
from history import History, Hit, Verdict
from nothing_stays import Ended, none_left

STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
SOAK = (sys.executable, str(Path(__file__).with_name("soak.py")))
# variables of a process, and of one that starts again
EVERY = "COMMPRESS_STORE={store} COMMPRESS_HASH_EVERY=1 OMP_NUM_THREADS=1 "
FIRST = (
    f"{EVERY} RANK={{rank}} WORLD_SIZE={{size}} LOCAL_RANK={{local}} LOCAL_WORLD_SIZE={{mates}} "
    "MASTER_ADDR={address} MASTER_PORT={port} TORCHELASTIC_USE_AGENT_STORE=True"
)
AGAIN = (
    f"{EVERY} RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR={{own}} "
    "MASTER_PORT={free} COMMPRESS_JOIN={store}"
)
TABLE = "inet commpress_cuts"  # of nft
TICK = 0.02  # seconds between two looks at the processes
RUNS, RESTS = 1, 4  # ticks of a slowed process
RESTART = 1.0  # seconds until a process that has ended starts again
ENDING = 10.0  # seconds between SIGTERM and SIGKILL
SETTLE = 5  # steps that all commit together before the run is over
# of --check: shares, and seconds
GOODPUT, PARTICIPATION = 0.9, 0.8
MEDIAN_PAUSE, LONGEST_PAUSE, LONGEST_HEALING = 2.5, 30.0, 20.0
FIGURES = (
    "goodput",
    "participation",
    "usual",
    "hashed_steps",
    "unequal",
    "skipped",
    "repeated",
    "samples_lost",
    "samples_twice",
    "healing",
)


def options(parser: argparse.ArgumentParser) -> None:
    table = """
    command | | | what each process runs (default: a small model that sleeps)
    --ranks N | 2.. | 4 | processes
    --seconds S | positive | 120.0 | of training in which faults are made
    --faults-per-hour N | amount | 125.0 | on average, at random times
    --schedule FILE | | | faults of a file instead of random ones
    --seed N | int | 0 | of the random ones
    --patience S | positive | 60.0 | without a committed step: the run hangs
    --hosts | | | each rank on a host of its own: network namespaces (root or user namespaces)
    @links
    --logs FOLDER | | | keep output and events of the processes here
    --json FILE | | | figures, faults and pauses, with settings and versions
    --check | | | exit status 1 also unless goodput is 90 %, participation 80 %, the median
        pause 2.5 s, the longest 30 s, and healing takes 20 s at most
    """
    declare(parser, table)
    says = f"some of {','.join(KINDS)}; cut needs --hosts"
    option(parser, "--faults KINDS", some_of(KINDS), "kill", says)


def asked_for(options: argparse.Namespace) -> list[Fault]:
    """The faults to make, unless the options do not go together."""
    if not sys.platform.startswith("linux"):
        raise InvalidArgument(
            f"chaos needs Linux (process groups that adopt orphans, /proc), this is {sys.platform}"
        )
    refusals.on_path(options.command)
    refusals.links(options)
    if options.hosts:
        refusals.on_hosts(options.ranks + 1)  # one is the launcher's
    faults = fault_schedule.of(options)
    if not options.hosts and any(fault.kind == "cut" for fault in faults):
        raise InvalidArgument("a link can be cut only between hosts: add --hosts, or leave cut out")
    return faults


def run(options: argparse.Namespace) -> int:
    """Exit status 0: nothing hung, was lost, committed twice or unequal; 1: something was, or a bar
    does not hold."""
    faults = asked_for(options)
    try:
        with ExitStack() as stack:
            stack.enter_context(none_left())
            made = tempfile.TemporaryDirectory(prefix="commpress-chaos-")
            folder = Path(options.logs or stack.enter_context(made))
            folder.mkdir(parents=True, exist_ok=True)
            hosts: CutHosts | None = None
            if options.hosts:
                link = {"rate": options.rate, "delay": options.delay}
                hosts = stack.enter_context(CutHosts(options.ranks + 1, **link, name="rank"))
            chaos = Chaos(options, faults, folder, hosts)
            with terminal.ProgressBar("chaos", lines=10) as progress:
                chaos.run(progress)
            return _report(options, chaos)
    except Ended as asked:
        return asked.status("chaos")


class CutHosts(Hosts):
    """Hosts whose links can be cut, by nft's rules in their namespaces."""

    def cut(self, host: int, share: str = "all") -> None:
        """Lose ``share`` of the packets of a host, both ways: "all", "half" or "bulk"."""
        need("nft")
        rules = [f"add table {TABLE}"]
        for chain, interface in (("input", "iifname"), ("output", "oifname")):
            hook = f"{{ type filter hook {chain} priority 0 ; }}"
            rules.append(f"add chain {TABLE} {chain} {hook}")
            rules.append(f'add rule {TABLE} {chain} {interface} "eth0" {SHARES[share]}')
        self.on(1 + host, "nft -f -", feed="\n".join(rules) + "\n")

    def restore(self, host: int) -> None:
        """Let all packets of a host pass again."""
        self.on(1 + host, f"nft delete table {TABLE} 2>/dev/null || true")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Victim:
    """One of the processes, in its first or a later life; it leads a process group, so that what it
    starts shares its fate."""

    def __init__(
        self, number: int, command: Sequence[str], folder: Path, hosts: CutHosts | None
    ) -> None:
        self.number, self.command, self.folder, self.hosts = number, list(command), folder, hosts
        self.life, self.stopped = -1, False
        self.slowed_until: float | None = None  # clock
        self.away = False  # started again, and nothing committed since
        self.pending = False  # ended, and seen to
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """Output of this life."""
        return self.folder / f"rank{self.number}.{self.life}.log"

    @property
    def events(self) -> Path:
        return self.folder / f"rank{self.number}.{self.life}.jsonl"

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.status is None

    def start(self, environment: Mapping[str, str]) -> None:
        """Begin the next life."""
        self.life, self.stopped, self.pending = self.life + 1, False, False
        env = {**os.environ, "PYTHONFAULTHANDLER": "1", **environment}
        env["COMMPRESS_EVENTS"] = str(self.events)
        with open(self.log, "wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = start(self.command, self.hosts, self.number, env, **streams)

    def send(self, number: signal.Signals) -> None:
        """A signal to the process and all that it has started."""
        if self.process is not None:
            send(self.process, number)
            self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)

    def last_words(self) -> str:
        """The last line that this life has written."""
        said = self.log.read_text(errors="replace").strip() if self.log.exists() else ""
        return said.rpartition("\n")[2].strip()[:400]


class LauncherStore:
    """A process that holds the store of the rendezvous, as torchrun's agent does: it is none of the
    ranks."""

    def __init__(self, hosts: CutHosts | None) -> None:
        self.address = "127.0.0.1" if hosts is None else hosts.addresses[-1]
        host = 0 if hosts is None else len(hosts) - 1
        command = [sys.executable, "-c", STORE, self.address]
        self.process = start(
            command, hosts, host, os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said:
            raise CommpressError(
                "the process that holds the store of the rendezvous has ended before it listened"
            )
        self.port = int(said)

    def send(self, number: signal.Signals) -> None:
        send(self.process, number)


class Chaos:
    """A run: processes, what was done to them, and what they have written."""

    def __init__(
        self, options: argparse.Namespace, faults: list[Fault], folder: Path, hosts: CutHosts | None
    ) -> None:
        self.options, self.faults, self.hosts = options, faults, hosts
        command = options.command or SOAK
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

    # ---------------------------------------------------------------- the run

    def run(self, progress: Callable[[float, str], None]) -> None:
        for victim in self.victims:
            self._begin(victim)
        if not self._until(self._all_train, 2 * self.options.patience):
            self.hung = self.hung or "not all ranks had committed a step in time"
            return
        seconds = self.options.seconds
        now = self.start = time.monotonic()
        waiting = [replace(fault, at=self.start + fault.at) for fault in self.faults]
        first = [fault.at for fault in self.faults[:1]]
        self.begin = self.start + min([fault_schedule.calm(seconds), *first])
        while now < self.start + seconds and not self._over() and not self.hung:
            while waiting and waiting[0].at <= now and self._may(waiting[0]):
                self._make(waiting.pop(0))
            self._tick()
            alive = sum(victim.alive for victim in self.victims)
            told = f"step {self.history.last}, {alive} of {len(self.victims)} alive"
            progress((now - self.start) / seconds, told)
            time.sleep(TICK)
            now = time.monotonic()
        self.end = now
        for victim in self.victims:  # all is mended
            victim.slowed_until = 0.0
        since = self.history.last
        if not self._until(lambda: self._settled(since), self.options.patience):
            self.hung = self.hung or (
                f"{self.options.patience:g} s after the last fault not all ranks train together"
            )
        self._finish()

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """True as soon as it holds, False if it does not in time, or the run hangs meanwhile."""
        end = time.monotonic() + seconds
        while not self.hung and time.monotonic() < end:
            if condition():
                return True
            time.sleep(TICK)
        return False

    def _all_train(self) -> bool:
        self.history.read()
        for victim in self.victims:
            if not victim.alive:
                said = victim.last_words()
                self.hung = f"rank {victim.number} ended before all had committed a step: {said}"
        return len({commit.victim for commit in self.history.commits}) == len(self.victims)

    def _settled(self, since: int) -> bool:
        """All ranks have committed some steps together, or need not any more."""
        self._tick()
        together: dict[int, set[int]] = {}
        for commit in self.history.commits:
            if commit.step > since:
                together.setdefault(commit.step, set()).add(commit.victim)
        whole = sum(len(who) == len(self.victims) for who in together.values())
        return whole >= SETTLE or self._over()

    def _tick(self) -> None:
        now = time.monotonic()
        while self._later and self._later[0][0] <= now:
            heapq.heappop(self._later)[2]()
        for victim in self.victims:
            if victim.slowed_until is not None:
                self._slow(victim, now)
        for commit in self.history.read():
            if commit.life == self.victims[commit.victim].life:
                self.victims[commit.victim].away = False
                for hit in self._open(commit.victim):
                    if commit.clock > hit.end:
                        hit.back = commit.clock
        for victim in self.victims:
            self._ended(victim, now)
        newest = max((commit.clock for commit in self.history.commits), default=now)
        if now - newest > self.options.patience:
            self.hung = f"no step was committed for {now - newest:.0f} s"
            for number in (signal.SIGCONT, signal.SIGABRT):  # each writes where it is
                self._send(number)

    def _finish(self) -> None:
        """Ask the processes to end; then make them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            self._send(number)
            self._send(signal.SIGCONT)
            until = time.monotonic() + ENDING
            while time.monotonic() < until and any(victim.alive for victim in self.victims):
                time.sleep(TICK)
        self.history.read()

    def _send(self, number: signal.Signals) -> None:
        for victim in self.victims:
            if victim.alive:
                victim.send(number)

    def _over(self) -> bool:
        """The command has done all its work: every process has ended well."""
        return all(victim.status == 0 for victim in self.victims)

    # ---------------------------------------------------------------- faults

    def _may(self, fault: Fault) -> bool:
        """A fault waits while so many are away that the rest would be no majority, or while its
        victim is."""
        if fault.victim == LAUNCHER:
            return True
        gone = {v.number for v in self.victims if not v.alive or v.stopped or v.away}
        if fault.victim in gone or self.victims[fault.victim].slowed_until is not None:
            return False
        left = len(self.victims) - len(gone) - 1
        return fault.kind == "slow" or 2 * left > len(self.victims)

    def _make(self, fault: Fault) -> None:
        now, hosts, number = time.monotonic(), self.hosts, fault.victim
        end = now if fault.kind == "kill" else now + fault.seconds
        self.made.append(f"{now - self.start:7.1f} s  {fault}")
        self.hits.append(Hit(fault.kind, number, now, end))
        target = self.store if number == LAUNCHER else self.victims[number]
        if fault.kind == "kill":
            target.send(signal.SIGKILL)
        elif fault.kind == "stop":
            target.send(signal.SIGSTOP)
            self._at(end, lambda: target.send(signal.SIGCONT))
        elif fault.kind == "slow" and isinstance(target, Victim):
            target.slowed_until = end
        elif fault.kind == "cut" and hosts is not None:
            host = number % len(hosts)  # the launcher's is the last
            hosts.cut(host, fault.share)
            self._at(end, lambda: hosts.restore(host))

    def _at(self, clock: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._later, (clock, next(self._number), call))

    def _slow(self, victim: Victim, now: float) -> None:
        over = now >= (victim.slowed_until or 0.0)
        resting = not over and int(now / TICK) % (RUNS + RESTS) >= RUNS
        if victim.alive and resting != victim.stopped:
            victim.send(signal.SIGSTOP if resting else signal.SIGCONT)
        if over:
            victim.slowed_until = None

    def _ended(self, victim: Victim, now: float) -> None:
        """Start a process again that is gone, by a fault or by itself."""
        if victim.status in (None, 0) or victim.pending:
            return
        killed = any(hit.kind == "kill" for hit in self._open(victim.number))
        if not (killed and victim.status == -signal.SIGKILL):
            said = f"rank {victim.number} ended with status {victim.status}: {victim.last_words()}"
            self.ends.append(said)
            self.made.append(f"{now - self.start:7.1f} s  {said}")
        victim.away, victim.slowed_until, victim.pending = True, None, True
        self._at(now + RESTART, lambda: self._begin(victim, again=True))

    def _begin(self, victim: Victim, *, again: bool = False) -> None:
        victim.start(self._environment(victim.number, again=again))
        self.history.follow(victim.events, victim.number, victim.life)
        for hit in self._open(victim.number):
            hit.restarted = time.monotonic()

    def _open(self, number: int) -> list[Hit]:
        """Hits of a victim that has committed nothing since."""
        return [hit for hit in self.hits if hit.victim == number and hit.back is None]

    def _environment(self, number: int, *, again: bool = False) -> dict[str, str]:
        """torchrun's variables; who starts again begins alone, and finds the others in the
        store."""
        size, here = len(self.victims), self.hosts is None
        text = (AGAIN if again else FIRST).format(
            store=f"{self.store.address}:{self.store.port}",
            rank=number,
            size=size,
            local=number if here else 0,
            mates=size if here else 1,
            address=self.store.address,
            port=self.store.port,
            own="127.0.0.1" if self.hosts is None else self.hosts.addresses[number],
            free=free_port(),
        )
        variables = dict(word.split("=") for word in text.split())
        if here:
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        return variables | self.key


# ---------------------------------------------------------------- the report


def _report(options: argparse.Namespace, chaos: Chaos) -> int:
    verdict = Verdict(chaos.history, chaos.hits, len(chaos.victims), chaos.begin, chaos.end)
    bars = [(f"nothing hangs{f': {chaos.hung}' if chaos.hung else ''}", not chaos.hung)]
    print("\n".join(chaos.made))
    if chaos.begin:
        print("\n".join(lines(verdict)))
        bars += always(verdict)
        bars += checked(verdict) if options.check else []
    if options.json:
        content = {
            **harness.machine(),
            "settings": harness.settings(options),
            "figures": {name: getattr(verdict, name) for name in FIGURES},
            "bars": bars,
            "hung": chaos.hung,
            "faults": chaos.made,
            "ends": chaos.ends,
            "hits": list(map(asdict, chaos.hits)),
            "pauses": list(map(asdict, verdict.pauses)),
        }
        terminal.write_json(options.json, content)
    print()
    return harness.verdict(bars)


def lines(verdict: Verdict) -> Iterator[str]:
    seconds, steps = verdict.end - verdict.begin, len(verdict.disturbed)
    yield (
        f"goodput        {verdict.goodput:.1%}: {steps} steps in {seconds:.0f} s; undisturbed one "
        f"in {verdict.usual:.3f} s"
    )
    yield f"participation  {verdict.participation:.1%} of {verdict.ranks} ranks"
    for name, figures in (
        ("pauses         ", [pause.seconds for pause in verdict.pauses]),
        ("healing        ", verdict.healing),
    ):
        if figures:
            middle, longest = median(figures), max(figures)
            yield f"{name}{len(figures)}: median {middle:.2f} s, longest {longest:.2f} s"
    lost, twice = verdict.samples_lost, verdict.samples_twice
    said = "the ranks say nothing of samples"
    if lost is not None:
        said = f"{lost} samples lost, {twice} used twice"
    yield (
        f"lost           {len(verdict.skipped)} steps, {len(verdict.repeated)} committed twice; "
        f"{said}"
    )
    compared = verdict.hashed_steps
    yield (
        f"weights        equal on all ranks after {compared - len(verdict.unequal)} of {compared} "
        "compared steps"
    )


def always(verdict: Verdict) -> Iterator[tuple[str, bool]]:
    """Bars of every run."""
    for what, steps in (
        ("no step lost", verdict.skipped),
        ("no step committed twice", verdict.repeated),
        ("weights equal on all ranks", verdict.unequal),
    ):
        named = f": {', '.join(map(str, steps[:8]))}{' …' if len(steps) > 8 else ''}"
        yield what + (named if steps else ""), not steps
    if verdict.samples_lost is not None:
        yield "no sample lost", not verdict.samples_lost
        yield "no sample used twice", not verdict.samples_twice


def checked(verdict: Verdict) -> Iterator[tuple[str, bool]]:
    """Bars of --check."""
    for what, share, least in (
        ("goodput", verdict.goodput, GOODPUT),
        ("participation", verdict.participation, PARTICIPATION),
    ):
        yield f"{what} {share:.1%} ≥ {least:.0%}", share >= least
    pauses = [pause.seconds for pause in verdict.pauses]
    for what, figures, of, most in (
        ("median pause", pauses, median, MEDIAN_PAUSE),
        ("longest pause", pauses, max, LONGEST_PAUSE),
        ("longest healing", verdict.healing, max, LONGEST_HEALING),
    ):
        if figures:
            yield f"{what} {of(figures):.2f} s ≤ {most:g} s", of(figures) <= most
    yield f"{verdict.hashed_steps} steps compared", verdict.hashed_steps > 0
