"""MASHA on a bilinear game: two models, each with its own hook and state, in one backward,
compressed both ways.

    min over x, max over y of mean_i ( xᵀ·Aᵢ·y + bᵢ·x − cᵢ·y )

Around an anchor w, whose full operator F(w) is known, only F_i(z½) − F_i(w) is exchanged, and
compressed:

    z½ = (1 − τ)·z + τ·w − γ·F(w)  z ← z½ − γ·reduced( F_i(z½) − F_i(w) )   w ← z with probability τ

The hooks are the usual ones: top-k with error feedback at both ends (MASHA2), unbiased one-of-two
without (MASHA1).
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from test_masha import game
from variants import seldom

SIZE, RANKS = 64, 2


class Player(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.at = torch.nn.Parameter(torch.zeros(SIZE))

    def forward(self):
        return self.at * 1.0


def masha(codec, gamma, tau, steps):
    rank, coin = dist.get_rank(), torch.Generator().manual_seed(7)
    a, b, c, solution = game(RANKS)
    a, b, c = a[rank], b[rank], c[rank]

    def operator(z):
        x, y = z.split(SIZE)
        return torch.cat([a @ y + b, c - a.T @ x])

    def mean(v):
        v = v.clone()
        dist.all_reduce(v)
        return v / RANKS

    players = [DistributedDataParallel(Player()) for _ in "xy"]
    states = [
        commpress.compress(p, codec, min_numel=1, seed=i, measure_every=0)
        for i, p in enumerate(players)
    ]
    z = torch.zeros(2 * SIZE)
    w, local = z.clone(), operator(z)
    full = mean(local)
    for _ in range(steps):
        half = (1 - tau) * z + tau * w - gamma * full
        for player, part in zip(players, half.split(SIZE), strict=True):
            player.module.at.data.copy_(part)
            player.zero_grad()
        x, y = (player() for player in players)
        known_x, known_y = local.split(SIZE)
        loss = x @ (a @ y.detach() + b - known_x) + y @ (c - a.T @ x.detach() - known_y)
        loss.backward()
        z = half - gamma * torch.cat([player.module.at.grad for player in players])
        if torch.rand((), generator=coin) < tau:
            w, local = z.clone(), operator(z)
            full = mean(local)
    counters = [state.counters for state in states]
    return {
        "z": z,
        "error": float((z - solution).norm() / solution.norm()),
        "compressed": [one.compressed_elements for one in counters],
    }


@pytest.mark.parametrize(
    ("codec", "gamma", "tau", "below"),
    [
        seldom(commpress.TopKCodec(1 / 4, 64), 0.3, 0.25, 1e-3),
        (commpress.RandomKCodec(2, unbiased=True), 0.2, 0.5, 3e-2),
    ],
    ids=["MASHA2", "MASHA1"],
)
def test_two_players_with_two_states_find_the_saddle_point(pool, codec, gamma, tau, below):
    results = pool.run(masha, codec, gamma, tau, 500)
    assert torch.equal(results[0]["z"], results[1]["z"])
    assert results[0]["error"] < below
    assert results[0]["compressed"] == [500 * SIZE] * 2


@pytest.mark.slow
def test_without_compression_it_is_extragradient(pool):
    results = pool.run(masha, "none", 0.3, 0.25, 500)
    assert results[0]["error"] < 1e-3
    assert results[0]["compressed"] == [0, 0]
