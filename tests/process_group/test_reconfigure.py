"""Groups of which somebody else names the members, as torch 2.14 and later let a manager do;
refused clearly before."""

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import CommunicationError, InvalidArgument, PeerFailure
from commpress.integrations.process_group.group import ProcessGroup
from commpress.torch_private import RECONFIGURES
from ranks import caught

needs_reconfigure = pytest.mark.skipif(
    not RECONFIGURES, reason="torch can give a group other ranks from 2.14 on"
)
LAST = 2  # of three
SECONDS = 20.0


class Manager:
    """A manager that knows torch's interface only: members meet in files, round by round."""

    def __init__(self, folder):
        self.rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group(
            "commpress",
            init_method=f"file://{folder}/unused",
            rank=self.rank,
            world_size=3,
            timeout=timedelta(seconds=SECONDS),
            enable_reconfigure=True,
        )
        self.notes = dist.FileStore(f"{folder}/notes", -1)
        self.tell("handle", dist._get_reconfigure_handle())

    def tell(self, key, text):
        self.notes.set(f"{key}/{self.rank}", text)

    def hear(self, key, rank):
        return self.notes.get(f"{key}/{rank}").decode()

    def handles(self, ranks):
        return [self.hear("handle", rank) for rank in ranks]

    def form(self, uuid, ranks, *, kind=list, seconds=SECONDS):
        work = dist._reconfigure(
            uuid, kind(self.handles(ranks)), timeout=timedelta(seconds=seconds)
        )
        assert work.wait()
        assert work.is_completed()
        assert dist.get_world_size() == len(ranks)


def summed():
    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(x)
    return x[0].item()


def shrink_and_grow(folder):
    manager = Manager(folder)
    rank, group = manager.rank, dist.group.WORLD
    assert dist._supports_reconfigure()
    assert "dist._reconfigure(uuid, handles)" in str(caught(dist.all_reduce, torch.ones(1)))
    assert isinstance(caught(dist.barrier), CommunicationError)
    backend = dist.get_backend_impl(group, torch.device("cpu"))
    manager.form(11, [0, 1, 2])
    assert (dist.get_rank(), summed()) == (rank, 6)
    heard, ring = torch.zeros(1), [(rank + 1) % 3, (rank - 1) % 3]
    works = [
        backend.send([torch.ones(1) * rank], ring[0], 0),
        backend.recv([heard], ring[1], 0),
    ]
    assert all(work.wait() for work in works)
    assert heard == ring[1], "what was handed out before goes on with the members of now"
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = commpress.compress(model, "sign", min_numel=1)
    for _ in range(2):  # DDP broadcasts its new buckets in the second step
        model(torch.ones(1, 64) * rank).sum().backward()
    if rank != LAST:
        manager.form(12, [0, 1])
        assert group.change.sources == (0, 1)
        assert group.change.lost == (LAST,)
        assert (state.channel.size, summed()) == (2, 3)
        error = caught(dist._reconfigure, 12, manager.handles([0, 1]))
        assert isinstance(error, RuntimeError)
        assert "present group already has" in str(error)
        assert summed() == 3, "what is refused leaves the group as it is"
        model(torch.ones(1, 64)).sum().backward()
        manager.tell("shrunk", "")
    else:
        for other in (0, 1):
            manager.hear("shrunk", other)
        assert isinstance(caught(dist.all_reduce, torch.ones(1)), CommunicationError), (
            "the others have gone on"
        )
    manager.form(13, [2, 1, 0], kind=set)
    assert group.change.sources == (0, 1, None), "a set leaves survivors before newcomers"
    assert (dist.get_rank(), summed(), state.channel.size) == (rank, 6, 3)
    manager.form(14, [2, 0, 1])
    assert (dist.get_rank(), group.change.sources) == ([1, 2, 0][rank], (2, None, None)), (
        "a list is in its order"
    )
    assert summed() == 6
    model.zero_grad()
    model(torch.ones(1, 64)).sum().backward()
    grads = [torch.zeros(64, 64) for _ in range(3)]
    dist.all_gather(grads, model.module.weight.grad)
    return all(torch.equal(grads[0], each) for each in grads)


@needs_reconfigure
def test_a_manager_forms_shrinks_and_grows_a_group(mortal, tmp_path):
    assert mortal.run(shrink_and_grow, str(tmp_path), size=3) == [True] * 3


def who_is_missing(folder):
    """All but the last come, which runs but does not, and then is dead."""
    manager = Manager(folder)
    own = dist._get_reconfigure_handle()
    for handles, what in (
        (["nonsense"], "handles has 'nonsense'"),
        ([], "does not include this member's own"),
        ([own, own], "each member once"),
    ):
        error = caught(dist._reconfigure, 20, handles)
        assert isinstance(error, InvalidArgument)
        assert what in str(error)
    assert "hints" in str(caught(dist._reconfigure, 20, [own], hints={"a": "b"}))
    manager.form(20, [manager.rank])
    assert summed() == 1
    manager.form(21, [0, 1, 2])
    if manager.rank == LAST:
        manager.hear("named", 0)
        manager.hear("named", 1)
        os.kill(os.getpid(), signal.SIGKILL)
    errors = [_missing(manager, 22, [0, 1, 2], 2.0)]
    assert summed_error()
    different = [[0, 1], [0, 1, 2]][manager.rank]
    mixed = caught(manager.form, 23, different, seconds=5)
    assert isinstance(mixed, InvalidArgument)
    assert "different handles" in str(mixed)
    manager.tell("named", "")
    errors += [_missing(manager, 24, [0, 1, 2], 10.0), _missing(manager, 25, [2, 0, 1], 10.0)]
    manager.form(26, [0, 1])
    assert summed() == 3
    return errors


def summed_error():
    """After a group was not formed nobody is in the old one."""
    return isinstance(caught(dist.all_reduce, torch.ones(1)), CommunicationError)


def _missing(manager, uuid, ranks, seconds):
    began = time.monotonic()
    error = caught(manager.form, uuid, ranks, seconds=seconds)
    assert isinstance(error, PeerFailure), error
    assert time.monotonic() < began + seconds + 1
    return error.ranks


@needs_reconfigure
def test_a_member_that_does_not_come_is_named_in_time(mortal, tmp_path):
    outcomes = mortal.outcomes(who_is_missing, str(tmp_path), size=3, lost=[LAST])
    assert outcomes == [[(2,), (2,), (0,)]] * 2 + [None], outcomes


@pytest.mark.skipif(RECONFIGURES, reason="this torch can give a group other ranks")
def test_torch_before_is_refused_clearly():
    group = ProcessGroup(dist.HashStore(), 0, 1)
    assert group.supports_reconfigure is False
    for call in (
        lambda: group.reconfigure(SimpleNamespace(handles=[])),
        group.get_reconfigure_handle,
    ):
        error = caught(call)
        assert isinstance(error, InvalidArgument)
        assert "needs torch 2.14 or later" in str(error)
        assert "group.reform()" in str(error)
