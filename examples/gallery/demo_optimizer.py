"""DeMo (arXiv 2411.19870), decoupled momentum: each rank has its own momentum, and sends only its
fastest components.

    δᵢ ← β·δᵢ + γ·gᵢ     qᵢ = the k largest of each chunk of DCT(δᵢ)     δᵢ ← δᵢ − IDCT(qᵢ)
    x ← (1 − γ·λ)·x − γ·sign(IDCT(q̄))     q̄: of each coefficient the mean over those that sent it

The DCT of a chunk X is C = B·X·Bᵀ with B[k, n] = √(2/N)·cos(π·(2n + 1)·k / 2N), the first row
divided by √2; it is orthonormal, so X = Bᵀ·C·B. Every rank decodes the messages of all, sums them
in the order of ranks, and transforms the sum back in float64, of which only signs are used: so
parameters stay equal bit for bit. With 32 coefficients of each 64 × 64 a step sends 0.38 bits per
parameter to every peer (6 bytes per coefficient; 12 as published).

    torchrun --nproc-per-node 2 examples/gallery/demo_optimizer.py
    torchrun --nproc-per-node 2 examples/gallery/demo_optimizer.py --topk 8

trains a small network by AdamW on exact means of gradients, and by DeMo, and prints both losses and
the bits that each sends.
"""

import argparse
import functools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import commpress


