"""Train a GPT sharded by FSDP2 with gradients and weights in eight bits, and save the residuals.

torchrun --nproc-per-node 2 examples/fsdp2_gpt.py
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    examples/fsdp2_gpt.py --codec int4
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import commpress
from commpress.cli.gpt import GPT, batch, standard_library


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--weights", default="int8")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoints", type=Path, default=Path("fsdp2_gpt"))
    options = parser.parse_args()

    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)  # every rank makes the same weights, then keeps its shard
    model = GPT(width=options.width, layers=options.layers, length=options.length)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    # after the last fully_shard
    state = commpress.compress_fsdp(model, codec=options.codec, weights=options.weights)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    text, draws = standard_library(), torch.Generator().manual_seed(1 + rank)
    for step in range(options.steps):
        loss = model(*batch(text, 8, options.length, draws))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % max(options.steps // 10, 1) == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    # weights: torch.distributed.checkpoint
    torch.save(state.state_dict(), options.checkpoints / f"residuals-{rank}.pt")
    if rank == 0:
        print(state.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
