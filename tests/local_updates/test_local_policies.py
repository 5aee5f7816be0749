"""Policies of local updates against what others compute: numbers recorded from torchft, torch's
optimizers, their equations."""

import copy
import json
from math import cos, pi
from pathlib import Path

import numpy as np
import pytest
import torch

from commpress.codecs import policy_of
from commpress.collectives.pairwise import partners
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, Mismatch
from commpress.kernels.pieces import aligned
from commpress.optim.local_updates import LocalUpdates
from commpress.optim.outer import Average, Gossip, Nesterov
from commpress.schedules import QSR
from local_twin import RATE, Ranks, drawn, dyadic, equal, flat, noise

# ---------------------------------------------------------------- torchft

CASES = json.loads((Path(__file__).parent / "data" / "torchft_diloco.json").read_text())["cases"]
NUMEL = 2  # of each of three parameters


def begin():
    return [torch.tensor([((i * 5 + j * 7) % 13 - 6) / 8 for j in range(NUMEL)]) for i in range(3)]


def gradient(rank, step):
    return [
        torch.tensor([((rank * 7 + step * 5 + i * 11 + j * 3) % 17 - 8) / 16 for j in range(NUMEL)])
        for i in range(3)
    ]


@pytest.mark.parametrize("outer", ["ours", "torch"])
@pytest.mark.parametrize(
    "case", CASES, ids=lambda c: "-".join(str(v) for v in c.values() if not isinstance(v, list))
)
def test_it_computes_what_torchft_recorded(case, outer):
    """Recorded: every rank's parameters after every step of torchft's DiLoCo, SGD(0.25) inside,
    SGD(0.7, 0.9, Nesterov) out.

    torchft sends so many steps before a round ends, and takes in at its end; ours sends at the end,
    and takes in so many steps later. So ours begins that much earlier, with steps that move
    nothing.
    """
    rule = (
        Nesterov(0.7, 0.9)
        if outer == "ours"
        else lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)
    )
    size, delay = case["ranks"], case["fragment_sync_delay"]
    ranks = Ranks(
        size,
        start=begin(),
        every=case["sync_every"],
        fragments=case["fragments"],
        overlap=delay,
        outer=rule,
        alpha=case["fragment_update_alpha"],
    )
    still = [[torch.zeros(NUMEL) for _ in range(3)] for _ in range(size)]
    for _ in range(delay):
        ranks.step(still)
    recorded = np.array(case["weights"])
    for step in range(recorded.shape[1]):
        gradients = [gradient(r, step) for r in range(size)]
        ranks.step(gradients)
        ours = np.stack([flat(mine) for mine in ranks.parameters])
        np.testing.assert_allclose(ours, recorded[:, step], atol=1e-6)
        if size == 2 and outer == "torch":  # one sum of two numbers, one optimizer: the same bits
            np.testing.assert_array_equal(ours, recorded[:, step])
    assert (
        ranks.local[0].counters.exchanges
        == recorded.shape[1] * case["fragments"] // case["sync_every"]
    )


# ---------------------------------------------------------------- QSR and post-local SGD

INNER = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.1),
    "muon-like": lambda p: torch.optim.RMSprop(p, lr=RATE),
}
# lengths of rounds of a cosine over 60 steps from 0.25 to 0, α = 0.5: max(4, ⌊(0.5 / rate)²⌋) by
# hand, rate of the step before
GOLDEN = [4, 4, 4, 4, 5, 7, 11, 21]


def cosine(step, total=60):
    return RATE * (1 + cos(pi * step / total)) / 2


