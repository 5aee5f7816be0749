"""Ring attention (arXiv 2310.01889): one sequence on several ranks; keys and values pass around the
ring, and each rank attends to them block by block with an online softmax.

    for every block  s = q·kᵀ/√d   m ← max(m, s)   l ← l·e^(m − m′) + Σ e^(s − m′)
                     o ← o·e^(m − m′) + e^(s − m′)·v                    out = o/l, lse = m + log l
    backward         D = Σ do·o    p = e^(s − lse)    ds = p·(do·vᵀ − D)/√d
                     dq += ds·k    dk = dsᵀ·q and dv = pᵀ·do go to the rank of k, v

Keys and values are encoded once, on their own rank, and passed on as bytes: no hop adds an error,
and their own rank attends to the decoded values, too. With a causal mask blocks stop at the last
rank, because no earlier position needs them, which halves the bytes. A block is sent during the
attention to the one before. Gradients are sent directly to their rank, which sums them in a fixed
order.

    torchrun --nproc-per-node 2 examples/gallery/ring_attention.py
    torchrun --nproc-per-node 2 examples/gallery/ring_attention.py --codec int8

trains a small model on divided sequences and, for comparison, in one process: the losses are equal
up to rounding, or nearly equal with a codec.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import commpress
from commpress.integrations.pipeline import decode_into, edge_codec, encoded


class Ring:
    """Ranks of a group among which sequences are divided; this one has ``length`` positions, others
    may have more, fewer or none.

    ``codec``: codec of keys and values: int8, int4, fp8, bf16, none or a registered one;
    ``gradient_codec``: codec of gradients.
    """

    def __init__(self, length, codec="none", *, gradient_codec=None, group=None):
        self.group, self.sent_bytes = group, 0
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        every = torch.zeros(self.size, dtype=torch.int64)
        every[self.rank] = length
        dist.all_reduce(every, group=group)
        self.lengths = every.tolist()
        self.codec = edge_codec(codec)
        self.gradient_codec = edge_codec(codec if gradient_codec is None else gradient_codec)

    def attention(self, q, k, v, *, causal=True):
        """Compute attention of all positions; this rank has [..., own positions, dim]."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.shape[-2] != self.lengths[self.rank]:
                raise ValueError(
                    f"{name} of shape {tuple(x.shape)} has {x.shape[-2]} positions, expected "
                    f"{self.lengths[self.rank]}"
                )
        return RingAttention.apply(q, k, v, self, causal)

    def begin(self, message, room, by, *, sends, receives, tag):
        """Send ``message`` to rank + ``by`` and receive that of rank − ``by`` into ``room``; return
        the works to wait for."""
        if by % self.size == 0:
            room.copy_(message)
            return []
        to, source = (self.rank + by) % self.size, (self.rank - by) % self.size
        works = []
        if sends:
            self.sent_bytes += message.numel()
            works.append(dist.isend(message, group=self.group, group_dst=to, tag=tag))
        if receives:
            works.append(dist.irecv(room, group=self.group, group_src=source, tag=tag))
        return works

    def blocks(self, k, v, causal):
        """Yield the keys and values of every rank, this one's first, as (source, k, v); None in
        place of one that is masked."""
        held = packed((k, v), self.codec)
        for hop in range(self.size):
            source, coming = (self.rank - hop) % self.size, (self.rank - hop - 1) % self.size
            works, room = [], held
            if hop + 1 < self.size:
                room = room_for(self.shapes(k, v, coming), k.dtype, self.codec)
                works = self.begin(
                    held,
                    room,
                    1,
                    sends=not causal or source <= self.rank < self.size - 1,
                    receives=not causal or coming < self.rank,
                    tag=hop,
                )
            if causal and source > self.rank:
                yield None
            else:
                yield source, *unpacked(held, self.shapes(k, v, source), k.dtype, self.codec)
            for work in works:
                work.wait()
            held = room

    def shapes(self, k, v, rank):
        return [(*x.shape[:-2], self.lengths[rank], x.shape[-1]) for x in (k, v)]


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, ring, causal):
        most = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total, out = torch.zeros_like(most), q.new_zeros(*q.shape[:-1], v.shape[-1])
        for block in ring.blocks(k, v, causal):
            if block is None or block[1].shape[-2] == 0:
                continue
            source, keys, values = block
            scores = scores_of(q, keys, masked=causal and source == ring.rank)
            peak = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, decay = (scores - peak).exp(), (most - peak).exp()
            total = total * decay + weights.sum(-1, keepdim=True)
            most, out = peak, out * decay + weights @ values
        out, lse = out / total, most + total.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.causal = ring, causal
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        ring, causal, codec = ctx.ring, ctx.causal, ctx.ring.gradient_codec
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        inner = (gradient * out).sum(-1, keepdim=True)
        shapes = [k.shape, v.shape]
        for hop, block in enumerate(ring.blocks(k, v, causal)):
            message = q.new_empty(0, dtype=torch.uint8)
            if block is not None:
                source, keys, values = block
                scores = scores_of(q, keys, masked=causal and source == ring.rank)
                weights = (scores - lse).exp()
                ds = weights * (gradient @ values.mT - inner) * q.shape[-1] ** -0.5
                dq += ds @ keys
                message = packed((ds.mT @ q, weights.mT @ gradient), codec)
            comes = not causal or ring.rank + hop < ring.size
            room = room_for(shapes, k.dtype, codec)
            works = ring.begin(
                message, room, -hop, sends=block is not None, receives=comes, tag=ring.size + hop
            )
            for work in works:
                work.wait()
            if comes:
                for sum_, own in zip((dk, dv), unpacked(room, shapes, k.dtype, codec), strict=True):
                    sum_ += own
        return dq, dk, dv, None, None


