"""Training state that was parked is the same afterwards, bit for bit, and in between a checkpoint
on the disk."""

import copy
import ctypes
import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import commpress
import parked_run
from commpress.errors import Damaged, DirectoryRefused, DiskFull, InvalidArgument, StateMismatch
from commpress.integrations.zero.parked_state import StateStorage
from commpress.integrations.zero.parking import Parked
from commpress.tiered_mem import TieredStore
from parked_run import LM, Halves, advance, made
from ranks import FORKS
from small_store import open_store
from state_worlds import apart
from variants import first

SCRIPT = Path(__file__).parents[1] / "support/parked_run.py"


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), 1e-2, **options)


OPTIMIZERS = {
    "sgd": sgd,
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1),
    "foreach": lambda model: adamw(model, foreach=True),
    "fused": lambda model: adamw(model, fused=True),
    "amsgrad": lambda model: adamw(model, amsgrad=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), 1e-2),
    "onebit": lambda model: commpress.OneBitAdam(model.parameters(), 1e-2),
    "muon": lambda model: commpress.Muon(
        [{"params": [p], "use_muon": p.dim() == 2} for p in model.parameters()], 1e-2
    ),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), 0.1, history_size=3),
}


def state_of(model, *optimizers):
    """Copies of all tensors, and the numbers of the optimizers."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return copy.deepcopy([model.state_dict(), gradients, *(o.state_dict() for o in optimizers)])


def equal(ours, wanted):
    assert not apart(ours, wanted)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits(tmp_path, name):
    """Parked after each step, twice within a step, and once more without a change."""
    twin, model = LM(), LM()
    plain, optimizer = OPTIMIZERS[name](twin), OPTIMIZERS[name](model)
    park = commpress.parked(model, optimizer, store=tmp_path / "park")
    for step in range(4):
        advance(twin, plain, step)
        advance(model, optimizer, step, between=park)
        with park:
            pass
        with park:
            assert park.counters.freed > 0
        equal(state_of(model, optimizer), state_of(twin, plain))
    park.settle()
    loaded = LM()
    other = OPTIMIZERS[name](loaded)
    commpress.load_parked(loaded, other, store=tmp_path / "park")
    equal(state_of(loaded, other), state_of(twin, plain))
    advance(twin, plain, 9)
    advance(loaded, other, 9)
    equal(state_of(loaded, other), state_of(twin, plain))


def test_tensors_storages_and_views_stay(tmp_path):
    model, optimizer = made(parts=[0])
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    at = 0
    for p in model.parameters():  # views of one storage
        p.data = flat[at : at + p.numel()].view_as(p)
        at += p.numel()
    flat.numpy()  # after which its storage can never be resized
    advance(model, optimizer, 0)
    model(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()  # gradients, too
    every = [*model.parameters(), *(p.grad for p in model.parameters()), flat]
    every += [t for state in optimizer.state.values() for t in state.values()]
    before = [(id(t), t.data_ptr(), t._version, t.detach().clone()) for t in every]
    park = commpress.parked(model, optimizer, store=tmp_path / "park")
    with park:
        assert not flat[4096:-4096].any()  # at the edges are pages of others
    park.settle()
    for tensor, (number, address, version, values) in zip(every, before, strict=True):
        assert (id(tensor), tensor.data_ptr(), tensor._version) == (number, address, version)
        assert torch.equal(tensor, values)


def test_a_graph_is_valid_afterwards(tmp_path):
    found = []
    for parks in (False, True):
        model, optimizer = made(parts=[0])
        loss = model(torch.arange(8)[None]).square().sum()
        if parks:
            with commpress.parked(model, optimizer, store=tmp_path / "park"):
                pass
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    equal(*found)


def resident():
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) << 10


def test_memory_is_free_and_never_holds_a_second_copy(tmp_path):
    """A process of its own with 400 MB of state."""
    said = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "park"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    state, before, parked, highest, after = map(int, said.split())
    assert state > 390e6
    assert before - parked > 0.95 * state
    assert highest < before + 0.1 * state
    assert after < before + 0.1 * state


def test_a_half_precision_copy_is_recomputed_where_that_is_exact(tmp_path):
    twin, model = Halves(), Halves()
    store = open_store(tmp_path / "store", host="8MiB")
    park = commpress.parked(model.half, model.optimizer, store=store)
    size = sum(p.nbytes for p in model.half.parameters())
    for step in range(3):
        twin.step(step)
        model.step(step)
        with park:
            assert park.counters.recomputed == size
            assert not model.half.up.weight[32:-32].any()
        equal(state_of(model.half, model.optimizer), state_of(twin.half, twin.optimizer))
    with torch.no_grad():  # now one of them is not the rounded master
        model.half.up.weight[-1, -1].add_(1.0)
        twin.half.up.weight[-1, -1].add_(1.0)
    with park:
        assert park.counters.recomputed == size - model.half.up.weight.nbytes
    equal(state_of(model.half, model.optimizer), state_of(twin.half, twin.optimizer))
    loaded = Halves(seed=7)
    commpress.load_parked(loaded.half, loaded.optimizer, store=store)
    equal(state_of(loaded.half, loaded.optimizer), state_of(twin.half, twin.optimizer))
    equal([p.data for p in loaded.masters], [p.data for p in twin.masters])
    store.close()


def test_what_has_not_changed_is_not_written_again(tmp_path):
    model, optimizer = made(parts=[0])
    for p in model.body.parameters():
        p.requires_grad_(False)
    optimizer = adamw(model.head)
    with open_store(tmp_path / "store", host="8MiB") as store:
        park = commpress.parked(model, optimizer, store=store)
        for step in range(2):
            advance(model, optimizer, step)
            with park:
                frozen = sum(p.nbytes for p in model.body.parameters())
        assert frozen <= park.counters.unchanged < park.counters.written + frozen
        with commpress.parked(model, optimizer, store=store) as again:
            pass
        assert again.counters.written == 0
        assert any("/gradients/" in name for name in store)
        optimizer.zero_grad()
        with park:
            assert not any("/gradients/" in name for name in store)


def test_an_interrupted_write_is_not_trusted_later(tmp_path):
    """The store has newer pieces than the checkpoint, and the state returns to the older values."""
    model, optimizer = made(parts=[0])
    with open_store(tmp_path / "store", host="8MiB") as store:
        park = commpress.parked(model, optimizer, store=store)
        with park:
            pass
        before = state_of(model, optimizer)
        advance(model, optimizer, 0)
        store.put, put = lambda name, t: put(name, t) if "/state/" not in name else 1 / 0, store.put
        with pytest.raises(ZeroDivisionError):
            park.park()
        store.put = put
        again, other = made(parts=[])
        store.commit()
        commpress.load_parked(again, other, store=store)  # the checkpoint before
        equal(state_of(again, other), before)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(before[0][name])
        wanted = state_of(model, optimizer)
        with commpress.parked(model, optimizer, store=store):
            pass
        equal(state_of(model, optimizer), wanted)


def test_a_store_and_tensors_of_others_that_are_away_are_refused(tmp_path):
    model, optimizer = made(parts=[0])
    other = torch.nn.Linear(8, 8)
    with open_store(tmp_path / "store", host="8MiB") as store:
        park = commpress.parked(model, optimizer, store=store)
        with park, pytest.raises(InvalidArgument, match=r"state of another commpress\.parked"):
            commpress.parked(other, store=store).park()
        with pytest.raises(InvalidArgument, match=r"call its settle\(\) first"):
            commpress.parked(other, store=store).park()
        park.settle()
        with commpress.parked(other, store=store):
            pass
    shares = torch.nn.Module()
    shares.weight = next(model.parameters())
    with (
        commpress.parked(model, store=tmp_path / "one"),
        pytest.raises(InvalidArgument, match="with another model that has the same tensor"),
    ):
        commpress.parked(shares, store=tmp_path / "two").park()


def test_copies_of_an_optimizer_whose_state_is_on_its_way(tmp_path):
    model, optimizer = made(parts=[0])
    wanted = optimizer.state_dict()["state"]
    for copied in (copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))):
        with commpress.parked(model, optimizer, store=tmp_path / "park"):
            pass
        found = copied(optimizer).state_dict()["state"]
        assert all(
            torch.equal(value, found[i][key])
            for i, entries in wanted.items()
            for key, value in entries.items()
        )


def test_an_optimizer_with_other_groups_is_refused_before_anything_changes(tmp_path):
    model, optimizer = made(parts=[0])
    with commpress.parked(model, optimizer, store=tmp_path / "park") as park:
        pass
    park.settle()
    advance(model, optimizer, 0)
    wanted = [p.clone() for p in model.parameters()]
    first, *rest = model.parameters()
    other = torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    with pytest.raises(StateMismatch, match=r"others\[0\] has groups .* optimizer of \[1, "):
        commpress.load_parked(model, other, store=tmp_path / "park")
    assert all(map(torch.equal, model.parameters(), wanted))


def test_while_parked_model_and_optimizer_are_refused(tmp_path):
    model, optimizer = made(parts=[0])
    bare = torch.optim.SGD(model.parameters(), 0.1)  # has no state to look at
    advance(model, optimizer, 0)
    wanted = state_of(model, optimizer)
    with commpress.parked(model, optimizer, bare, store=tmp_path / "park") as park:
        for use in (
            lambda: bare.step(),
            lambda: model(torch.zeros(1, 8, dtype=torch.int64)),
            lambda: model.body[0](torch.zeros(1, 64)),
            lambda: model.state_dict(),
            lambda: model.load_state_dict({}),
            lambda: model.body.state_dict(),
            lambda: optimizer.step(),
            lambda: optimizer.state_dict(),
            lambda: optimizer.state[model.head.weight],
            lambda: len(optimizer.state),
            lambda: list(optimizer.state),
            lambda: model.head.weight in optimizer.state,
            lambda: optimizer.state.items(),
        ):
            with pytest.raises(InvalidArgument, match=r"state is parked .* or call wake"):
                use()
        for other in (park, commpress.parked(model, store=tmp_path / "other")):
            with pytest.raises(InvalidArgument, match="model is parked already"):
                other.park()
        with pytest.raises(InvalidArgument, match="state is parked"):
            commpress.parked(nn.Linear(2, 2), optimizer, store=tmp_path / "third").park()
    equal(state_of(model, optimizer), wanted)
    model(torch.zeros(1, 8, dtype=torch.int64))
    assert type(optimizer.state).__name__ == "defaultdict"


def test_a_model_that_was_converted_while_it_had_no_values_is_refused(tmp_path):
    model, optimizer = made(parts=[0])
    wanted = state_of(model, optimizer)
    park = commpress.parked(model, optimizer, store=tmp_path / "park")
    park.park()
    model.double()
    with pytest.raises(StateMismatch, match=r"'words\.weight' was replaced while it was parked"):
        park.wake()
    park.settle()
    other, loaded = made(parts=[0])
    commpress.load_parked(other, loaded, store=tmp_path / "park")
    equal(state_of(other, loaded), wanted)


def test_an_exception_wakes_too(tmp_path):
    model, optimizer = made(parts=[0])
    wanted = state_of(model, optimizer)
    with pytest.raises(ZeroDivisionError), commpress.parked(model, optimizer, store=tmp_path / "p"):
        1 / 0  # noqa: B018
    equal(state_of(model, optimizer), wanted)


class Slow(TieredStore):
    """Reads of the optimizer's state wait for permission."""

    @staticmethod
    def of(store):
        store.go, borrow = threading.Event(), store.borrow

        def wait(name, **options):
            if name.startswith("parked/state/"):
                assert store.go.wait(60)
            return borrow(name, **options)

        store.borrow = wait
        return store