@pytest.mark.parametrize("inner", INNER)
def test_qsr_takes_its_rounds_with_any_inner_optimizer(inner):
    """Lengths of rounds, and the weights: those of torch's optimizers whose parameters are averaged
    at these steps."""
    ranks = Ranks(2, every=QSR(0.5, 4, total=60), inner=INNER[inner])
    twins = [[torch.nn.Parameter(p.clone()) for p in drawn(0)] for _ in range(2)]
    optimizers = [INNER[inner](twin) for twin in twins]
    lengths, last = [], 0
    for step in range(60):
        gradients = noise(2, step)
        for local, optimizer in zip(ranks.local, optimizers, strict=True):
            for group in (*local.param_groups, *optimizer.param_groups):
                group["lr"] = cosine(step)
        for twin, optimizer, g in zip(twins, optimizers, gradients, strict=True):
            for p, each in zip(twin, g, strict=True):
                p.grad = each.clone()
            optimizer.step()
        rounds = ranks.local[0].counters.rounds
        ranks.step(gradients)
        if ranks.local[0].counters.rounds > rounds:
            lengths.append(step + 1 - last)
            last = step + 1
            with torch.no_grad():
                for a, b in zip(*twins, strict=True):
                    mean = (a + b) / 2
                    a.copy_(mean)
                    b.copy_(mean)
    assert lengths == GOLDEN
    for mine, twin in zip(ranks.parameters, twins, strict=True):
        np.testing.assert_allclose(flat(mine), flat(twin), rtol=1e-4, atol=1e-4)


class Warmed(Ranks):
    """Ranks whose steps are ``step``'s own."""

    def step(self, gradients, tokens=None):
        for mine, given in zip(self.parameters, gradients, strict=True):
            for p, g in zip(mine, given, strict=True):
                p.grad = None if g is None else g.clone()
        simulate([local.stepping() for local in self.local])


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_warm_up_is_one_optimizer_on_mean_gradients_in_every_bit(inner, fragments):
    """Post-local SGD. Gradients are dyadic, so a mean of four is exact. Then ranks go their own
    ways, and meet by rounds."""
    ranks = Warmed(
        4, start=dyadic(0), exact_steps=5, every=3, inner=INNER[inner], fragments=fragments
    )
    twin = [torch.nn.Parameter(p.clone()) for p in dyadic(0)]
    optimizer = INNER[inner](twin)
    for step in range(5):
        gradients = noise(4, step, dyadic)
        ranks.step(gradients)
        for i, p in enumerate(twin):
            p.grad = sum(g[i] for g in gradients) / 4
        optimizer.step()
        for mine in ranks.parameters:
            assert equal(mine, twin)
    assert ranks.local[0].counters.exchanges == 0
    assert ranks.agree()
    np.testing.assert_array_equal(ranks.shared(), flat(twin))
    alone = []
    for r in range(4):
        own, theirs = [torch.nn.Parameter(p.detach().clone()) for p in twin], None
        theirs = INNER[inner](own)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in (5, 6, 7):
            for p, g in zip(own, noise(4, step, dyadic)[r], strict=True):
                p.grad = g
            theirs.step()
        alone.append(flat(own))
    for step in (5, 6, 7):
        ranks.step(noise(4, step, dyadic))
    assert ranks.local[0].counters.rounds == 1
    assert ranks.agree()
    if fragments == 1:
        np.testing.assert_allclose(ranks.shared(), np.mean(alone, axis=0), atol=1e-6)


def test_in_a_warm_up_bad_gradients_are_left_out_and_absent_ones_stay_absent(caplog):
    ranks = Warmed(3, exact_steps=4, inner=lambda p: torch.optim.SGD(p, lr=RATE))
    gradients = noise(3, 0)
    gradients[1][0][0, 0] = float("nan")
    gradients[0][1] = None
    for each in gradients:
        each[3] = None
    before = flat(ranks.parameters[0])
    ranks.step(gradients)
    one, _, three = gradients
    expected = [(one[0] + three[0]) / 2, three[1] / 2, (one[2] + three[2]) / 2, torch.zeros(300)]
    for mine in ranks.parameters:
        np.testing.assert_allclose(flat(mine), before - RATE * flat(expected), atol=1e-6)
        assert mine[3].grad is None
    assert "gradients of ranks [1]" in caplog.text
    assert [local.counters.dropped for local in ranks.local] == [1, 1, 1]
    bad = [[torch.full_like(g, float("inf")) for g in each] for each in noise(3, 1)]
    for mine, each in zip(ranks.parameters, bad, strict=True):
        for p, g in zip(mine, each, strict=True):
            p.grad = g
    simulate([local.synchronizing() for local in ranks.local])
    assert all(torch.isinf(p.grad).all() for mine in ranks.parameters for p in mine)


