"""Choices of codecs over time: trials, plans, a codec for every layer; all ranks choose alike, and
nothing owed is lost when compression ends."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress import choice
from commpress.alarm import Peers
from commpress.choice import (
    EVERY,
    LATE,
    LOW_RANK,
    METHODS,
    UNTIMED,
    Auto,
    Now,
    Ruled,
    Seen,
    methods_of,
    steps_of_trial,
)
from commpress.codecs import codec_named, policy_of
from commpress.codecs.planned import Planned, load_plan
from commpress.collectives.buckets import Span
from commpress.collectives.channel import Channel
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import InvalidArgument
from commpress.work import run

# ---------------------------------------------------------------- the trial alone


class Run:
    """A trial on a clock of its own, by one rank that owes ``late`` gradients."""

    def __init__(self, codec, seconds, late=0.0):
        self.now, self.seconds, self.late, self.step = 0.0, seconds, late, 0
        widens = ":" not in codec and any(LOW_RANK in key for key in seconds)
        self.auto = Auto(methods_of(codec), policy_of, widens=widens, clock=lambda: self.now)
        self.peers = Peers(Channel(Loopback(1).transport(0)), self.owed)
        self.turns, self.looks = [], []

    def owed(self, name, out):
        out += self.late

    def take(self, steps):
        for _ in range(steps):
            run(self.auto.at(self.step, self.peers))
            method = self.auto.method or self.auto.turn(self.auto._step - 1)
            self.turns.append(method)
            if self.auto.looks(self.step):
                self.looks.append((self.step, method))
                self.auto.observe(self.step, Seen([Span("p", 0, 4)], torch.ones(4), None, []))
            slow = 5.0 if self.step % 7 == 0 else 0.0  # a slow step now and then changes nothing
            self.now, self.step = self.now + self.seconds[method] + slow, self.step + 1
        return self


def chosen(codec, seconds, late=0.0):
    run = Run(codec, seconds, late)
    return run.take(steps_of_trial(METHODS) + 40)


def test_every_method_has_its_turns_and_the_fastest_stays():
    every = (*METHODS, "sign")
    run = chosen("auto+sign", {"plain": 1.0, "fp8": 0.5, "int4": 0.3, "sign": 0.2})
    trial = run.turns[UNTIMED : steps_of_trial(every)]
    assert {method: trial.count(method) for method in every} == dict.fromkeys(every, 12)
    assert run.auto.method == "sign"
    assert "plain 1000 ms" in run.auto.why
    assert "sign 200 ms" in run.auto.why


@pytest.mark.parametrize(
    ("seconds", "method"),
    [
        ({"plain": 1.0, "fp8": 0.98, "int4": 1.2}, "plain"),  # not worth its errors
        ({"plain": 1.0, "fp8": 0.5, "int4": 0.49}, "fp8"),  # as good as the others, and finer
        ({"plain": 1.0, "fp8": 1.1, "int4": 1.1}, "plain"),
    ],
)
def test_a_coarser_method_must_be_worth_it(seconds, method):
    assert chosen("auto", seconds).auto.method == method


def test_what_to_try_can_be_said():
    assert methods_of("auto:fp8, sign") == ("plain", "fp8", "sign")
    assert methods_of("sign") == methods_of(3) == methods_of("automatic") == ()
    assert methods_of("auto") == ("plain", "fp8", "int4"), "nothing that may change a loss"
    assert methods_of("auto+sign,fp8,topk-4") == ("plain", "fp8", "int4", "sign", "topk-4")
    with pytest.raises(InvalidArgument, match="sine"):
        methods_of("auto:sine")


SECONDS = {"plain": 1.0, "fp8": 0.5, "int4": 0.4, LOW_RANK: 0.2, "sign": 0.3}


def test_low_rank_enters_where_it_sends_gradients_in_time_and_leaves_when_it_falls_behind():
    run = chosen("auto+sign", SECONDS, late=0.5)
    assert run.auto.methods == ("plain", "fp8", "int4", LOW_RANK, "sign")
    assert [method for _, method in run.looks] == [LOW_RANK], "once, at the end of its last turn"
    assert (run.auto.method, run.auto.instead) == (LOW_RANK, "sign")
    assert "powersgd-8+fp8 keeps back 0.5 gradients (at most 2)" in run.auto.why
    for late in (0.5, LATE + 1, 0.1, LATE + 1):  # one late look is none
        run.late = late
        run.take(EVERY)
        assert run.auto.method == LOW_RANK
    run.take(EVERY)
    assert run.auto.method == "sign"
    assert all(step % EVERY == EVERY - 1 for step, _ in run.looks[1:])
    assert run.auto.why == "sign, because powersgd-8+fp8 kept back 3 gradients"


def test_low_rank_stays_out_where_it_does_not_or_is_asked_for():
    run = chosen("auto+sign", SECONDS, late=LATE + 0.1)
    assert (run.auto.method, run.auto.instead) == ("sign", "")
    assert "powersgd-8+fp8 keeps back 2.1 gradients" in run.auto.why
    for codec in ("auto:powersgd-8+fp8", "auto+powersgd-8+fp8", "auto:fp8"):
        run = chosen(codec, SECONDS, late=LATE + 1)
        assert run.auto.judged == ()
        assert run.looks == []


def late_of(codec, steps):
    """Lateness as it is measured, and from the definition: what all gradients were together, less
    what was sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(96, 80, bias=False))
    state = commpress.compress(ddp, codec, topology=None)
    auto = Auto((codec,), policy_of, numel=96 * 80)
    now = Now(state.choice.usual)
    state.choice.at = lambda step, *_, **__: at_once(now._replace(looks=step == steps - 1))
    state.choice.observe = auto.observe
    draws, owed = torch.Generator().manual_seed(rank), torch.zeros(80, 96)
    for _ in range(steps):
        x = torch.randn(8, 96, generator=draws)
        own = torch.autograd.grad(_loss(ddp.module, x), ddp.module.weight)[0]
        dist.all_reduce(own)
        ddp.zero_grad()
        _loss(ddp, x).backward()
        owed += own / size - ddp.module.weight.grad
    peers = Peers(state.channel, lambda name, out: state.residuals.add_to(name, out, rank, size))
    measured = run(auto._late(peers))
    return measured, float(owed.norm() / (own / size).norm())


