"""Train a small GPT with 8 experts in each layer, divided among the ranks, on the source of
Python's standard library.

    # two "nodes" of two ranks, exact tokens
    torchrun --nproc-per-node 4 examples/moe_gpt.py
    # a quarter of the bytes
    torchrun --nproc-per-node 4 examples/moe_gpt.py --codec int8
    # copies of busy experts, and a picture
    torchrun --nproc-per-node 4 examples/moe_gpt.py --copies 4 --plot load.svg
"""

import argparse

import torch
import torch.distributed as dist
from expert_load import draw
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.gpt import GPT, TransformerBlock, batch, standard_library


class Routed(nn.Module):
    """A gate, and experts, of which it chooses two for each token."""

    def __init__(self, width: int, experts: int, **options) -> None:
        super().__init__()
        self.gate, self.balance, self.seen = (
            nn.Linear(width, experts, bias=False),
            torch.zeros(()),
            torch.zeros(0, width),
        )
        every = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        ]
        self.experts = commpress.moe.Experts(every, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.detach()
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2)
        share = F.one_hot(chosen, scores.shape[1]).float().mean((0, 1))
        # 1 if all experts get equal shares
        self.balance = scores.shape[1] * (share * scores.mean(0)).sum()
        return self.experts(x, chosen, weights / weights.sum(-1, keepdim=True))


class RoutedBlock(TransformerBlock):
    """A block of the GPT with experts in place of its two linear layers."""

    def __init__(self, width: int, heads: int, experts: int, **options) -> None:
        super().__init__(width, heads)
        self.up, self.down, self.routed = (
            nn.Identity(),
            nn.Identity(),
            Routed(width, experts, **options),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2)
            for y in self.qkv(self.norm1(x)).split(c, dim=2)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        )
        return x + self.routed(self.norm2(x).flatten(0, 1)).view(b, t, c)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--codec",
        default="none",
        help="codec of tokens and results: none, bf16, int8, int4 or fp8",
    )
    parser.add_argument(
        "--topology",
        help="nodes and ranks of each, as 1x4 (default two nodes, one if ranks are odd)",
    )
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument(
        "--balance", type=float, default=0.01, help="weight of the loss that makes gates even"
    )
    parser.add_argument(
        "--copies",
        type=int,
        default=0,
        help="of hot experts, in each layer, from the middle of the run on",
    )
    parser.add_argument(
        "--capacity",
        type=float,
        help="of an expert, times its even share; choices beyond it are dropped",
    )
    parser.add_argument(
        "--plot",
        help="a picture of the experts' load over time: .svg, .png or .pdf (needs matplotlib)",
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--states",
        help="a file for what the last gate sees: for benchmarks expert_dispatch --states",
    )
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    rank, width = dist.get_rank(), options.width
    model = GPT(width=width, layers=options.layers, length=options.length)
    size = dist.get_world_size()
    topology = options.topology or (f"1x{size}" if size % 2 else f"2x{size // 2}")
    exchange = {"codec": (options.codec, options.codec), "topology": topology}
    for i in range(options.layers):
        model.blocks[i] = RoutedBlock(
            width, 4, options.experts, capacity=options.capacity, **exchange
        )
    layers = commpress.moe.parallelise(model)  # DDP leaves the experts alone
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps, cycle_momentum=False
    )

    samples = []  # of Metrics
    named = {f"layer {i}": layer.exchange for i, layer in enumerate(layers)}
    metrics = commpress.Metrics(
        experts=named, to=[samples.append], every=max(options.steps // 60, 1)
    )

    text = standard_library()
    learnt, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    draws = torch.Generator().manual_seed(1000 * options.seed + rank)
    for step in range(options.steps):
        loss = ddp(*batch(learnt, 8, options.length, draws))
        balance = sum(block.routed.balance for block in model.blocks) / options.layers
        (loss + options.balance * balance).backward()
        commpress.moe.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        metrics.step()
        if options.copies and step + 1 == options.steps // 2:
            made = commpress.moe.copy_experts(model, options.copies)
            if rank == 0:
                print(f"step {step + 1}: ranks of copied experts, by layer: {made}")
        if rank == 0 and (step + 1) % max(options.steps // 10, 1) == 0:
            fullest = layers[0].exchange.counters.imbalance
            print(
                f"step {step + 1}: loss {loss.item():.3f}, {fullest:.2f} times the mean come to "
                "the fullest rank"
            )

    if options.plot:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, samples)
        if rank == 0:
            draw(
                options.plot,
                every,
                f"Load of {options.experts} experts in each of {options.layers} layers",
            )
    model.eval()
    with torch.no_grad():
        draws = torch.Generator().manual_seed(rank)
        losses = torch.stack(
            [model(*batch(held_out, 16, options.length, draws)) for _ in range(8)]
        ).mean()
    dist.all_reduce(losses)
    seen = [layer.exchange.counters for layer in layers]
    inside, between = (
        sum(getattr(each, name) for each in seen) / 1e6
        for name in ("inside_bytes", "between_bytes")
    )
    if rank == 0:
        if options.states:
            last = model.blocks[-1].routed
            torch.save({"tokens": last.seen, "gate": last.gate.weight.detach()}, options.states)
        print(f"rank 0 sent {inside:.1f} MB inside its node and {between:.1f} MB to others")
        print(f"held-out loss {losses.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
