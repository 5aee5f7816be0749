"""Local updates between two nodes of two ranks, with each kind of inner optimizer: equal to one
plain rank a node."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.errors import InvalidArgument
from commpress.optim.onebit_adam import ShardedOneBitAdam
from local_twin import equal, options_of
from ranks import caught
from small_store import open_store

ADAM = {"lr": 1e-2, "foreach": False}


def model(dtype=torch.float32):
    """Rows of 48, 16, 3 and 1 over two ranks: even, uneven, and nothing for the second."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(32, 48),
        torch.nn.ReLU(),
        torch.nn.Linear(48, 16),
        torch.nn.Linear(16, 3),
        torch.nn.Linear(3, 1),
    ]
    return torch.nn.Sequential(*layers).to(dtype)


def trained(net, inner, node, options, *, steps=9):
    """Both ranks of a node see the node's batch: its mean gradient is that of one rank, in every
    bit."""
    options = {"every": 3, "codec": None, "outer": commpress.Nesterov(), "min_numel": 0} | options
    local = commpress.LocalUpdates(inner, **options_of(**options))
    dtype = next(net.parameters()).dtype
    for step in range(steps):
        draw = torch.Generator().manual_seed(10 * step + node)
        net(torch.randn(8, 32, generator=draw).to(dtype)).float().square().mean().backward()
        local.step()
        local.zero_grad()
    local.drain()
    local.close()
    return local


