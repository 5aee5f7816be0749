"""Replicas are found whatever of them the program has named, also while other threads make
objects."""

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commpress.integrations.elastic.exact_means import replicas_of


def found_by_name():
    group, plain, deep = (
        dist.group.WORLD,
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))),
    )
    first, second, _ = (DistributedDataParallel(each) for each in (plain, deep, nn.Linear(2, 2)))
    tied = nn.Module()
    tied.weight = plain.weight
    cases = {
        "inside": ([plain], [first]),
        "deep inside": ([deep[1][0]], [second]),
        "itself": ([second], [second]),
        "compiled": ([torch.compile(first)], [first]),
        "both": ([plain, deep], [first, second]),
        "tied": ([tied], [first]),
        "another": ([nn.Linear(2, 2)], []),
    }
    wrong = [
        name
        for name, (named, wanted) in cases.items()
        if {*map(id, replicas_of(named, group))} != {*map(id, wanted)}
    ]
    return wrong, replicas_of([plain], None)


def test_replicas_around_and_inside_are_found(pool):
    assert pool.run(found_by_name, size=1) == [([], [])]


@pytest.fixture
def impatient():
    """Threads take turns more often."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(usual)


def test_other_threads_may_make_objects_meanwhile(impatient):
    """A tuple that is being made from a generator cannot be finished while a list of all objects
    holds it."""
    failed, over, model = [], threading.Event(), nn.Linear(2, 2)

    def tuples():
        while not over.is_set():
            try:
                tuple(each for each in range(20_000))
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=tuples) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(8):
        replicas_of([model], None)
    over.set()
    for thread in threads:
        thread.join()
    assert not failed