def test_the_rest_returns_behind_the_forward_and_the_step_waits(tmp_path):
    twin, plain = made(parts=[0])
    model, optimizer = made(parts=[0])
    with open_store(tmp_path / "store", host="8MiB") as store:
        slow = Slow.of(store)
        for step in range(2):
            advance(twin, plain, step)
            advance(model, optimizer, step)
        with commpress.parked(model, optimizer, store=slow) as park:
            pass
        x = torch.arange(8)[None]  # the state has not returned
        loss, wanted = model(x).square().sum(), twin(x).square().sum()
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        uses = (
            lambda: optimizer.step(),
            lambda: optimizer.state_dict(),
            lambda: optimizer.state[model.head.weight]["exp_avg"].sum(),
        )
        threads = [threading.Thread(target=use) for use in uses]
        for thread in threads:
            thread.start()
            thread.join(0.2)
            assert thread.is_alive()
        slow.go.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        park.settle()
        plain.step()
        equal(state_of(model, optimizer), state_of(twin, plain))


@pytest.mark.parametrize("of", ["parameters/", "state/"])
@pytest.mark.parametrize("how", ["zeros", "truncated"])
def test_damage_is_a_clear_error_and_the_model_stays_refused(tmp_path, of, how):
    model, optimizer = made(parts=[0])
    advance(model, optimizer, 0)
    with open_store(tmp_path / "store", host="2MiB") as store:
        park = commpress.parked(model, optimizer, store=store)
        park.park()
        store.evict(list(store)).wait()
        name = next(n for n in store if f"/{of}" in n and store.info(n).nbytes > 99999)
        place = store.places(name)[0]
        with open(place.file, "r+b") as file:
            if how == "truncated":
                file.truncate(place.offset)
            else:
                file.seek(place.offset)
                file.write(bytes(place.nbytes))

        def back():
            park.wake()
            park.settle()

        with pytest.raises(Damaged, match=r"cannot return: .*start again from an earlier") as found:
            back()
        assert place.file in str(found.value)
        assert how == "truncated" or name in found.value.names
        for use in (optimizer.step, optimizer.state_dict, park.park):
            with pytest.raises((Damaged, InvalidArgument), match=r"cannot return|is parked"):
                use()


