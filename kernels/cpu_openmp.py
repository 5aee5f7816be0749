"""Calls on the very threads that torch's own operations run on, through the OpenMP library that torch has loaded.

Note: why not threads of ours. A worker of OpenMP goes on spinning for milliseconds after every operation, in case there is
another, and keeps the core that a second thread of ours would run on: on two cores 0/1 Adam's step took 1.2 to 1.8 times as
long. That worker itself is there at once.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Entry(NamedTuple):
    parallel: Any  # runs a function once on every thread of a team, the caller among them
    number: int  # address of the function that tells a thread its number in the team


@cache
def entry() -> _Entry | None:
    """Into torch's OpenMP; None where torch has none, or one without what GCC's programs call (macOS, Windows)."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    everyone, torchs = None, str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    for name in (everyone, torchs):  # the order in which torch itself looks for it
        try:
            found = ctypes.CDLL(name)
            parallel, number = found.GOMP_parallel, found.omp_get_thread_num
        except (OSError, AttributeError):
            continue
        parallel.argtypes, parallel.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
        return _Entry(parallel, ctypes.cast(number, ctypes.c_void_p).value or 0)
    return None


def _function(context, builder, address, result, arguments):
    return builder.inttoptr(address, ir.FunctionType(result, [a.type for a in arguments]).as_pointer())


@intrinsic
def _ask(typing, address):
    """What the C function int f(void) at an address answers."""

    def generate(context, builder, signature, args):
        return builder.call(_function(context, builder, args[0], ir.IntType(32), []), [])

    return types.int32(types.int64), generate


@intrinsic
def _enter(typing, address):
    """Call the C function void f(void *) at an address."""

    def generate(context, builder, signature, args):
        nothing = ir.Constant(ir.IntType(8).as_pointer(), None)
        builder.call(_function(context, builder, args[0], ir.VoidType(), [nothing]), [nothing])
        return context.get_dummy_value()

    return types.none(types.int64), generate


@cache
def _door() -> Any:
    """Lets the first threads of a team into Python. The others need not queue for its lock only to hear that nothing is left;
    a team of fewer threads would make OpenMP end the rest, and torch start them again."""

    @numba.cfunc(types.void(types.CPointer(types.int64)), cache=True)
    def door(slots):
        number, wanted, body = numba.carray(slots, 3)
        if _ask(number) < wanted:
            _enter(body)

    return door


def together(jobs: Sequence[Callable[[], Any]], team: int) -> list[Any]:
    """What the jobs return, each run once, by the first of ``team`` threads; those that do not come are stood in for."""
    found = entry()
    assert found is not None
    results: list[Any] = [None] * len(jobs)
    failures: list[BaseException] = []
    left = iter(range(len(jobs)))

    def body(_: object) -> None:
        try:
            for i in left:
                results[i] = jobs[i]()
        except BaseException as failure:  # would be lost between the frames of C
            failures.append(failure)

    called = _BODY(body)
    slots = (ctypes.c_int64 * 3)(found.number, len(jobs), ctypes.cast(called, ctypes.c_void_p).value or 0)
    found.parallel(_door().address, ctypes.addressof(slots), team, 0)
    if failures:
        raise failures[0]
    return results
