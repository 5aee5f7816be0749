"""Train a transformer whose parameters, gradients and optimizer state do not fit into memory.

A GPT on bytes of Python's standard library, built on the meta device: the whole model is never in
memory.

    python examples/larger_than_memory.py --folder /nvme/run1                    # 16.5 GiB of state
    python examples/larger_than_memory.py --folder /nvme/run1 --width 512 --layers 24 --host 0.3
    python examples/larger_than_memory.py --folder /nvme/run1 --micro-batches 8     # a step
    python examples/larger_than_memory.py --folder /nvme/run1 --in-backward         # fewer bytes
    python examples/larger_than_memory.py --plain                     # the same in memory: the same
                                                                      losses
    python examples/larger_than_memory.py --plain --forget --steps 2  # the first two of these, in
                                                                      half of it
"""

import argparse
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import commpress
from commpress.cli.gpt import standard_library

HEAD, WORDS = 64, 256


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.after, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for t in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = 0.02 * (self.words(ids) + self.places(torch.arange(ids.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(model: GPT, text: torch.Tensor, step: int, length: int, batch: int) -> torch.Tensor:
    """Return the loss of one of two alternating batches, so that a few steps show whether the model
    learns."""
    starts = torch.randint(
        len(text) - length, (batch,), generator=torch.Generator().manual_seed(step % 2)
    )
    ids = torch.stack([text[s : s + length + 1] for s in starts.tolist()]).long()
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def clip(model: GPT, limit: float) -> None:
    """Clip like Offloaded, by a norm summed in double."""
    squares = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float64).square() for p in model.parameters()
    ]
    torch.nn.utils.clip_grads_with_norm_(
        model.parameters(), limit, torch.stack(squares).sum().sqrt().float()
    )


class OneByOne:
    """AdamW for one parameter after the other, without keeping moments and gradients: valid for one
    step only."""

    def __init__(self, model: GPT, **adam: Any) -> None:
        self.parameters, self.adam = list(model.parameters()), adam

    def step(self) -> None:
        for parameter in self.parameters:
            torch.optim.AdamW([parameter], **self.adam).step()
            parameter.grad = None

    def zero_grad(self) -> None:
        """Do nothing: gradients were dropped by ``step``."""


def peak() -> float:
    """Return the GiB of this process's peak memory, as counted by the kernel."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 2**20


def size_of(folder: str) -> float:
    """Return the GiB that the files of a folder take on disk, as counted by du, including free room
    between tensors."""
    return (
        sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())
        / 2**30
    )


def train(
    options: argparse.Namespace,
    model: GPT,
    optimizer: torch.optim.Optimizer | OneByOne,
    streamed: Any = None,
) -> None:
    text, parts = standard_library(), options.micro_batches

    def loss_of_part(part: int) -> torch.Tensor:
        return loss_of(model, text, part, options.length, options.batch) / parts

    for step in range(options.steps):
        begin = perf_counter()
        if streamed is not None and parts > 1 and not options.one_by_one:
            losses = streamed.accumulate(loss_of_part, range(step, step + parts))
        else:
            losses = []
            for part in range(step, step + parts):
                loss = loss_of_part(part)
                loss.backward()
                losses.append(loss.detach())
        computed = perf_counter()
        if options.plain:
            clip(model, 1.0)
        if step < options.steps - 1 or not options.forget:
            optimizer.step()
            optimizer.zero_grad()
        now, loss = perf_counter(), sum(loss.item() for loss in losses)
        print(
            f"step {step}  loss {loss:.9f}  {computed - begin:.1f} s forward and backward, "
            f"{now - computed:.1f} s update, peak {peak():.2f} GiB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="store")
    parser.add_argument("--host", type=float, default=0.95, help="GiB of the store's host memory")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=1, help="batches in a step")
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="a forward and backward for each of them, for comparison",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--chunk-mb", type=float, default=16.0)
    parser.add_argument("--in-backward", action="store_true", help="updates, without clipping")
    parser.add_argument(
        "--progress", type=float, default=5.0, help="seconds between lines about a step; 0: none"
    )
    parser.add_argument("--plain", action="store_true", help="in memory, for comparison")
    parser.add_argument(
        "--forget",
        action="store_true",
        help="with --plain: two steps at most, moments are not kept",
    )
    options = parser.parse_args()
    if options.forget and (not options.plain or options.steps > 2):
        parser.error("--forget is for --plain and at most two steps")
    torch.manual_seed(1)
    with torch.device("cpu" if options.plain else "meta"):
        model = GPT(options.width, options.layers, options.length)
    count = sum(p.numel() for p in model.parameters())
    size = f"{16 * count / 2**30:.2f} GiB of parameters, gradients and moments"
    print(f"{count / 1e6:.0f} million parameters: {size}", flush=True)
    adam = {"lr": options.lr, "weight_decay": 0.1, "fused": True}
    if options.plain:
        kept = torch.optim.AdamW(model.parameters(), **adam)
        train(options, model, OneByOne(model, **adam) if options.forget else kept)
        return
    with commpress.TieredStore.open(options.folder, host=int(options.host * 2**30)) as store:
        print(f"first values go into {options.folder}, block by block", flush=True)
        streamed = commpress.stream(
            model, store=store, chunk_mb=options.chunk_mb, progress=options.progress or None
        )
        print(f"moments beside them; peak {peak():.2f} GiB so far", flush=True)
        adam |= {"gradients": "backward"} if options.in_backward else {"max_grad_norm": 1.0}
        optimizer = commpress.Offloaded(
            model.parameters(), torch.optim.AdamW, store=store, chunk_mb=options.chunk_mb, **adam
        )
        train(options, model, optimizer, streamed)
        written = f"written {store.wear.written / 2**30:.1f} GiB in all"
        print(f"on disk {size_of(options.folder):.2f} GiB, {written}", flush=True)


if __name__ == "__main__":
    main()
