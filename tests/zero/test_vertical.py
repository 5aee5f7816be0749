"""Micro-batches that pass through each block together give the gradients of one after the other."""

import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument
from small_store import open_store
from state_worlds import apart
from stream_twin import (
    OPTIONS,
    WIDTH,
    WORDS,
    Twins,
    groups,
    loss_of,
    made,
    offloaded,
    untied,
)
from variants import first, seldom
from zero_twin import Masters, clip, fill

PARTS = 3


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", host="4MiB") as opened:
        yield opened


@pytest.fixture
def pair(store):
    return Twins(store, untied(), untied())


def accumulated(streamed, net, step, parts=PARTS, rank=0, **more):
    found = streamed.accumulate(lambda part: loss_of(net, step, part, rank), range(parts), **more)
    return [loss.item() for loss in found]


def both(pair, step, parts=PARTS, **more):
    """Losses of the micro-batches together, and of one after the other."""
    together = accumulated(pair.streamed, pair.net, step, parts, **more)
    return together, horizontal(pair.other, step, parts)


def horizontal(net, step, parts=PARTS):
    losses = []
    for part in range(parts):
        loss = loss_of(net, step, part)
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("parts", first(1, [3, 1, 2]))
def test_equals_the_plain_model(pair, parts):
    for step in range(6):
        together, each = both(pair, step, parts)
        assert together == each
        pair.step()
    pair.check()


@pytest.mark.parametrize("codec", [None, "exact"])
def test_inputs_of_blocks_may_be_in_another_tier(pair, tmp_path, codec):
    with open_store(tmp_path / "tier", host="1MiB") as beside:
        tier = commpress.activations(beside, budget=0, min_bytes=1, codec=codec)
        for step in range(3):
            together, each = both(pair, step, activations=tier)
            assert together == each
            pair.step()
        kept = 3 * PARTS * len(pair.net.layers) * 4 * 2 * 8 * WIDTH  # inputs of blocks
        assert tier.counters.saved == kept
        assert (tier.counters.written == kept) == (codec is None)
        tier.settle()
        assert not list(beside)
    pair.check()


def test_larger_blocks_keep_fewer_inputs(store, tmp_path):
    nets = untied(), untied()
    for each in nets:
        each.layers = nn.ModuleList([nn.Sequential(*each.layers[:2]), *each.layers[2:]])
    pair = Twins(store, *nets, blocks=[nn.Sequential, type(nets[0].layers[1])])
    with open_store(tmp_path / "tier", host="1MiB") as beside:
        tier = commpress.activations(beside, budget=0, min_bytes=1)
        together, each = both(pair, 0, activations=tier)
        assert together == each
        assert tier.counters.saved == PARTS * 2 * 4 * 2 * 8 * WIDTH
    pair.step()
    pair.check()


def test_blocks_whose_inputs_outweigh_their_parameters_are_named_once(store, tmp_path, caplog):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2048))
    streamed = commpress.stream(net, store=store, blocks=[nn.Linear])
    optimizer = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, lr=0.0)
    with open_store(tmp_path / "tier", host="1MiB") as beside:
        tier = commpress.activations(beside, budget=0, min_bytes=1)
        for _ in range(2):
            batches = [torch.randn(64, 4, requires_grad=True) for _ in range(2)]
            streamed.accumulate(lambda x: net(x).sum(), batches, activations=tier)
            optimizer.step()
    told = [record.getMessage() for record in caplog.records if "activations=" in record.msg]
    assert len(told) == 1
    assert "'0'" in told[0]


def test_inputs_of_blocks_in_eight_bits(store, tmp_path):
    """Forward is exact, and the comparison of blocks leaves room for what the codec changes."""
    net, other = untied(), untied()
    streamed = commpress.stream(net, store=store)
    optimizer = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, lr=1.0)
    with open_store(tmp_path / "tier", host="1MiB") as beside:
        tier = commpress.activations(beside, budget=0, min_bytes=1, codec="int8")
        assert accumulated(streamed, net, 0, activations=tier) == horizontal(other, 0)
        assert tier.counters.written < 0.3 * tier.counters.saved
    start, wanted = untied(), {n: p.grad for n, p in other.named_parameters() if p.grad is not None}
    optimizer.step()
    ours = streamed.state_dict()
    far = {
        name: float((start.get_parameter(name).detach() - ours[name] - g).norm() / g.norm())
        for name, g in wanted.items()
    }
    assert 1e-4 < max(far.values()) < 0.05


