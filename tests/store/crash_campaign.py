"""Kill a tiered store at every place and see that no committed tensor is lost or silently wrong.

  python tests/store/crash_campaign.py --enumerate   fail the n-th operation, for every n and every
                                                     kind of failure
  python tests/store/crash_campaign.py --kills 1000  kill -9 a process at random times, reopen,
                                                     compare, go on
  ... --kills 1000 --seconds 500 --directory D       so long, in a directory where a later
                                                     run goes on

After each, the store must hold exactly the state of the last commit that returned, or of the one
that was under way.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import torch

from commpress.errors import CommpressError
from commpress.tiered_mem import FileLayer, Options, TieredStore
from commpress.tiered_mem.engines import available
from simulated_disk import KINDS, SimulatedDisk

OPTIONS = Options(
    chunk_bytes=16 << 10, pack_below=4 << 10, pack_bytes=8 << 10, segment_bytes=256 << 10
)
PATHS = (Path("/simulated/a"), Path("/simulated/b"))
State = dict[str, torch.Tensor]


def content(name: str, version: int, numel: int) -> torch.Tensor:
    """Bytes that tell which tensor and which version they are."""
    draw = torch.Generator().manual_seed(crc32(f"{name} {version}".encode()))
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=draw)


class Ledger:
    """Contents of the store after a crash: the acknowledged state, or one that a commit under way
    may have reached."""

    def __init__(self) -> None:
        self.current: State = {}
        self.acknowledged: State = {}
        self.candidates: list[State] = []
        self.snapshots: dict[str, State] = {}

    def begin(self) -> None:
        self.candidates.append(dict(self.current))

    def end(self) -> None:
        self.acknowledged, self.candidates = dict(self.current), []

    def admits(self, found: State) -> bool:
        return any(equal(found, state) for state in [self.acknowledged, *self.candidates])


def equal(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def read_all(store: TieredStore) -> State:
    found = {}
    for name in store:
        with store.borrow(name, write=False) as tensor:
            found[name] = tensor.clone()
    return found


# ---------------------------------------------- one story, told again with a failure at every place


def story(store: TieredStore, ledger: Ledger) -> Iterator[None]:
    """Every kind of operation once or twice; yields after each."""

    def put(name: str, version: int, numel: int) -> None:
        tensor = content(name, version, numel)
        store.put(name, tensor)
        ledger.current[name] = tensor

    def change(name: str, version: int) -> None:
        new = content(name, version, ledger.current[name].numel())
        with store.borrow(name) as tensor:
            tensor.copy_(new)
            ledger.current[name] = new

    def commit(snapshot: str | None = None) -> None:
        ledger.begin()
        if snapshot:  # may be there from now on, and if it is, it must be this
            ledger.snapshots[snapshot] = dict(ledger.current)
        store.snapshot(snapshot) if snapshot else store.commit()
        ledger.end()

    def delete(name: str) -> None:
        store.delete(name)
        del ledger.current[name]

    for version in range(2):
        for i in range(3):
            put(f"large {i}", version, 40_000 + i)
            put(f"small {i}", version, 100 + i)
            yield
        commit()
        yield
        change("large 0", 10 + version)
        change("small 1", 10 + version)
        yield
        store.evict(list(store)).wait()
        yield
        store.prefetch(["large 1", "small 0"]).wait()
        change("large 1", 20 + version)
        commit(f"snapshot-{version}")
        yield
        delete("large 2")
        put("other", version, 50_001 + version)
        commit()
        yield
        store.evict("other").wait()
        change("other", 30 + version)
        store.flush().wait()
        yield
    store.drop_snapshot("snapshot-0")
    commit()


def open_simulated(disk: SimulatedDisk) -> TieredStore:
    return TieredStore.open(
        PATHS, host=128 << 10, engine="threads", depth=1, options=OPTIONS, layer=disk
    )


def fill_what_is_free(store: TieredStore) -> None:
    """Write wherever that is allowed, and commit nothing: change what is there, so that its places
    are free unless a manifest lists them, and then fill them."""
    for name in list(store):
        with store.borrow(name) as tensor:
            tensor.add_(1)
    store.flush().wait()
    for i in range(8):
        store.put(f"more {i}", content("more", i, 40_000))
    store.flush().wait()


def commit_again(store: TieredStore, ledger: Ledger) -> None:
    ledger.begin()
    store.commit()
    ledger.end()


def only_write(store: TieredStore, ledger: Ledger) -> None:
    fill_what_is_free(store)


def write_commit_write(store: TieredStore, ledger: Ledger) -> None:
    """Places of before the failure are needed by nobody now but by a manifest that may or may not
    be there."""
    fill_what_is_free(store)
    ledger.current = read_all(store)
    commit_again(store, ledger)
    fill_what_is_free(store)


After = Callable[[TieredStore, Ledger], None]


def tell(disk: SimulatedDisk, ledger: Ledger, *, after: After = commit_again) -> str:
    """Run the story until it ends or fails; how it went. After a failure that is not a power cut
    the same process does ``after``."""
    try:
        with open_simulated(disk) as store:
            try:
                for _ in story(store, ledger):
                    pass
            except CommpressError as error:
                if disk.off:
                    return "power cut"
                outcome = type(error).__name__
                with suppress(CommpressError):
                    after(store, ledger)
                return outcome
    except CommpressError as error:
        return f"not opened: {type(error).__name__}"
    return "no error"


def check(disk: SimulatedDisk, ledger: Ledger) -> None:
    """Whatever happened: it opens, and holds a state that the ledger admits; snapshots hold theirs,
    also after this run has written wherever it may."""
    disk.fault = lambda n, operation: ""
    with open_simulated(disk) as store:
        assert store.verify() == []
        found = read_all(store)
        assert ledger.admits(found), (
            f"found {sorted(found)}, acknowledged {sorted(ledger.acknowledged)}"
        )
        names = store.snapshots()
        fill_what_is_free(store)
        store.commit()
    leftovers = [name for name in disk.files() if name.endswith(".tmp")]
    assert not leftovers, leftovers
    for name in names:
        TieredStore.restore(PATHS, name, layer=disk)
        with open_simulated(disk) as store:
            assert equal(read_all(store), ledger.snapshots[name]), f"snapshot {name}"
            fill_what_is_free(store)


def go_on(disk: SimulatedDisk, ledger: Ledger, cuts: int) -> None:
    """Killed, and started again: what that run found stays, although it uses places that are free
    and then the power fails."""
    disk.fault = lambda n, operation: ""
    with open_simulated(disk) as store:
        found, snapshots = read_all(store), store.snapshots()
        assert ledger.admits(found), (
            f"found {sorted(found)}, acknowledged {sorted(ledger.acknowledged)}"
        )
        fill_what_is_free(store)
    for seed in range(cuts):
        with open_simulated(disk.after_cut(random.Random(seed))) as store:
            assert equal(read_all(store), found), "a restart's state went away"
            assert store.snapshots() == snapshots


def enumerate_failures(stride: int = 1, offset: int = 0, cuts: int = 3) -> Counter[str]:
    """Every ``stride``-th operation fails in every way; each time the disk is looked at as it is,
    and after power cuts; is the last of a killed run, after which another goes on until the power
    fails; and fails in a run that goes on and writes wherever it may until the power fails."""
    disk, outcomes = SimulatedDisk(), Counter[str]()
    assert tell(disk, Ledger()) == "no error"
    total = disk.operations
    outcomes["operations"] = total
    for n in range(1 + offset, total + 1, stride):
        for kind in KINDS:
            disk, ledger = SimulatedDisk(), Ledger()
            disk.fault = lambda i, operation, n=n, kind=kind: kind if i == n else ""
            try:
                how = tell(disk, ledger)
                for seed in range(cuts):
                    check(disk.after_cut(random.Random(seed)), ledger)
                if not disk.off:
                    check(disk, ledger)
            except (AssertionError, CommpressError) as error:
                raise AssertionError(f"{kind} at operation {n} of {total}: {error}") from error
            outcomes[f"{kind}: {how}"] += 1
            outcomes["looked at"] += cuts + (not disk.off)
        disk, ledger = SimulatedDisk(), Ledger()
        disk.fault = lambda i, operation, n=n: "EIO" if i == n else ""
        try:
            tell(disk, ledger, after=lambda *_: None)
            go_on(disk, ledger, cuts)
        except (AssertionError, CommpressError) as error:
            raise AssertionError(
                f"killed at operation {n} of {total} and started again: {error}"
            ) from error
        outcomes["killed and started again"] += 1
        for after in (only_write, write_commit_write):
            disk, ledger = SimulatedDisk(), Ledger()
            disk.fault = lambda i, operation, n=n: "EIO" if i == n else ""
            try:
                tell(disk, ledger, after=after)
                for seed in range(cuts):
                    check(disk.after_cut(random.Random(seed)), ledger)
            except (AssertionError, CommpressError) as error:
                raise AssertionError(
                    f"EIO at operation {n} of {total}, then {after.__name__}: {error}"
                ) from error
            outcomes["failed and gone on"] += 1
        outcomes["looked at"] += 3 * cuts
    return outcomes


# ---------------------------------------------------------------- kill -9


def busy(folder: Path, seed: int, report: int) -> None:
    """Change tensors and commit for ever, several threads at it; says on a pipe which commit begins
    and which is done."""
    draw = random.Random(seed)
    here = [
        name
        for name, missing in available(FileLayer()).items()
        if not missing and name != "aiofiles"
    ]
    with TieredStore.open(
        folder,
        host=4 << 20,
        engine=draw.choice(here),
        options=Options(
            chunk_bytes=256 << 10, pack_below=64 << 10, pack_bytes=128 << 10, segment_bytes=32 << 20
        ),
    ) as store:
        version = 1 + max(
            (int(name.split()[1]) for name in store if name.startswith("version ")), default=0
        )
        while True:
            os.write(report, f"begin {version}\n".encode())
            for name in list(store):
                if name.startswith("version "):
                    store.delete(name)
            store.put(f"version {version}", torch.tensor([version]))
            for i in range(8):
                name, numel = tensor_of(version, i)
                if name in store and draw.random() < 0.5:
                    store.delete(name)
                store.put(name, content(name, version, numel))
                if draw.random() < 0.3:
                    store.evict(name).wait()
            if draw.random() < 0.3:
                store.prefetch(list(store))
            if draw.random() < 0.1:
                for old in store.snapshots():
                    store.drop_snapshot(old)
                store.snapshot(f"v{version}")
            store.commit()
            os.write(report, f"done {version}\n".encode())
            version += 1


def tensor_of(version: int, i: int) -> tuple[str, int]:
    """Name and size of the i-th tensor that a version writes."""
    return f"tensor {(version * 3 + i * 5) % 24}", 1000 + (version * 7919 + i * 104729) % (
        700_000 if i % 2 else 9_000
    )


def expected(version: int) -> State:
    state = {}
    for v in range(max(1, version - 40), version + 1):
        for i in range(8):
            name, numel = tensor_of(v, i)
            state[name] = content(name, v, numel)
    if version:
        state[f"version {version}"] = torch.tensor([version])
    return state


def examine(folder: Path, begun: int, done: int, report: int) -> None:
    """The store holds version ``begun`` or ``done``, bit for bit, and says which; raises otherwise.
    -1: whichever."""
    with TieredStore.open(folder, host=4 << 20, engine="threads") as store:
        damaged = store.verify()
        if damaged:
            raise damaged[0]
        found = read_all(store)
        versions = [int(name.split()[1]) for name in found if name.startswith("version ")] or [0]
        assert begun < 0 or versions in ([begun], [done]), (
            f"found {versions}, commit {done} was acknowledged, {begun} begun"
        )
        assert equal(found, expected(versions[0])), (
            f"version {versions[0]} is not what was committed"
        )
        os.write(report, str(versions[0]).encode())


@contextmanager
def child(function: Callable[..., None], *arguments: object) -> Iterator[tuple[int, BinaryIO]]:
    """A forked process that runs a function with the arguments and a pipe to write to; its end of
    the pipe is ours."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            function(*arguments, writer)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        yield pid, pipe
    os.waitpid(pid, 0)