def groups():
    """(of this node, between nodes), for both of which all ranks are asked."""
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[dist.get_rank() // 2], between[dist.get_rank() % 2]


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def partitioned(dtype, options, **more):
    inside, between = groups()
    net = model(dtype)
    inner = commpress.Partitioned(
        net.parameters(), torch.optim.AdamW, process_group=inside, **ADAM, **more
    )
    local = trained(net, inner, dist.get_rank() // 2, {"process_group": between, **options})
    inner.close()
    return values(net), [sum(f.numel for f in local.fragments), local.digest()]


def in_a_store(dtype, options, folder):
    with open_store(Path(folder, f"{dist.get_rank()}"), host="2MiB") as store:
        return partitioned(dtype, options, store=store, chunk_mb=0.004)


def streamed(dtype, options, folder):
    inside, between = groups()
    net = model(dtype)
    with open_store(Path(folder, f"{dist.get_rank()}"), host="2MiB") as store:
        whole = commpress.stream(net, store=store, process_group=inside, chunk_mb=0.004)
        inner = commpress.Offloaded(
            net.parameters(), torch.optim.AdamW, store=store, chunk_mb=0.004, **ADAM
        )
        local = trained(net, inner, dist.get_rank() // 2, {"process_group": between, **options})
        full = [value.clone() for value in whole.state_dict().values()]
        whole.close()
    return full, [sum(f.numel for f in local.fragments), local.digest()]


def sharded(dtype, options):
    # before other groups: torch finds it by name
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    net = model(dtype)
    fully_shard(net, mesh=mesh["shard"])
    local = trained(
        net,
        torch.optim.AdamW(net.parameters(), **ADAM),
        dist.get_rank() // 2,
        {"process_group": mesh["replicate"].get_group(), **options},
    )
    return [p.full_tensor().detach() for p in net.parameters()], [
        sum(f.numel for f in local.fragments),
        local.digest(),
    ]


def one_bit(dtype, options):
    inside, between = groups()
    net = model(dtype)
    inner = commpress.OneBitAdam(net.parameters(), lr=1e-2, exact_steps=100, process_group=inside)
    local = trained(net, inner, dist.get_rank() // 2, {"process_group": between, **options})
    return values(net), [sum(f.numel for f in local.fragments), local.digest()]


def several(kinds):
    return [globals()[name](*arguments) for name, *arguments in kinds]


def plain(cases):
    results = []
    for dtype, options, optimizer, more in cases:
        net = model(dtype)
        trained(net, optimizer(net.parameters(), **more), dist.get_rank(), options)
        results.append(values(net))
    return results


F32, BF16 = torch.float32, torch.bfloat16


def test_equal_to_one_plain_rank_a_node(pool, tmp_path):
    """float32 and exact: Partitioned, with its state in a store too, streamed parameters and FSDP2
    with an empty shard, in every bit. Each rank sends its own shards only."""
    options = {"fragments": 2, "overlap": 1}
    kinds = [
        ("sharded", F32, options),
        ("partitioned", F32, options),
        ("in_a_store", F32, {}, str(tmp_path / "p")),
        ("streamed", F32, {}, str(tmp_path / "s")),
        ("one_bit", F32, {}),
    ]
    adam = (torch.optim.AdamW, ADAM)
    (overlapped, simple, one_bit_twin), _ = pool.run(
        plain, [(F32, options, *adam), (F32, {}, *adam), (F32, {}, torch.optim.Adam, ADAM)], size=2
    )
    ranks = pool.run(several, kinds, size=4)
    numel = sum(p.numel() for p in overlapped)
    for rank in ranks:
        twins = [overlapped, overlapped, simple, simple, one_bit_twin]
        for (kind, *_), twin, (mine, _) in zip(kinds, twins, rank, strict=True):
            for a, b in zip(mine, twin, strict=True):
                if kind == "one_bit":  # arithmetic of our own, not torch's
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
                else:
                    assert torch.equal(a, b), kind
    for number, (kind, *_) in enumerate(kinds):
        parts = [rank[number][1][0] for rank in ranks[:2]]
        assert (
            (parts == [numel, numel]) if kind == "one_bit" else (numel <= sum(parts) <= 1.2 * numel)
        ), kind
        assert ranks[0][number][1][1] == ranks[2][number][1][1]  # Θ of corresponding ranks


def test_compressed_and_in_half_precision_all_ranks_hold_the_same(pool, tmp_path):
    options = {"codec": "int4", "fragments": 2}
    kinds = [
        ("sharded", F32, options),
        ("partitioned", BF16, options),
        ("streamed", BF16, options, str(tmp_path)),
        ("one_bit", F32, {"codec": "int4"}),
    ]
    ranks = pool.run(several, kinds, size=4)
    for number, (kind, *_) in enumerate(kinds):
        first = ranks[0][number][0]
        assert all(torch.isfinite(p).all() for p in first)
        assert any(
            not torch.equal(p, q)
            for p, q in zip(first, model(kinds[number][1]).parameters(), strict=True)
        )
        for rank in ranks[1:]:
            assert equal(first, rank[number][0]), kind


def late_values(tmp):
    """One rank: an update under way is finished before weights are read, and a master follows what
    was written."""
    net, rank = model(BF16), dist.get_rank()
    with open_store(Path(tmp, f"{rank}"), host="2MiB") as store:
        inner = commpress.Offloaded(
            net.parameters(),
            torch.optim.SGD,
            store=store,
            chunk_mb=0.004,
            lr=0.25,
            gradients="delayed",
        )
        local = commpress.LocalUpdates(inner, every=2, codec=None, outer=commpress.Average())
        for _ in range(4):
            for p in net.parameters():
                p.grad = torch.full_like(p, (rank + 1) * 2.0**-6)
            local.step()
        inner.finish()
        local.close()
        return values(net), [f.weights.clone() for f in local.fragments]


def test_a_delayed_update_is_part_of_what_leaves(pool, tmp_path):
    every = pool.run(late_values, str(tmp_path), size=2)
    start = torch.cat([p.detach().float().ravel() for p in model(BF16).parameters()])
    for mine, (shared,) in every:
        moved = torch.cat([p.float().ravel() for p in mine]) - start
        torch.testing.assert_close(
            moved, torch.full_like(moved, -4 * 0.25 * 1.5 * 2.0**-6), rtol=0.1, atol=2e-3
        )
        torch.testing.assert_close(shared, start + moved, rtol=0.01, atol=2e-3)


def refused(folder):
    """The errors of what makes no sense, by what it is."""
    errors = {}
    net = model()

    def note(name, make, **options):
        errors[name] = str(caught(lambda: commpress.LocalUpdates(make(), **options)))

    note("one bit", lambda: commpress.OneBitAdam(net.parameters()))
    note("windows", lambda: commpress.ZeroOneAdam(net.parameters()))
    note("masters", lambda: commpress.OneBitAdam(model(BF16).parameters()))
    note("sharded adam", lambda: ShardedOneBitAdam(model().parameters()))
    note(
        "partitioned", lambda: commpress.Partitioned(model().parameters(), torch.optim.SGD, lr=0.1)
    )
    note(
        "seconds",
        lambda: commpress.Partitioned(model().parameters(), torch.optim.SGD, lr=0.1),
        every=commpress.Seconds(1),
    )
    with open_store(Path(folder, f"{dist.get_rank()}")) as store:
        streamed = model()
        commpress.stream(streamed, store=store)
        note("no values", lambda: torch.optim.SGD(streamed.parameters(), lr=0.1))
        note(
            "streamed",
            lambda: commpress.Offloaded(
                streamed.parameters(), torch.optim.SGD, store=store, lr=0.1
            ),
        )
    mesh = init_device_mesh(
        "cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard")
    )
    together, apart = mesh["shard"].get_group(), mesh["replicate"].get_group()
    node = {"process_group": together, "lr": 0.1}
    note(
        "auto",
        lambda: commpress.Partitioned(model().parameters(), torch.optim.SGD, **node),
        process_group=apart,
    )
    cut = model()
    fully_shard(cut, mesh=mesh["shard"])
    note("shards", lambda: torch.optim.SGD(cut.parameters(), lr=0.1))
    return errors


@pytest.mark.parametrize("size", [1, 2])
def test_what_averages_twice_or_cannot_follow_is_refused(pool, size, tmp_path):
    words = {
        "one bit": "process_group=",
        "windows": "comes back by itself",
        "masters": "float32 master weights",
        "sharded adam": "float32 master weights",
        "partitioned": "process_group=",
        "seconds": "count steps alike",
        "no values": "commpress.Offloaded",
        "streamed": "process_group=",
        "shards": 'mesh["shard"]',
        "auto": "every is 'auto', but inner communicates" if size == 2 else "in every step",
    }
    for errors in pool.run(refused, str(tmp_path), size=size):
        assert {name: words[name] in error for name, error in errors.items()} == dict.fromkeys(
            words, True
        ), errors


@pytest.mark.parametrize("size", [1, 2])
def test_parameters_that_come_later_are_named(size):
    from local_twin import Ranks, noise

    ranks = Ranks(size)
    more = torch.nn.Parameter(torch.ones(3))
    for local in ranks.local:
        local.inner[0].add_param_group({"params": [more]})
    with pytest.raises(InvalidArgument, match=r"more parameters.*make a new LocalUpdates"):
        ranks.step(noise(size, 0))