def test_ranks_that_warm_up_from_different_weights_are_named():
    ranks = Warmed(3, exact_steps=4)
    ranks.local[2].fragments[0].weights[7] += 1e-3
    with pytest.raises(Mismatch, match=r"the weights of ranks \[2\] differ .* in warm-up step 0"):
        ranks.step(noise(3, 0))


def test_a_whole_round_of_overlap_mixes_weights_or_keeps_what_was_trained():
    for size in (1, 2):
        with pytest.raises(InvalidArgument, match=r"overlap is 'round', expected a whole number"):
            Ranks(size, overlap="round")
        with pytest.raises(
            InvalidArgument,
            match=r"alpha is 0 and with every=4 an exchange overlaps with a whole round",
        ):
            Ranks(size, every=4, overlap=4, alpha=0)
        for given, alpha in ((None, 0.5), ("keep", None)):
            ranks = Ranks(size, every=4, overlap=4, alpha=given)
            for step in range(4):
                ranks.step(noise(size, step))
            assert (
                ranks.local[0].rounds.length,
                ranks.local[0].flight.due,
                ranks.local[0].flight.alpha,
            ) == (4, 8, alpha)
        with pytest.raises(InvalidArgument, match=r"alpha is 'hold' with overlap=4"):
            Ranks(size, every=4, overlap=4, alpha="hold")
        with pytest.raises(InvalidArgument, match=r"alpha is 'keep' with overlap=0"):
            Ranks(size, every=4, alpha="keep")


def test_a_warm_up_that_cannot_be_is_refused():
    for bad in (-1, 2.5, True):
        with pytest.raises(InvalidArgument, match="exact_steps"):
            Ranks(1, exact_steps=bad)
    ranks = Ranks(2, exact_steps=3)
    with pytest.raises(InvalidArgument, match=r"synchronize\(\) between backward"):
        ranks.step(noise(2, 0))


def test_two_optimizers_that_name_parameters_alike_keep_apart_what_is_owed():
    switch = Loopback(1)
    layers = [torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)]
    inner = [torch.optim.SGD(list(layer.named_parameters()), lr=RATE) for layer in layers]
    local = LocalUpdates(
        inner,
        every=1,
        outer=Average(),
        codec=policy_of("sign", min_numel=0),
        process_group=switch.transport(0),
    )
    sum(layer(torch.ones(40)).square().sum() for layer in layers).backward()
    local.step()
    assert len({name for (name, _), *_ in local.exchanges.residuals.places()}) == 4


def test_ranks_whose_loss_scales_differ_warm_up_as_one():
    """A GradScaler that overflowed on one rank: its gradients are left out, and it steps with the
    others."""
    ranks = Ranks(2, start=dyadic(0), exact_steps=3)
    scales = [64.0, 128.0]
    for step in range(3):
        gradients = noise(2, step, dyadic)
        for r, local in enumerate(ranks.local):
            for p, g in zip(ranks.parameters[r], gradients[r], strict=True):
                p.grad = g * scales[r]
            local.grad_scale, local.found_inf = (
                torch.tensor(scales[r]),
                torch.tensor(float(step == 1 and r == 1)),
            )
        if step == 1:
            ranks.parameters[1][0].grad[0, 0] = float("inf")
        before, mine = flat(ranks.parameters[0]), [flat(g) for g in gradients]
        simulate([local.stepping() for local in ranks.local])
        wanted = before - RATE * (mine[0] if step == 1 else (mine[0] + mine[1]) / 2)
        for parameters in ranks.parameters:
            np.testing.assert_array_equal(flat(parameters), wanted)