def at_once(now):
    """An algorithm that does not wait."""
    yield from ()
    return now


def _loss(model, x):
    return (model(x) - x[:, :80].roll(1, 0)).square().mean()


@pytest.mark.parametrize(("codec", "size"), [("powersgd-1", 3), ("int4", 2), ("sign", 3)])
def test_lateness_is_what_all_ranks_have_not_sent(pool, codec, size):
    for measured, defined in pool.run(late_of, codec, 6, size=size):
        assert measured == pytest.approx(defined, rel=2e-3)


# ---------------------------------------------------------------- plans as files


def test_a_plan_comes_back_as_it_was(tmp_path):
    plan = Planned("int4", {"head.weight": "bits6"}, topology="2x2", why="because")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.choose("head.weight", 1000).spec.startswith("bits/6")
    assert plan.choose("body", 1000).spec == "int4/256"
    assert plan.choose("body", 100).lossless


PLAN = b'{"format": "commpress plan", "version": 1, '


@pytest.mark.parametrize(
    "content",
    [
        b"no json",
        b"[]",
        b'{"format": "commpress plan", "version": 2, "codec": "int8"}',
        b"[" * 100_000,
        b'{"format": "commpress plan", "version": 1}',
        PLAN + b'"codec": "sine"}',
        PLAN + b'"codec": "int8", "rules": {"a": 1}}',
        PLAN + b'"codec": "int8", "min_numel": true}',
        PLAN + b'"codec": "int8", "exec": "rm"}',
        PLAN + b'"codec": "plain", "rules": {"a": "int8"}}',
        b" " * (1 << 22) + b"{}",
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, content):
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(InvalidArgument):
        load_plan(file)
    with pytest.raises(InvalidArgument, match="commpress plan"):
        load_plan(tmp_path / "missing.json")


# ---------------------------------------------------------------- behind the hook


def train(codec, steps, decides=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    ddp = DistributedDataParallel(model)
    state = commpress.compress(ddp, codec, **options)
    if decides is not None:
        state.choice.decide = lambda seconds: decides(state.choice)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64, generator=draws)).square().mean().backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    every = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    assert all(torch.equal(w, weights) for w in every)
    return state


