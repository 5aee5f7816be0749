"""The backend "commpress_mpi": the group of ``test_process_group`` with MPI inside has Gloo's bits,
whatever runs over it.

What compresses by itself (hooks, optimizers, exchanges) finds the group's MPI too: some of its own
tests run here again.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import group_calls
import test_ddp
import test_expert_exchange
import test_fsdp_checkpoint
import test_group_options
import test_optim_gloo
import test_partitioned
from commpress.backend import GroupOptions
from commpress.collectives.transports.mpi import MpiTransport
from commpress.errors import InvalidArgument, Mismatch
from mpi_world import MpiWorld
from ranks import caught
from test_process_group import assert_same, describe_groups, old_and_new_names
from variants import first


@pytest.fixture(scope="module")
def over_mpi(job, tmp_path_factory):
    return MpiWorld(job, tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="module")
def over_gloo(job, tmp_path_factory):
    return MpiWorld(job, tmp_path_factory.mktemp("gloo"), "gloo")


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("size", first(1, [3, 2, 4]))
def test_every_collective_equals_gloo(over_mpi, over_gloo, size):
    assert_same(
        *(pool.run(group_calls.every_collective, size=size) for pool in (over_mpi, over_gloo))
    )


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (group_calls.train_ddp, 3),
        (group_calls.train_fsdp1, 2),
        (group_calls.train_fsdp2, 4),
        (group_calls.use_dtensor, 3),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_training_equals_gloo(over_mpi, over_gloo, tmp_path, function, size):
    args = [str(tmp_path)] if function is group_calls.train_fsdp2 else []
    assert_same(*(pool.run(function, *args, size=size) for pool in (over_mpi, over_gloo)))


def odd_tensors():
    """Tensors that are not simply contiguous numbers in memory of their own."""
    made, rank, size = group_calls.Numbers(), dist.get_rank(), dist.get_world_size()
    results = []
    for x in (
        made(3, 4).t(),
        made(1)[0],
        made(0, 3),
        made(5).to(torch.complex64),
        made(6) > 0,
        made(300, 300).half(),
    ):
        for root in range(size):
            y = x.clone()
            dist.broadcast(y, root)
            results.append(y)
        if x.dtype != torch.bool:
            y = x.contiguous().clone()
            dist.all_reduce(y)
            results.append(y)
        if x.is_contiguous():
            rows = [torch.empty_like(x) for _ in range(size)]
            dist.all_gather(rows, x)
            results += rows
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR, dist.ReduceOp.MIN):
        x = made(70_000).to(torch.int32)
        dist.all_reduce(x, op)
        results.append(x)
    for numel in (5, 700_001):  # short, and in several segments
        x = made(numel)
        dist.reduce(x, size - 1)
        results.append(x if rank == size - 1 else x[:0])
        x = made(numel)
        dist.all_reduce(x)
        results.append(x)
    # other rows, and another number of them, on every rank
    x = (made(6, 3) * (made(6, 1) > rank)).to_sparse(1)
    dist.all_reduce(x)
    results.append(x.to_dense())
    with torch.inference_mode():
        x = made(3)
        dist.all_reduce(x)
        results.append(x.clone())
    return [r.clone() for r in results]


def test_odd_tensors_equal_gloo(over_mpi, over_gloo):
    assert_same(*(pool.run(odd_tensors, size=3) for pool in (over_mpi, over_gloo)))


def test_old_and_new_names_do_the_same(over_mpi, over_gloo):
    assert over_mpi.run(old_and_new_names)[1][2] == [4.0, 6.0]


def refused():
    rank, size = dist.get_rank(), dist.get_world_size()
    group, said = dist.group.WORLD, []
    for call in (
        # room for four
        lambda: group.all_gather_single(torch.empty(size * 3 + size), torch.empty(3)).wait(),
        lambda: group.allgather([[torch.empty(2)] * size], [torch.empty(3)]).wait(),
        lambda: group.allgather(
            [[torch.empty(3, dtype=torch.int8)] * size], [torch.empty(3)]
        ).wait(),
        lambda: group.all_to_all_single(
            torch.empty(2 * size)[::2], torch.empty(size), [], []
        ).wait(),
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), dist.ReduceOp.MAX),
        lambda: dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.AVG),
    ):
        with pytest.raises(InvalidArgument) as error:
            call()
        said.append(str(error.value))
    dist.barrier()
    return rank, said


def test_what_does_not_fit_is_refused_and_nothing_moves(over_mpi):
    for _, said in over_mpi.run(refused):
        assert "of the same length and dtype" in said[1]
        assert "convert them to dense" in said[4]


# ---------------------------------------------------------------- groups, threads, order


def test_groups_of_groups(over_mpi):
    assert over_mpi.run(groups_over_mpi, size=3) == [
        ("commpress_mpi", "ProcessGroup", True, [x, x], rank)
        for x, rank in ((2.0, None), (3.0, 0), (3.0, 1))
    ]


def groups_over_mpi():
    assert dist.group.WORLD.communicator is not None
    return describe_groups()


def many_at_once():
    """Long and short ones under way together, waited for in another order on every rank; futures
    with nobody waiting."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((n,), float(rank + i)) for i, n in enumerate((3, 500_000, 7, 60_000) * 4)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in works if rank else reversed(works):
        work.wait()
    assert [t.unique().tolist() for t in tensors] == [
        [sum(r + i for r in range(size))] for i in range(len(tensors))
    ]
    rows = [torch.empty(5) for _ in range(size)]
    future = dist.all_gather(rows, torch.full((5,), float(rank)), async_op=True).get_future()
    done = torch.futures.Future()
    future.add_done_callback(lambda f: done.set_result(len(f.value())))
    assert done.wait() == size
    return [int(r[0]) for r in rows]


