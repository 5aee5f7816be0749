"""The update of a streamed model runs behind the next forward, and gives the same bits."""

import queue
import threading
import time
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import commpress
from commpress.errors import InvalidArgument, StorageError
from commpress.integrations.zero.backward_updates import BackwardUpdates
from commpress.integrations.zero.sweep import Sweep
from commpress.tiered_mem import Pending
from small_store import open_store
from state_worlds import apart
from stream_twin import OPTIONS, Twins, loss_of, made, offloaded, untied
from zero_twin import clip

LAYERS = 6
NUMBER = 22  # of a parameter of the last layer in a state
NEVER = 1e9  # a norm that is not reached: what has no gradient has zeros


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", host="2MiB") as opened:
        yield opened


class Gate:
    """Holds the update of a module until it is opened."""

    def __init__(self, streamed, module, optimizer, error=None):
        self.open, self.reached = threading.Event(), threading.Event()
        self.names = {stored.name for g in streamed.modules[module].groups for stored in g.stored}
        self.error = error
        self._update = optimizer._update
        optimizer._update = self

    def __call__(self, chunk, *rest):
        if chunk.values in self.names:
            self.reached.set()
            assert self.open.wait(60)
            if self.error:
                raise self.error
        self._update(chunk, *rest)


def stepped(store, layers=LAYERS, error=None, **more):
    """A streamed model and its twin after the same step, and the update of its last layer, which
    waits."""
    pair = Twins(store, made(layers=layers), made(layers=layers), **more)
    for step in range(3):
        pair.backward(step)
        if step == 2:
            gate = Gate(pair.streamed, pair.net.layers[-1], pair.optimizer, error)
        pair.step()
    assert gate.reached.wait(60)
    return pair, gate


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def test_a_forward_goes_as_far_as_values_are_up_to_date(store):
    pair, gate = stepped(store)
    net, entered = pair.net, []
    for layer in net.layers:
        layer.register_forward_pre_hook(lambda layer, _: entered.append(layer))
    thread, found = in_a_thread(lambda: loss_of(net, 3, 0))
    thread.join(1)
    assert thread.is_alive()
    assert entered == list(net.layers)[:-1]
    gate.open.set()
    thread.join(60)
    wanted = loss_of(pair.other, 3, 0)
    assert found[0].item() == wanted.item()
    for loss in (found[0], wanted):
        loss.backward()
    pair.step()
    pair.check()


READERS = {
    "model": lambda pair, _: pair.net.state_dict()["head.weight"],
    "streamed": lambda pair, _: pair.streamed.state_dict()["head.weight"],
    "state": lambda pair, _: pair.optimizer.state[pair.net.layers[-1].down.weight]["exp_avg"],
    "optimizer": lambda pair, _: pair.optimizer.state_dict()["state"][NUMBER]["exp_avg"],
    "known": lambda pair, _: pair.net.layers[-1].down.weight in pair.optimizer.state,
    "report": lambda pair, _: pair.optimizer.report(),
    "commit": lambda _, store: store.commit(),
    "snapshot": lambda _, store: store.snapshot("now"),
    "local": lambda pair, _: pair.optimizer.settle_weights(),
    "close": lambda _, store: store.close(),
}


@pytest.mark.parametrize("reader", READERS)
def test_who_reads_waits_for_the_end(store, reader):
    pair, gate = stepped(store)
    thread, found = in_a_thread(lambda: READERS[reader](pair, store))
    thread.join(0.3)
    assert thread.is_alive()
    gate.open.set()
    thread.join(60)
    assert found
    if reader in ("model", "streamed"):
        assert torch.equal(found[0], pair.other.state_dict()["head.weight"])
    else:
        assert not pair.optimizer._running
    if reader == "state":
        wanted = pair.twin.state[pair.other.layers[-1].down.weight]["exp_avg"]
        assert torch.equal(found[0], wanted)
    if reader == "optimizer":
        assert torch.equal(found[0], pair.twin.state_dict()["state"][NUMBER]["exp_avg"])