def tried_behind_the_hook():
    state = train("auto:int8,sign", steps_of_trial(("plain", "int8", "sign")) + 4)
    return state.counters.choice, state.counters.summary(), state.counters.steps


def test_all_ranks_choose_alike_and_stay_equal(pool):
    first, second = pool.run(tried_behind_the_hook, size=2)
    assert first[0] == second[0]
    assert first[0].split(",")[0] in ("plain", "int8", "sign")
    assert "chosen: " in first[1]
    assert first[2] == steps_of_trial(("plain", "int8", "sign")) + 4


def low_rank_for_fp8(auto):
    auto.instead = "fp8"
    return LOW_RANK, "told"


def fallen_behind(late):
    usual = choice.LATE, choice.EVERY
    choice.LATE, choice.EVERY = late, 5
    try:
        steps = steps_of_trial((*METHODS, LOW_RANK)) + 25
        state = train("auto", steps, topology=None, decides=low_rank_for_fp8)
    finally:
        choice.LATE, choice.EVERY = usual
    return state.choice.method, state.counters.choice


def test_another_codec_takes_the_place_of_one_that_falls_behind(pool):
    for method, why in pool.run(fallen_behind, 1e-6, size=2):
        assert method == "fp8"
        assert why.startswith("fp8, because powersgd-8+fp8 kept back")
    for found in pool.run(fallen_behind, 100.0, size=2):
        assert found == (LOW_RANK, "told")


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1003))

    def forward(self, x):
        return (self.weight * x).sum()


def paid(topology, exact_steps):
    """Gradients of a linear loss are known, so the sum of all outputs tells what was lost."""
    x = torch.randn(1003, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp = DistributedDataParallel(Linear(), gradient_as_bucket_view=True)
    state = commpress.compress(ddp, "auto:sign,int8", topology=topology, exact_steps=exact_steps)
    state.choice.decide = lambda seconds: ("plain", "told to")
    total, steps = torch.zeros(1003, dtype=torch.float64), exact_steps + state.choice.steps + 3
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x).backward()
        total += ddp.module.weight.grad.double()
    mean = x.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    lost = float((total - steps * mean.double()).norm() / (steps * mean.norm()))
    exact = torch.allclose(ddp.module.weight.grad, mean, rtol=1e-5, atol=1e-6)
    return lost, state.counters.plain_steps, exact


@pytest.mark.parametrize(
    ("size", "topology", "exact_steps"), [(2, None, 0), (3, "2,1", 2), (4, "2x2", 0)]
)
def test_nothing_is_lost_when_a_trial_ends_without_compression(pool, size, topology, exact_steps):
    for lost, plain_steps, exact in pool.run(paid, topology, exact_steps, size=size):
        assert lost < 1e-6
        assert exact
        assert plain_steps == UNTIMED + 12 + 3


def planned(path):
    state = train("sign", 3, plan=path)
    return state.counters.compressed_elements, state.counters.plain_steps, state.counters.choice


def test_the_hook_follows_a_plan(pool, tmp_path):
    Planned("int8", {"module.0.weight": "none", "0.weight": "none"}, why="tested").save(
        tmp_path / "some.json"
    )
    Planned("plain", why="too fast a link").save(tmp_path / "none.json")
    for found in pool.run(planned, tmp_path / "some.json", size=2):
        assert found == (3 * 64 * 64, 0, "the plan's: tested")
    for found in pool.run(planned, tmp_path / "none.json", size=2):
        assert found == (0, 0, "the plan's: too fast a link"), "DDP has no hook"