def test_gradients_of_a_tied_weight_are_first_those_of_the_head(store):
    net, other = made(), untied()
    with torch.no_grad():
        other.head.weight.copy_(other.tokens.weight)
    streamed = commpress.stream(net, store=store)
    optimizer = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, lr=1.0)
    accumulated(streamed, net, 0)
    optimizer.step()
    horizontal(other, 0)
    wanted = other.tokens.weight - (other.head.weight.grad + other.tokens.weight.grad)
    assert torch.equal(streamed.state_dict()["tokens.weight"], wanted)


def test_half_precision_adds_up_in_float32(store):
    net, other = untied().bfloat16(), untied().bfloat16()
    streamed = commpress.stream(net, store=store, chunk_mb=0.04)
    optimizer = offloaded(net, store, max_grad_norm=None)
    twin = Masters(other.parameters(), **OPTIONS | {"weight_decay": 0.0})
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for step in range(3):
        accumulated(streamed, net, step)
        optimizer.step()
        sums = [torch.zeros(p.shape) for p in twin.parameters]
        for part in range(PARTS):
            loss_of(other, step, part).backward()
            for total, p in zip(sums, twin.parameters, strict=True):
                if p.grad is not None:
                    total += p.grad
                p.grad = None
        twin.step(sums)
    assert not apart(streamed.state_dict(), dict(other.state_dict()))


class Dropping(nn.Module):
    """Blocks with dropout and several results, a skip around two of them and one without use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Pair() for _ in range(4))
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        skip = x = self.first(x)
        total = 0.0
        for number, block in enumerate(self.blocks):
            pair = block({"x": x.tanh(), "skip": skip}, scale=2.0)
            x, total = pair.x, total + pair.more[0]
            if number == 1:
                x = x + skip
        return self.last(x).mean() + total


@dataclass
class Results:
    x: torch.Tensor
    more: tuple


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, given, scale):
        y = self.dropout(self.linear(given["x"] * scale + given["skip"]))
        return Results(y, (y.square().mean(), torch.ones(2), y.sum()))


def test_random_numbers_and_graphs_that_are_no_sequence(store):
    torch.manual_seed(0)
    net = Dropping()
    other, data = copy.deepcopy(net), torch.randn(PARTS, 5, 8)
    streamed = commpress.stream(net, store=store)
    optimizer = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, lr=0.1)
    for step in range(2):
        torch.manual_seed(step)
        seeds = torch.randint(2**62, (PARTS,)).tolist()
        after = torch.get_rng_state()
        torch.manual_seed(step)
        losses = streamed.accumulate(net, data)
        assert torch.equal(torch.get_rng_state(), after)
        optimizer.step()
        other.zero_grad()
        for seed, part, loss in zip(seeds, data, losses, strict=True):
            torch.manual_seed(seed)
            wanted = other(part)
            wanted.backward()
            assert torch.equal(loss, wanted.detach())
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        state = streamed.state_dict()
        for name, value in other.state_dict().items():
            # sums of a tensor with several uses have another order
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
        other.load_state_dict(state)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(pair, inside):
    """Autocast of the caller, or of the loss, keeps no copies of the weights of blocks."""
    net, other, streamed, keeps = pair.net, pair.other, pair.streamed, set()
    net.layers[0].qkv.register_forward_hook(
        lambda *_: keeps.add((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
    )

    def loss_in(part, model):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, 0, part)

    if inside:
        got = streamed.accumulate(lambda part: loss_in(part, net), range(PARTS))
    else:
        with torch.autocast("cpu", torch.bfloat16):
            got = streamed.accumulate(lambda part: loss_of(net, 0, part), range(PARTS))
            assert torch.is_autocast_cache_enabled()
    assert keeps == {(True, False)}
    wanted = [loss_in(part, other) for part in range(PARTS)]
    for loss in wanted:
        loss.backward()
    assert [one.item() for one in got] == [one.item() for one in wanted]
    pair.step()
    pair.check()


class Centred(nn.Module):
    """Its buffer is assigned, not written in place, and enters its results."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


