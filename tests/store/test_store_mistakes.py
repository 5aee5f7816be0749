"""Wrong calls are told what is wrong with them, and harm nothing."""

import gc
import threading

import pytest
import torch

from commpress.errors import InvalidArgument, StorageError
from small_store import open_store, read


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: s.put("", torch.ones(1)), "expected text of 1 to"),
        (lambda s: s.put("a\0", torch.ones(1)), "character 0"),
        (lambda s: s.put("\ud800", torch.ones(1)), "surrogate"),
        (lambda s: s.put("x" * 2000, torch.ones(1)), "expected text of 1 to"),
        (lambda s: s.put("x", torch.ones(2).to_sparse()), "sparse"),
        (lambda s: s.put("x", torch.ones(2, device="meta")), "meta"),
        (lambda s: s.borrow("no").__enter__(), "no tensor 'no'"),
        (lambda s: s.borrow("t", on="device").__enter__(), "open the store with device="),
        (lambda s: s.borrow("t", on="moon").__enter__(), "expected 'host'"),
        (lambda s: s.delete("no"), "no tensor 'no'"),
        (lambda s: s.snapshot("../x"), "snapshot is '../x'"),
        (lambda s: s.drop_snapshot("x"), "no snapshot 'x'"),
    ],
)
def test_mistakes_are_told(store, call, says):
    store.put("t", torch.ones(3))
    with pytest.raises(InvalidArgument, match=says):
        call(store)
    assert read(store, "t").sum() == 3


def test_borrowing_twice_in_one_place_is_told(store):
    store.put("x", torch.ones(3))
    with store.borrow("x"):
        for call in (
            lambda: store.borrow("x").__enter__(),
            store.commit,
            lambda: store.delete("x"),
        ):
            with pytest.raises(InvalidArgument, match="borrowed"):
                call()
    with store.borrow("x", write=False), store.borrow("x", write=False):
        store.commit()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host": "1KiB"}, "at least pack_bytes"),
        ({"host": "much"}, "size is 'much'"),
        ({"engine": "spdk"}, "expected 'auto' or one of io_uring"),
        ({"depth": 0}, "depth is 0"),
    ],
)
def test_options_that_cannot_work_are_refused_and_nothing_stays_locked(tmp_path, options, says):
    with pytest.raises(InvalidArgument, match=says):
        open_store(tmp_path, **options)
    open_store(tmp_path).close()


def test_a_closed_store_says_so(tmp_path):
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StorageError, match="closed"):
        store.put("x", torch.ones(1))


def test_closing_ends_all_threads(tmp_path):
    gc.collect()
    before = threading.active_count()
    for engine in ("threads", "io_uring"):
        with open_store(tmp_path, engine=engine) as store:
            store.put("x", torch.ones(100_000))
            store.evict("x")
    assert threading.active_count() == before
