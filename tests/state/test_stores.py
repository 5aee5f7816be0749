"""Laws of optimizers whose state is divided or in a store, beside a plain twin in memory: a run
goes on from a commit or a snapshot, both load each other's states, what does not fit changes
nothing, and what is not finite is left out."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import commpress
import offload_run
import stream_twin
import test_whole_tensors
import tier_layers
from commpress.errors import NonFiniteGradient, StateMismatch
from small_store import open_store
from state_worlds import apart
from test_whole_tensors import LR, Deep
from zero_twin import clip

STEPS = 3
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "foreach": False}


class Kind(NamedTuple):
    """``made`` and ``twin`` return a model and its optimizer."""

    made: Callable[..., tuple[Any, Any]]
    twin: Callable[[], tuple[Any, Any]]
    loss_of: Callable[..., torch.Tensor]
    stored: bool = True
    open: Callable[..., commpress.TieredStore] = open_store


def adamw(net):
    return net, torch.optim.AdamW(net.parameters(), **ADAMW)


def offloaded(store, kind=torch.optim.AdamW, **more):
    net = offload_run.model()
    options = {"store": store, "chunk_mb": 0.032, **ADAMW, **more}
    return net, commpress.Offloaded(net.parameters(), kind, **options)


def partitioned(store, kind=torch.optim.AdamW, **more):
    net = offload_run.model()
    where = {} if store is None else {"store": store, "chunk_mb": 0.032}
    options = {**where, **ADAMW, **more}
    return net, commpress.Partitioned(net.parameters(), kind, **options)


def muon(store, kind=None, **more):
    net, given = Deep(), {"store": store, "lr": LR, **more}
    return net, commpress.Offloaded(net.matrices(), kind or torch.optim.Muon, **given)


def in_memory():
    net = Deep()
    return net, torch.optim.Muon(net.matrices(), lr=LR)


def loss_of_deep(net, step, part):
    """One layer has no gradient in the first steps."""
    draw = torch.Generator().manual_seed(10 * step + part)
    x = torch.randn(4, test_whole_tensors.WIDTH, generator=draw)
    return net(x, 4 if step < STEPS else None).square().mean()


def streamed(store, kind=torch.optim.AdamW, **more):
    net = stream_twin.made()
    commpress.stream(net, store=store, chunk_mb=0.04)
    options = {"store": store, "chunk_mb": 0.04, **ADAMW, **more}
    return net, commpress.Offloaded(net.parameters(), kind, **options)


def in_blocks():
    """A twin that has zeros where there is no gradient, as the rest of a block has."""
    net, twin = adamw(stream_twin.made())
    twin.register_step_pre_hook(lambda *_: clip(net.parameters(), 1e9))
    return net, twin


def tiered(store, kind=torch.optim.AdamW, **more):
    net = tier_layers.Net(store=commpress.moe.ExpertTiers(store, 2))
    options = {**ADAMW, **more}
    return net, commpress.moe.ExpertOptimizer(net.parameters(), kind, **options)


PLAIN = (lambda: adamw(offload_run.model()), offload_run.loss_of)
KINDS = {
    "Offloaded": Kind(offloaded, *PLAIN),
    "Partitioned": Kind(partitioned, *PLAIN, stored=False),
    "Partitioned in a store": Kind(partitioned, *PLAIN),
    "streamed": Kind(streamed, in_blocks, stream_twin.loss_of),
    "experts": Kind(
        tiered,
        lambda: adamw(tier_layers.Net()),
        tier_layers.loss_of,
        open=tier_layers.open_store,
    ),
}
if hasattr(torch.optim, "Muon"):
    KINDS["Muon"] = Kind(muon, in_memory, loss_of_deep)
STORED = [name for name, kind in KINDS.items() if kind.stored]


class Run:
    """A model and its optimizer, in a store, or the twin."""

    def __init__(self, name, folder=None, **options):
        self.kind, self.store = KINDS[name], None
        if folder is not None and self.kind.stored:
            self.store = self.kind.open(folder / "store", host="2MiB")
        made = self.kind.twin if folder is None else self.kind.made
        self.net, self.optimizer = made() if folder is None else made(self.store, **options)

    def train(self, first, last):
        for step in range(first, last):
            for part in range(2):
                self.kind.loss_of(self.net, step, part).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def all(self):
        """Weights and state."""
        return copy.deepcopy([dict(self.net.state_dict()), self.optimizer.state_dict()["state"]])

    def load(self, other):
        weights, _ = other.all()
        self.net.load_state_dict(weights)
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))
        return self

    def close(self):
        self.optimizer.zero_grad()
        for each in (self.optimizer, self.store):
            if hasattr(each, "close"):
                each.close()


@pytest.fixture(params=KINDS)
def name(request):
    return request.param


@pytest.mark.parametrize("name", STORED)
def test_a_run_goes_on_from_the_last_commit_or_snapshot(tmp_path, name):
    """The step after it is gone, and a backward whose step never came."""
    one = Run(name, tmp_path).train(0, 2)
    one.optimizer.commit()
    one.train(2, STEPS).store.snapshot("three")
    one.train(STEPS, STEPS + 1)
    KINDS[name].loss_of(one.net, 5, 0).backward()
    one.store.close()
    again = Run(name, tmp_path)
    assert again.optimizer.steps_done == STEPS
    again.train(STEPS, STEPS + 3)
    assert not apart(again.all(), Run(name).train(0, STEPS + 3).all())
    again.optimizer.commit()
    again.close()
    with pytest.raises(StateMismatch, match="of other parameters, chunk_mb or optimizer"):
        Run(name, tmp_path, kind=torch.optim.RAdam)


def test_it_and_the_plain_optimizer_load_each_others_states(tmp_path, name):
    twin, one = Run(name).train(0, STEPS), Run(name, tmp_path).train(7, 9)
    one.load(twin)
    assert not apart(one.all(), twin.all())
    every = [one, twin, Run(name).load(one)]
    for each in every:
        each.train(STEPS, STEPS + 2)
        assert not apart(each.all(), one.all())
    one.optimizer.load_state_dict(Run(name).optimizer.state_dict())
    assert not one.optimizer.state_dict()["state"]
    one.close()


def test_weights_that_were_loaded_are_trained_on(tmp_path, name):
    found = []
    for one in (Run(name), Run(name, tmp_path)):
        one.train(0, 2)
        weights, _ = one.all()
        new = {key: value + 0.5 for key, value in weights.items() if value.is_floating_point()}
        one.net.load_state_dict(weights | new)
        found.append(one.train(2, 4).all())
        one.close()
    assert not apart(*found)


def test_a_state_that_does_not_fit_changes_nothing(tmp_path, name):
    one = Run(name, tmp_path).train(0, STEPS)
    before, state = one.all(), one.optimizer.state_dict()
    one.train(STEPS, STEPS + 1)
    now = one.all()
    assert apart(before, now)
    with pytest.raises(StateMismatch, match="groups of"):
        one.optimizer.load_state_dict(state | {"param_groups": []})
    for number in (min(state["state"]), max(state["state"])):
        entries = state["state"][number]
        for key, value in entries.items():
            without = {k: v for k, v in entries.items() if k != key}
            wrong = [without, entries | {key: torch.ones(2001)}][len(entries) == 1 :]
            for bad in wrong[: 2 if value.numel() > 1 else 1]:
                with pytest.raises(StateMismatch, match=key):
                    one.optimizer.load_state_dict(state | {"state": state["state"] | {number: bad}})
                assert not apart(one.all(), now)
    one.close()


def test_a_step_that_is_not_finite_is_left_out(tmp_path, name):
    one = Run(name, tmp_path, max_grad_norm=1.0).train(0, 1)
    before = one.all()
    (one.kind.loss_of(one.net, 1, 0) * float("nan")).backward()
    one.optimizer.step()
    one.optimizer.zero_grad()
    assert not apart(one.all(), before)
    assert (one.optimizer.steps_done, one.optimizer.skipped_steps) == (1, 1)
    one.optimizer.on_nonfinite = "raise"
    (one.kind.loss_of(one.net, 1, 0) * float("inf")).backward()
    with pytest.raises(NonFiniteGradient):
        one.optimizer.step()
    one.close()
