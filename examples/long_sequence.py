"""One sequence on several ranks, three ways: a small attention model trains on it as in one process.

    python examples/long_sequence.py --way ring     keys and values go round, encoded once
    python examples/long_sequence.py --way heads    each rank has all positions of some heads (Ulysses)
    python examples/long_sequence.py --way state    linear attention, whose state is passed on (LASP)

    torchrun --nproc-per-node 4 examples/long_sequence.py --codec int8
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import commpress
from commpress.integrations.sequence import SequenceParallel

WIDTH, HEADS, LENGTH, VOCABULARY = 64, 6, 50, 16
DIM, DECAY = 8, 0.9


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["ring", "heads", "state"], default="ring")
    parser.add_argument("--codec", default="none", help="of what is sent forward and back (default none)")
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


class Attention(nn.Module):
    """Causal attention of 6 heads, over positions that lie on several ranks; ``ranks`` None: all are here."""

    def __init__(self, way, ranks):
        super().__init__()
        self.way, self.ranks = way, ranks
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in self.qkv(x).chunk(3, -1))  # [batch, positions, heads, dim]
        return x + self.out({"ring": self.ring, "heads": self.heads, "state": self.state}[self.way](q, k, v).flatten(2))

    def ring(self, q, k, v):
        q, k, v = (part.transpose(1, 2).contiguous() for part in (q, k, v))
        if self.ranks is None:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.ranks.ring_attention(q, k, v).transpose(1, 2)

    def heads(self, q, k, v):
        if self.ranks is not None:
            q, k, v = (self.ranks.to_heads(part) for part in (q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return y if self.ranks is None else self.ranks.to_positions(y.contiguous(), HEADS)

    def state(self, q, k, v):
        """y_t = q_t · Σ_{s ≤ t} decay^(t − s) k_s v_sᵀ: inside the rank as a matrix, before it as one state."""
        q, k, steps = q.softmax(-1), k.softmax(-1), torch.arange(q.shape[1])
        apart = (steps[:, None] - steps[None, :]).clamp(min=0)
        inside = torch.einsum("bthd,bshd->bhts", q, k) * (DECAY**apart).tril()
        y = torch.einsum("bhts,bshd->bthd", inside, v)
        if self.ranks is None:
            return y
        own = torch.einsum("s,bshd,bshe->bhde", DECAY ** (len(steps) - 1 - steps), k, v)
        before = self.ranks.prefix(own, DECAY ** len(steps))
        return y + torch.einsum("t,bthd,bhde->bthe", DECAY ** (steps + 1), q, before)


def model(way, ranks):
    torch.manual_seed(0)
    layers = [Attention(way, ranks), Attention(way, ranks)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def batch(step):
    """The next token is the one two before."""
    start = torch.randint(VOCABULARY, (4, 2), generator=torch.Generator().manual_seed(step))
    tokens = start.repeat(1, LENGTH // 2 + 1)
    return tokens[:, :LENGTH], tokens[:, 1 : LENGTH + 1]


def train(way, ranks, steps):
    """Losses of the whole sequence, the same on every rank."""
    net = model(way, ranks)
    optimizer, losses = torch.optim.Adam(net.parameters(), 3e-3), []
    lengths = [LENGTH] if ranks is None else ranks.lengths
    rank = 0 if ranks is None else dist.get_rank()
    for step in range(steps):
        x, y = (part.split(list(lengths), 1)[rank] for part in batch(step % 4))
        loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum") / (4 * LENGTH)
        loss.backward()
        told = loss.detach().clone()
        if ranks is not None:
            dist.all_reduce(told)
            for p in net.parameters():
                dist.all_reduce(p.grad)  # every rank has the gradient of its positions
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(told))
    return losses


def main():
    options = parse()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29561")
    commpress.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = SequenceParallel(options.codec)
    ranks.divide(LENGTH // size + (rank < LENGTH % size))  # uneven where they must be
    losses = train(options.way, ranks, options.steps)
    alone = train(options.way, None, options.steps)
    if rank == 0:
        sent = ranks.channel.sent_bytes / options.steps / 1e3
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, one process -> {alone[-1]:.3f}, {sent:.1f} kB sent by rank 0 a step")
    assert options.codec != "none" or all(abs(a - b) < 1e-3 for a, b in zip(losses, alone, strict=True)), (losses, alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
