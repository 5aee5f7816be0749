"""One sequence on several ranks, four ways: a small attention model trains on it as in one process.

python examples/long_sequence.py --way ring     keys and values go round, encoded once
python examples/long_sequence.py --way heads    each rank has all positions of some heads (Ulysses)
python examples/long_sequence.py --way state    linear attention, whose state is passed on (LASP)
python examples/long_sequence.py --way groups   sequences of different length, the long ones on more
                                                ranks (FlexSP)

torchrun --nproc-per-node 4 examples/long_sequence.py --codec int8
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import commpress
from commpress.integrations.sequence import SequenceGroups, SequenceParallel, divide_sequences

WIDTH, HEADS, LENGTH, VOCABULARY = 64, 6, 50, 16
DIM, DECAY = 8, 0.9


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=["ring", "heads", "state", "groups"], default="ring")
    parser.add_argument(
        "--codec", default="none", help="of what is sent forward and back (default none)"
    )
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


class Attention(nn.Module):
    """Causal attention of 6 heads, over positions that lie on several ranks; ``ranks`` None: all
    are here."""

    def __init__(self, way):
        super().__init__()
        self.way, self.ranks = way, None
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x):
        # [batch, positions, heads, dim]
        q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in self.qkv(x).chunk(3, -1))
        attend = {"heads": self.heads, "state": self.state}.get(self.way, self.ring)
        return x + self.out(attend(q, k, v).flatten(2))

    def ring(self, q, k, v):
        q, k, v = (part.transpose(1, 2).contiguous() for part in (q, k, v))
        if self.ranks is None:
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(
                1, 2
            )
        return self.ranks.ring_attention(q, k, v).transpose(1, 2)

    def heads(self, q, k, v):
        if self.ranks is not None:
            q, k, v = (self.ranks.to_heads(part) for part in (q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return y if self.ranks is None else self.ranks.to_positions(y.contiguous(), HEADS)

    def state(self, q, k, v):
        """y_t = q_t · Σ_{s ≤ t} decay^(t − s) k_s v_sᵀ: inside the rank as a matrix, before it as
        one state."""
        q, k, steps = q.softmax(-1), k.softmax(-1), torch.arange(q.shape[1])
        apart = (steps[:, None] - steps[None, :]).clamp(min=0)
        inside = torch.einsum("bthd,bshd->bhts", q, k) * (DECAY**apart).tril()
        y = torch.einsum("bhts,bshd->bthd", inside, v)
        if self.ranks is None:
            return y
        own = torch.einsum("s,bshd,bshe->bhde", DECAY ** (len(steps) - 1 - steps), k, v)
        before = self.ranks.prefix(own, DECAY ** len(steps))
        return y + torch.einsum("t,bthd,bhde->bthe", DECAY ** (steps + 1), q, before)


def model(way):
    torch.manual_seed(0)
    layers = [Attention(way), Attention(way)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def batch(way, step):
    """Inputs and targets of four sequences, each [sequences, length + 1]: the next token is the one
    two before."""
    start = torch.randint(VOCABULARY, (4, 2), generator=torch.Generator().manual_seed(step))
    tokens = start.repeat(1, LENGTH // 2 + 1)[:, : LENGTH + 1]
    return (
        [tokens]
        if way != "groups"
        else [tokens[i : i + 1, : LENGTH // (i + 1) + 1] for i in range(4)]
    )


def shares(way, ranks, sequences):
    """Sequences that this rank has a part of, each with the ranks that have it."""
    if ranks is None or way != "groups":
        return [(ranks, each) for each in sequences]
    size, lengths = dist.get_world_size(), [each.shape[1] - 1 for each in sequences]
    # room for the longest on the largest group
    most = -(-max(lengths) // 2 ** (size.bit_length() - 1))
    group, mine = ranks.of(divide_sequences(lengths, size, most))
    return [(group, sequences[i]) for i in mine]


def own_part(ranks, tokens):
    """Positions of this rank; as many as the others have, or one more."""
    length = tokens.shape[1] - 1
    if ranks is None:
        return tokens[:, :length], tokens[:, 1:]
    rank, size = ranks.channel.rank, ranks.channel.size
    ranks.divide(length // size + (rank < length % size))
    start = sum(ranks.lengths[:rank])
    return tuple(tokens[:, at : at + ranks.lengths[rank]] for at in (start, start + 1))


def train(way, ranks, steps):
    """Losses of all positions, the same on every rank. ``ranks``: SequenceParallel, SequenceGroups,
    or None for one process."""
    net = model(way)
    optimizer, losses = torch.optim.Adam(net.parameters(), 3e-3), []
    for step in range(steps):
        sequences, told = batch(way, step % 4), torch.zeros(())
        for group, tokens in shares(way, ranks, sequences):
            for layer in net[1:3]:
                layer.ranks = group
            x, y = own_part(group, tokens)
            loss = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum")
            loss = loss / sum(each[:, 1:].numel() for each in sequences)
            loss.backward()
            told += loss.detach()
        if ranks is not None:
            dist.all_reduce(told)
            for p in net.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
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
    ranks = (
        SequenceGroups(options.codec)
        if options.way == "groups"
        else SequenceParallel(options.codec)
    )
    losses = train(options.way, ranks, options.steps)
    alone = train(options.way, None, options.steps)
    if dist.get_rank() == 0:
        each = ranks.groups.values() if options.way == "groups" else [ranks]
        sent = sum(group.channel.sent_bytes for group in each) / options.steps / 1e3
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, one process -> {alone[-1]:.3f}, "
            f"{sent:.1f} kB sent by rank 0 a step"
        )
    assert options.codec != "none" or all(
        abs(a - b) < 1e-3 for a, b in zip(losses, alone, strict=True)
    ), (losses, alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
