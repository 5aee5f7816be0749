"""The step of an optimizer on disk, beside its reads and writes alone and the optimizer in memory.

python examples/offloaded_speed.py --folder /nvme/speed --million 200
"""

import argparse
from time import perf_counter
from typing import Any

import torch

import commpress


class Idle(commpress.Offloaded):
    """Reads and writes everything and changes nothing."""

    def _update(self, chunk: Any, *_: Any) -> None:
        with chunk.borrowed(self.store):
            pass


def seconds(optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    result = []
    for _ in range(steps):
        begin = perf_counter()
        optimizer.step()
        result.append(perf_counter() - begin)
    return sorted(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="store")
    parser.add_argument("--host", type=float, default=0.9, help="GiB of the store's host memory")
    parser.add_argument("--million", type=int, default=200, help="parameters")
    parser.add_argument("--chunk-mb", type=float, default=32.0)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    size = max(options.million // 16, 1) * 1_000_000
    parameters = [torch.nn.Parameter(torch.randn(size)) for _ in range(options.million * 1_000_000 // size)]
    for p in parameters:
        p.grad = torch.randn(size)
    adam = {"lr": 1e-3, "fused": True}
    memory = torch.optim.AdamW(parameters, **adam)
    memory.step()
    print(f"in memory              {seconds(memory, options.steps)[options.steps // 2]:.2f} s", flush=True)
    del memory
    found = {"step": list[float](), "reads and writes alone": list[float]()}
    with commpress.TieredStore.open(options.folder, host=int(options.host * 2**30)) as store:
        optimizer = commpress.Offloaded(parameters, torch.optim.AdamW, store=store, chunk_mb=options.chunk_mb, **adam)
        optimizer.step()
        for _ in range(options.steps):  # in turn: a disk's speed changes from minute to minute
            found["step"] += seconds(optimizer, 1)
            optimizer.__class__ = Idle
            found["reads and writes alone"] += seconds(optimizer, 1)
            optimizer.__class__ = commpress.Offloaded
        passing = sum(c.numel for c in optimizer.chunks if optimizer._passes(c))
        print(f"{passing / 1e6:.0f} of {options.million} million parameters pass through, engine {store.engine}")
    for name, times in found.items():
        times.sort()
        each = times[len(times) // 2]
        print(f"{name:22} {each:.2f} s ({times[0]:.2f} to {times[-1]:.2f}), {24 * passing / each / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
