"""`python benchmarks chaos` does what its schedule says, sees what goes wrong, and leaves nothing
behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import chaos as chaos_command
import fault_schedule
import sources
from commands import main
from commpress.cli.hosts import HostsUnavailable
from commpress.collectives.transports.run_key import VARIABLE
from commpress.errors import InvalidArgument
from commpress.units import parse_rate
from fault_schedule import LAUNCHER, Fault
from history import History, Hit, Verdict

TOY = sources.SUPPORT / "chaos_toy.py"
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="chaos needs Linux")


# ---------------------------------------------------------------- schedules


def test_a_seed_draws_the_same_faults_at_the_rate_asked_for():
    def draw(seed):
        return fault_schedule.drawn(("kill", "stop", "cut"), 125, 4, 360_000, seed)

    faults = draw(3)
    assert faults == draw(3) != draw(4)
    assert 12_000 < len(faults) < 13_000
    assert {fault.victim for fault in faults} == {0, 1, 2, 3}
    assert {fault.kind for fault in faults} == {"kill", "stop", "cut"}
    assert min(fault.at for fault in faults) > 10
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)


def test_a_schedule_is_read(tmp_path):
    file = tmp_path / "faults"
    file.write_text(
        "9.5 cut 3 for 8 bulk\n# nothing\n\n1 kill 2 # at once\n4 stop launcher for 2\n"
    )
    assert fault_schedule.read(file, 4) == [
        Fault(1.0, "kill", 2),
        Fault(4.0, "stop", LAUNCHER, 2.0),
        Fault(9.5, "cut", 3, 8.0, "bulk"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "x kill 1",
        "1 kick 1",
        "1 kill 4",
        "1 kill -1",
        "1 stop 1 for",
        "1 stop 1 half",
        "1 cut 1 for 2 some",
        "1 kill",
    ],
)
def test_a_line_that_says_no_fault_is_named(line, tmp_path):
    (tmp_path / "faults").write_text(f"1 kill 1\n{line}\n")
    with pytest.raises(InvalidArgument, match="line 2 is"):
        fault_schedule.read(tmp_path / "faults", 4)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--faults kick -- true", "argument --faults: got 'kick', expected some of kill, stop"),
        ("--delay 5ms -- true", "--rate and --delay are of links between hosts: add --hosts"),
        ("--faults cut --faults-per-hour 9000 -- true", "a link can be cut only between hosts"),
        ("--schedule /nowhere.txt", "No such file or directory: '/nowhere.txt'"),
        ("--patience nan", "argument --patience: got 'nan', expected a number above 0"),
        ("--hosts --ranks 250 -- true", "--ranks is 251, expected at most 250"),
        ("nothere.py", "no command 'nothere.py' on this machine's PATH: python nothere.py"),
    ],
)
def test_what_cannot_be_done_is_refused(typed, says, capsys):
    try:
        status = main(["chaos", *typed.split()])
    except SystemExit as left:
        status = left.code
    assert status == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("given", ["", "a key of the user, which every process has anyway"])
def test_all_processes_of_a_run_get_one_key(given, monkeypatch, tmp_path):
    """They meet in a store that is open to whoever reaches its port."""
    monkeypatch.setattr(
        chaos_command, "LauncherStore", lambda hosts: SimpleNamespace(address="127.0.0.1", port=1)
    )
    monkeypatch.delenv(VARIABLE, raising=False)
    if given:
        monkeypatch.setenv(VARIABLE, given)
    options = SimpleNamespace(command=["true"], ranks=2)
    run, other = (chaos_command.Chaos(options, [], tmp_path, None) for _ in range(2))
    keys = {
        run._environment(number, again=again).get(VARIABLE, given)
        for number in (0, 1)
        for again in (False, True)
    }
    assert len(keys) == 1
    assert len(keys.pop()) >= 32
    assert given or run.key != other.key


# ---------------------------------------------------------------- figures


def written(folder, lines):
    """A history of (victim, clock, step, epoch, hash, samples)."""
    history = History()
    for victim in sorted({line[0] for line in lines}):
        path = folder / f"{victim}.jsonl"
        names = ("clock", "step", "epoch", "hash", "samples")
        events = [
            {"kind": "commit", **dict(zip(names, line[1:], strict=True))}
            for line in lines
            if line[0] == victim
        ]
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        history.follow(path, victim, 0)
    history.read()
    return history


def test_figures_of_a_run_that_is_known_by_hand(tmp_path):
    """Two ranks, a step a second; rank 1 is killed at 20.5 and back at step 23, which takes the
    survivor 4 seconds in all."""
    lines = [(victim, float(t), t, 0, f"h{t}", None) for t in range(1, 21) for victim in (0, 1)]
    lines += [(0, 23.0, 21, 1, "h21", None), (0, 24.0, 22, 1, "h22", None)]
    lines += [
        (victim, 27.0 + i, 23 + i, 2, f"h{23 + i}", None) for i in range(3) for victim in (0, 1)
    ]
    hits = [Hit("kill", 1, 20.5, 20.5, back=27.0, restarted=22.0)]
    verdict = Verdict(written(tmp_path, lines), hits, 2, 15.0, 30.0)
    assert verdict.usual == 1.0
    assert [(pause.step, pause.seconds) for pause in verdict.pauses] == [(20, 2.0), (22, 2.0)]
    assert verdict.goodput == pytest.approx(10 / 15)
    assert verdict.participation == pytest.approx((8 * 2 + 2) / 20)
    assert verdict.healing == [5.0]
    assert (verdict.repeated, verdict.skipped, verdict.unequal, verdict.hashed_steps) == (
        [],
        [],
        [],
        25,
    )


def test_who_waits_for_a_stopped_rank_pauses_and_who_is_stopped_does_not(tmp_path):
    lines = [(victim, float(t), t, 0, None, None) for t in range(1, 6) for victim in (0, 1)]
    lines += [(0, 8.0, 6, 0, None, None), (1, 9.0, 6, 0, None, None)]
    verdict = Verdict(written(tmp_path, lines), [Hit("stop", 1, 5.5, 7.5)], 2, 5.0, 9.0)
    assert [(pause.step, pause.seconds) for pause in verdict.pauses] == [(5, 2.0)]


def test_what_is_lost_or_done_twice_is_found(tmp_path):
    lines = [
        (0, 1.0, 1, 0, "a", [0, 4]), (1, 1.0, 1, 0, "a", [4, 8]),
        (0, 2.0, 2, 0, "b", [8, 12]), (1, 2.0, 2, 0, "c", [12, 16]),
        (0, 3.0, 2, 0, "b", [9, 11]), (0, 4.0, 4, 0, "d", [17, 20]),
    ]  # fmt: skip
    verdict = Verdict(written(tmp_path, lines), [], 2, 0.0, 5.0)
    assert (verdict.repeated, verdict.skipped, verdict.unequal) == ([2], [3], [2])
    assert (verdict.samples_lost, verdict.samples_twice) == (1, 2)


def test_half_a_line_is_read_when_the_rest_of_it_is_there(tmp_path):
    path, history = tmp_path / "events", History()
    history.follow(path, 0, 0)
    assert history.read() == []
    path.write_text('{"kind": "commit", "clock": 1.0, "step": 1}\n{"kind": "commit"')
    assert [commit.step for commit in history.read()] == [1]
    with open(path, "a") as file:
        file.write(', "clock": 2.0, "step": 2}\n{"kind": "end"}\n')
    assert [commit.step for commit in history.read()] == [2]
    assert history.read() == []


# ---------------------------------------------------------------- runs


def chaos(folder, *arguments, toy=()):
    """The exit status of a short run of a training that is none, and its report."""
    report = folder / "report.json"
    common = ["--seconds", "3", "--json", report]
    status = main(
        [str(a) for a in ["chaos", *common, *arguments, "--", sys.executable, TOY, folder, *toy]]
    )
    return status, json.loads(report.read_text())


@pytest.mark.slow
def test_the_small_model_goes_on_when_a_rank_is_killed(tmp_path, capsys):
    (tmp_path / "faults").write_text("2 kill 1\n")
    short = "chaos --ranks 3 --seconds 12"
    files = ["--json", tmp_path / "report", "--schedule", tmp_path / "faults"]
    status = main([*short.split(), *map(str, files)])
    report = json.loads((tmp_path / "report").read_text())
    assert status == 0, capsys.readouterr().out
    assert len(report["figures"]["healing"]) == 1
    assert report["figures"]["hashed_steps"] > 20
    assert (report["figures"]["samples_lost"], report["figures"]["samples_twice"]) == (0, 0)


def check_survived(status, report, said):
    """The bars of --check need a quiet machine: a rank that starts again imports torch while others
    use the cores."""
    figures = report["figures"]
    assert status == 0, said
    assert len(report["hits"]) >= 3
    assert (figures["samples_lost"], figures["samples_twice"]) == (0, 0)
    assert figures["goodput"] > 0.7, said
    assert figures["participation"] > 0.65, said
    assert max(figures["healing"]) < 60, said
    assert figures["hashed_steps"] > 0


def test_three_deaths_hold_their_bars(soak):
    """It has run since the first test began."""
    check_survived(*soak.result())


@pytest.mark.slow  # of the test before: at random times, over two minutes
def test_two_minutes_of_faults_hold_their_bars(tmp_path, capsys):
    status = main(["chaos", "--json", str(tmp_path / "report")])
    check_survived(status, json.loads((tmp_path / "report").read_text()), capsys.readouterr().out)


def test_bars_of_a_check(tmp_path):
    """A rank that is back after 40 s is late, and the other has been alone meanwhile."""
    lines = [(victim, float(t), t, 0, f"h{t}", None) for t in range(1, 21) for victim in (0, 1)]
    lines += [(0, float(t), t, 1, "h", None) for t in range(21, 61)] + [(1, 61.0, 61, 2, "h", None)]
    hits = [Hit("kill", 1, 20.5, 20.5, back=61.0, restarted=21.0)]
    bars = dict(chaos_command.checked(Verdict(written(tmp_path, lines), hits, 2, 15.0, 60.0)))
    assert [*bars.values()] == [True, False, True, True, False, True], bars


@pytest.mark.slow
def test_ranks_killed_at_random_bytes_are_survived_and_replaced(tmp_path):
    """In a Python of its own: it forks."""
    command = [
        sys.executable,
        sources.ROOT / "benchmarks",
        "kills",
        "--kills",
        "2",
        "--check",
        "--logs",
        tmp_path,
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def left_over(folder):
    """Processes whose command names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in command:
                found.append(command)
    return found


