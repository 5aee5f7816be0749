"""Kinds of a kernel's arguments: the contents of a frame, and the types for which Numba compiles.

A *frame* has the arguments of a call in 64-bit slots, one after the other, then a slot for the
kernel's status and one for its result. A number takes a slot; an array slots for its address and
lengths; None takes no slot.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """A number or a contiguous array (dims > 0) of ``dtype``, or "None"."""

    dtype: str
    dims: int = 0

    @property
    def slots(self) -> str:
        """Slots in the letters of ``struct``, native and aligned."""
        return "q" * (1 + self.dims) if self.dims else _SLOTS[self.dtype]


_SLOTS = {
    "float32": "f4x",
    "float64": "d",
    "int64": "q",
    "uint32": "I4x",
    "bool": "?7x",
    "None": "",
}

F32, F64, I64, U32, FLAG, NOTHING = (Kind(dtype) for dtype in _SLOTS)
FLOATS, DOUBLES, INTEGERS, OCTETS = (
    Kind(dtype, 1) for dtype in ("float32", "float64", "int64", "uint8")
)
HALVES = Kind("uint16", 1)  # bfloat16, as patterns
WORDS, SIGNED_WORDS = Kind("uint32", 1), Kind("int32", 1)
TABLE, DIVISORS = Kind("int64", 2), Kind("float32", 2)
MAYBE_FLOATS = (FLOATS, NOTHING)
