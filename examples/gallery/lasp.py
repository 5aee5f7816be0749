"""LASP (arXiv 2404.02882): linear attention of one sequence on several ranks, which pass its state
from rank to rank.

    y_t = q_t · Σ_{s ≤ t} λ^(t − s) k_s·v_sᵀ       inside a rank as a matrix, before it as one state
    before_r = λ^n · before_{r−1} + state_{r−1}     n: positions of rank r − 1

A rank sends one state of heads × dim × dim numbers to the next, for any length of the sequence;
gradients return on the same path. With a codec the state is encoded at every rank, so its errors
add up, damped by λ.

    torchrun --nproc-per-node 2 examples/gallery/lasp.py
    torchrun --nproc-per-node 2 examples/gallery/lasp.py --length 400

trains a small model on divided sequences and, for comparison, in one process: the losses are equal
up to rounding, and the bytes are the same for every length.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import commpress
from commpress.integrations.pipeline import decode_into, edge_codec, encoded


class Chain:
    """Ranks of a group in the order of their positions. ``codec``: codec of states and their
    gradients: int8, int4, fp8, bf16, none or a registered one."""

    def __init__(self, codec="none", *, group=None):
        self.group, self.sent_bytes, self.codec = group, 0, edge_codec(codec)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def prefix(self, state, decay):
        """Return the sum of the states of all ranks before this one, each times the ``decay`` of
        the ranks in between, which is broadcast."""
        decay = torch.as_tensor(decay, dtype=state.dtype)
        return Prefix.apply(state, decay, self)

    def along(self, own, decay, by):
        """Return the state from the rank before (``by`` = 1) or after (−1); send decay times it
        plus ``own`` to the next one."""
        received, to, source = torch.zeros_like(own), self.rank + by, self.rank - by
        if 0 <= source < self.size:
            if self.codec is None:
                dist.recv(received, group=self.group, group_src=source)
            else:
                size = self.codec.size(own.numel(), own.shape[-1])
                message = torch.empty(size, dtype=torch.uint8)
                dist.recv(message, group=self.group, group_src=source)
                decode_into(received, message, self.codec)
        if 0 <= to < self.size:
            message = (received * decay + own).contiguous()
            message = message if self.codec is None else encoded(message, self.codec)
            self.sent_bytes += message.nbytes
            dist.send(message, group=self.group, group_dst=to)
        return received


class Prefix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, decay, chain):
        ctx.save_for_backward(decay)
        ctx.chain = chain
        return chain.along(state, decay, 1)

    @staticmethod
    def backward(ctx, gradient):
        """Pass gradients in the opposite direction."""
        (decay,) = ctx.saved_tensors
        return ctx.chain.along(gradient.contiguous(), decay, -1), None, None


# ---------------------------------------------------------------- a small model

WIDTH, HEADS, DIM, VOCABULARY, DECAY = 64, 6, 8, 16, 0.9


class LinearAttention(nn.Module):
    """Linear attention. ``chain`` None: this rank has all positions."""

    def __init__(self, chain):
        super().__init__()
        self.chain = chain
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, DIM)) for part in self.qkv(x).chunk(3, -1))
        q, k, steps = q.softmax(-1), k.softmax(-1), torch.arange(x.shape[1])
        apart = (steps[:, None] - steps[None, :]).clamp(min=0)
        inside = torch.einsum("bthd,bshd->bhts", q, k) * (DECAY**apart).tril()
        y = torch.einsum("bhts,bshd->bthd", inside, v)
        if self.chain is not None:
            own = torch.einsum("s,bshd,bshe->bhde", DECAY ** (len(steps) - 1 - steps), k, v)
            before = self.chain.prefix(own, DECAY ** len(steps))
            y = y + torch.einsum("t,bthd,bhde->bthe", DECAY ** (steps + 1), q, before)
        return x + self.out(y.flatten(2))


def train(steps, codec=None, *, length=50):
    """Return the losses of all positions, equal on every rank, and the chain; without a codec in
    one process.

    The next token is the one two before.
    """
    torch.manual_seed(0)
    rank, size = (dist.get_rank(), dist.get_world_size()) if codec else (0, 1)
    lengths = [length // size + (r < length % size) for r in range(size)]
    chain = Chain(codec) if codec else None
    model = nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        LinearAttention(chain),
        LinearAttention(chain),
        nn.Linear(WIDTH, VOCABULARY),
    )
    optimizer, losses = torch.optim.Adam(model.parameters(), 3e-3), []
    first = sum(lengths[:rank])
    for step in range(steps):
        start = torch.randint(VOCABULARY, (4, 2), generator=torch.Generator().manual_seed(step % 4))
        tokens = start.repeat(1, length // 2 + 1)[:, : length + 1]
        x, y = (tokens[:, at : at + lengths[rank]] for at in (first, first + 1))
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = loss / (4 * length)
        optimizer.zero_grad()
        loss.backward()
        told = loss.detach().clone()
        if chain:
            for each in (told, *(p.grad for p in model.parameters())):
                dist.all_reduce(each)  # every rank has the gradient of its positions
        optimizer.step()
        losses.append(float(told))
    return losses, chain


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="none", help="codec of states (default none)")
    parser.add_argument("--length", type=int, default=50, help="positions (default 50)")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    losses, chain = train(options.steps, options.codec, length=options.length)
    alone, _ = train(options.steps, length=options.length)
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, in one process -> {alone[-1]:.3f}; rank 0 "
            f"sent {chain.sent_bytes / options.steps / 1e3:.1f} kB a step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
