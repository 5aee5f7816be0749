"""A model whose parameters live in a store equals the plain one, bit for bit."""

import copy
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.errors import InvalidArgument, StateMismatch
from small_store import open_store
from state_worlds import apart
from stream_twin import OPTIONS, Words, groups, loss_of, made, offloaded, train
from variants import first, seldom
from zero_twin import Masters, clip, fill


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", host="2MiB") as opened:
        yield opened


def plain(**more):
    net = made(**more)
    return net, torch.optim.AdamW(groups(net), **OPTIONS)


@pytest.mark.parametrize("remember", first(2, ["", "reentrant", "new"]))
def test_equals_the_plain_model(store, remember):
    net, other, twin = made(remember=remember), *plain(remember=remember)
    streamed = commpress.stream(net, store=store, chunk_mb=0.04)
    optimizer = offloaded(net, store)
    assert train(net, optimizer, 0, 20) == train(other, twin, 0, 20)
    assert not any(unit.present for unit in streamed.groups)
    check(streamed, other)


def check(streamed, other):
    equal_states(streamed.state_dict(), other.state_dict())


def equal_states(state, wanted):
    assert list(state) == list(wanted)
    assert not apart(state, wanted)
    assert not any(value.requires_grad for value in state.values())


def test_half_precision(store):
    """Values in bfloat16 beside a float32 master; the twin keeps its master in memory."""
    net, other = made().bfloat16(), made().bfloat16()
    streamed = commpress.stream(net, store=store, chunk_mb=0.04)
    optimizer = offloaded(net, store, max_grad_norm=None)
    twin = Masters(other.parameters(), **OPTIONS | {"weight_decay": 0.0})
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    for step in range(4):
        for one, o in ((net, optimizer), (other, twin)):
            loss_of(one, step, 0).backward()
            o.step()
    check(streamed, other)


class Borrows(torch.nn.Module):
    """Computes with the weight of a table that lies elsewhere and is not called, as DeBERTa
    does."""

    def __init__(self, table):
        super().__init__()
        self.mix, self.table = torch.nn.Linear(8, 8), [table]

    def forward(self, x):
        return self.mix(x) + self.table[0].weight.mean(0)


class BorrowingModel(torch.nn.Module):
    def __init__(self, itself):
        super().__init__()
        self.table, self.itself = torch.nn.Embedding(5, 8), itself
        self.blocks = torch.nn.ModuleList([Borrows(self.table)] * (not itself))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x @ self.table.weight.t() if self.itself else x


@pytest.mark.parametrize(
    ("itself", "reader"),
    [(False, r"blocks.0 \(Borrows\)"), (True, r"the model \(BorrowingModel\)")],
)
def test_a_parameter_that_another_module_reads_is_named_and_may_be_kept(store, itself, reader):
    net, x = BorrowingModel(itself), torch.ones(2, 8)
    plain = copy.deepcopy(net)
    wanted = plain(x)
    streamed = commpress.stream(net, store=store)
    for _ in range(2):
        with pytest.raises(
            InvalidArgument, match=rf"'table.weight' of table \(Embedding\) is read by {reader}"
        ):
            net(x)
    streamed.close()
    commpress.stream(plain, store=store, prefix="again", keep=["table"])
    optimizer = offloaded(plain, store, prefix="other")
    assert torch.equal(plain(x), wanted)
    plain(x).sum().backward()
    optimizer.step()
    assert not torch.equal(plain(x), wanted)


def test_first_values_of_a_model_on_the_meta_device(store):
    with torch.device("meta"):
        net = Words()
    for module in (net, *net.layers):
        module.reset_parameters = lambda: None
    net.reset_parameters = lambda: torch.nn.init.ones_(net.scale)
    torch.manual_seed(5)
    check(commpress.stream(net, store=store, chunk_mb=0.04), made())


