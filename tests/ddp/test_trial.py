"""codec='auto', plans behind the hook, and that nothing owed is lost when compression ends."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs.planned import Planned, load_plan
from commpress.errors import InvalidArgument
from commpress.integrations.ddp import lateness
from commpress.integrations.ddp.lateness import EVERY, LATE, Lateness, Probation
from commpress.integrations.ddp.trial import LOW_RANK, UNTIMED, WAYS, Trial, trial_of, with_low_rank

# ---------------------------------------------------------------- the trial alone


def tried(trial, seconds_of):
    """Run a trial on a clock of its own; the decision."""
    now, ways = 0.0, []
    while (way := trial.begin(now)) is not None:
        ways.append(way)
        now += seconds_of[way]
    return ways, trial.decide(trial.seconds())


def test_every_way_has_its_turns_and_the_fastest_stays():
    every = (*WAYS, "sign")
    ways, (chosen, why) = tried(
        trial_of("auto", "sign"), {"plain": 1.0, "int8": 0.5, "int4": 0.3, "sign": 0.2}
    )
    assert {way: ways[UNTIMED:].count(way) for way in every} == dict.fromkeys(every, 12)
    assert chosen == "sign"
    assert "plain 1000 ms" in why
    assert "sign 200 ms" in why


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"plain": 1.0, "int8": 0.98, "int4": 1.2}, "plain"),  # not worth its errors
        ({"plain": 1.0, "int8": 0.5, "int4": 0.49}, "int8"),  # as good as the others, and finer
        ({"plain": 1.0, "int8": 1.1, "int4": 1.1}, "plain"),
    ],
)
def test_a_coarser_way_must_be_worth_it(seconds, chosen):
    assert tried(Trial(), seconds)[1][0] == chosen


def test_a_slow_step_now_and_then_changes_nothing():
    trial, now = Trial(), 0.0
    while (way := trial.begin(now)) is not None:
        now += {"plain": 1.0}.get(way, 0.8) + (5.0 if trial._step % 7 == 0 else 0.0)
    assert trial.decide(trial.seconds())[0] == "int8"


def test_what_to_try_can_be_said():
    assert trial_of("auto:int8, sign").ways == ("plain", "int8", "sign")
    assert trial_of("sign") is None
    assert trial_of("auto").ways == ("plain", "int8", "int4"), "nothing that may change a loss"
    assert trial_of("auto", allow=("sign", "int8", "powersgd-4")).ways == (
        "plain",
        "int8",
        "int4",
        "sign",
        "powersgd-4",
    )
    with pytest.raises(InvalidArgument, match="leave allow out"):
        trial_of("auto:int8", allow="sign")
    with pytest.raises(InvalidArgument, match="it is for codec='auto'"):
        trial_of("int8", allow="sign")
    with pytest.raises(InvalidArgument, match="sine"):
        trial_of("auto:sine")


# ---------------------------------------------------------------- low rank, which nobody asked for


def judged(late, seconds):
    trial, now = with_low_rank(trial_of("auto", "sign"), "auto"), 0.0
    looks = []
    while True:
        if trial.looks:
            looks.append(trial.way(trial._step - 1))
            trial.see(late)
        if (way := trial.begin(now)) is None:
            return trial, looks, trial.decide(trial.seconds())
        now += seconds[way]


SECONDS = {"plain": 1.0, "int8": 0.5, "int4": 0.4, LOW_RANK: 0.2, "sign": 0.3}


def test_low_rank_enters_where_it_sends_gradients_in_time():
    trial, looks, (chosen, why) = judged(0.5, SECONDS)
    assert trial.ways == ("plain", "int8", "int4", LOW_RANK, "sign")
    assert looks == [LOW_RANK], "once, at the end of its last turn"
    assert (chosen, trial.instead) == (LOW_RANK, "sign")
    assert "powersgd-4 keeps back 0.5 gradients (at most 2)" in why


def test_low_rank_stays_out_where_it_does_not():
    trial, _, (chosen, why) = judged(LATE + 0.1, SECONDS)
    assert (chosen, trial.instead) == ("sign", "")
    assert "powersgd-4 keeps back 2.1 gradients" in why


def test_nobody_judges_what_was_asked_for():
    for codec, allow in (("auto:powersgd-4", None), ("auto", "powersgd-4"), ("auto:int8", None)):
        trial = with_low_rank(trial_of(codec, allow), codec)
        assert trial.judged == ()
        assert (LOW_RANK in trial.ways) == (codec != "auto:int8")


def test_one_late_look_is_none():
    probation = Probation(LOW_RANK, "int4")
    assert [probation.judge(late) for late in (0.1, 3.0, 0.1, 3.0, 3.0)] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert [step for step in range(250) if probation.due(step)] == [EVERY - 1, 2 * EVERY - 1]


def late_of(codec, steps):
    """Lateness as it is measured, and from the definition: what all gradients were together, less
    what was sent."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(96, 80, bias=False))
    state = commpress.compress(ddp, codec, measure_every=0, topology=None)
    measured = Lateness(96 * 80)
    state._lateness, state._looks = measured, lambda step: step == steps - 1
    draws, owed = torch.Generator().manual_seed(rank), torch.zeros(80, 96)
    for _ in range(steps):
        x = torch.randn(8, 96, generator=draws)
        own = torch.autograd.grad(_loss(ddp.module, x), ddp.module.weight)[0]
        dist.all_reduce(own)
        ddp.zero_grad()
        _loss(ddp, x).backward()
        owed += own / size - ddp.module.weight.grad
    return state._late(torch.device("cpu")), float(owed.norm() / (own / size).norm())


