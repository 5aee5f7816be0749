"""Arithmetic on arrays: what the bits of a message mean. Knows nothing of ranks."""

if __name__ != "commpress.kernels":
    raise ImportError(
        f"commpress.kernels was imported as {__name__!r}: the root of a commpress checkout lies on sys.path and hides "
        "other packages of that name. Remove it from sys.path / PYTHONPATH, or run `pytest` instead of `python -m pytest`."
    )

from typing import Any


def arithmetic(device: Any) -> Any:
    """The module that computes on ``device`` (a torch.device): ``cpu`` or ``cuda``, same names, arguments and bytes."""
    if device.type == "cpu":
        from commpress.kernels import cpu

        return cpu
    if device.type == "cuda":
        from commpress.kernels import cuda

        return cuda
    from commpress.errors import InvalidArgument

    raise InvalidArgument(f"tensors are on {device}, expected a CPU or CUDA device: move them there")
