"""The mean read from the messages that brought it: the same bits as from momentum, and only as long as nobody changes that."""

import pytest
import torch

from commpress.codecs.policy import policy_of
from commpress.collectives.buckets import Span, messages
from commpress.kernels import adam, cpu, cpu_adam, cpu_threads
from commpress.optim import OneBitAdam, OneBitLamb
from commpress.optim.flat import Flat
from commpress.optim.kept_mean import KeptMean
from optim_twin import SHAPES, Replicas, noise, start
from test_land import CODECS
from test_land import SHAPES as MANY

OPTIMIZERS = {
    "adam": (OneBitAdam, {}), "live": (OneBitLamb, {}), "frozen": (OneBitLamb, {"rates": "frozen"}),
}  # fmt: skip


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [1, 3])
def test_aim_reads_the_messages_as_it_reads_momentum(compiled, monkeypatch, codec, size):
    flat = Flat([torch.nn.Parameter(p) for p in start(MANY)], [str(i) for i in range(len(MANY))])
    p, r, out, wanted = (flat.new() for _ in range(4))
    p.copy_(torch.randn(flat.numel))
    r.copy_(torch.rand(flat.numel))
    for parameter, g in zip(flat.parameters, start(MANY, 9), strict=True):
        parameter.grad = g
    flat.parameters[3].grad = None
    spans = [Span(name, *place) for name, place in zip(flat.names, flat.places, strict=True)]
    plan = messages(spans, policy_of(codec, min_numel=100), size, message=5000, piece=1500)
    wires = [torch.zeros(size, message.pieces.row_bytes, dtype=torch.uint8) for message in plan]
    for message, rows in zip(plan, wires, strict=True):
        cpu.encode(p, rows, torch.zeros(1, dtype=torch.uint8), message.pieces, key=5)
        cpu.decode(rows, p, message.pieces)
    parts = [flat.segments(range(3)), flat.segments((5, 3, 2)), flat.segments((7,))]
    for part in parts:
        cpu_adam.aim(part, p, r, wanted, beta=0.9, gain=0.5)
    monkeypatch.setattr(cpu_threads, "_PARALLEL_NUMEL", 500)
    for threads in (1, 3):
        monkeypatch.setattr(cpu_adam, "PAST", 0 if threads > 1 else 1 << 60)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out.fill_(7.0)
            for part in parts:
                said = cpu_adam.runs(part.before, [message.pieces for message in plan])
                said.lie_in(wires)
                cpu_adam.aim(part, p, r, out, beta=0.9, gain=0.5, said=said)
        finally:
            torch.set_num_threads(before)
        for part in parts:
            for _, _, mine, theirs in part.runs(out, wanted):
                assert torch.equal(mine, theirs)
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
    return [*(p.detach().clone() for p in group.parameters[0]), group.optimizers[0].momentum.clone()]


def unkept(monkeypatch):
    monkeypatch.setattr(KeptMean, "runs", lambda self, layers, momentum: None)


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
    assert same(run(group, range(9), wipe)[:3], run(other, range(9))[:3])
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
