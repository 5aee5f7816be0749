"""The way of one call through the package: files entered and lines of the functions run, printed (``-s``) and kept short."""

import pytest
import torch

from commpress.tiered_mem import FileLayer, engines
from small_store import open_store
from walks import table, walking


@pytest.mark.parametrize(("engine", "files", "lines"), [("threads", 11, 420), ("io_uring", 10, 550)])
def test_a_borrow_that_misses(tmp_path, engine, files, lines):
    """From the call to the bytes in memory and back, on all threads of the store."""
    if missing := engines.available(FileLayer())[engine]:
        pytest.skip(missing)
    with walking() as walk, open_store(tmp_path, engine=engine) as store:
        store.put("x", torch.arange(50_000))
        store.evict("x").wait()

        def borrow():
            with store.borrow("x") as tensor:
                assert torch.equal(tensor, torch.arange(50_000))

        found = walk.of(borrow)
    print("\n" + table(found))
    assert store.counters.misses == 1
    assert {"tiered_mem/store.py", "tiered_mem/disk.py", "tiered_mem/engines/transfer.py"} <= found.keys(), "on all threads"
    assert len(found) <= files
    assert sum(map(len, found.values())) <= lines
