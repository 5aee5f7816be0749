"""Late ranks under ``wait=``: means are equal everywhere, nothing is lost, nobody waits for long or
for ever."""

import os
import random
import signal
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.codecs import SignCodec
from commpress.errors import InvalidArgument, PeerFailure, StateMismatch
from commpress.integrations.ddp.stragglers import IN_A_ROW, Stragglers
from ddp_twin import Net, Plan, assert_equal, train, twin
from ranks import caught, meet, nonsense, refused

LAZY = SignCodec(block=0)
BUCKETS = {"bucket_cap_mb": 0.004}  # one parameter or two in each
HEAD = "head.weight"
WARM = 3  # backward passes before any bucket is answered


class Session:
    """A rank that trains, and keeps sums of its gradients and of the means."""

    def __init__(self, codec="int8", dtype=torch.float32, ddp=None, **options):
        torch.manual_seed(0)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.model = Net().to(dtype)
        self.dtype, self.count, self.stall = dtype, 0, 0.0
        self.ddp = DistributedDataParallel(self.model, **BUCKETS | (ddp or {}))
        self.state = commpress.compress(self.ddp, codec, topology=None, **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.own, self.means = self.zeros(), self.zeros()
        for name, p in self.model.named_parameters():
            p.register_hook(partial(self._see, name))

    def _see(self, name, gradient):
        self.own[name] += gradient.reshape(-1)
        if name == "left.weight":
            time.sleep(self.stall)

    def zeros(self):
        return {
            name: torch.zeros(p.numel(), dtype=torch.float64)
            for name, p in self.model.named_parameters()
        }

    def step(self, pause=0.0, factor=1.0, stall=0.0):
        """Pause, as if data came late, and train; return the seconds that it took. ``stall``: pause
        in the middle of backward."""
        start, self.stall = time.monotonic(), stall
        time.sleep(pause)
        draws = torch.Generator().manual_seed(self.count * 97 + self.rank)
        self.count += 1
        x = torch.randn(6, 24, generator=draws).to(self.dtype)
        self.optimizer.zero_grad()
        (self.ddp(x).square().mean() * factor).backward()
        for name, p in self.model.named_parameters():
            self.means[name] += p.grad.reshape(-1)
        self.optimizer.step()
        return time.monotonic() - start

    def warm(self):
        for _ in range(WARM):
            self.step()
        dist.barrier()

    def weights(self):
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])

    def missing(self):
        """Σ gradients − Σ residuals − Σ owed − P · Σ means, the largest element of all."""
        worst = 0.0
        for name, left in self.own.items():
            kept = torch.zeros(left.numel())
            self.state.residuals.add_to(name, kept, self.rank, self.size)
            left = left - kept - self.state.stragglers.owed.get(name, 0.0)
            dist.all_reduce(left)
            worst = max(worst, float((left - self.size * self.means[name]).abs().max()))
        return worst


# ---------------------------------------------------------------- what holds


def at_random(codec, dtype, **ddp):
    session = Session(codec, dtype, ddp, wait=0.004)
    luck = random.Random(dist.get_rank())
    session.warm()
    for _ in range(25):
        session.step(0.02 * (luck.random() < 0.2), stall=0.02 * (luck.random() < 0.2))
    return session.weights(), session.missing(), session.state.counters.late_buckets


@pytest.mark.parametrize(
    ("codec", "size"), [("int8", 2), (LAZY, 3), ("int8", 4), ("int4", 3)], ids=str
)
def test_nothing_is_lost_under_random_delays(pool, codec, size):
    """And replicas have the same bits."""
    results = pool.run(at_random, codec, torch.float32, size=size)
    assert sum(late for *_, late in results) > 3
    for weights, missing, _ in results:
        assert torch.equal(weights, results[0][0])
        assert missing < 1e-5 * size  # of sums of 28 steps in float32


def test_replicas_of_sixteen_bits_are_equal(pool):
    views = {"gradient_as_bucket_view": True}
    first, *others = pool.run(partial(at_random, **views), "int8", torch.bfloat16, size=3)
    assert all(torch.equal(other[0], first[0]) for other in others)


