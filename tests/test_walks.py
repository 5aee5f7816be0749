"""The way of one call through the package: files entered and lines of the functions run, printed (``-s``) and kept short."""

import torch

from small_store import open_store
from walks import table, walking


def test_a_borrow_that_misses(tmp_path):
    """From the call to the bytes in memory and back, on all threads of the store."""
    with walking() as walk, open_store(tmp_path, engine="threads") as store:
        store.put("x", torch.arange(50_000))
        store.evict("x").wait()

        def borrow():
            with store.borrow("x") as tensor:
                assert torch.equal(tensor, torch.arange(50_000))

        found = walk.of(borrow)
    print("\n" + table(found))
    assert store.counters.misses == 1
    assert {"tiered_mem/store.py", "tiered_mem/disk.py", "tiered_mem/layer.py"} <= found.keys(), "all threads are looked into"
    assert len(found) <= 11
    assert sum(map(len, found.values())) <= 420
