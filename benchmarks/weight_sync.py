"""seconds from an optimizer step to three readers over a slow link, beside three dense downloads

Hosts (network namespaces): two trainer ranks under FSDP2 on the first, whose link is slow (--rate);
three readers on the others, of which the first relays to all. The trainers go on
at a rate of fine-tuning, publish bfloat16 every few steps, and wait until all have installed it.
  sync     from the end of the step until the last reader has installed the version
  scan     of them, until the weights are compared and coded
  commit   and until the version can be had
  crossed  bytes over the slow link for all three, of those of a version
  dense    until three readers have downloaded all weights in bfloat16 at once over the same link
  XOR      the same of old ^ new under zstd at level 1 (zlib without a module of zstd)
  index    the same of four bytes for a place and two for the new value
  install  seconds of Receiver.install, and of a copy of the same tensors, in turns on the first
           reader while the others do nothing
  step     mean seconds of a step, without publishing and with publish(wait=False) before every
           --steps-th, in turns, while nobody reads

Where the kernel cannot delay packets, or to measure over a link that exists, hosts are given: their
addresses, the trainers' first (three readers may share one), and a command that runs another on
host {host}, counted by addresses. They must share this machine's disk and clock, as network
namespaces do.

  python benchmarks weight_sync --check --json weight_sync.json
  python benchmarks weight_sync --width 256 --layers 4 --rounds 2 --rate 20mbit
  python benchmarks weight_sync --addresses 10.0.0.1,10.0.0.2 --enter 'ip netns exec h{host}'
"""

import argparse
import contextlib
import functools
import http.server
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from commpress.cli import harness, terminal
from commpress.cli.gpt import GPT, batch, standard_library
from commpress.cli.hosts import Hosts
from commpress.cli.option_groups import at_least, option
from commpress.errors import InvalidArgument
from commpress.units import parse_rate, parse_time
from commpress.weights import Publisher, Receiver, WeightServer
from shared_options import add_output
from weight_bytes import compressor

READERS, PORT, RELAY_PORT, OTHERS_PORT = 3, 9500, 9501, 9502
LENGTH, LOOK = 32, 0.01
BEGIN = 1e-3  # rate of --begin
SETTLE = 8  # steps at --lr before the first version
SOONER, INSTALL, STEP = 40.0, 1.2, 1.05  # bars of --check
OTHERS = "dense", "XOR", "index"  # ways in which a version is downloaded, for comparison


@dataclass(frozen=True)
class Setting:
    """Everything that the processes need."""

    folder: str
    server: str  # address of the trainers' host
    relay: str  # of the first reader's
    width: int
    layers: int
    begin: int
    lr: float
    steps: int
    rounds: int
    turns: int


@dataclass
class Measured:
    parameters: int
    density: float
    version_bytes: int
    crossed: float  # bytes that left the trainers' host, of those of the versions
    sync_seconds: float  # median of the rounds, as the next two
    scan_seconds: float  # of them, until weights are compared
    commit_seconds: float  # and until the version can be had
    other_bytes: dict[str, int]
    other_seconds: dict[str, float]
    install_seconds: float
    copy_seconds: float
    plain_step: float
    published_step: float

    @property
    def sooner(self) -> float:
        return self.other_seconds["dense"] / self.sync_seconds


def options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--rate R", None, "100mbit", "of the trainers' link")
    option(parser, "--delay T", None, "0ms", "of each link, one way; needs netem")
    option(parser, "--addresses A,B", None, "", "of hosts that there are, for --enter")
    option(parser, "--enter COMMAND", None, "", "runs another command on host {host} of these")
    option(parser, "--width N", at_least(64), 896, "of the model")
    option(parser, "--layers N", at_least(1), 13, "of the model")
    option(parser, "--begin N", at_least(0), 12, f"steps at {BEGIN:g} before those at --lr")
    option(parser, "--lr X", float, 1e-6, "of AdamW")
    option(parser, "--steps N", at_least(1), 4, "from one version to the next")
    option(parser, "--rounds N", at_least(1), 3, "versions that are timed")
    option(parser, "--turns N", at_least(1), 3, "of steps without and with publishing")
    add_output(
        parser,
        check=(
            f"a version is with three readers {SOONER:g} times sooner than dense downloads, "
            f"installing takes at most {INSTALL} of a copy, a step that publishes {STEP} of one "
            "that does not"
        ),
    )


