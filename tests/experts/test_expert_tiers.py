"""Experts in a store: the bits of experts in memory, as few bytes as Belady's rule moves, none of
experts without tokens."""

import copy
import itertools
import subprocess
import sys
from bisect import bisect_right

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import commpress
import sources
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import InvalidArgument, StateMismatch
from commpress.integrations.experts.tier_plan import TierPlan
from state_worlds import apart
from tier_layers import (
    BLOCK,
    OPTIONS,
    WIDTH,
    Expert,
    Net,
    in_memory,
    loss_of,
    open_store,
    tiered,
    train,
)
from variants import every_second

NEEDS = {
    "forward": ("values",),
    "backward": ("values", "gradient"),
    "update": ("values", "gradient", "exp_avg", "exp_avg_sq"),
}
CHANGES = {"forward": (), "backward": ("gradient",), "update": ("values", "exp_avg", "exp_avg_sq")}


# ---------------------------------------------------------------- the plan


def belady(turns, capacity):
    """Blocks read and written by who knows all turns, (kind, expert), and lets that leave which is
    needed last."""
    needs = [[(expert, key) for key in NEEDS[kind]] for kind, expert in turns]
    uses = {}
    for at, blocks in enumerate(needs):
        for block in blocks:
            uses.setdefault(block, []).append(at)

    def following(block, at):
        i = bisect_right(uses[block], at)
        return uses[block][i] if i < len(uses[block]) else len(turns)

    resident, changed, disk = set(), set(), {block for block in uses if block[1] == "values"}
    read = written = 0
    for at, ((kind, expert), blocks) in enumerate(zip(turns, needs, strict=True)):
        for block in blocks:
            if block in resident:
                continue
            if len(resident) == capacity:
                leaves = max(resident.difference(blocks), key=lambda b: (following(b, at), b))
                resident.discard(leaves)
                if leaves in changed:
                    changed.discard(leaves)
                    disk.add(leaves)
                    written += 1
            read += block in disk
            resident.add(block)
        changed |= {(expert, key) for key in CHANGES[kind]}
        if kind == "update":
            for blocks_of in (resident, changed, disk):
                blocks_of.discard((expert, "gradient"))
    return read, written


class Walk:
    """Somebody who keeps to a plan, and counts blocks."""

    def __init__(self, capacity, experts):
        self.plan = TierPlan(
            capacity,
            lambda kind, e: [(e, key) for key in NEEDS[kind]],
            lambda kind, e: [(e, "gradient")] if kind == "update" else [],
            lambda block: 1,
        )
        self.plan.stored |= {(e, "values") for e in range(experts)}
        self.memory, self.changed, self.turns, self.read, self.written = set(), set(), [], 0, 0

    def move(self, moves):
        for block in moves.leave:
            self.memory.remove(block)
            self.written += block in self.changed
            self.changed.discard(block)
        for block in moves.enter:
            self.memory.add(block)
            self.read += block in self.plan.stored
        assert len(self.memory) <= self.plan.capacity

    def phase(self, kind, experts):
        order = self.plan.phase(kind, 0, experts)
        for expert in order:
            self.move(self.plan.begin(kind, expert))
            self.move(self.plan.ahead())
            assert self.memory >= {(expert, key) for key in NEEDS[kind]}
            self.turns.append((kind, expert))
            self.changed |= {(expert, key) for key in CHANGES[kind]}
            if kind == "update":
                self.memory.discard((expert, "gradient"))
                self.changed.discard((expert, "gradient"))
            self.plan.end(kind, expert)
            self.move(self.plan.ahead())
        return order

    def step(self, *parts):
        trained = set()
        for experts in parts:
            order = self.phase("forward", sorted(experts))
            trained |= set(self.phase("backward", order[::-1]))
        self.phase("update", sorted(trained))
        self.plan.over()
        return self


@given(st.integers(4, 9), st.lists(st.integers(0, 6), min_size=1, max_size=7, unique=True))
@settings(max_examples=40, deadline=None)
def test_a_forward_and_its_backward_read_what_belady_reads(capacity, experts):
    """All of it is known when the gates are: nobody who knew more could read less."""
    walk = Walk(capacity, 7)
    walk.phase("backward", walk.phase("forward", experts)[::-1])
    assert walk.read == belady(walk.turns, capacity)[0]


def everybody(step):
    return range(64)


def zipf(step):
    """At most 16 of 64."""
    draw, weights = np.random.default_rng(step), 1 / np.arange(1, 65) ** 1.2
    return list(dict.fromkeys(draw.choice(64, 256, p=weights / weights.sum()).tolist()))[:16]


@pytest.mark.parametrize("trace", [everybody, zipf])
@pytest.mark.parametrize("parts", [1, 2])
def test_eight_of_64_experts_move_within_a_twentieth_of_belady(trace, parts):
    walk = Walk(8 * 4, 64)
    for step in range(6):
        walk.step(*[trace(parts * step + part) for part in range(parts)])
    assert walk.read + walk.written <= 1.05 * sum(belady(walk.turns, 8 * 4))
    touched = {expert for _, expert in walk.turns}
    assert {expert for expert, _ in walk.memory} <= touched


