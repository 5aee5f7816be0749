"""Arithmetic on arrays: encoding and decoding of messages, and passes of optimizers. Nothing here
depends on ranks."""

if __name__ != "commpress.kernels":
    raise ImportError(
        f"commpress.kernels was imported as {__name__!r}: the root of a commpress checkout is on "
        "sys.path and hides other packages of that name. Remove it from sys.path / PYTHONPATH, or "
        "run `pytest` instead of `python -m pytest`."
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commpress.kernels.devices import (
        adam_arithmetic,
        arithmetic,
        knows,
        lamb_arithmetic,
        low_rank_arithmetic,
    )
    from commpress.kernels.pieces import Piece, Pieces, cut

__all__ = [
    "Piece",
    "Pieces",
    "adam_arithmetic",
    "arithmetic",
    "cut",
    "knows",
    "lamb_arithmetic",
    "low_rank_arithmetic",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use, because bitcode is built without torch and without other
    parts of commpress."""
    if name not in __all__:
        raise AttributeError(
            f"module 'commpress.kernels' has no attribute {name!r}; it offers {', '.join(__all__)}"
        )
    module = "pieces" if name in ("Piece", "Pieces", "cut") else "devices"
    return getattr(import_module(f"commpress.kernels.{module}"), name)
