"""The small parts of the tiered store, alone."""

import os
import queue
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commpress.errors import Damaged, InvalidArgument
from commpress.tiered_mem import engines
from commpress.tiered_mem.checksum import checksum_of
from commpress.tiered_mem.engines import Transfer
from commpress.tiered_mem.engines.threads import PIECE
from commpress.tiered_mem.extents import Extents
from commpress.tiered_mem.layer import FileLayer
from commpress.tiered_mem.manifest import Manifest
from commpress.tiered_mem.sizes import parse_bytes, show_bytes


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
    st.recursive(st.none() | st.integers(-1, 99) | st.text(max_size=3) | st.binary(max_size=3), st.lists, max_leaves=30)
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
@pytest.mark.parametrize("nbytes", [4096, PIECE, 3 * PIECE + 8192])
def test_checksums_of_transfers_in_pieces_and_of_short_ones(tmp_path, engine, nbytes):
    if missing := engines.available(FileLayer())[engine]:
        pytest.skip(missing)
    sent, got, hashed = os.urandom(nbytes), memoryview(bytearray(nbytes)), nbytes - 100
    running, ended = engines.start(engine, Short()), queue.SimpleQueue()
    with open(tmp_path / "file", "w+b") as file:
        for view, write in ((memoryview(sent), True), (got, False)):
            done = lambda transfer, error: ended.put((transfer, error))  # noqa: E731
            running.submit([Transfer(file.fileno(), 0, view, write=write, done=done, hashed=hashed)])
            transfer, error = ended.get(timeout=60)
            assert error is None
            assert transfer.checksum == checksum_of(sent[:hashed])
    running.close()
    assert bytes(got) == sent
