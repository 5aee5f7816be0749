"""Optimizers that look across elements are refused when they are wrapped; element-wise ones never,
and give the same bits."""

import random

import numpy as np
import pytest
import torch

import commpress
from commpress.errors import InvalidArgument
from small_store import open_store
from variants import every_second
from zero_twin import equal, values

LR = {"lr": 1e-2}
ELEMENTWISE = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    (torch.optim.Adam, {"lr": torch.tensor(1e-2)}),
    (torch.optim.AdamW, {"lr": 0.0}),
    (torch.optim.AdamW, {"names": True}),
    (torch.optim.AdamW, {"foreach": False, "betas": (0.0, 0.9)}),
    (torch.optim.Adagrad, {"foreach": True, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    (torch.optim.Adamax, {}),
    (torch.optim.Adadelta, {"foreach": True, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.RAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {"foreach": True, "maximize": True}),
    (torch.optim.ASGD, {"t0": 1.0, "lambd": 0.1}),
]


class Simple(torch.optim.Optimizer):
    """Subclasses say what happens to one parameter."""

    def __init__(self, params, lr=1e-2, **more):
        super().__init__(params, {"lr": lr, **more})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            self.group = group
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, self.state[p], group["lr"])


class Lion(Simple):
    """Element-wise, and nobody's but ours."""

    def move(self, p, g, state, lr):
        m = state.setdefault("exp_avg", torch.zeros_like(p))
        p.sub_(lr * (0.9 * m + 0.1 * g).sign())
        m.lerp_(g, 0.01)


class Lamb(Lion):
    def move(self, p, g, state, lr):
        before = p.clone()
        super().move(p, g, state, lr)
        p.copy_(before + (p - before) * before.norm())


class MuonLike(Lion):
    """As most people write it: matrices are made orthogonal, all else goes another way."""

    def move(self, p, g, state, lr):
        if p.dim() < 2:
            return super().move(p, g, state, lr)
        u, _, v = torch.linalg.svd(g.flatten(1), full_matrices=False)
        p.sub_(lr * (u @ v).view_as(p))


class Factored(Simple):
    def move(self, p, g, state, lr):
        state["rows"] = g.view(len(p), -1).square().mean(1)
        p.sub_(lr * g / (state["rows"].view(-1, *[1] * (p.dim() - 1)) + 1e-3).sqrt())


class CommonNorm(Lion):
    """Clips by the norm of all its parameters together."""

    def step(self, closure=None):
        norm = torch.stack(
            [p.grad.norm() for group in self.param_groups for p in group["params"]]
        ).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(norm)
        super().step()


class EstimatesItsRate(Lion):
    """A distance, from sums over all parameters, scales the rate (as Prodigy and D-Adaptation): at
    first it is tiny."""

    def step(self, closure=None):
        group = self.param_groups[0]
        group.setdefault("d", 1e-6)
        begin = [self.state[p].setdefault("begin", p.detach().clone()) for p in group["params"]]
        led = sum(
            float((p.grad * (b - p)).sum()) for p, b in zip(group["params"], begin, strict=True)
        )
        group["d"] = max(group["d"], led / sum(float(p.grad.abs().sum()) for p in group["params"]))
        super().step()

    def move(self, p, g, state, lr):
        super().move(p, g, state, lr * self.group["d"])


class MuonFromFourOn(MuonLike):
    """Takes matrices with a short side for vectors."""

    def move(self, p, g, state, lr):
        if min(p.shape, default=0) < 4:
            return Lion.move(self, p, g, state, lr)
        super().move(p, g, state, lr)


class FactoredFrom128On(Factored):
    """Keeps means of rows in place of moments, of matrices whose sides are long."""

    def move(self, p, g, state, lr):
        if min(p.shape, default=0) < 128:
            return Lion.move(self, p, g, state, lr)
        super().move(p, g, state, lr)


class InBlocks(Lion):
    """Keeps the state of large tensors in whole numbers under one scale for 256 elements."""

    def move(self, p, g, state, lr):
        super().move(p, g, state, lr)
        if p.numel() >= 4096:
            blocks = state["exp_avg"].view(-1).split(256)
            state["exp_avg"].copy_(
                torch.cat([(b * (s := 127 / b.abs().max())).round() / s for b in blocks]).view(
                    p.shape
                )
            )


class InSignsOfAll(Lion):
    """Looks across vectors only if they are long."""

    def move(self, p, g, state, lr):
        super().move(p, g - g.mean() if p.dim() == 1 and p.numel() > 4096 else g, state, lr)


class CountsInItself(Simple):
    def move(self, p, g, state, lr):
        p.sub_(lr / self.steps * g)


class CountsInItsGroup(Simple):
    def move(self, p, g, state, lr):
        self.group["k"] = self.group.get("k", 0) + 1
        p.sub_(lr / self.group["k"] * g)


class Noisy(Simple):
    def move(self, p, g, state, lr):
        p.sub_(lr * (g + torch.randn_like(g) + random.random() + np.random.rand()))


class HalfState(Simple):
    def move(self, p, g, state, lr):
        m = state.setdefault("exp_avg", torch.zeros_like(p, dtype=torch.bfloat16))
        m.lerp_(g.to(m.dtype), 0.1)
        p.sub_(lr * m)


class NowAndThen(Lion):
    """Elements are mixed in every tenth step only."""

    def move(self, p, g, state, lr):
        state["step"] = state.get("step", 0) + 1
        super().move(p, g, state, lr)
        if state["step"] % 10 == 0:
            p.sub_(p.mean())


class NeedsClosure(Simple):
    def step(self, closure):
        super().step(closure)


class Replaces(Simple):
    """Element-wise, but its state is another tensor after each step."""

    def move(self, p, g, state, lr):
        state["exp_avg"] = state.get("exp_avg", torch.zeros_like(p)) * 0.9 + g
        p.sub_(lr * state["exp_avg"])


def model():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(17, 33), torch.nn.Tanh(), torch.nn.Linear(33, 9, bias=False)
    )


