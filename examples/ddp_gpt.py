"""Train a small GPT on the source of Python's standard library with a compressed optimizer.

torchrun --nproc-per-node 2 examples/ddp_gpt.py
torchrun --nproc-per-node 2 examples/ddp_gpt.py --optimizer onebit --steps 500
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.gpt import GPT, batch, standard_library


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizer", choices=["zero-one", "onebit", "lamb"], default="zero-one")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(
        GPT(width=options.width, layers=options.layers, length=options.length)
    )
    cls = {
        "zero-one": commpress.ZeroOneAdam,
        "onebit": commpress.OneBitAdam,
        "lamb": commpress.OneBitLamb,
    }[options.optimizer]
    optimizer = cls(
        ddp.module.named_parameters(), lr=options.lr, weight_decay=0.01, max_grad_norm=1.0
    )
    commpress.overlap(ddp, optimizer)

    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps, cycle_momentum=False
    )
    text, draws = standard_library(), torch.Generator().manual_seed(dist.get_rank())
    for step in range(options.steps):
        loss = ddp(*batch(text, 8, options.length, draws))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and (step + 1) % max(options.steps // 10, 1) == 0:
            print(
                f"step {step + 1}: loss {loss.item():.3f}, {optimizer.counters.ratio:.1f} times "
                "fewer bytes"
            )
    if hasattr(optimizer, "synchronize"):
        optimizer.synchronize()  # afterwards all ranks have the same parameters
    if dist.get_rank() == 0:
        print(optimizer.counters.summary())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
