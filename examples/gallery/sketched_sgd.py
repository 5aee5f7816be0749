"""Sketched SGD (Ivkin et al. 2019, arXiv 1903.04488): ranks sum small tables in place of gradients,
and update by the largest elements according to the sum of tables.

    u ← m·u + g          v ← v + u                     on each rank
    S = Σ sketch(v)                                    one all-reduce of rows × columns floats
    Δ = Σ v at the largest elements according to S     one all-reduce of 2k floats; k are used
    w ← w − γ·Δ/P        u, v ← 0 there                the rest of v waits: error feedback

A count sketch is linear: the sum of sketches is the sketch of the sum, so a network that sums could
sum them. Each element is added to one cell of every row of the table, with a sign, and is estimated
by the median of its cells. On an ordinary network ``topk-64`` sends fewer bytes and is faster.

    torchrun --nproc-per-node 2 examples/gallery/sketched_sgd.py --steps 400
"""

import argparse
import os

import torch
import torch.distributed as dist


class CountSketch:
    """A table of ``rows`` by ``columns`` cells for vectors of ``numel`` elements."""

    def __init__(self, numel: int, rows: int, columns: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)  # the same hashes on every rank
        self.cell = torch.randint(columns, (rows, numel), generator=draw)
        self.sign = torch.randint(2, (rows, numel), generator=draw) * 2.0 - 1.0
        self.columns = columns

    def of(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.zeros(len(self.cell), self.columns)
        return table.scatter_add_(1, self.cell, self.sign * x)

    def estimate(self, table: torch.Tensor) -> torch.Tensor:
        return (table.gather(1, self.cell) * self.sign).median(dim=0).values


class SketchedSGD(torch.optim.Optimizer):
    """Momentum SGD that sends a sketch of ``rows`` × ``columns`` and 2 ``k`` values a step."""

    def __init__(self, params, lr, *, momentum=0.9, k, rows=5, columns, seed=0):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        numel = sum(p.numel() for p in self.parameters)
        if not 0 < k <= numel:
            raise ValueError(f"k is {k}, expected 1 to {numel}, the number of parameters")
        self.k, self.candidates = k, min(2 * k, numel)
        self.sketch = CountSketch(numel, rows, columns, seed)
        self.velocity, self.waiting = torch.zeros(2, numel)
        self.sent = rows * columns + self.candidates  # floats of a step

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        gradient = torch.cat([p.grad.flatten() for p in self.parameters])
        self.velocity.mul_(group["momentum"]).add_(gradient)
        self.waiting.add_(self.velocity)
        table = self.sketch.of(self.waiting)
        dist.all_reduce(table)
        likely = self.sketch.estimate(table).abs().topk(self.candidates).indices
        values = self.waiting[likely]
        dist.all_reduce(values)  # exact, so a wrong estimate wastes a place but adds no error
        best = values.abs().topk(self.k).indices
        chosen = likely[best]
        change = torch.zeros_like(self.waiting)
        change[chosen] = values[best] / dist.get_world_size()
        self.velocity[chosen] = 0.0
        self.waiting[chosen] = 0.0
        at = 0
        for p in self.parameters:
            p.sub_(change[at : at + p.numel()].view_as(p), alpha=group["lr"])
            at += p.numel()


def train(steps: int, k: int = 3000) -> tuple[list[float], torch.nn.Linear, float]:
    """Return the losses of a regression of 90,000 weights, the model, and the share of its floats
    that were sent."""
    torch.manual_seed(0)
    truth, model = torch.randn(300, 300) / 10, torch.nn.Linear(300, 300, bias=False)
    optimizer = SketchedSGD(model.parameters(), 0.003, momentum=0.5, k=k, columns=2000)
    draw, losses = torch.Generator().manual_seed(1 + dist.get_rank()), []
    for _ in range(steps):
        x = torch.randn(64, 300, generator=draw)
        loss = (model(x) - x @ truth.T).square().sum(dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model, optimizer.sent / model.weight.numel()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--k", type=int, default=3000, help="elements that move in a step")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun, as its help shows")
    dist.init_process_group("gloo")
    losses, _, share = train(options.steps, options.k)
    if dist.get_rank() == 0:
        for step in range(0, options.steps, 50):
            print(f"step {step + 1}: loss {losses[step]:.3f}")
        print(
            f"step {options.steps}: loss {losses[-1]:.3f}, {100 * share:.0f} % of the floats sent"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
