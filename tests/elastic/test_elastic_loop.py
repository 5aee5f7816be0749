"""The loop over ranks that die, leave and come, in threads of one process: nothing is committed
twice, nothing is lost."""

import copy
import json
import random
import time
from collections import defaultdict
from datetime import timedelta
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from commpress import ElasticSampler, Metrics
from commpress.collectives.agreement import gathered
from commpress.collectives.change import Change
from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument, NoQuorum, PeerFailure
from commpress.integrations.elastic.attendance import Declaration
from commpress.integrations.elastic.exact_means import check_ordered
from commpress.integrations.elastic.loop import Elastic
from commpress.integrations.elastic.repeat import StepMark
from commpress.integrations.elastic.shared_state import SharedState
from commpress.integrations.elastic.snapshots import Snapshots, newest
from elastic_world import Killed, Rank, World, until
from test_elastic_snapshots import OPTIONS
from variants import first

SAMPLES, BATCH = 60, 2
DATA = TensorDataset(
    torch.arange(SAMPLES, dtype=torch.float32).view(-1, 1).expand(-1, 3) / 17,
    torch.arange(SAMPLES) % 5 / 3.0,
)
torch.manual_seed(11)
MODEL = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


@pytest.fixture(autouse=True)
def channels_of_the_world(monkeypatch):
    among = classmethod(lambda cls, group=None, *, name, **_: group.channel(name))
    monkeypatch.setattr(Channel, "among", among)


