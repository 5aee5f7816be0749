"""Snapshots: whole or not there, named by their step, and the last one survives whatever happens to
the next."""

import pytest
import torch

from commpress.errors import Damaged, DiskFull, InvalidArgument, StorageError
from commpress.integrations.elastic.healing import packed
from commpress.integrations.elastic.snapshots import Snapshots
from commpress.tiered_mem import engines
from small_store import SMALL

OPTIONS = {"host": "1MiB", "engine": "threads", "options": SMALL}


def state(seed, numel=30_000):
    torch.manual_seed(seed)
    tensors = []
    document = packed(
        {"w": torch.randn(numel), "b": torch.randn(7).half(), "step": seed, "n": torch.tensor(3)},
        tensors,
    )
    return document, tensors


def opened(folder, **options):
    snapshots = Snapshots(folder, **(OPTIONS | options))
    snapshots.open()
    return snapshots


def same(found, wanted):
    return found[0] == wanted[0] and all(
        torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True)
    )


def test_the_newest_is_found_again_and_older_ones_go(tmp_path):
    snapshots = opened(tmp_path, keep=2)
    assert snapshots.last == 0
    for step in (5, 10, 15):
        snapshots.save(step, *state(step))
    assert snapshots.steps == [10, 15]
    snapshots.close()
    again = opened(tmp_path)
    step, *found = again.load()
    assert step == again.last == 15
    assert same(found, state(15))
    again.close()


def test_a_state_of_fewer_tensors_replaces_one_of_more(tmp_path):
    snapshots = opened(tmp_path)
    snapshots.save(5, *state(5))
    tensors = []
    document = packed({"w": torch.arange(9)}, tensors)
    snapshots.save(10, document, tensors)
    step, *found = snapshots.load()
    assert step == 10
    assert same(found, (document, tensors))
    assert sorted(snapshots.store) == ["document", "hash", "tensor-0"], "the others take no room"
    snapshots.close()


def test_processes_of_one_machine_have_a_store_each(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path)
    assert {first.place.name, second.place.name} == {"0", "1"}
    first.close()
    third = opened(tmp_path)
    assert third.place == first.place
    second.close()
    third.close()


def test_a_newcomer_does_not_wait_until_disks_have_been_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(
        engines, "choose", lambda *_, **__: pytest.fail("it measures which engine is the fastest")
    )
    snapshots = Snapshots(tmp_path / "usual", host="1MiB", options=SMALL)
    snapshots.open()
    snapshots.save(1, *state(1))
    snapshots.close()
    with pytest.raises(pytest.fail.Exception, match="measures"):
        Snapshots(tmp_path / "asked for", **(OPTIONS | {"engine": "auto"})).open()


@pytest.mark.parametrize(("step", "left"), [(12, [8, 12]), (9, []), (8, []), (7, None), (0, None)])
def test_snapshots_of_this_run_give_way_to_an_older_step_and_of_another_do_not(
    tmp_path, step, left
):
    """Those that are newer by more than an interval this run cannot have written."""
    snapshots = opened(tmp_path, every=4)
    for each in (8, 12):
        snapshots.save(each, *state(each))
    if left is None:
        with pytest.raises(
            InvalidArgument,
            match=f"of step 12, but the run that this process joins is at step {step}",
        ):
            snapshots.give_way(step)
        assert same(snapshots.load()[1:], state(12))
    else:
        snapshots.give_way(step)
    assert snapshots.steps == ([8, 12] if left is None else left)
    snapshots.close()


def test_a_full_disk_is_one_named_error_and_the_last_snapshot_stays(tmp_path):
    snapshots = opened(tmp_path, disk="1MiB", host="4MiB")
    snapshots.save(1, *state(1))
    with pytest.raises(DiskFull):
        snapshots.save(2, *state(2, numel=300_000))
    assert snapshots.steps == [1]
    assert same(snapshots.load()[1:], state(1))
    snapshots.save(3, *state(3))  # and goes on where there is room
    assert same(snapshots.load()[1:], state(3))
    snapshots.close()


def test_a_crash_while_one_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    snapshots = opened(tmp_path)
    snapshots.save(3, *state(3))
    put, left = snapshots.store.put, [2]

    def dies(name, tensor):
        left[0] -= 1
        if left[0] < 0:
            raise StorageError("the machine stops here")
        put(name, tensor)

    monkeypatch.setattr(snapshots.store, "put", dies)
    with pytest.raises(StorageError):
        snapshots.save(4, *state(4))
    step, *found = snapshots.load()
    assert step == 3
    assert same(found, state(3))
    snapshots.close()


def test_a_state_that_is_not_what_was_written_is_refused(tmp_path):
    snapshots = opened(tmp_path)
    snapshots.save(3, *state(3))
    with snapshots.store.borrow("tensor-0") as tensor:
        tensor[0] += 1
    with pytest.raises(Damaged, match="hash"):
        snapshots.load()
    snapshots.close()


def test_host_memory_grows_with_the_largest_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("commpress.integrations.elastic.snapshots._HOST", 1 << 20)
    snapshots = Snapshots(tmp_path, engine="threads", options=SMALL)
    snapshots.open()
    snapshots.save(1, *state(1, numel=8 << 20))
    snapshots.close()
    again = Snapshots(tmp_path, engine="threads", options=SMALL)
    again.open()
    assert same(again.load()[1:], state(1, numel=8 << 20))
    again.close()


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
def test_numbers_that_are_none_are_refused(tmp_path, options):
    with pytest.raises(InvalidArgument):
        Snapshots(tmp_path, **options)


def test_a_disk_without_room_to_open_the_store_again_stops_nothing(tmp_path, monkeypatch):
    """The next snapshot is written when there is room again, and meanwhile the last one is
    known."""

    def full(*_, **__):
        raise DiskFull("no room")

    snapshots = opened(tmp_path)
    snapshots.save(5, *state(5))
    with monkeypatch.context() as patched:
        patched.setattr("commpress.integrations.elastic.snapshots.TieredStore.open", full)
        patched.setattr("commpress.integrations.elastic.snapshots.TieredStore.put", full)
        for step in (10, 15):
            with pytest.raises(DiskFull):
                snapshots.save(step, *state(step))
            assert snapshots.last == 5
    snapshots.save(20, *state(20))
    assert snapshots.steps == [5, 20]
    snapshots.close()
