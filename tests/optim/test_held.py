"""Parameters that lie on one rank each, beside those that all hold: optimizers leave them to their
rank, or refuse them."""

import copy
from functools import partial

import pytest
import torch

import commpress
from commpress.collectives.transports.loopback import Loopback
from commpress.errors import InvalidArgument
from commpress.optim.layout import Held, held_of, is_held, mark_held
from optim_twin import Replicas, equal

SHAPES = ((40, 20), (7,), (3, 10))  # the last one is of experts
FROZEN = 8  # steps of warm-up; the expert's first gradient comes later
SIZE = 3

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1, "exact_steps": FROZEN}
OPTIMIZERS = {
    "onebit": partial(commpress.OneBitAdam, **OPTIONS),
    "zero_one": partial(commpress.ZeroOneAdam, **OPTIONS, sync=4),
    "sharded": partial(commpress.ShardedOneBitAdam, **OPTIONS),
    "sharded_zero_one": partial(commpress.ShardedZeroOneAdam, **OPTIONS, sync=4),
}


def marked(make, **options):
    def build(parameters, transport):
        mark_held(parameters[-1], range(transport.size), (transport.rank,), transport.rank)
        return make(parameters, transport=transport, **options)

    return build


def gradients(step, *, size=SIZE, first=0):
    """Of every rank; its own of the experts, from step ``first`` on."""
    draw = torch.Generator().manual_seed(step)
    common = [torch.randn(shape, generator=draw) for shape in SHAPES[:-1]]
    found = []
    for _ in range(size):
        mine = [c + 0.3 * torch.randn(c.shape, generator=draw) for c in common]
        own = torch.randn(SHAPES[-1], generator=draw)
        found.append([*mine, own if step >= first else torch.zeros(SHAPES[-1])])
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_on_one_rank_is_stepped_by_adam_in_every_bit(kind, dtype):
    """Routed to for the first time long after the freeze, too; what all hold stays equal on all."""
    if dtype == torch.bfloat16 and kind.startswith("sharded"):
        dtype = torch.float32
    ranks = Replicas(marked(OPTIMIZERS[kind]), SIZE, SHAPES, dtype=dtype)
    twins = [torch.nn.Parameter(p[-1].detach().float().clone()) for p in ranks.parameters]
    adams = [torch.optim.AdamW([p], lr=1e-2, weight_decay=0.1, fused=True) for p in twins]
    for step in range(24):
        given = gradients(step, first=FROZEN + 4)
        assert all(ranks.step(given))
        for rank, (twin, adam) in enumerate(zip(twins, adams, strict=True)):
            twin.grad = given[rank][-1].to(dtype).float()
            adam.step()
    for rank, twin in enumerate(twins):
        assert torch.equal(ranks.parameters[rank][-1], twin.detach().to(dtype))
        state = ranks.optimizers[rank].state[ranks.parameters[rank][-1]]
        assert torch.equal(state["exp_avg"], adams[rank].state[twin]["exp_avg"])
        assert torch.equal(
            ranks.optimizers[rank].replicated()[0], ranks.optimizers[0].replicated()[0]
        )
    assert not torch.equal(twins[0], twins[1])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_rest_moves_as_if_there_were_no_experts(kind):
    with_experts = Replicas(marked(OPTIMIZERS[kind]), SIZE, SHAPES)
    without = Replicas(lambda p, t: OPTIMIZERS[kind](p, transport=t), SIZE, SHAPES[:-1])
    for step in range(20):
        given = gradients(step)
        with_experts.step(given)
        without.step([mine[:-1] for mine in given])
    for ours, twin in zip(with_experts.parameters[1], without.parameters[1], strict=False):
        assert torch.equal(ours, twin)
    more = (
        with_experts.optimizers[0].counters.wire_bytes - without.optimizers[0].counters.wire_bytes
    )
    assert 0 < more <= 20 * 2 * 128  # a number for each step that sends


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_infinite_gradient_of_an_expert_leaves_the_step_out_on_all_ranks(kind):
    ranks = Replicas(marked(OPTIMIZERS[kind]), SIZE, SHAPES)
    for step in range(3):
        ranks.step(gradients(step))
    before = copy.deepcopy(ranks.parameters)
    given = gradients(3)
    given[1][-1][0, 0] = torch.inf
    assert ranks.step(given) == [False] * SIZE
    assert equal(ranks.parameters, before)