def test_running_statistics_count_each_micro_batch_once(store):
    net = nn.Sequential(
        *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)), Centred()
    )
    other, data = copy.deepcopy(net), torch.randn(PARTS, 5, 8)
    streamed = commpress.stream(net, store=store)
    streamed.accumulate(lambda x: net(x).square().sum(), data)
    for x in data:
        other(x).square().sum().backward()
    for (name, mine), p in zip(net.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, p.grad), name
    for (name, mine), wanted in zip(net.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, wanted), name


def test_parameters_are_read_twice_a_step(tmp_path):
    """And gradients are moved once; one after the other, each time."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    numel = sum(p.numel() for p in net.parameters())
    most = 0
    with open_store(tmp_path / "store", host="1MiB") as store:
        streamed = commpress.stream(net, store=store)
        optimizer = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, lr=0.1)

        def look(*_):
            nonlocal most
            most = max(most, sum(group.present for group in streamed.groups))

        for layer in net:
            layer.register_forward_hook(look)
            layer.weight.register_post_accumulate_grad_hook(look)
        crossed = []
        for step in range(3):
            before = store.crossing.up, store.crossing.down
            data = torch.randn(PARTS, 2, 64)
            if step < 2:  # the first forward of all looks for foreign reads, alone
                streamed.accumulate(lambda x: net(x).square().mean(), data)
            else:
                for x in data:
                    net(x).square().mean().backward()
            now = store.crossing.up, store.crossing.down
            crossed.append([(b - a) / (4 * numel) for a, b in zip(before, now, strict=True)])
            optimizer.step()
            optimizer.zero_grad()
    assert crossed == [[3, 1], [2, 1], [2 * PARTS, PARTS]]
    assert most == 1


def test_what_a_round_has_fetched_stays_until_its_end(store, monkeypatch):
    """An embedding, in backward, and a norm and a head, in the tails, as blocks do."""
    net, fetched = untied(), []
    streamed = commpress.stream(net, store=store)
    offloaded(net, store)
    fetch = streamed._fetch
    accumulated(streamed, net, 0)
    for unit in streamed.modules.values():
        unit._fetch = lambda group: (fetched.append(group.name), fetch(group))
    monkeypatch.setattr(streamed, "_fetch", unit._fetch)
    accumulated(streamed, net, 1)
    times = {name: fetched.count(name) for name in fetched}
    assert times == dict.fromkeys(times, 2) | {"scale": 1, "head.weight": 1}


class Adapted(nn.Module):
    """A frozen linear layer with a trained one that was added later."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8)

    def forward(self, x):
        return self.frozen(self.added(x).tanh() if hasattr(self, "added") else x)


@pytest.mark.parametrize("together", [True, False])
def test_a_frozen_block_with_an_adapter(store, together):
    """Nothing before the first adapter takes gradients, and nothing streamed in its block."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Adapted() for _ in range(3)))
    other, data = copy.deepcopy(net), torch.randn(PARTS, 4, 8)
    for one in (net, other):
        if one is net:
            streamed = commpress.stream(net, store=store)
        one.requires_grad_(False)
        torch.manual_seed(1)
        one[1].added = nn.Linear(8, 8)

    def loss_of(x):
        return net(x).square().mean()

    if together:
        streamed.accumulate(loss_of, data)
    else:
        for x in data:
            loss_of(x).backward()
    for x in data:
        other(x).square().mean().backward()
    assert torch.equal(net[1].added.weight.grad, other[1].added.weight.grad)


# ---------------------------------------------------------------- what is refused


LEAKED, DRAW = [], np.random.default_rng(0)


class Writes(nn.Module):
    """A block that does something which cannot be computed again."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)
        self.count = 0.0

    def forward(self, x, cache):
        y = self.linear(x)
        if self.kind == "cache":
            cache.append(y)
        if self.kind == "attribute":
            self.penalty = y.square().mean()
        if self.kind == "global":
            LEAKED.append(x.mean())
        if self.kind == "object":
            return SimpleNamespace(y=y, square=y.square())
        if self.kind == "count":
            self.count += 1
            y = y * self.count
        if self.kind == "own dropout":  # and results whose norm is always the same
            mask = torch.from_numpy(DRAW.integers(0, 2, (3, 8)))
            y = nn.functional.layer_norm(x + y * mask, (8,))
        if self.kind == "number":
            cache.append(1)
        return y


