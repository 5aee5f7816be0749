"""Small layers of experts on one rank, in memory and in a store, and what they are trained with."""

import torch
from torch.utils.checkpoint import checkpoint

import commpress
from commpress.collectives.transports.loopback import Loopback
from commpress.tiered_mem import Options

WIDTH = 16
# bytes of an expert's weights in the store: two of 16 · 24 elements and two of at most 64
BLOCK = 4 * 896
OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
SMALL = Options(chunk_bytes=64 << 10, pack_below=0, pack_bytes=32 << 10, segment_bytes=4 << 20)


def open_store(folder, host="1MiB"):
    return commpress.TieredStore.open(folder, host=host, engine="threads", options=SMALL)


class Expert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 24), torch.nn.Linear(24, WIDTH)

    def forward(self, rows):
        return self.down(torch.nn.functional.silu(self.up(rows)))


class Net(torch.nn.Module):
    """Layers of experts with gates; ``remember``: activation checkpointing of each."""

    def __init__(self, experts=6, layers=2, remember=None, dtype=None, **options):
        super().__init__()
        torch.manual_seed(0)
        transport = Loopback(1).transport(0)
        self.gates = torch.nn.ModuleList(torch.nn.Linear(WIDTH, experts) for _ in range(layers))
        lists = [[Expert() for _ in range(experts)] for _ in range(layers)]
        self.to(dtype)
        self.remember = remember
        self.layers = torch.nn.ModuleList(
            commpress.moe.Experts(
                [e.to(dtype) for e in one],
                commpress.ExpertExchange(experts, process_group=transport),
                **options,
            )
            for one in lists
        )

    def _layer(self, i, rows):
        gates, chosen = self.gates[i](rows).softmax(1).topk(2)
        return rows + self.layers[i](rows, chosen, gates)

    def forward(self, rows):
        for i in range(len(self.layers)):
            if self.remember is None:
                rows = self._layer(i, rows)
            else:
                rows = checkpoint(self._layer, i, rows, use_reentrant=self.remember)
        return rows


def tiered(
    folder,
    *,
    resident=2,
    host="1MiB",
    clip=None,
    optimizer=torch.optim.AdamW,
    options=OPTIONS,
    **more,
):
    """A net in a store, its optimizer and the store."""
    store = open_store(folder, host)
    net = Net(store=commpress.moe.ExpertTiers(store, resident), **more)
    return (
        net,
        commpress.moe.ExpertOptimizer(net.parameters(), optimizer, max_grad_norm=clip, **options),
        store,
    )


def in_memory(optimizer=torch.optim.AdamW, options=OPTIONS, **more):
    net = Net(**more)
    return net, optimizer(net.parameters(), **options)


def loss_of(net, step, part, tokens=5):
    """Few tokens: some experts have none."""
    draw = torch.Generator().manual_seed(100 * step + part)
    rows = torch.randn(tokens, WIDTH, generator=draw, dtype=torch.float32).requires_grad_()
    return net(rows.to(net.gates[0].weight.dtype)).float().square().mean()


def train(net, optimizer, first, last, parts=2, clip=None):
    losses = []
    for step in range(first, last):
        for part in range(parts):
            loss = loss_of(net, step, part)
            loss.backward()
            losses.append(loss.item())
        if clip:
            parameters = list(net.parameters())
            total = (
                sum(
                    float(p.grad.norm(dtype=torch.float64)) ** 2
                    for p in parameters
                    if p.grad is not None
                )
                ** 0.5
            )
            factor = torch.clamp(clip / (torch.tensor(total, dtype=torch.float32) + 1e-6), max=1.0)
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
    return losses