def look(folder: Path, begun: int, done: int) -> int | None:
    """The version that a process of its own finds, None if it finds anything else."""
    with child(examine, folder, begun, done) as (_, pipe):
        answer = pipe.read(64)
    return int(answer) if answer else None


def kill_often(
    folder: Path,
    kills: int,
    seed: int = 0,
    *,
    longest: float = 0.25,
    seconds: float = inf,
    show: bool = False,
) -> Counter[str]:
    """``kills`` times, or for so long: start, kill -9 at a random moment, look, go on with what is
    there."""
    draw, outcomes, end = random.Random(seed), Counter[str](), time.monotonic() + seconds
    version = first = look(folder, -1, -1) if (folder / "manifest").exists() else 0
    assert version is not None, "the store that was there already is not what was committed"
    for n in range(1, kills + 1):
        if time.monotonic() > end:
            break
        with child(busy, folder, seed + n) as (pid, pipe):
            said = pipe.read(64)  # its first commit begins: what comes now is not start-up
            time.sleep(longest * draw.random() ** 2)
            os.kill(pid, signal.SIGKILL)
            while more := pipe.read(4096):
                said += more
        assert said, f"after {n - 1} kills the store could not be opened for work"
        begun = done = version
        for line in said.decode().splitlines():
            word, number = line.split()
            begun, done = (int(number), done) if word == "begin" else (begun, int(number))
        found = look(folder, begun, done)
        assert found is not None, (
            f"the store is not what was committed, after {n} kills (seed {seed})"
        )
        version = found
        outcomes["kills"] += 1
        outcomes["kills before a commit under way was acknowledged"] += begun > done
        outcomes["of which the commit was there all the same"] += version > done
        if show and n % 50 == 0:
            print(
                f"{n}/{kills} kills, commit {version}, {usage(folder) >> 20} MiB on disk",
                flush=True,
            )
    outcomes["commits"] = version - first
    outcomes["MiB on disk at the end"] = usage(folder) >> 20
    return outcomes


