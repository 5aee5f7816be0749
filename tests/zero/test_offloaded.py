"""An optimizer in a store equals the one in memory, bit for bit; a killed run goes on from its last
commit."""

from time import monotonic, sleep

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import commpress
from commpress.errors import InvalidArgument
from commpress.integrations.zero.update_chunk import UpdateChunk
from offload_run import OPTIONS, loss_of, model, offloaded, train
from small_store import open_store
from variants import seldom
from zero_twin import Masters, clip, equal, equal_states, values

WITH_A_DEVICE = {
    "device": "256KiB",
    "accelerator": "cpu",
}  # the processor stands for it


def plain(net, **options):
    return torch.optim.AdamW(net.parameters(), **{**OPTIONS, **options})


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def beside_a_device(tmp_path):
    with open_store(tmp_path / "store", **WITH_A_DEVICE) as opened:
        yield opened


def check(net, optimizer, other, twin):
    assert equal(values(net), values(other))
    equal_states(optimizer.state_dict()["state"], twin.state_dict()["state"])


@pytest.mark.parametrize(
    "options",
    [
        seldom({}),
        {"max_grad_norm": 0.3},
        seldom({"max_grad_norm": 0.3, "gradients": "store"}),  # test_offloaded_fsdp.py
    ],
    ids=["clipped by the user", "clipped", "gradients in the store"],
)
def test_equals_the_optimizer_in_memory(store, options):
    """20 steps, two backward passes each, a schedule; most of the state is on disk in between."""
    net, other = model(), model()
    optimizer, twin = offloaded(net, store, **options), plain(other)
    for step in range(20):
        for one, o in ((net, optimizer), (other, twin)):
            o.param_groups[0]["lr"] = 1e-2 * 0.95**step
            for part in range(2):
                loss_of(one, step, part).backward()
                assert ("gradients" not in options or one is other) == (
                    one[0].weight.grad is not None
                )
            if one is other or not options:
                clip(one.parameters(), 0.3)
            o.step()
            o.zero_grad()
    where = [store.info(name).tier for name in store]
    assert where.count("disk") > len(where) / 3
    assert where.count("host") > 6  # the first chunks stay
    check(net, optimizer, other, twin)


USED = [(0, 1), (0,), (1, 0), (1,), (2, 0), (0, 1, 2), (2,)]  # in each step


