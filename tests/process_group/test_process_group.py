"""The backend "commpress": exact by default, and then Gloo's bits, whatever runs over it."""

import gc
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import group_calls
from commpress.backend import ProcessGroup
from commpress.errors import CommunicationError
from group_calls import as_world
from variants import seldom


def assert_same(results, expected):
    for rank, (one, two) in enumerate(zip(results, expected, strict=True)):
        assert len(one) == len(two)
        for i, (a, b) in enumerate(zip(one, two, strict=True)):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"result {i} of rank {rank}"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_equals_gloo(pool, tmp_path, size):
    results, expected = (
        pool.run(as_world, backend, f"{tmp_path}/file", group_calls.every_collective, size=size)
        for backend in ("commpress", "gloo")
    )
    assert_same(results, expected)


@pytest.mark.parametrize(
    ("function", "size"),
    [
        seldom(group_calls.train_ddp, 2),
        (group_calls.train_ddp, 3),
        (group_calls.train_fsdp1, 2),
        (group_calls.train_fsdp2, 2),
        seldom(group_calls.train_fsdp2, 4),
        (group_calls.use_dtensor, 3),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_training_equals_gloo(pool, tmp_path, function, size):
    args = [str(tmp_path)] if function is group_calls.train_fsdp2 else []
    results, expected = (
        pool.run(as_world, backend, f"{tmp_path}/file", function, *args, size=size)
        for backend in ("commpress", "gloo")
    )
    assert_same(results, expected)


# ---------------------------------------------------------------- groups


def describe_groups():
    pair = dist.new_group([0, 2], use_local_synchronization=True) if dist.get_rank() != 1 else None
    world = dist.group.WORLD
    tensor = torch.full((2,), float(dist.get_rank()))
    if pair is not None:
        dist.all_reduce(tensor, group=pair)
        assert type(pair) is ProcessGroup
        assert dist.get_process_group_ranks(pair) == [0, 2]
        assert pair.group_name != world.group_name
    split = world.split_group([1, 2], timedelta(seconds=30))
    if split is not None:
        split.allreduce([tensor]).wait()
    return (
        dist.get_backend(),
        type(world).__name__,
        bool(world.group_name),
        tensor.tolist(),
        split and split.rank(),
    )


@pytest.mark.parametrize("backend", ["commpress", "cpu:commpress,cuda:commpress"])
def test_groups_of_groups(pool, tmp_path, backend):
    seen = pool.run(as_world, backend, f"{tmp_path}/file", describe_groups, size=3)
    assert seen == [
        (backend, "ProcessGroup", True, [2.0, 2.0], None),
        (backend, "ProcessGroup", True, [3.0, 3.0], 0),
        (backend, "ProcessGroup", True, [3.0, 3.0], 1),
    ]


def old_and_new_names():
    group, size = dist.group.WORLD, dist.get_world_size()
    results = []
    for gather in (group._allgather_base, group.all_gather_single):
        out = torch.empty(2 * size)
        gather(out, torch.full((2,), float(group.rank()))).wait()
        results.append(out)
    for scatter in (group._reduce_scatter_base, group.reduce_scatter_single):
        out = torch.empty(2)
        scatter(out, torch.arange(2.0 * size)).wait()
        results.append(out)
    for exchange in (group.alltoall_base, group.all_to_all_single):
        out = torch.empty(size)
        exchange(out, torch.arange(float(size)), [], []).wait()
        results.append(out)
    for gather in (group.allgather_into_tensor_coalesced, group.all_gather_single_coalesced):
        out = torch.empty(size)
        gather([out], [torch.full((1,), float(group.rank()))]).wait()
        results.append(out)
    for scatter in (group.reduce_scatter_tensor_coalesced, group.reduce_scatter_single_coalesced):
        out = torch.empty(1)
        scatter([out], [torch.arange(float(size))]).wait()
        results.append(out)
    results += [t.clone() for t in three_ways_to_give_options(group)]
    return [r.tolist() for r in results]


def three_ways_to_give_options(group):
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    one, two, three = (torch.full((1,), 1.0 + group.rank()) for _ in range(3))
    group.allreduce([one], options).wait()
    group.allreduce(two, dist.ReduceOp.MAX).wait()
    group.allreduce([three], op=dist.ReduceOp.MAX).wait()
    group.broadcast(one, root=0).wait()
    return one, two, three


def test_old_and_new_names_do_the_same(pool, tmp_path):
    for rank, seen in enumerate(
        pool.run(as_world, "commpress", f"{tmp_path}/file", old_and_new_names, size=2)
    ):
        assert seen == [
            [0.0, 0.0, 1.0, 1.0],
            [0.0, 0.0, 1.0, 1.0],
            [4.0 * rank, 4.0 * rank + 2],
            [4.0 * rank, 4.0 * rank + 2],
            [rank, rank],
            [rank, rank],
            [0.0, 1.0],
            [0.0, 1.0],
            [2.0 * rank],
            [2.0 * rank],
            [2.0],
            [2.0],
            [2.0],
        ]


def tensors_kept():
    """Of calls that are over: none, once nobody else holds them."""
    kept = []
    for _ in range(40):
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        kept.append(weakref.ref(tensor))
    del tensor
    deadline = time.monotonic() + 5
    # Gloo's thread lets go of the last one
    while time.monotonic() < deadline and any(ref() is not None for ref in kept):
        gc.collect()
        time.sleep(0.01)
    return sum(ref() is not None for ref in kept)


def test_calls_keep_no_tensors(pool, tmp_path):
    assert pool.run(as_world, "commpress", f"{tmp_path}/file", tensors_kept, size=2) == [0, 0]


def made_and_destroyed():
    """Threads and sockets go with the group, also of one that is only let go."""
    before = set(threading.enumerate())

    def started():
        """Names of threads since then; an older group that is let go of has one for a moment."""
        return sorted(
            t.name for t in set(threading.enumerate()) - before if t.name != "commpress-let-go"
        )

    group = dist.new_group(backend="commpress")
    during = started()
    dist.barrier(group)
    dist.destroy_process_group(group)
    try:
        group.allreduce([torch.ones(1)])
    except CommunicationError as error:
        text = str(error)
    store = dist.PrefixStore("let go", dist.distributed_c10d._get_default_store())
    other = ProcessGroup(
        store, dist.get_rank(), dist.get_world_size(), timeout=timedelta(seconds=20)
    )
    other.barrier().wait()
    del other, group
    gc.collect()
    return during, started(), text


def test_a_group_leaves_nothing_behind(pool):
    for during, after, text in pool.run(made_and_destroyed, size=2):
        assert (during, after) == (["commpress-door", "commpress-guard"], [])
        assert "destroyed" in text