class Run:
    """One process: a model, its optimizer and schedule, and gradients that are averaged over a
    channel of its own."""

    def __init__(self, seed=0, lr=0.05):
        self.model = copy.deepcopy(MODEL)
        if seed:  # another beginning than the others': to be healed
            with torch.no_grad():
                for p in self.model.parameters():
                    p.add_(seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, gamma=0.8)
        self.sampler = ElasticSampler(DATA, BATCH, seed=5, rank=0, size=1)
        self.loader = DataLoader(DATA, BATCH, sampler=self.sampler)
        self.channel, self.seen = None, []

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def taken_apart(self):
        return SharedState(self.state).taken_apart()

    def gradient(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        loss = (self.model(x).squeeze(1) - y).square().mean()
        loss.backward()
        return loss

    def flat(self):
        return torch.cat([p.grad.view(-1) for p in self.model.parameters()]).double().tolist()

    def apply(self, rows):
        mean = torch.from_numpy(rows).mean(0).float()
        for p in self.model.parameters():
            count = p.numel()
            p.grad.copy_(mean[:count].view_as(p))
            mean = mean[count:]
        self.optimizer.step()
        self.schedule.step()

    def step(self, batch):
        loss = self.gradient(batch)
        channel = self.channel
        self.apply(
            channel.run(gathered(self.flat(), transport=channel.transport, sequence=channel.take()))
        )
        return float(loss.detach())


def joined(rank, seed=0):
    """A run on this rank."""
    run = Run(seed)
    run.channel = rank.channel("gradients")
    run.sampler.rank, run.sampler.size = rank.rank(), rank.size()
    return run


def train(rank, world, folder, *, seed=0, join=None, during=None, pace=0.0, **options):
    run = joined(rank, seed)
    file = f"{folder}/events-{world.ranks.index(rank)}"
    step = (lambda batch: time.sleep(pace) or run.step(batch)) if pace else run.step
    options = {
        "data": run.loader,
        "events": file,
        "join": join,
        "hash_every": 1,
        "epochs": 1,
    } | options
    loop = Elastic(step, run.state, process_group=rank, **options)
    for _ in loop:
        if during is not None:
            during(rank, loop, run)
    loop.close()
    return loop, run


def events(folder, kind=None):
    lines = [
        json.loads(line)
        for file in sorted(folder.glob("events-*"))
        for line in file.read_text().splitlines()
    ]
    return [line for line in lines if kind in (None, line["kind"])]


def check(folder, runs, *, epochs=1, survivors=None):
    """Weights are equal in every bit, what the committed windows lead to, and each sample of an
    epoch was in one of them."""
    assert len({str(run.model.state_dict()) for run in runs}) == 1
    windows = {}
    for line in events(folder, "commit"):
        windows.setdefault(line["step"], set()).add((line["position"], line["size"]))
    ordered = [windows[step] for step in sorted(windows)]
    assert sorted(windows) == list(range(1, len(windows) + 1))
    assert all(len(each) == 1 for each in ordered), "a step was committed twice, with other samples"
    twin, position = Run(), 0
    for ((at, size),) in ordered:
        assert at == position, "samples were lost or read twice"
        position += size * BATCH
        rows = []
        for rank in range(size):
            twin.sampler.rank, twin.sampler.size, twin.sampler.position, twin.sampler.epoch = (
                rank,
                size,
                at,
                epochs,
            )
            samples = [DATA[i] for i in islice(twin.sampler, BATCH)]
            twin.gradient([torch.stack(each) for each in zip(*samples, strict=True)])
            rows.append(twin.flat())
        twin.apply(torch.tensor(rows, dtype=torch.float64).numpy())
    for run in runs:
        for mine, theirs in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            assert torch.equal(mine, theirs), "weights are not what the committed steps lead to"
    hashes = defaultdict(set)
    for line in events(folder, "commit"):
        hashes[line["step"]].add(line["hash"])
    assert all(len(each) == 1 for each in hashes.values())
    assert position > epochs * SAMPLES - BATCH * 4
    return ordered


def survive(folder, size, faults=None, *, during=None, **options):
    """Members of a world, whoever is left of it with its loop and run, and ranks in each step.

    ``faults``: by rank, at which of its messages it is killed or loses what comes.
    """
    world = World()
    members = world.found(size)
    for rank, (fault, at) in (faults or {}).items():
        setattr(members[rank], fault, at)
    story = None if during is None else partial(during, world)
    world.go(members, partial(train, during=story, **options), world, folder)
    results = world.join()
    left = {rank: results[rank] for rank in world.ranks if rank in results}
    windows = check(folder, [run for _, run in left.values()])
    return members, left, [size for ((_, size),) in windows]


def test_an_undisturbed_run_reads_every_sample_once(tmp_path):
    _, left, sizes = survive(tmp_path, 3)
    assert sizes == [3] * 10
    for loop, _ in left.values():
        assert loop.step == 10
        assert loop.counters.participation == loop.counters.goodput == 1


@pytest.mark.parametrize("kill_at", first(5, [1, 2, 3, 7, 12, 4, 5, 6, 8, 9, 10, 11]))
def test_a_rank_that_dies_at_any_message_is_left_behind(tmp_path, kill_at):
    _, left, sizes = survive(tmp_path, 3, {1: ("kill_at", kill_at)})
    # its first message compares steps, each of the others is of a step
    together = max(kill_at - 2, 0)
    assert sizes == [3] * together + [2] * (len(sizes) - together)
    for loop, _ in left.values():
        assert (loop.counters.faults, loop.counters.lost) == (1, 1)
        assert loop.counters.pause_seconds > 0
        assert loop.counters.participation == sum(sizes) / (3 * len(sizes))


@pytest.mark.parametrize(
    ("size", "rank", "loses_at"),
    [(3, 1, 2), (3, 1, 6), (3, 1, 11), (3, 0, 2), (3, 0, 6), (2, 0, 15)],
)
def test_a_step_that_others_have_committed_counts_for_who_did_not(tmp_path, size, rank, loses_at):
    """It loses what comes in one step, also the last, after its own gradients have gone: the others
    take the step, and heal it."""
    _, left, sizes = survive(tmp_path, size, {rank: ("loses_at", loses_at)})
    (healed,) = events(tmp_path, "healed")
    donors = [each for each in range(size) if each != rank]
    assert (healed["rank"], healed["donors"], healed["step"]) == (rank, donors, loses_at - 1)
    loops = [loop for loop, _ in left.values()]
    assert {loop.step for loop in loops} == {loop.counters.steps for loop in loops} == {len(sizes)}
    assert sum(loop.counters.samples for loop in loops) == SAMPLES


@pytest.mark.parametrize("kill_at", [9, 10, 12])
def test_a_step_of_which_only_the_dead_knew_is_taken_again(tmp_path, kill_at):
    """Rank 0 alone has committed it, and dies while it heals the others, who go on from the step
    before."""
    world = World()
    members = world.found(3)
    members[1].loses_at = members[2].loses_at = 6
    members[0].kill_at = kill_at
    world.go(members, train, world, tmp_path)
    loops, runs = zip(*world.join().values(), strict=True)
    file = tmp_path / "events-0"
    known = [line for line in file.read_text().splitlines() if '"commit"' in line]
    assert json.loads(known[-1])["step"] == 5
    file.write_text("\n".join(known[:-1]) + "\n")
    assert [size for ((_, size),) in check(tmp_path, runs)] == [3] * 4 + [2] * 9
    assert {loop.counters.steps for loop in loops} == {loops[0].step}


def test_newcomers_give_up_before_those_who_have_trained(tmp_path):
    """A newcomer with another program, whose steps never fit the others': it ends with the error,
    and they go on."""
    world, started = World(), []

    def other(rank):
        run = Run()
        run.channel = rank.channel("gradients")

        def step(batch):
            world.break_up(rank.epoch)
            raise PeerFailure("rank 2 calls all_to_all, but rank 0 calls all_reduce")

        Elastic(
            step, run.state, data=run.loader, process_group=rank, epochs=1, join=True
        ).__iter__().__next__()

    def during(rank, loop, run):
        if rank is members[0] and loop.step == 3 and not started:
            started.append(world.start(other))
            until(lambda: rank.waiting)

    members = world.found(2)
    world.go(members, lambda rank: train(rank, world, tmp_path, during=during))
    with pytest.raises(PeerFailure, match="rank 2 calls"):
        world.join()
    check(tmp_path, [world.results[rank][1] for rank in members])


class Starter:
    """Starts processes that join when rank 0 has committed ``step``, and waits until they are at
    its door; then breaks one of the world's ranks."""

    def __init__(self, folder, step, count, broken=None, at=0, **options):
        self.folder, self.step, self.count, self.options = folder, step, count, options
        self.broken, self.at, self.started = broken, at, []

    def __call__(self, world, rank, loop, run):
        if rank is world.ranks[0] and loop.step == self.step and not self.started:
            join = partial(train, seed=1, join=True, **self.options)
            self.started = [world.start(join, world, self.folder) for _ in range(self.count)]
            until(lambda: rank.waiting == self.count)
            if self.broken is not None:
                victim = world.ranks[self.broken]
                victim.kill_at = victim.messages + self.at


@pytest.mark.parametrize(("size", "newcomers"), [(2, 1), (2, 2), (1, 2)])
def test_newcomers_are_healed_and_go_on_like_the_others(tmp_path, size, newcomers):
    """Also where they come while only one rank is left."""
    *_, sizes = survive(tmp_path, size, during=Starter(tmp_path, 4, newcomers))
    assert sizes[-1] == sizes[-2] == size + newcomers
    healed = events(tmp_path, "healed")
    assert len(healed) == newcomers
    assert len({line["hash"] for line in healed}) == 1
    assert all(line["donors"] == [*range(size)] for line in healed)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_newcomer_that_dies_while_it_joins_is_forgotten(tmp_path, at):
    starter = Starter(tmp_path, 4, 1, broken=-1, at=at)
    members, left, _ = survive(tmp_path, 2, during=starter)
    assert [*left] == members


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_donor_that_dies_while_it_gives_is_replaced(tmp_path, at):
    """After so many messages of the healing; rank 0 and the newcomer form the group anew, and rank
    0 gives."""
    starter = Starter(tmp_path, 4, 1, broken=1, at=at)
    members, left, sizes = survive(tmp_path, 3, during=starter)
    assert members[1] not in left
    assert sizes[-1] == sizes[-2] == 3


def test_who_is_not_healed_gives_nothing_to_others(tmp_path):
    """The only rank with the state dies while it gives it: the newcomers say so, and do not train
    from what they have."""
    with pytest.raises(NoQuorum, match="none of the 2 remaining ranks"):
        survive(tmp_path, 1, during=Starter(tmp_path, 3, 2, broken=0, at=3))


def test_below_the_minimum_ranks_wait_for_newcomers(tmp_path):
    def dies(world, rank, loop, run):
        if loop.step == 3 and rank is world.ranks[1]:
            world.start(partial(train, seed=1, join=True, minimum=2), world, tmp_path)
            raise Killed

    *_, sizes = survive(tmp_path, 2, during=dies, minimum=2, patience=15.0)
    assert {*sizes} == {2}


def test_below_the_minimum_for_too_long_is_an_error(tmp_path):
    with pytest.raises(NoQuorum, match="minimum is 2"):
        survive(tmp_path, 1, minimum=2, patience=0.2)


# ---------------------------------------------------------------- the step itself


def test_a_step_that_fails_after_the_optimizer_has_stepped_counts_once(tmp_path):
    """An all-reduce of the user's own behind ``optimizer.step()`` fails because a rank died: the
    step is not taken twice."""
    world = World()
    members = world.found(3)

    def steps(rank):
        run = joined(rank)

        def step(batch):
            assert all(p.grad is None for p in run.model.parameters()), (
                "gradients of the step before"
            )
            loss = run.step(batch)
            channel = run.channel
            if rank is members[2] and loop.step == 3:
                raise Killed
            channel.run(gathered([loss], transport=channel.transport, sequence=channel.take()))
            run.optimizer.zero_grad()

        file = f"{tmp_path}/events-{members.index(rank)}"
        loop = Elastic(
            step,
            run.state,
            data=run.loader,
            process_group=rank,
            epochs=1,
            events=file,
            hash_every=1,
        )
        list(loop)
        return loop, run

    world.go(members, steps)
    results = world.join()
    check(tmp_path, [run for _, run in results.values()])


def test_a_repeated_step_draws_the_same_numbers_and_finds_the_same_buffers(tmp_path):
    """Those of the attempt that failed with rank 1, which draws none: the ranks are threads and
    share the generators."""
    world, drawn = World(), []
    members = world.found(2)
    members[1].kill_at = 5

    def draws(rank):
        run = joined(rank)
        run.model.register_buffer("forwards", torch.zeros(()))

        def step(batch):
            if rank is members[0]:
                numbers = float(torch.rand(())), random.random(), float(np.random.random())
                drawn.append((loop.step, float(run.model.forwards), numbers))
            run.model.forwards += 1
            return run.step(batch)

        loop = Elastic(step, run.state, data=run.loader, process_group=rank, epochs=1)
        list(loop)
        return loop, run

    world.go(members, draws)
    ((loop, run),) = world.join().values()
    attempts = [each for each in drawn if each[0] == 3]
    assert len(attempts) == 2
    assert attempts[0] == attempts[1]
    assert len(drawn) == loop.step + 1 == len({numbers for *_, numbers in drawn}) + 1
    assert int(run.model.forwards) == loop.step


def test_a_scaler_takes_no_gradients_for_unscaled_that_are_gone():
    """Neither in the step that is repeated, nor with the scale that the attempt has left."""
    run, scaler = Run(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    mark = StepMark([*run.state.values(), scaler])
    for factor in (1.0, float("inf")):
        mark.begin()
        scaler.scale(run.model(torch.ones(2, 3)).sum() * factor).backward()
        scaler.unscale_(run.optimizer)
        if factor > 1:
            scaler.step(run.optimizer)
            scaler.update()
            assert scaler.get_scale() == 512
        mark.undo()
        assert not mark.applied
        assert scaler.get_scale() == 1024
        assert all(p.grad is None for p in run.model.parameters())
    scaler.scale(run.model(torch.ones(2, 3)).sum()).backward()
    scaler.step(run.optimizer)
    assert max(p.grad.abs().max() for p in run.model.parameters()) <= 2


@pytest.mark.parametrize(
    ("steps", "donors"),
    [((4, 5, 5), [1, 2]), ((5, 4, 5), [0, 2]), ((4, 4, 5), [2]), ((5, 5), [0, 1])],
)
def test_only_who_has_committed_most_steps_gives_its_state(steps, donors):
    said = tuple(Declaration(each).packed() for each in steps)
    assert Declaration.donors(Change(1, 0, 3, tuple(range(len(said))), said)) == donors


@pytest.mark.parametrize("halfway", [2, 3])
def test_who_was_halfway_becomes_like_one_who_was_further_or_like_the_first(halfway):
    said = [Declaration(4, halfway=rank < halfway).packed() for rank in range(3)]
    assert Declaration.donors(Change(1, 0, 3, (0, 1, 2), tuple(said))) == (
        [2] if halfway == 2 else [0]
    )


def test_survivors_whose_weights_differ_become_like_the_first(tmp_path):
    """An optimizer that changes weights more than once in a step, such as LBFGS, was interrupted in
    the middle."""
    world = World()
    members = world.found(3)
    members[2].kill_at = 6

    def apart(rank, loop, run):
        if rank is members[1] and loop.step == 4:
            with torch.no_grad():
                run.model[0].weight.add_(1.0)

    world.go(members, lambda rank: train(rank, world, tmp_path, during=apart))
    results = world.join()
    assert len({str(run.model.state_dict()) for _, run in results.values()}) == 1
    assert results[members[1]][0].counters.healed == 1


def test_metrics_tell_of_faults_and_participation(tmp_path):
    samples = []

    def measures(world, rank, loop, run):
        if rank is world.ranks[0]:
            samples.append(samples[0].step() if samples else Metrics(elastic=loop))

    survive(tmp_path, 2, {1: ("kill_at", 5)}, during=measures)
    figures = samples[1:]
    assert sum(each.faults for each in figures) == sum(each.lost for each in figures) == 1
    assert sum(each.pause_seconds for each in figures) > 0
    assert (figures[0].ranks, figures[-1].ranks, figures[-1].joined) == (2, 1, 0)
    assert figures[-1].participation < figures[0].participation == 1


def test_an_error_of_the_users_own_is_raised_as_it_is(tmp_path):
    world = World()

    def steps(rank):
        def step(batch):
            raise ZeroDivisionError("mine")

        list(
            Elastic(
                step,
                Run().state,
                data=Run().loader,
                process_group=rank,
                epochs=1,
                events=f"{tmp_path}/events-0",
            )
        )

    world.go(world.found(1), steps)
    with pytest.raises(ZeroDivisionError):
        world.join()
    assert events(tmp_path, "error")[0]["error"] == "ZeroDivisionError: mine"


def test_accumulated_batches_come_as_a_list(tmp_path):
    world, seen = World(), []

    def steps(rank):
        run = Run()
        run.sampler = ElasticSampler(DATA, 6, rank=0, size=1)
        loader = DataLoader(DATA, 2, sampler=run.sampler)
        list(
            Elastic(
                lambda batches: seen.append([len(x) for x, _ in batches]),
                run.state,
                data=loader,
                process_group=rank,
                epochs=2,
            )
        )
        return run.sampler

    world.go(world.found(1), steps)
    (sampler,) = world.join().values()
    assert seen == [[2, 2, 2]] * 20
    assert sampler.position == 2 * SAMPLES


# ---------------------------------------------------------------- leaving


def leave_at(steps):
    """Ranks leave when they have committed so many steps."""

    def during(rank, loop, run):
        if steps.get(rank) == loop.step:
            loop.leave()

    return during


def owing(members):
    for number, rank in enumerate(members):
        rank.owed = 2.0**number


@pytest.mark.parametrize("together", [True, False])
def test_who_leaves_hands_over_what_it_owes_and_is_no_loss(tmp_path, together):
    world = World()
    members = world.found(4)
    owing(members)
    leave = leave_at({members[0]: 3, members[2]: 3 if together else 5})
    world.go(members, lambda rank: train(rank, world, tmp_path, during=leave))
    results = world.join()
    stayed = [results[members[number]] for number in (1, 3)]
    check(tmp_path, [run for _, run in stayed])
    assert [results[member][0].left for member in members] == [True, False, True, False]
    assert [results[members[0]][0].step, results[members[2]][0].step] == [3, 3 if together else 5]
    for loop, _ in stayed:
        assert (loop.counters.left, loop.counters.lost, loop.counters.faults) == (2, 0, 0)
    assert sum(member.owed for member in members) == members[1].owed + members[3].owed == 15
    assert not events(tmp_path, "error")


@pytest.mark.parametrize("kill_at", range(1, 9))
def test_a_rank_that_dies_while_another_leaves_changes_nothing_for_the_others(tmp_path, kill_at):
    world = World()
    members = world.found(4)
    owing(members)

    def during(rank, loop, run):
        if rank is members[1] and loop.step == 4:
            loop.leave()
        if rank is members[2] and loop.step == 4:
            rank.kill_at = rank.messages + kill_at

    world.go(members, lambda rank: train(rank, world, tmp_path, during=during))
    results = world.join()
    check(tmp_path, [results[members[0]][1], results[members[3]][1]])
    assert results[members[1]][0].left
    assert members[1].owed == 0


def test_where_all_leave_the_last_takes_a_snapshot(tmp_path):
    first = World()

    def train_with(rank, world, **options):
        snapshots = Snapshots(tmp_path / f"disk-{world.ranks.index(rank)}", every=100, **OPTIONS)
        return train(rank, world, tmp_path, snapshots=snapshots, **options)

    members = first.found(2)
    leave = leave_at({members[0]: 3, members[1]: 6})
    first.go(members, lambda rank: train_with(rank, first, during=leave))
    first.join()
    second = World()
    second.go(second.found(2), lambda rank: train_with(rank, second, seed=1))
    runs = [run for _, run in second.join().values()]
    assert [line["step"] for line in events(tmp_path, "healed")] == [6]
    check(tmp_path, runs)


def test_a_second_iteration_goes_on_where_the_first_was_left(tmp_path):
    """Not at the last snapshot, which is older."""

    def twice(rank):
        run, seen = Run(), []
        run.channel = rank.channel("gradients")
        snapshots = Snapshots(tmp_path / "disk", every=4, **OPTIONS)
        loop = Elastic(
            run.step, run.state, data=run.loader, process_group=rank, steps=8, snapshots=snapshots
        )
        seen += [loop.step for _ in islice(loop, 6)]
        seen += [loop.step for _ in loop]
        loop.close()
        return seen

    world = World()
    world.go(world.found(1), twice)
    assert list(world.join().values()) == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_who_waits_for_newcomers_may_leave(tmp_path):
    world = World()
    members = world.found(2)

    def waits(rank):
        run = joined(rank)
        loop = Elastic(
            run.step,
            run.state,
            data=run.loader,
            process_group=rank,
            epochs=1,
            minimum=3,
            patience=0.5,
        )
        if rank is members[0]:
            loop.leave()
        return loop, list(loop)

    world.go(members, waits)
    with pytest.raises(NoQuorum):
        world.join()
    loop, steps = world.results[members[0]]
    assert loop.left
    assert steps == []


# ---------------------------------------------------------------- snapshots


def test_all_ranks_go_on_from_the_newest_snapshot(tmp_path):
    """The run ends after 9 steps; it is started again, and its first rank has lost its disk."""

    def train_with(rank, world, steps, seed):
        number = world.ranks.index(rank)
        snapshots = Snapshots(tmp_path / f"disk-{number}", every=4, **OPTIONS)
        return train(
            rank, world, tmp_path, seed=seed, snapshots=snapshots, steps=steps, epochs=None
        )

    for steps, seed in ((9, 0), (12, 1)):
        world = World()
        world.go(world.found(2), train_with, world, steps, seed)
        loops, runs = zip(*world.join().values(), strict=True)
        if not seed:
            (tmp_path / "disk-0").rename(tmp_path / "lost")
    assert [line["step"] for line in events(tmp_path, "healed")] == [8]
    assert {loop.counters.steps for loop in loops} == {4}
    assert {loop.snapshots.last for loop in loops} == {12}
    check(tmp_path, runs, epochs=0)


def test_a_step_that_not_all_have_committed_is_in_no_snapshot(tmp_path):
    """Rank 0 alone has committed step 4, and dies: the others take it anew with the samples of two
    ranks."""
    world = World()
    members = world.found(3)
    members[1].loses_at = members[2].loses_at = 5
    members[0].kill_at = 7
    disks = [Snapshots(tmp_path / str(number), every=4, **OPTIONS) for number in range(3)]
    world.go(
        members,
        lambda rank: train(
            rank, world, tmp_path, snapshots=disks[members.index(rank)], epochs=None, steps=6
        ),
    )
    world.join()
    assert json.loads((tmp_path / "events-0").read_text().splitlines()[-1])["step"] == 4
    assert disks[0].steps == []
    disks[0].close()
    for disk in disks[1:]:
        disk.open()
        assert disk.steps == [4]
        disk.close()


@pytest.mark.parametrize(
    ("every", "steps", "ends"), [(3, [3], False), (20, [20], False), (2, [100], True)]
)
def test_who_joins_with_a_snapshot_takes_what_the_others_have(tmp_path, every, steps, ends):
    """An older one, one that is newer by less than an interval, and one of another run."""
    theirs = Snapshots(tmp_path / "newcomer", every=every, **OPTIONS)
    theirs.open()
    for step in steps:
        theirs.save(step, *Run(7).taken_apart())
    theirs.close()
    world = World()
    members, starter = world.found(2), Starter(tmp_path, 4, 1, snapshots=theirs)

    def member(rank):
        snapshots = Snapshots(tmp_path / str(rank.rank()), every=every, **OPTIONS)
        return train(rank, world, tmp_path, during=partial(starter, world), snapshots=snapshots)

    world.go(members, member)
    if ends:
        with pytest.raises(
            InvalidArgument, match="of step 100, but the run that this process joins is at step 4"
        ):
            world.join()
    else:
        world.join()
        loop, _ = world.results[starter.started[0]]
        assert loop.counters.healed == 1
        assert theirs._last == loop.step // every * every
    for thread in world.threads:
        thread.join(60)
    check(
        tmp_path, [outcome[1] for outcome in world.results.values() if isinstance(outcome, tuple)]
    )


@pytest.mark.parametrize("of", [(), (0, 2)], ids=["all", "survivors"])
def test_divided_models_go_back_to_the_newest_snapshot_of_who_was_there(tmp_path, of):
    """Rank 1 is new: the steps that its snapshot is ahead are taken anew by the others."""
    world, took = World(), {}
    kept = {0: [4], 1: [4, 8], 2: []}

    def goes_back(rank):
        number = rank.rank()
        snapshots = Snapshots(tmp_path / str(number), every=4, **OPTIONS)
        snapshots.open()
        for step in kept[number]:
            snapshots.save(step, *Run(step).taken_apart())
        step, document, tensors = newest(snapshots, rank.channel("elastic"), of=of)
        snapshots.give_way(step)
        took[number] = step, document, len(tensors), snapshots.last
        snapshots.close()

    world.go(world.found(3), goes_back)
    world.join()
    wanted = (4, 4, 4, 0, 0) if of else (8, 8, 4, 8, 0)
    assert [took[rank][0] for rank in range(3)] == [wanted[0]] * 3
    assert len({took[rank][1:3] for rank in range(3)}) == 1
    assert [took[rank][3] for rank in range(3)] == [wanted[2], wanted[3], wanted[4]]


def test_a_snapshot_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, caplog):
    snapshots = Snapshots(tmp_path / "disk", every=5, disk="4KiB", **OPTIONS)
    _, left, _ = survive(tmp_path, 1, snapshots=snapshots)
    assert [loop.counters.failed_snapshots for loop, _ in left.values()] == [5]
    assert "continues with that of step 5" in caplog.text


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epochs": None}, "epochs and steps"),
        ({"data": None}, "data is None"),
        ({"train_step": None}, "train_step"),
        ({"state": {"model": 3}}, "state"),
        ({"state": {}}, "state"),
        ({"build": dict}, "build"),
        ({"minimum": -1}, "minimum"),
        ({"data": DataLoader(DATA, 2)}, "ElasticSampler"),
        ({"state": {"commpress": MODEL}}, "commpress"),
        ({"data": DataLoader(DATA, 4, sampler=ElasticSampler(DATA, 6))}, "same"),
        ({"process_group": None}, "not initialized"),
        ({"state": {"optimizer": torch.optim.SGD(MODEL.parameters())}}, "no module"),
    ],
)
def test_what_cannot_work_is_refused(options, named):
    rank = World().found(1)[0]
    usual = {
        "train_step": print,
        "state": {"model": MODEL},
        "data": Run().loader,
        "epochs": 1,
        "process_group": rank,
    }
    with pytest.raises(InvalidArgument, match=named):
        Elastic(**usual | options)


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph"])
def test_replicas_whose_calls_come_in_any_order_are_refused(name):
    ddp = SimpleNamespace(**{"find_unused_parameters": False, "static_graph": False, name: True})
    with pytest.raises(InvalidArgument, match=f"{name}=True and no hook"):
        check_ordered(ddp)