def usage(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0, metavar="N", help="kill -9 so often")
    parser.add_argument(
        "--enumerate", action="store_true", help="fail every operation in every way"
    )
    parser.add_argument(
        "--directory",
        type=Path,
        help="where the store to be killed lies (default: a temporary one)",
    )
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), metavar="N", help="of the random moments"
    )
    parser.add_argument(
        "--longest", type=float, default=0.25, metavar="S", help="seconds until a kill, at most"
    )
    parser.add_argument(
        "--seconds", type=float, default=inf, metavar="S", help="end early; go on with --directory"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.enumerate:
        begin = time.time()
        outcomes = enumerate_failures()
        print(f"{time.time() - begin:.0f} s; no commit lost, nothing silently wrong")
        for what, count in sorted(outcomes.items()):
            print(f"  {count:6} {what}")
    if options.kills:
        folder = options.directory or Path(tempfile.mkdtemp(prefix="crash-"))
        begin = time.time()
        try:
            outcomes = kill_often(
                folder,
                options.kills,
                options.seed,
                longest=options.longest,
                seconds=options.seconds,
                show=True,
            )
        finally:
            if not options.directory:
                shutil.rmtree(folder, ignore_errors=True)
        print(
            f"{time.time() - begin:.0f} s, seed {options.seed}; no commit lost, nothing silently "
            "wrong"
        )
        for what, count in sorted(outcomes.items()):
            print(f"  {count:6} {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
