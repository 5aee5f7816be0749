"""The demo: ways of training that race on the same ranks, the slow network under them, and the
picture of it."""

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from commpress.cli import connections, demo, main, race
from commpress.cli.contenders import CONTENDERS
from commpress.cli.hosts import Hosts, HostsUnavailable
from commpress.cli.race import Finish, Lane, RaceClock
from commpress.cli.ranks import LocalRanks, _undisturbed
from commpress.cli.training import Load
from commpress.errors import MissingPackage

LOAD = Load(1, 4, width=32, layers=1, length=16, batch=2)
TINY = ["--width", "32", "--layers", "1", "--length", "16", "--batch", "2", "--network", "loopback"]


@pytest.fixture(scope="module")
def two():
    with LocalRanks(2) as pool:
        yield pool


def quiet(*_):
    pass


@pytest.mark.parametrize("steps", [19, 20])
def test_nothing_is_compared_of_a_way_with_few_steps(steps, capsys):
    long, short = (
        Finish(name, 1e-3, 0, 2, 100, loss, None, losses=[loss] * count)
        for name, loss, count in (("no-network", 2.0, 40), ("sign", 3.0, steps))
    )
    demo.summary([long, short])
    said = capsys.readouterr().out
    assert ("Nothing can be compared: sign did fewer than 20 steps." in said) == (steps < 20)
    told = "Distance to no-network: sign, the best of commpress, +1.000 nats."
    assert (told in " ".join(said.split())) == (steps >= 20)


@pytest.mark.parametrize("others", [True, False])
def test_the_last_line_says_how_far_the_network_is_from_none(others, capsys):
    finishes = [
        Finish(name, 1e-3, 0, 2, 100, loss, None, losses=[loss] * 40)
        for name, loss in (("no-network", 2.0), ("local", 2.03), ("torch-powersgd4", 2.14))[
            : 3 if others else 2
        ]
    ]
    demo.summary(finishes)
    last = " ".join(capsys.readouterr().out.split("Distance to ")[-1].split())
    told = "no-network: local, the best of commpress, +0.030 nats"
    theirs = "; torch-powersgd4, the best of the others, +0.140"
    assert last == f"{told}{theirs if others else ''}."


def test_links_have_no_limit_where_a_way_asks_for_none():
    network = demo.SlowNetwork("", paced=1e6, rate=1e6)
    shaped = []
    network.shape = shaped.append
    lanes = [Lane(LOAD, name, 1e-3, paced=1e6) for name in ("no-network", "plain")]
    for lane, paced in zip(lanes, (0.0, 1e6), strict=True):
        with network.limits(lane) as limited:
            assert limited.paced == paced
    assert shaped == [None, 1e6]


# ---------------------------------------------------------------- on two ranks


def words_of(drawn):
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", drawn))


