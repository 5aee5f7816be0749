"""Layers of experts divided among ranks, from lists of modules: outputs and gradients of one
process."""

import copy
import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import commpress
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import CommunicationError, InvalidArgument
from commpress.integrations.elastic.shared_state import SharedState
from commpress.optim.layout import held_of, is_held
from group_calls import as_world
from ranks import caught


def modules():
    torch.manual_seed(1)
    return [torch.nn.Linear(6, 6) for _ in range(5)]


class Batched(torch.nn.Module):
    """As transformers has them."""

    def __init__(self, number):
        super().__init__()
        self.num_experts = number
        torch.manual_seed(2)
        self.weight, self.bias = (
            torch.nn.Parameter(torch.randn(number, *shape)) for shape in ((6, 6), (6,))
        )

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            made = torch.nn.functional.linear(
                hidden_states[token], self.weight[expert], self.bias[expert]
            )
            out.index_add_(0, token, made * top_k_weights[token, slot, None])
        return out


def inputs(rank):
    """Rank 1's experts get nothing from anybody: experts 2 and 3 of 5 on 3 ranks."""
    draw = torch.Generator().manual_seed(rank)
    chosen = torch.tensor([0, 1, 4])[torch.rand(7, 3, generator=draw).topk(2).indices]
    return torch.randn(7, 6, generator=draw), chosen, torch.rand(7, 2, generator=draw)


def layer_of(kind):
    return modules() if kind == "list" else Batched(5)


def divided(kind):
    torch.set_num_threads(1)
    layer = commpress.moe.Experts(layer_of(kind), placement=[0, 0, 1, 1, 2])
    tokens, chosen, gates = inputs(dist.get_rank())
    tokens.requires_grad_(), gates.requires_grad_()
    out = layer(tokens, chosen, gates)
    out.square().sum().backward()
    gradients = [None if p.grad is None else p.grad.numpy() for p in layer.parameters()]
    return [t.detach().numpy() for t in (out, tokens.grad, gates.grad)], gradients, repr(layer)


def whole(kind):
    layer, found = layer_of(kind), []
    for rank in range(3):
        tokens, chosen, gates = inputs(rank)
        tokens.requires_grad_(), gates.requires_grad_()
        if kind == "list":
            made = torch.stack([m(tokens) for m in layer], 1)
            out = (gates[:, :, None] * made.gather(1, chosen[:, :, None].expand(-1, -1, 6))).sum(1)
        else:
            out = layer(tokens, chosen, gates)
        (out.square().sum()).backward()
        found.append([t.detach().numpy() for t in (out, tokens.grad, gates.grad)])
    parameters = (
        [list(m.parameters()) for m in layer] if kind == "list" else list(layer.parameters())
    )
    return found, parameters


@pytest.mark.parametrize("kind", ["list", "batched"])
def test_a_divided_layer_is_that_of_one_process(pool, kind):
    """Gradients of experts are means over ranks; where no token came they are zero, or None as in a
    list."""
    results, parameters = whole(kind)
    owns = [[0, 1], [2, 3], [4]]
    for rank, (found, gradients, text) in enumerate(pool.run(divided, kind, size=3)):
        for ours, twin in zip(found, results[rank], strict=True):
            np.testing.assert_allclose(ours, twin, rtol=1e-5, atol=1e-5)
        assert f"experts {owns[rank]} of 5" in text
        if kind == "batched":
            twins = [p.grad[owns[rank]] / 3 for p in parameters]
        else:
            twins = [p.grad / 3 if rank != 1 else None for e in owns[rank] for p in parameters[e]]
        for ours, twin in zip(gradients, twins, strict=True):
            if twin is None:
                assert ours is None
            else:
                np.testing.assert_allclose(ours, twin.numpy(), rtol=1e-5, atol=1e-5)


