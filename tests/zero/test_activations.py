"""Gradients of a model whose saved tensors go to a store equal the plain ones, bit for bit."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commpress
from commpress.errors import Damaged, DiskFull, InvalidArgument, OverBudget, StorageError
from commpress.integrations.zero.activation_tier import Activations, HostBuffers
from commpress.integrations.zero.saved_codec import saved_codec
from small_store import open_store
from stream_twin import made, offloaded, train
from variants import few

WIDTH = 128  # a row of 64 has 32 KiB
ROW = 64 * WIDTH * 4


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store") as opened:
        yield opened


class Block(nn.Module):
    """Attention with dropout: parts of one storage are saved, and a mask."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.view(2, 32, 4, -1).transpose(1, 2)
            for part in self.qkv(self.norm(x)).view(2, 32, -1).chunk(3, -1)
        )
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(64, WIDTH)
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.2))


class Net(nn.Module):
    def __init__(self, kind, remember=None):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.remember = kind, remember
        if kind == "conv":
            parts = [
                nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True))
                for _ in range(3)
            ]
        elif kind == "attention":
            parts = [Block() for _ in range(3)]
        else:
            shared = nn.Linear(WIDTH, WIDTH)
            parts = [nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        x = x.view(8, 4, 16, 16) if self.kind == "conv" else x
        for part in self.parts:
            if self.remember is None:
                x = part(x)
            else:
                x = checkpoint(part, x, use_reentrant=self.remember)
        return x


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(64, WIDTH, generator=draw).requires_grad_()


def gradients(net, tier, steps=2, autocast=False):
    """Gradients of some steps, after each of which the tier is empty."""
    found = []
    for step in range(steps):
        x = batch(step)
        torch.manual_seed(step)
        with tier, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(x).float().square().mean()
        loss.backward()
        found += [x.grad, *(p.grad for p in net.parameters())]
        net.zero_grad()
    return found


def equal(ours, wanted):
    assert len(ours) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize(
    ("kind", "remember", "autocast", "budget"),
    few(
        ["attention", "mlp", "conv"],
        [None, True, False],
        [False, True],
        [0, "80KiB", "600KiB", "1GiB"],
    ),
)
def test_equals_training_in_memory(store, kind, remember, autocast, budget):
    tier = commpress.activations(store, budget=budget, min_bytes=0)
    ours = gradients(Net(kind, remember), tier, autocast=autocast)
    equal(ours, gradients(Net(kind, remember), nullcontext(), autocast=autocast))
    tier.settle()
    assert not len(store)
    assert tier.counters.saved
    assert tier.counters.written or budget != 0
    assert not tier.counters.written or budget != "1GiB"


@pytest.mark.parametrize("autocast", [False, True])
def test_an_exact_codec_takes_fewer_bytes_and_changes_no_bit(store, autocast):
    plain = commpress.activations(store, budget=0, min_bytes=0)
    wanted = gradients(Net("attention", None), plain, autocast=autocast)
    tier = commpress.activations(store, budget=0, min_bytes=0, codec="exact")
    equal(gradients(Net("attention", None), tier, autocast=autocast), wanted)
    assert tier.counters.saved == plain.counters.saved
    assert 0 < tier.counters.written < 0.95 * plain.counters.written
    tier.settle()
    assert not len(store)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_blocks_of_an_exact_code(dtype):
    values = torch.randn(2 * (1 << 20) + 77).to(dtype)
    values[5], values[-1] = float("nan"), -0.0
    codec = saved_codec("exact")
    code, back = codec.encode(values), torch.empty_like(values)
    codec.decode(code, back)
    assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))
    assert code.numel() < (0.75 if dtype == torch.bfloat16 else 0.9) * values.nbytes


