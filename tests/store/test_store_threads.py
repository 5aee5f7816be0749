"""The tiered store used by many threads and by coroutines at once."""

import asyncio
import threading

import pytest
import torch

from commpress.errors import InvalidArgument
from commpress.tiered_mem import TieredStore
from small_store import open_store, read


def test_threads_each_with_their_own_tensors(store):
    errors = []

    def work(k: int) -> None:
        try:
            for i in range(30):
                store.put(f"{k} {i % 5}", torch.full((10_000 + i,), float(k * 100 + i)))
                with store.borrow(f"{k} {i % 5}") as tensor:
                    tensor += 1
                assert read(store, f"{k} {i % 5}")[0] == k * 100 + i + 1
                if i % 10 == k:
                    store.commit()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == []
    assert len(store) == 20


def test_increments_of_many_threads_all_count(store):
    store.put("x", torch.zeros(5000))

    def add() -> None:
        for _ in range(50):
            with store.borrow("x") as tensor:
                tensor += 1

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(read(store, "x").tolist()) == {200.0}


def test_a_commit_is_one_moment(tmp_path):
    """Two tensors are always changed together; no commit may hold one change without the other."""
    with open_store(tmp_path) as store:
        store.put("a", torch.zeros(20_000))
        store.put("b", torch.zeros(20_000))
        stop = threading.Event()

        def change() -> None:
            while not stop.is_set():
                with store.borrow("a") as a, store.borrow("b") as b:
                    a += 1
                    b += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            for i in range(20):
                store.snapshot(f"s{i}")
        finally:
            stop.set()
            thread.join(60)
    for i in range(20):
        TieredStore.restore(tmp_path, f"s{i}")
        with open_store(tmp_path) as store:
            assert torch.equal(read(store, "a"), read(store, "b"))


def test_background_work_does_not_begin_a_thread_each_time(store, monkeypatch):
    begun, start = [], threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (begun.append(thread), start(thread))
    )
    store.put("x", torch.ones(10_000))
    for _ in range(50):
        with store.borrow("x"):
            pass
        store.evict("x").wait()
    assert 0 < len(begun) < 25


def test_background_work_that_waits_for_other_such_work_ends(store):
    """Twenty borrows in the background wait for the one that is lent; each gets a thread."""

    async def add() -> None:
        async with store.borrow("x") as tensor:
            tensor += 1

    async def main() -> None:
        with store.borrow("x"):
            tasks = [asyncio.create_task(add()) for _ in range(20)]
            await asyncio.sleep(0.05)
            await store.flush(["y"])
        await asyncio.gather(*tasks)

    store.put("x", torch.zeros(10_000))
    store.put("y", torch.zeros(10_000))
    asyncio.run(asyncio.wait_for(main(), 60))
    assert set(read(store, "x").tolist()) == {20.0}


def test_asyncio(store):
    async def train() -> float:
        for i in range(10):
            store.put(f"t{i}", torch.full((50_000,), float(i)))
        assert await store.prefetch(["t0", "t1"]) == 2
        async with store.borrow("t0") as tensor:
            tensor += 1
        await store.evict("t0")
        assert await store.commit_later() == 1
        async with store.borrow("t0", write=False) as tensor:
            return float(tensor[0])

    assert asyncio.run(train()) == 1.0


def test_a_cancelled_borrow_lets_go(store):
    store.put("x", torch.ones(10))

    async def give_up() -> None:
        with store.borrow("x"):

            async def want() -> None:
                async with store.borrow("x"):
                    pass

            task = asyncio.create_task(want())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with store.borrow("x"):
            pass

    asyncio.run(asyncio.wait_for(give_up(), 60))


def test_an_error_of_background_work_reaches_who_waits(store):
    store.put("x", torch.ones(100_000))
    with store.borrow("x"), pytest.raises(InvalidArgument, match="borrowed"):
        store.evict("x")
    with pytest.raises(InvalidArgument, match="no tensor 'y'"):
        store.prefetch("y")


@pytest.mark.parametrize("asked", ["here", "by the plan of a step"])
def test_a_read_in_advance_that_comes_after_the_use_is_dropped(store, asked):
    """A thread that reads in advance and lags brings nothing back that was used and evicted."""
    lags, done, ahead = threading.Event(), threading.Event(), store._access.background.in_order
    for name in "xy":
        store.put(name, torch.ones(50_000))
    store.evict(["x", "y"]).wait()

    def use(name):
        with store.borrow(name, write=False) as tensor:
            assert tensor.sum() == 50_000
        store.evict(name).wait()

    for _ in range(3 if asked != "here" else 0):
        with store.step():
            use("x"), use("y")
    ahead(lambda: lags.wait(60))
    with store.step():
        if asked == "here":
            pending = store.prefetch(["x", "y"])
        use("x"), use("y")
        ahead(done.set)
        lags.set()
        assert done.wait(60)
        if asked == "here":
            assert pending.wait(60) == 0
    assert [store.info(name).tier for name in "xy"] == ["disk", "disk"]