class ChunkedCosine:
    """The transform of a tensor as a matrix of shape[0] rows (one row for a vector), divided into
    the fewest chunks with sides up to ``longest``, of equal shape, padded with zeros."""

    def __init__(self, shape, longest):
        self.shape = tuple(shape)
        self.rows = shape[0] if len(shape) > 1 else 1
        self.columns = math.prod(shape) // self.rows
        self.below, self.beside = -(-self.rows // longest), -(-self.columns // longest)
        self.tall, self.wide = -(-self.rows // self.below), -(-self.columns // self.beside)

    def forward(self, x):
        """Return the coefficients as [chunks, elements of one]."""
        padding = (
            *(0, self.beside * self.wide - self.columns),
            *(0, self.below * self.tall - self.rows),
        )
        chunks = functional.pad(x.reshape(self.rows, self.columns), padding)
        chunks = chunks.view(self.below, self.tall, self.beside, self.wide).transpose(1, 2)
        found = basis(self.tall, x.dtype) @ chunks @ basis(self.wide, x.dtype).T
        return found.reshape(self.below * self.beside, self.tall * self.wide)

    def backward(self, coefficients):
        """Return the tensor with these coefficients."""
        chunks = coefficients.view(self.below, self.beside, self.tall, self.wide)
        chunks = basis(self.tall, chunks.dtype).T @ chunks @ basis(self.wide, chunks.dtype)
        whole = chunks.transpose(1, 2).reshape(self.below * self.tall, self.beside * self.wide)
        return whole[: self.rows, : self.columns].reshape(self.shape)


@functools.cache
def basis(size, dtype):
    frequency, place = (
        torch.arange(size, dtype=torch.float64)[:, None],
        torch.arange(size, dtype=torch.float64),
    )
    found = torch.cos(math.pi / (2 * size) * (2 * place + 1) * frequency) * math.sqrt(2 / size)
    found[0] /= math.sqrt(2)
    return found.to(dtype)


class DeMo(torch.optim.Optimizer):
    """Update float32 parameters on the CPU by signs of shared momentum; they begin with the values
    of rank 0.

    Gradients must not be averaged: do not wrap the model in DistributedDataParallel. ``decay``: β.
    ``topk``, ``chunk``: number of coefficients to keep of each chunk of up to chunk × chunk
    elements. A step with momentum that is not finite on some rank is left out on all. Each rank
    saves and loads its own ``state_dict``.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        *,
        decay=0.999,
        topk=32,
        chunk=64,
        weight_decay=0.0,
        process_group=None,
    ):
        if not (0 <= decay < 1 and 2 <= chunk <= 128 and 1 <= topk <= chunk * chunk):
            raise ValueError(
                f"decay is {decay}, chunk {chunk} and topk {topk}, expected 0 to below 1, 2 to "
                "128, and 1 to chunk · chunk"
            )
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        for _, p in self.each():
            if type(p.data) is not torch.Tensor or p.dtype != torch.float32 or p.is_cuda:
                raise TypeError(
                    f"a parameter of shape {tuple(p.shape)} is {type(p.data).__name__}, {p.dtype} "
                    f"on {p.device}, expected float32 on the CPU. DTensors of tensor parallelism "
                    "and FSDP2 are for commpress.compress(model, mesh=...) and compress_fsdp"
                )
        self.decay, self.topk, self.group = decay, topk, process_group
        self.sent_bytes = self.skipped = 0  # bytes: to each peer
        self.transforms = {}
        for _, p in self.each():
            dist.broadcast(p.data, group=self.group, group_src=0)
            self.transforms[p] = ChunkedCosine(p.shape, chunk)
            self.state[p]["delta"] = torch.zeros_like(p)

    def each(self):
        return [(group, p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        left, message = self.split()
        every = [torch.empty_like(message) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, message, group=self.group)
        self.sent_bytes += message.numel()
        told = [self.values_and_places(each) for each in every]
        if not all(values.isfinite().all() for parts in told for values, _ in parts):
            self.skipped += 1
            return loss
        for i, (group, p) in enumerate(self.each()):
            self.state[p]["delta"].copy_(left[i])
            transform, total = self.transforms[p], None
            for parts in told:  # rank after rank: the same sum everywhere
                values, places = parts[i]
                if total is None:
                    total = values.new_zeros(self.coefficients(p), dtype=torch.float64)
                    count = torch.zeros_like(total)
                total.scatter_add_(1, places, values.double())
                count.scatter_add_(1, places, torch.ones_like(places, dtype=torch.float64))
            x = transform.backward(total / count.clamp(min=1))
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(x.sign().to(p.dtype), alpha=group["lr"])
        return loss

    def split(self):
        """Return the rest of each parameter's momentum, and the bytes to send. A missing gradient
        is zero."""
        left, message = [], []
        for group, p in self.each():
            transform, delta = self.transforms[p], self.state[p]["delta"] * self.decay
            if p.grad is not None:
                delta = delta.add(p.grad, alpha=group["lr"])
            coefficients = transform.forward(delta)
            places = coefficients.abs().topk(self.kept(p), dim=1).indices
            values = coefficients.gather(1, places)
            sent = torch.zeros_like(coefficients).scatter_(1, places, values)
            left.append(delta - transform.backward(sent))
            message += [values.view(-1), places.to(torch.int16).view(-1)]
        return left, torch.cat([part.view(torch.uint8) for part in message])

    def values_and_places(self, message):
        """Parse the components of each parameter from a rank's bytes."""
        found, at = [], 0
        for _, p in self.each():
            shape = self.coefficients(p)[0], self.kept(p)
            end = at + 4 * math.prod(shape)
            values = message[at:end].clone().view(torch.float32).view(shape)
            at, end = end, end + 2 * math.prod(shape)
            places = message[at:end].clone().view(torch.int16).view(shape).long()
            at = end
            found.append((values, places))
        return found

    def coefficients(self, p):
        transform = self.transforms[p]
        return transform.below * transform.beside, transform.tall * transform.wide

    def kept(self, p):
        return min(self.topk, self.coefficients(p)[1])


# ---------------------------------------------------------------- a small network

WIDTH, ROWS = 64, 64


def network():
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def train(steps, *, demo=True, **options):
    """Return losses on test data, the model, and the bits per parameter that a step sends to a
    peer."""
    torch.manual_seed(0)
    model, teacher = network(), network()
    draws = torch.Generator().manual_seed(1 + dist.get_rank())
    tests = torch.randn((512, WIDTH), generator=torch.Generator().manual_seed(0))
    optimizer = (
        DeMo(model.parameters(), lr=2e-3, **options)
        if demo
        else torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    losses = []
    for _ in range(steps):
        x = torch.randn((ROWS, WIDTH), generator=draws)
        optimizer.zero_grad()
        functional.mse_loss(model(x), teacher(x).detach()).backward()
        if not demo:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            losses.append(float(functional.mse_loss(model(tests), teacher(tests))))
    numel = sum(p.numel() for p in model.parameters())
    return losses, model, 8 * optimizer.sent_bytes / steps / numel if demo else 32.0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--topk", type=int, default=32, help="coefficients of a chunk (default 32)")
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    for name, settings in [
        ("AdamW, exact means", {"demo": False}),
        (f"DeMo, {options.topk} of a chunk", {"topk": options.topk, "decay": 0.99}),
    ]:
        losses, _, bits = train(options.steps, **settings)
        if dist.get_rank() == 0:
            print(f"{name:20} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {bits:6.2f} bits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
