"""Neighbours: chunks side by side on disk, and transfers that io_uring hands to the kernel
together, each of which ends as if alone."""

import ctypes
import mmap
import os
import platform
import queue
import struct
import sys
import threading
from time import monotonic, sleep

import pytest
import torch

from commpress.checksum import checksum_of
from commpress.tiered_mem import FileLayer, Options, engines
from commpress.tiered_mem.engines import PIECE, Transfer, thread_priority, uring
from small_store import open_store, read

PIECES = 12


@pytest.fixture(params=[1, 2, 4], ids=lambda depth: f"depth {depth}")
def engine(request, monkeypatch):
    """It notes how many transfers each request has."""
    if missing := engines.available(FileLayer())["io_uring"]:
        pytest.skip(missing)
    monkeypatch.setattr(uring, "REQUEST", 3 * PIECE)
    running = engines.start("io_uring", FileLayer(), request.param)
    begin, running.together = running._begin, []
    monkeypatch.setattr(
        running, "_begin", lambda run: running.together.append(len(run)) or begin(run)
    )
    yield running
    running.close()


def moved(engine, file, memory, *, write, at=range(PIECES)):
    """Pieces of ``memory`` to or from the same places of the file: index → (transfer, error)."""
    ended, view = queue.SimpleQueue(), memoryview(memory)

    def transfers():
        for i in at:
            done = lambda transfer, error, i=i: ended.put((i, transfer, error))  # noqa: E731
            here = slice(i * PIECE, (i + 1) * PIECE)
            yield Transfer(
                file.fileno(), i * PIECE, view[here], write=write, done=done, hashed=PIECE
            )

    engine.submit(transfers())
    found = [ended.get(timeout=60) for _ in at]
    return {i: (transfer, error) for i, transfer, error in found}


def test_neighbours_go_together_and_arrive(engine, tmp_path):
    sent, got = mmap.mmap(-1, PIECES * PIECE), mmap.mmap(-1, PIECES * PIECE)
    sent[:] = os.urandom(PIECES * PIECE)
    engine.register(memoryview(got))
    with open(tmp_path / "file", "w+b") as file:
        for memory, write in ((sent, True), (got, False)):
            engine.together.clear()
            for i, (transfer, error) in moved(engine, file, memory, write=write).items():
                assert error is None
                assert transfer.checksum == checksum_of(sent[i * PIECE : (i + 1) * PIECE])
            assert max(engine.together) == 3
    assert got[:] == sent[:]


def test_what_is_no_neighbour_goes_alone(engine, tmp_path):
    memory = mmap.mmap(-1, PIECES * PIECE)
    with open(tmp_path / "file", "w+b") as file:
        assert all(
            error is None
            for _, error in moved(engine, file, memory, write=True, at=range(0, PIECES, 2)).values()
        )
    assert set(engine.together) == {1}


def test_a_file_that_ends_early_is_told_of_those_behind_its_end(engine, tmp_path):
    content, memory = os.urandom(6 * PIECE + 8192), mmap.mmap(-1, PIECES * PIECE)
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "rb") as file:
        found = moved(engine, file, memory, write=False)
    assert [i for i in range(PIECES) if found[i][1]] == list(range(6, PIECES))
    assert all(isinstance(error, OSError) for _, error in found.values() if error)
    assert memory[: 6 * PIECE] == content[: 6 * PIECE]
    assert max(engine.together) == 3


