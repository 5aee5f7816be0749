"""Compare the step of an optimizer on disk with its reads and writes alone, with the optimizer in
memory, and with a forward and backward.

    python examples/offloaded_speed.py --folder /nvme/speed --million 200
    # updates during forward and backward
    python examples/offloaded_speed.py --folder /nvme/speed --million 200 --batch 256
"""

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

import commpress

WIDTH = 4096


class Idle(commpress.Offloaded):
    """Read and write everything without a change."""

    def _update(self, chunk: Any, *_: Any) -> None:
        with chunk.borrowed(self.store):
            pass


def seconds(call: Callable[[], Any]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def show(name: str, times: list[float], nbytes: int = 0) -> float:
    """Print times and return the median."""
    times = sorted(times)
    each = times[len(times) // 2]
    rate = f", {nbytes / each / 1e9:.1f} GB/s" if nbytes else ""
    print(f"{name:26} {each:.2f} s ({times[0]:.2f} to {times[-1]:.2f}){rate}", flush=True)
    return each


def step_and_transfers(optimizer: commpress.Offloaded, steps: int) -> None:
    """Measure both in turn, because a disk's speed changes from minute to minute."""
    whole, alone = list[float](), list[float]()
    for _ in range(steps):
        whole.append(seconds(optimizer.step))
        optimizer.__class__ = Idle
        alone.append(seconds(optimizer.step))
        optimizer.__class__ = commpress.Offloaded
    passing = sum(c.numel for c in optimizer.chunks if c.passes)
    print(f"{passing / 1e6:.0f} million parameters pass through, engine {optimizer.store.engine}")
    ratio = show("step", whole, 24 * passing) / show("reads and writes alone", alone, 24 * passing)
    print(f"a step is {ratio:.2f} times its reads and writes alone")


def overlap(optimizer: commpress.Offloaded, model: torch.nn.Module, batch: int, steps: int) -> None:
    """Measure forward and backward alone, an update alone, and both at once."""
    x = torch.randn(batch, WIDTH)

    def compute() -> None:
        model(x).square().mean().backward()

    def drop() -> None:
        for p in model.parameters():
            p.grad = None

    drop()
    compute()
    computing, updating, both = list[float](), list[float](), list[float]()
    for _ in range(steps):
        drop()
        computing.append(seconds(compute))
        optimizer.step()
        updating.append(seconds(optimizer.finish))
        compute()
        optimizer.step()  # begins an update
        both.append(seconds(lambda: (compute(), optimizer.finish())))
    one, other, together = (
        show("forward and backward", computing),
        show("update", updating),
        show("both at once", both),
    )
    print(f"{(one + other - together) / min(one, other):.0%} of the shorter one is hidden")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", default="store")
    parser.add_argument("--host", type=float, default=0.9, help="GiB of the store's host memory")
    parser.add_argument("--million", type=int, default=200, help="parameters")
    parser.add_argument("--chunk-mb", type=float, default=32.0)
    parser.add_argument("--depth", type=int, default=4, help="requests that the disk sees at once")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--batch",
        type=int,
        default=0,
        help="rows of a batch: measure delayed updates during its gradients",
    )
    options = parser.parse_args()
    layers = -(-options.million * 1_000_000 // WIDTH**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    adam = {"lr": 1e-6, "fused": True}
    memory = torch.optim.AdamW(model.parameters(), **adam)
    memory.step()
    show("in memory", [seconds(memory.step) for _ in range(options.steps)])
    del memory
    with commpress.TieredStore.open(
        options.folder, host=int(options.host * 2**30), depth=options.depth
    ) as store:
        optimizer = commpress.Offloaded(
            model.parameters(),
            torch.optim.AdamW,
            store=store,
            chunk_mb=options.chunk_mb,
            gradients="delayed" if options.batch else "parameters",
            **adam,
        )
        optimizer.step()
        if options.batch:
            overlap(optimizer, model, options.batch, options.steps)
        else:
            step_and_transfers(optimizer, options.steps)
        optimizer.close()


if __name__ == "__main__":
    main()