def train(net, optimizer, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.full((3, 17), 0.1 + step)).square().sum().backward()
        optimizer.step()
    return values(net)


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store", host="4MiB") as opened:
        yield opened


@pytest.mark.parametrize(("kind", "options"), every_second([*ELEMENTWISE, (Lion, {})]))
def test_element_wise_optimizers_are_taken_and_give_the_same_bits(store, kind, options):
    options = LR | {key: value for key, value in options.items() if key != "names"}
    nets = [model() for _ in range(3)]
    twin = kind(nets[0].parameters(), **options)
    offloaded = commpress.Offloaded(
        nets[1].named_parameters(), kind, store=store, chunk_mb=0.001, **options
    )
    partitioned = commpress.Partitioned(nets[2].parameters(), kind, bucket_mb=0.001, **options)
    wanted = train(nets[0], twin)
    assert len(offloaded.chunks) > 2
    for net, optimizer in ((nets[1], offloaded), (nets[2], partitioned)):
        assert equal(train(net, optimizer), wanted)
    partitioned.close()


class Scaled(torch.nn.Module):
    """Train a parameter that is a number, without a dimension, which CLIP has."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = model(), torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.net(x) * self.scale.exp()


def test_a_number_is_a_parameter_like_others(store):
    nets = [Scaled() for _ in range(3)]
    wanted = train(nets[0], torch.optim.AdamW(nets[0].parameters(), **LR))
    offloaded = commpress.Offloaded(nets[1].parameters(), torch.optim.AdamW, store=store, **LR)
    partitioned = commpress.Partitioned(nets[2].parameters(), torch.optim.AdamW, **LR)
    for net, optimizer in ((nets[1], offloaded), (nets[2], partitioned)):
        assert equal(train(net, optimizer), wanted)
    partitioned.close()


ACROSS = [
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.LBFGS,
    torch.optim.SparseAdam,
    Factored,
    CommonNorm,
    CountsInItself,
    CountsInItsGroup,
    EstimatesItsRate,
    MuonFromFourOn,
    FactoredFrom128On,
    Noisy,
    HalfState,
    NeedsClosure,
]
BY_TENSOR = [Lamb, InBlocks, InSignsOfAll, NowAndThen]


@pytest.mark.parametrize("kind", BY_TENSOR)
def test_who_mixes_elements_of_a_tensor_gets_whole_ones_from_a_store(store, kind):
    nets = [model() for _ in range(2)]
    twin = kind(nets[0].parameters(), **LR)
    offloaded = commpress.Offloaded(
        nets[1].named_parameters(), kind, store=store, chunk_mb=0.001, **LR
    )
    assert offloaded.by_tensor
    assert len(offloaded.chunks) == 3  # one for each parameter
    assert equal(train(nets[1], offloaded, steps=12), train(nets[0], twin, steps=12))


def test_state_that_no_trial_has_shown_is_refused_in_the_first_step(store):
    """Tensors larger than those that are tried have other state, which would be lost."""

    class FromALengthOn(Lamb):
        def move(self, p, g, state, lr):
            super().move(p, g, state, lr)
            if p.numel() > 1 << 15:
                state["momentum_buffer"] = state.pop("exp_avg")

    net = torch.nn.Linear(256, 256)
    optimizer = commpress.Offloaded(net.parameters(), FromALengthOn, store=store)
    net(torch.ones(2, 256)).sum().backward()
    with pytest.raises(InvalidArgument, match=r"\['momentum_buffer'\] where .* \['exp_avg'\]"):
        optimizer.step()


@pytest.mark.parametrize("kind", [*ACROSS, *BY_TENSOR])
def test_optimizers_that_look_across_elements_are_refused(store, kind):
    net = model()
    before = values(net)
    for build, options in (
        (commpress.Partitioned, {}),
        (commpress.Partitioned, {"store": store}),
        *([(commpress.Offloaded, {"store": store})] if kind in ACROSS else []),
    ):
        with pytest.raises(InvalidArgument, match=rf"{kind.__name__}, which .*such as AdamW"):
            build(net.parameters(), kind, **options)
    assert list(store) == []
    assert equal(values(net), before)
    assert not any(
        vars(p) or p.grad is not None or p._post_accumulate_grad_hooks for p in net.parameters()
    )


def test_who_mixes_small_tensors_is_refused_before_a_large_one_is_tried():
    """Shampoo makes a square matrix of the elements of a vector: 10 GB and half an hour for one of
    some thousand."""

    class Mixes(Simple):
        def move(self, p, g, state, lr):
            assert p.numel() < 1000
            p.sub_(lr * g.mean())

    with pytest.raises(InvalidArgument, match="differs from that of its pieces"):
        commpress.Partitioned(model().parameters(), Mixes)


@pytest.mark.parametrize("kind", [commpress.OneBitAdam, commpress.Partitioned])
def test_optimizers_that_communicate_are_refused(store, kind):
    for one in (kind, type("Own", (kind,), {})):
        with pytest.raises(InvalidArgument, match="communicates by itself"):
            commpress.Offloaded(model().parameters(), one, store=store)
        with pytest.raises(InvalidArgument, match="communicates by itself"):
            commpress.Partitioned(model().parameters(), one)


def test_what_an_optimizer_does_to_matrices_does_not_matter_where_there_are_none(store):
    net = torch.nn.LayerNorm(300)
    optimizer = commpress.Offloaded(net.parameters(), MuonLike, store=store)
    net(torch.ones(2, 300)).sum().backward()
    optimizer.step()


def test_options_of_a_group_count(store):
    """Adafactor's kind of switch, given for one group only."""

    class Switch(Lion):
        def __init__(self, params, lr=1e-2, scaled=False):
            super().__init__(params, lr, scaled=scaled)

        def move(self, p, g, state, lr):
            super().move(p, g, state, lr * float(p.norm()) if self.group["scaled"] else lr)

    net = model()
    groups = [{"params": [net[0].weight]}, {"params": [net[2].weight], "scaled": True}]
    with pytest.raises(InvalidArgument, match="is not element-wise"):
        commpress.Partitioned(groups, Switch)
    assert commpress.Offloaded(groups, Switch, store=store, prefix="scaled").by_tensor
    groups[1]["scaled"] = False
    assert not commpress.Offloaded(groups, Switch, store=store).by_tensor


def test_state_that_is_replaced_is_taken_in_memory_and_refused_in_a_store(store):
    nets = [model(), model()]
    optimizer = commpress.Partitioned(nets[0].parameters(), Replaces)
    wanted = train(nets[1], Replaces(nets[1].parameters()))
    assert equal(train(nets[0], optimizer), wanted)
    optimizer.close()
    with pytest.raises(InvalidArgument, match="replaces its state"):
        commpress.Offloaded(nets[0].parameters(), Replaces, store=store)


def test_trying_draws_no_random_numbers_of_the_program(store):
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    for kind in (Noisy, Lion):
        try:
            commpress.Offloaded([torch.nn.Parameter(torch.ones(3, 3))], kind, store=store)
        except InvalidArgument:
            assert kind is Noisy
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
