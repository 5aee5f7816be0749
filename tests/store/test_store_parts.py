"""The small parts of the tiered store, alone."""

import gc
import os
import queue
import random
import re
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.checksum import checksum_of
from commpress.cli.doctor import engine_findings
from commpress.errors import Damaged, InvalidArgument, MissingPackage
from commpress.tiered_mem import FileLayer, Options, TieredStore, engines, parse_bytes, show_bytes
from commpress.tiered_mem.arena import Extents
from commpress.tiered_mem.engines import PIECE, Transfer
from commpress.tiered_mem.manifest import Manifest
from small_store import open_store, read


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=60))
def test_extents_never_overlap_and_never_leak(moves):
    extents, taken = Extents(64), dict[int, int]()
    for pick, length in moves:
        if pick < 15 and taken:
            offset = sorted(taken)[pick % len(taken)]
            extents.give(offset, taken.pop(offset))
        elif (offset := extents.take(length)) is not None:
            assert all(offset + length <= o or o + n <= offset for o, n in taken.items())
            taken[offset] = length
        assert extents.free == 64 - sum(taken.values())
    for offset, length in taken.items():
        extents.give(offset, length)
    assert extents.longest == extents.free == 64


def test_sizes():
    assert [parse_bytes(x) for x in ("8GiB", "1.5 kb", "7", 9)] == [8 << 30, 1500, 7, 9]
    assert show_bytes(1536) == "1.5 KiB"
    for wrong in ("", "GiB", "-1", "1.2.3", True, -5):
        with pytest.raises(InvalidArgument):
            parse_bytes(wrong)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers(-1, 99) | st.text(max_size=3) | st.binary(max_size=3),
        st.lists,
        max_leaves=30,
    )
)
def test_a_manifest_of_any_form_is_refused_or_sound(content):
    try:
        found = Manifest.unpack(content)
    except Damaged:
        return
    assert Manifest.unpack(found.pack()) == found


class Short(FileLayer):
    """Moves less than it is asked to, as systems may."""

    def __init__(self) -> None:
        self.draw = random.Random(3)

    def read(self, fd, view, offset):
        return super().read(fd, view[: self.draw.randint(1, len(view))], offset)

    def write(self, fd, view, offset):
        return super().write(fd, view[: self.draw.randint(1, len(view))], offset)


@pytest.mark.parametrize("engine", ["threads", "aiofiles"])
@pytest.mark.parametrize("nbytes", [4096, PIECE])
def test_checksums_of_transfers_that_come_short(tmp_path, engine, nbytes):
    if missing := engines.available(FileLayer())[engine]:
        pytest.skip(missing)
    sent, got, hashed = os.urandom(nbytes), memoryview(bytearray(nbytes)), nbytes - 100
    running, ended = engines.start(engine, Short()), queue.SimpleQueue()
    with open(tmp_path / "file", "w+b") as file:
        for view, write in ((memoryview(sent), True), (got, False)):
            done = lambda transfer, error: ended.put((transfer, error))  # noqa: E731
            running.submit(
                [Transfer(file.fileno(), 0, view, write=write, done=done, hashed=hashed)]
            )
            transfer, error = ended.get(timeout=60)
            assert error is None
            assert transfer.checksum == checksum_of(sent[:hashed])
    running.close()
    assert bytes(got) == sent


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("raise OSError('libaio.so.1: cannot open shared object file')", "apt-get install libaio1"),
        ("raise ImportError('no such package')", r"pip install 'commpress\[nvme\]'"),
    ],
    ids=["library", "package"],
)
def test_without_libaio_the_cure_is_told_and_the_next_engine_taken(
    tmp_path, monkeypatch, content, says
):
    (tmp_path / "libaio.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "libaio", raising=False)
    with pytest.raises(MissingPackage, match=says):
        open_store(tmp_path / "store", engine="libaio")
    with open_store(tmp_path / "store", engine="auto") as store:
        assert store.engine in ("threads", "io_uring", "aiofiles")
        store.put("x", torch.ones(50_000))
        store.evict("x").wait()
        assert read(store, "x").sum() == 50_000
    (finding,) = (found for found in engine_findings(FileLayer()) if "libaio" in found.what)
    assert finding.state == "note"
    assert re.search(says, finding.cure)


@pytest.mark.parametrize("numel", [PIECE // 4, PIECE // 4 + 1, PIECE - 1024, PIECE + 1025])
def test_the_checksum_of_a_chunk_covers_every_piece(tmp_path, numel):
    options = Options(chunk_bytes=4 * PIECE)
    tensor = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    with TieredStore.open(
        tmp_path, host="16MiB", engine="threads", options=options, direct=False, layer=Short()
    ) as store:
        store.put("x", tensor)
        store.commit()
        places = store.places("x")
    for at in range(0, tensor.nbytes, PIECE):  # one bit of each piece, and the last byte
        for byte in (at, tensor.nbytes - 1):
            place = next(p for i, p in enumerate(places) if i == byte // options.chunk_bytes)
            flip(place.file, place.offset + byte % options.chunk_bytes)
            with TieredStore.open(
                tmp_path, host="16MiB", engine="threads", options=options
            ) as store:
                assert [damage.names for damage in store.verify()] == [("x",)]
            flip(place.file, place.offset + byte % options.chunk_bytes)
    with TieredStore.open(tmp_path, host="16MiB", engine="threads", options=options) as store:
        assert torch.equal(read(store, "x"), tensor)


def flip(file: str, at: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_transfers_that_have_ended_are_let_go(tmp_path, engine):
    if missing := engines.available(FileLayer())[engine]:
        pytest.skip(missing)
    gc.collect()
    gc.disable()
    try:
        with open_store(tmp_path, engine=engine) as store:
            store.put("x", torch.ones(100_000))
            store.evict("x").wait()
            read(store, "x")
            end = time.monotonic() + 10
            while held := [known for known in gc.get_objects() if type(known) is Transfer]:
                assert time.monotonic() < end, f"{len(held)} are held by each other"
                time.sleep(0.01)
    finally:
        gc.enable()
