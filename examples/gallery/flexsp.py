"""FlexSP (arXiv 2412.01523): sequences of different lengths in groups of different sizes, long ones
on many ranks and short ones on few, at the same time.

``divide_sequences`` divides the ranks into groups of 1, 2, 4, … and assigns each sequence to a
group, such that the last one ends early, by a greedy search. A sequence of n positions takes

    (n² + linear·n + travel·n·(w − 1)/w) / w        on w ranks

where ``travel`` is the cost of sending one position, as the number of positions that could be
attended to in that time. Without it one group of all ranks is best; between nodes it is not. Any
sequence parallelism can be used in a group; here heads are exchanged for positions (Ulysses) by
``AllToAll``.

    torchrun --nproc-per-node 2 examples/gallery/flexsp.py
    torchrun --nproc-per-node 4 examples/gallery/flexsp.py

prints the groups for a batch of uneven sequences and the time of the last one, compared with one
group of all ranks, and trains a small model in this way and in one process: the losses are equal up
to rounding.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import commpress

WIDTH, HEADS, DIM, VOCABULARY = 64, 8, 8, 16
LENGTHS, ROOM, TRAVEL = (64, 48, 32, 16), 64, 100.0


def divide_sequences(lengths, ranks, most, *, linear=0.0, node=1, inside=0.0, between=0.0):
    """Return [(ranks, numbers of sequences)] of each group, and the time when the last one ends.

    ``most``: positions for which one rank has room, so a sequence needs length / most ranks.
    Sending a position costs ``inside`` in groups of up to ``node`` ranks and ``between`` in larger
    ones. All partitions of the ranks into powers of two are tried, longest sequences first.
    """
    largest = 1 << ranks.bit_length() - 1
    if not lengths or max(lengths) > most * largest:
        raise ValueError(
            f"lengths are up to {max(lengths, default=0)}, and {largest} of {ranks} ranks with "
            f"room for {most} each are the largest group: cut sequences, or let ranks have more"
        )
    best = None
    for widths in partitions(ranks, largest):
        given, busy = [[] for _ in widths], [0.0] * len(widths)
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            ends = [
                (busy[g] + time_of(lengths[i], w, linear, inside if w <= node else between), g)
                for g, w in enumerate(widths)
                if lengths[i] <= most * w
            ]
            if not ends:
                break
            end, g = min(ends)
            busy[g] = end
            given[g].append(i)
        else:
            if best is None or (max(busy), -len(widths)) < best[:2]:
                best = max(busy), -len(widths), widths, given
    end, _, widths, given = best  # the first has the largest group, which holds every sequence
    firsts = [sum(widths[:g]) for g in range(len(widths))]
    groups = [tuple(range(at, at + w)) for at, w in zip(firsts, widths, strict=True)]
    return list(zip(groups, map(tuple, given), strict=True)), end


def time_of(length, width, linear=0.0, travel=0.0):
    return length * (length + linear + travel * (width - 1) / width) / width


def partitions(ranks, largest):
    """Yield powers of two that add up to ``ranks``, the largest first, so that groups begin at
    multiples of their size."""
    if ranks == 0:
        yield ()
        return
    while largest:
        if largest <= ranks:
            for rest in partitions(ranks - largest, largest):
                yield (largest, *rest)
        largest //= 2


class SequenceGroups:
    """All-to-alls among the ranks of every group that ``divide_sequences`` may return; made on all
    ranks."""

    def __init__(self, codec="none"):
        self.exchanges, width = {}, 1
        while width <= dist.get_world_size():
            for first in range(0, dist.get_world_size() - width + 1, width):
                ranks = tuple(range(first, first + width))
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    self.exchanges[ranks] = commpress.AllToAll(codec, process_group=group)
            width *= 2

    def mine(self, divided):
        """Return this rank's group and its sequences."""
        return next((ranks, given) for ranks, given in divided if ranks in self.exchanges)


def attention(q, k, v, exchange):
    """Compute causal attention of [batch, own positions, heads, dim], with equal numbers of
    positions and heads on every rank of ``exchange``; None: on one rank."""

    def turned(x, split, join):
        """Parts along one dimension to the ranks; theirs side by side along the other."""
        rows = torch.cat([part.reshape(-1, DIM) for part in x.chunk(size, split)])
        shape = [*x.chunk(size, split)[0].shape]
        return torch.cat([part.view(shape) for part in exchange(rows).chunk(size)], join)

    size = 1 if exchange is None else exchange.channel.size
    if size > 1:
        q, k, v = (turned(x, 2, 1) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return turned(out, 1, 2) if size > 1 else out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.last = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, tokens, exchange):
        x = self.tokens(tokens)
        q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in self.qkv(x).chunk(3, -1))
        return self.last(x + self.out(attention(q, k, v, exchange).flatten(2)))


def train(steps, codec=None, lengths=LENGTHS):
    """Return the losses of all positions, equal on every rank, and the groups; without a codec in
    one process. The next token is the last of the three before."""
    torch.manual_seed(0)
    model, divided = Model(), [((0,), tuple(range(len(lengths))))]
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    if codec:
        divided, _ = divide_sequences(lengths, dist.get_world_size(), ROOM, between=TRAVEL)
        groups = SequenceGroups(codec)
        ranks, mine = groups.mine(divided)
        exchange, place = groups.exchanges[ranks], ranks.index(dist.get_rank())
    else:
        (ranks, mine), exchange, place = divided[0], None, 0
    for step in range(steps):
        optimizer.zero_grad()
        told = torch.zeros(())
        for i in mine:
            start = torch.randint(VOCABULARY, (1, 3), generator=torch.Generator().manual_seed(i))
            tokens = (start.repeat(1, lengths[i]) + step % 4)[:, : lengths[i] + 1] % VOCABULARY
            own = lengths[i] // len(ranks)
            x, y = (tokens[:, at : at + own] for at in (place * own, place * own + 1))
            loss = functional.cross_entropy(model(x, exchange)[0], y[0], reduction="sum")
            loss = loss / sum(lengths)
            loss.backward()
            told += loss.detach()
        if codec:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)  # every rank has the gradient of its positions
            dist.all_reduce(told)
        optimizer.step()
        losses.append(float(told))
    return losses, divided


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="none", help="codec of all messages (default none)")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    size = dist.get_world_size()
    losses, divided = train(options.steps, options.codec)
    alone, _ = train(options.steps)
    if dist.get_rank() == 0:
        largest = 1 << size.bit_length() - 1
        _, end = divide_sequences(LENGTHS, size, ROOM, between=TRAVEL)
        one = sum(time_of(n, largest, 0.0, TRAVEL * (largest > 1)) for n in LENGTHS)
        for ranks, given in divided:
            print(f"ranks {ranks}: sequences of {[LENGTHS[i] for i in given]}")
        print(f"done after {end:.0f}, in one group after {one:.0f}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, in one process -> {alone[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
