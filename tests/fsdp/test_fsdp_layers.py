"""FSDP2 with a codec, or a rank of PowerSGD, for every layer: all ranks choose as a single process
with all gradients would, and nothing is lost."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.choice import PerLayer
from commpress.codecs import codec_named
from commpress.codecs.whole_tensors import travels_whole
from commpress.collectives.topology import Topology
from commpress.errors import InvalidArgument
from commpress.integrations.fsdp.policies import policy_for
from commpress.plan.assignment import (
    OPTIONS,
    assign_by,
    assign_ranks,
    errors_of,
    errors_of_ranks,
    rank_options,
)
from fsdp_twin import Net, Plan, Session, carried
from variants import first

EVERY = 2
CODECS = {"rows": "int4", "ranks": "powersgd-3+fp8"}
PLAN = Plan(weights=None, steps=4, momentum=0.0)
NUMELS = {n: p.numel() for n, p in Net().named_parameters()}


def own_gradients(session: Session, step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank alone, from a model that is not sharded."""
    alone = Net()
    whole = {n: p.full_tensor().detach() for n, p in session.model.named_parameters()}
    alone.load_state_dict(whole)
    draws = torch.Generator().manual_seed(step * 100 + dist.get_rank())
    x, y = torch.randint(13, (6,), generator=draws), torch.randint(7, (6,), generator=draws)
    nn.functional.cross_entropy(alone(x), y).backward()
    return {n: p.grad for n, p in alone.named_parameters()}


def errors(kind: str, gradients: dict[str, torch.Tensor], group: Any = None) -> dict[str, Any]:
    """Return the errors of all options, summed over the ranks, by layer."""
    uniform, own = CODECS[kind], {}
    policy = policy_for(Net(), uniform, min_numel=0)
    options = tuple(dict.fromkeys([*OPTIONS, uniform]))
    for name, g in gradients.items():
        codec = policy.choose(name, NUMELS[name])
        if kind == "rows" and not codec.lossless:
            own[name] = errors_of(g.flatten(), options)
        elif kind == "ranks" and travels_whole(codec, g.shape):
            own[name] = errors_of_ranks(g, rank_options(codec_named(uniform)))
    table = torch.tensor([own[n] for n in sorted(own)], dtype=torch.float64)
    dist.all_reduce(table, group=group)
    return dict(zip(sorted(own), table.tolist(), strict=True))


def expected(kind: str, gradients: dict[str, torch.Tensor], group: Any = None) -> dict[str, Any]:
    """Return the choice of a single process that has the gradients of all ranks."""
    uniform, found = CODECS[kind], errors(kind, gradients, group)
    shapes, ranks = {n: g.shape for n, g in gradients.items()}, dist.get_world_size(group)
    if kind == "ranks":
        named = {n: tuple(shapes[n]) for n in found}
        low = codec_named(uniform)
        chosen = assign_ranks(found, named, low, ranks=ranks)
        return {n: f"powersgd-{rank}+fp8" for n, rank in chosen.ranks.items()}
    numels = {n: shapes[n].numel() for n in found}
    options = tuple(dict.fromkeys([*OPTIONS, uniform]))
    return dict(assign_by(found, numels, options, ranks=ranks, uniform=uniform).rules)