class Writing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.blocks = kind, nn.ModuleList(Writes(kind) for _ in range(2))

    def forward(self, x):
        cache = []
        x = x.clone()
        for block in self.blocks:
            y = block(x, cache)
            if self.kind == "object":
                y = y.y + y.square
            if self.kind == "in place":
                x += 1
            x = y
        leaked = sum(LEAKED)
        LEAKED.clear()
        return x.mean() + leaked


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cache", "block 'blocks.0' changes its arguments"),
        ("number", "block 'blocks.0' changes its arguments"),
        ("own dropout", "block 'blocks.1' did not return the same"),
        ("attribute", "block 'blocks.0' stores a tensor with a graph in 'penalty'"),
        ("count", "block 'blocks.1' did not return the same"),
        ("global", "block 'blocks.1' passes on a tensor that is not among its results"),
        ("object", "passes on a tensor that is not among its results"),
        ("in place", "an input of block 'blocks.1' was changed in place"),
    ],
)
def test_blocks_that_cannot_be_computed_again_are_named(store, kind, message):
    net = Writing(kind)
    streamed = commpress.stream(net, store=store)
    with pytest.raises(InvalidArgument, match=message):
        streamed.accumulate(net, torch.randn(2, 3, 8, requires_grad=True))
    assert not any(group.present or group.holders for group in streamed.groups)


@pytest.mark.parametrize("remember", ["reentrant", "new"])
def test_activation_checkpointing_of_others(store, remember):
    """torch's, with the graph kept, finds nothing to do; with reentrant backwards it is refused."""
    pair = Twins(store, untied(remember=remember), untied())
    if remember == "reentrant":
        with pytest.raises(InvalidArgument, match=r"layers\.2.* so turn checkpointing off"):
            both(pair, 0)
        return
    together, each = both(pair, 0)
    assert together == each
    pair.step()
    pair.check()


class Prompted(nn.Module):
    """Blocks that all take a parameter of the model, and an input of the caller."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(8))
        self.blocks = nn.ModuleList(Adding() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x, self.prompt)
        return x.square().mean()


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, more):
        return self.linear(x + more).tanh()


def test_leaves_that_several_micro_batches_pass_to_blocks(store):
    torch.manual_seed(0)
    net, x = Prompted(), torch.randn(4, 8, requires_grad=True)
    other, y = copy.deepcopy(net), x.detach().clone().requires_grad_()
    streamed = commpress.stream(net, store=store)
    streamed.accumulate(lambda scale: net(x) * scale, [1.0, 2.0])
    for scale in (1.0, 2.0):
        (other(y) * scale).backward()
    wanted = [y.grad, *(p.grad for p in other.parameters())]
    for mine, theirs in zip([x.grad, *(p.grad for p in net.parameters())], wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_after_an_error_in_a_block_parameters_are_there_when_they_are_needed(pair, at, error):
    calls = []

    def failing(*_):
        calls.append(torch.is_grad_enabled())
        if len(calls) == {"forward": 2, "backward": PARTS + 2}[at]:
            raise error

    handle = pair.net.layers[1].qkv.register_forward_hook(failing)
    with pytest.raises(error):
        both(pair, 0)
    handle.remove()
    with torch.no_grad():
        assert loss_of(pair.net, 0, 0) == loss_of(pair.other, 0, 0)
    pair.check()
    together, each = both(pair, 0)
    assert together == each
    pair.check()


def test_errors_end_all_micro_batches_and_leave_nothing_behind(pair):
    net, streamed = pair.net, pair.streamed

    def failing(part):
        loss = loss_of(net, 0, part)
        if part == 1:
            raise OSError("no more data")
        return loss

    for _ in range(2):
        with pytest.raises(OSError, match="no more data"):
            streamed.accumulate(failing, range(PARTS))
        pair.check()
    for batches, loss, message in (
        ([], net, "batches is empty"),
        ([0], lambda _: None, "loss_of returned a NoneType"),
        (
            [0],
            lambda _: torch.ones(()),
            r"loss_of returned a tensor of shape \(\), requires_grad=F",
        ),
        ([0], lambda _: streamed.accumulate(net, [0]), "was called by loss_of"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            streamed.accumulate(loss, batches)
    pair.optimizer.zero_grad()
    together, each = both(pair, 0)
    assert together == each
    pair.step()
    pair.check()


# ---------------------------------------------------------------- ranks


def over_ranks(folder, steps, make, **options):
    """Return weights, losses and how often each step has sent the gradients of each group."""
    rank, net, losses, sent = dist.get_rank(), make(), [], []
    with open_store(f"{folder}/{rank}", host="2MiB") as store:
        streamed = commpress.stream(net, store=store, chunk_mb=0.04)
        optimizer = offloaded(net, store, **options)
        gradients = streamed._gradients
        if gradients is not None:
            gradients.launch = lambda b, launch=gradients.launch: (sent.append(b), launch(b))[1]
        for step in range(steps):
            losses.append(accumulated(streamed, net, step, rank=rank))
            optimizer.step()
        assert all(p.grad is None for p in net.parameters())
        buckets = 0 if gradients is None else len(gradients.buckets)
        return streamed.state_dict(), losses, len(sent) / max(steps * buckets, 1)


def with_ddp(steps, make):
    rank, net, losses = dist.get_rank(), make(), []
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    commpress.compress(ddp, "none")
    optimizer = torch.optim.AdamW(groups(net), **OPTIONS)
    for step in range(steps):
        optimizer.zero_grad()
        losses.append([])
        for part in range(PARTS):
            ddp.require_backward_grad_sync = part == PARTS - 1
            loss = loss_of(ddp, step, part, rank)
            loss.backward()
            losses[-1].append(loss.item())
        fill(net.parameters())
        clip(net.parameters(), 0.5)
        optimizer.step()
    return net.state_dict(), losses


class Twice(nn.Module):
    """A weight that gets gradients before and after its bucket is sent, from blocks and between
    them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[2].weight = self.first.weight
        self.last = nn.Linear(WIDTH, WORDS)
        self.tokens = nn.Embedding(WORDS, WIDTH)

    def forward(self, ids):
        x = self.first(self.tokens(ids).tanh())
        for layer in self.layers:
            x = layer(x.tanh()) + self.first(x).tanh()
        return self.last(x)


