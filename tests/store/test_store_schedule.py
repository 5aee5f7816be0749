"""Recorded steps: the plan misses no more than LRU, and no more than anybody could; a new order is
recorded anew."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.tiered_mem import Options, TieredStore
from commpress.tiered_mem.schedule import Schedule, farthest, least_recent, misses, starts

TRACES = st.lists(st.integers(0, 5), min_size=1, max_size=14)


def optimum(trace: list[int], capacity: int) -> int:
    """The fewest misses of any rule, by trying all of them."""

    @cache
    def least(position: int, resident: frozenset[int]) -> int:
        if position == len(trace):
            return 0
        key = trace[position]
        if key in resident:
            return least(position + 1, resident)
        if len(resident) < capacity:
            return 1 + least(position + 1, resident | {key})
        return 1 + min(least(position + 1, resident - {victim} | {key}) for victim in resident)

    return least(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(TRACES, st.integers(1, 5))
def test_the_plan_is_the_optimum_for_blocks_of_one_size(trace, capacity):
    sizes = dict.fromkeys(range(6), 1)
    planned = misses(trace, sizes, capacity, farthest(trace))
    assert planned == optimum(trace, capacity)
    assert planned <= misses(trace, sizes, capacity, least_recent)


@settings(max_examples=150, deadline=None)
@given(TRACES, st.integers(4, 20), st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_what_the_store_follows_misses_no_more_than_lru_whatever_the_sizes(
    trace, capacity, lengths
):
    schedule, sizes = Schedule(capacity), dict(enumerate(lengths))
    schedule.begin()
    for key in trace:
        schedule.access(key, sizes[key])
    schedule.end(lambda size: 0.0)
    rule = farthest(trace, rounds=2) if schedule.planned else least_recent
    assert misses(trace, sizes, capacity, rule, rounds=3) <= misses(
        trace, sizes, capacity, least_recent, rounds=3
    )


def test_reads_begin_early_enough_and_one_after_another():
    assert starts([0.0, 1.0, 2.0, 3.0], [0.0] * 4) == [-1, 0, 1, 2]
    begin = starts([0.0, 1.0, 2.0, 3.0], [0.1, 0.1, 0.1, 1.5])
    assert begin[3] < 2, "a long read begins earlier"
    assert begin == sorted(begin)
    assert min(starts([0.0, 1.0], [50.0, 50.0])) < -2, "as many steps ahead as it takes"
    assert starts([], []) == []


def walk(store: TieredStore, names: list[str]) -> int:
    """One step that uses the tensors in order; how many were not in memory."""
    before = store.counters.misses
    with store.step():
        for name in names:
            with store.borrow(name) as tensor:
                tensor += 1
    return store.counters.misses - before


@pytest.fixture
def store(tmp_path):
    options = Options(
        chunk_bytes=64 << 10, pack_below=0, pack_bytes=32 << 10, segment_bytes=16 << 20
    )
    with TieredStore.open(tmp_path, host=8 * 64 << 10, engine="threads", options=options) as store:
        for i in range(16):
            store.put(f"t{i}", torch.zeros(16 << 10))  # 64 KiB: 8 of 16 fit
        yield store


def values_of(store, names):
    """All different ones."""
    values = set()
    for name in names:
        with store.borrow(name, write=False) as tensor:
            values |= set(tensor.tolist())
    return values


def test_a_planned_step_waits_less_and_changes_nothing(store):
    names = [f"t{i}" for i in range(16)]
    assert walk(store, names) == 16, (
        "recorded: the usual worst case of LRU, a circle that does not fit"
    )
    planned = [walk(store, names) for _ in range(4)]
    # Belady's rule alone misses 8 or 9 a round, reads ahead spare some of these; on a busy machine
    # some come late.
    assert sum(planned[1:]) <= 36, "three quarters of LRU's"
    assert store.schedule.planned
    assert values_of(store, names) == {5.0}


def test_tensors_that_are_put_in_a_step_keep_their_place_in_its_plan(store):
    names = [f"t{i}" for i in range(16)]
    for step in range(4):
        with store.step():
            for name in names:
                store.put(name, torch.full((16 << 10,), float(step)))
    assert store.schedule.departures == 0
    assert store.schedule.planned
    assert values_of(store, names) == {3.0}


def test_a_new_order_is_recorded_anew(store):
    names = [f"t{i}" for i in range(16)]
    walk(store, names)
    walk(store, names)
    schedule = store.schedule
    assert schedule.planned
    walk(store, names[::-1])
    assert schedule.departures == 1
    assert schedule.planned, "the step that departed is the new plan"
    walk(store, names[::-1])
    assert schedule.departures == 1
    walk(store, names[::-1][:5])
    assert schedule.departures == 2, "a step that ends early departs, too"
