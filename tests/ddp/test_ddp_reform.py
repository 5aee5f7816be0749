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
        by_trial, by_plan, by_rank = (DistributedDataParallel(Net()) for _ in range(3))
        states = [
            commpress.compress(by_trial, "auto:int8"),
            commpress.compress(by_plan, PerLayer("int4", 2), min_numel=1),
            commpress.compress(by_rank, PerLayer("powersgd-4+fp8", 4), min_numel=1),
        ]
        every = [
            (model, torch.optim.SGD(model.parameters(), lr=0.05))
            for model in (by_trial, by_plan, by_rank)
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
        rules = [state.choice.state()["rules"] for state in states[1:]]
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
    assert all(one[3]), "codecs, and ranks of matrices"
    for mine, theirs in zip(one[4], two[4], strict=True):
        assert torch.equal(mine, theirs)
