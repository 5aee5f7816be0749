"""A curriculum of sequence lengths: short sequences first, the same number of tokens in every step,
gradients in one bit.

    torchrun --nproc-per-node 2 examples/gallery/length_curriculum.py
    torchrun --nproc-per-node 2 examples/gallery/length_curriculum.py --constant

``--constant``: full length from the start.

Positions that no sequence reaches yet have gradients of zero. Their rows of the compressed gradient
have residuals, which must not grow while these positions are unused. "residual" is the norm of the
residuals relative to a gradient's.
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import commpress
from commpress.cli.gpt import GPT, batch, standard_library

WIDTH, LAYERS, LONGEST, TOKENS = 48, 2, 64, 512


def length_of(step, steps, *, constant=False, shortest=8):
    """Return the length of a step, which doubles over the first two thirds of the steps."""
    if constant:
        return LONGEST
    stages = (LONGEST // shortest).bit_length()
    return min(LONGEST, shortest << (stages * step * 3 // (2 * max(steps, 1))))


def train(steps, codec="sign", *, constant=False):
    """Return losses at full length from time to time, the model, and norms of residuals and of a
    gradient."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(GPT(width=WIDTH, layers=LAYERS, length=LONGEST))
    state = commpress.compress(ddp, codec=codec)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=3e-3)
    text, draws = standard_library(1.0), torch.Generator().manual_seed(1 + dist.get_rank())
    tests = batch(text, 16, LONGEST, torch.Generator().manual_seed(0))
    found, residuals, size = [], [], 0.0
    for step in range(steps):
        length = length_of(step, steps, constant=constant)
        ddp(*batch(text, TOKENS // length, length, draws)).backward()
        size = float(torch.stack([p.grad.norm() for p in ddp.parameters()]).norm())
        optimizer.step()
        optimizer.zero_grad()
        residuals.append(residual_norm(state) / max(size, 1e-12))
        if (step + 1) % max(steps // 5, 1) == 0:
            with torch.no_grad():
                found.append(float(ddp.module(*tests)))
            if dist.get_rank() == 0:
                print(
                    f"step {step + 1}, length {length}: loss {found[-1]:.3f}, "
                    f"residual {residuals[-1]:.2f} gradients"
                )
    return found, ddp.module, residuals


def residual_norm(state):
    """Return the norm of this rank's residuals."""
    parts = [t for t in tensors_in(state.state_dict()) if t.is_floating_point()]
    return float(torch.stack([t.float().norm() for t in parts]).norm()) if parts else 0.0


def tensors_in(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_in(value)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_in(value)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--codec", default="sign")
    parser.add_argument(
        "--constant", action="store_true", help="sequences of full length from the start"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.steps, options.codec, constant=options.constant)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
