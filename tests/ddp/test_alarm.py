"""The alarm: quiet runs stay quiet, harm is seen by all ranks alike, and no part of a gradient is
lost when codecs change."""

import math
import random

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress import Alarm
from commpress.errors import InvalidArgument
from variants import few, first


def sees(alarm, figures, first=0):
    """The looks of ``figures`` that sound it."""
    found = []
    for look, seen in enumerate(figures, first):
        before = alarm.sounded
        alarm.judge(look, seen)
        if alarm.sounded > before:
            found.append(look)
    return found


def test_noise_and_a_loss_that_falls_are_no_harm():
    draw = random.Random(0)
    losses = [2 + 8 * math.exp(-k / 9) + draw.gauss(0, 0.05) for k in range(300)]
    figures = [
        {"residual": draw.uniform(0.8, 1.6), "cosine": draw.uniform(0.4, 0.7), "loss": loss}
        for loss in losses
    ]
    assert sees(Alarm(), figures) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        ({"residual": 3.1, "cosine": 0.5, "loss": 3.0}, "residuals are 3.1 times as large"),
        (
            {"residual": 1.0, "cosine": 0.24, "loss": 3.0},
            "the cosine of sent and true gradient is 0.24",
        ),
        (
            {"residual": 1.0, "cosine": 0.5, "loss": 3.4},
            "the loss is 3.4, by its trend 3 give or take 0.03",
        ),
    ],
)
def test_each_sign_sounds_it_alone_and_not_before_enough_is_known(harm, words):
    usual = {"residual": 1.0, "cosine": 0.5, "loss": 3.0}
    assert sees(Alarm(), [usual] * 2 + [harm]) == []
    alarm = Alarm()
    assert sees(alarm, [usual] * 8 + [harm, usual, harm]) == [8, 10]
    assert words in alarm.why
    assert alarm.why.startswith("step 10: ")
    assert alarm.way == ""


def test_a_pause_lasts_and_doubles_and_calm_makes_it_short_again(caplog):
    usual, harm, alarm = {"residual": 1.0}, {"residual": 9.0}, Alarm("int8", pause=2)
    assert sees(alarm, [usual] * 3 + [harm]) == [3]
    ways = []
    for look in range(4, 13):
        ways.append(alarm.way)
        alarm.judge(look, harm)
    assert ways == ["int8", "int8", "", "int8", "int8", "int8", "int8", "", "int8"]
    assert alarm.sounded == 3
    while alarm.way:
        alarm.judge(20, usual)
    assert sees(alarm, [usual] * 8 + [harm], first=30) == [38]
    assert alarm._until - alarm._looks == 2
    assert "goes on with int8" in caplog.text


def test_its_state_goes_on_where_it_was():
    figures = [{"residual": 1.0, "loss": 3.0}] * 5 + [{"residual": 5.0}] + [{"loss": 2.0}] * 9
    figures.append({"residual": 4.0, "loss": 9.0})
    whole, first, second = Alarm("none"), Alarm("none"), Alarm("none")
    seen = sees(whole, figures)
    before = sees(first, figures[:9])
    second.load_state_dict(first.state_dict())
    assert before + sees(second, figures[9:], first=9) == seen == [5, 15]
    assert second.state_dict() == whole.state_dict()


# ---------------------------------------------------------------- under DDP


class Session:
    """Regression by two layers; gradients are a thousandth as large from step ``small`` on: what is
    owed then is huge."""

    def __init__(self, codec="sign", alarm=None, **options):
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        )
        self.state = commpress.compress(self.ddp, codec, alarm=alarm, measure_every=0, **options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.05)
        self.outputs, self.means = self.zeros(), self.zeros()
        self.ways = []

    def zeros(self):
        return [torch.zeros_like(p, dtype=torch.float64) for p in self.ddp.parameters()]

    def gradient(self, step, small):
        draw = torch.Generator().manual_seed(step * 7 + dist.get_rank())
        x, y = torch.randn(16, 64, generator=draw), torch.randn(16, 64, generator=draw)
        return (x, y), 1e-3 if step >= small else 1.0

    def steps(self, count, small=10**9):
        for step in range(self.state.step, self.state.step + count):
            (x, y), scale = self.gradient(step, small)
            true = torch.autograd.grad(
                (self.ddp.module(x) - y).square().mean() * scale, list(self.ddp.module.parameters())
            )
            for total, mine in zip(self.means, true, strict=True):
                dist.all_reduce(mine)
                total += mine.double() / dist.get_world_size()
            self.optimizer.zero_grad()
            loss = (self.ddp(x) - y).square().mean() * scale
            loss.backward()
            if self.state.alarm is not None:
                self.state.alarm.tell(loss / scale)
            for total, p in zip(self.outputs, self.ddp.parameters(), strict=True):
                total += p.grad
            self.optimizer.step()
            self.ways.append(getattr(self.state.alarm, "way", ""))

    def owed(self):
        """Of every parameter, all that is owed."""
        found = []
        for name, p in self.ddp.module.named_parameters():
            mine = torch.zeros(p.numel())
            self.state.residuals.owed(name, mine, dist.get_rank(), dist.get_world_size())
            dist.all_reduce(mine)
            found.append(mine.double().view_as(p) / dist.get_world_size())
        return found

    def lost(self):
        """The most by which outputs and what is owed differ from the true means, relative to
        these."""
        worst = 0.0
        for out, owed, mean in zip(self.outputs, self.owed(), self.means, strict=True):
            worst = max(worst, float((out + owed - mean).norm() / mean.norm()))
        return worst