class InTurn(torch.nn.Module):
    """Layers of which each step uses some; one of them comes late, one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(4))

    def forward(self, x, step):
        for layer in USED[step]:
            x = self.layers[layer](x)
        return x

    def learn(self, optimizer, steps, limit=None):
        for step in steps:
            x = torch.randn(8, 24, generator=torch.Generator().manual_seed(step))
            self(x, step).square().mean().backward()
            if limit:
                clip(self.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()


SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}  # its first step differs


@pytest.mark.parametrize(
    ("kind", "settings", "options"),
    [
        (torch.optim.AdamW, {"lr": 0.1}, {}),
        (torch.optim.AdamW, {"lr": 0.1}, {"gradients": "store", "max_grad_norm": 0.05}),
        (torch.optim.AdamW, {"lr": 0.1}, {"gradients": "delayed"}),
        (torch.optim.SGD, SGD, {"chunk_mb": 0.003}),
    ],
    ids=["", "in the store, clipped", "delayed", "cut"],
)
def test_layers_used_in_turn_have_the_steps_of_the_optimizer_in_memory(
    tmp_path, kind, settings, options
):
    """Also from a commit, before some of the layers were used, and from the plain state."""
    other, half = InTurn(), len(USED) // 2
    twin = kind(other.parameters(), **settings)
    delayed = options.get("gradients") == "delayed"
    for steps in (range(half), range(half, len(USED))):
        other.learn(twin, steps, options.get("max_grad_norm"))
        net = InTurn()
        with open_store(tmp_path / "store") as store:
            optimizer = commpress.Offloaded(
                net.parameters(), kind, store=store, **settings, **options
            )
            for step in steps:  # of a delayed one, none is late
                net.learn(optimizer, [step])
                optimizer.finish() if delayed else None
            check(net, optimizer, other, twin)
            optimizer.load_state_dict(twin.state_dict())
            check(net, optimizer, other, twin)
            optimizer.commit()
            optimizer.close()


def test_half_precision_has_its_master_in_the_store(store):
    net, other = model().bfloat16(), model().bfloat16()
    optimizer, twin = offloaded(net, store), Masters(other.parameters(), **OPTIONS)
    for step in range(4):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        for one, o in ((net, optimizer), (other, twin)):
            one(x).float().square().mean().backward()
            o.step()
        optimizer.zero_grad()
    assert equal(values(net), values(other))


def test_an_optimizer_that_is_closed_writes_no_more(store):
    both = [offloaded(model(), store, prefix=name) for name in "ab"]
    both[0].commit()
    both[1].close()
    store.delete("b/meta")
    store.commit()
    assert "a/meta" in store
    assert "b/meta" not in store


def test_a_state_that_was_loaded_is_committed_though_it_counts_no_steps(tmp_path):
    """Load the moments of SGD, which would else begin anew."""
    net, options = torch.nn.Linear(8, 8), {"lr": 0.1, "momentum": 0.9}
    plain = torch.optim.SGD(net.parameters(), **options)
    net(torch.ones(2, 8)).square().mean().backward()
    plain.step()
    with open_store(tmp_path / "store") as store:
        optimizer = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, **options)
        optimizer.load_state_dict(plain.state_dict())
        optimizer.commit()
    with open_store(tmp_path / "store") as store:
        resumed = commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, **options)
        equal_states(resumed.state_dict()["state"], plain.state_dict()["state"])


def test_bytes_of_a_step(store):
    """State that does not stay is read and written once: 12 bytes per parameter each way with
    AdamW."""
    net = model()
    optimizer = offloaded(net, store)
    train(net, optimizer, 0, 2)
    written = written_in_the_end(store)
    train(net, optimizer, 2, 6)
    passing = [chunk for chunk in optimizer.chunks if chunk.passes]
    wanted = 4 * sum(12 * chunk.numel for chunk in passing)
    assert len(passing) > 5
    assert written_in_the_end(store) - written == pytest.approx(wanted, rel=0.05)


def written_in_the_end(store):
    """Bytes written, once nothing has moved for a second: on a busy machine a write may begin
    late."""
    seen = []
    while len(seen) < 20 or len(set(seen[-20:])) > 1:
        moving = sum(
            block.moving is not None or block.flushing for block in store._catalog.names.values()
        )
        seen.append((moving, store.wear.written))
        sleep(0.05)
    moving, written = seen[-1]
    assert not moving
    return written


def test_budgets_place_the_first_chunks(beside_a_device):
    """A chunk stays where its budget is, the others are on disk between steps."""
    store, net, other = beside_a_device, model(), model()
    optimizer = offloaded(net, store, resident={"device": "200KiB", "host": "200KiB"})
    twin = plain(other)
    train(net, optimizer, 0, 20)
    train(other, twin, 0, 20)
    check(net, optimizer, other, twin)
    tiers = [chunk.tier for chunk in optimizer.chunks]
    assert tiers == sorted(tiers, key=["device", "host", "disk"].index)
    assert len(set(tiers)) == 3
    optimizer.step()
    latest = monotonic() + 20  # on a busy machine what goes to the disk may still be on its way
    for chunk in optimizer.chunks:
        while {store.info(name).tier for name in chunk.names()} != {chunk.tier}:
            assert monotonic() < latest
            sleep(0.01)
    lines = optimizer.report().splitlines()
    assert lines[0].split() == ["device", "host", "disk"]
    kinds = ["master", "exp_avg", "exp_avg_sq", "together", "update"]
    assert [line.split()[0] for line in lines[1:]] == kinds
    for tier in ("host", "device", "moon"):
        with pytest.raises(InvalidArgument, match=f"of '{tier}'"):
            offloaded(net, store, prefix="more", resident={tier: "1MiB"})


@pytest.mark.parametrize("spare", [8 << 10, -(8 << 10)])
def test_a_state_that_fits_into_host_memory_needs_no_room_for_passing_chunks(tmp_path, spare):
    """Nothing is written to the disk then; with a little less memory, some chunks pass."""
    net = model()
    with open_store(tmp_path / "large", host="8MiB") as store:
        optimizer = offloaded(net, store)
        whole = sum(map(optimizer._needed, optimizer.chunks))
        optimizer.close()
    with open_store(tmp_path / "store", host=whole + spare) as store:
        optimizer = offloaded(net, store)
        before = store.traffic()
        train(net, optimizer, 0, 3)
        resident = {chunk.tier for chunk in optimizer.chunks} == {"host"}
        assert resident == (spare > 0) == (store.traffic() == before)
        optimizer.close()


def test_a_chunk_that_does_not_fit_is_refused(tmp_path):
    with (
        open_store(tmp_path, host="128KiB") as store,
        pytest.raises(InvalidArgument, match="smaller chunk_mb"),
    ):
        offloaded(model(), store, chunk_mb=64.0)


class Watch(TorchDispatchMode):
    """Bytes of every operation with operands on both sides, where the processor has a part that
    stands for a device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.up, self.down = (
            {t.untyped_storage().data_ptr() for t in device},
            0,
            0,
        )

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        inside = [t.untyped_storage().data_ptr() in self.device for t in tensors]
        if func is torch.ops.aten.copy_.default and inside == [True, False]:
            self.up += tensors[0].nbytes
        elif inside and not inside[0]:
            self.down += sum(t.nbytes for t, here in zip(tensors, inside, strict=True) if here)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "max_grad_norm"), [(torch.float32, None), (torch.bfloat16, 0.3)], ids=str
)
def test_bytes_between_host_and_device(beside_a_device, dtype, max_grad_norm):
    """ZeRO-Offload's: gradients down and parameters up once, but for chunks that are on the device;
    2 and 2 bytes in halves."""
    store, net = beside_a_device, model().to(dtype)
    optimizer = offloaded(net, store, resident={"device": "200KiB"}, max_grad_norm=max_grad_norm)
    for step in range(3):
        net(torch.full((8, 64), 0.1 + step, dtype=dtype)).float().square().mean().backward()
        arrays = [
            store._residency.device.bytes,
            optimizer._gradients._buffers["device"],
        ]
        before = store.crossing.up, store.crossing.down
        with Watch([*net.parameters(), *(p.grad for p in net.parameters()), *arrays]) as watch:
            optimizer.step()
        counted = store.crossing.up - before[0], store.crossing.down - before[1]
        optimizer.zero_grad()
    numel = {on: 0 for on in ("host", "device")}
    for chunk in optimizer.chunks:
        numel[chunk.on] += sum(run.numel for run in chunk.ranges)
    assert min(numel.values()) > 10_000
    assert counted == (watch.up, watch.down) == (numel["host"] * dtype.itemsize,) * 2


