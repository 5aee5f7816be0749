"""An optimizer in a store equals the one in memory, bit for bit; a killed run goes on from its last
commit."""

import re
import subprocess
import sys
from copy import deepcopy
from time import monotonic, sleep

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import commpress
import offload_run
from commpress.errors import InvalidArgument, NonFiniteGradient, StateMismatch
from commpress.integrations.zero.update_chunk import UpdateChunk
from offload_run import OPTIONS, loss_of, model, offloaded, open_store, train


def plain(net, **options):
    return torch.optim.AdamW(net.parameters(), **{**OPTIONS, **options})


def values(net):
    return [p.detach().clone() for p in net.parameters()]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store") as opened:
        yield opened


def check_state(optimizer, twin):
    mine, theirs = optimizer.state_dict()["state"], twin.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, one in theirs.items():
        assert one.keys() == mine[number].keys()
        assert all(torch.equal(one[key], mine[number][key]) for key in one), number


def test_equals_the_optimizer_in_memory(store):
    """20 steps, two backward passes each, torch's own clipping, a schedule; most of the state is on
    disk in between."""
    net, other = model(), model()
    optimizer, twin = offloaded(net, store), plain(other)
    train(net, optimizer, 0, 20)
    train(other, twin, 0, 20)
    assert equal(values(net), values(other))
    where = [store.info(name).tier for name in store]
    assert where.count("disk") > len(where) / 3
    assert where.count("host") > 6  # the first chunks stay
    check_state(optimizer, twin)


def in_memory(net, steps, limit):
    """Plain AdamW, clipped by a norm that is summed in double."""
    twin = plain(net)
    for step in range(steps):
        twin.zero_grad()
        for part in range(2):
            loss_of(net, step, part).backward()
        norm = (
            torch.stack([p.grad.double().square().sum() for p in net.parameters()])
            .sum()
            .sqrt()
            .float()
        )
        torch.nn.utils.clip_grads_with_norm_(net.parameters(), limit, norm)
        twin.step()
    return twin


def test_gradients_in_the_store(store):
    net, other = model(), model()
    optimizer = offloaded(net, store, gradients="store", max_grad_norm=0.3)
    for step in range(20):
        for part in range(2):
            loss_of(net, step, part).backward()
            assert all(p.grad is None for p in net.parameters())
        optimizer.step()
    twin = in_memory(other, 20, 0.3)
    assert equal(values(net), values(other))
    check_state(optimizer, twin)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adagrad, {"lr": 0.01})],
)
def test_other_optimizers(store, kind, options):
    net, other = model(), model()
    optimizer = commpress.Offloaded(net.parameters(), kind, store=store, chunk_mb=0.032, **options)
    twin = kind(other.parameters(), **options)
    for step in range(4):
        for one, o in ((net, optimizer), (other, twin)):
            o.zero_grad()
            loss_of(one, step, 0).backward()
            o.step()
    assert equal(values(net), values(other))


def test_half_precision_has_its_master_in_the_store(store):
    net, other = model().bfloat16(), model().bfloat16()
    optimizer = offloaded(net, store)
    master = [p.detach().float() for p in other.parameters()]
    twin = torch.optim.AdamW(master, **OPTIONS)
    for step in range(4):
        for one in (net, other):
            one.zero_grad()
            generator = torch.Generator().manual_seed(step)
            one(
                torch.randn(8, 64, generator=generator).bfloat16()
            ).float().square().mean().backward()
        optimizer.step()
        for p, m in zip(other.parameters(), master, strict=True):
            m.grad = p.grad.float()
        twin.step()
        with torch.no_grad():
            for p, m in zip(other.parameters(), master, strict=True):
                p.copy_(m)
    assert equal(values(net), values(other))


