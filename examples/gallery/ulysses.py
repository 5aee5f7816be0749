"""DeepSpeed Ulysses (arXiv 2309.14509): one sequence on several ranks; for attention each rank has
all positions of some heads.

    [batch, own positions, heads, dim]  → all-to-all →  [batch, all positions, own heads, dim]
    any attention, as in one process
    [batch, all positions, own heads, dim]  → all-to-all →  [batch, own positions, heads, dim]

``commpress.AllToAll`` sends the rows, with optional compression, and its gradient sends them back.
Ranks may have different numbers of positions, or none; 7 heads on 3 ranks are 3, 2 and 2. A rank
sends (P − 1)/P of its activations each way, so a rank's bytes fall with the number of ranks P,
while ring attention's do not.

    torchrun --nproc-per-node 2 examples/gallery/ulysses.py
    torchrun --nproc-per-node 2 examples/gallery/ulysses.py --codec int8

trains a small model on divided sequences and, for comparison, in one process: the losses are equal
up to rounding, or nearly equal with a codec.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import commpress


class Ulysses:
    """Ranks of a group among which sequences and heads are divided; this one has ``length``
    positions, others may have more, fewer or none."""

    def __init__(self, length, codec="none", *, group=None):
        self.exchange = commpress.AllToAll(codec, process_group=group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.divide(length)

    def divide(self, length):
        """Set this rank's number of positions to ``length``, and exchange those of all ranks."""
        self.lengths = self.exchange.counts([length] * self.size)

    def shares(self, heads):
        """Return the heads of each rank, divided evenly, with one more on the first ranks."""
        return [heads // self.size + (r < heads % self.size) for r in range(self.size)]

    def to_heads(self, x):
        """Turn [batch, own positions, heads, dim] into [batch, all positions, own heads, dim]."""
        batch, own, heads, dim = x.shape
        if own != self.lengths[self.rank]:
            raise ValueError(f"x has {own} positions, expected {self.lengths[self.rank]}")
        shares = self.shares(heads)
        rows = torch.cat([part.reshape(-1, dim) for part in x.split(shares, 2)])
        mine = shares[self.rank]
        coming = [batch * length * mine for length in self.lengths]
        found = self.exchange(rows, coming, [batch * own * share for share in shares])
        parts = zip(found.split(coming), self.lengths, strict=True)
        return torch.cat([part.view(batch, length, mine, dim) for part, length in parts], 1)

    def to_positions(self, x, heads):
        """Undo ``to_heads``; ``heads`` is the number on all ranks together."""
        batch, _, mine, dim = x.shape
        shares, own = self.shares(heads), self.lengths[self.rank]
        rows = torch.cat([part.reshape(-1, dim) for part in x.split(self.lengths, 1)])
        coming = [batch * own * share for share in shares]
        found = self.exchange(rows, coming, [batch * length * mine for length in self.lengths])
        parts = zip(found.split(coming), shares, strict=True)
        return torch.cat([part.view(batch, own, share, dim) for part, share in parts], 2)

    def attention(self, q, k, v, *, causal=True):
        """Compute attention of all positions; this rank has [batch, own positions, heads, dim]."""
        heads = q.shape[2]
        q, k, v = (self.to_heads(x).transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.to_positions(out.transpose(1, 2), heads)

    @property
    def sent_bytes(self):
        return self.exchange.channel.sent_bytes


# ---------------------------------------------------------------- a small model

WIDTH, HEADS, DIM, LENGTH, VOCABULARY = 64, 6, 8, 50, 16


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(self.attend(q, k, v).flatten(2))


def whole(q, k, v):
    """Compute attention in one process, like ``Ulysses.attention``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def train(steps, codec=None):
    """Return the losses of all positions, equal on every rank, and the ranks; without a codec in
    one process.

    The next token is the one two before.
    """
    torch.manual_seed(0)
    rank, size = (dist.get_rank(), dist.get_world_size()) if codec else (0, 1)
    lengths = [LENGTH // size + (r < LENGTH % size) for r in range(size)]
    ranks = Ulysses(lengths[rank], codec) if codec else None
    attend = ranks.attention if ranks else whole
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        Attention(attend),
        Attention(attend),
        nn.Linear(WIDTH, VOCABULARY),
    )
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    first = sum(lengths[:rank])
    for step in range(steps):
        start = torch.randint(VOCABULARY, (4, 2), generator=torch.Generator().manual_seed(step % 4))
        tokens = start.repeat(1, LENGTH // 2 + 1)[:, : LENGTH + 1]
        x, y = (tokens[:, at : at + lengths[rank]] for at in (first, first + 1))
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = loss / (4 * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        told = loss.detach().clone()
        if ranks:
            for each in (told, *(p.grad for p in model.parameters())):
                dist.all_reduce(each)  # every rank has the gradient of its positions
        optimizer.step()
        losses.append(float(told))
    return losses, ranks


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="none", help="codec of all messages (default none)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    losses, ranks = train(options.steps, options.codec)
    alone, _ = train(options.steps)
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, in one process -> {alone[-1]:.3f}; rank 0 "
            f"sent {ranks.sent_bytes / options.steps / 1e3:.1f} kB a step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