@pytest.mark.parametrize(
    "plan",
    [
        Plan("int8", ddp=BUCKETS),
        Plan(LAZY, ddp={"static_graph": True} | BUCKETS),
        Plan(LAZY, ddp={"gradient_as_bucket_view": True}, accumulate=3),
        Plan("int4", dtype=torch.float16, ddp=BUCKETS),
    ],
    ids=["int8", "static graph", "accumulation", "float16"],
)
def test_a_deadline_that_nobody_misses_changes_no_bit(pool, plan):
    """The twin waits for every rank."""
    results = pool.run(train, replace(plan, state={"wait": 60.0}))
    assert_equal(results, twin(plan, 2))
    assert all(trained.counters["late_steps"] == 0 for trained in results)


def one_late_step():
    """Gradients, means and what is owed, summed up before a late step, after it and after two
    more."""
    session, sums = Session("int8", exact_steps=99, wait=0.02), []
    session.warm()
    for pause in (0.0, 0.3, 0.0, 0.0):
        owed = session.state.stragglers.owed.get(HEAD, torch.zeros(1)).clone()
        sums.append((session.own[HEAD].clone(), session.means[HEAD].clone(), owed))
        session.step(pause * session.rank)
        dist.barrier()
    return sums, session.state.counters.late_steps


