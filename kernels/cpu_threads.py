"""Kernels that walk blocks, on as many threads as torch may use."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch

from commpress.kernels import cpu_openmp

_PARALLEL_NUMEL = 1 << 19  # below this a second thread costs more than it brings


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="commpress-kernel")


def split(function: Callable[..., Any], blocks: int, numel: int, *args: Any) -> list[Any]:
    """Run ``function(*args, start, stop)`` over all blocks, on as many threads as torch may use: torch's, or else ours."""
    team = torch.get_num_threads()
    threads = min(team, blocks, max(numel // _PARALLEL_NUMEL, 1))
    if threads <= 1:
        return [function(*args, 0, blocks)]
    edges = [blocks * i // threads for i in range(threads + 1)]
    jobs = [partial(function, *args, a, b) for a, b in pairwise(edges)]
    if cpu_openmp.entry() is not None:
        return cpu_openmp.together(jobs, team)
    rest = [_pool().submit(job) for job in jobs[1:]]
    return [jobs[0](), *(job.result() for job in rest)]
