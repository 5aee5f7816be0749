"""Calls on the very threads that torch's own operations run on, through the OpenMP library that
torch has loaded.

Note: why not threads of ours. A worker of OpenMP goes on spinning for milliseconds after every
operation, in case there is another, and keeps the core that a second thread of ours would run on:
on two cores 0/1 Adam's step took 1.2 to 1.8 times as long. That worker itself is there at once. A
whole training step of 1-bit Adam with its codec (10.8 M parameters, 512 tokens, two threads) takes
198 ms so, 214 on threads of ours.
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
    parallel: Any  # runs a function once on every thread of a team, the caller among them
    number: int  # address of the function that tells a thread its number in the team
    team: int  # and of the one that tells how many they are


@cache
def entry() -> _Entry | None:
    """Into torch's OpenMP; None where torch has none, or one without what GCC's programs call
    (macOS, Windows)."""
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
    """Run all frames, each once, on ``team`` threads or on as many as come. None of them enters
    Python."""
    found = entry()
    assert found is not None
    kernel = ctypes.cast(frames.function, ctypes.c_void_p).value
    shares = loops.share.frames(
        (found.number, found.team, kernel, frames.address, frames.size, frames.calls)
    )
    found.parallel(ctypes.cast(shares.function, ctypes.c_void_p), shares.address, team, 0)