def test_a_file_that_plain_pytorch_loads(store, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    net, other = made(), made(seed=6)
    net.register_buffer("count", torch.arange(3))
    other.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    streamed = commpress.stream(net, store=store, chunk_mb=0.04)
    train(net, offloaded(net, store), 0, 2)
    streamed.save(tmp_path / "weights.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "weights.safetensors"))
    check(streamed, other)
    again = made(seed=7)
    again.register_buffer("count", torch.zeros(3, dtype=torch.int64))
    loaded = commpress.stream(again, store=store, prefix="again")
    loaded.load(tmp_path / "weights.safetensors")
    check(loaded, other)
    with pytest.raises(StateMismatch, match="same model"):
        commpress.stream(made(width=32), store=store, prefix="more").load(
            tmp_path / "weights.safetensors"
        )


def test_without_gradients_nothing_stays(store):
    net, other = made(), made()
    streamed = commpress.stream(net, store=store)
    with torch.no_grad():
        assert loss_of(net, 0, 0) == loss_of(other, 0, 0)
    assert not any(group.present for group in streamed.groups)


def test_what_cannot_work_is_refused(store):
    net = made()
    with pytest.raises(InvalidArgument, match="expected names of parameters"):
        commpress.stream(net, store=store, keep=["nowhere"])
    with pytest.raises(InvalidArgument, match="no such module"):
        commpress.stream(net, store=store, blocks=[torch.nn.Conv2d])
    commpress.stream(net, store=store)
    with pytest.raises(InvalidArgument, match="streamed already"):
        commpress.stream(net, store=store)
    with pytest.raises(StateMismatch, match="another model"):
        commpress.stream(made(layers=2), store=store)


def test_state_dict_of_the_model_and_of_its_modules_is_that_of_the_plain_one(store):
    """Also in half precision, of tied weights, after streaming has ended; ``keep_vars`` gives the
    parameters themselves."""
    for prefix, dtype in (("single", torch.float32), ("half", torch.bfloat16)):
        net, other = made().to(dtype), made().to(dtype)
        streamed = commpress.stream(net, store=store, chunk_mb=0.01, prefix=prefix)
        for one, twin in zip(net.modules(), other.modules(), strict=True):
            equal_states(one.state_dict(prefix="x."), twin.state_dict(prefix="x."))
        state = net.state_dict()
        assert state["head.weight"].data_ptr() == state["tokens.weight"].data_ptr()
        assert {id(p) for p in net.state_dict(keep_vars=True).values()} == {
            id(p) for p in net.parameters()
        }
        streamed.close()
        equal_states(net.state_dict(), other.state_dict())
        assert not any(unit.present for unit in streamed.groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_values_are_trained_on(store, tmp_path, dtype):
    """Through the model, a part of it, or a file, after the optimizer was made: in half precision
    its masters follow."""
    torch.manual_seed(8)
    new = {
        name: value + torch.randn_like(value)
        for name, value in made().to(dtype).state_dict().items()
    }
    new["head.weight"] = new["tokens.weight"]
    net = made().to(dtype)
    streamed = commpress.stream(net, store=store, chunk_mb=0.01, keep=["norm"])
    optimizer = offloaded(net, store, lr=0.0, max_grad_norm=None)
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0

    def step():
        loss_of(net, 0, 0).backward()
        optimizer.step()

    step()
    assert str(net.load_state_dict(new)) == "<All keys matched successfully>"
    step()
    equal_states(net.state_dict(), new)
    part = {name: value + 1 for name, value in net.layers[1].state_dict().items() if "up" in name}
    assert net.layers[1].load_state_dict(part, strict=False).missing_keys
    new |= {f"layers.1.{name}": value for name, value in part.items()}
    step()
    equal_states(net.state_dict(), new)
    streamed.save(tmp_path / "weights")
    net.load_state_dict(made().state_dict())
    streamed.load(tmp_path / "weights")
    step()
    equal_states(net.state_dict(), new)
    with pytest.raises(RuntimeError, match="size mismatch for norm"):
        net.load_state_dict(new | {"norm.weight": torch.ones(3)})
    with pytest.raises(InvalidArgument, match="leave assign= out"):
        net.load_state_dict(new, assign=True)
    equal_states(net.state_dict(), new)


def test_copies_and_pickles_of_a_streamed_model_are_refused(store):
    """They would hold NaN."""
    net = made()
    streamed = commpress.stream(net, store=store)
    for thing in (net, net.layers, net.layers[0].qkv, net.tokens, streamed):
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(
                InvalidArgument, match=r"cannot be copied or pickled.* save streamed\.state_dict"
            ):
                copied(thing)


def states_over_ranks():
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(f"{folder}/store", host="2MiB") as store,
    ):
        net, new = made(), made(seed=6).state_dict()
        streamed = commpress.stream(net, store=store, chunk_mb=0.01)
        for module in (net, net.layers[0]):
            with pytest.raises(
                InvalidArgument, match=r"over 2 ranks.*streamed\.state_dict\(\).*on every rank"
            ):
                module.state_dict()
        net.load_state_dict(new)
        state = streamed.state_dict()
        return all(torch.equal(state[name], value) for name, value in new.items())


def test_over_ranks_the_state_dict_of_the_model_says_what_to_call(pool):
    assert pool.run(states_over_ranks, size=2) == [True, True]


def sharded(folder, steps):
    torch.set_num_threads(1)
    rank = dist.get_rank()
    with open_store(f"{folder}/{rank}", host="2MiB") as store:
        net = made()
        streamed = commpress.stream(net, store=store, chunk_mb=0.01)
        optimizer = offloaded(net, store)
        losses = train(net, optimizer, 0, steps, rank)
        sent = streamed.transport.sent_bytes
        rows = sum(piece.numel for unit in streamed.groups for piece in unit.stored)
        return streamed.state_dict(), losses, sent, rows


def with_ddp(steps):
    """Every backward is averaged by itself, and the means are summed."""
    torch.set_num_threads(1)
    rank, net, losses = dist.get_rank(), made(), []
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    commpress.compress(ddp, "none")
    optimizer = torch.optim.AdamW(groups(net), **OPTIONS)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = OPTIONS["lr"] * 0.95**step
        sums = {}
        for part in range(2):
            net.zero_grad()
            loss = loss_of(ddp, step, part, rank)
            loss.backward()
            sums = {
                p: sums[p] + p.grad if p in sums else p.grad.clone()
                for p in net.parameters()
                if p.grad is not None
            }
        losses.append(loss.item())
        for p in net.parameters():
            p.grad = sums.get(p)
        fill(net.parameters())
        clip(net.parameters(), 0.5)
        optimizer.step()
    return net.state_dict(), losses


@pytest.mark.parametrize(("ranks", "steps"), [seldom(2, 20), (3, 4)])
def test_sharded_over_ranks_equals_ddp(pool, tmp_path, ranks, steps):
    found = pool.run(sharded, str(tmp_path), steps, size=ranks)
    wanted = pool.run(with_ddp, steps, size=ranks)
    for (state, losses, _, rows), (other, others) in zip(found, wanted, strict=True):
        assert losses == others
        assert all(torch.equal(state[name], other[name]) for name in other)
        assert rows < sum(p.numel() for p in made().parameters()) / ranks + 9 * 64


def with_errors(folder, at):
    """``at``: steps before which a backward ends with an error in its middle, and counts for
    nothing."""
    torch.set_num_threads(1)
    rank = dist.get_rank()

    def fail(gradient):
        raise ValueError("an error in the middle of backward")

    def arm(module, arguments, result):
        result.register_hook(fail)

    with open_store(f"{folder}/{rank} {len(at)}", host="2MiB") as store:
        net = made()
        streamed = commpress.stream(net, store=store, chunk_mb=0.01)
        optimizer = offloaded(net, store)
        for step in range(4):
            if step in at:
                handle = net.layers[1].qkv.register_forward_hook(arm)
                with pytest.raises(ValueError, match="middle"):
                    loss_of(net, step, 7, rank).backward()
                handle.remove()
            train(net, optimizer, step, step + 1, rank)
        assert not any(group.present for group in streamed.groups)
        return streamed.state_dict()


@pytest.mark.parametrize("ranks", first(1, [2, 1]))
def test_a_backward_that_ended_with_an_error_leaves_nothing_behind(pool, tmp_path, ranks):
    wanted = pool.run(with_errors, str(tmp_path), (), size=ranks)
    for state, other in zip(
        pool.run(with_errors, str(tmp_path), (1, 2), size=ranks), wanted, strict=True
    ):
        equal_states(state, other)


@pytest.mark.parametrize(
    ("keep", "change"),
    [
        ([], lambda net: net.half()),
        (["0"], lambda net: setattr(net[0].weight, "data", torch.ones(4, 4))),
    ],
    ids=["fetched and converted", "kept and assigned"],
)
def test_parameters_that_somebody_has_changed_after_stream_are_refused(store, keep, change):
    """Values that they hold now would be lost when theirs are fetched."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    commpress.stream(net, store=store, keep=keep)
    net(torch.ones(1, 4))
    change(net)
    for _ in range(2):
        with pytest.raises(
            InvalidArgument,
            match=r"'0.weight', now torch.float(16|32) .* convert and move the model before",
        ):
            net(torch.ones(1, 4))


def test_buffers_from_the_meta_device_have_values_in_every_run(tmp_path):
    """No store has them: a run that goes on makes them anew, and keeps the parameters of the
    store."""
    for weight in (2.0, 3.0):
        with torch.device("meta"):
            net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        with open_store(tmp_path / "store") as store:
            streamed = commpress.stream(net, store=store)
            state = streamed.state_dict()
            assert torch.equal(state["1.running_var"], torch.ones(3))
            assert torch.equal(state["1.running_mean"], torch.zeros(3))
            assert state["1.num_batches_tracked"] == 0
            assert torch.equal(state["1.weight"], torch.full((3,), weight - 1))
            net.load_state_dict(
                {name: torch.full_like(value, 2.0) for name, value in state.items()}
            )
            store.commit()


def test_a_buffer_that_nobody_gives_values_is_refused(store):
    class Scaled(torch.nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("factor", torch.ones(2))

    with torch.device("meta"):
        net = torch.nn.Sequential(Scaled())
    with pytest.raises(
        InvalidArgument, match=r"buffer 'factor' of module '0' \(Scaled\).*let it do so, or build"
    ):
        commpress.stream(net, store=store)


def test_nothing_is_written_on_parameters(store):
    net = made()
    commpress.stream(net, store=store)
    assert not any(vars(p) for p in net.parameters())
    with pytest.raises(
        InvalidArgument,
        match=r"streamed from a store: train it by commpress\.Offloaded",
    ):
        commpress.Partitioned(net.parameters(), torch.optim.AdamW)
