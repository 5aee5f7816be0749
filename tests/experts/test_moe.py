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


def batch_of(rank, step):
    return torch.randn(9, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(optimizer, ranks, *, model, clip, steps=3):
    for step in range(steps):
        for rank in ranks:
            (
                model(batch_of(rank, step)).square().mean()
                * (1 if len(ranks) == 1 else 1 / len(ranks))
            ).backward()
        norm = float(clip(list(model.parameters()), LIMIT))
        optimizer.step()
        optimizer.zero_grad()
    return norm


def whole_of(p):
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()


def sharded_around_experts():
    torch.set_num_threads(1)
    model = Net()
    commpress.moe.parallelise(model, placement=[0, 0, 0, 1, 1])
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (2,)),
        ignored_params=commpress.moe.held_parameters(model),
    )
    commpress.compress_fsdp(model, "none", "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    clip = commpress.moe.clip_grad_norm_
    norm = trained(optimizer, [dist.get_rank()], model=model, clip=clip)
    groups = commpress.moe.holders_of(model)
    assert sorted(groups) == ["experts.experts.bias", "experts.experts.weight"]
    assert dist.get_process_group_ranks(groups["experts.experts.bias"]) == [dist.get_rank()]
    wrong = Net()
    commpress.moe.parallelise(wrong)
    fully_shard(wrong, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(InvalidArgument, match=r"ignored_params=commpress.moe.held_parameters"):
        commpress.compress_fsdp(wrong)
    return norm, {name: whole_of(p).numpy() for name, p in model.named_parameters()}


def averaged_around_experts(kind):
    """Under DDP with a codec, with 1-bit Adam, in rounds of local updates."""
    torch.set_num_threads(1)
    model = Net()
    commpress.moe.parallelise(model, placement=[0, 0, 0, 1, 1])
    clip, options = commpress.moe.clip_grad_norm_, {"lr": 1e-2, "eps": 1e-3}
    if kind == "local":
        optimizer = commpress.LocalUpdates(
            torch.optim.AdamW(model.parameters(), **options), every=1, outer=commpress.Average()
        )
        assert optimizer.apart == 2
        with pytest.raises(InvalidArgument, match="2 parameters are of experts"):
            optimizer.elastic_state_dict()
        trained(optimizer, [dist.get_rank()], model=model, clip=lambda p, limit: torch.tensor(0.0))
        return 0.0, {name: p.detach().numpy() for name, p in model.named_parameters()}
    ddp = DistributedDataParallel(model)
    if kind == "onebit":
        clip = lambda p, limit: torch.tensor(0.0)  # noqa: E731
        optimizer = commpress.OneBitAdam(
            model.named_parameters(),
            max_grad_norm=LIMIT,
            exact_steps=100,
            weight_decay=1e-2,
            **options,
        )
        commpress.overlap(ddp, optimizer)
    else:
        state = commpress.compress(ddp, "none")
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    norm = trained(optimizer, [dist.get_rank()], model=ddp, clip=clip)
    if kind == "hook":
        assert not any("experts" in name for name in state.names.numels)
        hidden = Net()
        # as many on each rank, or torch waits for a time before it raises
        hidden.experts = Batched(4)
        commpress.moe.parallelise(hidden)
        # another module than the one that was given
        outside = DistributedDataParallel(torch.nn.Sequential(hidden))
        for use in (lambda: commpress.compress(outside), lambda: outside(batch_of(0, 0))):
            with pytest.raises(InvalidArgument, match="gives all ranks those of rank 0"):
                use()
        with torch.no_grad():
            layer = commpress.moe.experts_of(model)[0]
            layer.load_state_dict(layer.state_dict() | {"_extra_state": torch.tensor([4])})
        with pytest.raises(InvalidArgument, match=r"experts \[4\] were loaded where"):
            model(batch_of(0, 0))
    return norm, {name: p.detach().numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["fsdp", "hook", "onebit"])
def test_experts_train_as_in_one_process_beside_what_averages_the_rest(pool, kind):
    """Clipped by one factor; float32 sums in another order make the difference."""
    twin = Net()
    norm = trained(
        torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3),
        [0, 1],
        model=twin,
        clip=torch.nn.utils.clip_grad_norm_,
    )
    expected = {
        name.replace("experts.", "experts.experts."): p.detach()
        for name, p in twin.named_parameters()
    }
    found = (
        pool.run(sharded_around_experts)
        if kind == "fsdp"
        else pool.run(averaged_around_experts, kind)
    )
    for rank, (seen, parameters) in enumerate(found):
        assert parameters.keys() == expected.keys()
        assert kind == "onebit" or abs(seen - norm) < 1e-5
        for name, ours in parameters.items():
            part = (
                expected[name][slice(0, 3) if rank == 0 else slice(3, 5)]
                if "experts" in name
                else expected[name]
            )
            np.testing.assert_allclose(ours, part.numpy(), rtol=0, atol=2e-5)


def test_local_updates_average_all_but_experts(pool):
    (_, first), (_, second) = pool.run(averaged_around_experts, "local")
    start = dict(Net().named_parameters())
    for name in first:
        if "experts" in name:
            own = start[name.replace("experts.experts", "experts")].detach()
            assert abs(first[name] - own[:3].numpy()).max() > 1e-3
            assert abs(second[name] - own[3:].numpy()).max() > 1e-3
        else:
            assert (first[name] == second[name]).all()


def two_islands():
    """This rank's groups: with its neighbour, 0 with 1 and 2 with 3, and with who is in the same
    place there."""
    rank = dist.get_rank()
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    return inside, [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]


def islands():
    """Experts divided between ranks 0, 1 and again between 2, 3, which train as one."""
    torch.set_num_threads(1)
    rank, (inside, across) = dist.get_rank(), two_islands()
    alone = Net()
    commpress.moe.parallelise(alone, process_group=inside)
    with pytest.raises(InvalidArgument, match="Pass replicas="):
        commpress.compress(DistributedDataParallel(alone))
    model = Net()
    commpress.moe.parallelise(
        model, process_group=inside, replicas=across, placement=[0, 0, 0, 1, 1]
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    trained(optimizer, [rank], model=ddp, clip=commpress.moe.clip_grad_norm_)
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def test_ranks_that_hold_the_same_experts_average_them(pool):
    twin = Net()
    trained(
        torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3),
        range(4),
        model=twin,
        clip=torch.nn.utils.clip_grad_norm_,
    )
    expected = {
        name.replace("experts.", "experts.experts."): p.detach()
        for name, p in twin.named_parameters()
    }
    found = pool.run(islands, size=4)
    for rank, parameters in enumerate(found):
        for name, ours in parameters.items():
            part = (
                expected[name][slice(0, 3) if rank % 2 == 0 else slice(3, 5)]
                if "experts" in name
                else expected[name]
            )
            np.testing.assert_allclose(ours, part.numpy(), rtol=0, atol=2e-5)
            assert (ours == found[rank % 2][name]).all()


def test_mistakes_are_refused():
    transport = Loopback(1).transport(0)
    for options, says in [
        ({"on_lost": "wait"}, "on_lost is 'wait'"),
        ({"on_lost": "mask"}, "use the backend 'commpress'"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            commpress.ExpertExchange(4, transport=transport, **options)
    for experts, says in [
        (torch.nn.Linear(3, 3), "experts is a Linear, expected a list"),
        ([], "experts is a list"),
        (3, "experts is a int"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            commpress.moe.Experts(experts, transport=transport)
    exchange = commpress.ExpertExchange(4, transport=transport)
    with pytest.raises(InvalidArgument, match="exchange has 4 experts and options are"):
        commpress.moe.Experts(modules(), exchange)
    with pytest.raises(InvalidArgument, match="model is a Linear without layers of experts"):
        commpress.moe.parallelise(torch.nn.Linear(3, 3))


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
            gradient, key = (
                (p.grad[own] if "experts" in name else p.grad),
                name.replace("experts.", "experts.experts."),
            )
            assert gradient.any()
            np.testing.assert_allclose(before[key] - after[key], 0.5 * gradient, rtol=0, atol=1e-6)
    for name, p in first[3].items():
        assert "experts" in name or torch.equal(p, last[3][name])


# ---------------------------------------------------------------- what would train experts wrongly


def alone(**options):
    """A net in one process, with experts in it and a gradient of each."""
    model = Net()
    layers = commpress.moe.parallelise(model, transport=Loopback(1).transport(0), **options)
    return model, layers[0]


def test_a_model_with_divided_experts_is_not_streamed_nor_healed(tmp_path):
    model, _ = alone()
    with (
        commpress.TieredStore.open(tmp_path, host="8MiB") as store,
        pytest.raises(
            InvalidArgument,
            match=r"commpress.stream moves what all ranks hold alike: keep a store for the experts",
        ),
    ):
        commpress.stream(model, store=store)
    with pytest.raises(InvalidArgument, match=r"commpress.elastic heals all ranks alike"):
        SharedState({"model": model})


def copied():
    torch.set_num_threads(1)
    model = Net()
    commpress.moe.parallelise(model, placement=[0, 0, 0, 1, 1])
    model.experts.experts.bias.requires_grad_(False)  # frozen for the first step
    found = []
    for each in (model, copy.deepcopy(model), AveragedModel(model).module):
        each.experts.experts.bias.requires_grad_()
        each(batch_of(dist.get_rank(), 0)).square().mean().backward()
        found.append({name: p.grad.numpy() for name, p in each.named_parameters()})
        assert all(
            is_held(name, p, (0, 1)) == ("experts" in name) for name, p in each.named_parameters()
        )
        assert list(commpress.moe.holders_of(each)) == [
            "experts.experts.weight",
            "experts.experts.bias",
        ]
    return found


def test_copies_of_experts_are_of_the_same_ranks(pool):
    """A frozen parameter that is trained later has its gradient divided too."""
    twin = Net()
    for rank in range(2):
        (twin(batch_of(rank, 0)).square().mean() / 2).backward()
    for rank, found in enumerate(pool.run(copied)):
        for gradients in found:
            for name in ("weight", "bias"):
                expected = getattr(twin.experts, name).grad[
                    slice(0, 3) if rank == 0 else slice(3, 5)
                ]
                np.testing.assert_allclose(
                    gradients[f"experts.experts.{name}"], expected.numpy(), rtol=0, atol=1e-6
                )


def test_buffers_that_may_be_of_experts_are_refused():
    experts = Batched(4)
    experts.register_buffer("scale", torch.ones(4))
    with pytest.raises(InvalidArgument, match="have a buffer 'scale' of as many rows as experts"):
        commpress.moe.Experts(experts, transport=Loopback(1).transport(0))
    with pytest.raises(InvalidArgument, match="chunks is 0"):
        commpress.moe.Experts(Batched(4), transport=Loopback(1).transport(0), chunks=0)