@dataclass(frozen=True)
class GivenHosts:
    """Hosts that somebody else has made, and whose links he has shaped."""

    addresses: list[str]
    enter: str

    def start(self, host: int, command: list[str], env: dict[str, str]) -> Any:
        there = shlex.split(self.enter.format(host=min(host, len(self.addresses) - 1)))
        return subprocess.Popen([*there, *command], env=env)


@contextlib.contextmanager
def _hosts(options: argparse.Namespace) -> Iterator[Hosts | GivenHosts]:
    if bool(options.addresses) != bool(options.enter):
        raise InvalidArgument("--addresses and --enter belong together: give both or none")
    if options.enter:
        yield GivenHosts(options.addresses.split(","), options.enter)
        return
    rate, delay = parse_rate(options.rate), parse_time(options.delay)
    with Hosts(1 + READERS, delay=delay) as hosts:
        hosts.shape(0, rate, delay)
        yield hosts


def run(options: argparse.Namespace) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="weight-sync-") as folder,
        _hosts(options) as hosts,
    ):
        server, relay = hosts.addresses[:2]
        setting = Setting(
            folder,
            server,
            relay,
            options.width,
            options.layers,
            options.begin,
            options.lr,
            options.steps,
            options.rounds,
            options.turns,
        )
        measured = _measure(hosts, setting)
    print(terminal.table([cells(measured)]))
    return harness.deliver(options, [measured], judge=judge)


def cells(m: Measured) -> dict[str, str]:
    return {
        "parameters": f"{m.parameters / 1e6:.1f} M",
        "changed": f"{100 * m.density:.2f} %",
        "MB": f"{m.version_bytes / 1e6:.2f}",
        "crossed": f"{m.crossed:.2f}x",
        "sync s": f"{m.sync_seconds:.3f}",
        "scan s": f"{m.scan_seconds:.3f}",
        "commit s": f"{m.commit_seconds:.3f}",
        **{f"{name} MB": f"{nbytes / 1e6:.1f}" for name, nbytes in m.other_bytes.items()},
        **{f"{name} s": f"{seconds:.1f}" for name, seconds in m.other_seconds.items()},
        "sooner": f"{m.sooner:.1f}x",
        "install ms": f"{1e3 * m.install_seconds:.1f}",
        "copy ms": f"{1e3 * m.copy_seconds:.1f}",
        "step s": f"{m.plain_step:.3f}",
        "publishing": f"{m.published_step:.3f}",
    }


def judge(rows: list[Measured]) -> list[tuple[str, bool]]:
    (m,) = rows
    install, step = m.install_seconds / m.copy_seconds, m.published_step / m.plain_step
    return [
        (f"{m.crossed:.2f} of a version's bytes for three readers, at most 1.1", m.crossed <= 1.1),
        (f"{m.sooner:.1f} times sooner than dense, at least {SOONER:g}", m.sooner >= SOONER),
        (f"installing takes {install:.2f} of a copy, at most {INSTALL}", install <= INSTALL),
        (f"a step that publishes takes {step:.3f} of one, at most {STEP}", step <= STEP),
    ]


# ---------------------------------------------------------------- who does what when


