"""The exact block code: bytes from which a block of numbers is restored with the help of the
earlier block.

A block is up to 2²⁰ numbers, taken as unsigned integers of 8, 16 or 32 bits; floats are never
compared as floats, so −0 and the payload of a NaN survive. The first byte of a code is its form:

    SAME       nothing else: no number has changed
    SPARSE     k · m · count (4 bytes) · bits: for each changed number its gap and its difference
    EXPONENTS  base · escapes (4 bytes) · bytes · [halves] · planes · escaped exponents
    RAW        the numbers themselves, in the order of EXPONENTS

*SPARSE.* A gap is the count of unchanged numbers since the last changed one, a difference is new −
old modulo 2^bits, signed. Bits fill a byte from its lowest one. A gap is a Golomb-Rice code with
parameter k: its quotient in unary, as zeros and a one, then k bits; from a quotient of 24 on, 24
zeros, a one and the 20 bits of the gap. A difference is a bit of sign, then |d| − 1 as an
exponential Golomb code of order m, which for m = 0 is Elias' gamma code of |d|. Differences of
consecutive codes can be added.

*EXPONENTS*, of bfloat16 and float32. Sign and mantissa of the upper 16 bits make a byte; the
exponent takes three bits if it is in the window base … base + 6, else it is 7 and an escaped byte.
The planes have the lowest bits of 64 numbers, then their middle and their highest bits, and so on.
The lower halves of float32 are stored unchanged between bytes and planes. A block is padded to a
multiple of 64 by its own first numbers.

The encoder takes the shortest form, with RAW as the last resort: a code is at most one byte longer
than its block. ``tests/weights/exact_law.py`` implements the format in plain NumPy; ``cpu.exact``
gives the same bytes.
"""

import struct

import numpy as np

BLOCK = 1 << 20
SAME, SPARSE, EXPONENTS, RAW = range(4)
SPARSE_HEAD, EXPONENT_HEAD = struct.Struct("<BBBI"), struct.Struct("<BBI")
LONGEST, GAP_BITS = 24, 20  # zeros of a quotient; bits of a gap that has more
HIT, WINDOW = 7, 7  # code of an escape; exponents of the window
GROUP, PLANES = 64, 24  # numbers of a group; bytes of its planes
SAMPLE = 4096  # numbers of a block by which the window is chosen
PLAIN, BFLOAT16, FLOAT32 = range(3)  # kinds of numbers that the code distinguishes


def window(tops: np.ndarray) -> int:
    """Return the first exponent of the window that contains most of a sample."""
    exponents = tops[:: max(1, len(tops) // SAMPLE)] >> 7 & 255
    count = np.cumsum(np.bincount(exponents, minlength=256))
    inside = count[WINDOW - 1 :] - np.concatenate([[0], count[:-WINDOW]])
    return int(np.argmax(inside))


def whole_groups(block: np.ndarray) -> np.ndarray:
    """Return the block, padded by its own first numbers to a multiple of 64."""
    missing = -len(block) % GROUP
    return np.resize(block, len(block) + missing) if missing else block


def exponent_bytes(numel: int, kind: int) -> int:
    """Return the bytes of the form without its escaped exponents."""
    groups = -(-numel // GROUP)
    return EXPONENT_HEAD.size + groups * (GROUP + PLANES + 2 * GROUP * (kind == FLOAT32))
