"""The mean read from the messages that brought it: the same bits as from momentum, and only as long as nobody changes that."""

import copy
import pickle

import numpy as np
import pytest
import torch

from commpress.codecs.policy import policy_of
from commpress.collectives.buckets import Span, messages
from commpress.errors import InvalidArgument
from commpress.kernels import adam, cpu, cpu_adam, cpu_threads
from commpress.kernels.pieces import KIND, NUMEL, SOURCE
from commpress.kernels.reference import SIGN_RMS
from commpress.optim import OneBitAdam, OneBitLamb, ZeroOneAdam
from commpress.optim.flat import Flat
from commpress.optim.optimizer import CompressedOptimizer
from commpress.optim.plain_state import PlainState
from optim_twin import SHAPES, Replicas, noise, start
from test_land import CODECS
from test_land import SHAPES as MANY
from test_zero_one_adam import Fixed

OPTIMIZERS = {
    "adam": (OneBitAdam, {}), "live": (OneBitLamb, {}), "frozen": (OneBitLamb, {"rates": "frozen"}),
}  # fmt: skip


def aim(part, p, r, changed, said):
    cpu_adam.aim(part, p, r, changed[0], beta=0.9, gain=0.5, said=said)


def accumulate(part, p, r, changed, said):
    cpu_adam.accumulate(part, p, p[:0], r, changed[0], beta=0.9, gain=0.5, lr=0.1, keep=0.99, share=7.0, said=said)


def wander(part, p, r, changed, said):
    m, u, a = changed
    assert cpu_adam.wander(
        part, m, u, a, r, beta=0.9, gain=0.5, lr=0.1, keep=0.99, kept=0.98, begins=True, share=7.0, said=said
    )  # fmt: skip


def land(flat, p, plan, wires, *, stored):
    before = [w.clone() for w in flat.weights]
    for message, rows in zip(plan, wires, strict=True):
        segments, owners = flat.landing(message)
        moves = np.full((2, len(owners)), 0.5, np.float32)
        cpu_adam.land(rows, message.pieces, segments, p, p[:0], steps=moves[0], keeps=moves[1], stored=stored)
    after = [w.clone() for w in flat.weights]
    for w, b in zip(flat.weights, before, strict=True):
        w.copy_(b)
    return after


@pytest.mark.parametrize("passes", [aim, accumulate, wander])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [1, 3])
def test_passes_read_the_messages_as_they_read_momentum(compiled, monkeypatch, codec, size, passes):
    flat = Flat([torch.nn.Parameter(p) for p in start(MANY)], [str(i) for i in range(len(MANY))])
    p, r, *changed = (flat.new() for _ in range(5))
    p.copy_(torch.randn(flat.numel))
    r.copy_(torch.rand(flat.numel) + 0.1)
    for parameter, g in zip(flat.parameters, start(MANY, 9), strict=True):
        parameter.grad = g
    flat.parameters[3].grad = None
    spans = [Span(name, *place) for name, place in zip(flat.names, flat.places, strict=True)]
    plan = messages(spans, policy_of(codec, min_numel=100), size, message=5000, piece=1500)
    wires = [torch.zeros(size, message.pieces.row_bytes, dtype=torch.uint8) for message in plan]
    for message, rows in zip(plan, wires, strict=True):
        cpu.encode(p, rows, torch.zeros(1, dtype=torch.uint8), message.pieces, key=5)
        cpu.decode(rows, p, message.pieces)
    only = torch.full_like(p, 1e30)  # where signs were not stored
    plain = only.clone()
    assert all(map(torch.equal, land(flat, only, plan, wires, stored=False), land(flat, plain, plan, wires, stored=True)))
    left = torch.ones_like(p, dtype=torch.bool)
    for line in np.concatenate([message.pieces.table for message in plan]):
        left[line[SOURCE] : line[SOURCE] + line[NUMEL]] = bool(line[KIND] <= SIGN_RMS)
    assert torch.equal(only, torch.where(left, 1e30, p))
    parts = [flat.segments(range(3)), flat.segments((5, 3, 2)), flat.segments((7,))]
    weights = [w.clone() for w in flat.weights]

    def result(source, said):
        for w, before in zip(flat.weights, weights, strict=True):
            w.copy_(before)
        changed[0].copy_(source)
        for part in parts:
            runs = cpu_adam.runs(part.before, [message.pieces for message in plan]) if said else None
            if runs is not None:
                runs.lie_in(wires)
            passes(part, source, r, changed, runs)
        return [b.clone() for part in parts for x, _, *rest in part.runs(*changed) for b in (x, *rest)]

    wanted = result(p, said=False)
    monkeypatch.setattr(cpu_threads, "_PARALLEL_NUMEL", 500)
    for threads in (1, 3):
        monkeypatch.setattr(cpu_adam, "PAST", 0 if threads > 1 else 1 << 60)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            mine = result(only, said=True)
        finally:
            torch.set_num_threads(before)
        assert all(map(torch.equal, mine, wanted))
    assert adam.runs(parts[0].before, [message.pieces for message in plan]) is None


