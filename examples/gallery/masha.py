"""MASHA (arXiv 2110.03313): min-max games over a slow network, compressed both ways.

    z½ = τ·z + (1 − τ)·w − γ·F(w)        c = mean of Q( F_i(z½) − F_i(w) )        z ← z½ − γ·c
    with probability 1 − τ, the same coin on all ranks:  w ← z, and F(w) := exact mean of F_i(w)

F_i is the gradient on this rank's data, with the sign changed for the maximizing player. All ranks
know F(w) of the anchor w. Each player is a model under DDP with its own hook: a linear term
−⟨z, F_i(w)⟩ added to the loss makes the hook average the differences. An unbiased codec without
error feedback (``RandomKCodec(2, unbiased=True)``) gives MASHA1; a biased one with error feedback
at both ends (top-k, ``int4``, PowerSGD) MASHA2. With the identity as Q and τ = 0 it is the
extragradient method.

    torchrun --nproc-per-node 2 examples/gallery/masha.py
    torchrun --nproc-per-node 2 examples/gallery/masha.py --codec int4 --tau 0.5

The game is min over x, max over y of mean_i ( xᵀ·Aᵢ·y + bᵢ·x − cᵢ·y ). Simultaneous descent and
ascent diverge from its solution; the extragradient method and MASHA converge, MASHA with fewer
bytes. A step that is not finite on some rank is left out on all of them.
"""

import argparse
import contextlib
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import commpress

SIDE = 8  # x and y are matrices, for codecs of matrices
SIZE = SIDE * SIDE


class Masha:
    """Train two players, the modules ``minimizer`` and ``maximizer``, with all their parameters.

    ``step(loss)``: the function calls the ``players``, which are these modules under DDP, and
    returns the loss of all data of this rank. It is called once or twice in a step, at points
    chosen by the method.

    - ``lr``: γ, about √(1 − τ) / L for operators with Lipschitz constant L, less for coarser
      codecs.
    - ``tau``: τ, the share of steps that send only compressed differences.
    """

    def __init__(
        self, minimizer, maximizer, *, lr=0.3, tau=0.75, codec="topk-16", seed=0, min_numel=256
    ):
        if not 0 <= tau < 1:
            raise ValueError(f"tau is {tau}, expected at least 0 and below 1: the anchor must move")
        self.lr, self.tau, self.seed, self.steps, self.skipped = lr, tau, seed, 0, 0
        self.players = [DistributedDataParallel(player) for player in (minimizer, maximizer)]
        self.hooks = [
            commpress.compress(player, codec, min_numel=min_numel) for player in self.players
        ]
        self.parameters = [p for player in self.players for p in player.parameters()]
        first, second = (
            torch.ones(sum(p.numel() for p in player.parameters())) for player in self.players
        )
        self.signs = torch.cat([first, -second])
        self.anchor = self.own = self.mean = None  # w, F_i(w) and F(w)
        self.exact_bytes = 0  # of anchors, sent by a ring

    def step(self, loss):
        """Take one step, unless some rank's gradients are not finite; return whether it was
        taken."""
        z = self.point()
        if self.anchor is None and not self.move_anchor(loss, z):
            self.skipped += 1
            return False
        half = self.tau * z + (1 - self.tau) * self.anchor - self.lr * self.mean
        self.go(half)
        before = [hook.counters.skipped_steps for hook in self.hooks]
        change = self.operator(loss, known=self.own)
        if before != [hook.counters.skipped_steps for hook in self.hooks]:
            self.go(z)
            self.skipped += 1
            return False
        z = half - self.lr * change
        self.go(z)
        if random.Random(f"{self.seed} {self.steps}").random() >= self.tau:
            self.move_anchor(loss, z)
        self.steps += 1
        return True

    def move_anchor(self, loss, z):
        """Set w ← z, unless F(z) is not finite, on all ranks alike."""
        own = self.operator(loss)
        mean = own.clone()
        dist.all_reduce(mean)
        ranks = dist.get_world_size()
        self.exact_bytes += 2 * (ranks - 1) * mean.nbytes // ranks
        if not mean.isfinite().all():
            return False
        self.anchor, self.own, self.mean = z, own, mean / ranks
        return True

    def operator(self, loss, known=None):
        """Return F_i at the parameters; with ``known`` the compressed mean of F_i − known."""
        for p in self.parameters:
            p.grad = None
        with contextlib.ExitStack() as stack:
            if known is None:
                for player in self.players:
                    stack.enter_context(player.no_sync())
            value = loss(*self.players)
            if known is not None:
                value = value - parameters_to_vector(self.parameters) @ (self.signs * known)
            value.backward()
        return self.signs * parameters_to_vector([p.grad for p in self.parameters])

    def point(self):
        return parameters_to_vector(self.parameters).detach().clone()

    def go(self, z):
        with torch.no_grad():
            vector_to_parameters(z, self.parameters)

    def state_dict(self):
        """Return this rank's state without the weights: each rank saves and loads its own."""
        names = ("steps", "skipped", "anchor", "own", "mean")
        return {name: getattr(self, name) for name in names} | {
            "hooks": [hook.state_dict() for hook in self.hooks]
        }

    def load_state_dict(self, state):
        for hook, saved in zip(self.hooks, state["hooks"], strict=True):
            hook.load_state_dict(saved)
        for name in state.keys() - {"hooks"}:
            setattr(self, name, state[name])