def test_a_disk_that_is_full_changes_nothing(tmp_path):
    model, optimizer = made(parts=[0])
    advance(model, optimizer, 0)
    wanted = state_of(model, optimizer)
    with open_store(tmp_path / "store", writes_per_day="200KiB") as store:
        with pytest.raises(DiskFull):
            commpress.parked(model, optimizer, store=store).park()
        equal(state_of(model, optimizer), wanted)
        advance(model, optimizer, 1)
        assert "parked/index" not in store


class Copies(Parked):
    """Host memory as the place, and the processor as the device."""

    def __init__(self, model, *others):
        super().__init__(model, others, "host", ("cpu",))


def test_host_memory_serves_as_a_place(tmp_path):
    twin, plain = made(parts=[0])
    model, optimizer = made(parts=[0])
    park = Copies(model, optimizer)
    buffers = None
    for step in range(4):
        advance(twin, plain, step)
        advance(model, optimizer, step)
        with park:
            assert not model.body[0].weight[32:-32].any()
        park.settle()
        equal(state_of(model, optimizer), state_of(twin, plain))
        addresses = {name: buffer.data_ptr() for name, buffer in park._host.buffers.items()}
        assert step < 2 or addresses == buffers  # used again
        buffers = addresses


def test_storages_of_a_device_are_resized(tmp_path, monkeypatch):
    """The processor stands for the device."""
    monkeypatch.setattr(StateStorage, "on_cpu", False)
    monkeypatch.setattr(Parked, "_streams", lambda park: nullcontext())
    twin, plain = made(parts=[0])
    model, optimizer = made(parts=[0])
    park = commpress.parked(model, optimizer, store=tmp_path / "park")
    for step in range(3):
        advance(twin, plain, step)
        advance(model, optimizer, step)
        every = [*model.parameters(), *(p.grad for p in model.parameters())]
        numbers = [(id(t), t.untyped_storage()._cdata) for t in every]
        with park:
            assert all(t.untyped_storage().nbytes() == 0 for t in every)
        assert numbers == [(id(t), t.untyped_storage()._cdata) for t in every]
        equal(state_of(model, optimizer), state_of(twin, plain))