def test_a_group_over_mpi_is_refused_before_anything_is_trained(monkeypatch):
    """Not in its first fault, when the job is gone."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "commpress_mpi")
    rank = World().found(1)[0]
    rank.communicator = object()
    with pytest.raises(
        InvalidArgument, match=r"'commpress_mpi', over MPI, .*mpirun --with-ft ulfm.*'commpress'"
    ):
        Elastic(print, {"model": MODEL}, data=Run().loader, epochs=1, process_group=rank)


class Door(Rank):
    """Somebody always knocks here and never gets in."""

    @property
    def waiting(self):
        return 1


def test_a_newcomer_that_never_gets_in_does_not_keep_the_others_from_training(tmp_path):
    def knocks(world, rank, loop, run):
        world.ranks[0].__class__ = Door

    _, left, _ = survive(tmp_path, 2, during=knocks, pace=0.01)
    assert 1 <= max(loop.counters.reforms for loop, _ in left.values()) < 10


@pytest.mark.parametrize(("seconds", "times"), [(20.0, 5), (0.001, 1)])
def test_who_is_never_let_in_says_so(tmp_path, monkeypatch, seconds, times):
    """Not after the first attempt: those who were asked may have died just then; but not for longer
    than its timeout."""
    world, asked = World(), []

    def refuses(rank, said, age, joins):
        asked.append(joins)
        time.sleep(0.01)
        raise PeerFailure("nobody answers")

    monkeypatch.setattr(world, "reform", refuses)
    world.go(
        world.found(1),
        lambda rank: train(rank, world, tmp_path, join=True, timeout=timedelta(seconds=seconds)),
    )
    with pytest.raises(PeerFailure, match="nobody answers"):
        world.join()
    assert asked == [True] * times
