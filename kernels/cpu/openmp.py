"""Run calls on the threads of torch's own operations, through the OpenMP library that torch has
loaded.

Note: why not other threads. An OpenMP worker spins for milliseconds after every operation, to be
ready for another, and occupies the core that another thread needs: on two cores 0/1 Adam's step
took 1.2 to 1.8 times as long. The worker itself is available at once. A whole training step of
1-bit Adam with its codec (10.8 M parameters, 512 tokens, two threads) takes 198 ms in this way, 214
on other threads.
"""

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commpress.kernels.cpu.compiled import Frames, Kernels

loops = Kernels("openmp_loops")


class _Entry(NamedTuple):
    parallel: Any  # runs a function on every thread of a team, including the caller
    number: int  # address of the function that returns a thread's number in the team
    team: int  # address of the function that returns the size of the team


@cache
def entry() -> _Entry | None:
    """Return the entry points of torch's OpenMP; None if torch has none, or one without those of
    GCC's programs (macOS, Windows)."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    everyone, torchs = None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    for name in (everyone, torchs):  # the order in which torch itself looks for it
        try:
            found = ctypes.CDLL(name)
            parallel, *asked = (
                found.GOMP_parallel,
                found.omp_get_thread_num,
                found.omp_get_num_threads,
            )
        except (OSError, AttributeError):
            continue
        parallel.argtypes, parallel.restype = (
            [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint],
            None,
        )
        return _Entry(
            parallel, *(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in asked)
        )
    return None


def together(frames: Frames, team: int) -> None:
    """Run all frames once each, on ``team`` threads or on fewer if fewer are available. None of
    them enters Python."""
    found = entry()
    assert found is not None
    kernel = ctypes.cast(frames.function, ctypes.c_void_p).value
    shares = loops.share.frames(
        (found.number, found.team, kernel, frames.address, frames.size, frames.calls)
    )
    found.parallel(ctypes.cast(shares.function, ctypes.c_void_p), shares.address, team, 0)
