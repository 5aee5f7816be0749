"""Scripts that end right after a collective end: process groups are kept beyond the models that use
them."""

import gc
import subprocess
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
import group_calls
import sources
from commpress.collectives.transports.torch import outlive, outliving


class Group:
    """Something that can be kept."""


def test_a_group_is_kept_until_another_comes_after_it_is_in_use_no_more(monkeypatch):
    monkeypatch.setattr("commpress.collectives.transports.torch._kept", [])
    first, used = Group(), [True]
    gone = weakref.ref(first)
    outlive(first, lambda: used[0])
    outlive(first, lambda: used[0])
    assert outliving() == [first]
    del first
    outlive(Group(), lambda: True)
    gc.collect()
    assert gone() is not None, "still in use"
    used[0] = False
    gc.collect()
    assert gone() is not None, "nobody else has come"
    outlive(Group(), lambda: True)
    gc.collect()
    assert gone() is None
    assert len(outliving()) == 2


def kept_by(what):
    """Two answers: does the group live on in Python after it was destroyed, and the model with it;
    and what another changes."""
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks)
    model = torch.nn.Linear(16, 16)
    ddp = DistributedDataParallel(model, process_group=group)
    if what == "hook":
        commpress.compress(ddp)
    else:
        commpress.overlap(
            ddp, commpress.OneBitAdam(model.parameters(), exact_steps=1, process_group=group)
        )
    ddp(torch.ones(2, 16)).sum().backward()
    dist.destroy_process_group(group)
    del ddp, model
    found = any(each is group for each in outliving())
    commpress.CompressedState()
    return found, any(each is group for each in outliving())


@pytest.mark.parametrize("what", ["hook", "optimizer"])
def test_the_group_of_a_model_is_kept(pool, what):
    assert pool.run(kept_by, what) == [(True, False)] * 2


def below_the_backend():
    inner = dist.group.WORLD._get_backend(torch.device("cpu"))
    return any(each is inner for each in outliving())


def in_the_backend(file):
    return group_calls.as_world("commpress", file, below_the_backend)


def test_the_group_below_the_backend_is_kept(pool, tmp_path):
    assert pool.run(in_the_backend, str(tmp_path / "meeting")) == [True, True]


def ends(what, runs):
    command = [sys.executable, str(sources.SUPPORT / "exit_ranks.py"), what, str(runs)]
    result = subprocess.run(command, text=True, capture_output=True, timeout=10 + 200 * runs)
    return result.stdout.split("\n")[:-1], result.stderr[-2000:]


@pytest.mark.slow  # that groups are kept: the tests above
@pytest.mark.parametrize("what", ["optimizer", "hook", "backend"])
def test_forked_ranks_end(compiled, what):
    lines, said = ends(what, 1)
    assert lines == [f"{what} well"], said