def _loss(model, x):
    return (model(x) - x[:, :80].roll(1, 0)).square().mean()


@pytest.mark.parametrize("codec", ["powersgd-1", "int4", "sign"])
def test_lateness_is_what_all_ranks_have_not_sent(pool, codec):
    for size in (2, 3):
        for measured, defined in pool.run(late_of, codec, 6, size=size):
            assert measured == pytest.approx(defined, rel=2e-3)


def fallen_behind(late):
    usual = lateness.LATE, lateness.EVERY
    lateness.LATE, lateness.EVERY = late, 5
    try:
        state, weights = train(
            "auto",
            Trial((*WAYS, LOW_RANK)).steps + 25,
            topology=None,
            decides=lambda trial: LOW_RANK,
        )
    finally:
        lateness.LATE, lateness.EVERY = usual
    every = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    return state.counters.choice, state._way, all(torch.equal(w, weights) for w in every)


def test_another_codec_takes_the_place_of_one_that_falls_behind(pool):
    for choice, way, equal in pool.run(fallen_behind, 1e-6, size=2):
        assert equal
        assert way == "int8"
        assert choice.startswith("int8, because powersgd-4 kept back")
    for choice, way, equal in pool.run(fallen_behind, 100.0, size=2):
        assert equal
        assert way == LOW_RANK
        assert "told" in choice


# ---------------------------------------------------------------- plans as files


def test_a_plan_comes_back_as_it_was(tmp_path):
    plan = Planned("int4", {"head.weight": "bits6"}, topology="2x2", why="because")
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert plan.choose("head.weight", 1000).spec.startswith("bits/6")
    assert plan.choose("body", 1000).spec == "int4/256"
    assert plan.choose("body", 100).lossless


