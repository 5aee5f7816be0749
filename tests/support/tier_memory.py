"""A process that trains 64 experts with 8 in memory and prints, in MiB: what it had before, what
the formula adds, its peak, and what all experts with gradients and moments would take; then what
the system cleared for it in the last backward."""

import resource
import tempfile

import torch

import commpress
from commpress.collectives.transports.loopback import Loopback

WIDTH, HIDDEN, EXPERTS, RESIDENT, ROWS = 256, 1024, 64, 8, 128


class Expert(torch.nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.up, self.down = (
            torch.nn.Linear(WIDTH, hidden, bias=False),
            torch.nn.Linear(hidden, WIDTH, bias=False),
        )

    def forward(self, rows):
        return self.down(torch.nn.functional.silu(self.up(rows)))


def layer_of(experts, resident, host, hidden):
    store = commpress.TieredStore.open(f"{tempfile.mkdtemp()}/store", host=host, engine="threads")
    exchange = commpress.ExpertExchange(experts, process_group=Loopback(1).transport(0))
    made = (Expert(hidden) for _ in range(experts))
    layer = commpress.moe.Experts(made, exchange, store=store, resident=resident)
    return layer, commpress.moe.ExpertOptimizer(
        layer.parameters(), torch.optim.AdamW, lr=1e-3, fused=True
    )


def train(layer, optimizer, experts, steps):
    """MiB of pages that the last backward got from the system."""
    pages = 0
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        chosen = torch.stack([torch.randperm(experts, generator=draw)[:2] for _ in range(ROWS)])
        loss = (
            layer(torch.randn(ROWS, WIDTH, generator=draw), chosen, torch.ones(ROWS, 2))
            .square()
            .mean()
        )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        loss.backward()
        pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        optimizer.step()
    return pages * resource.getpagesize() / 2**20


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(*layer_of(2, 1, "8MiB", 256), 2, 1)  # imports, threads, and 8 MiB of a store
    expert = 2 * 4 * WIDTH * HIDDEN
    before, host = peak() - 8, RESIDENT * 4 * expert + (1 << 20)
    cleared = train(*layer_of(EXPERTS, RESIDENT, host, HIDDEN), EXPERTS, 3)
    saved = 2 * ROWS * 4 * (3 * HIDDEN + 3 * WIDTH)  # activations
    print(
        before, (host + 2 * expert + saved) / 2**20, peak(), EXPERTS * 4 * expert / 2**20, cleared
    )