def test_an_error_of_the_update_is_raised_where_its_values_are_wanted(store):
    pair, gate = stepped(store, error=InvalidArgument("lost"))
    gate.open.set()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="lost"):
            loss_of(pair.net, 3, 0)
    optimizer = pair.optimizer
    uses = [optimizer.step, pair.streamed.state_dict]
    # half an update is never committed
    for use in (*uses, optimizer.report, optimizer.commit, store.commit, optimizer.commit):
        with pytest.raises(InvalidArgument, match="lost"):
            use()
    optimizer.close()


def test_who_is_interrupted_while_waiting_waits_again(store, monkeypatch):
    pair, gate = stepped(store)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.optimizer.finish()
    thread, _ = in_a_thread(pair.optimizer.commit)
    thread.join(0.3)
    assert thread.is_alive()
    gate.open.set()
    thread.join(60)
    pair.check()


def interrupted(thread):
    raise KeyboardInterrupt


def test_two_optimizers_of_one_model(store):
    """A block waits for the updates of both."""
    net, other = made(layers=LAYERS), made(layers=LAYERS)
    streamed = commpress.stream(net, store=store, chunk_mb=0.02)
    options = {"store": store, "chunk_mb": 0.02, **OPTIONS}
    ours, twins = [], []
    for number in range(2):
        mine, its = (list(model.parameters())[number::2] for model in (net, other))
        ours.append(commpress.Offloaded(mine, torch.optim.AdamW, prefix=f"own{number}", **options))
        twins.append(torch.optim.AdamW(its, **OPTIONS))
    first, slow = ours[0]._update, 0.002
    ours[0]._update = lambda *given: (time.sleep(slow), first(*given))
    for step in range(3):
        for model in (net, other):
            loss_of(model, step, 0).backward()
        clip(other.parameters(), NEVER)
        for one in (*ours, *twins):
            one.step()
            one.zero_grad()
    assert not apart(streamed.state_dict(), dict(other.state_dict()))


def test_a_rate_in_a_tensor_is_that_of_its_step(store):
    rate = torch.tensor(OPTIONS["lr"])
    models = made(layers=LAYERS), made(layers=LAYERS)
    pair = Twins(store, *models, max_grad_norm=None, lr=rate)
    gate = Gate(pair.streamed, pair.net.layers[-1], pair.optimizer)
    pair.backward(0)
    pair.step(NEVER)
    rate.fill_(1.0)  # as a scheduler does
    gate.open.set()
    pair.check()


