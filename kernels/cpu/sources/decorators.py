"""The ways in which Numba compiles a function here: all without Python's lock, and where it may
divide by zero as C does."""

from typing import Any

import numba

_PLAIN: dict[str, Any] = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
_UNCOUNTED: dict[str, Any] = {"_nrt": False}  # Numba's name, which its type hints lack

jit = numba.njit(**_PLAIN)
bare = numba.njit(**_PLAIN, **_UNCOUNTED)  # counts no references to arrays: see ``arrays``
# sums in any order: no two ranks need the same bits
loose = numba.njit(**_PLAIN, fastmath={"reassoc", "contract"})
