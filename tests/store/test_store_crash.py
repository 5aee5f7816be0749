"""Crashes, power cuts and failing disks: nothing committed is lost, nothing wrong is handed out.

The short form of the campaigns in crash_campaign.py, and a store beside a dictionary under random
operations and faults.
"""

import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import crash_campaign
from commpress.errors import CommpressError, DiskFailure, DiskFull, InvalidArgument
from commpress.tiered_mem import FileLayer, TieredStore
from commpress.tiered_mem.disk import Disk, References
from commpress.tiered_mem.folders import Folders
from crash_campaign import KINDS, Ledger, content, equal, open_simulated, read_all
from simulated_disk import SimulatedDisk
from variants import first


def test_an_operation_that_fails_loses_no_commit():
    """One place in thirteen; the campaign takes them all."""
    outcomes = crash_campaign.enumerate_failures(stride=13, offset=random.randrange(13), cuts=1)
    assert outcomes["looked at"] > 60


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Disk, "sync"), (SimulatedDisk, "sync"), (SimulatedDisk, "sync_folder")],
    ids=str,
)
def test_the_campaign_finds_a_store_that_does_not_sync(monkeypatch, owner, name):
    monkeypatch.setattr(owner, name, lambda *_: None)
    with pytest.raises(AssertionError, match="at operation"):
        crash_campaign.enumerate_failures(stride=4, cuts=2)


def test_the_campaign_finds_a_store_that_overwrites_committed_chunks(monkeypatch):
    allocate, taken = Disk.allocate, set()

    def remember(self, nbytes):
        extent = allocate(self, nbytes)
        taken.add((self, extent))
        return extent

    def release(self, extents):  # although a manifest lists them
        for extent in extents:
            if (self.disk, extent) in taken:
                taken.discard((self.disk, extent))
                self.disk.free([extent])

    monkeypatch.setattr(Disk, "allocate", remember)
    monkeypatch.setattr(References, "release", release)
    with pytest.raises(AssertionError, match="at operation"):
        crash_campaign.enumerate_failures(stride=4, cuts=2)


class ForgetsUnions(set):
    """Places that are added to it stay unknown."""

    def __ior__(self, other):
        return self


def after_reopening(monkeypatch):
    """The next run takes places of snapshots for free."""
    read = Folders.snapshots
    empty = lambda folders: {name: replace(found, rows=()) for name, found in read(folders).items()}  # noqa: E731
    monkeypatch.setattr(Folders, "snapshots", empty)


def after_a_failed_rename(monkeypatch):
    """Whichever manifest is there, only the places of the one before stay."""

    def keep_the_old(self, places):
        before, coming = (self.__dict__.get(name, set()) for name in ("committed", "coming"))
        if places == coming or places != before | coming:
            self.__dict__["committed"] = places

    committed = property(lambda self: self.__dict__["committed"], keep_the_old)
    monkeypatch.setattr(References, "committed", committed, raising=False)


def after_a_failed_snapshot(monkeypatch):
    """It is taken for one that is not there."""
    monkeypatch.setattr(
        References,
        "lost",
        property(lambda self: ForgetsUnions(), lambda self, places: None),
        raising=False,
    )


@pytest.mark.parametrize(
    "mutant", first(1, [after_reopening, after_a_failed_rename, after_a_failed_snapshot])
)
def test_the_campaign_finds_places_that_are_not_protected(monkeypatch, mutant):
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="at operation"):
        crash_campaign.enumerate_failures(stride=1, offset=50, cuts=2)