def test_updates_in_backward_go_on_while_others_are_written():
    """Two chunks may be on their way to the disk; a failed write is raised each time."""
    writes = [Pending() for _ in range(4)]
    begun = queue.SimpleQueue()

    def update(number, later):
        begun.put(number)
        return [writes[number]]

    updates = BackwardUpdates(lambda: None, update, 4)
    for number in range(4):
        updates.add(number)
    try:
        assert [begun.get(timeout=10) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(queue.Empty):
            begun.get(timeout=0.1)
        for pending in writes[:3]:
            pending.finish(None)
        assert begun.get(timeout=10) == 3
        writes[3].fail(StorageError("the disk is gone"))
        for _ in range(2):
            with pytest.raises(StorageError, match="gone"):
                updates.wait()
    finally:
        for pending in writes:
            pending.finish(None)
        updates.close()


def test_who_has_borrowed_what_the_update_waits_for_is_told(store):
    pair, gate = stepped(store)
    with store.borrow(sorted(gate.names)[0], write=False):
        for call in (store.commit, pair.optimizer.state_dict):
            with pytest.raises(InvalidArgument, match=r"borrowed here.*leave its context"):
                call()
    gate.open.set()
    pair.optimizer.commit()


def test_after_a_step_that_failed_gradients_can_be_cleared(tmp_path):
    with open_store(tmp_path / "store", host="64MiB") as store:
        net = made()
        commpress.stream(net, store=store, chunk_mb=0.04)
        optimizer = offloaded(net, store)
        loss_of(net, 0, 0).backward()
        with monkeypatched(optimizer), pytest.raises(InvalidArgument, match="lost"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(net, 0, 0).backward()
        optimizer.step()


@contextmanager
def monkeypatched(optimizer):
    def lost(*_):
        raise InvalidArgument("lost")

    before, optimizer._update = optimizer._update, lost
    yield
    optimizer._update = before


def test_a_commit_of_the_store_leaves_a_delayed_update_delayed(store):
    net = made()
    optimizer = offloaded(net, store, gradients="delayed")
    loss_of(net, 0, 0).backward()
    before = net.head.weight.detach().clone()
    optimizer.step()
    store.commit()
    assert net.head.weight in optimizer.state
    assert torch.equal(net.head.weight, before)
    optimizer.finish()
    assert not torch.equal(net.head.weight, before)


def test_values_kept_in_memory_for_the_forward_are_not_read_again(tmp_path):
    with open_store(tmp_path / "store", host="2MiB") as store:
        pair, gate = stepped(store)
        gate.open.set()
        pair.optimizer.finish()
        last = next(chunk for chunk in pair.optimizer.chunks if chunk.values in gate.names)
        assert last.passes
        assert store.info(last.values).tier == "host"


def test_nothing_waits_where_no_state_is_on_disk(tmp_path):
    """An update is as fast as memory there and would only compete with the forward."""
    with open_store(tmp_path / "store", host="64MiB") as store:
        net = made()
        commpress.stream(net, store=store, chunk_mb=0.04)
        optimizer = offloaded(net, store)
        loss_of(net, 0, 0).backward()
        optimizer.step()
        assert optimizer._running is None


def test_an_update_that_has_ended_waits_for_nobody():
    done = threading.Event()
    sweep = Sweep(["a", "b"], lambda tell: (tell("a"), done.wait(60), tell("b")))
    sweep.wait(["a"])
    assert sweep.has(["a"])
    assert not sweep.has(["b"])
    done.set()
    sweep.finish()
    sweep.wait(["b"])


# ---------------------------------------------------------------- in backward


def in_backward(store, make=made, **more):
    given = {"gradients": "backward", "max_grad_norm": None} | more
    return Twins(store, make(layers=LAYERS), make(layers=LAYERS), **given)


def test_updates_in_backward_equal_those_of_step(store):
    """A schedule, tied, frozen and unused parameters among them."""
    pair, early = in_backward(store), []
    net, streamed, optimizer, twin = pair.net, pair.streamed, pair.optimizer, pair.twin
    optimizer._early._update = lambda chunk, later, run=optimizer._early._update: (
        early.append((chunk, len(later))),
        time.sleep(0.002),  # so that step finds some of them running
        run(chunk, later),
    )[-1]
    update, read = optimizer._update, []
    optimizer._update = lambda chunk, *rest: (read.append(chunk), update(chunk, *rest))[-1]
    for step in range(5):
        for group in (*optimizer.param_groups, *twin.param_groups):
            group["lr"] = OPTIONS["lr"] * 0.9**step
        pair.backward(step)
        pair.step(NEVER)
    pair.check()
    for number, state in twin.state_dict()["state"].items():
        found = optimizer.state_dict()["state"][number]
        assert torch.equal(found["exp_avg_sq"], state["exp_avg_sq"])
    once = {chunk.values for chunk, _ in early}
    assert len(early) == 5 * len(once)
    assert {read.count(chunk) for chunk in optimizer.chunks} == {5}, "each once a step"
    trained = {chunk.values for chunk in optimizer.chunks}
    blocks = [group for layer in net.layers for group in streamed.modules[layer].groups]
    assert once >= trained & {stored.name for group in blocks for stored in group.stored}
    shared = [g for g in streamed.groups if g.shared]
    assert shared
    assert not once & {stored.name for g in shared for stored in g.stored}
    assert max(ahead for _, ahead in early) == 2, "the next chunks are read"


def test_updates_in_backward_begin_after_the_last_step(store):
    """A module that no forward waits for is updated by the options of its own step."""
    pair = in_backward(store)
    gate = Gate(pair.streamed, pair.net.unused, pair.optimizer)
    for step in range(2):
        for group in (*pair.optimizer.param_groups, *pair.twin.param_groups):
            group["lr"] = OPTIONS["lr"] / (1 + step)
        for model in (pair.net, pair.other):
            loss = loss_of(model, step, 0)
            thread, _ = in_a_thread(loss.backward)
            if model is pair.net and step == 1:
                thread.join(0.3)
                assert thread.is_alive(), "the update of the step before goes on"
                gate.open.set()
            thread.join(60)
        pair.step(NEVER)
    pair.check()


def test_gradients_of_updates_in_backward_never_leave_memory(tmp_path):
    written = []
    for gradients in ("store", "backward"):
        with open_store(tmp_path / gradients, host="2MiB") as store:
            pair = in_backward(store, gradients=gradients)
            optimizer = pair.optimizer
            for step in range(3):
                before = store.traffic()[1]
                loss_of(pair.net, step, 0).backward()
                optimizer.step()
                optimizer.finish()
            written.append(store.traffic()[1] - before)
            layers = {c for c in optimizer.chunks if c.passes and c.numel}
    assert written[0] - written[1] >= 0.7 * 4 * sum(chunk.numel for chunk in layers)


def test_several_micro_batches_are_updated_after_the_last(store):
    pair = in_backward(store, untied)
    for step in range(3):
        pair.streamed.accumulate(lambda part, step=step: loss_of(pair.net, step, part), range(3))
        for part in range(3):
            loss_of(pair.other, step, part).backward()
        pair.step(NEVER)
    pair.check()


def test_a_second_backward_before_step_is_refused(store):
    pair = in_backward(store)
    net, streamed = pair.net, pair.streamed
    loss_of(net, 0, 0).backward()
    with pytest.raises(InvalidArgument, match=r"second gradient before step.*accumulate"):
        loss_of(net, 0, 1).backward()
    with pytest.raises(InvalidArgument, match="second gradient"):
        streamed.accumulate(lambda part: loss_of(net, 0, part), range(2))


def test_a_commit_between_a_backward_that_updates_and_step_is_refused(store):
    pair = in_backward(store)
    optimizer = pair.optimizer
    loss_of(pair.net, 0, 0).backward()
    for commit in (store.commit, lambda: store.snapshot("now"), optimizer.commit):
        with pytest.raises(InvalidArgument, match=r"between backward and step.*commit after step"):
            commit()
    optimizer.step()
    assert store.commit() == 1


def test_an_error_of_an_update_in_backward_is_raised(store):
    pair = in_backward(store)

    def lost(chunk, later):
        raise InvalidArgument("lost")

    pair.optimizer._early._update = lost
    with pytest.raises(InvalidArgument, match="lost"):
        loss_of(pair.net, 0, 0).backward()


@pytest.mark.parametrize(
    ("streams", "more", "message"),
    [
        (True, {"max_grad_norm": 1.0}, r"max_grad_norm is given, but gradients='backward'"),
        (False, {"max_grad_norm": None}, r"not streamed.*Call commpress\.stream"),
    ],
)
def test_what_cannot_be_updated_in_backward_is_refused(store, streams, more, message):
    net = made()
    if streams:
        commpress.stream(net, store=store, chunk_mb=0.04)
    with pytest.raises(InvalidArgument, match=message):
        offloaded(net, store, gradients="backward", **more)


def over_ranks(folder, gradients):
    torch.set_num_threads(1)
    rank = dist.get_rank()
    with open_store(f"{folder}/{rank} {gradients}", host="2MiB") as store:
        net = made(layers=LAYERS)
        streamed = commpress.stream(net, store=store, chunk_mb=0.01)
        optimizer = offloaded(net, store, gradients=gradients, max_grad_norm=None)
        early = 0
        for step in range(4):
            loss_of(net, step, 0, rank).backward()
            early = optimizer._early and len(optimizer._early._chunks)
            if early:
                with pytest.raises(InvalidArgument, match="second gradient"):
                    loss_of(net, step, 1, rank).backward()
            optimizer.step()
        return early, {name: value.clone() for name, value in streamed.state_dict().items()}


def test_updates_in_backward_of_several_ranks(pool, tmp_path):
    stored, updated = (
        pool.run(over_ranks, str(tmp_path), gradients, size=2)
        for gradients in ("store", "backward")
    )
    for (_, wanted), (early, state) in zip(stored, updated, strict=True):
        assert early > LAYERS
        assert all(torch.equal(state[name], value) for name, value in wanted.items())