@pytest.mark.parametrize(("codec", "share", "near"), [("int8", 0.26, 0.02), ("bf16", 0.51, 0.01)])
def test_gradients_of_coded_tensors_are_those_of_rounded_ones(store, codec, share, near):
    """A linear layer's weight gradient is computed from the decoded input, all else is exact."""
    tier = commpress.activations(store, budget=0, min_bytes=0, codec=codec)
    net, x, plain = nn.Linear(256, 256), torch.randn(256, 256), {}
    for each, name in ((nullcontext(), "plain"), (tier, codec)):
        with each:
            y = net(x * 1)
        y.backward(torch.ones_like(y) * torch.arange(256.0)[:, None])
        plain[name] = [p.grad for p in (net.weight, net.bias)]
        net.zero_grad()
    (weight, bias), (ours, exact) = plain["plain"], plain[codec]
    assert torch.equal(bias, exact), "the bias needs no saved tensor"
    assert 0 < float((ours - weight).norm() / weight.norm()) < near
    assert tier.counters.written == tier.counters.read < share * tier.counters.saved
    assert tier.lossy


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_what_a_codec_does_not_take_returns_as_it_was(store, codec):
    """Numbers that are not finite, integers, float64, and two views of one storage."""
    tier = commpress.activations(store, budget=0, min_bytes=0, codec=codec)
    endless = torch.randn(300).masked_fill(torch.arange(300) % 7 == 0, float("-inf"))
    huge, void = torch.randn(300).masked_fill(endless < 0, 3e38), torch.full((300,), float("nan"))
    wide, bits = torch.randn(300, dtype=torch.float64), torch.randn(300)
    with tier:
        every = (endless, huge, void, wide, bits.view(torch.int32), torch.empty(0))
        packed = [tier._pack(each) for each in every]
        number = tier._pack(bits)
    tier.settle()
    for each, saved in zip(every, packed, strict=True):
        assert torch.equal(tier._unpack(saved).view(torch.int32), each.view(torch.int32))
    assert torch.allclose(tier._unpack(number), bits, atol=0.05)
    assert torch.equal(tier._unpack(number), bits) == (codec == "exact")


def test_storages_leave_memory(store):
    """The budget and what is in use are all that is in memory after a forward; nothing is there for
    a graph that has died."""
    alive, net = [], Net("mlp")
    for module in net.modules():
        if not list(module.children()):
            module.register_forward_hook(
                lambda _, __, y: alive.append((StorageWeakRef(y.untyped_storage()), y.nbytes))
            )
    peak = 0

    def resident(*_):
        nonlocal peak
        peak = max(peak, sum(size for reference, size in alive if not reference.expired()))

    for part in net.parts:
        part.register_forward_hook(resident)
        part.register_full_backward_hook(resident)
    tier = commpress.activations(store, budget=2 * ROW, min_bytes=ROW)
    with tier:
        loss = net(batch(0)).sum()
    loss.backward()
    tier.settle()
    assert peak <= 4 * ROW  # the budget, an input and an output; nine without it
    assert tier.counters.peak <= 3 * ROW
    assert len(alive) == 9
    alive.clear()
    with tier:
        loss = net(batch(0)).sum()
    tier.settle()
    assert len(store) == 5  # of seven: two inputs and results of tanh fit into half of the budget
    del loss
    tier.settle()
    assert not len(store)
    assert all(reference.expired() for reference, _ in alive)


def test_with_checkpointing_boundaries_leave_and_nothing_else(store):
    for remember in (True, False):
        tier = commpress.activations(store, budget=0, min_bytes=0)
        with tier:  # around the backward, too
            Net("attention", remember)(batch(0)).square().mean().backward()
        assert tier.counters.saved == 3 * ROW + ROW  # three inputs, and the result for the loss