def chosen(kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train, and compare the rules with those of a single process, and what was sent and is left
    with the sum of all means."""
    torch.set_num_threads(1)
    codec, rules, oracle = PerLayer(CODECS[kind], EVERY), [], []
    session = Session(replace(PLAN, codec=codec, lr=0.02, options=options))
    sums: dict[str, torch.Tensor] = {}
    largest = 0.0
    for step in range(7):
        if step in (0, 3):  # another layer gets large gradients
            with torch.no_grad():
                session.model.blocks[step // 3].norm.weight.mul_(10.0 * (1 + step) ** 3)
        own = own_gradients(session, step)
        if session.state.choice.looks(step):
            oracle.append(expected(kind, own))
        for name, g in own.items():
            dist.all_reduce(g)
            sums[name] = sums.get(name, 0) + g / dist.get_world_size()
            largest = max(largest, float(g.abs().max()))
        session.step(step)
        for name, g in session.gradients.items():
            sums[name] = sums[name] - g
        rules.append(session.state.choice.state()["rules"])
    bases = session.state.state_dict()["bases"]
    sent = {name: f"powersgd-{len(basis)}+fp8" for name, basis in bases.items()}
    assert kind == "rows" or sent == rules[-1], "ranks of the factors that were sent"
    if options:  # the elastic form does not know residuals of two hops
        return {"rules": rules, "oracle": oracle}
    left = session.state.elastic_state_dict()["residuals"]
    far = {n: float((sums[n] - left[n].full_tensor()).abs().max()) / largest for n in sums}
    return {
        "rules": rules,
        "oracle": oracle,
        "far": max(far.values()),
        "left": sum(float(each.full_tensor().abs().sum()) for each in left.values()),
        "why": session.state.counters.choice,
    }


@pytest.mark.parametrize(("kind", "size"), [("rows", 2), ("ranks", 3)])
def test_ranks_choose_as_one_process_with_all_gradients_and_lose_nothing(pool, kind, size):
    results = pool.run(chosen, kind, {}, size=size)
    first = 0 if kind == "rows" else 1  # steps that are looked at: 0, 2, 4 or 1, 3, 5
    for found in results:
        assert found["rules"] == results[0]["rules"]
        assert found["rules"][: first + 1] == [{}] * (first + 1), "decided between two steps"
        assert found["rules"][first + 1 :: EVERY] == found["oracle"][:3]
        assert found["oracle"][0]
        assert found["far"] < 2e-6
        assert found["left"] > 1e-2
        assert found["why"].startswith("of step ")
    assert len({str(each) for each in results[0]["oracle"]}) > 1, "the choice changes in the run"


@pytest.mark.parametrize("kind", first(1, ["ranks", "rows"]))
def test_two_hops_choose_by_the_gradients_of_all_ranks(pool, kind):
    nodes = Topology(((0, 1), (2, 3)))
    for found in pool.run(chosen, kind, {"topology": nodes}, size=4):
        assert found["rules"][1 if kind == "rows" else 2 :: EVERY] == found["oracle"][:3]
        assert found["oracle"][0]


def chosen_by_replicas(kind: str, replicas: int) -> dict[str, Any]:
    """The same of hybrid sharding: the replicas of a shard choose together."""
    torch.set_num_threads(1)
    sizes = replicas, dist.get_world_size() // replicas
    mesh = dist.init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    group = mesh["replicate"].get_group()
    torch.manual_seed(0)
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["shard"])
    codec = PerLayer(CODECS[kind], EVERY)
    state = commpress.compress_hsdp(model, group, codec, min_numel=0)
    average, own, means = state.average, {}, {}

    def watched(of: Any, shard: torch.Tensor) -> None:
        places = [
            (span.name, span.source, shape) for span, shape in zip(*of.tensors(), strict=True)
        ]
        for name, at, shape in places:
            own[name] = shard[at:][: shape.numel()].view(shape).clone()
        average(of, shard)
        for name, at, shape in places:
            means[name] = shard[at:][: shape.numel()].view(shape).clone()

    state.average = watched
    rules, oracle, sums, largest = [], [], {}, 0.0
    for step in range(7):
        if step in (0, 3):  # another layer gets large gradients
            with torch.no_grad():
                model.blocks[step // 3].norm.weight.mul_(10.0 * (1 + step) ** 3)
        draws = torch.Generator().manual_seed(step * 100 + dist.get_rank())
        x, y = torch.randint(13, (6,), generator=draws), torch.randint(7, (6,), generator=draws)
        looks = state.choice.looks(step)
        nn.functional.cross_entropy(model(x), y).backward()
        model.zero_grad()
        if looks:
            oracle.append(expected(kind, own, group))
        for name, g in own.items():
            dist.all_reduce(g, group=group)
            sums[name] = sums.get(name, 0) + g / replicas - means[name]
            largest = max(largest, float(g.abs().max()))
        rules.append(state.choice.state()["rules"])
        sent = {name: f"powersgd-{len(basis)}+fp8" for name, basis in state.exchanges.bases.items()}
        assert kind == "rows" or not rules[-1] or sent == rules[-1], "ranks of the factors"
    far = total = 0.0
    for name, lost in sums.items():
        left = torch.zeros(lost.numel())
        state.exchanges.residuals.add_to(name, left, mesh.get_local_rank("replicate"), replicas)
        dist.all_reduce(left, group=group)
        far = max(far, float((lost.flatten() - left / replicas).abs().max()) / largest)
        total += float(left.abs().sum())
    return {
        "place": mesh.get_local_rank("shard"),
        "rules": rules,
        "oracle": oracle,
        "far": far,
        "left": total,
        "why": state.counters.choice,
    }


@pytest.mark.parametrize(("kind", "size", "replicas"), [("rows", 3, 3), ("ranks", 4, 2)])
def test_replicas_of_a_shard_choose_as_one_process_and_lose_nothing(pool, kind, size, replicas):
    results = pool.run(chosen_by_replicas, kind, replicas, size=size)
    first = 0 if kind == "rows" else 1
    for found in results:
        assert found["rules"] == results[found["place"]]["rules"]
        assert found["rules"][first + 1 :: EVERY] == found["oracle"][:3]
        assert len({str(each) for each in found["oracle"]}) > 1, "the choice changes in the run"
        assert found["far"] < 2e-6
        assert found["left"] > 1e-2
        assert found["why"].startswith("of step ")


def test_a_choice_survives_another_world_size(pool, tmp_path):
    plan = replace(PLAN, codec=PerLayer(CODECS["ranks"], EVERY))
    saved, *_ = pool.run(carried, plan, str(tmp_path), False, size=3)
    assert saved["rules"] != "{}"
    assert saved["bases"]
    for loaded in pool.run(carried, plan, str(tmp_path), True, size=2):
        assert loaded["rules"] == saved["rules"]
        for part in ("residuals", "bases"):
            assert loaded[part].keys() == saved[part].keys()
            for name, values in saved[part].items():
                torch.testing.assert_close(loaded[part][name], values, atol=1e-7, rtol=1e-6)


def refused() -> None:
    every, halves = dist.new_group([0, 1]), [dist.new_group([0]), dist.new_group([1])]
    mesh = dist.device_mesh.DeviceMesh.from_group(halves[dist.get_rank()], "cpu")
    model = Net()
    fully_shard(model, mesh=mesh)
    with pytest.raises(InvalidArgument, match=r"with agree_over, .* must stay equal: .*'int4'"):
        commpress.compress_fsdp(model, PerLayer("int4"), agree_over=every)
    model = Net()
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model)
    with pytest.raises(InvalidArgument, match="on other ranks than the first"):
        commpress.compress_fsdp(model, PerLayer("powersgd-2"), None)


def test_ranks_that_do_not_choose_together_are_refused(pool):
    pool.run(refused, size=2)


def on_a_mesh() -> tuple[int, int]:
    """Layers with a codec under DDP, and under hybrid sharding, where all ranks agree on a step."""
    flat = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    both = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models = nn.parallel.DistributedDataParallel(Net()), Net()
    fully_shard(models[1], mesh=both["shard"])
    codec, found = PerLayer("int4", 1), []
    for model, mesh, name in zip(models, (flat, both), ("dp", "replicate"), strict=True):
        state = commpress.compress(model, mesh=mesh, dims={name: codec}, min_numel=0)[name]
        for step in range(2):
            draws = torch.Generator().manual_seed(step * 100 + dist.get_rank())
            model(torch.randint(13, (6,), generator=draws)).square().mean().backward()
        found.append(len(state.choice.state()["rules"]))
    return tuple(found)


def test_layers_choose_where_all_ranks_of_a_mesh_agree_on_a_step(pool):
    for under_ddp, of_replicas in pool.run(on_a_mesh, size=4):
        assert under_ddp > 5
        assert of_replicas > 5