def replicas(which, **options):
    cls, more = OPTIMIZERS[which]
    options = {"lr": 1e-2, "warmup_steps": 3, "min_numel": 100, "spiky_codec": None} | more | options
    return Replicas(lambda p, t: cls(p, transport=t, **options), 3)


def run(group, steps, between=None):
    for step in steps:
        assert group.step(noise(3, step)) == [True] * 3
        if between:
            between(group)
    state = group.optimizers[0].state
    return [t.detach().clone() for p in group.parameters[0] for t in (p, state[p]["exp_avg"])]


def unkept(monkeypatch):
    """Momentum is written and read."""
    monkeypatch.setattr(CompressedOptimizer, "keeps", False)


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_steps_that_read_the_messages_are_steps_that_read_momentum(which, monkeypatch):
    """Also where a user writes into the momentum that he sees, and where a checkpoint replaces it."""

    def disturb(group):
        for o in group.optimizers:
            if o.steps_done == 8:
                o.state[o.flat.parameters[0]]["exp_avg"].mul_(0.5)
            if o.steps_done == 10:
                o.load_state_dict(o.state_dict())

    mine = run(group := replicas(which), range(14), disturb)
    assert group.agree()
    unkept(monkeypatch)
    assert same(mine, run(replicas(which), range(14), disturb))


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_momentum_is_not_read_where_messages_say_it(which):
    """What is written behind torch's back into elements that came as signs changes nothing."""

    def wipe(group):
        for o in group.optimizers:
            if o.steps_done > 5:
                o._momenta[0].numpy().fill(1e30)

    group, other = replicas(which), replicas(which)
    mine, theirs = (run(one, range(9), between) for one, between in ((group, wipe), (other, None)))
    assert same(mine, theirs), "and whoever looks sees what is true"
    assert group.optimizers[0].kept.runs(group.optimizers[0].flat.placed(range(3)), group.optimizers[0].momentum) is not None


def test_elements_made_zero_are_read_from_momentum():
    group = replicas("adam")
    for step in range(8):
        gradients = noise(3, step)
        for mine in gradients:
            mine[0][30:] = 0.0
        group.step(gradients)
    first = group.optimizers[0]
    assert first.frozen
    assert first.quantized.dead is not None
    assert first.kept.runs(first.flat.placed(range(len(SHAPES))), first.momentum) is None
    assert not first._momenta[0][30:].any()


def test_a_skipped_step_keeps_what_was_said(monkeypatch):
    def steps():
        group = replicas("frozen")
        run(group, range(7))
        bad = noise(3, 7)
        bad[1][0][3, 3] = torch.inf
        assert group.step(bad) == [False] * 3
        return run(group, range(8, 11))

    mine = steps()
    unkept(monkeypatch)
    assert same(mine, steps())


# ---------------------------------------------------------------- 0/1 Adam, which does not even store the signs


def wanderers(**options):
    options = {"lr": 1e-2, "min_numel": 100, "weight_decay": 0.1, "sync": Fixed(3), "variance_updates": 2} | options
    return Replicas(lambda p, t: ZeroOneAdam(p, transport=t, **options), 3)