def test_a_storage_is_kept_once(store):
    tier = commpress.activations(store, budget=0, min_bytes=0)
    x = batch(0)
    with tier:
        y = x * 2
        q, k, v = y.chunk(3, 1)[0], y.t(), y.expand(2, 64, WIDTH)
        loss = (y.sin() * y.cos()).sum() + q.exp().sum() + (k * k).sum() + (v * v).sum()
    saved = tier.counters.saved
    loss.backward()
    # y; sine and cosine for their product; the exponential of a part
    assert saved == 3 * ROW + 64 * -(-WIDTH // 3) * 4
    tier.settle()
    assert tier.counters.written == saved
    twin = batch(0)
    y = twin * 2
    q, k, v = y.chunk(3, 1)[0], y.t(), y.expand(2, 64, WIDTH)
    ((y.sin() * y.cos()).sum() + q.exp().sum() + (k * k).sum() + (v * v).sum()).backward()
    assert torch.equal(x.grad, twin.grad)


def test_parameters_their_views_small_tensors_and_kept_buffers_stay(store):
    net = nn.Linear(WIDTH, WIDTH)
    net.register_buffer("scale", torch.ones(64, WIDTH))
    x = torch.randn(64, WIDTH)  # not needed by the product with the scale
    found = []
    for keep, saved in ((None, 2 * ROW), (net, ROW), (None, 0)):
        tier = commpress.activations(store, budget=0, min_bytes=ROW, keep=keep)
        with tier if saved else nullcontext():
            y = F.linear(x, net.weight) * net.scale + (net.bias.exp() * net.bias).sum()
            y = y + (net.weight.t() * net.weight).sum()
        assert tier.counters.saved == saved
        y.sum().backward()
        found.append([p.grad for p in net.parameters()])
        net.zero_grad()
    equal(found[0], found[2])
    equal(found[1], found[2])


def test_a_graph_may_be_used_again(store):
    """Twice, and for second derivatives."""
    for budget in (0, 2 * ROW, "1GiB"):
        tier = commpress.activations(store, budget=budget, min_bytes=0)
        found = []
        for where in (tier, nullcontext()):
            net, x = Net("mlp"), batch(0)
            with where:
                loss = net(x).square().sum()
                loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            slope.square().sum().backward()
            found.append([x.grad, *(p.grad for p in net.parameters())])
        equal(*found)
        tier.settle()
        assert tier.counters.peak <= max(3 * ROW, 0 if budget != "1GiB" else 99 * ROW)
        del loss, slope, net, x
        gc.collect()
        tier.settle()
        assert not len(store)


def test_nothing_is_saved_without_gradients(store):
    tier, net = commpress.activations(store, budget=0, min_bytes=0), Net("mlp")
    with tier, torch.no_grad():
        net(batch(0))
    with torch.inference_mode(), tier:
        net(batch(0))
    assert tier.counters.saved == 0


@pytest.mark.parametrize("min_bytes", [0, "1GiB"])
def test_a_change_in_place_is_refused_as_without(store, min_bytes):
    def changed(where, change):
        net, x = nn.Linear(WIDTH, WIDTH), batch(0)
        with where:
            y = (x * 2).tanh()
            z = net(y).square().sum()
        change(net, y)
        z.backward()

    def step(net, _):
        with torch.no_grad():
            net.weight.mul_(2)

    def in_view(_, y):
        y[3].mul_(2)

    for change in (step, in_view):
        tier = commpress.activations(store, budget=0, min_bytes=min_bytes)
        for where in (tier, nullcontext()):
            with pytest.raises(RuntimeError, match=r"modified by an inplace .* expected version"):
                changed(where, change)
        gc.collect()
        tier.settle()
        assert not len(store)
    changed(tier, lambda net, y: None)


def test_in_place_functions_keep_what_each_needs(store):
    found = []
    tier = commpress.activations(store, budget=0, min_bytes=0)
    for where in (tier, nullcontext()):
        x = batch(0)
        with where:
            y = (x * 1).tanh_()
            z = y.clone().mul_(3).exp_()
            z.sum().backward()
        found.append([x.grad])
    equal(*found)


def test_a_storage_is_kept_again_after_a_change(store):
    """The older values are still in the graph, but no backward needs them."""
    found = []
    tier = commpress.activations(store, budget=0, min_bytes=0)
    for where in (tier, nullcontext()):
        x = batch(0)
        with where:
            y = x * 1
            unused = y.sin()
            y.mul_(2)
            y.cos().sum().backward()
        found.append([x.grad])
        del unused
    equal(*found)


def test_an_error_in_forward_leaves_nothing_behind(store):
    tier, net = commpress.activations(store, budget=0, min_bytes=0), Net("mlp")
    handle = net.parts[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), tier:
        net(batch(0))
    handle.remove()
    gc.collect()
    tier.settle()
    assert not len(store)
    equal(gradients(net, tier), gradients(Net("mlp"), nullcontext()))


def test_an_error_of_the_disk_is_raised_in_the_step_that_meets_it(tmp_path):
    net = Net("mlp")
    with open_store(tmp_path / "full", host=4 * ROW, writes_per_day=ROW // 2) as store:
        tier = commpress.activations(store, budget=2 * ROW, min_bytes=0)
        with pytest.raises(DiskFull, match="write budget"):
            gradients(net, tier, steps=1)
        gc.collect()
        try:
            tier.settle()
        except DiskFull:
            tier.settle()
        assert not len(store)
    assert all(p.grad is None for p in net.parameters())


def test_a_tensor_beyond_the_store_is_refused(tmp_path):
    with open_store(tmp_path / "small", host=ROW) as store:
        tier = commpress.activations(store, budget=0)
        with pytest.raises(OverBudget, match="raise its budget"), tier:
            (batch(0).repeat(9, 1).exp().tanh()).sum().backward()


def test_damage_is_raised_in_backward(tmp_path):
    with open_store(tmp_path / "store", host=2 * ROW) as store:
        tier = commpress.activations(store, budget=0, min_bytes=ROW)
        with tier:
            loss = Net("mlp")(batch(0)).sum()
        tier.settle()
        for segment in (tmp_path / "store").glob("segment-*"):
            segment.write_bytes(bytes(segment.stat().st_size))
        with pytest.raises(Damaged, match="activation"):
            loss.backward()


def test_a_closed_store_is_an_error(tmp_path):
    store = open_store(tmp_path / "store")
    tier = commpress.activations(store, budget=0, min_bytes=0)
    with tier:
        loss = Net("mlp")(batch(0)).sum()
    tier.settle()
    store.close()
    with pytest.raises(StorageError, match="closed"):
        loss.backward()


class Slow(HostBuffers):
    """A tier whose writes wait for permission, and which records the threads that read."""

    def __init__(self):
        super().__init__()
        self.go, self.begun, self.readers = threading.Event(), threading.Event(), []

    def put(self, name, values):
        self.begun.set()
        assert self.go.wait(60)
        super().put(name, values)

    def read(self, name, into):
        self.readers.append(threading.current_thread().name)
        super().read(name, into)


def test_what_is_still_leaving_is_used_at_once():
    slow, found = Slow(), []
    tier = Activations(slow, 100 * ROW, 0, ("cpu",))
    for where in (tier, nullcontext()):
        net, x = Net("mlp"), batch(0)
        with where:
            loss = net(x).sum()
            for _ in range(60):  # passes half of the budget: the first ones are due
                loss = loss + (x * 2).exp().mean()
        loss.backward()  # no write has ended
        found.append([x.grad, *(p.grad for p in net.parameters())])
        slow.go.set()
        tier.settle()
    equal(*found)
    assert not slow.readers
    assert not slow.buffers


def test_a_forward_waits_for_a_slow_tier():
    slow = Slow()
    tier = Activations(slow, 2 * ROW, ROW, ("cpu",))

    def forward():
        with tier:
            Net("mlp")(batch(0))

    thread = threading.Thread(target=forward)
    thread.start()
    assert slow.begun.wait(60)
    thread.join(0.5)
    assert thread.is_alive()
    slow.go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert tier.counters.peak == 3 * ROW


def test_the_next_ones_return_in_the_background():
    slow = Slow()
    slow.go.set()
    tier = Activations(slow, 8 * ROW, 0, ("cpu",))
    with tier:
        x = loss = batch(0)
        for _ in range(40):
            loss = loss.tanh()
            loss.register_hook(lambda gradient: tier.settle())  # gives the thread its time
    tier.settle()
    loss.sum().backward()
    assert slow.readers.count("activations") > 0.5 * len(slow.readers) > 10
    tier.settle()
    assert not slow.buffers
    assert tier.counters.peak <= 9 * ROW
    twin = y = batch(0)
    for _ in range(40):
        y = y.tanh()
    y.sum().backward()
    assert torch.equal(x.grad, twin.grad)


def test_buffers_of_the_host_hold_what_a_device_saves():
    buffers = HostBuffers()
    tier = Activations(buffers, 0, 0, ("cpu",))  # as if the processor were the device
    equal(gradients(Net("attention"), tier), gradients(Net("attention"), nullcontext()))
    assert tier.counters.read
    tier.settle()
    assert not buffers.buffers


def test_tensors_of_the_host_stay_there():
    tier = commpress.activations("host", budget=0, min_bytes=0)
    equal(gradients(Net("mlp"), tier), gradients(Net("mlp"), nullcontext()))
    assert tier.counters.saved == 0


def test_threads_share_a_tier(store):
    tier, found = commpress.activations(store, budget=2 * ROW, min_bytes=0), {}
    nets = {kind: Net(kind) for kind in ("mlp", "conv")}

    def run(kind):
        found[kind] = gradients(nets[kind], tier, steps=4)

    threads = [threading.Thread(target=run, args=(kind,)) for kind in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for kind in nets:
        equal(found[kind], gradients(Net(kind), nullcontext(), steps=4))
    tier.settle()
    assert not len(store)


def with_ddp(folder):
    found, rank = [], dist.get_rank()
    with open_store(f"{folder}/{rank}") as store:
        tier = commpress.activations(store, budget=0, min_bytes=0)
        for where in (tier, nullcontext()):
            net = DistributedDataParallel(Net("mlp"))
            with where:
                loss = net(batch(rank)).square().sum()
            loss.backward()
            found.append([p.grad for p in net.parameters()])
        equal(*found)
        return tier.counters.read


def test_under_ddp(pool, tmp_path):
    assert min(pool.run(with_ddp, str(tmp_path), size=2)) > 0


def test_with_a_streamed_model(tmp_path):
    """Parameters come and go while their views are saved."""
    found = []
    for tiered in (False, True):
        with (
            open_store(tmp_path / f"{tiered}", host="2MiB") as store,
            open_store(tmp_path / f"{tiered} saved", host="1MiB") as other,
        ):
            net = made()
            commpress.stream(net, store=store, chunk_mb=0.04)
            tier = commpress.activations(other, budget=0, min_bytes=0)
            with tier if tiered else nullcontext():
                found.append(train(net, offloaded(net, store), 0, 5))
            assert (tier.counters.read > 0) == tiered
    assert found[0] == found[1]


def test_around_a_compiled_model_it_works_and_inside_it_is_refused(store):
    tier, net = commpress.activations(store, budget=0, min_bytes=0), Net("mlp")
    wanted = gradients(Net("mlp"), nullcontext())
    equal(gradients(torch.compile(net, backend="aot_eager", fullgraph=True), tier), wanted)
    assert tier.counters.read

    class Inside(nn.Module):
        def forward(self, x):
            with tier:
                return net(x)

    with pytest.raises(Exception, match=r"context manager|enter it outside"):
        torch.compile(Inside(), backend="aot_eager", fullgraph=True)(batch(0))
    with pytest.raises(InvalidArgument, match="enter it outside, around the call"):
        torch.export.export(Inside(), (batch(0),), strict=False)
    before = tier.counters.saved  # a function in several graphs: between them the hooks are called
    torch.compile(Inside(), backend="aot_eager")(batch(0)).sum().backward()
    assert tier.counters.saved > before


def test_what_a_killed_run_has_committed_is_deleted(tmp_path):
    with open_store(tmp_path / "store") as store:
        store.put("activation/0123456789abcdef/1", torch.ones(9))
        store.put("other", torch.ones(9))
        store.commit()
    with open_store(tmp_path / "store") as store:
        first = commpress.activations(store, budget=0, min_bytes=0)
        with first:
            loss = batch(0).exp().sum()
        first.settle()
        commpress.activations(store)  # another one does not delete those of the first
        assert len(list(store)) == 2
        loss.backward()
        first.settle()
        assert list(store) == ["other"]


def test_it_ends_with_the_last_graph(store):
    tier = commpress.activations(store, budget=0, min_bytes=0)
    thread = next(t for t in reversed(threading.enumerate()) if t.name == "activations")
    gone = weakref.ref(tier)
    with tier:
        x = batch(0)
        loss = x.exp().sum()
    del tier
    assert gone() is not None
    loss.backward()
    del loss
    thread.join(60)
    assert not thread.is_alive()
    assert gone() is None
    assert torch.equal(x.grad, x.detach().exp())


def test_mistakes(store):
    for options, words in (
        ({"where": "disk"}, "where is 'disk', expected a TieredStore or 'host'"),
        ({"where": store, "budget": "a lot"}, "size is 'a lot'"),
        ({"where": store, "min_bytes": -1}, "size is -1"),
        ({"where": store, "keep": "model"}, "keep is 'model', expected a module"),
        ({"where": store, "codec": "sign"}, "codec is 'sign/rms/2048', expected int4"),
        ({"where": store, "codec": "tah4"}, "codec is 'tah4', which rotates"),
        ({"where": store, "codec": "fp16"}, "codec is 'fp16', in which saved tensors may overflow"),
        ({"where": "host", "codec": "exact"}, "codec is 'exact' with 'host'"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            commpress.activations(**options)
