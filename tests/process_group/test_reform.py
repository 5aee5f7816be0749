"""Groups of the backend "commpress" that lose ranks, gain some, and go on in the same processes
with the same objects."""

import gc
import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.collectives.agreement import gathered
from commpress.collectives.channel import Channel
from commpress.errors import CommunicationError, Excluded, InvalidArgument, PeerFailure
from commpress.integrations.process_group.reform import MEMBERS, check_reform
from group_calls import as_world, every_collective
from ranks import caught

SECONDS = 20.0
LAST = 2  # the rank that dies, of three


def world():
    group = dist.group.WORLD
    assert group is not None
    return group


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def everything_works(expected_sources):
    """All that torch does among the ranks that are there now."""
    rank, size = dist.get_rank(), dist.get_world_size()
    assert size == len(expected_sources)
    assert dist.get_process_group_ranks(world()) == list(range(size))
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x)
    assert x.tolist() == [size * (size + 1) / 2] * 3
    told = [None] * size
    dist.all_gather_object(told, ("rank", rank))
    assert told == [("rank", each) for each in range(size)]
    dist.barrier()
    assert functional.all_reduce(torch.ones(2), "sum", world()).tolist() == [size] * 2
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), float(rank))).sum().backward()
    assert model.module.weight.grad.tolist() == [[(size - 1) / 2] * 4], (
        "C++ must divide by the ranks of now"
    )
    norm = DistributedDataParallel(torch.nn.BatchNorm1d(4))
    norm(torch.randn(8, 4) + rank).sum().backward()
    norm(torch.randn(8, 4) + rank)
    mesh = init_device_mesh("cpu", (size,))
    assert mesh.mesh.tolist() == list(range(size))
    if size > 1:
        pair = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            y = torch.ones(1)
            dist.all_reduce(y, group=pair)
            assert y.item() == 2
    results = every_collective()
    assert all(isinstance(each, torch.Tensor) for each in results)


def lose_one(file):
    def run():
        group = world()
        pair, some = dist.new_group([0, LAST]), dist.new_group([0, 1])
        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        state = commpress.compress(model, "sign", min_numel=1)
        channel = Channel.among()
        model(torch.ones(1, 64)).sum().backward()
        if dist.get_rank() == LAST:
            die()
        first = caught(dist.all_reduce, torch.ones(1))
        assert isinstance(first, PeerFailure)
        assert first.ranks == (LAST,)
        again = caught(dist.all_reduce, torch.ones(1))
        assert "Call group.reform() to continue with the remaining ranks" in str(again)
        change = group.reform(report=bytes([dist.get_rank()]))
        assert change == group.change
        assert (change.epoch, change.sources, change.lost, change.reports) == (
            1,
            (0, 1),
            (LAST,),
            (b"\0", b"\1"),
        )
        for old in [some] if pair is dist.GroupMember.NON_GROUP_MEMBER else [pair, some]:
            assert isinstance(
                caught(dist.all_reduce, torch.ones(1), group=old), (CommunicationError, ValueError)
            )
        everything_works(change.sources)
        assert (channel.rank, channel.size, channel.take()) == (dist.get_rank(), 2, 0)
        told = channel.run(gathered([float(channel.rank)], transport=channel.transport, sequence=0))
        assert told[:, 0].tolist() == [0.0, 1.0]
        model.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        total = [torch.zeros(64, 64) for _ in range(2)]
        dist.all_gather(total, model.module.weight.grad)
        assert torch.equal(*total)
        assert state.channel.size == 2
        return True

    return as_world("commpress", file, run, seconds=SECONDS)


def test_survivors_go_on_with_the_same_group(mortal, tmp_path):
    outcomes = mortal.outcomes(lose_one, str(tmp_path / "file"), size=3, lost=[LAST])
    assert outcomes == [True, True, None], outcomes