# ---------------------------------------------------------------- a codec for every layer

QUIET, LOUD = "0.weight", "1.weight"


class Layers:
    """Two layers; gradients of one are a thousand times larger than those of the other."""

    def __init__(self, every, uniform="int4", **options):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.ddp = DistributedDataParallel(self.model)
        self.state = commpress.compress(self.ddp, commpress.PerLayer(uniform, every), **options)
        self.draws = torch.Generator().manual_seed(dist.get_rank())

    def steps(self, count, loud=LOUD, bad=-1):
        for i in range(count):
            self.model.zero_grad()
            x = torch.randn(8, 64, generator=self.draws)
            loss = self.ddp(x).square().mean()
            handle = dict(self.model.named_parameters())[loud].register_hook(lambda g: 1000 * g)
            (loss * (float("nan") if i == bad else 1.0)).backward()
            handle.remove()

    def rules(self):
        return self.state.choice.state()["rules"]


def replanned(topology):
    session, seen = Layers(3, topology=topology), []
    assert session.rules() == {}
    for count, loud in ((1, LOUD), (1, LOUD), (2, QUIET), (1, QUIET)):
        session.steps(count, loud)
        seen.append(session.rules())
    policy = session.state.policy
    rows = [policy.choose(name, 4096).row_bytes(4096) for name in (QUIET, LOUD)]
    return seen, session.state.counters.choice, rows


@pytest.mark.parametrize(("size", "topology"), [(2, None), (4, "2x2")])
def test_codecs_follow_the_gradients(pool, size, topology):
    results = pool.run(replanned, topology, size=size)
    assert all(result == results[0] for result in results)
    (first, second, third, fourth), why, (quiet, loud) = results[0]
    assert first == {}, "decided between two steps"
    assert set(second) == {QUIET, LOUD}, "biases are exact"
    assert third == second
    assert fourth != second
    assert quiet > loud, "the layer that is called quiet has become the loud one"
    assert why.startswith("of step 3: ")


def unchanged_by_nan():
    session = Layers(2)
    session.steps(2)
    before = session.rules()
    session.steps(2, QUIET, bad=0)  # step 2 is due
    return before, session.rules()


def test_gradients_that_are_not_finite_change_nothing(pool):
    for before, after in pool.run(unchanged_by_nan, size=2):
        assert before
        assert after == before


def ranks_chosen(topology):
    """Return the rules after each step with the bytes that it sent, and the reason."""
    session, seen = Layers(2, "powersgd-4+fp8", topology=topology), []
    for loud in (LOUD, LOUD, LOUD, QUIET, QUIET):  # looks at the second and the fourth
        before = session.state.channel.sent_bytes
        session.steps(1, loud)
        seen.append((session.rules(), session.state.channel.sent_bytes - before))
    return seen, session.state.counters.choice


@pytest.mark.parametrize(("size", "topology"), [(2, None), (4, "2x2")])
def test_ranks_follow_the_gradients_in_the_same_bytes(pool, size, topology):
    results = pool.run(ranks_chosen, topology, size=size)
    rules = [[step[0] for step in seen] for seen, _ in results]
    assert all(each == rules[0] for each in rules)
    *first, third, fourth, fifth = rules[0]
    assert first == [{}, {}]
    assert set(third) == {QUIET, LOUD}, "biases stay in rows"
    assert third == fourth != fifth
    rank = {name: codec_named(codec).rank for name, codec in third.items()}
    assert rank[LOUD] > 4 > rank[QUIET]
    assert rank[LOUD] + rank[QUIET] <= 8, "matrices of one shape: the bytes of rank 4 for both"
    assert codec_named(fifth[QUIET]).rank > codec_named(fifth[LOUD]).rank
    for seen, why in results:
        assert seen[3][1] <= seen[0][1], "no more bytes than before"
        assert 0 < seen[2][1] - seen[3][1] < 1000, "and those of the choice itself"
        assert re.fullmatch(r"of step 3: 0\.\d\d of the error of powersgd-4\+fp8 .*", why)