def seeded(kind):
    torch.manual_seed(0)
    return kind()


def tied_alone():
    """Make a model in which the last gradient is that of the tied weight."""
    net = made()
    del net.unused
    net.scale.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("kind", "steps", "ranks"),
    [(untied, 4, 2), seldom(untied, 4, 3), (made, 2, 2), (tied_alone, 2, 2), (Twice, 2, 2)],
)
def test_over_ranks_equals_ddp(pool, tmp_path, kind, steps, ranks):
    """Compare every bit, but where a weight has several uses: sums have another order, and AdamW
    makes steps of what rounding leaves of a key's bias, up to a fiftieth of the rate here."""
    make = partial(seeded, kind)
    found = pool.run(over_ranks, str(tmp_path), steps, make, size=ranks)
    wanted = pool.run(with_ddp, steps, make, size=ranks)
    near = (0.0, 0.0, 0.0) if kind is untied else (1e-5, 1e-4, OPTIONS["lr"] / 50)
    for (state, losses, times), (other, others) in zip(found, wanted, strict=True):
        assert times == 1
        assert losses == [pytest.approx(row, rel=near[0], abs=0.0) for row in others]
        for name, value in other.items():
            torch.testing.assert_close(state[name], value, rtol=near[1], atol=near[2], msg=name)


class Between(nn.Module):
    """A module that computes between blocks, again and again, and after them."""

    def __init__(self, ends=False):
        super().__init__()
        self.tokens, self.ends = nn.Embedding(WORDS, WIDTH), ends
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mix, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(self.mix(x).tanh()).tanh()
        return self.last(self.mix(x) if self.ends else x)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [untied, tied_alone, Between, partial(Between, ends=True)])
def test_updates_in_backward_over_ranks_equal_those_of_step(pool, tmp_path, kind, ranks):
    """Tied weights and those between blocks among them, whose chunks get one gradient, at the
    end."""
    found = []
    for gradients in ("backward", "store"):
        train = partial(over_ranks, gradients=gradients, max_grad_norm=None)
        found.append(
            pool.run(train, str(tmp_path / gradients), 2, partial(seeded, kind), size=ranks)
        )
    for (state, losses, _), (other, others, _) in zip(*found, strict=True):
        assert losses == others
        assert state.keys() == other.keys()
        assert all(torch.equal(state[name], other[name]) for name in state)