def scores_of(q, keys, *, masked):
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    if masked:
        ahead = torch.ones(q.shape[-2], keys.shape[-2], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores


# ---------------------------------------------------------------- messages


def packed(tensors, codec):
    """Pack several tensors into one message, encoded if there is a codec."""
    return torch.cat(
        [
            x.contiguous().view(-1).view(torch.uint8)
            if codec is None or not x.numel()
            else encoded(x, codec)
            for x in tensors
        ]
    )


def sizes_of(shapes, dtype, codec):
    numels = [torch.Size(shape).numel() for shape in shapes]
    return [
        n * dtype.itemsize if codec is None or not n else codec.size(n, shape[-1])
        for n, shape in zip(numels, shapes, strict=True)
    ]


def room_for(shapes, dtype, codec):
    return torch.empty(sum(sizes_of(shapes, dtype, codec)), dtype=torch.uint8)


def unpacked(message, shapes, dtype, codec):
    found = []
    for part, shape in zip(message.split(sizes_of(shapes, dtype, codec)), shapes, strict=True):
        x = torch.empty(shape, dtype=dtype)
        if codec is None or not x.numel():
            x.view(-1).view(torch.uint8).copy_(part)
        else:
            decode_into(x, part, codec)
        found.append(x)
    return found


# ---------------------------------------------------------------- a small model

WIDTH, HEADS, DIM, LENGTH, VOCABULARY = 64, 6, 8, 50, 16


class Attention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        return x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def train(steps, codec=None):
    """Return the losses of all positions, equal on every rank, and the ring; without a codec in one
    process.

    The next token is the one two before.
    """
    torch.manual_seed(0)
    rank, size = (dist.get_rank(), dist.get_world_size()) if codec else (0, 1)
    lengths = [LENGTH // size + (r < LENGTH % size) for r in range(size)]
    ring = Ring(lengths[rank], codec) if codec else None
    attend = (
        ring.attention
        if ring
        else (lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    )
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
        if ring:
            for each in (told, *(p.grad for p in model.parameters())):
                dist.all_reduce(each)  # every rank has the gradient of its positions
        optimizer.step()
        losses.append(float(told))
    return losses, ring


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="none", help="codec of keys and values (default none)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    losses, ring = train(options.steps, options.codec)
    alone, _ = train(options.steps)
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, in one process -> {alone[-1]:.3f}; rank 0 "
            f"sent {ring.sent_bytes / options.steps / 1e3:.1f} kB a step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