def _measure(hosts: Hosts | GivenHosts, setting: Setting) -> Measured:
    """Processes tell each other by files: the hosts share the disk, and the clock."""
    finds = f"import sys; sys.path[:] = {sys.path!r}; import weight_sync"

    def start(host: int, call: str, **env: str) -> Any:
        command = [sys.executable, "-P", "-c", f"{finds}; weight_sync.{call}"]
        return hosts.start(host, command, env=os.environ | {"OMP_NUM_THREADS": "1"} | env)

    given, store = json.dumps(asdict(setting)), f"file://{setting.folder}/rendezvous"
    processes = [
        start(0, f"trainer({given!r}, {rank}, {store!r})", RANK=str(rank)) for rank in range(2)
    ]
    processes += [start(1 + n, f"reader({given!r}, {n})") for n in range(READERS)]
    try:
        trained = _told(setting, "trained", processes)
        readers = [_told(setting, f"read-{n}", processes) for n in range(READERS)]
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ends = [max(reader["installed"][v] for reader in readers) for v in trained["begun"]]
    begun = list(trained["begun"].values())
    return Measured(
        trained["parameters"],
        trained["density"],
        trained["bytes"],
        trained["crossed"],
        median(end - begin for end, begin in zip(ends, begun, strict=True)),
        median(trained["scan"]),
        median(trained["commit"]),
        trained["others"],
        {name: max(reader["others"][name] for reader in readers) for name in OTHERS},
        median(readers[0]["install"]),
        median(readers[0]["copy"]),
        trained["plain"],
        trained["published"],
    )


def _tell(setting: Setting, name: str, what: Any = None) -> None:
    draft = Path(setting.folder, f"{name}.part")
    draft.write_text(json.dumps(what))
    draft.rename(Path(setting.folder, name))


def _told(setting: Setting, name: str, watched: Any = ()) -> Any:
    place = Path(setting.folder, name)
    while not place.exists():
        if failed := [each.returncode for each in watched if each.poll()]:
            raise SystemExit(f"weight_sync: a process ended with exit code {failed[0]}")
        time.sleep(LOOK)
    return json.loads(place.read_text())


def trainer(given: str, rank: int, store: str) -> None:
    """One of two ranks. The first serves what both publish."""
    setting = Setting(**json.loads(given))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(width=setting.width, layers=setting.layers, heads=8, length=LENGTH)
    parameters = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rate, betas = torch.tensor(BEGIN), (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, fused=True)
    text, draws = standard_library(), torch.Generator().manual_seed(rank)

    def step() -> None:
        optimizer.zero_grad()
        model(*batch(text, 1, LENGTH, draws)).backward()
        optimizer.step()

    for _ in range(setting.begin):
        step()
    rate.fill_(setting.lr)
    for _ in range(SETTLE):
        step()
    run = Path(setting.folder, "run")
    publisher = Publisher(model, run, dtype=torch.bfloat16)
    report = publisher.publish()
    assert report is not None
    server = None
    if rank == 0:
        server = WeightServer(run, PORT, host=setting.server, key=_KEY)
        Path(setting.folder, "others").mkdir()
        _serve_others(setting)
        _tell(setting, "ready")
    begun, nbytes, scan, commit = dict[int, float](), 0, list[float](), list[float]()
    _all_have(setting, report.version)
    sent = server.sent_bytes if server is not None else 0
    others = {"dense": report.dense_bytes}
    for turn in range(setting.rounds):
        before = _patterns(model) if turn == setting.rounds - 1 else None
        for _ in range(setting.steps):
            step()
        if before is not None:
            others |= _other_bytes(before, _patterns(model))
        dist.barrier()
        begins = time.monotonic()
        report = publisher.publish()
        assert report is not None
        begun[report.version], nbytes = begins, nbytes + report.bytes
        scan.append(report.scan_seconds)
        commit.append(report.seconds)
        _all_have(setting, report.version)
    if server is not None:
        sent = server.sent_bytes - sent
        for name, size in others.items():
            Path(setting.folder, "others", name).write_bytes(bytes(size))
        _tell(setting, "over")
    for n in range(READERS):
        _told(setting, f"read-{n}")
    plain, published = list[float](), list[float]()
    for _ in range(setting.turns):
        for seconds, publishes in ((plain, False), (published, True)):
            dist.barrier()
            begins = time.monotonic()
            if publishes:
                publisher.publish(wait=False)
            for _ in range(setting.steps):
                step()
            seconds.append((time.monotonic() - begins) / setting.steps)
    publisher.wait()
    if rank == 0:
        found = {"begun": begun, "parameters": parameters, "density": report.density}
        found |= {"crossed": sent / nbytes, "scan": scan, "commit": commit, "others": others}
        found |= {"bytes": report.bytes, "plain": median(plain), "published": median(published)}
        _tell(setting, "trained", found)
    if server is not None:
        server.close()
    publisher.close()
    dist.destroy_process_group()