def test_kill_9_loses_no_commit(tmp_path):
    """The command itself, because a fork of this process would inherit locks of torch's threads."""
    command = [
        sys.executable,
        crash_campaign.__file__,
        "--kills",
        "12",
        "--directory",
        str(tmp_path / "store"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = {
        what.strip(): int(count) for count, what in re.findall(r"^ +(\d+) (.*)$", ran.stdout, re.M)
    }
    assert said["kills"] == 12
    assert said["commits"] > 0
    assert said["MiB on disk at the end"] < 200


class Failing(FileLayer):
    """A real disk that fails one kind of operation from now on."""

    def __init__(self) -> None:
        self.failing = ""
        self.number = 5

    def _operate(self, operation: str) -> None:
        if operation == self.failing:
            raise OSError(self.number, "as told")

    def write(self, fd, view, offset):
        self._operate("write")
        return super().write(fd, view, offset)

    def read(self, fd, view, offset):
        self._operate("read")
        return super().read(fd, view, offset)

    def sync(self, fd):
        self._operate("sync")
        super().sync(fd)


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
def test_a_disk_that_fails_for_a_while(tmp_path, engine):
    if engine == "aiofiles":
        pytest.importorskip("aiofiles")
    layer = Failing()
    with TieredStore.open(tmp_path, host="2MiB", engine=engine, layer=layer) as store:
        store.put("x", torch.ones(100_000))
        store.commit()
        with store.borrow("x") as tensor:
            tensor += 1
        layer.failing = "write"
        with pytest.raises(DiskFailure, match="cannot write"):
            store.commit()
        with pytest.raises(DiskFailure):
            store.evict("x").wait()
        layer.failing = ""
        store.commit()
        store.evict("x").wait()
        layer.failing = "read"
        with pytest.raises(DiskFailure, match="cannot read"), store.borrow("x"):
            pass
        layer.failing = ""
        with store.borrow("x") as tensor:
            assert tensor.sum() == 200_000
            tensor += 1
        layer.failing = "sync"
        with pytest.raises(DiskFailure, match="The store cannot commit any more"):
            store.commit()
        layer.failing = ""
        with pytest.raises(DiskFailure, match="The store cannot commit any more"):
            store.commit()
    with (
        TieredStore.open(tmp_path, host="2MiB", engine=engine) as store,
        store.borrow("x") as tensor,
    ):
        assert tensor.sum() == 200_000


def fill(store) -> None:
    for i in range(40):
        store.put(f"t{i}", content("t", i, 50_000))


def test_a_disk_without_room():
    disk = SimulatedDisk(room=1 << 20)
    with open_simulated(disk) as store:
        store.put("x", content("x", 0, 50_000))
        store.commit()
        with pytest.raises(DiskFull) as caught:
            fill(store)
        assert caught.value.missing > 0
        for name in list(store):
            if name != "x":
                store.delete(name)
        store.put("y", content("y", 0, 30_000))
        store.commit()
    with open_simulated(disk) as store:
        assert equal(read_all(store), {"x": content("x", 0, 50_000), "y": content("y", 0, 30_000)})


def interrupted(disk, operation, call):
    """Killed before the next such operation: it does nothing, and the store is opened
    again."""
    with open_simulated(disk) as store:
        disk.fault = lambda i, what: "EIO" if what == operation else ""
        with pytest.raises(CommpressError):
            call(store)
    disk.fault = lambda i, what: ""


@pytest.mark.parametrize("snapshot", [False, True])
def test_what_a_killed_run_left_stays_as_the_next_one_found_it(snapshot):
    """Killed between a rename, or the removal of a snapshot, and the sync of the folder. The next
    run finds the new state, and uses the places of the old one: a power cut must not bring that
    back."""
    disk = SimulatedDisk()
    with open_simulated(disk) as store:
        store.put("x", content("x", 0, 50_000))
        store.commit()
        if snapshot:
            store.snapshot("old")
            store.put("x", content("x", 1, 50_000))
            store.commit()

    def change(store):
        if snapshot:
            store.drop_snapshot("old")
        else:
            store.put("x", content("x", 1, 50_000))
            store.commit()

    interrupted(disk, "sync folder", change)
    with open_simulated(disk) as store:
        found, snapshots = read_all(store), store.snapshots()
        assert equal(found, {"x": content("x", 1, 50_000)})
        store.put("y", content("y", 0, 50_000))
        store.flush().wait()
    for seed in range(20):
        with open_simulated(disk.after_cut(random.Random(seed))) as store:
            assert equal(read_all(store), found)
            assert store.snapshots() == snapshots == []


NAMES = st.sampled_from([f"n{i}" for i in range(6)])
NUMELS = st.sampled_from([0, 1, 100, 4000, 4096, 5000, 16_384, 40_001])


class StoreBesideDictionary(RuleBasedStateMachine):
    """Operations, faults, power cuts; the dictionary knows what must be there now, the ledger what
    after a crash."""

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.ledger, self.version = SimulatedDisk(), Ledger(), 0
        self.store: TieredStore | None = None

    @initialize()
    def open(self):
        self.store = open_simulated(self.disk)

    def _try(self, call) -> bool:
        """True if it worked; it may fail only if a fault was ordered."""
        try:
            call()
            return True
        except InvalidArgument:
            raise
        except CommpressError:
            assert self.faulty, "a failure without a fault"
            return False

    @property
    def faulty(self) -> bool:
        return self.disk.fault(10**9, "") == "armed"

    @rule(name=NAMES, numel=NUMELS)
    def put(self, name, numel):
        self.version += 1
        tensor = content(name, self.version, numel)
        if self._try(lambda: self.store.put(name, tensor)):
            self.ledger.current[name] = tensor

    @precondition(lambda self: self.ledger.current)
    @rule(data=st.data())
    def change(self, data):
        name = data.draw(st.sampled_from(sorted(self.ledger.current)))
        self.version += 1
        new = content(name, self.version, self.ledger.current[name].numel())

        def change():
            with self.store.borrow(name) as tensor:
                assert torch.equal(tensor, self.ledger.current[name])
                tensor.copy_(new)

        if self._try(change):
            self.ledger.current[name] = new

    @precondition(lambda self: self.ledger.current)
    @rule(data=st.data())
    def delete(self, data):
        name = data.draw(st.sampled_from(sorted(self.ledger.current)))
        self.store.delete(name)
        del self.ledger.current[name]

    @precondition(lambda self: self.ledger.current)
    @rule(data=st.data(), how=st.sampled_from(["evict", "prefetch", "flush"]))
    def move(self, data, how):
        names = data.draw(
            st.lists(st.sampled_from(sorted(self.ledger.current)), min_size=1, unique=True)
        )
        self._try(lambda: getattr(self.store, how)(names).wait())

    @rule()
    def commit(self):
        self.ledger.begin()
        if self._try(self.store.commit):
            self.ledger.end()

    @rule(
        n=st.integers(1, 12),
        kind=st.sampled_from([k for k in KINDS if "torn" not in k and k != "cut"]),
    )
    def order_a_fault(self, n, kind):
        due = self.disk.operations + n
        self.disk.fault = lambda i, operation: "armed" if i == 10**9 else kind if i == due else ""

    @rule()
    def read_everything_without_faults(self):
        if not self.faulty:
            assert equal(read_all(self.store), self.ledger.current)

    @rule(
        seed=st.integers(0, 1 << 20),
        way=st.sampled_from(["close", "power cut", "torn 512", "torn 4096"]),
    )
    def reopen(self, seed, way):
        """Without the last commit, or in the middle of the next."""
        if way != "close":
            due = self.disk.operations + 1 + seed % 9
            self.disk.fault = lambda i, operation: (
                "armed" if i == 10**9 else "cut" if i == due else ""
            )
            if way != "power cut":
                self.disk.fault = lambda i, operation: (
                    "armed" if i == 10**9 else way if i >= due else ""
                )
            self.commit()
            self.disk.off = True
        self.store.close()
        self.disk = (
            self.disk.after_cut(random.Random(seed)) if way != "close" or seed % 2 else self.disk
        )
        self.disk.off, self.disk.fault = False, lambda n, operation: ""
        self.open()
        found = read_all(self.store)
        assert self.ledger.admits(found)
        self.ledger.current, self.ledger.acknowledged, self.ledger.candidates = (
            dict(found),
            dict(found),
            [],
        )

    @invariant()
    def within_budget(self):
        if self.store:
            usage = self.store.usage()
            assert usage.host <= 128 << 10
            assert sorted(self.store) == sorted(self.ledger.current)

    def teardown(self):
        if self.store:
            self.store.close()


TestStoreBesideDictionary = StoreBesideDictionary.TestCase
TestStoreBesideDictionary.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