def test_schedules_are_saved_and_stay(tmp_path):
    model, optimizer = made(parts=[0])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
    for step in range(3):
        advance(model, optimizer, step)
        schedule.step()
    with commpress.parked(model, optimizer, schedule, store=tmp_path / "park") as park:
        pass
    park.settle()
    other, loaded = made(parts=[1])
    again = torch.optim.lr_scheduler.OneCycleLR(loaded, 0.1, total_steps=9)
    before = state_of(other, loaded)
    with pytest.raises(StateMismatch, match=r"others\[1\] is not an optimizer's.* same order"):
        commpress.load_parked(other, again, loaded, store=tmp_path / "park")
    equal(state_of(other, loaded), before)
    commpress.load_parked(other, loaded, again, store=tmp_path / "park")
    assert again.state_dict() == schedule.state_dict()
    equal(loaded.state_dict(), optimizer.state_dict())


def test_two_optimizers_buffers_and_gradients(tmp_path):
    def both():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        return model, sgd(model[0]), adamw(model[1])

    def step(model, *optimizers):
        model(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    twin, ours = both(), both()
    for i in range(3):
        for each in (twin, ours):
            torch.manual_seed(i)
            step(*each)
        with commpress.parked(*ours, store=tmp_path / "park"):
            pass
        equal(state_of(*ours), state_of(*twin))
    loaded = both()
    ours[1].state_dict()  # waits
    commpress.load_parked(*loaded, store=tmp_path / "park")
    equal(state_of(*loaded), state_of(*twin))
    assert loaded[0][2].weight is loaded[0][0].weight


def test_a_model_alone(tmp_path):
    model = LM()
    wanted = copy.deepcopy(model.state_dict())
    for _ in range(3):  # one after the other in the same folder
        with commpress.parked(model, store=tmp_path / "park"):
            pass
        equal(model.state_dict(), wanted)


# ---------------------------------------------------------------- kills


def run(function, *arguments, until):
    """A process that runs it, and has told of ``until``."""
    heard, tells = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=function, args=(*arguments, tells.send), daemon=True)
    process.start()
    while heard.recv() != until:
        pass
    return process, heard