def test_quantised_moments(store):
    """Smaller on disk, exact in the first step, and training goes the same way as with float32."""
    net, other = model(), model()
    optimizer, twin = (
        offloaded(net, store, moments="int8", lr=1e-3),
        plain(other, lr=1e-3),
    )
    losses = []
    for step in range(30):
        for one, o in ((net, optimizer), (other, twin)):
            o.zero_grad()
            loss = sum(loss_of(one, 0, part) for part in range(2))
            loss.backward()
            o.step()
            losses.append(loss.item())
        if step == 0:
            assert equal(values(net), values(other))
    start, end = losses[1], losses[-1]
    assert losses[-2] < start - 0.9 * (start - end)
    assert losses[-2] != end
    held = sum(store.info(chunk.name("exp_avg")).nbytes for chunk in optimizer.chunks)
    numel = sum(chunk.numel for chunk in optimizer.chunks)
    assert held == pytest.approx((1 + 1 / 32) * numel, rel=0.02)
    state, wanted = optimizer.state_dict()["state"], twin.state_dict()["state"]
    assert state[0]["exp_avg"].shape == wanted[0]["exp_avg"].shape


def test_a_delayed_update(store):
    """The update with the gradients of one step is taken after the backward of the next."""
    net, other = model(), model()
    optimizer, twin = offloaded(net, store, gradients="delayed"), plain(other)

    def advance(rate, gradients):
        twin.param_groups[0]["lr"] = rate
        for p, gradient in zip(other.parameters(), gradients, strict=True):
            p.grad = gradient
        twin.step()

    waiting = None
    for step in range(8):
        optimizer.param_groups[0]["lr"] = rate = 1e-2 * 0.9**step
        for one in (net, other):
            one.zero_grad()
            loss_of(one, step, 0).backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 0.3)
        optimizer.step()
        assert all(p.grad is None for p in net.parameters())
        new = [p.grad.clone() for p in other.parameters()]
        if waiting is not None:
            advance(*waiting)
        waiting = (rate, new)
        assert equal(values(net), values(other))
    optimizer.finish()
    advance(*waiting)
    check(net, optimizer, other, twin)
    optimizer.close()


def test_a_chunk_that_is_waited_for_is_updated_by_one_thread_and_others_leave_one_to_the_disk(
    store, monkeypatch
):
    threads, step, before = [], UpdateChunk.step, torch.get_num_threads()
    monkeypatch.setattr(
        UpdateChunk,
        "step",
        lambda *args: threads.append(torch.get_num_threads()) or step(*args),
    )
    net = model()
    optimizer = offloaded(net, store)
    torch.set_num_threads(3)
    try:
        for evicted in (False, True):
            if evicted:
                store.evict(list(store)).wait()
            train(net, optimizer, int(evicted), int(evicted) + 1)
            assert threads[0] == (1 if evicted else 2)
            threads.clear()
            assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            {"store": "offload"},
            r"^store is 'offload', expected .*TieredStore\.open\(folder",
        ),
        ({"gradients": "disk"}, "gradients is 'disk'"),
        (
            {"moments": "int4"},
            "'int8' or None for float32.*steps shrink as the values in a block",
        ),
        ({"moments": "int3"}, "moments is 'int3', expected 'int8' or None for float32"),
        ({"chunk_mb": "1"}, "chunk_mb is '1', expected a positive number"),
        ({"commit_every": -1}, "commit_every is -1, expected a whole number of at least 0"),
        ({"max_grad_norm": "1"}, "max_grad_norm is '1', expected a positive number or None"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_store_holds_anything(store, options, error):
    options = {"store": store, "chunk_mb": 0.032, "lr": 0.1} | options
    with pytest.raises(InvalidArgument, match=error):
        commpress.Offloaded(model().parameters(), torch.optim.SGD, **options)
    assert list(store) == []