# ---------------------------------------------------------------- a game


def game(ranks):
    """Return A, b and c of every rank, and the solution. The mean of A is well conditioned, but the
    ranks differ much."""
    draw = torch.Generator().manual_seed(0)
    a = torch.randn(ranks, SIZE, SIZE, generator=draw, dtype=torch.float64) / 8
    b, c = torch.randn(2, ranks, SIZE, generator=draw, dtype=torch.float64)
    left, _, right = torch.linalg.svd(a.mean(0))
    a += left @ torch.diag(torch.linspace(0.8, 1, SIZE, dtype=torch.float64)) @ right - a.mean(0)
    y = torch.linalg.solve(a.mean(0), -b.mean(0))
    x = torch.linalg.solve(a.mean(0).T, c.mean(0))
    return a.float(), b.float(), c.float(), torch.cat([x, y]).float()


class Player(nn.Module):
    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self):
        return self.at.view(-1)


def play(steps, **options):
    """Return distances to the solution, relative to its norm, and the optimizer."""
    *parts, solution = game(dist.get_world_size())
    a, b, c = (part[dist.get_rank()] for part in parts)

    def loss(first, second):
        x, y = first(), second()
        return x @ a @ y + b @ x - c @ y

    masha = Masha(Player(), Player(), min_numel=1, **options)
    errors = []
    for _ in range(steps):
        masha.step(loss)
        errors.append(float((masha.point() - solution).norm() / solution.norm()))
    return errors, masha


def descent_and_ascent(steps, lr):
    """Play the same game without an anchor: each step rotates around the solution and moves
    away."""
    *parts, solution = game(dist.get_world_size())
    a, b, c = (part.mean(0) for part in parts)
    x, y = torch.zeros(2, SIZE)
    for _ in range(steps):
        x, y = x - lr * (a @ y + b), y + lr * (a.T @ x - c)
    return float((torch.cat([x, y]) - solution).norm() / solution.norm())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--codec", default="topk-4")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--tau", type=float, default=0.75)
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    found = {
        "descent and ascent at once": (descent_and_ascent(options.steps, options.lr), 0),
    }
    for name, codec, tau in [
        ("extragradient, exact", "none", 0.0),
        (f"MASHA, {options.codec}", options.codec, options.tau),
    ]:
        errors, masha = play(options.steps, codec=codec, lr=options.lr, tau=tau)
        sent = masha.exact_bytes + sum(hook.counters.wire_bytes for hook in masha.hooks)
        found[name] = errors[-1], sent / options.steps
    if dist.get_rank() == 0:
        print(f"after {options.steps} steps, distance to the solution, and bytes that a rank sends")
        for name, (error, sent) in found.items():
            print(f"{name:30} {error:10.3g} {sent:10.0f} a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