def test_the_least_frequent_leaves_where_nothing_is_known():
    walk = Walk(4, 9)
    for experts in ([0], [0], [0], [1], [2], [3], [4]):
        walk.plan.phase("forward", 0, experts, differentiable=False)
        walk.move(walk.plan.begin("forward", experts[0]))
        walk.plan.end("forward", experts[0])
    assert (0, "values") in walk.memory


# ---------------------------------------------------------------- in a store


WAYS = {
    "two": {},
    "one": {"resident": 1, "host": "160KiB"},
    "all": {"resident": 12},
    "clipped": {"clip": 0.05},
    "chunks": {"chunks": 2},
    "remembered": {"remember": False},
    "reentrant": {"remember": True},
    "momentum": {"optimizer": torch.optim.SGD, "options": {"lr": 0.1, "momentum": 0.9}},
}


@pytest.mark.parametrize("way", every_second(WAYS))
def test_the_bits_of_experts_in_memory(tmp_path, way):
    """Over five steps of two micro-batches: losses, weights, moments and numbers of steps.

    With chunks of one: a plain parameter's gradient is what its two chunks give together, added to
    what was there.
    """
    clip = WAYS[way].get("clip")
    net, optimizer, store = tiered(tmp_path / "store", **WAYS[way])
    more = {
        k: v for k, v in WAYS[way].items() if k in ("remember", "chunks", "optimizer", "options")
    }
    other, twin = in_memory(**more)
    parts = 1 if way == "chunks" else 2
    assert train(net, optimizer, 0, 5, parts) == train(other, twin, 0, 5, parts, clip=clip)
    assert not apart(net.state_dict(), other.state_dict())
    assert not apart(optimizer.state_dict()["state"], twin.state_dict()["state"])
    assert train(net, optimizer, 5, 6, parts) == train(other, twin, 5, 6, parts, clip=clip)
    steps = {int(state.get("step", 0)) for state in twin.state.values()}
    assert len(steps) > 1 or way == "momentum"  # some experts had no token in some step
    store.close()


@pytest.mark.parametrize("trace", [everybody, zipf])
def test_bytes_moved_by_a_store_are_those_of_the_plan(tmp_path, trace):
    """64 experts, 8 in memory: what the store has read and written, against Belady's rule on the
    turns there were."""
    net, optimizer, store = tiered(tmp_path / "store", resident=8, experts=64, layers=1)
    tiers, turns = optimizer.tiers, []
    begin = tiers.begin
    tiers.begin = lambda kind, expert: (turns.append((kind, expert)), begin(kind, expert))[1]
    before = store.traffic()
    for step in range(4):
        experts = torch.tensor(list(trace(step)))
        rows = torch.randn(len(experts), WIDTH, generator=torch.Generator().manual_seed(step))
        net.layers[0](rows, experts[:, None], torch.ones(len(experts), 1)).square().sum().backward()
        optimizer.step()
    tiers.close()
    store.flush([]).wait()
    moved = [(now - then) / BLOCK for now, then in zip(store.traffic(), before, strict=True)]
    assert sum(moved) <= 1.05 * sum(belady(turns, 32))
    assert sum(moved) >= 0.9 * sum(belady(turns, 32))  # nothing moves in ways that nobody counts
    store.close()


class ByNorm(torch.optim.SGD):
    """Divides gradients by their norms."""

    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad = p.grad / (p.grad.flatten().norm() + 1)
        super().step(closure)


def test_half_precision_has_a_master(tmp_path):
    net, optimizer, store = tiered(tmp_path / "store", dtype=torch.bfloat16, resident=3)
    other, _ = in_memory(dtype=torch.bfloat16)
    masters = [p.detach().float() for p in other.parameters()]
    twin = torch.optim.AdamW(masters, **OPTIONS)
    experts = {name for name, _ in net.named_parameters() if "layers" in name}
    for step in range(3):
        assert loss_of(net, step, 0).item() == loss_of(other, step, 0).item()
        loss_of(net, step, 0).backward()
        loss_of(other, step, 0).backward()
        for (name, p), master in zip(other.named_parameters(), masters, strict=True):
            master.grad = None if p.grad is None or name not in experts else p.grad.float()
        twin.step()
        optimizer.step()
        optimizer.zero_grad()
        state = net.state_dict()
        for (name, p), master in zip(other.named_parameters(), masters, strict=True):
            p.data.copy_(master if name in experts else state[name])
            p.grad = None
    assert not apart(net.state_dict(), other.state_dict())
    store.close()


def test_a_backward_that_fails_leaves_nothing_behind(tmp_path):
    net, optimizer, store = tiered(tmp_path / "store")
    other, twin = in_memory()
    for one, its in ((net, optimizer), (other, twin)):
        loss = loss_of(one, 7, 0)
        handle = one.gates[0].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        its.zero_grad()
    assert train(net, optimizer, 0, 2) == train(other, twin, 0, 2)
    store.close()


# ---------------------------------------------------------------- several ranks


