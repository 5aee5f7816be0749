"""Calls of compiled kernels: with tensors and arrays as arguments, on one thread or on those of
torch's own operations, through the OpenMP library that torch has loaded.

Note: why not other threads. An OpenMP worker spins for milliseconds after every operation, to be
ready for another, and occupies the core that another thread needs: on two cores 0/1 Adam's step
took 1.2 to 1.8 times as long. The worker itself is available at once. A whole training step of
1-bit Adam with its codec (10.8 M parameters, 512 tokens, two threads) takes 198 ms in this way, 214
on other threads.
"""

import ctypes
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from commpress.kernels.cpu.compiled import function_of, variants
from commpress.kernels.cpu.kinds import HALVES, NOTHING, Kind

_PARALLEL_NUMEL = 1 << 19  # elements below which a second thread costs more than it gains


class Frames(NamedTuple):
    """Calls of one kernel, each for a part of the work."""

    function: Any
    slots: Any  # of all calls, one frame after the other
    size: int  # bytes of a frame
    calls: int

    @property
    def address(self) -> int:
        return ctypes.addressof(self.slots)

    def run(self, i: int) -> None:
        """Make one call, without Python's lock."""
        self.function(self.address + i * self.size)

    def results(self) -> list[int]:
        ends = [
            struct.unpack_from("qq", self.slots, (i + 1) * self.size - 16)
            for i in range(self.calls)
        ]
        if any(failed for failed, _ in ends):
            raise MemoryError(
                "a kernel failed: it could not allocate memory, or the lengths of its arrays do "
                "not fit"
            )
        return [result for _, result in ends]


class _Variant(NamedTuple):
    function: Any
    frame: struct.Struct


class Kernel:
    """A kernel, called with numbers, None and contiguous tensors or arrays on the CPU, according to
    its declaration."""

    def __init__(self, family: str, name: str) -> None:
        self.family, self.name = family, name
        self._variants: dict[tuple[Any, ...], _Variant] = {}

    def __call__(self, *args: Any) -> int:
        frames = self.frames(args)
        frames.run(0)
        return frames.results()[0]

    def frames(self, args: Sequence[Any], parts: Sequence[tuple[int, ...]] = ((),)) -> Frames:
        """Return a call for each of the ``parts``, which are its last arguments. Arrays must live
        until the calls have ended."""
        key: list[Any] = []  # types of arguments, which select a variant
        values: list[Any] = []
        for value in args:
            if isinstance(value, torch.Tensor):
                if not (value.is_cpu and value.is_contiguous()):
                    raise TypeError(
                        f"kernel {self.name} got a tensor on {value.device} of strides "
                        f"{value.stride()}"
                    )
                key.append(value.dtype)
                values += (value.data_ptr(), value.numel())
            elif isinstance(value, np.ndarray):
                if not value.flags.c_contiguous:
                    raise TypeError(f"kernel {self.name} got an array of strides {value.strides}")
                key.append((value.dtype, value.ndim))
                values += (value.ctypes.data, *value.shape)
            elif value is None:
                key.append(None)
            else:
                key.append(0)
                values.append(value)
        kind = tuple(key)
        variant = self._variants.get(kind) or self._compiled(kind, len(parts[0]))
        packed = b"".join([variant.frame.pack(*values, *part, 0, 0) for part in parts])
        return Frames(
            variant.function,
            ctypes.create_string_buffer(packed, len(packed)),
            variant.frame.size,
            len(parts),
        )

    def _compiled(self, key: tuple[Any, ...], more: int) -> _Variant:
        kinds = [_kind(part) for part in key] + [Kind("number")] * more
        for i, declared in enumerate(variants(self.family)[self.name]):
            if len(declared) == len(kinds) and all(map(_fits, kinds, declared)):
                function = function_of(self.family, f"{self.family}.{self.name}.{i}")
                frame = struct.Struct("".join(kind.slots for kind in declared) + "qq")
                return self._variants.setdefault(key, _Variant(function, frame))
        raise TypeError(
            f"kernel {self.name} was called with {', '.join(map(str, kinds))}, which it is not "
            "declared for"
        )


class Kernels:
    """Kernels of one family, as attributes; ``sources`` has a file of the family's name."""

    def __init__(self, family: str) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("_"):
            raise AttributeError(name)
        kernel = Kernel(self._family, name)
        setattr(self, name, kernel)
        return kernel


def _kind(key: Any) -> Kind:
    """Return the kind of one argument."""
    if key is None:
        return NOTHING
    if isinstance(key, torch.dtype):
        return Kind(str(key).removeprefix("torch."), 1)
    return Kind(str(key[0]), key[1]) if isinstance(key, tuple) else Kind("number")


def _fits(given: Kind, declared: Kind) -> bool:
    if given.dtype == "number":
        return not declared.dims and declared != NOTHING
    return given == declared or (given.dtype == "bfloat16" and declared == HALVES)


# ---------------------------------------------------------------- threads

loops = Kernels("openmp_loops")


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
    if entry() is not None:
        together(frames, team)
    else:
        rest = [_pool().submit(frames.run, i) for i in range(1, threads)]
        frames.run(0)
        for part in rest:
            part.result()
    return frames.results()


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