def test_a_process_killed_while_parked_leaves_a_checkpoint(tmp_path):
    process, _ = run(parked_run.train, str(tmp_path / "park"), 3, until=2)
    process.kill()
    process.join()
    twin, plain = made(parts=[0])
    for step in range(3):
        advance(twin, plain, step)
    model, optimizer = made(parts=[1])
    commpress.load_parked(model, optimizer, store=tmp_path / "park")
    for step in (3, 4):
        equal(state_of(model, optimizer), state_of(twin, plain))
        advance(twin, plain, step)
        advance(model, optimizer, step)


@pytest.mark.parametrize("kills", first(1, [4, 30]))
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path, kills):
    """It has no parts of two: every parked state has one number in all its tensors."""
    found = set()
    for i in range(kills):
        folder = tmp_path / str(i)
        process, _ = run(parked_run.numbers, str(folder), until=1 + i)
        time.sleep(0.4 / kills * i)
        process.kill()
        process.join()
        model, optimizer = made(parts=[0])
        commpress.load_parked(model, optimizer, store=folder)
        tensors = [p.detach() for p in model.parameters()]
        tensors += [s["exp_avg"] for s in optimizer.state.values()]
        values = {float(v) for t in tensors for v in t.flatten().unique()}
        assert len(values) == 1
        found |= values
    assert len(found) > 1


def test_the_first_parking_leaves_nothing_if_it_is_killed(tmp_path):
    with open_store(tmp_path / "store") as store:
        store.put("parked/parameters/head.weight/0", torch.ones(9))
        store.commit()
        with pytest.raises(StateMismatch, match=r"has no training state: .* after its block"):
            commpress.load_parked(*made(parts=[0]), store=store)