def test_an_error_is_told_of_the_transfer_that_has_it(engine, tmp_path):
    memory = mmap.mmap(-1, PIECES * PIECE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect, bad = ctypes.CDLL(None, use_errno=True).mprotect, 7
    place = ctypes.c_void_p(start + bad * PIECE), ctypes.c_size_t(PIECE)
    with open(tmp_path / "file", "w+b") as file:
        file.write(os.urandom(PIECES * PIECE))
        file.flush()
        assert protect(*place, 0) == 0  # nobody may touch these pages
        try:
            found = moved(engine, file, memory, write=False)
        finally:
            protect(*place, mmap.PROT_READ | mmap.PROT_WRITE)
        file.seek(0)
        content = file.read()
    assert [i for i in range(PIECES) if found[i][1]] == [bad]
    for i in set(range(PIECES)) - {bad}:
        assert memory[i * PIECE : (i + 1) * PIECE] == content[i * PIECE : (i + 1) * PIECE]


def test_chunks_of_a_tensor_lie_side_by_side_and_fill_holes_when_they_cannot(tmp_path):
    options = Options(chunk_bytes=1 << 20, pack_below=0, segment_bytes=16 << 20)
    with open_store(tmp_path, options=options, disk="16MiB", host="32MiB") as store:
        for i in range(8):
            store.put(f"x{i}", torch.full((1 << 19,), i, dtype=torch.float32))  # 2 MiB
        store.flush().wait()
        assert all(
            b.offset - a.offset == 1 << 20 for i in range(8) for a, b in [store.places(f"x{i}")]
        )
        for i in range(0, 8, 2):
            store.delete(f"x{i}")
        store.put("wide", torch.arange(2 << 20, dtype=torch.float32))  # 8 MiB into four holes of 2
        store.evict(["wide", "x1"]).wait()
        assert {place.offset for place in store.places("wide")} == {
            4 * i + j << 20 for i in range(4) for j in range(2)
        }
        assert torch.equal(read(store, "wide"), torch.arange(2 << 20, dtype=torch.float32))
        assert (read(store, "x1") == 1).all()


def test_what_is_written_later_is_hashed_while_the_kernel_reads(tmp_path):
    """The read is from a pipe, and so takes until somebody writes into that."""
    if missing := engines.available(FileLayer())["io_uring"]:
        pytest.skip(missing)
    running, ended = engines.start("io_uring", FileLayer(), 1), queue.SimpleQueue()
    source, sink = os.pipe()
    room, sent = mmap.mmap(-1, 4096), mmap.mmap(-1, PIECES * PIECE)
    sent[:] = os.urandom(PIECES * PIECE)
    done = lambda transfer, error: ended.put(error)  # noqa: E731
    try:
        with open(tmp_path / "file", "w+b") as file:
            writes = [
                Transfer(
                    file.fileno(),
                    at,
                    memoryview(sent)[at : at + PIECE],
                    write=True,
                    done=done,
                    hashed=PIECE,
                )
                for at in range(0, PIECES * PIECE, PIECE)
            ]
            running.submit([Transfer(source, 0, memoryview(room), write=False, done=done), *writes])
            until = monotonic() + 60
            while monotonic() < until and writes[-1].checksum is None:
                sleep(0.001)
            assert [w.checksum for w in writes] == [checksum_of(w.view) for w in writes]
            assert ended.empty()
            assert os.path.getsize(tmp_path / "file") == 0
            os.write(sink, bytes(4096))
            assert [ended.get(timeout=60) for _ in range(PIECES + 1)] == [None] * (PIECES + 1)
            assert (tmp_path / "file").read_bytes() == sent[:]
    finally:
        running.close()
        os.close(source)
        os.close(sink)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in thread_priority.SETATTR,
    reason="only known to Linux on these processors",
)
def test_the_disks_thread_goes_first():
    """Time slices of a tenth of a millisecond for that thread alone, where Linux knows them; no
    worse priority in any case."""
    found = []

    def ask():
        found.append(
            (
                thread_priority.raise_own(),
                slice_of_this_thread(),
                os.getpriority(os.PRIO_PROCESS, 0),
            )
        )

    thread = threading.Thread(target=ask)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread.start()
    thread.join()
    taken, nanoseconds, nice = found[0]
    assert nice <= before
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    release = tuple(map(int, platform.release().split(".")[:2]))
    if taken and release >= (6, 12):
        assert nanoseconds == thread_priority.SLICE != slice_of_this_thread()


def slice_of_this_thread():
    """The answer of sched_getattr, whose number follows that of sched_setattr."""
    number = thread_priority.SETATTR[platform.machine()] + 1
    room = ctypes.create_string_buffer(48)
    assert (
        ctypes.CDLL(None).syscall(
            ctypes.c_long(number), ctypes.c_long(0), room, ctypes.c_long(48), ctypes.c_long(0)
        )
        == 0
    )
    return struct.unpack("<IIQiIQQQ", room.raw)[5]
