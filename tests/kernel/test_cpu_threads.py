"""Kernels on the threads of torch, or on threads of their own where torch lets nobody in."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from commpress.kernels.cpu import calls
from commpress.kernels.cpu.calls import Frames

openmp = pytest.mark.skipif(calls.entry() is None, reason="torch has no OpenMP that lets others in")


@pytest.fixture(params=["torch's", pytest.param("ours", id="ours")])
def threads(request, monkeypatch):
    """Four threads, whatever the machine has."""
    if request.param == "ours":
        monkeypatch.setattr(calls, "entry", lambda: None)
    elif calls.entry() is None:
        pytest.skip("torch has no OpenMP that lets others in")
    monkeypatch.setattr(calls, "_PARALLEL_NUMEL", 10)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


class Kernel:
    """A Python function of start and stop in place of a compiled kernel; it returns a number, or
    fails if that is None."""

    def __init__(self, walk):
        def call(frame):
            slots = (ctypes.c_int64 * 4).from_address(frame)
            result = walk(*slots[:2])
            slots[2:] = [result is None, result or 0]

        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call)

    def __call__(self, *part):
        frames = self.frames((), [part])
        frames.run(0)
        return frames.results()[0]

    def frames(self, args, parts):
        assert args == ()
        slots = b"".join(np.array([*part, 0, 0], np.int64).tobytes() for part in parts)
        return Frames(self.call, ctypes.create_string_buffer(slots, len(slots)), 32, len(parts))


def split(walk, blocks, numel):
    return calls.split(Kernel(walk), blocks, numel)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 1000])
def test_every_block_is_walked_once_and_answers_keep_their_order(threads, blocks):
    seen = np.zeros(blocks, int)

    def walk(start, stop):
        seen[start:stop] += 1
        return 10_000 * start + stop

    answers = [divmod(answer, 10_000) for answer in split(walk, blocks, 10 * blocks)]
    assert (seen == 1).all()
    assert len(answers) == min(threads, blocks)
    assert [a for a, _ in answers] == [0, *(b for _, b in answers[:-1])]
    assert answers[-1][1] == blocks


def test_few_elements_stay_on_the_thread_that_asks(threads):
    assert split(lambda start, stop: threading.get_native_id(), 100, 19) == [
        threading.get_native_id()
    ]


def test_blocks_are_walked_side_by_side(threads):
    meet = threading.Barrier(threads, timeout=60)
    assert len({*split(lambda start, stop: meet.wait(), threads, 1000)}) == threads


def test_a_failure_reaches_the_caller_and_harms_no_later_call(threads):
    with pytest.raises(MemoryError, match="a kernel failed"):
        split(lambda start, stop: None if start == 2 else start, 4, 1000)
    assert split(lambda start, stop: start, 4, 1000) == [0, 1, 2, 3]


def test_many_callers_at_once(threads):
    answers = {}

    def ask(k):
        for _ in range(50):
            answers[k] = split(lambda start, stop: 10 * k + start, 4, 1000)

    callers = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert answers == {k: [10 * k + start for start in range(4)] for k in range(6)}


@openmp
@pytest.mark.parametrize("threads", ["torch's"], indirect=True)
def test_they_are_the_threads_that_torch_has_started(threads, monkeypatch):
    torch.ones(1 << 20).add_(1)
    before, meet = tasks(), threading.Barrier(threads, timeout=60)

    def walk(start, stop):
        meet.wait()
        return threading.get_native_id()

    used = {str(thread) for thread in split(walk, threads, 1000)}
    assert len(used) == threads
    assert used <= before
    two = {
        str(t)
        for t in split(
            lambda start, stop: (time.sleep(0.01), threading.get_native_id())[1], 2, 1000
        )
    }
    assert two <= before
    torch.ones(1 << 20).add_(1)
    assert before == tasks()  # nobody was sent home and started again


@openmp
def test_a_team_that_stays_small_does_all_the_work():
    code = """
import threading, torch
from commpress.kernels.cpu import calls
from test_cpu_threads import split
calls._PARALLEL_NUMEL = 10
torch.set_num_threads(4)
own = threading.get_native_id
assert split(lambda start, stop: own(), 5, 1000) == [own()] * 4
"""
    folder = os.path.dirname(__file__)
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {folder!r}); " + "exec(sys.argv[1])",
        code,
    ]
    subprocess.run(command, check=True, env=os.environ | {"OMP_THREAD_LIMIT": "1"})