@pytest.mark.parametrize(
    "content",
    [
        b"no json",
        b"[]",
        b'{"format": "commpress plan", "version": 2, "codec": "int8"}',
        b"[" * 100_000,
        b'{"format": "commpress plan", "version": 1}',
        b'{"format": "commpress plan", "version": 1, "codec": "sine"}',
        b'{"format": "commpress plan", "version": 1, "codec": "int8", "rules": {"a": 1}}',
        b'{"format": "commpress plan", "version": 1, "codec": "int8", "min_numel": true}',
        b'{"format": "commpress plan", "version": 1, "codec": "int8", "exec": "rm"}',
        b'{"format": "commpress plan", "version": 1, "codec": "plain", "rules": {"a": "int8"}}',
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
    state = commpress.compress(ddp, codec, measure_every=0, **options)
    if decides is not None:
        trial = state._trial
        trial.decide = lambda seconds: (
            setattr(trial, "instead", "int8"),
            (decides(trial), "told"),
        )[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64, generator=draws)).square().mean().backward()
        optimizer.step()
    return state, torch.cat([p.detach().flatten() for p in model.parameters()])


def tried_behind_the_hook():
    state, weights = train("auto:int8,sign", Trial(("plain", "int8", "sign")).steps + 4)
    every = [torch.zeros_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    return (
        state.counters.choice,
        state.counters.summary(),
        all(torch.equal(w, weights) for w in every),
        state.counters.steps,
    )


def test_all_ranks_choose_alike_and_stay_equal(pool):
    first, second = pool.run(tried_behind_the_hook, size=2)
    assert first[0] == second[0]
    assert first[0].split(",")[0] in ("plain", "int8", "sign")
    assert "chosen: " in first[1]
    assert first[2]
    steps = Trial(("plain", "int8", "sign")).steps
    assert first[3] == steps + 4


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1003))

    def forward(self, x):
        return (self.weight * x).sum()


def paid(topology):
    """Gradients of a linear loss are known, so the sum of all outputs tells what was lost."""
    x = torch.randn(1003, generator=torch.Generator().manual_seed(dist.get_rank()))
    ddp = DistributedDataParallel(Linear(), gradient_as_bucket_view=True)
    state = commpress.compress(ddp, "auto:sign,int8", topology=topology)
    state._trial.decide = lambda seconds: ("plain", "told to")
    total, steps = torch.zeros(1003, dtype=torch.float64), state._trial.steps + 3
    for _ in range(steps):
        ddp.zero_grad()
        ddp(x).backward()
        total += ddp.module.weight.grad.double()
    mean = x.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    lost = float((total - steps * mean.double()).norm() / (steps * mean.norm()))
    return (
        lost,
        state.counters.plain_steps,
        torch.allclose(ddp.module.weight.grad, mean, rtol=1e-5, atol=1e-6),
    )


@pytest.mark.parametrize(("size", "topology"), [(2, None), (3, "2,1"), (4, "2x2")])
def test_nothing_is_lost_when_a_trial_ends_without_compression(pool, size, topology):
    trial = Trial(("plain", "sign", "int8"))
    for lost, plain_steps, exact in pool.run(paid, topology, size=size):
        assert lost < 1e-6
        assert exact
        assert plain_steps == UNTIMED + trial.consecutive * trial.rounds + 3


def planned(path):
    state, weights = train("sign", 3, plan=path)
    return (
        state.counters.compressed_elements,
        state.counters.plain_steps,
        state.counters.choice,
        weights,
    )


def test_the_hook_follows_a_plan(pool, tmp_path):
    Planned("int8", {"module.0.weight": "none", "0.weight": "none"}, why="tested").save(
        tmp_path / "some.json"
    )
    Planned("plain", why="too fast a link").save(tmp_path / "none.json")
    (some, plain_steps, choice, _), _ = pool.run(planned, tmp_path / "some.json", size=2)
    assert (some, plain_steps) == (3 * 64 * 64, 0)
    assert "tested" in choice
    (none, plain_steps, choice, _), _ = pool.run(planned, tmp_path / "none.json", size=2)
    assert (none, plain_steps) == (0, 0), "DDP has no hook"
    assert "too fast" in choice
    assert json.loads((tmp_path / "none.json").read_text())["codec"] == "plain"
