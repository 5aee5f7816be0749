"""LSH-MoE (arXiv 2411.08446): only the mean of similar tokens for one expert is sent, and each
token adds its own difference.

    y = E(c) + (x − c)      c: the mean of the tokens of a rank that share x's expert and hashes

A hash is the vertex of a cross-polytope that is nearest to the token after a random rotation (two
Walsh-Hadamard transforms with random signs before each): the index of the largest of ``dims``
coordinates in magnitude, and its sign. Hashes are compared up to the number that keeps the means
within ``share``. The result is exact for experts that shift tokens by one vector. For others some
choices of each call are also sent by themselves, and ‖E(x) − E(c) − x + c‖ / ‖E(x)‖ over them is
the ``error``. If it exceeds ``bound`` on a rank, all ranks send every token for ``retry`` calls.

    torchrun --nproc-per-node 2 examples/gallery/lsh_moe.py
    torchrun --nproc-per-node 2 examples/gallery/lsh_moe.py --share 0.1

trains a gate and four experts on tokens around some centers: with every token sent, and with means.
"""

import argparse
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import commpress


class LSHExchange:
    """Send means in place of tokens, with the call of ``ExpertExchange`` for whole layers.

    - ``share``: largest share of a rank's choices to send, at least one for each of its experts.
    - ``hashes``: most hashes to compare, of ``dims`` coordinates each. ``seed``: seed of the
      rotation.
    - ``probes``: choices of each call that are also sent by themselves.
    """

    def __init__(
        self,
        exchange,
        share=0.2,
        *,
        hashes=6,
        dims=8,
        seed=0,
        probes=8,
        bound=0.5,
        retry=100,
        process_group=None,
    ):
        if not (0 < share <= 1 and min(hashes, dims, retry) >= 1 and probes >= 0 and bound > 0):
            raise ValueError(
                f"share is {share}, hashes {hashes}, dims {dims}, retry {retry}, probes {probes} "
                f"and bound {bound}, expected up to 1, at least 1, 1, 1, 0, and above 0"
            )
        self.exchange, self.share, self.hashes, self.dims = exchange, share, hashes, dims
        self.seed, self.probes, self.bound, self.retry = seed, probes, bound, retry
        self.group, self.calls, self.exact_calls, self.left = process_group, 0, 0, 0
        self.error = self.worst = 0.0  # of this rank and of all, in the last call that sent means

    def __call__(self, tokens, topk_idx, topk_weights, experts, **options):
        self.calls += 1
        if self.left:
            self.left -= 1
            self.exact_calls += 1
            return self.exchange(tokens, topk_idx, topk_weights, experts, **options)
        idx, members, where, probes = self.cluster(tokens, topk_idx)
        centroids = means(tokens, members, len(idx))
        ones = torch.ones(len(idx), 1)
        made = self.exchange(centroids, idx, ones, experts, **options)
        self.measure(made.detach(), centroids.detach(), tokens.detach(), probes)
        return expanded(made, centroids, tokens, where, topk_weights)

    def measure(self, made, centroids, tokens, probes):
        """Compute the error over probes, and with ``bound`` decide what all ranks do next."""
        token, alone, shared = probes
        guess, norm = made[shared] - centroids[shared] + tokens[token], made[alone].norm()
        self.error = float((guess - made[alone]).norm() / norm) if norm else 0.0
        worst = torch.tensor(self.error).nan_to_num(nan=float("inf"))
        if dist.is_initialized():
            dist.all_reduce(worst, dist.ReduceOp.MAX, group=self.group)
        self.worst = float(worst)
        self.left = self.retry if self.worst > self.bound else 0

    def cluster(self, tokens, topk_idx):
        """Return the expert of each mean, [means, 1]; cluster and token of each choice; the cluster
        of each choice or −1, [tokens, k]; and for probes the token, its own cluster and the one in
        which it would be."""
        known = tokens.detach().float()
        token, slot = (topk_idx >= 0).nonzero(as_tuple=True)
        expert = topk_idx[token, slot]
        turned = turn(known, self.hashes * self.dims, self.seed)
        bucket = self.buckets(expert, vertices(turned.view(-1, self.hashes, self.dims))[token])
        alone = ~known.isfinite().all(1)[token]
        probed = torch.zeros_like(alone)
        if self.probes and len(token):
            every = max(len(token) // self.probes, 1)
            probed[self.calls % every :: every] = True
            probed &= ~alone & (probed.cumsum(0) <= self.probes)
        beyond = int(bucket.max()) + 1 if len(bucket) else 0
        apart = torch.where(alone | probed, beyond + torch.arange(len(token)), bucket)
        numbers, place = apart.unique(return_inverse=True)
        idx = torch.zeros(len(numbers), 1, dtype=torch.int64)
        idx[place, 0] = expert
        where = torch.full_like(topk_idx, -1, dtype=torch.int64)
        where[token, slot] = place
        home = torch.searchsorted(numbers, bucket[probed])  # clusters in which probes would be
        there = (home < len(numbers)) & (
            numbers[home.clamp(max=len(numbers) - 1)] == bucket[probed]
        )
        probes = torch.stack([token[probed][there], place[probed][there], home[there]])
        return idx, (place, token), where, probes

    def buckets(self, expert, codes):
        """Return a number for each choice, equal for choices of one expert with equal first hashes,
        by the number of hashes that the share allows. The hash that would exceed it still divides
        the largest clusters."""
        bucket, most = expert.unique(return_inverse=True)[1], int(self.share * len(expert))
        for code in codes.T:
            finer = (bucket * (2 * self.dims) + code).unique(return_inverse=True)[1]
            count = int(bucket.max()) + 1 if len(bucket) else 0
            if not len(finer) or int(finer.max()) < most:
                bucket = finer
                continue
            if most > count:
                parent = torch.zeros(int(finer.max()) + 1, dtype=torch.int64)
                parent[finer] = bucket
                children = torch.bincount(parent, minlength=count)
                fullest = torch.bincount(bucket, minlength=count).argsort(descending=True)
                divided = torch.zeros(count, dtype=torch.bool)
                divided[fullest] = (children[fullest] - 1).cumsum(0) <= most - count
                bucket = torch.where(divided[bucket], count + finer, bucket)
                bucket = bucket.unique(return_inverse=True)[1]
            break
        return bucket


def means(tokens, members, count):
    """Return the means, [clusters, width], differentiably."""
    place, token = members
    sums = tokens.new_zeros(count, tokens.shape[1]).index_add(0, place, tokens[token])
    return sums / torch.bincount(place, minlength=count)[:, None].to(tokens.dtype)


def expanded(made, centroids, tokens, where, gates):
    """Return Σ gates · (result of the choice's mean + the token − the mean), differentiably."""
    weights = torch.where(where >= 0, gates, 0).to(tokens.dtype)
    changes = torch.cat([made - centroids, torch.zeros_like(tokens[:1].detach())])
    if not len(tokens):
        return tokens + changes.sum()
    mixed = (weights[:, :, None] * changes[where]).sum(1)  # −1 is the last: nothing
    return mixed + weights.sum(1, keepdim=True) * tokens


def vertices(coordinates):
    """Return the nearest vertex of [..., dims]: twice the index of the largest coordinate, + 1 if
    it is negative."""
    place = coordinates.abs().argmax(-1, keepdim=True)
    return (2 * place + (coordinates.gather(-1, place) < 0)).squeeze(-1)


def turn(tokens, count, seed):
    """Return the first ``count`` coordinates of tokens [n, width] after a random rotation H D₂ H D₁
    x in enough dimensions."""
    return tokens @ directions(tokens.shape[1], count, seed).T


@functools.cache
def directions(width, count, seed):
    size = 1 << max(width - 1, count - 1, 1).bit_length()
    signs = torch.randint(2, (2, size), generator=torch.Generator().manual_seed(seed))
    first, second = 2.0 * signs - 1
    turned = walsh_hadamard(torch.eye(count, size)) * second
    return (walsh_hadamard(turned) * first)[:, :width].contiguous()


def walsh_hadamard(x):
    """Compute the orthonormal fast transform of [n, 2^m]."""
    size, half = x.shape[1], 1
    while half < size:
        a, b = x.view(-1, size // (2 * half), 2, half).unbind(2)
        x = torch.stack([a + b, a - b], 2).view(-1, size)
        half *= 2
    return x / size**0.5


# ---------------------------------------------------------------- a small layer

WIDTH, EXPERTS, TOKENS, K = 32, 4, 256, 2


def train(steps, share=None, codec="none"):
    """Return the losses, and the share of choices that were sent; ``share`` None sends all."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    teacher, gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
    every = [nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)]
    mine = nn.ModuleList(every[rank * EXPERTS // size : (rank + 1) * EXPERTS // size])
    exchange = commpress.ExpertExchange(EXPERTS, codec=(codec, codec))
    call = exchange if share is None else LSHExchange(exchange, share, bound=2.0)

    def experts(rows, counts):
        parts = zip(mine, rows.split(counts.tolist()), strict=True)
        return torch.cat([part + torch.tanh(expert(part)) for expert, part in parts])

    optimizer = torch.optim.Adam([*gate.parameters(), *mine.parameters()], 3e-3)
    centres = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))
    draws, losses = torch.Generator().manual_seed(1 + rank), []
    for _ in range(steps):
        near = torch.randint(16, (TOKENS,), generator=draws)
        x = centres[near] + 0.2 * torch.randn(TOKENS, WIDTH, generator=draws)
        weights, chosen = gate(x).softmax(-1).topk(K)
        y = call(x, chosen, weights / weights.sum(-1, keepdim=True), experts)
        loss = functional.mse_loss(y, x + torch.tanh(teacher(x)).detach())
        optimizer.zero_grad()
        loss.backward()
        dist.all_reduce(gate.weight.grad)
        optimizer.step()
        told = loss.detach().clone()
        dist.all_reduce(told)
        losses.append(float(told) / size)
    sent = exchange.counters.choices / (steps * TOKENS * K)
    return losses, sent, 0.0 if share is None else call.error


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--share", type=float, default=0.2, help="share of choices to send (default 0.2)"
    )
    parser.add_argument("--codec", default="none", help="codec of tokens (default none)")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    for name, share in (("every token", None), ("means", options.share)):
        losses, sent, error = train(options.steps, share, options.codec)
        if dist.get_rank() == 0:
            print(
                f"{name:12} loss {losses[0]:.3f} -> {losses[-1]:.3f}, {sent:.2f} of the choices "
                f"travelled, error {error:.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