def test_a_run_that_survives_holds_all_bars(tmp_path, capsys):
    (tmp_path / "faults").write_text(
        "0.6 kill 1\n1 stop 2 for 0.3\n1.4 slow 0 for 0.3\n2 kill launcher\n"
    )
    status, report = chaos(tmp_path, "--schedule", tmp_path / "faults")
    said = capsys.readouterr().out
    assert status == 0, said
    assert [hit["kind"] for hit in report["hits"]] == ["kill", "stop", "slow", "kill"]
    killed = report["hits"][0]
    assert killed["begin"] < killed["restarted"] < killed["back"]
    assert len(report["figures"]["healing"]) == 1
    assert 0.5 < report["figures"]["participation"] <= 1
    assert report["figures"]["goodput"] > 0.5
    assert "kill 1" in said
    assert "ok    weights equal on all ranks" in said
    assert left_over(tmp_path) == []


def test_what_goes_wrong_is_said_and_told_by_the_exit_status(tmp_path, capsys):
    toy = ["unequal=30", "twice=40", "skips=50", "ends=60", "samples=1", "hangs=200"]
    options = ["--seconds", "9", "--faults-per-hour", "0", "--patience", "3"]
    status, report = chaos(tmp_path, *options, toy=toy)
    said = capsys.readouterr().out
    assert status == 1
    missed = {what for what, holds in report["bars"] if not holds}
    # and what the others, who hang, do not commit before the first is back
    assert any(what.startswith("no step lost: 50") for what in missed)
    assert missed >= {
        "no step committed twice: 40",
        "weights equal on all ranks: 30",
        "no sample lost",
    }
    assert "rank 0 ended with status 1: commpress.errors.PeerFailure: rank 1 died" in said
    assert "FAIL  nothing hangs: no step was committed for" in said
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(
    "ends", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_nothing_stays_whatever_ends_it(ends, tmp_path):
    command = [
        sys.executable,
        str(sources.ROOT / "benchmarks"),
        "chaos",
        "--logs",
        tmp_path,
    ]
    running = subprocess.Popen(
        [*command, "--", sys.executable, TOY, tmp_path], stderr=subprocess.DEVNULL
    )
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("*.jsonl"))) < 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert len(left_over(tmp_path)) >= 4
    running.send_signal(ends)
    assert running.wait(30) == (128 + ends if ends == signal.SIGTERM else -ends)
    while left_over(tmp_path) and time.monotonic() < until:
        time.sleep(0.01)
    assert left_over(tmp_path) == []