def test_many_calls_at_once(over_mpi):
    assert over_mpi.run(many_at_once, size=3) == [[0, 1, 2]] * 3


def monitored():
    dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
    return True


def test_a_monitored_barrier(over_mpi):
    assert over_mpi.run(monitored, size=3) == [True] * 3


# ---------------------------------------------------------------- disagreement and silence


def disagree_and_rebuild():
    """A longer message never meets a shorter receive: Open MPI would write past its end."""
    store = dist.distributed_c10d._get_default_store()
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(torch.ones(5))
    errors = [
        caught(dist.broadcast, torch.ones(3_000_000 if rank == 1 else 1000), 1),
        caught(dist.all_reduce, torch.ones(5)),
    ]
    dist.destroy_process_group()
    dist.init_process_group(
        "commpress_mpi", store=dist.PrefixStore("again", store), rank=rank, world_size=size
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    return errors, float(total)


def test_disagreement_is_named_and_the_job_goes_on(over_mpi):
    """Rank 1 differs from both others, and names those it has heard by then."""
    for rank, (errors, total) in enumerate(over_mpi.run(disagree_and_rebuild, size=3)):
        named = [(0, 2), (0,), (2,)] if rank == 1 else [(1,)]
        assert all(type(e) is Mismatch and e.ranks in named for e in errors), errors
        assert total == 3.0


# ---------------------------------------------------------------- what compresses by itself


def kind_of_transport():
    from commpress.collectives.transports.factory import own_transport

    transport = own_transport()
    return type(transport) is MpiTransport and transport.timeout == dist.group.WORLD.timeout


def test_own_transports_are_of_the_groups_mpi(over_mpi):
    assert over_mpi.run(kind_of_transport) == [True, True]


@pytest.mark.parametrize(("codec", "size"), [("sign", 3), ("int8", 2)])
def test_the_hook(over_mpi, codec, size):
    test_ddp.check(over_mpi, test_ddp.Plan(codec), size)


def test_optimizers(over_mpi):
    test_optim_gloo.test_gloo_equals_the_simulation(over_mpi, test_optim_gloo.zero_one, 3)


def test_a_sharded_optimizer_and_its_checkpoint(over_mpi, tmp_path):
    test_optim_gloo.test_distributed_checkpoints_continue_in_every_bit(
        over_mpi, tmp_path, test_optim_gloo.sharded
    )


def test_partitioned_weights(over_mpi):
    plan = test_partitioned.Plan(steps=20, accumulate=2, max_norm=0.5)
    test_partitioned.test_equals_ddp_with_clipping_and_accumulation(over_mpi, plan, 2, 3)
    test_partitioned.test_what_the_codec_leaves_out_is_kept(over_mpi)


@pytest.mark.parametrize("nodes", [None, test_expert_exchange.NODES], ids=["flat", "nodes"])
def test_experts(over_mpi, nodes):
    test_expert_exchange.test_the_gradient_travels_back(over_mpi, nodes, "bf16", "int8", False)


def test_fsdp2(over_mpi):
    test_fsdp_checkpoint.test_nothing_of_a_gradient_is_lost(over_mpi, "int4")


def test_the_options(over_mpi, pool, tmp_path):
    options = GroupOptions("sign", min_numel=100)
    seen = over_mpi.run(test_group_options.backwards, dist.ReduceOp.SUM, pg_options=options, size=3)
    expected = pool.run(
        test_group_options.run_backwards, f"{tmp_path}/file", False, options, size=3
    )
    for (mine, counters), (theirs, counted) in zip(seen, expected, strict=True):
        assert counters == counted
        for one, two in zip(mine, theirs, strict=True):
            assert all(
                torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
                for a, b in zip(one, two, strict=True)
            )