@pytest.mark.parametrize("kind", ["onebit", "zero_one", "sharded"])
def test_one_factor_clips_all_ranks_by_the_norm_of_everything(kind):
    """In exact steps it is that of one process which has the mean gradients and every rank's
    experts."""
    ranks = Replicas(marked(OPTIMIZERS[kind], max_grad_norm=0.5), SIZE, SHAPES)
    twin = [torch.nn.Parameter(p.detach().clone()) for p in ranks.parameters[0][:-1]]
    twin += [torch.nn.Parameter(p[-1].detach().clone()) for p in ranks.parameters]
    adam = torch.optim.AdamW(twin, lr=1e-2, weight_decay=0.1, eps=1e-8)
    for step in range(4):
        given = gradients(step)
        ranks.step(given)
        for i, p in enumerate(twin):
            p.grad = (
                sum(mine[i] for mine in given) / SIZE
                if i < len(SHAPES) - 1
                else given[i - len(SHAPES) + 1][-1].clone()
            )
        torch.nn.utils.clip_grad_norm_(twin, 0.5)
        adam.step()
    for rank, parameters in enumerate(ranks.parameters):
        for ours, theirs in zip(parameters, [*twin[:2], twin[2 + rank]], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-6)


def test_a_state_of_torchs_adam_is_taken_up():
    (parameters,) = Replicas(marked(OPTIMIZERS["onebit"]), 1, SHAPES).parameters
    adam = torch.optim.AdamW(parameters, lr=1e-2)
    for p, g in zip(parameters, gradients(0, size=1)[0], strict=True):
        p.grad = g
    adam.step()
    mark_held(parameters[-1], (0, 1), (0,), 0)
    ours = commpress.OneBitAdam(parameters, transport=Loopback(2).transport(0))
    ours.load_state_dict(adam.state_dict())
    assert torch.equal(ours.state[parameters[-1]]["exp_avg"], adam.state[parameters[-1]]["exp_avg"])
    assert ours.steps_done == 1


def test_others_refuse_them_on_one_rank_as_on_many():
    parameter = torch.nn.Parameter(torch.randn(4, 4))
    mark_held(parameter, (0,), (0,), 0)
    refusing = {
        "OneBitLamb": lambda: commpress.OneBitLamb([parameter], transport=Loopback(1).transport(0)),
        "Partitioned": lambda: commpress.Partitioned([parameter], torch.optim.AdamW),
    }
    for name, make in refusing.items():
        with pytest.raises(InvalidArgument, match=f"divided among ranks.*and {name}"):
            make()


def test_who_averages_what():
    """Experts 0, 1 on ranks 0, 1, and the same on ranks 2, 3."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert held_of(parameter) is None
    mark_held(parameter, (0, 1), (0,), 0)
    assert held_of(parameter) == Held((0, 1), (0,), 0)
    assert is_held("w", parameter, (0, 1))
    assert not is_held("w", parameter, (0, 2))  # these have the same
    with pytest.raises(InvalidArgument, match=r"ranks \[2, 3\] train with them.*replicas="):
        is_held("w", parameter, (0, 1, 2, 3))
    mark_held(parameter, (0, 1), (0, 2), 0)
    assert is_held("w", parameter, (0, 1, 2, 3))
    with pytest.raises(InvalidArgument, match=r"ranks \[3, 4, 5\]"):
        is_held("w", parameter, range(6))