# ---------------------------------------------------------------- hosts

ECHO = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("", 7))
    print("up", flush=True)
    while True:
        data, sender = s.recvfrom(9999)
        s.sendto(data, sender)
"""
ASK = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect((sys.argv[1], 7))
    s.settimeout(0.05)
    came = 0
    for _ in range(12):
        try:
            s.send(bytes(int(sys.argv[2])))
            came += len(s.recv(9999)) > 0
        except OSError:
            pass
print(came)
"""


@pytest.mark.skipif(
    shutil.which("nft") is None, reason="links are cut by the command nft: install nftables"
)
def test_links_of_hosts_lose_what_they_are_cut_to_lose():
    try:
        hosts = chaos_command.CutHosts(3, rate=parse_rate("1gbit"))
    except (HostsUnavailable, ImportError) as error:
        pytest.skip(str(error))
    with hosts:
        echo = [
            hosts.start(i, [sys.executable, "-SE", "-c", ECHO], stdout=subprocess.PIPE)
            for i in (0, 2)
        ]
        for process in echo:
            process.stdout.readline()

        def answers(name, size):
            asking = hosts.start(
                1, [sys.executable, "-SE", "-c", ASK, name, str(size)], stdout=subprocess.PIPE
            )
            return int(asking.communicate()[0])

        assert answers("host0", 1000) == 12
        hosts.cut(1, "bulk")
        assert (answers("host0", 10), answers("host2", 1000)) == (12, 0)
        hosts.restore(1)
        hosts.cut(1)
        assert (answers("host0", 10), answers("host2", 10)) == (0, 0)
        hosts.restore(1)
        assert answers("host2", 1000) == 12
        assert hosts.sent_bytes(1) > 24_000
    assert [process.wait(10) for process in echo] == [-9, -9]
    for process in echo:
        process.stdout.close()