def quiet(codec):
    session = Session(codec, alarm=Alarm("warn", every=5))
    session.steps(100)
    return session.state.alarm.sounded, session.lost()


@pytest.mark.parametrize("codec", first(2, ["sign", "powersgd-2", "int4", "topk-8"]))
def test_a_run_that_goes_well_is_not_disturbed(pool, codec):
    for sounded, lost in pool.run(quiet, codec, size=2):
        assert sounded == 0
        assert lost < 1e-5


def harmed(then, options):
    session = Session(alarm=Alarm(then, every=4, pause=2), **options)
    session.steps(44, small=21)
    alarm, counters = session.state.alarm, session.state.counters
    weights = [p.detach().clone() for p in session.ddp.parameters()]
    return (
        session.ways,
        alarm.sounded,
        alarm.why,
        counters.plain_steps,
        session.lost(),
        weights,
        counters.ratio,
    )


@pytest.mark.parametrize(("then", "size"), few(["warn", "int8", "none"], [2, 3]))
def test_residuals_that_have_grown_sound_it_on_all_ranks_alike(pool, then, size):
    results = pool.run(harmed, then, {}, size=size)
    ways, sounded, why, plain, lost, weights, _ = results[0]
    assert all(other[:4] == results[0][:4] for other in results)
    assert all(
        torch.equal(a, b) for other in results for a, b in zip(weights, other[5], strict=True)
    )
    assert sounded >= 1
    assert "times as large as the gradient" in why
    assert lost < 1e-4, "what one codec left out, another sends"
    name = "" if then == "warn" else then
    assert ways[:24] == [""] * 24, "step 23 is looked at when the next one begins"
    assert ways[24:32] == [name] * 8, "two looks"
    assert plain == (ways.count("none") if then == "none" else 0)


def test_what_is_owed_goes_with_the_first_step_without_compression(pool):
    for owed in pool.run(_owed_in_a_pause, size=2):
        assert owed == 0.0


def _owed_in_a_pause():
    session = Session(alarm=Alarm("none", every=4, pause=2))
    session.steps(25, small=21)
    assert session.state.alarm.way == "none"
    return sum(float(each.abs().sum()) for each in session.owed())


def resumed(then):
    def begun():
        return Session(alarm=Alarm(then, every=4, pause=2))

    whole, first, again = begun(), begun(), begun()
    whole.steps(44, small=21)
    first.steps(27, small=21)
    again.ddp.module.load_state_dict(first.ddp.module.state_dict())
    again.state.load_state_dict(first.state.state_dict())
    again.steps(17, small=21)
    same = all(
        torch.equal(a, b)
        for a, b in zip(whole.ddp.parameters(), again.ddp.parameters(), strict=True)
    )
    return (
        same,
        again.ways == whole.ways[27:],
        again.state.alarm.state_dict() == whole.state.alarm.state_dict(),
    )


@pytest.mark.parametrize("then", ["int8", "none"])
def test_a_run_resumed_while_it_lasts_goes_on_alike(pool, then):
    assert pool.run(resumed, then, size=2) == [(True, True, True)] * 2


def policies_of_a_resumed_run():
    first, again = (Session("int4", alarm=Alarm("warn", every=4), replan_every=5) for _ in range(2))
    begun = type(again.state.policy)
    first.steps(12)
    again.state.load_state_dict(first.state.state_dict())
    return begun, type(first.state.policy), type(again.state.policy)


def test_a_resumed_run_that_only_warns_keeps_the_codecs_of_its_layers(pool):
    for begun, chosen, resumed in pool.run(policies_of_a_resumed_run, size=2):
        assert chosen is not begun, "a codec for every layer"
        assert resumed is chosen


def test_metrics_count_it(pool):
    assert pool.run(_counted, size=2) == [1] * 2


def _counted():
    session = Session(alarm=Alarm("int8", every=4))
    metrics = commpress.Metrics(session.state)
    total = 0
    for _ in range(30):
        session.steps(1, small=21)
        total += metrics.step().alarms
    return total


REFUSED = [
    ({"codec": "auto", "alarm": "warn"}, "alarm is given with codec='auto' or a topology"),
    (
        {"codec": "int4", "topology": "1x2", "alarm": "warn"},
        "alarm is given with codec='auto' or a topology",
    ),
    ({"codec": "none", "alarm": "warn"}, "there is no compression to look at"),
    ({"codec": "int4", "replan_every": 5, "alarm": "int8"}, "with replan_every"),
    ({"codec": "int4", "alarm": "loud"}, "loud"),
    ({"codec": "int4", "alarm": 3}, "alarm is 3, expected 'warn'"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
@pytest.mark.parametrize("size", [1, 2])
def test_what_it_cannot_watch_is_refused(pool, options, words, size):
    with pytest.raises(InvalidArgument, match=words):
        pool.run(_refused, options, size=size)


def _refused(options):
    commpress.compress(DistributedDataParallel(torch.nn.Linear(64, 64)), **options)


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"pause": 0}, {"growth": 0.0}, {"cosine": float("nan")}, {"then": "loud"}],
)
def test_bounds_that_make_no_sense_are_refused(options):
    with pytest.raises(InvalidArgument):
        Alarm(**options)