# ---------------------------------------------------------------- several ranks


def batch(step):
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(32, (2, 8), generator=draw)


def with_ddp(folder, view):
    """A hook has residuals; gradients are in DDP's buckets while parked, or not."""
    torch.set_num_threads(1)
    found, folder = [], f"{folder}/{dist.get_rank()}"
    for parks in (False, True):
        model = DistributedDataParallel(LM(), gradient_as_bucket_view=view)
        hook = commpress.compress(model, "int4", min_numel=0)
        optimizer = adamw(model)
        park = commpress.parked(model, optimizer, store=folder) if parks else None
        for step in range(4):
            model(batch(step)).square().mean().backward()
            if parks and step % 2:
                with park:
                    assert park.counters.stayed == 0
            optimizer.step()
            optimizer.zero_grad(set_to_none=step < 2)
            if parks:
                with park:
                    pass
        found.append([state_of(model, optimizer), copy.deepcopy(hook.state_dict()["residuals"])])
    equal(*found)
    park.settle()
    plain = LM()
    other = adamw(plain)
    commpress.load_parked(plain, other, store=folder)
    equal(other.state_dict(), found[0][0][2])
    return len(found[0][1])


@pytest.mark.parametrize("view", [False, True])
def test_under_ddp_with_a_hook(pool, tmp_path, view):
    assert min(pool.run(with_ddp, str(tmp_path), view, size=2)) > 0


def shards(model, optimizer):
    values = [p.to_local() for p in model.parameters()]
    values += [
        t.to_local() if hasattr(t, "to_local") else t
        for state in optimizer.state.values()
        for t in state.values()
    ]
    return [v.detach().clone() for v in values]


def sharded():
    model = LM(tied=False)
    fully_shard(model.body)
    fully_shard(model)
    return model, adamw(model, foreach=False)


def with_fsdp(folder):
    torch.set_num_threads(1)
    found, folder = [], f"{folder}/{dist.get_rank()}"
    for parks in (False, True):
        model, optimizer = sharded()
        park = commpress.parked(model, optimizer, store=folder) if parks else None
        for step in range(4):
            model(batch(step)).square().mean().backward()
            if step == 2:
                with torch.no_grad():
                    model(batch(9))  # leaves the root's parameters whole
                if parks:
                    with park:  # with gradients
                        assert park.counters.freed
                else:
                    model.reshard()
            optimizer.step()
            optimizer.zero_grad()
            if parks:
                with park:
                    pass
        found.append(shards(model, optimizer))
    equal(*found)
    park.settle()
    loaded, other = sharded()
    commpress.load_parked(loaded, other, store=folder)
    equal(shards(loaded, other), found[0])
    for each, by in ((model, optimizer), (loaded, other)):
        each(batch(5)).square().mean().backward()
        by.step()
    equal(shards(loaded, other), shards(model, optimizer))


def test_under_fsdp2(pool, tmp_path):
    pool.run(with_fsdp, str(tmp_path), size=2)


# ---------------------------------------------------------------- mistakes