_KEY = b"a key of this benchmark, and of nothing else"


def _all_have(setting: Setting, version: int) -> None:
    for n in range(READERS):
        _told(setting, f"has-{n}-{version}")


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _patterns(model: torch.nn.Module) -> np.ndarray:
    """This rank's weights in bfloat16."""
    own = [p.to_local() for p in model.parameters() if isinstance(p, DTensor)]
    return torch.cat([each.detach().flatten().bfloat16() for each in own]).view(torch.int16).numpy()


def _other_bytes(old: np.ndarray, new: np.ndarray) -> dict[str, int]:
    """Sum the bytes of both ranks by XOR and zstd, and by index and value."""
    _, compress = compressor()
    own = [len(compress((old ^ new).tobytes())), 6 * int(np.count_nonzero(old != new))]
    every = torch.tensor(own)
    dist.all_reduce(every)
    return dict(zip(OTHERS[1:], every.tolist(), strict=True))


def _serve_others(setting: Setting) -> None:
    handler = functools.partial(_Silent, directory=f"{setting.folder}/others")
    dense = http.server.ThreadingHTTPServer((setting.server, OTHERS_PORT), handler)
    threading.Thread(target=dense.serve_forever, daemon=True).start()


def reader(given: str, number: int) -> None:
    """One of three readers; the first relays for all."""
    setting = Setting(**json.loads(given))
    torch.set_num_threads(1)
    _told(setting, "ready")
    if number == 0:
        WeightServer(f"http://{setting.server}:{PORT}", RELAY_PORT, host=setting.relay, key=_KEY)
        _tell(setting, "relayed")
    _told(setting, "relayed")
    receiver = Receiver(f"http://{setting.relay}:{RELAY_PORT}", key=_KEY)
    model = GPT(width=setting.width, layers=setting.layers, heads=8, length=LENGTH).bfloat16()
    installed = dict[int, float]()
    while not Path(setting.folder, "over").exists():
        if receiver.prepare(wait=0.5) is None:
            continue
        version = receiver.install(model)
        installed[version] = time.monotonic()
        _tell(setting, f"has-{number}-{version}")
    install, copy = list[float](), list[float]()
    for _ in range(5 if number == 0 else 0):
        receiver = Receiver(f"http://{setting.relay}:{RELAY_PORT}", key=_KEY)
        receiver.prepare()
        begins = time.monotonic()
        receiver.install(model)
        install.append(time.monotonic() - begins)
        pairs = [(value, receiver.weights[name]) for name, value in model.state_dict().items()]
        begins = time.monotonic()
        for target, value in pairs:
            target.copy_(value)
        copy.append(time.monotonic() - begins)
    if number == 0:
        _tell(setting, "measured")
    _told(setting, "measured")
    others = {}
    for name in OTHERS:
        _tell(setting, f"{name}-{number}")
        for n in range(READERS):  # all at once
            _told(setting, f"{name}-{n}")
        begins = time.monotonic()
        with (
            urlopen(f"http://{setting.server}:{OTHERS_PORT}/{name}") as answer,
            open(os.devnull, "wb") as nowhere,
        ):
            shutil.copyfileobj(answer, nowhere, 1 << 20)
        others[name] = time.monotonic() - begins
    found = {"installed": installed, "install": install, "copy": copy, "others": others}
    _tell(setting, f"read-{number}", found)
