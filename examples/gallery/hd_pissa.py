"""Different adapters on every rank (HD-PiSSA): each has its own singular vectors of the weights,
and their updates are summed.

    torchrun --nproc-per-node 4 examples/gallery/hd_pissa.py
    torchrun --nproc-per-node 4 examples/gallery/hd_pissa.py --same

``--same``: the first singular vectors on every rank, as PiSSA.

Rank k has A, B from the components k·r … (k + 1)·r of W = U S Vᵀ. Each computes the steps of its A
and B from its own data, the encoded factors are gathered, and every rank adds all ΔB A + B ΔA to W:
an update of rank 2·r·ranks, while equal adapters have 2·r.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import commpress
from commpress.integrations.pipeline import decode_into, edge_codec, encoded

WIDTH, R, ROWS = 48, 2, 64


class Adapter:
    """A rank's components of one weight, with Adam's moments."""

    def __init__(self, weight, slot, lr):
        u, s, v = torch.linalg.svd(weight.detach(), full_matrices=False)
        mine = slice(slot * R, (slot + 1) * R)
        root = s[mine].sqrt()
        self.weight = weight
        # W's part is b @ a
        self.a, self.b = nn.Parameter(root[:, None] * v[mine]), nn.Parameter(u[:, mine] * root)
        self.optimizer = torch.optim.Adam([self.a, self.b], lr)

    def step(self):
        """Return the factors of this rank's update, [[ΔB, B], [A; ΔA]], with the product ΔB A' + B
        ΔA."""
        gradient, a, b = self.weight.grad, self.a.detach().clone(), self.b.detach().clone()
        self.a.grad, self.b.grad = b.T @ gradient, gradient @ a.T
        self.optimizer.step()
        return torch.cat([self.b.detach() - b, b], 1), torch.cat(
            [self.a.detach(), self.a.detach() - a], 0
        )


def gathered(tensor, codec):
    """Gather the tensors of all ranks, decoded to the same bits on every rank."""
    how, size = edge_codec(codec), dist.get_world_size()
    message = tensor.contiguous() if how is None else encoded(tensor.contiguous(), how)
    every = [torch.empty_like(message) for _ in range(size)]
    dist.all_gather(every, message)
    if how is None:
        return every
    found = [torch.empty(tensor.shape) for _ in range(size)]
    for out, one in zip(found, every, strict=True):
        decode_into(out, one, how)
    return found


def train(steps, codec="int8", *, same=False, lr=1e-2):
    """Return the losses of all ranks' data, the model, and the change of each weight."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
    )
    teacher = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False)
    )
    before = [p.detach().clone() for p in model.parameters()]
    slot = 0 if same else dist.get_rank()
    adapters = [
        Adapter(p, slot, lr / dist.get_world_size() if same else lr) for p in model.parameters()
    ]
    draws, losses = torch.Generator().manual_seed(1 + dist.get_rank()), []
    for _ in range(steps):
        x = torch.randn((ROWS, WIDTH), generator=draws)
        loss = (model(x) - teacher(x).detach()).square().mean()
        model.zero_grad()
        loss.backward()
        for adapter in adapters:
            left, right = (gathered(factor, codec) for factor in adapter.step())
            with torch.no_grad():
                for one, other in zip(left, right, strict=True):
                    adapter.weight += one @ other
        told = loss.detach().clone()
        dist.all_reduce(told)
        losses.append(float(told) / dist.get_world_size())
    return losses, model, [p.detach() - b for p, b in zip(model.parameters(), before, strict=True)]


def directions(update):
    """Count the directions of a weight's update with at least a hundredth of the largest."""
    values = torch.linalg.svdvals(update)
    return int((values > 0.01 * values[0]).sum())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--codec", default="int8", help="codec of the factors (default int8)")
    parser.add_argument("--same", action="store_true", help="the first components on every rank")
    options = parser.parse_args()
    commpress.init_process_group("gloo")
    losses, _, updates = train(options.steps, options.codec, same=options.same)
    if dist.get_rank() == 0:
        print(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, updates in "
            f"{[directions(u) for u in updates]} of {WIDTH} directions"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