class Net(torch.nn.Module):
    """A layer that all ranks hold, a gate and experts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.gate, self.experts = (
            torch.nn.Linear(6, 6),
            torch.nn.Linear(6, 5),
            Batched(5),
        )

    def forward(self, x):
        hidden = self.inner(x)
        gates, chosen = self.gate(hidden).softmax(-1).topk(2)
        return x + self.experts(hidden, chosen, gates)


LIMIT = 0.05  # of the gradients' norm, well below it
OPTIONS = {"lr": 1e-2, "eps": 1e-3}


def batch_of(rank, step):
    return torch.randn(9, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model, ranks, optimizer=None, clip=commpress.moe.clip_grad_norm_, wrapped=None):
    """Three steps of a model that has the batches of these ranks; the last norm."""
    torch.set_num_threads(1)
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step in range(3):
        for rank in ranks:
            loss = (wrapped or model)(batch_of(rank, step)).square().mean()
            (loss / len(ranks)).backward()
        norm = float(clip(list(model.parameters()), LIMIT))
        optimizer.step()
        optimizer.zero_grad()
    return norm


def of_this_rank(model):
    """The experts of a rank and its parameters after training."""
    whole = {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p
        for name, p in model.named_parameters()
    }
    layer = commpress.moe.experts_of(model)[0]
    return layer.own, {
        name.removeprefix("module."): p.detach().numpy() for name, p in whole.items()
    }


def assert_as_one_process(found):
    """``of_this_rank`` of every rank is what one process comes to, clipped by one factor; float32
    sums in another order make the difference. Returns the norm."""
    twin = Net()
    norm = trained(twin, range(len(found)), clip=torch.nn.utils.clip_grad_norm_)
    expected = inside(twin.named_parameters())
    for own, parameters in found:
        assert parameters.keys() == expected.keys()
        for name, ours in parameters.items():
            part = expected[name][own] if "experts" in name else expected[name]
            np.testing.assert_allclose(ours, part, rtol=0, atol=2e-5)
    return norm


def inside(parameters):
    """Those of a net under the names that they have once its experts are divided."""
    return {
        name.replace("experts.", "experts.experts."): p.detach().numpy() for name, p in parameters
    }


def no_clipping(parameters, limit):
    return 0.0


def net(**options):
    """A net whose experts are divided: of two ranks, the first has three of five."""
    model = Net()
    commpress.moe.parallelise(model, **{"placement": [0, 0, 0, 1, 1]} | options)
    return model


def sharded_around_experts():
    mesh, model = init_device_mesh("cpu", (2,)), net()
    fully_shard(model, mesh=mesh, ignored_params=commpress.moe.held_parameters(model))
    commpress.compress_fsdp(model, "none", "none")
    norm = trained(model, [dist.get_rank()])
    groups = commpress.moe.holders_of(model)
    assert sorted(groups) == ["experts.experts.bias", "experts.experts.weight"]
    assert dist.get_process_group_ranks(groups["experts.experts.bias"]) == [dist.get_rank()]
    wrong = net()
    fully_shard(wrong, mesh=mesh)
    with pytest.raises(InvalidArgument, match=r"ignored_params=commpress.moe.held_parameters"):
        commpress.compress_fsdp(wrong)
    return norm, of_this_rank(model)


def under_one_bit_adam():
    model, options = net(), OPTIONS | {"weight_decay": 1e-2}
    optimizer = commpress.OneBitAdam(
        model.named_parameters(), max_grad_norm=LIMIT, exact_steps=100, **options
    )
    ddp = DistributedDataParallel(model)
    commpress.overlap(ddp, optimizer)
    trained(model, [dist.get_rank()], optimizer, no_clipping, ddp)
    return None, of_this_rank(model)


def under_ddp_with_a_codec():
    model = net()
    ddp = DistributedDataParallel(model)
    state = commpress.compress(ddp, "none")
    norm = trained(model, [dist.get_rank()], wrapped=ddp)
    assert not any("experts" in name for name in state.names.numels)
    found, hidden = of_this_rank(model), Net()
    # as many on each rank, or torch waits for a time before it raises
    hidden.experts = Batched(4)
    commpress.moe.parallelise(hidden)
    # another module than the one that was given
    outside = DistributedDataParallel(torch.nn.Sequential(hidden))
    for use in (lambda: commpress.compress(outside), lambda: outside(batch_of(0, 0))):
        with pytest.raises(InvalidArgument, match="gives all ranks those of rank 0"):
            use()
    layer = commpress.moe.experts_of(model)[0]
    layer.load_state_dict(layer.state_dict() | {"_extra_state": torch.tensor([4])})
    with pytest.raises(InvalidArgument, match=r"experts \[4\] were loaded on the rank of"):
        model(batch_of(0, 0))
    return norm, found


@pytest.mark.parametrize(
    "train", [sharded_around_experts, under_ddp_with_a_codec, under_one_bit_adam]
)
def test_experts_train_as_in_one_process_beside_what_averages_the_rest(pool, train):
    norms, found = zip(*pool.run(train), strict=True)
    norm = assert_as_one_process(found)
    assert all(seen is None or abs(seen - norm) < 1e-5 for seen in norms)


def of_a_spoilt_step(on_nonfinite):
    model = net()
    ddp = DistributedDataParallel(model)
    state = commpress.compress(ddp, "int8", min_numel=1, on_nonfinite=on_nonfinite)
    for spoilt in (False, True):  # gradients of an earlier step are there already
        batch = batch_of(dist.get_rank(), 0)
        if spoilt and dist.get_rank():
            batch[0, 0] = float("nan")
        ddp(batch).square().mean().backward()
    return state.counters.skipped_steps, {
        name: p.grad.unique().tolist() for name, p in model.named_parameters()
    }


def test_a_step_that_is_left_out_leaves_out_the_experts_too(pool):
    for skipped, gradients in pool.run(of_a_spoilt_step, "skip", size=2):
        assert skipped == 1
        assert all(each == [0.0] for each in gradients.values())
    for _, gradients in pool.run(of_a_spoilt_step, "propagate", size=2):
        assert all(np.isnan(each).all() for each in gradients.values())


def overflowing():
    """A run in which the gradient of an expert overflows on one rank alone, in its second step."""
    model = net()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, process_group=dist.group.WORLD)
    found = []
    for step in range(3):
        scaler.scale(ddp(batch_of(dist.get_rank(), step)).square().mean()).backward()
        if step == 1 and dist.get_rank():
            next(model.experts.parameters()).grad.view(-1)[0] = float("inf")
        scaler.unscale_(optimizer)
        commpress.moe.clip_grad_norm_(model.parameters(), LIMIT)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append((scaler.get_scale(), model.inner.weight.tolist()))
    return found


def test_a_sharded_scaler_leaves_out_a_step_on_all_ranks(pool):
    first, second = pool.run(overflowing, size=2)
    assert first == second
    assert [scale for scale, _ in first] == [8.0, 4.0, 4.0]
    assert first[0][1] == first[1][1] != first[2][1]


def in_local_updates():
    model = net()
    inner = torch.optim.AdamW(model.parameters(), **OPTIONS)
    optimizer = commpress.LocalUpdates(inner, every=1, outer=commpress.Average())
    assert optimizer.apart == 2
    with pytest.raises(InvalidArgument, match="2 parameters are of experts"):
        optimizer.elastic_state_dict()
    trained(model, [dist.get_rank()], optimizer, no_clipping)
    return of_this_rank(model)


def test_local_updates_average_all_but_experts(pool):
    found, start = pool.run(in_local_updates), inside(Net().named_parameters())
    for name, before in start.items():
        if "experts" in name:
            assert all(abs(after[name] - before[own]).max() > 1e-3 for own, after in found)
        else:
            assert (found[0][1][name] == found[1][1][name]).all()


def two_islands():
    """This rank's groups: with its neighbour, 0 with 1 and 2 with 3, and with who is in the same
    place there."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return inside, [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]