def owed_by_ranks(topology):
    """Means of a layer's gradients, what was sent of them, and what is left, as ranks change."""
    session, size = Layers(2, "powersgd-2", topology=topology), dist.get_world_size()
    weight, draws, seen = session.model[1].weight, torch.Generator(), set()
    owed, sent = torch.zeros_like(weight), torch.zeros_like(weight)
    for i in range(8):
        loud = LOUD if i % 4 < 2 else QUIET
        draws.set_state(session.draws.get_state())
        loss = session.model(torch.randn(8, 64, generator=draws)).square().mean()
        owed += torch.autograd.grad(loss, weight)[0] * (1000 if loud == LOUD else 1) / size
        session.steps(1, loud)
        sent += weight.grad
        seen.add(session.rules().get(LOUD))
    left = torch.zeros(weight.numel())
    session.state.residuals.add_to(LOUD, left, dist.get_rank(), size)
    return owed, sent, left.view_as(weight) / size, seen


@pytest.mark.parametrize(("size", "topology"), [(2, None), (4, "2x2")])
def test_nothing_is_lost_as_ranks_change(pool, size, topology):
    owed, sent, left, seen = zip(*pool.run(owed_by_ranks, topology, size=size), strict=True)
    assert len(seen[0]) > 2, "ranks have changed"
    assert all(torch.equal(each, sent[0]) for each in sent)
    assert sum(left).norm() > 0.05 * sent[0].norm(), "little was left behind"
    assert (sent[0] + sum(left) - sum(owed)).abs().max() < 2e-6 * sum(owed).abs().max()


def resumed(uniform, warm, topology, done):
    session = Layers(2, uniform, topology=topology)
    session.steps(done)
    assert session.rules()
    again = Layers(2, uniform, topology=topology)
    again.steps(warm, QUIET)  # then its own ranks and bases give way
    again.state.load_state_dict(session.state.state_dict())
    again.draws.set_state(session.draws.get_state())
    for one in (session, again):
        one.steps(2)
    same = again.rules() == session.rules() != {} and isinstance(again.state.policy, Ruled)
    return same and all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(session.model.parameters(), again.model.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("uniform", "warm", "size", "topology", "done"),
    [
        ("int4", 0, 2, None, 3),  # after a look, before the choice
        ("powersgd-3", 0, 2, None, 3),
        ("powersgd-3", 3, 2, None, 4),  # the same
        ("powersgd-3", 0, 4, "2x2", 4),
    ],
)
def test_a_resumed_run_goes_on_with_the_same_codecs(pool, uniform, warm, size, topology, done):
    assert all(pool.run(resumed, uniform, warm, topology, done, size=size))


def under_an_alarm():
    """Codecs that the layers had while it lasted and after it."""
    session = Layers(3, alarm=commpress.Alarm("int8", every=4, pause=1))
    session.steps(5)
    rules, alarm = session.rules(), session.state.alarm
    alarm.judge(4, {})  # as if it had sounded
    alarm.active, alarm._until = "int8", alarm._looks + 1
    session.steps(1)
    during = session.state.policy.choose(QUIET, 4096).spec
    session.steps(4)
    return rules, during, session.state.policy, session.rules()


def test_an_alarm_brings_its_codec_and_those_of_the_layers_come_back(pool):
    for rules, during, after, now in pool.run(under_an_alarm, size=2):
        assert rules
        assert during.startswith("int8")
        assert isinstance(after, Ruled)
        assert after.rules == now != {}


@pytest.mark.parametrize("given", [("auto", 5), ("int4", -1), ("int4", 0), ("powersgd-0", 2)])
def test_what_cannot_be_planned_is_refused(given):
    with pytest.raises(InvalidArgument):
        commpress.PerLayer(*given)
