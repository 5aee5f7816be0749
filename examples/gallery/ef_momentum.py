"""dist-EF-SGDM (arXiv 1905.10936): SGD with Nesterov's momentum over a slow network, in one bit.

    Δᵢ = Q(gᵢ + eᵢ)        Δ = Q(mean Δᵢ + s)        eᵢ, s: residuals
    m ← μ·m + Δ            θ ← θ − lr·(Δ + μ·m)

Momentum is equal on all ranks, so only gradients are sent. The class lists its states;
``commpress.Stateful`` adds saving and loading, other numbers of ranks, newcomers and deaths.

    torchrun --nproc-per-node 2 examples/gallery/ef_momentum.py
"""

import torch
import torch.distributed as dist

import commpress


class EFMomentum(commpress.Stateful, torch.optim.Optimizer):
    """SGD with momentum: ``codec`` compresses gradients of at least ``min_numel`` elements, smaller
    ones are exact."""

    def __init__(self, params, lr=0.1, momentum=0.9, *, codec="sign", min_numel=256, **among):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "momentum": momentum})
        self.connect(codec=codec, min_numel=min_numel, **among)
        self.trained = [(p, group) for group in self.param_groups for p in group["params"]]
        self.shapes = {f"{i:05d}": p.shape for i, (p, _) in enumerate(self.trained)}
        self.momenta = [torch.zeros_like(p, dtype=torch.float32) for p, _ in self.trained]

    def copies(self):
        return dict(zip(self.shapes, self.momenta, strict=True))

    def schedule(self):
        return {"lr": [group["lr"] for group in self.param_groups]}

    def follow(self, schedule, change=None):
        for group, lr in zip(self.param_groups, schedule["lr"], strict=True):
            group["lr"] = lr

    def numels(self):
        return {name: shape.numel() for name, shape in self.shapes.items()}

    def step(self):
        """Take one step; one that is not finite on some rank is left out on all."""
        self.channel.run(self.steps())

    @torch.no_grad()
    def steps(self):
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p, _ in self.trained]
        buffer = torch.cat([g.float().reshape(-1) for g in gradients])
        taken = yield from self.averaging(buffer, self.shapes)
        means = buffer.split([p.numel() for p, _ in self.trained])
        for (p, group), m, mean in zip(self.trained, self.momenta, means, strict=True):
            if taken:
                m.mul_(group["momentum"]).add_(mean.view_as(m))
                p.sub_(group["lr"] * (mean.view_as(m) + group["momentum"] * m))
        return taken


def solve(codec, steps=300):
    """Minimize a quadratic with gradients that are mostly noise; the learning rate falls to
    zero."""
    target, model = torch.linspace(-1, 1, 512).repeat(64, 1), torch.zeros(64, 512)
    optimizer = EFMomentum([model], codec=codec)
    torch.manual_seed(dist.get_rank())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / steps)
        model.grad = model - target + torch.randn_like(target)
        optimizer.step()
    return model, float((model - target).square().mean().sqrt()), optimizer.channel.sent_bytes


def main():
    dist.init_process_group("gloo")
    (_, exact, whole), (_, error, sent) = solve("none"), solve("sign")
    if dist.get_rank() == 0:
        print(f"distance {error:.3f}, exact {exact:.3f}; {whole / sent:.0f} times fewer bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