def test_goes_on_after_a_kill(tmp_path):
    """Killed somewhere after step 7, with commits after steps 2 and 5: the run that goes on equals
    one never stopped."""
    command = [sys.executable, offload_run.__file__, str(tmp_path / "store"), "0", "1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == "7":
                process.kill()
                break
    net, other = model(), model()
    with open_store(tmp_path / "store") as store:
        optimizer = offloaded(net, store)
        assert optimizer.steps_done >= 6
        assert optimizer.steps_done % 3 == 0
        last = optimizer.steps_done + 4
        train(net, optimizer, optimizer.steps_done, last)
        twin = plain(other)
        train(other, twin, 0, last)
        assert equal(values(net), values(other))
        check_state(optimizer, twin)


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


def test_budgets_place_the_first_chunks(tmp_path):
    """The processor stands for the device. A chunk stays where its budget is, the others are on
    disk between steps."""
    sizes = {
        "host": "1MiB",
        "device": "256KiB",
        "accelerator": "cpu",
        "engine": "threads",
        "options": offload_run.SMALL,
    }
    with commpress.TieredStore.open(tmp_path / "store", **sizes) as store:
        net, other = model(), model()
        optimizer, twin = (
            offloaded(net, store, resident={"device": "200KiB", "host": "200KiB"}),
            plain(other),
        )
        train(net, optimizer, 0, 20)
        train(other, twin, 0, 20)
        assert equal(values(net), values(other))
        check_state(optimizer, twin)
        tiers = [chunk.tier for chunk in optimizer.chunks]
        assert tiers == sorted(tiers, key=["device", "host", "disk"].index)
        assert len(set(tiers)) == 3
        optimizer.step()
        for chunk in optimizer.chunks:
            # on a busy machine what goes to the disk may still be on its way
            latest = monotonic() + 20
            while (tiers := {store.info(name).tier for name in chunk.names()}) != {
                chunk.tier
            } and monotonic() < latest:
                sleep(0.01)
            assert tiers == {chunk.tier}
        lines = optimizer.report().splitlines()
        assert lines[0].split() == ["device", "host", "disk"]
        assert [line.split()[0] for line in lines[1:]] == [
            "master",
            "exp_avg",
            "exp_avg_sq",
            "together",
            "update",
        ]
        with pytest.raises(InvalidArgument, match="of 'host'"):
            offloaded(net, store, prefix="more", resident={"host": "1MiB"})
        with pytest.raises(InvalidArgument, match="of 'device'"):
            offloaded(net, store, prefix="more", resident={"device": "1MiB"})


class Watch(TorchDispatchMode):
    """Bytes of every operation with operands on both sides, where the processor has a part that
    stands for a device."""

    def __init__(self, device):
        super().__init__()
        self.device, self.up, self.down = {t.untyped_storage().data_ptr() for t in device}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        inside = [t.untyped_storage().data_ptr() in self.device for t in tensors]
        if func is torch.ops.aten.copy_.default and inside == [True, False]:
            self.up += tensors[0].nbytes
        elif inside and not inside[0]:
            self.down += sum(t.nbytes for t, here in zip(tensors, inside, strict=True) if here)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_grad_norm", [None, 0.3])
def test_bytes_between_host_and_device(tmp_path, dtype, max_grad_norm):
    """ZeRO-Offload's: gradients down and parameters up once, but for chunks that are on the device;
    2 and 2 bytes in halves."""
    sizes = {
        "host": "1MiB",
        "device": "256KiB",
        "accelerator": "cpu",
        "engine": "threads",
        "options": offload_run.SMALL,
    }
    with commpress.TieredStore.open(tmp_path / "store", **sizes) as store:
        net = model().to(dtype)
        optimizer = offloaded(
            net, store, resident={"device": "200KiB"}, max_grad_norm=max_grad_norm
        )
        for step in range(3):
            net(torch.full((8, 64), 0.1 + step, dtype=dtype)).float().square().mean().backward()
            arrays = [store._residency.device.bytes, optimizer._gradients._buffers["device"]]
            before = store.crossing.up, store.crossing.down
            with Watch([*net.parameters(), *(p.grad for p in net.parameters()), *arrays]) as watch:
                optimizer.step()
            counted = store.crossing.up - before[0], store.crossing.down - before[1]
            optimizer.zero_grad()
        numel = [
            sum(run.numel for c in optimizer.chunks if c.on == on for run in c.ranges)
            for on in ("host", "device")
        ]
        assert min(numel) > 10_000
        assert counted == (numel[0] * dtype.itemsize, numel[0] * dtype.itemsize)
        assert (watch.up, watch.down) == counted


def test_it_clips_as_it_should(store):
    """By its own norm, gradients in the parameters, accumulated over two backward passes."""
    net, other = model(), model()
    optimizer = offloaded(net, store, max_grad_norm=0.3)
    for step in range(20):
        optimizer.zero_grad()
        for part in range(2):
            loss_of(net, step, part).backward()
        optimizer.step()
    twin = in_memory(other, 20, 0.3)
    assert equal(values(net), values(other))
    check_state(optimizer, twin)


def test_quantised_moments(store):
    """Smaller on disk, exact in the first step, and training goes the same way as with float32."""
    net, other = model(), model()
    optimizer, twin = offloaded(net, store, moments="int8", lr=1e-3), plain(other, lr=1e-3)
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
    assert held == pytest.approx(
        (1 + 1 / 32) * sum(chunk.numel for chunk in optimizer.chunks), rel=0.02
    )
    state, wanted = optimizer.state_dict()["state"], twin.state_dict()["state"]
    assert state[0]["exp_avg"].shape == wanted[0]["exp_avg"].shape


@pytest.mark.parametrize(
    ("moments", "why"),
    [("int4", "steps shrink as the values in a block of 128 spread"), ("int3", "")],
)
def test_moments_of_other_widths_are_refused_before_the_store_holds_anything(store, moments, why):
    with pytest.raises(
        InvalidArgument,
        match=rf"moments is '{moments}', expected 'int8' or None for float32.*{why}",
    ):
        offloaded(model(), store, moments=moments)
    assert list(store) == []


def test_a_delayed_update(store):
    """The update with the gradients of one step is taken after the backward of the next: as said
    step by step."""
    net, other = model(), model()
    optimizer, twin = offloaded(net, store, gradients="delayed"), plain(other)
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
            advance(other, twin, *waiting)
        waiting = (rate, new)
        assert equal(values(net), values(other))
    optimizer.finish()
    advance(other, twin, *waiting)
    assert equal(values(net), values(other))
    check_state(optimizer, twin)
    optimizer.close()


def test_a_chunk_that_is_waited_for_is_updated_by_one_thread_and_others_leave_one_to_the_disk(
    store, monkeypatch
):
    threads, step, before = [], UpdateChunk.step, torch.get_num_threads()
    monkeypatch.setattr(
        UpdateChunk, "step", lambda *args: threads.append(torch.get_num_threads()) or step(*args)
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


def advance(net, twin, rate, gradients):
    twin.param_groups[0]["lr"] = rate
    for p, gradient in zip(net.parameters(), gradients, strict=True):
        p.grad = gradient
    twin.step()


def test_weights_that_were_loaded_are_taken(store):
    net, other = model(), model()
    optimizer, twin = offloaded(net, store), plain(other)
    train(net, optimizer, 0, 2)
    train(other, twin, 0, 2)
    new = {key: value + 0.5 for key, value in net.state_dict().items()}
    net.load_state_dict(new)
    other.load_state_dict(new)
    train(net, optimizer, 2, 4)
    train(other, twin, 2, 4)
    assert equal(values(net), values(other))


def test_a_step_that_is_not_finite_is_left_out(store):
    net = model()
    optimizer = offloaded(net, store, max_grad_norm=1.0)
    train(net, optimizer, 0, 1)
    before = values(net)
    (loss_of(net, 1, 0) * float("nan")).backward()
    optimizer.step()
    assert equal(values(net), before)
    assert (optimizer.steps_done, optimizer.skipped_steps) == (1, 1)
    optimizer.on_nonfinite = "raise"
    with pytest.raises(NonFiniteGradient):
        optimizer.step()


@pytest.mark.parametrize("store", ["offload", None, {"device": "cpu"}])
def test_a_store_that_is_none_is_named_with_the_call_that_opens_one(store):
    with pytest.raises(
        InvalidArgument,
        match=rf"^store is {re.escape(repr(store))}, expected .*TieredStore\.open\(folder",
    ):
        commpress.Offloaded(torch.nn.Linear(3, 3).parameters(), torch.optim.AdamW, store=store)


def test_what_cannot_work_is_refused(store):
    net = model()
    with pytest.raises(InvalidArgument, match="smaller chunk_mb"):
        offloaded(net, store, chunk_mb=64.0)
    with pytest.raises(InvalidArgument, match="gradients is"):
        offloaded(net, store, gradients="disk")
    optimizer = offloaded(net, store)
    optimizer.commit()
    with pytest.raises(StateMismatch, match="other parameters"):
        commpress.Offloaded(net.parameters(), torch.optim.SGD, store=store, chunk_mb=0.032, lr=0.1)
    with pytest.raises(StateMismatch, match="groups of"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})


@pytest.mark.parametrize("source", ["plain", "offloaded"])
def test_a_state_is_loaded_and_the_plain_optimizer_loads_it(store, source):
    """Four steps by one optimizer, four by another, of every kind: as eight by one."""
    other = model()
    twin = plain(other)
    train(other, twin, 0, 4)
    saved, weights = (
        twin.state_dict(),
        {key: value.clone() for key, value in other.state_dict().items()},
    )
    if source == "offloaded":
        net = model()
        first = offloaded(net, store, prefix="first")
        train(net, first, 0, 4)
        saved = first.state_dict()
        third, again = model(), None
        third.load_state_dict(weights)
        again = plain(third)
        # the plain optimizer counts steps in the tensors it is given
        again.load_state_dict(deepcopy(saved))
        train(third, again, 4, 8)
    net = model()
    net.load_state_dict(weights)
    optimizer = offloaded(net, store)
    optimizer.load_state_dict(saved)
    assert optimizer.steps_done == 4
    train(net, optimizer, 4, 8)
    train(other, twin, 4, 8)
    assert equal(values(net), values(other))
    assert source == "plain" or equal(values(third), values(other))
    optimizer.load_state_dict(plain(net).state_dict())
    assert not optimizer.state