def islands(copies=None):
    """Experts divided between ranks 0, 1 and again between 2, 3, which train as one."""
    inside, across = two_islands()
    alone = net(process_group=inside)
    with pytest.raises(InvalidArgument, match="Pass replicas="):
        commpress.compress(DistributedDataParallel(alone))
    model = net(process_group=inside, replicas=across, copies=copies)
    trained(model, [dist.get_rank()], wrapped=DistributedDataParallel(model))
    return of_this_rank(model)


@pytest.mark.parametrize("copies", [None, {0: 2, 4: 2}])
def test_ranks_that_hold_the_same_experts_average_them(pool, copies):
    found = pool.run(islands, copies, size=4)
    assert_as_one_process(found)
    for rank, (_, parameters) in enumerate(found):
        assert all((ours == found[rank % 2][1][name]).all() for name, ours in parameters.items())


def test_mistakes_are_refused():
    transport = Loopback(1).transport(0)
    here, buffered = {"process_group": transport}, Batched(4)
    exchange = commpress.ExpertExchange(4, **here)
    buffered.register_buffer("scale", torch.ones(4))
    make, put = commpress.ExpertExchange, commpress.moe.Experts
    for call, says in [
        (lambda: make(4, on_lost="wait", **here), "on_lost is 'wait'"),
        (lambda: make(4, on_lost="mask", **here), "use the backend 'commpress'"),
        (lambda: put(torch.nn.Linear(3, 3), **here), "experts is a Linear, expected a list"),
        (lambda: put([], **here), "experts is a list"),
        (lambda: put(modules(), exchange), "exchange has 4 experts and options are"),
        (lambda: put(buffered, **here), "have a buffer 'scale' with a row for each expert"),
        (lambda: put(Batched(4), chunks=0, **here), "chunks is 0"),
        (
            lambda: commpress.moe.parallelise(torch.nn.Linear(3, 3)),
            "model is a Linear without layers of experts",
        ),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            call()


# ------------------------------------------------------- a rank that dies takes its experts with it


def dies_in_dispatch(file):
    """Two steps of three ranks; then rank 1 dies while tokens are on their way, and the others go
    on without its experts."""

    def run():
        group, rank = dist.group.WORLD, dist.get_rank()
        model = Net()
        options = {"placement": [0, 1, 2, 0, 2], "on_lost": "mask", "topology": "2,1", "chunks": 2}
        layer = commpress.moe.parallelise(model, **options)[0]
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(number):
            optimizer.zero_grad()
            ddp(batch_of(rank, number)).square().mean().backward()
            norm = commpress.moe.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            return float(norm)

        for number in range(2):
            step(number)
        if rank == 1:
            layer.exchange.out_steps = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        assert isinstance(caught(step, 2), CommunicationError)
        group.reform()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        norm = step(2)
        counters = layer.exchange.counters
        assert layer.exchange.lost_experts == [1]
        assert layer.exchange.carrier.nodes.members == ((0,), (1,))
        assert counters.masked > 0
        assert len(counters.loads) == 2
        assert held_of(next(layer.parameters())).divided == (0, 1)
        tokens, chosen, gates = inputs(rank)
        whole = layer.exchange(tokens, chosen, gates, lambda rows, _: rows)
        routing = layer.exchange.create_routing(chosen, layout="expert_major")
        rows, weights, _ = layer.exchange.dispatch(routing, tokens, gates)
        assert torch.equal(layer.exchange.combine(routing, weights[:, None] * rows), whole)
        left = gates.sum(1, keepdim=True) * tokens * (chosen != 1).any(1, keepdim=True)
        torch.testing.assert_close(whole, left)
        return norm, layer.own, before, {name: p.detach() for name, p in model.named_parameters()}

    return as_world("commpress", file, run, seconds=20.0)


def test_tokens_of_lost_experts_go_to_their_other_choices(mortal, tmp_path):
    """As in one process where the gates of the others have grown; gradients are means over two
    ranks."""
    torch.set_num_threads(1)
    first, _, last = mortal.outcomes(dies_in_dispatch, str(tmp_path / "file"), size=3, lost=[1])
    twin = Net()
    with torch.no_grad():
        for _, own, before, _ in (first, last):
            for name, p in twin.named_parameters():
                found = before[name.replace("experts.", "experts.experts.")]
                p[own if "experts" in name else slice(None)] = found
        twin.experts.weight[1] = twin.experts.bias[1] = float("nan")
    plain = twin.experts.forward

    def masked(hidden, chosen, gates):
        left = gates * (chosen != 1)
        chosen = torch.where(chosen == 1, 0, chosen)
        return plain(hidden, chosen, left / left.sum(1, keepdim=True) * gates.sum(1, keepdim=True))

    twin.experts.forward = masked
    for rank in (0, 2):
        (twin(batch_of(rank, 2)).square().mean() / 2).backward()
    for p in (twin.experts.weight, twin.experts.bias):
        assert not p.grad[1].any()
    norm = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), LIMIT))
    assert (first[1], last[1]) == ([0, 3], [2, 4])
    for seen, own, before, after in (first, last):
        assert seen == pytest.approx(norm, rel=1e-5)
        for name, p in twin.named_parameters():
            gradient = p.grad[own] if "experts" in name else p.grad
            key = name.replace("experts.", "experts.experts.")
            assert gradient.any()
            np.testing.assert_allclose(before[key] - after[key], 0.5 * gradient, rtol=0, atol=1e-6)
    for name, p in first[3].items():
        assert "experts" in name or torch.equal(p, last[3][name])


