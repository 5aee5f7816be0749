"""Reinforcement learning with many environments on ranks of different speeds, with gradients
weighted by each rank's number of environments.

    torchrun --nproc-per-node 2 examples/many_environments.py
    torchrun --nproc-per-node 3 examples/many_environments.py --speeds 1,1,0.25

Ranks get environments by speed (``shares``), so that all end a rollout at the same time.
DistributedDataParallel averages over ranks: each multiplies its loss by its share of the
environments, so that the mean is the gradient over all of them.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commpress

HORIZON, ACTIONS = 24, 3


class Carts:
    """Carts on a line, pushed left, right or not at all, which should stop at their targets."""

    def __init__(self, count, generator):
        self.count, self.generator = count, generator

    def reset(self):
        self.place = 2 * torch.rand(self.count, generator=self.generator) - 1
        self.speed = torch.zeros(self.count)
        self.target = 2 * torch.rand(self.count, generator=self.generator) - 1
        return self.seen()

    def seen(self):
        return torch.stack([self.place, self.speed, self.target, self.target - self.place], 1)

    def step(self, action):
        self.speed = 0.8 * self.speed + 0.1 * (action.float() - 1)
        self.place = self.place + self.speed
        return self.seen(), -(self.place - self.target).abs()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action, self.value = nn.Linear(64, ACTIONS), nn.Linear(64, 1)

    def forward(self, seen):
        hidden = self.body(seen)
        return self.action(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)


@torch.no_grad()
def rollout(policy, carts):
    """Return observations, actions and returns: [steps, carts, …]."""
    seen, done, rewards = [carts.reset()], [], []
    for _ in range(HORIZON):
        chances, _ = policy(seen[-1])
        done.append(torch.multinomial(chances.exp(), 1, generator=carts.generator).squeeze(1))
        after, reward = carts.step(done[-1])
        seen.append(after)
        rewards.append(reward)
    earned, later = [], torch.zeros(carts.count)
    for reward in reversed(rewards):
        later = reward + 0.9 * later
        earned.append(later)
    return (
        torch.stack(seen[:-1]),
        torch.stack(done),
        torch.stack(earned[::-1]),
        torch.stack(rewards).sum(0),
    )


def shares(total, speeds):
    """Return the number of environments of each rank: the last rank ends as early as can be."""
    counts = [max(int(total * speed / sum(speeds)), 1) for speed in speeds]
    while sum(counts) != total:
        if sum(counts) < total:
            more = min(range(len(counts)), key=lambda i: (counts[i] + 1) / speeds[i])
            counts[more] += 1
        else:
            several = [i for i, count in enumerate(counts) if count > 1]
            counts[max(several, key=lambda i: counts[i] / speeds[i])] -= 1
    return counts


def train(rounds, codec="int8", *, speeds=None, environments=96, lr=5e-3):
    """Return the mean rewards of all environments in each round, the policy, and the number of
    environments of each rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = shares(environments, speeds or [1.0] * size)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Policy())
    state = commpress.compress(ddp, codec=codec, min_numel=64)
    optimizer = torch.optim.Adam(ddp.parameters(), lr)
    carts, rewards = Carts(counts[rank], torch.Generator().manual_seed(1 + rank)), []
    for _ in range(rounds):
        seen, done, earned, reward = rollout(ddp.module, carts)
        chances, value = ddp(seen)
        advantage = earned - value.detach()
        told = torch.tensor(
            [
                float(reward.sum()),
                float(advantage.sum()),
                float(advantage.square().sum()),
                float(done.numel()),
            ]
        )
        dist.all_reduce(told)  # of all ranks, so that the loss of each is its part of one loss
        mean = told[1] / told[3]
        spread = (told[2] / told[3] - mean**2).clamp(min=1e-6).sqrt()
        chosen = chances.gather(2, done[..., None]).squeeze(2)
        loss = (
            -(chosen * (advantage - mean) / spread).mean() + 0.5 * (earned - value).square().mean()
        )
        loss = loss - 0.01 * -(chances.exp() * chances).sum(2).mean()
        (loss * counts[rank] * size / environments).backward()
        optimizer.step()
        optimizer.zero_grad()
        rewards.append(float(told[0]) / environments)
    return rewards, ddp.module, counts, state.counters.ratio


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--speeds", help="of each rank, as 1,1,0.5 (default: alike)")
    parser.add_argument("--codec", default="int8")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    speeds = [float(part) for part in options.speeds.split(",")] if options.speeds else None
    rewards, _, counts, ratio = train(options.rounds, options.codec, speeds=speeds)
    if dist.get_rank() == 0:
        print(
            f"environments {counts}: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}, {ratio:.1f} "
            "times fewer bytes"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