def test_demo_shows_its_ways_in_a_table_a_picture_and_a_file(two, monkeypatch, tmp_path, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # letters stay letters
    monkeypatch.setattr(demo, "LocalRanks", lambda size, hosts: nullcontext(two))
    monkeypatch.chdir(tmp_path)
    ways = ("no-network", "plain", "bf16", "fp8", "sign", "local")
    every = ",".join(ways)
    assert main(["demo", *TINY, "--ways", every, "--steps", "4", "--json", "demo.json"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{len(ways)} ways to train the same GPT (")
    table = said[said.index("held-out loss  against plain") :]
    ranked = re.findall(rf"^({'|'.join(map(re.escape, ways))}) +([\d.]+)", table, re.M)
    assert sorted(name for name, _ in ranked) == sorted(ways)
    assert [float(loss) for _, loss in ranked] == sorted(float(loss) for _, loss in ranked), (
        "the lowest loss first"
    )
    assert max(map(len, table.splitlines())) <= 128
    runs = {row["name"]: row for row in json.loads(Path("demo.json").read_text())["rows"]}
    assert all(
        run["steps"] == 4 and len(run["times"]) == 4 and run["seconds"] >= run["times"][-1]
        for run in runs.values()
    )
    assert len({run["losses"][0] for run in runs.values()}) == 1, "equal weights and batches"
    sent = {name: run["sent_bytes"] for name, run in runs.items()}
    if None not in sent.values():
        assert sent["plain"] > sent["bf16"] > sent["fp8"] > sent["sign"] > 0
    assert runs["fp8"]["counters"]["wire_bytes"] > 0
    assert said.splitlines()[-1] == f"picture: {Path('demo.svg').resolve()}"
    drawn = Path("demo.svg").read_text()
    assert {"seconds of training", "training loss, nats per byte"} <= words_of(drawn)
    assert all(any(text.startswith(f"{name} ") for text in words_of(drawn)) for name in ways)


def after_three_steps(rank, size, name, ask):
    """Weights of all ranks after three steps and the finish, and after the first step alone."""
    racer = race.racer(Lane(LOAD, name, 1e-3))
    race.learn(racer, 1e-3, 3)
    racer.finish()
    weights, start = (
        torch.cat([p.detach().flatten() for p in model.parameters()])
        for model in (race.bare(racer), LOAD.model())
    )
    every = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(every, weights)
    moved = (weights - start).abs().max()
    return all(torch.equal(one, weights) for one in every), float(moved)


@pytest.mark.parametrize("name", CONTENDERS)
def test_every_way_ends_with_the_same_weights_on_all_ranks(two, name):
    equal, moved = two.call(after_three_steps, name, quiet)
    assert equal
    assert moved > 1e-4, "it trained"


def test_error_feedback_acts_from_the_second_gradient_on(two):
    losses = {}
    for kept in (True, False):
        lane = Lane(LOAD, "sign", 1e-2, error_feedback=kept)
        losses[kept] = race.time_it(two, lane, 2, quiet).losses
    assert losses[True][:2] == losses[False][:2]
    assert losses[True][2:] != losses[False][2:]


# ---------------------------------------------------------------- the clock


def test_all_ranks_stop_before_the_same_step_whoever_asks_first(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(race, "perf_counter", lambda: now[0])
    clock = RaceClock(Lane(replace(LOAD, steps=0), "plain", 1.0, seconds=10.0), 2, quiet)
    assert [clock.answer(0, 0, None, 0), clock.answer(1, 0, None, 0)] == [0.0, 0.0]
    now[0] = 9.9
    assert clock.answer(1, 1, 2.0, 0) == pytest.approx(0.99)
    now[0] = 12.0
    assert clock.answer(0, 1, 4.0, 0) == pytest.approx(0.99), (
        "what was answered to one is answered to all"
    )
    assert clock.answer(0, 2, 4.0, 0) is None
    now[0] = 1.0
    assert clock.answer(1, 2, 6.0, 0) is None
    assert clock.losses == [3.0, 5.0]
    assert clock.times == [9.9, 12.0]


def test_the_learning_rate_rises_and_falls_to_a_tenth():
    assert race.schedule(0, 0.0) == pytest.approx(0.1)
    assert race.schedule(1, 0.1) == pytest.approx(0.91), (
        "few steps: it rises for a tenth of the time"
    )
    assert race.schedule(9, 0.0) == 1.0
    assert race.schedule(10_000, 1.0) == pytest.approx(0.1)


# ---------------------------------------------------------------- slow networks


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel of Linux paces connections"
)
def test_a_paced_connection_takes_its_time(connected):
    sender, receiver = connected
    assert connections.pace(8e7) >= 2
    (rate,) = struct.unpack("=I", sender.getsockopt(socket.SOL_SOCKET, 47, 4))
    assert rate == 10_000_000
    start = time.perf_counter()
    thread = threading.Thread(target=sender.sendall, args=(bytes(4_000_000),))
    thread.start()
    assert len(receiver.recv(4_000_000, socket.MSG_WAITALL)) == 4_000_000
    thread.join()
    assert time.perf_counter() - start > 0.25, (
        "4 MB at 10 MB/s, but for the first ten segments, of up to 64 kB here"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")
def test_hosts_with_stdin_closed_and_no_trace_after_ctrl_c(tmp_path):
    """The ranks of a running demo end with it, and its namespaces; nobody prints a traceback."""
    try:
        Hosts(2, rate=1e8).close()
    except (HostsUnavailable, MissingPackage) as error:
        pytest.skip(str(error))
    tiny = [
        *TINY[:-2],
        "--network",
        "hosts",
        "--ways",
        "plain,int8",
        "--seconds",
        "100",
        "--out",
        str(tmp_path / "d.svg"),
    ]
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "commpress", "demo", *tiny]
    ran = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    said = []
    for text in ran.stdout:
        said.append(text)
        if "local " in text or "int8 " in text:
            break
    holders = []
    while ran.poll() is None and len(holders) < 5:
        holders = descendants(ran.pid)
    assert len(holders) >= 5, "a switch, two hosts and two ranks"
    os.killpg(ran.pid, signal.SIGINT)
    said.append(ran.communicate(timeout=60)[0])
    assert ran.returncode == 130, said
    assert "Traceback" not in "".join(said)
    assert "Network: 2 hosts (network namespaces) whose links carry 100 Mbit/s" in " ".join(
        "".join(said).split()
    )
    until = time.monotonic() + 30  # Python's tracker of resources ends when the demo has ended
    while left := [pid for pid in holders if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def test_an_interrupt_that_another_thread_takes_waits_until_a_rank_is_started():
    awake, done = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (awake.set(), done.wait(60)))  # blocks no signal
    other.start()
    awake.wait()
    whole = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start():
        with _undisturbed():
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(40):
                time.sleep(0.005)
            whole.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            start()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
        done.set()
        other.join()
    assert whole, "interrupted in the middle"


def descendants(of):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            found.append((int(entry.name), parent))
    below, waiting = [], [of]
    while waiting:
        parent = waiting.pop()
        children = [pid for pid, above in found if above == parent]
        below += children
        waiting += children
    return below
