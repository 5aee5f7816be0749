"""The hook among other ranks: a backward that failed leaves DDP usable, and what survivors owe
stays owed."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.choice import PerLayer, methods_of, steps_of_trial
from commpress.collectives.transports.factory import own_transport
from commpress.errors import CommunicationError, InvalidArgument
from commpress.integrations.process_group.group_options import GroupOptions
from group_calls import as_world
from new_ranks import changes
from ranks import caught
from variants import first

TRIAL = steps_of_trial(methods_of("auto:int8"))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(40, 300), torch.nn.Linear(300, 10)

    def forward(self, x):
        return self.right(torch.relu(self.left(x)))


class Cut:
    """Fails the so-and-so-manieth message of a channel, and tells the peers."""

    def __init__(self, channel, after):
        self.inner, self.after = channel.transport.inner, after
        for name in ("all_to_all", "all_gather", "exchange"):
            setattr(self, name, self._wrapped(getattr(self.inner, name)))

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def _wrapped(self, call):
        def one(*args):
            self.after -= 1
            if self.after < 0:
                self.inner.abandon("the plug was pulled")
                raise CommunicationError("the plug was pulled")
            return call(*args)

        return one


def start(codec, options, ddp):
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.02, **ddp)
    state = commpress.compress(model, codec, **options)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.05)


def step(model, optimizer, rank, number, accumulate=1):
    """Gradients and a step; the loss."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    optimizer.zero_grad()
    for _ in range(accumulate - 1):
        with model.no_sync():
            model(torch.randn(8, 40, generator=generator)).square().mean().backward()
    loss = model(torch.randn(8, 40, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


def lose_the_last(codec, after, options, ddp, accumulate):
    """Three steps of three ranks; the last pulls the plug in the fourth; the others take it again,
    and two more."""
    rank = dist.get_rank()
    model, state, optimizer = start(codec, options, ddp)
    for number in range(3):
        step(model, optimizer, rank, number, accumulate)
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 2:
        state.channel.transport.stand_for(Cut(state.channel, after))
    error = caught(step, model, optimizer, rank, 3, accumulate)
    unharmed = error is not None and all(
        torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
    )
    two = dist.new_group([0, 1])
    if rank == 2:
        return type(error), None
    state.channel.reform(own_transport(two))
    state.reform(changes({0, 1}, 0, 3)[rank])()
    said = state.step
    for number in range(3, 6):
        step(model, optimizer, rank, number, accumulate)
    state.channel.close()
    owed = [sent.clone() for _, sent, _ in state.residuals.places()]
    return type(error), (
        unharmed,
        said,
        [p.detach().clone() for p in model.parameters()],
        owed,
        state.counters.lost_ranks,
    )


KINDS = [
    ("int4", {}, {}, 1),
    ("sign", {"exact_steps": 1}, {"static_graph": True}, 1),
    ("int8", {}, {}, 2),
    ("powersgd-2", {}, {"gradient_as_bucket_view": True}, 1),
]


@pytest.mark.parametrize("after", first(1, [1, 0]))
@pytest.mark.parametrize(
    ("codec", "options", "ddp", "accumulate"),
    KINDS,
    ids=["int4", "static graph", "accumulation of changes", "matrices"],
)
def test_a_backward_that_failed_leaves_ddp_usable(pool, codec, after, options, ddp, accumulate):
    """Weights as they were, the error as it is, and the same step again among those who are
    left."""
    *two, (last, _) = pool.run(lose_the_last, codec, after, options, ddp, accumulate, size=3)
    assert last is CommunicationError
    for kind, (unharmed, said, weights, owed, lost) in two:
        assert issubclass(kind, CommunicationError)
        assert unharmed
        assert said == 3
        assert lost == 1
        assert all(torch.isfinite(p).all() for p in owed)
        for mine, other in zip(weights, two[0][1][2], strict=True):
            assert torch.equal(mine, other)


def grow(codec, options):
    """Two ranks train, one alone; then three together, the newcomer with the others' weights."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    torch.manual_seed(rank // 2)
    model = DistributedDataParallel(Net(), bucket_cap_mb=0.02, process_group=groups[rank // 2])
    state = commpress.compress(model, codec, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(3):
        step(model, optimizer, rank, number)
    model(torch.randn(8, 40))  # DDP forms its buckets anew
    state.channel.reform(own_transport(None))
    state.reform(changes({0, 1}, 1, 2)[rank])()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    for number in range(3, 6):
        step(model, optimizer, rank, number)
    state.channel.close()
    return state.step, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("codec", "options"),
    [("int4", {}), ("powersgd-2", {})],
    ids=str,
)
def test_a_newcomer_trains_with_the_others(pool, codec, options):
    first, *others = pool.run(grow, codec, options, size=3)
    assert first[0] == 6
    for other in others:
        assert other[0] == 6
        for mine, theirs in zip(other[1], first[1], strict=True):
            assert torch.equal(mine, theirs)


def refused():
    state = commpress.CompressedState("int4", topology="2x1")
    return [caught(state.reform, changes({0, 1}, 0, 2)[dist.get_rank()])]


def test_a_topology_is_refused(pool):
    for (error,) in pool.run(refused):
        assert isinstance(error, InvalidArgument)
        assert (
            "CompressedState cannot go on: topology names ranks that were. Construct it anew"
            in str(error)
        )


# ---------------------------------------------------------------- with a group that reforms


def lose_and_go_on(file):
    """A hook, an optimizer that overlaps, local updates and a group that compresses: rank 2 dies,
    the others go on."""

    def run():
        group, rank = dist.group.WORLD, dist.get_rank()
        torch.manual_seed(0)
        hooked, overlapped, plain = (DistributedDataParallel(Net()) for _ in range(3))
        state = commpress.compress(hooked, "int4")
        one_bit = commpress.OneBitAdam(overlapped.parameters(), exact_steps=2)
        commpress.overlap(overlapped, one_bit)
        sgd = torch.optim.SGD(hooked.parameters(), lr=0.05)
        own = torch.optim.SGD(plain.parameters(), lr=0.05)
        bare = Net()
        local = commpress.LocalUpdates(torch.optim.SGD(bare.parameters(), lr=0.05), every=2)
        every = [(hooked, sgd), (overlapped, one_bit), (plain, own), (bare, local)]
        for number in range(5):
            for model, optimizer in every:
                step(model, optimizer, rank, number)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert isinstance(caught(step, hooked, sgd, rank, 5), CommunicationError)
        group.reform()
        for number in range(5, 9):
            for model, optimizer in every:
                step(model, optimizer, rank, number)
        local.drain()
        lost = (
            state.counters.lost_ranks,
            one_bit.counters.lost_ranks,
            local.counters.lost_ranks,
            group.counters.lost_ranks,
        )
        assert group.reducer.counters.compressed_calls
        return (
            lost,
            state.step,
            [p.detach().clone() for model, _ in every for p in model.parameters()],
        )

    return as_world("commpress", file, run, seconds=20.0, pg_options=GroupOptions("int8", 1))


def test_survivors_of_a_group_go_on_with_all_their_objects(mortal, tmp_path):
    one, two, _ = mortal.outcomes(lose_and_go_on, str(tmp_path / "file"), size=3, lost=[2])
    assert one[:2] == two[:2] == ((1, 1, 1, 1), 9)
    for mine, theirs in zip(one[2], two[2], strict=True):
        assert torch.equal(mine, theirs)


def lose_and_choose(file, tried_out):
    """Codecs by trial and by plan: rank 2 dies in the middle of the trial, or after it; the others
    choose alike."""

    def run():
        group, rank = dist.group.WORLD, dist.get_rank()
        torch.manual_seed(0)
        by_trial, by_plan = (DistributedDataParallel(Net()) for _ in range(2))
        states = [
            commpress.compress(by_trial, "auto:int8"),
            commpress.compress(by_plan, PerLayer("int4", 2), min_numel=1),
        ]
        every = [
            (model, torch.optim.SGD(model.parameters(), lr=0.05)) for model in (by_trial, by_plan)
        ]
        before = TRIAL + 2 if tried_out else 5
        for number in range(before):
            for model, optimizer in every:
                step(model, optimizer, rank, number)
        chosen = [state.counters.choice for state in states]
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert isinstance(caught(step, *every[0], rank, before), CommunicationError)
        group.reform()
        kept = states[0].counters.choice == chosen[0]
        for number in range(before, before + TRIAL + 3):
            for model, optimizer in every:
                step(model, optimizer, rank, number)
        rules = states[1].choice.state()["rules"]
        choice = [state.counters.choice for state in states]
        return (
            chosen[0],
            kept,
            choice,
            rules,
            [p.detach().clone() for model, _ in every for p in model.parameters()],
        )

    return as_world("commpress", file, run, seconds=20.0)


@pytest.mark.parametrize("tried_out", first(1, [False, True]), ids=["in a trial", "after it"])
def test_survivors_choose_codecs_alike(mortal, tmp_path, tried_out):
    one, two, _ = mortal.outcomes(
        lose_and_choose, str(tmp_path / "file"), tried_out, size=3, lost=[2]
    )
    assert not isinstance(one, Exception), str(one)
    assert bool(one[0]) == tried_out, "the trial"
    assert one[1] == two[1] == True  # noqa: E712
    assert one[2] == two[2]
    assert all(one[2]), "the trial that began anew has ended, and codecs were planned again"
    assert one[2][0] == one[0] or not tried_out, "what was chosen stays"
    assert one[3] == two[3]
    assert one[3]
    for mine, theirs in zip(one[4], two[4], strict=True):
        assert torch.equal(mine, theirs)