def test_mistakes(tmp_path):
    model, optimizer = made(parts=[0])
    for arguments, words in (
        ((model.parameters(), optimizer, tmp_path), "model is .* expected a module"),
        ((model, optimizer, 7), "store is 7, expected a folder, a TieredStore or 'host'"),
        ((model, optimizer, "host"), "store is 'host', but all parameters are in host memory"),
        ((model, 7, tmp_path), r"others\[0\] is 7, expected an optimizer or another object"),
        ((nn.Linear(2, 2, device="meta"), tmp_path), "weight is a Parameter .* on meta"),
        ((LM().share_memory(), tmp_path), "is in memory shared with other processes"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            commpress.parked(*arguments[:-1], store=arguments[-1])
    with open_store(tmp_path / "store", host="4MiB") as store:
        offloaded = commpress.Offloaded(
            model.parameters(), torch.optim.AdamW, store=store, chunk_mb=0.1
        )
        with pytest.raises(InvalidArgument, match=r"Offloaded, whose state is divided or in a"):
            commpress.parked(model, offloaded, store=tmp_path)
    local = commpress.LocalUpdates(optimizer, every=2)
    with pytest.raises(InvalidArgument, match=r"LocalUpdates, whose rounds change weights"):
        commpress.parked(model, local, store=tmp_path)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/a").write_text("")
    with pytest.raises(DirectoryRefused, match="neither empty nor a store"):
        commpress.parked(model, optimizer, store=tmp_path / "foreign").park()
    model(torch.zeros(1, 8, dtype=torch.int64))  # nothing has changed


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    model, optimizer = made(parts=[0])
    advance(model, optimizer, 0)
    with commpress.parked(model, optimizer, store=tmp_path / "park") as park:
        pass
    park.settle()
    wider, fewer = LM(width=72), nn.Linear(8, 8)
    before = copy.deepcopy(wider.state_dict())
    for other, others, words in (
        (wider, [adamw(wider)], "of shape .* in the checkpoint, expected"),
        (fewer, [adamw(fewer)], "in the checkpoint alone"),
        (LM(), [], "others are 0, but the checkpoint has the states of 1"),
    ):
        with pytest.raises(StateMismatch, match=words):
            commpress.load_parked(other, *others, store=tmp_path / "park")
    equal(wider.state_dict(), before)


def test_an_index_that_lies_is_refused(tmp_path):
    import json

    model, optimizer = made(parts=[0])
    with open_store(tmp_path / "store", host="8MiB") as store:
        with commpress.parked(model, optimizer, store=store) as park:
            pass
        park.settle()
        with store.borrow("parked/index", write=False) as values:
            sound = json.loads(values.numpy().tobytes())
        name = "parameters/words.weight"

        def forged(change):
            document = copy.deepcopy(sound)
            change(document)
            content = json.dumps(document).encode()
            store.put("parked/index", torch.frombuffer(bytearray(content), dtype=torch.uint8))
            with pytest.raises(StateMismatch, match="training state"):
                commpress.load_parked(*made(parts=[0]), store=store)

        forged(lambda d: d.update(format=2))
        forged(lambda d: d.update(outline={"list": "x"}))
        forged(lambda d: d["tensors"][name].__setitem__(2, 1 << 40))
        forged(lambda d: d["tensors"][name].__setitem__(3, [1 << 50, 64]))
        forged(lambda d: d["tensors"][name].__setitem__(1, "object"))
        forged(lambda d: d["tensors"][name].__setitem__(0, "another"))
        forged(lambda d: d["storages"][d["tensors"][name][0]].__setitem__(0, 1 << 40))
        forged(lambda d: d["storages"][d["tensors"][name][0]].__setitem__(1, name))
        forged(lambda d: d.update(piece=-1))
        forged(lambda d: d.pop("tensors"))
        forged(lambda d: d.update(tensors=[]))


def test_locked_memory_stays(tmp_path):
    model, optimizer = made(parts=[0])
    weight = model.body[0].weight
    libc = ctypes.CDLL(None)
    begin, size = weight.data_ptr(), weight.nbytes
    if libc.mlock(ctypes.c_void_p(begin), ctypes.c_size_t(size)):
        pytest.skip("this system locks no memory")
    wanted = state_of(model, optimizer)
    with commpress.parked(model, optimizer, store=tmp_path / "park") as park:
        assert park.counters.stayed == size
    libc.munlock(ctypes.c_void_p(begin), ctypes.c_size_t(size))
    equal(state_of(model, optimizer), wanted)


def test_an_object_that_is_forgotten_leaves_its_folder_free(tmp_path):
    model, optimizer = made(parts=[0])
    for _ in range(3):
        with commpress.parked(model, optimizer, store=tmp_path / "park"):
            pass
    optimizer.state_dict()
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "parked"]
    assert os.listdir(tmp_path) == ["park"]