def divided(folder, kind):
    torch.set_num_threads(1)
    rank, found = dist.get_rank(), []
    for tiers in (True, False):
        torch.manual_seed(1)
        listed = [Expert() for _ in range(5)]
        where = {"store": open_store(f"{folder}/{rank}"), "resident": 1} if tiers else {}
        layer = commpress.moe.Experts(
            listed, placement=[0, 0, 1, 1, 2], chunks=2 if kind == "chunks" else 1, **where
        )
        if tiers:
            optimizer = commpress.moe.ExpertOptimizer(
                layer.parameters(), torch.optim.AdamW, max_grad_norm=1e9, **OPTIONS
            )
        else:
            optimizer = torch.optim.AdamW(layer.parameters(), **OPTIONS)
        for step in range(3):
            draw = torch.Generator().manual_seed(10 * rank + step)
            # nobody comes to rank 1
            chosen = torch.tensor([0, 1, 4])[torch.rand(7, 3, generator=draw).topk(2).indices]
            rows = torch.randn(7, WIDTH, generator=draw).requires_grad_()
            layer(rows, chosen, torch.rand(7, 2, generator=draw)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: value.numpy() for name, value in layer.state_dict().items()})
        if tiers:
            where["store"].close()
    return found


@pytest.mark.parametrize("kind", ["whole", "chunks"])
def test_each_rank_has_a_store_of_its_own(pool, tmp_path, kind):
    """Gradients of chunks are divided by the number of ranks before they are added, and in memory
    after: in the last bit."""
    for ours, twin in pool.run(divided, str(tmp_path), kind, size=3):
        assert ours.keys() == twin.keys()
        for name, value in twin.items():
            if kind == "chunks":
                np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5)
            else:
                np.testing.assert_array_equal(ours[name], value)


# ---------------------------------------------------------------- memory


def test_peak_memory_is_that_of_the_formula():
    """64 experts of 2 MiB, 8 in memory: host memory of the store, an expert's gradient, and what
    the process had before. Gradients are made where those of other experts were."""
    script = sources.SUPPORT / "tier_memory.py"
    said = subprocess.run(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=120, check=True
    ).stdout
    before, formula, peak, everything, cleared = map(float, said.split())
    assert abs(peak - (before + formula)) <= 0.05 * (before + formula)
    assert formula < everything / 6
    assert cleared < everything / 4 / 8  # of the gradients of all


# ---------------------------------------------------------------- mistakes


def test_mistakes_are_refused(tmp_path):
    transport = Loopback(1).transport(0)
    with open_store(tmp_path / "store") as store:
        tiers = commpress.moe.ExpertTiers(store, 2)
        net = Net(store=tiers)
        with pytest.raises(InvalidArgument, match="no optimizer, so their gradients would be lost"):
            loss_of(net, 0, 0).backward()
        big = commpress.moe.ExpertTiers(store, 200, prefix="big")
        for options, says in [
            ({"store": store, "resident": 0}, "resident is 0"),
            ({"store": store}, "under prefix 'experts'"),
            ({"store": tiers, "resident": 2}, "resident is 2, but store is ExpertTiers"),
            ({"resident": 2}, "but store is NoneType"),
            ({"store": big}, "resident=200 experts with their gradients take"),
        ]:
            with pytest.raises(InvalidArgument, match=says):
                commpress.moe.Experts([Expert()], process_group=transport, **options)
        with pytest.raises(InvalidArgument, match="experts is an iterator"):
            commpress.moe.Experts(iter([Expert()]), store=tiers)
        exchange = commpress.ExpertExchange(2, process_group=transport)
        other = commpress.moe.ExpertTiers(store, 1, prefix="other")
        with pytest.raises(InvalidArgument, match="experts has 1 modules, expected 2"):
            commpress.moe.Experts(iter([Expert()]), exchange, store=other)
        with pytest.raises(InvalidArgument, match="params are in a ExpertTiers"):
            commpress.Offloaded(net.parameters(), torch.optim.AdamW, store=store, chunk_mb=0.01)
        with pytest.raises(
            InvalidArgument, match=r"params do not include layer 0, expert 0\.up\.weight"
        ):
            commpress.moe.ExpertOptimizer(
                itertools.islice(net.parameters(), 8, None), torch.optim.AdamW
            )
        with pytest.raises(InvalidArgument, match="params have no experts in tiers"):
            commpress.moe.ExpertOptimizer(net.gates.parameters(), torch.optim.AdamW)
        with pytest.raises(InvalidArgument, match="not element-wise: it takes whole tensors"):
            commpress.moe.ExpertOptimizer(net.parameters(), ByNorm)
        with pytest.raises(InvalidArgument, match="a streamed model cannot be copied"):
            copy.deepcopy(net)
        store.commit()
    with (
        open_store(tmp_path / "store") as store,
        pytest.raises(StateMismatch, match="other experts under prefix 'experts'"),
    ):
        commpress.moe.Experts([torch.nn.Linear(WIDTH, WIDTH)], store=store, process_group=transport)
    with (
        commpress.TieredStore.open(tmp_path / "packs", host="2MiB", engine="threads") as store,
        pytest.raises(InvalidArgument, match="packs tensors below 262144"),
    ):
        commpress.moe.Experts([Expert()], process_group=transport, store=store)
