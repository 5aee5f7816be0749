"""Memory, disks and writes stay within what the store was given; who wants more is told."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import store_footprint
from commpress.errors import DiskFull, OverBudget
from commpress.tiered_mem.arena import Arena
from small_store import open_store, read

SMAPS = Path("/proc/self/smaps")


def test_host_memory_is_never_exceeded_and_everything_is_there(store):
    # several times the budget
    tensors = {f"t{i}": torch.randn(20_000 + 999 * i) for i in range(60)}
    for name, tensor in tensors.items():
        store.put(name, tensor)
        assert store.usage().host <= 1 << 20
    for _ in range(2):
        for name, tensor in tensors.items():
            assert torch.equal(read(store, name), tensor)
            assert store.usage().host <= 1 << 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells the peak")
def test_resident_memory_stays_near_the_budget(tmp_path):
    """In a process of its own; the long form is 4 GiB through 256 MiB."""
    command = [sys.executable, store_footprint.__file__, "memory", "--directory", str(tmp_path)]
    ran = subprocess.run(
        [*command, "--host", "128MiB", "--tensors", "512MiB"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["wrong"] == 0
    assert 0.5 < found["ratio"] <= 1.15


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_what_was_asked_for_in_advance_stays_until_its_use(store, where):
    """Others leave instead, whether it had to be read or was in memory."""
    for i in range(6):
        store.put(f"t{i}", torch.full((60_000,), float(i)))
    store.evict(list(store)).wait()
    if where == "memory":
        read(store, "t0")
    store.prefetch("t0").wait()
    for i in [1, 2, 3, 4, 5]:
        read(store, f"t{i}")
    assert store.info("t0").tier == "host"
    misses = store.counters.misses
    assert torch.equal(read(store, "t0"), torch.zeros(60_000))
    assert store.counters.misses == misses


def test_what_was_asked_for_in_advance_and_not_used_leaves(store):
    for i in range(6):
        store.put(f"t{i}", torch.ones(60_000))
    store.evict(list(store)).wait()
    store.prefetch("t0").wait()
    for i in [1, 2, 3, 4, 5] * 6:
        read(store, f"t{i}")
    assert store.info("t0").tier == "disk"


def test_borrowing_more_than_fits_says_so_instead_of_hanging(store):
    for i in range(4):
        store.put(f"t{i}", torch.ones(100_000))
    with (
        store.borrow("t0"),
        store.borrow("t1"),
        pytest.raises(OverBudget, match="'t0', 't1'"),
        store.borrow("t2"),
    ):
        pass
    assert read(store, "t2").sum() == 100_000
    with pytest.raises(OverBudget, match="do not fit"):
        store.put("huge", torch.ones(1_000_000))


def test_two_threads_that_hold_and_want_more_are_told(store):
    for i in range(4):
        store.put(f"t{i}", torch.ones(100_000))
    barrier, outcomes = threading.Barrier(2), []

    def greedy(first: str, second: str) -> None:
        try:
            with store.borrow(first):
                barrier.wait(60)
                with store.borrow(second):
                    outcomes.append("both")
        except OverBudget:
            outcomes.append("told")

    threads = [
        threading.Thread(target=greedy, args=names) for names in (("t0", "t1"), ("t2", "t3"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outcomes) in (["both", "told"], ["told", "told"])


def test_a_waiting_put_goes_on_when_memory_is_given_back(store):
    store.put("a", torch.ones(120_000))
    store.put("b", torch.ones(120_000))
    taken = threading.Event()

    def put() -> None:
        taken.wait(60)
        store.put("c", torch.ones(120_000))

    thread = threading.Thread(target=put)
    thread.start()
    with store.borrow("a"), store.borrow("b"):
        taken.set()
        thread.join(0.3)
        assert thread.is_alive()
    thread.join(60)
    assert read(store, "c").sum() == 120_000


def test_pinned_tensors_stay(store):
    store.put("x", torch.ones(50_000))
    store.pin("x")
    for i in range(20):
        store.put(f"t{i}", torch.ones(50_000))
    assert store.info("x").tier == "host"
    store.unpin("x")
    for i in range(20):
        store.put(f"u{i}", torch.ones(50_000))
    assert store.info("x").tier == "disk"


def fill(store) -> None:
    for i in range(100):
        store.put(f"t{i}", torch.ones(200_000))


def test_a_full_disk_keeps_the_commit_and_says_how_much_is_missing(tmp_path):
    with open_store(tmp_path, disk="16MiB") as store:
        store.put("x", torch.ones(200_000))
        store.commit()
        with pytest.raises(DiskFull, match="budget 16 MiB") as caught:
            fill(store)
        assert caught.value.missing > 0
    with open_store(tmp_path) as store:
        assert list(store) == ["x"]
        assert read(store, "x").sum() == 200_000


def test_room_reserved_at_the_start_is_all_there_is(tmp_path):
    with open_store(tmp_path, disk="32MiB", reserve=True) as store:
        reserved = store.usage().disk_reserved
        for i in range(20):
            store.put(f"t{i}", torch.ones(200_000))
        store.commit()
        assert store.usage().disk_reserved == reserved <= 32 << 20


def test_the_write_budget(tmp_path):
    with open_store(tmp_path, writes_per_day="2MB") as store:
        store.put("x", torch.ones(200_000))
        store.commit()
        store.put("y", torch.ones(200_000))
        store.commit()
        store.put("z", torch.ones(200_000))
        with pytest.raises(DiskFull, match="write budget"):
            store.commit()
        assert store.wear.written > 1_600_000
        assert store.wear.drive_writes_per_day > 0
    with open_store(tmp_path) as store:
        assert sorted(store) == ["x", "y"]
        assert store.wear.written > 1_600_000, "counted on from run to run"


@pytest.mark.timeout(120)
def test_small_tensors_are_packed_and_holes_are_closed(store):
    for i in range(2000):
        store.put(f"t{i}", torch.full((300 + i % 50,), float(i)))
    store.commit()
    assert store.usage().fragmentation < 0.05
    for i in range(0, 2000, 2):
        store.delete(f"t{i}")
    store.commit()
    store.commit()
    assert store.usage().fragmentation < 0.05
    assert all(read(store, f"t{i}")[0] == i for i in range(1, 2000, 2))


def test_churn_does_not_grow_the_files(store):
    draw = torch.Generator().manual_seed(1)
    for i in range(300):
        numel = int(torch.randint(1000, 60_000, (1,), generator=draw))
        store.put(f"t{i % 16}", torch.full((numel,), float(i)))
        if i % 7 == 0:
            store.commit()
    live = store.usage().tensors
    assert store.usage().disk_reserved <= max(32 << 20, 4 * live)


@pytest.mark.skipif(not SMAPS.exists(), reason="not Linux")
def test_memory_is_private_of_huge_pages_and_no_childs():
    arena = Arena(8 << 20)
    address, flags = arena.bytes.data_ptr(), []
    for line in SMAPS.read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line):
            inside, rights = int(match[1], 16) <= address < int(match[2], 16), match[3]
        elif line.startswith("VmFlags") and inside:
            flags = line.split()[1:]
            assert rights == "rw-p"
    assert {"hg", "dc"} <= set(flags)  # advised: huge pages, not copied on fork