# ---------------------------------------------------------------- gossip


class Pairs:
    """NoLoCo in float64: partners as ``partners`` draws them, momentum, and the pull of a pair's
    shared weights."""

    def __init__(self, size, lr=0.7, momentum=0.9):
        self.theta = np.tile(flat(drawn(0)), (size, 1))
        self.shared, self.m, self.round, self.lr, self.momentum = (
            self.theta.copy(),
            np.zeros_like(self.theta),
            0,
            lr,
            momentum,
        )

    def step(self, gradients):
        self.theta -= RATE * np.stack([flat(g) for g in gradients])

    def exchange(self, weights=None):
        mine = partners(self.round, len(self.theta))
        assert sum(partner == r for r, partner in enumerate(mine)) == len(mine) % 2
        weights = np.ones(len(mine)) if weights is None else np.asarray(weights, float)
        m, shared = self.m.copy(), self.shared.copy()
        for i, j in enumerate(mine):
            if weights[i] + weights[j] > 0:
                pair = [i, j]
                # ascent
                change = np.average((self.theta - self.shared)[pair], axis=0, weights=weights[pair])
                pull = np.average(self.shared[pair], axis=0, weights=weights[pair]) - self.shared[i]
                m[i] = self.momentum * self.m[i] + self.lr * change + self.lr * pull
                shared[i] = self.shared[i] + m[i]
        self.m, self.shared, self.round = m, shared, self.round + 1
        self.theta = shared.copy()


