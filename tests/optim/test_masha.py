"""MASHA on bilinear games: closed-form solutions, the extragradient method, bytes, resume, and what
is not finite."""

import copy
import random

import pytest
import torch
from torch import nn

import commpress
from commpress.collectives.transports.loopback import Loopback, simulate
from commpress.errors import InvalidArgument, Mismatch, NonFiniteGradient, StateMismatch
from variants import first

SIDE = 8  # matrices, for codecs of matrices
SIZE = SIDE * SIDE
ONE, TWO = commpress.RandomKCodec(2, unbiased=True), commpress.TopKCodec(1 / 4, 64)


def game(ranks):
    """A_i, b_i and c_i of every rank, and the solution. The mean of A is well conditioned; the
    ranks differ by much."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(ranks, SIZE, SIZE, generator=draw, dtype=torch.float64) / 8
    b, c = torch.randn(2, ranks, SIZE, generator=draw, dtype=torch.float64)
    left, _, right = torch.linalg.svd(a.mean(0))
    a += left @ torch.diag(torch.linspace(0.8, 1, SIZE, dtype=torch.float64)) @ right - a.mean(0)
    y = torch.linalg.solve(a.mean(0), -b.mean(0))
    x = torch.linalg.solve(a.mean(0).T, c.mean(0))
    return a.float(), b.float(), c.float(), torch.cat([x, y]).float()


class Player:
    """One rank: min over x, max over y of xᵀ·A·y + b·x − c·y."""

    def __init__(self, a, b, c, transport, *, dtype=torch.float32, **options):
        self.a, self.b, self.c, self.bad, self.asked = a, b, c, False, 0
        self.x, self.y = (nn.Parameter(torch.zeros(SIDE, SIDE, dtype=dtype)) for _ in "xy")
        groups = [{"params": [self.x]}, {"params": [self.y], "maximize": True}]
        if transport is not None:
            options["transport"] = transport
        self.optimizer = commpress.Masha(groups, min_numel=1, **options)

    def closure(self):
        self.x.grad = self.y.grad = None
        x, y = self.x.float().view(-1), self.y.float().view(-1)
        loss = x @ self.a @ y + self.b @ x - self.c @ y
        (loss * float("nan") if self.bad else loss).backward()
        self.asked += 1
        return loss.detach()

    @property
    def z(self):
        return torch.cat([self.x.detach().view(-1), self.y.detach().view(-1)])


class Players:
    def __init__(self, ranks, **options):
        *parts, self.solution = game(ranks)
        transports = Loopback(ranks).transports()
        self.ranks = [
            Player(*each, t, **options) for *each, t in zip(*parts, transports, strict=True)
        ]

    def play(self, steps):
        for _ in range(steps):
            taken = simulate([player.optimizer.steps(player.closure) for player in self.ranks])
            assert len(set(taken)) == 1
            assert all(torch.equal(self.ranks[0].z, player.z) for player in self.ranks)
        return self.ranks[0].z

    def error(self):
        return float((self.ranks[0].z - self.solution).norm() / self.solution.norm())


@pytest.mark.parametrize(
    ("codec", "lr", "tau", "below"),
    [
        (TWO, 0.3, 0.75, 0.08),
        (ONE, 0.2, 0.5, 0.15),
        ("int4", 0.3, 0.75, 0.08),
        ("powersgd-2", 0.2, 0.75, 0.06),
    ],
    ids=["MASHA2", "MASHA1", "int4", "powersgd-2"],
)
@pytest.mark.parametrize("ranks", first(1, [3, 1]))
def test_it_approaches_the_saddle_point_linearly(codec, lr, tau, below, ranks):
    players = Players(ranks, codec=codec, lr=lr, tau=tau)
    players.play(100)
    half = players.error()
    players.play(100)
    assert players.error() < below
    assert players.error() < 0.4 * half


def test_descent_and_ascent_at_once_diverge():
    """The same game without an anchor: each step turns around the solution and moves away from
    it."""
    a, b, c, solution = game(2)
    a, b, c = a.mean(0), b.mean(0), c.mean(0)
    x, y = torch.zeros(2, SIZE)
    for _ in range(200):
        x, y = x - 0.3 * (a @ y + b), y + 0.3 * (a.T @ x - c)
    assert float((torch.cat([x, y]) - solution).norm() / solution.norm()) > 10


@pytest.mark.parametrize("tau", [0.0, 0.6])
def test_without_compression_it_is_extragradient_with_an_anchor(tau):
    """In float64 from the mean game; with τ = 0 the method of Korpelevich."""
    players = Players(2, codec="none", lr=0.3, tau=tau, seed=5)
    a, b, c, _ = game(2)
    a, b, c = (part.double().mean(0) for part in (a, b, c))

    def operator(z):
        x, y = z.split(SIZE)
        return torch.cat([a @ y + b, c - a.T @ x])

    z = w = torch.zeros(2 * SIZE, dtype=torch.float64)
    for step in range(40):
        half = tau * z + (1 - tau) * w - 0.3 * operator(w)
        after = half - 0.3 * (operator(half) - operator(w))
        if tau == 0:
            torch.testing.assert_close(after, z - 0.3 * operator(z - 0.3 * operator(z)))
        z = after
        if random.Random(f"5 {step}").random() >= tau:
            w = z
        torch.testing.assert_close(players.play(1).double(), z, atol=2e-6, rtol=2e-5)


def test_bytes_are_those_of_the_codec_and_of_the_anchors():
    """Each exact exchange of 2·64 floats sends 256 bytes to the other rank and a header, twice;
    top-k a quarter and indices."""
    players = Players(2, codec=TWO, lr=0.3, tau=0.75)
    players.play(100)
    for player in players.ranks:
        counters = player.optimizer.counters
        moves = sum(random.Random(f"0 {step}").random() >= 0.75 for step in range(100))
        assert counters.steps == counters.compressed_rounds == 100
        assert counters.exact_rounds == 1 + moves
        assert player.asked == 1 + 100 + moves
        assert counters.exact_bytes == (1 + moves) * 2 * (64 + 4 * SIZE)
        assert 0 < counters.compressed_bytes < 100 * 2 * (64 + 4 * SIZE) / 1.5
        assert counters.wire_bytes <= player.optimizer.channel.sent_bytes


def test_every_rank_takes_the_same_steps_over_a_network(pool):
    results = pool.run(_over_sockets, 60)
    players = Players(2, codec=TWO, lr=0.3, tau=0.75)
    z = players.play(60)
    assert all(torch.equal(z, result) for result in results)


def _over_sockets(steps):
    *parts, _ = game(2)
    player = Player(
        *(part[torch.distributed.get_rank()] for part in parts), None, codec=TWO, lr=0.3, tau=0.75
    )
    for _ in range(steps):
        loss = player.optimizer.step(player.closure)
    assert torch.isfinite(loss)
    return player.z


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        (TWO, torch.float32),
        (ONE, torch.float32),
        ("powersgd-1", torch.float32),
        (TWO, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_resumed_run_goes_on_bit_for_bit(codec, dtype, at, tmp_path):
    whole = Players(2, codec=codec, lr=0.2, dtype=dtype)
    whole.play(at)
    for rank, player in enumerate(whole.ranks):
        torch.save([player.x, player.y, player.optimizer.state_dict()], tmp_path / str(rank))
    resumed = Players(2, codec=codec, lr=0.1, dtype=dtype)
    for rank, player in enumerate(resumed.ranks):
        x, y, state = torch.load(tmp_path / str(rank), weights_only=True)
        player.x.data.copy_(x)
        player.y.data.copy_(y)
        player.optimizer.load_state_dict(state)
    assert torch.equal(whole.play(12), resumed.play(12))
    for one, other in zip(whole.ranks, resumed.ranks, strict=True):
        was, now = (
            player.optimizer.state_dict()["commpress"]["residuals"] for player in (one, other)
        )
        assert all(torch.equal(was[key][name], now[key][name]) for key in was for name in was[key])


@pytest.mark.parametrize("size", [1, 3])
def test_states_of_all_ranks_go_on_at_another_number_of_ranks(size):
    """The anchor stays; what was owed is owed; the operators are asked for again."""
    saved = Players(2, codec=TWO, lr=0.3)
    z = saved.play(20)
    states = [player.optimizer.state_dict() for player in saved.ranks]
    resumed = Players(size, codec=TWO, lr=0.3)
    for player in resumed.ranks:
        player.x.data.copy_(z[:SIZE].view(SIDE, SIDE))
        player.y.data.copy_(z[SIZE:].view(SIDE, SIDE))
        player.optimizer.load_state_dict(*states)
        anchor = player.optimizer.state[player.x]["anchor"]
        assert torch.equal(anchor, saved.ranks[0].optimizer.state[saved.ranks[0].x]["anchor"])
    owed = [player.optimizer.exchanges.residuals.every() for player in saved.ranks]
    for key in owed[0]:
        total = (owed[0][key][0] + owed[1][key][0]) / 2 + torch.cat([each[key][1] for each in owed])
        assert total.any()
        for player in resumed.ranks:
            torch.testing.assert_close(player.optimizer.exchanges.residuals.every()[key][0], total)
    resumed.play(1)
    assert resumed.ranks[0].asked == 2 + (random.Random("0 20").random() >= 0.75)
    resumed.play(200)
    assert resumed.error() < 0.15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_half_precision_have_float32_weights(dtype):
    players = Players(2, codec=TWO, lr=0.3, dtype=dtype)
    players.play(150)
    assert players.error() < 0.15
    assert players.ranks[0].x.dtype == dtype


@pytest.mark.parametrize("at", [0, 6])
def test_a_rank_that_is_not_finite_makes_all_skip_and_leaves_no_trace(at, caplog):
    """At the first step, where the anchor is evaluated, and later."""
    players, undisturbed = (Players(2, codec=TWO, lr=0.3) for _ in range(2))
    players.play(at)
    before = [(player.z, player.optimizer.state_dict()) for player in players.ranks]
    players.ranks[1].bad = True
    players.play(2)
    for (z, state), player in zip(before, players.ranks, strict=True):
        assert torch.equal(z, player.z)
        assert player.optimizer.counters.skipped_steps == 2
        was, now = (
            state["commpress"]["residuals"],
            player.optimizer.state_dict()["commpress"]["residuals"],
        )
        assert all(torch.equal(was[key][name], now[key][name]) for key in was for name in was[key])
    players.ranks[1].bad = False
    assert torch.equal(players.play(10), undisturbed.play(at + 10))


def test_a_bad_operator_at_the_new_anchor_undoes_the_step():
    """With τ = 0 every step moves the anchor: what was exchanged before is discarded as well."""
    players = Players(2, codec=TWO, lr=0.3, tau=0.0)
    players.play(2)
    before = players.ranks[0].z
    owed = [player.optimizer.exchanges.residuals.every() for player in players.ranks]
    owed = [{key: [r.clone() for r in kept] for key, kept in each.items()} for each in owed]
    asked = players.ranks[1].closure

    def closure():
        players.ranks[1].bad = players.ranks[1].asked % 2 == 0  # the second evaluation of this step
        return asked()

    assert players.ranks[1].asked == 5
    players.ranks[1].closure = closure
    players.play(1)
    assert torch.equal(before, players.ranks[0].z)
    for player, was in zip(players.ranks, owed, strict=True):
        now = player.optimizer.exchanges.residuals.every()
        assert any(r.any() for kept in was.values() for r in kept)
        assert all(
            torch.equal(one, other)
            for key in was
            for one, other in zip(was[key], now[key], strict=True)
        )


def test_raise_says_it_and_changes_nothing():
    a, b, c, _ = game(1)
    player = Player(a[0], b[0], c[0], Loopback(1).transport(0), on_nonfinite="raise")
    player.bad = True
    with pytest.raises(NonFiniteGradient):
        player.optimizer.step(player.closure)
    assert not player.z.any()


def test_ranks_that_begin_apart_are_named():
    players = Players(3, codec=TWO)
    players.ranks[2].x.data[0, 0] = 1.0
    with pytest.raises(Mismatch, match=r"ranks \[2\] differ"):
        simulate([player.optimizer.steps(player.closure) for player in players.ranks])


def test_an_error_in_the_closure_puts_parameters_back():
    players = Players(1, codec=TWO)
    players.play(3)
    (player,) = players.ranks
    before = player.z

    def closure():
        player.closure()
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        player.optimizer.step(closure)
    assert torch.equal(before, player.z)


def test_what_makes_no_sense_is_refused():
    x = nn.Parameter(torch.zeros(8))
    for options, word in [
        ({"tau": 1.0}, "tau is 1.0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"on_nonfinite": "zero"}, "is 'zero'"),
    ]:
        with pytest.raises(InvalidArgument, match=word):
            commpress.Masha([x], **options)
    optimizer = commpress.Masha([x], transport=Loopback(1).transport(0))
    with pytest.raises(InvalidArgument, match="without a closure"):
        optimizer.step()
    with pytest.raises(InvalidArgument, match="add_param_group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(8))]})
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["anchor"]
    with pytest.raises(StateMismatch, match="has no anchor"):
        optimizer.load_state_dict(state)
    with pytest.raises(StateMismatch, match=r"Masha\.state_dict"):
        optimizer.load_state_dict(torch.optim.SGD([x]).state_dict())
