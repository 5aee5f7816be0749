"""Run kernels over blocks on as many threads as torch may use."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from commpress.kernels.cpu import openmp as cpu_openmp
from commpress.kernels.cpu.compiled import Kernel

_PARALLEL_NUMEL = 1 << 19  # elements below which a second thread costs more than it gains


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="commpress-kernel")


def split(kernel: Kernel, blocks: int, numel: int, *args: Any) -> list[int]:
    """Run ``kernel(*args, start, stop)`` over all blocks, on as many threads as torch may use:
    torch's own, or those of a pool."""
    team = torch.get_num_threads()
    threads = min(team, blocks, max(numel // _PARALLEL_NUMEL, 1))
    if threads <= 1:
        return [kernel(*args, 0, blocks)]
    frames = kernel.frames(args, list(pairwise(blocks * i // threads for i in range(threads + 1))))
    if cpu_openmp.entry() is not None:
        cpu_openmp.together(frames, team)
    else:
        rest = [_pool().submit(frames.run, i) for i in range(1, threads)]
        frames.run(0)
        for part in rest:
            part.result()
    return frames.results()