def walk(group, steps=range(20)):
    """Gradients that are missing, infinite on one rank in a local step, and in a synchronisation of everybody."""
    for step in steps:
        gradients = noise(3, step)
        gradients[1][2] = None
        if step in (13, 17):
            gradients[0][0][3, 3] = torch.inf
        group.step(gradients)
    agreed = group.agree()  # writes momentum out
    return agreed, [
        t.detach().clone() for o in group.optimizers for t in (*o.flat.parameters, o.momentum, o.accumulated, o.anchor)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {}, {"sync": "every"}, {"sync": Fixed(2)}, {"spiky_codec": None}, {"codec": "int8"}, {"max_grad_norm": 0.5},
        {"bias_correction": False},
    ],
    ids=str,
)  # fmt: skip
def test_windows_that_read_the_messages_are_windows_that_read_momentum(options, monkeypatch):
    group = wanderers(**options)
    _, mine = walk(group)
    unkept(monkeypatch)
    _, theirs = walk(wanderers(**options))
    assert same(mine, theirs)
    assert group.optimizers[0].counters.compressed_rounds > 3


@pytest.mark.parametrize("sync", ["every", Fixed(3)])
def test_signs_are_written_out_for_who_asks(sync):
    """In between they are not: what is in the buffer does not count."""
    group, other = wanderers(sync=sync), wanderers(sync=sync)
    seen = 0
    for step in range(20):
        gradients = noise(3, step)
        group.step(gradients)
        other.step(gradients)
        for o in group.optimizers:
            if o.kept.unwritten:
                seen += 1
                said = o.kept.runs(o.flat.placed(range(len(SHAPES))), o.momentum)
                layer = int(said.owners[said.lines[:, 10] != 0][0])  # one whose address in a wire is known
                o._momenta[layer].numpy().fill(1e30)
        for o in other.optimizers:
            o.state_dict()
        assert same(*([*g.parameters[0]] for g in (group, other)))
    assert seen > 5
    for mine, theirs in zip(group.optimizers, other.optimizers, strict=True):
        state, written = mine.state_dict(), theirs.state_dict()
        for i in state["state"]:
            assert same(*(list(s["state"][i].values()) for s in (state, written)))


@pytest.mark.parametrize("which", ["adam", "live", "frozen", "zero-one"])
def test_who_writes_into_momentum_is_heard_or_told(which, monkeypatch):
    """Heard if it was looked up since the last step; told if it was kept from before, when it was something else."""

    def walked(write):
        group = wanderers(sync="every") if which == "zero-one" else replicas(which)
        for step in range(12):
            group.step(noise(3, step))
            for o in group.optimizers:
                write(o)
        return group, run(group, [])

    def halve(o):
        o.state[o.flat.parameters[0]]["exp_avg"].mul_(0.5)

    _, mine = walked(halve)
    group, untouched = walked(lambda o: None)
    assert not same(mine, untouched)
    with monkeypatch.context() as patch:
        unkept(patch)
        assert same(mine, walked(halve)[1])
    group.step(noise(3, 12))
    first = group.optimizers[0]
    assert first.kept.unwritten
    first._momenta[0].mul_(0.5)
    with pytest.raises(InvalidArgument, match=r"exp_avg was written to .* take it from the optimizer's state anew"):
        group.step(noise(3, 13))


def test_a_state_settles_before_anybody_looks_and_outlives_its_optimizer():
    p = torch.ones(3)
    settled = []
    watched = PlainState(dict)
    watched[p]["exp_avg"] = torch.ones(1)

    class Owner:
        def settle(self):
            settled.append(1)

    owner = Owner()
    watched.before_looking(owner.settle)
    for look in (lambda: watched[p], lambda: watched.get(p), watched.values, watched.items):
        settled.clear()
        assert look() is not None
        assert settled
    assert watched.get(torch.ones(1)) is None
    del owner
    for state in (watched, copy.copy(watched), pickle.loads(pickle.dumps(watched))):
        assert [one["exp_avg"] for one in state.values()] == [1]