# ---------------------------------------------------------------- what would train experts wrongly


def alone(**options):
    """A net in one process, with experts in it and a gradient of each."""
    model = Net()
    layers = commpress.moe.parallelise(model, process_group=Loopback(1).transport(0), **options)
    return model, layers[0]


def test_a_model_with_divided_experts_is_not_streamed_nor_healed(tmp_path):
    model, _ = alone()
    with (
        commpress.TieredStore.open(tmp_path, host="8MiB") as store,
        pytest.raises(
            InvalidArgument,
            match=r"commpress.stream moves what all ranks hold alike: use a store for the experts",
        ),
    ):
        commpress.stream(model, store=store)
    with pytest.raises(InvalidArgument, match=r"commpress.elastic heals all ranks alike"):
        SharedState({"model": model})


def copied():
    torch.set_num_threads(1)
    model = net()
    model.experts.experts.bias.requires_grad_(False)  # frozen for the first step
    found = []
    for each in (model, copy.deepcopy(model), AveragedModel(model).module):
        each.experts.experts.bias.requires_grad_()
        each(batch_of(dist.get_rank(), 0)).square().mean().backward()
        found.append({name: p.grad.numpy() for name, p in each.named_parameters()})
        for name, p in each.named_parameters():
            assert is_held(name, p, (0, 1)) == ("experts" in name)
        held = ["experts.experts.weight", "experts.experts.bias"]
        assert list(commpress.moe.holders_of(each)) == held
    return model.experts.own, found


def test_copies_of_experts_are_of_the_same_ranks(pool):
    """A frozen parameter that is trained later has its gradient divided too."""
    twin = Net()
    for rank in range(2):
        (twin(batch_of(rank, 0)).square().mean() / 2).backward()
    for own, found in pool.run(copied):
        for gradients in found:
            for name in ("weight", "bias"):
                expected = getattr(twin.experts, name).grad[own].numpy()
                ours = gradients[f"experts.experts.{name}"]
                np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)
