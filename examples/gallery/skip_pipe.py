"""A pipeline with micro-batches that skip stages and pass them in another order (SkipPipe), with
one stage on each rank.

    torchrun --nproc-per-node 4 examples/gallery/skip_pipe.py
    torchrun --nproc-per-node 4 examples/gallery/skip_pipe.py --skip 0

``--skip 0``: every micro-batch through all stages, in order.

``routes`` gives every micro-batch a route that skips a share of the stages between first and last,
each stage equally often, in the order that ends first. Stages are residual blocks. The printed loss
is that of the whole pipeline.
"""

import argparse
from collections import Counter
from itertools import combinations, permutations

import torch
import torch.distributed as dist
from torch import nn

import commpress
from commpress.integrations.pipeline import decode_into, edge_codec, encoded

WIDTH, ROWS, COUNT = 16, 32, 8


def routes(stages, count, skip):
    """Return the stages of each micro-batch with their times; a stage has one micro-batch at a
    time."""
    between, used, found = range(1, stages - 1), [set() for _ in range(stages)], []
    kept, often, seen = len(between) - round(skip * len(between)), Counter(), Counter()
    for _ in range(count):
        least = min(sum(often[stage] for stage in taken) for taken in combinations(between, kept))
        sets = [
            taken
            for taken in combinations(between, kept)
            if sum(often[stage] for stage in taken) == least
        ]
        orders = (order for taken in sets for order in (permutations(taken) if skip else [taken]))
        times = {order: slots((0, *order, stages - 1), used) for order in orders}
        best = min(times, key=lambda order: (times[order][-1], seen[order], order))
        often.update(best)
        seen[best] += 1
        route = list(zip((0, *best, stages - 1), times[best], strict=True))
        for stage, time in route:
            used[stage].add(time)
        found.append(route)
    return found


def slots(route, used):
    """Return the earliest free time on each stage of a route."""
    found = []
    for stage in route:
        time = found[-1] + 1 if found else 0
        while time in used[stage]:
            time += 1
        found.append(time)
    return found


def length(found):
    """Return the slots of a forward; a backward has the same number."""
    return 1 + max(time for route in found for _, time in route)


class Stage(nn.Module):
    def __init__(self, rank, size):
        super().__init__()
        self.first = nn.Linear(4, WIDTH) if rank == 0 else None
        self.body = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.last = nn.Linear(WIDTH, 1) if rank == size - 1 else None

    def forward(self, x):
        x = x if self.first is None else self.first(x)
        x = x + 0.5 * self.body(x)
        return x if self.last is None else self.last(x)


class Walk:
    """Forward and backward of micro-batches through this rank's stage; ``codec`` compresses
    messages."""

    def __init__(self, stage, codec):
        self.stage, self.how, self.rank, self.sends = stage, edge_codec(codec), dist.get_rank(), []

    def step(self, ways, x, y):
        """Return the mean loss on the last stage; compute gradients of the stage."""
        mine = sorted(
            (t, i, hop)
            for i, route in enumerate(ways)
            for hop, (stage, t) in enumerate(route)
            if stage == self.rank
        )
        held, total = {}, 0.0
        for _, i, hop in mine:
            into = x[i] if hop == 0 else self.receive(ways[i][hop - 1][0], i, hop).requires_grad_()
            out = self.stage(into)
            if hop == len(ways[i]) - 1:
                out = nn.functional.mse_loss(out, y[i]) / len(ways)
                total += float(out.detach())
            else:
                self.send(out.detach(), ways[i][hop + 1][0], i, hop + 1)
            held[i] = into, out
        for _, i, hop in reversed(mine):
            into, out = held.pop(i)
            end = hop == len(ways[i]) - 1
            out.backward(None if end else self.receive(ways[i][hop + 1][0], i, 100 + hop))
            if hop:
                self.send(into.grad, ways[i][hop - 1][0], i, 99 + hop)
        while self.sends:
            self.sends.pop()[0].wait()
        return total

    def send(self, x, to, i, hop):
        message = x if self.how is None else encoded(x, self.how)
        self.sends.append((dist.isend(message, to, tag=200 * i + hop), message))

    def receive(self, source, i, hop):
        out = message = torch.empty(ROWS, WIDTH)
        if self.how is not None:
            message = torch.empty(self.how.size(out.numel(), WIDTH), dtype=torch.uint8)
        dist.recv(message, source, tag=200 * i + hop)
        if self.how is not None:
            decode_into(out, message, self.how)
        return out


def train(steps, *, skip=0.5, codec="int8"):
    """Return the losses of the whole pipeline on test data, equal on every rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage, ways, whole, losses = (
        Stage(rank, size),
        routes(size, COUNT, skip),
        routes(size, COUNT, 0.0),
        [],
    )
    walk, optimizer = Walk(stage, codec), torch.optim.Adam(stage.parameters(), 3e-3)
    for step in range(steps):
        x = torch.randn((COUNT, ROWS, 4), generator=torch.Generator().manual_seed(step))
        y = (x.prod(-1, keepdim=True) + x[..., :1]).tanh()
        if step % 10 == 0 or step == steps - 1:
            told = torch.tensor(walk.step(whole, x, y))
            dist.broadcast(told, size - 1)
            losses.append(float(told))
            optimizer.zero_grad()
        walk.step(ways, x, y)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--skip",
        type=float,
        default=0.5,
        help="share of the stages between first and last (default 0.5)",
    )
    parser.add_argument(
        "--codec", default="int8", help="codec of activations and their gradients (default int8)"
    )
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    losses = train(options.steps, skip=options.skip, codec=options.codec)
    if dist.get_rank() == 0:
        some, every = (
            length(routes(dist.get_world_size(), COUNT, skip)) for skip in (options.skip, 0.0)
        )
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; a forward takes {some} slots, of all "
            f"stages {every}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