def come_and_go(folder, rounds):
    """Ranks 0 and 1 begin, the last one is alone and joins them; then they reform again and
    again."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/members", -1)
    alone = rank == LAST
    dist.init_process_group(
        "commpress",
        store=dist.HashStore() if alone else dist.FileStore(f"{folder}/first", 2),
        rank=0 if alone else rank,
        world_size=1 if alone else 2,
        timeout=timedelta(seconds=SECONDS),
    )
    group = world()
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = commpress.compress(model, "sign", min_numel=1)
    if alone:
        change = group.reform(join=store)
    else:
        group.announce(store)
        while not any_waits(group):
            time.sleep(0.01)
        change = group.reform(age=3)
    assert change.sources == (0, 1, None)
    assert dist.get_rank() == rank
    everything_works(change.sources)
    model(torch.ones(1, 64)).sum().backward()
    grads = [torch.zeros(64, 64) for _ in range(3)]
    dist.all_gather(grads, model.module.weight.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    gc.collect()
    before = threads_and_files()
    for number in range(rounds):
        assert group.reform(report=bytes([rank])).epoch == number + 2
        assert group.size() == 3
        error = caught(dist.barrier)  # a rank that is through reforms, while another is still in it
        assert error is None or isinstance(error, CommunicationError)
    gc.collect()
    after = threads_and_files()
    assert group.reform().size == 3
    return state.channel.size, before, after


def any_waits(group):
    """On both ranks alike."""
    waits = torch.tensor([float(group.waiting)])
    dist.all_reduce(waits)
    return waits.item() > 0


def threads_and_files():
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )


def test_a_newcomer_becomes_a_member_and_reforms_leave_nothing_behind(mortal, tmp_path):
    for size, before, after in mortal.run(come_and_go, str(tmp_path), 6, size=3):
        assert size == 3
        assert all(later <= earlier + 8 for earlier, later in zip(before, after, strict=True)), (
            before,
            after,
        )


def keep_out(folder):
    """Rank 2 is alone and knocks; the others reform twice, and take it in the second time."""
    rank, contact = dist.get_rank(), Path(folder, "contact")
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{rank // 2}", -1)
    limit = timedelta(seconds=SECONDS)
    dist.init_process_group(
        "commpress", store=store, rank=rank % 2, world_size=1 if rank == 2 else 2, timeout=limit
    )
    group = world()
    if rank == 2:
        while not (contact.exists() and contact.read_text()):
            time.sleep(0.01)
        return [group.reform(join=contact.read_text()).size]
    if rank == 0:
        contact.write_text(group.contact)
        while not group.waiting:
            time.sleep(0.01)
    dist.barrier()
    sizes = [group.reform(admit=False).size, group.reform().size]
    assert group.size() == 3
    return sizes


def test_newcomers_wait_where_they_are_not_admitted(pool, tmp_path):
    assert pool.run(keep_out, str(tmp_path), size=3) == [[2, 3], [2, 3], [3]]


def lose_hosts(folder):
    """The host of the first store dies, then that of the next epoch's; a second store has always
    known the members."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    notes, members = dist.FileStore(f"{folder}/notes", -1), dist.FileStore(f"{folder}/members", -1)
    port = 0 if rank == 0 else int(notes.get("port"))
    hosted = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    notes.set("port", str(hosted.port))
    dist.init_process_group(
        "commpress", store=hosted, rank=rank, world_size=3, timeout=timedelta(seconds=SECONDS)
    )
    group = world()
    group.announce(members)
    dist.barrier()
    for host in (0, 1):
        if rank == host:
            die()
        assert isinstance(caught(dist.barrier), PeerFailure)
        change = group.reform()
        assert (change.lost, change.sources) == ((0,), tuple(range(1, change.size_before)))
        if group.size() > 1:
            everything_works(change.sources)
        told = json.loads(members.get(MEMBERS))
        assert told["epoch"] == host + 1
        assert len(told["contacts"]) == group.size()
        assert told["contacts"][group.rank()] == group.contact
    return group.size()


@pytest.mark.slow
def test_hosts_of_stores_may_die(mortal, tmp_path):
    assert mortal.outcomes(lose_hosts, str(tmp_path), size=3, lost=[0, 1]) == [None, None, 1]


def until_stopped(pid):
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)


def stop_one(folder):
    """The last one stops, the others go on; it wakes, is told so, and joins them again."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "commpress",
        init_method=f"file://{folder}/first",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=5),
    )
    group = world()
    notes = dist.FileStore(f"{folder}/notes", -1)
    plain = dist.new_group([0, 1, LAST], backend="gloo", timeout=timedelta(seconds=40))
    dist.barrier()
    if rank == LAST:
        notes.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        assert isinstance(caught(dist.all_reduce, torch.ones(1)), CommunicationError)
        error = caught(group.reform, age=4)
        assert isinstance(error, Excluded)
        change = group.reform(join=error.contact, age=4)
    else:
        until_stopped(int(notes.get("pid")))  # a barrier ends here before it ends there
        waits = dist.all_reduce(torch.ones(1), group=plain, async_op=True)
        del plain
        assert group.reform(age=4).lost == (LAST,)
        assert not waits.is_completed(), (
            "no reform waits for calls of Gloo, which nothing ends before their time"
        )
        if rank == 0:
            os.kill(int(notes.get("pid")), signal.SIGCONT)
        while not any_waits(group):
            time.sleep(0.01)
        change = group.reform(age=5)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 3
    return change.sources


def test_one_that_was_stopped_is_refused_and_may_join_again(mortal, tmp_path):
    assert mortal.run(stop_one, str(tmp_path), size=3) == [(0, 1, None)] * 3


def refuse():
    group = world()
    for wrong, what in (
        ({"timeout": 3}, "timeout"),
        ({"report": "words"}, "report"),
        ({"age": -1}, "age"),
        ({"minimum": None}, "minimum"),
        ({"admit": 1}, "admit"),
        ({"join": "10.0.0.1:80"}, "join"),
        ({"join": "10.0.0.1:80#" + "z" * 32}, "join"),
    ):
        error = caught(group.reform, **wrong)
        assert isinstance(error, InvalidArgument), error
        assert str(error).startswith(what)
    some = dist.new_group([0, 1])
    error = caught(some.reform)
    assert isinstance(error, InvalidArgument)
    assert "only the default group can reform" in str(error)
    return True


def test_what_cannot_be_is_refused_before_anything_is_stopped(pool, tmp_path):
    assert pool.run(as_world, "commpress", str(tmp_path / "file"), refuse) == [True, True]


def test_over_mpi_a_group_keeps_its_ranks():
    """Open MPI ends the whole job with a rank unless it was started to survive that."""
    group = SimpleNamespace(communicator=object())
    with pytest.raises(
        InvalidArgument,
        match=r"MPI ends the whole job.*mpirun --with-ft ulfm.*use the backend 'commpress'",
    ):
        check_reform(group, None, b"", 0, 1, None)