def test_a_late_gradient_follows(pool):
    """Exact steps have a closed form: the mean of a late step is that of the ranks in time, divided
    by all. The next step carries the rest, in which no more is paid than a gradient's norm."""
    (zero, none), (one, late) = pool.run(one_late_step)
    assert none == 0
    assert late == 1
    gradients, means, owed = [
        [[after[kind] - before[kind] for before, after in pairwise(sums)] for sums in (zero, one)]
        for kind in range(3)
    ]
    for step in range(3):
        sent = gradients[0][step] + gradients[1][step] - owed[1][step]
        torch.testing.assert_close(2 * means[0][step], sent, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(owed[1][1].double(), gradients[1][1], atol=1e-6, rtol=1e-5)
    assert owed[1][2].norm() <= gradients[1][2].norm() * (1 + 1e-5)
    assert owed[1][2].norm() > 0


def spoilt():
    session = Session(wait=0.02)
    session.warm()
    late = session.rank == 1
    session.step(0.3 * late, factor=float("inf") if late else 1.0)
    dist.barrier()
    counts = [session.state.counters.skipped_steps]
    for _ in range(2):
        session.step()
        dist.barrier()
        counts.append(session.state.counters.skipped_steps)
    return session.weights(), counts, session.state.counters.late_steps


def test_a_late_gradient_that_is_not_finite_ends_the_next_step(pool):
    (zero, counts, _), (one, same, late) = pool.run(spoilt)
    assert late == 1
    assert counts == same == [0, 1, 1]
    assert torch.equal(zero, one)
    assert zero.isfinite().all()


# ---------------------------------------------------------------- how long others wait


def long_pause():
    session = Session(wait=0.05)
    session.warm()
    if session.rank == 1:
        session.step(1.2)
        took = [session.step()]
    else:
        took = [session.step(), session.step()]
    dist.barrier()
    return session.state.counters.late_steps, took


def test_others_go_on_for_one_step(pool):
    """And wait for the late rank in the one after, which it has not reached."""
    (_, (one, two)), _ = pool.run(long_pause)
    assert one < 0.6 < two


def always_late():
    session, late = Session(wait=0.005), ""
    session.warm()
    for _ in range(2 * IN_A_ROW + 4):
        before = session.state.counters.late_steps
        session.step(0.03 * session.rank)
        late += "late" if session.state.counters.late_steps > before else " "
    dist.barrier()
    return late


def test_a_rank_that_is_always_late_is_waited_for_at_times(pool):
    _, late = pool.run(always_late)
    in_a_row = max(run.count("late") for run in late.split())
    assert 3 < in_a_row <= IN_A_ROW


@pytest.mark.parametrize(
    ("wait", "steps", "behind", "seconds"),
    [
        (0.3, [], [], 0.3),
        ("auto", [1.0] * 4, [0.0] * 4, None),
        ("auto", [1.0] * 9 + [9.0] * 3, [0.0] * 12, 0.25),
        ("auto", [1.0] * 9, [0.4] * 9, 0.6),
        ("auto", [0.001] * 9, [0.0] * 9, 0.01),
    ],
)
def test_how_long_is_waited(wait, steps, behind, seconds):
    """A quarter of a usual step, or half as long again as this rank usually needs."""
    alone = SimpleNamespace(channel=SimpleNamespace(size=1))
    stragglers = Stragglers(wait, alone)
    stragglers._seconds.extend(steps)
    stragglers._behind.extend(behind)
    assert stragglers.patience() == pytest.approx(seconds)


# ---------------------------------------------------------------- states


def saved_between(wait):
    """Rank 1 saves late, when rank 0 has gone on to the next step already."""
    session = Session(LAZY, wait=wait)
    session.warm()
    if session.rank == 1:
        time.sleep(0.4)
    state = session.state.state_dict()
    ahead = session.state.step - session.state.steps_done
    for _ in range(2):
        session.step()
    dist.barrier()
    return state, ahead


def test_a_late_rank_saves_the_state_of_its_own_step(pool):
    """Although its worker has answered for the next one."""
    bounded, patient = pool.run(saved_between, 0.02), pool.run(saved_between, 60.0)
    assert (bounded[1][1], patient[1][1]) == (1, 0)
    for (state, _), (same, _) in zip(bounded, patient, strict=True):
        assert state["step"] == same["step"] == WARM
        assert_equal_states(state, same)


def assert_equal_states(one, two):
    assert one.keys() == two.keys()
    for name, each in one.items():
        if isinstance(each, dict):
            assert_equal_states(each, two[name])
        elif isinstance(each, torch.Tensor):
            assert torch.equal(each, two[name]), name
        elif isinstance(each, list | tuple):
            for a, b in zip(each, two[name], strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        else:
            assert each == two[name], name


def owing(folder, resumes):
    """Train, the last rank late in the last step, and save; go on in the same or in new objects."""
    session = Session(wait=0.3)
    session.warm()
    session.step(1.5 * session.rank)
    dist.barrier()
    state, elastic = session.state.state_dict(), session.state.elastic_state_dict()
    owed = dict(session.state.stragglers.owed)
    if resumes:
        weights = session.model.state_dict()
        session = Session(wait=0.3)
        session.model.load_state_dict(weights)
        session.count = WARM + 1
        session.state.load_state_dict(state)
    for _ in range(3):
        session.step()
        dist.barrier()
    if not resumes:
        torch.save((elastic, owed), os.path.join(folder, f"{session.rank}.pt"))
    other = Session()
    return session.weights(), owed, caught(other.state.load_state_dict, state)


def loaded_too_early():
    """Rank 1 goes back to a state before a step that was answered for it."""
    session = Session(wait=0.02)
    session.warm()
    state = session.state.state_dict()
    if session.rank == 1:
        time.sleep(0.4)
    else:
        session.step()
    dist.barrier()
    refusal = caught(session.state.load_state_dict, state) if session.rank else None
    if session.rank:
        session.step()
    session.state.load_state_dict(state)
    session.step()
    return refusal, session.weights()


def test_a_state_is_not_loaded_before_a_step_that_others_have_taken(pool):
    (_, weights), (refusal, same) = pool.run(loaded_too_early)
    assert isinstance(refusal, InvalidArgument)
    assert f"before step {WARM + 1}" in str(refusal)
    assert torch.equal(weights, same)


def alone(elastic):
    """Owed by one rank after loading the states of two, and what the next step makes of it."""
    session = Session(wait=0.02)
    session.state.load_state_dict(*elastic)
    owed = dict(session.state.stragglers.owed)
    session.step()
    left = session.state.stragglers.owed
    paid = {name: session.means[name] - session.own[name] + left.get(name, 0.0) for name in owed}
    return owed, paid


def test_what_is_owed_is_part_of_the_state(pool, tmp_path):
    on = pool.run(owing, str(tmp_path), False)
    anew = pool.run(owing, str(tmp_path), True)
    assert [len(owed) for _, owed, _ in on] == [0, len(list(Net().parameters()))]
    for (weights, _, _), (same, _, _) in zip(on, anew, strict=True):
        assert torch.equal(weights, same)
    refusal = anew[1][2]
    assert isinstance(refusal, StateMismatch)
    assert "pass wait=" in str(refusal)
    elastic = [torch.load(tmp_path / f"{rank}.pt")[0] for rank in (0, 1)]
    ((owed, paid),) = pool.run(alone, elastic, size=1)
    for name, late in on[1][1].items():
        torch.testing.assert_close(owed[name], late / 2)
        torch.testing.assert_close(paid[name].float(), late / 2, atol=1e-6, rtol=1e-4)


# ---------------------------------------------------------------- who never comes


def dies_late(how):
    session = Session(wait=0.02)
    session.warm()
    meet("warm", session.size)
    if session.rank == 1:
        if how == "killed":
            time.sleep(0.3)  # its worker answers meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12)  # the thread that trains has ended, the process has not
        return None, 0
    steps = 0
    try:
        for _ in range(9):
            session.step()
            steps += 1
    except PeerFailure as error:
        return error, steps
    return None, steps


@pytest.mark.parametrize("how", ["killed", pytest.param("ended", marks=pytest.mark.slow)])
def test_a_rank_that_never_comes_back_is_named(mortal, how):
    lost = [1] if how == "killed" else []
    error, steps = mortal.outcomes(dies_late, how, size=2, lost=lost)[0]
    assert isinstance(error, PeerFailure)
    assert (error.ranks, steps) == ((1,), 1)


# ---------------------------------------------------------------- refusals


@nonsense({"wait": 0}, {"wait": -1.0}, {"wait": "soon"}, {"wait": float("inf")}, {"wait": True})
def test_nonsense(pool, options, size):
    for said in pool.run(refusals, {"it": options}, size=size):
        assert f"wait is {options['wait']!r}, expected seconds above zero" in said["it"]


REFUSED = {
    "codec 'none'": ({"codec": "none"}, "torch's own all-reduce"),
    "auto": ({"codec": "auto"}, "name one codec"),
    "per layer": ({"codec": commpress.PerLayer("int4", 10)}, "name one codec"),
    "alarm": ({"alarm": "warn"}, "without alarm"),
    "low rank": ({"codec": "powersgd-4"}, "name one of rows"),
    "topology": ({"topology": "1x2"}, "pass topology=None"),
}


def refusals(calls):
    ddp = DistributedDataParallel(Net())
    calls = {
        name: lambda options=options: commpress.compress(ddp, **{"wait": 0.1} | options)
        for name, options in calls.items()
    }
    return refused(calls)


def more_refusals():
    unused = DistributedDataParallel(Net(), find_unused_parameters=True)
    normed = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    )
    plain = DistributedDataParallel(Net())
    scaler, group = torch.amp.GradScaler("cpu"), dist.group.WORLD
    calls = {
        "unused": lambda: commpress.compress(unused, wait="auto"),
        "buffers": lambda: commpress.compress(normed, wait="auto"),
        "scaler": lambda: commpress.compress(plain, wait="auto", grad_scaler=scaler),
        "agree_over": lambda: commpress.compress(plain, wait="auto", agree_over=group),
        "mesh": lambda: commpress.compress(plain, mesh=None, dims={"dp": "int8"}, wait="auto"),
    }
    double = DistributedDataParallel(Net().double())
    commpress.compress(double, wait="auto")
    return refused(calls), str(caught(lambda: double(torch.ones(2, 24).double()).sum().backward()))


def test_what_cannot_hold_is_refused(pool):
    for said in pool.run(refusals, {name: options for name, (options, _) in REFUSED.items()}):
        for name, (_, words) in REFUSED.items():
            assert words in said[name], said[name]
    for said, double in pool.run(more_refusals):
        assert "find_unused_parameters" in said["unused"]
        assert "broadcast_buffers=False" in said["buffers"]
        assert "bfloat16" in said["scaler"]
        assert "leave it out" in said["agree_over"]
        assert "mesh is given" in said["mesh"]
        assert "float64" in double
