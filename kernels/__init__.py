"""Arithmetic on arrays: what the bits of a message mean. Knows nothing of ranks."""

if __name__ != "commpress.kernels":
    raise ImportError(
        f"commpress.kernels was imported as {__name__!r}: the root of a commpress checkout lies on sys.path and hides "
        "other packages of that name. Remove it from sys.path / PYTHONPATH, or run `pytest` instead of `python -m pytest`."
    )

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_INSTEAD: ContextVar[Any] = ContextVar("kernels instead of the real ones", default=None)


@contextmanager
def instead(kernels: Any) -> Iterator[None]:
    """In this thread, within this block, ``kernels`` in place of those of any device: a simulation does not compute."""
    token = _INSTEAD.set(kernels)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def arithmetic(device: Any) -> Any:
    """The module that computes on ``device`` (a torch.device): ``cpu`` or ``cuda``, same names, arguments and bytes."""
    if (given := _INSTEAD.get()) is not None:
        return given
    if device.type == "cpu":
        from commpress.kernels.cpu import row_codec as cpu

        return _with_registered(cpu)
    if device.type == "cuda":
        from commpress.kernels.cuda import row_codec as cuda

        return _with_registered(cuda)
    from commpress.errors import InvalidArgument

    raise InvalidArgument(f"tensors are on {device}, expected a CPU or CUDA device: move them there")


def _with_registered(kernels: Any) -> Any:
    from commpress.kernels import registered, registered_rows

    return registered_rows.WithRegistered(kernels) if registered.some() else kernels


def knows(device: Any, dtype: Any) -> bool:
    """True if the kernels of ``device`` encode from, decode to and add to tensors of ``dtype``; all know float32."""
    return str(dtype) == "torch.float32" or (device.type == "cpu" and str(dtype) == "torch.bfloat16")


def low_rank_arithmetic(device: Any) -> Any:
    """As ``arithmetic``, for matrices: Numba on the CPU, torch's batched products elsewhere."""
    if (given := _INSTEAD.get()) is not None:
        return given
    if device.type == "cpu":
        from commpress.kernels.cpu import low_rank as cpu_low_rank

        return cpu_low_rank
    from commpress.kernels import low_rank

    return low_rank
