"""Kernels that walk blocks, on as many threads as torch may use."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch

_PARALLEL_NUMEL = 1 << 19  # below this a second thread costs more than it brings


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="commpress-kernel")


def split(function: Callable[..., Any], blocks: int, numel: int, *args: Any) -> list[Any]:
    """Run ``function(*args, start, stop)`` over all blocks, on as many threads as torch may use."""
    threads = min(torch.get_num_threads(), blocks, max(numel // _PARALLEL_NUMEL, 1))
    if threads <= 1:
        return [function(*args, 0, blocks)]
    edges = [blocks * i // threads for i in range(threads + 1)]
    rest = [_pool().submit(function, *args, a, b) for a, b in pairwise(edges[1:])]
    return [function(*args, 0, edges[1]), *(job.result() for job in rest)]
