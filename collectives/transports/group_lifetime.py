"""Process groups are kept until after whatever works for them is gone.

The C++ reducer of DistributedDataParallel holds its group. Where it is the last to do so, as after ``destroy_process_group()``,
the end of the model waits for Gloo's threads without letting go of the interpreter, while one of these needs the interpreter to
let go of the tensors of a collective: neither ever goes on. A group that Python holds is let go of without that lock.
"""

import atexit
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch.distributed as dist

_kept: list[tuple[Any, Callable[[], bool]]] = []


def outlive(group: Any, in_use: Callable[[], bool] | None = None) -> None:
    """Keep ``group`` to the end of the process, or until another one is kept after this one is not ``in_use`` any more."""
    _kept[:] = [(each, used) for each, used in _kept if used() and each is not group]
    _kept.append((group, in_use or (lambda: _registered(group))))
    _never_let_go()


def outliving() -> list[Any]:
    """What is kept now."""
    return [group for group, _ in _kept]


def _registered(group: dist.ProcessGroup) -> bool:
    """Whether it has not been destroyed."""
    try:
        return bool(dist.get_backend(group))
    except (ValueError, TypeError, AssertionError):
        return False


@cache
def _never_let_go() -> None:
    """Not at exit either, when modules are cleared in no order that could be relied on."""
    atexit.register(lambda: [ctypes.pythonapi.Py_IncRef(ctypes.py_object(group)) for group, _ in _kept])
