"""Kernels on the threads of torch, or on threads of their own where torch lets nobody in."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch

from commpress.kernels import cpu_openmp, cpu_threads

openmp = pytest.mark.skipif(cpu_openmp.entry() is None, reason="torch has no OpenMP that lets others in")


@pytest.fixture(params=["torch's", pytest.param("ours", id="ours")])
def threads(request, monkeypatch):
    """Four threads, whatever the machine has."""
    if request.param == "ours":
        monkeypatch.setattr(cpu_openmp, "entry", lambda: None)
    elif cpu_openmp.entry() is None:
        pytest.skip("torch has no OpenMP that lets others in")
    monkeypatch.setattr(cpu_threads, "_PARALLEL_NUMEL", 10)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 1000])
def test_every_block_is_walked_once_and_answers_keep_their_order(threads, blocks):
    seen = np.zeros(blocks, int)

    def walk(array, start, stop):
        array[start:stop] += 1
        return start, stop

    answers = cpu_threads.split(walk, blocks, 10 * blocks, seen)
    assert (seen == 1).all()
    assert len(answers) == min(threads, blocks)
    assert [a for a, _ in answers] == [0, *(b for _, b in answers[:-1])]
    assert answers[-1][1] == blocks


def test_few_elements_stay_on_the_thread_that_asks(threads):
    assert cpu_threads.split(lambda start, stop: threading.get_native_id(), 100, 19) == [threading.get_native_id()]


def test_blocks_are_walked_side_by_side(threads):
    meet = threading.Barrier(threads, timeout=60)
    assert len({*cpu_threads.split(lambda start, stop: meet.wait(), threads, 1000)}) == threads


def test_a_failure_reaches_the_caller_and_harms_no_later_call(threads):
    def fail(start, stop):
        if start:
            raise ValueError(f"block {start}")

    with pytest.raises(ValueError, match=r"block [123]"):
        cpu_threads.split(fail, 4, 1000)
    assert cpu_threads.split(lambda start, stop: start, 4, 1000) == [0, 1, 2, 3]


def test_an_interrupt_reaches_the_caller(threads):
    def interrupt(start, stop):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cpu_threads.split(interrupt, 4, 1000)


def test_many_callers_at_once(threads):
    answers = {}

    def ask(k):
        for _ in range(50):
            answers[k] = cpu_threads.split(lambda start, stop: (k, start), 4, 1000)

    callers = [threading.Thread(target=ask, args=(k,)) for k in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert answers == {k: [(k, start) for start in range(4)] for k in range(6)}


@openmp
def test_they_are_the_threads_that_torch_has_started(threads, monkeypatch):
    torch.ones(1 << 20).add_(1)
    before, meet = tasks(), threading.Barrier(threads, timeout=60)

    def walk(start, stop):
        meet.wait()
        return str(threading.get_native_id())

    used = set(cpu_threads.split(walk, threads, 1000))
    assert len(used) == threads
    assert used <= before
    two = set(cpu_threads.split(lambda start, stop: (time.sleep(0.01), str(threading.get_native_id()))[1], 2, 1000))
    assert two <= before
    torch.ones(1 << 20).add_(1)
    assert before == tasks()  # nobody was sent home and started again


@openmp
def test_a_team_that_stays_small_does_all_the_work():
    code = (
        "import threading, torch; from commpress.kernels import cpu_openmp\n"
        "jobs = [threading.get_native_id] * 5\n"
        "assert cpu_openmp.together(jobs, 4) == [threading.get_native_id()] * 5"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_THREAD_LIMIT": "1"})