def own(ranks):
    return np.stack(
        [
            np.concatenate([f.weights.double().numpy() for f in local.fragments])
            for local in ranks.local
        ]
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 9])
def test_gossip_is_what_its_equations_say_and_ends_in_one_mean(size):
    ranks, twin = Ranks(size, outer=Gossip(0.7, 0.9), every=2), Pairs(size)
    for step in range(8):
        gradients = noise(size, step)
        ranks.step(gradients)
        twin.step(gradients)
        if step % 2:
            twin.exchange()
            np.testing.assert_allclose(own(ranks), twin.shared, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(
                [flat(mine) for mine in ranks.parameters], twin.shared, rtol=1e-4, atol=1e-4
            )
    assert ranks.agree() == (size < 3)  # two always meet each other
    assert [local.counters.spread > 0 for local in ranks.local] == [
        partners(3, size)[r] != r for r in range(size)
    ]
    mean = own(ranks).mean(axis=0)
    ranks.drain()
    assert ranks.agree()
    np.testing.assert_allclose(own(ranks)[0], mean, atol=1e-5)
    for mine in ranks.parameters:
        np.testing.assert_array_equal(flat(mine), own(ranks)[0].astype(np.float32))
    assert "pair's mean weights" in ranks.local[0].report()


def test_partners_are_drawn_anew_and_every_pair_meets():
    for size in range(1, 10):
        met = set()
        for key in range(200):
            mine = partners(key, size)
            assert [mine[partner] for partner in mine] == list(range(size))
            met |= {(r, partner) for r, partner in enumerate(mine)}
        assert len({r for r, _ in met}) == size
        assert all((a, b) in met for a in range(size) for b in range(size) if a != b)


def test_a_gossip_partner_that_is_not_finite_is_left_out(caplog):
    ranks, twin = Ranks(3, outer=Gossip(), every=2), Pairs(3)
    bad = next(r for r, partner in enumerate(partners(0, 3)) if partner != r)
    for step in range(2):
        gradients = noise(3, step)
        twin.step(gradients)
        if step == 1:
            gradients[bad][1][:] = float("nan")
        ranks.step(gradients)
    twin.theta[bad] = 0
    twin.exchange([float(r != bad) for r in range(3)])
    np.testing.assert_allclose(own(ranks), twin.shared, rtol=1e-4, atol=1e-4)
    assert f"ranks [{bad}]" in caplog.text
    everybody = [[torch.full_like(g, float("inf")) for g in each] for each in noise(3, 2)]
    before = own(ranks)
    ranks.step(noise(3, 2))
    ranks.step(everybody)
    np.testing.assert_array_equal(own(ranks), before)
    for mine, shared in zip(ranks.parameters, before, strict=True):
        np.testing.assert_array_equal(flat(mine), shared)


def test_gossip_sends_its_weights_to_one_rank():
    ranks = Ranks(4, outer=Gossip(), every=1)
    ranks.step(noise(4, 0))
    numel = sum(p.numel() for p in ranks.parameters[0])
    sent = [local.channel.sent_bytes for local in ranks.local]
    assert sent == [aligned(4 * numel) + 64] * 4


@pytest.mark.parametrize("size", [1, 2, 5])
def test_gossip_goes_on_on_another_number_of_ranks_from_the_mean(size):
    ranks = Ranks(3, outer=Gossip(), every=2, fragments=2)
    for step in range(5):
        ranks.step(noise(3, step))
    shared, theta = own(ranks), np.stack([flat(mine) for mine in ranks.parameters])
    momentum = np.stack(
        [
            np.concatenate([f.state["momentum"].numpy() for f in local.fragments])
            for local in ranks.local
        ]
    )
    states = simulate([local.elastic_steps() for local in ranks.local])
    np.testing.assert_array_equal(own(ranks), shared)
    other = Ranks(size, outer=Gossip(), every=2, fragments=2)
    for local in other.local:
        local.load_state_dict(*copy.deepcopy(states))
    assert other.agree()
    np.testing.assert_allclose(own(other)[0], shared.mean(axis=0), atol=1e-5)
    carried = np.concatenate([f.state["momentum"].numpy() for f in other.local[-1].fragments])
    np.testing.assert_allclose(carried, momentum.mean(axis=0), atol=1e-5)
    for mine in other.parameters:
        np.testing.assert_allclose(flat(mine), theta.mean(axis=0), atol=1e-5)
    other.step(noise(size, 5))
    other.drain()
    assert other.agree()


def test_what_gossip_cannot_do_is_refused():
    for size in (1, 3):
        with pytest.raises(InvalidArgument, match="expected None: pairs exchange weights"):
            Ranks(size, outer=Gossip(), codec="int4")
    with pytest.raises(InvalidArgument, match="lr"):
        Gossip(lr=0)
    with pytest.raises(InvalidArgument, match="momentum"):
        Gossip(momentum=1.0)


def test_gossiping_ranks_that_would_not_meet_are_named():
    ranks = Ranks(3, outer=Gossip(), every=2)
    ranks.local[1].exchanged = 5
    ranks.step(noise(3, 0))
    with pytest.raises(Mismatch, match=r"ranks \[1\] are not where rank 0 is") as caught:
        ranks.step(noise(3, 1))
    assert caught.value.ranks == (1,)


def test_after_a_drain_gossip_goes_on_on_other_ranks_from_one_mean_with_momenta_of_their_own():
    ranks = Ranks(3, outer=Gossip(), every=2)
    for step in range(4):
        ranks.step(noise(3, step))
    ranks.drain()
    states = simulate([local.saving() for local in ranks.local])
    other = Ranks(2, outer=Gossip(), every=2)
    for local in other.local:
        local.load_state_dict(*copy.deepcopy(states))
    assert other.agree()
    assert other.local[0].digest() == ranks.local[0].digest()
    for r, local in enumerate(other.local):
        assert torch.equal(
            local.fragments[0].state["momentum"], ranks.local[r].fragments[0].state["momentum"]
        )
    other.step(noise(2, 4))
