"""The exact block code: bytes from which a block of numbers is restored with the help of the
earlier block.

A block is up to 2²⁰ numbers, taken as unsigned integers of 8, 16 or 32 bits; floats are never
compared as floats, so −0 and the payload of a NaN survive. The first byte of a code is its form:

    SAME       nothing else: no number has changed
    SPARSE     classes (1 byte) · count (4 bytes) · each class's head · each class's bits
    EXPONENTS  base · escapes (4 bytes) · bytes · [halves] · planes · escaped exponents
    RAW        the numbers themselves, in the order of EXPONENTS

*SPARSE.* An optimizer's step moves a number by about as many units in the last place as its earlier
value is small: one exponent less, twice the units. The *key* of a number, the eight bits below its
highest one in the earlier block, says so, and both sides know it. A class is a range of keys, in
ascending order; its head has its last key, k, m and the bytes of its bits (4). A move is new − old
modulo 2^bits, signed, as u = 2 · |move|, less 1 if it is negative. Bits fill a byte from its lowest
one. All numbers are Golomb-Rice codes: the quotient in unary, as zeros and a one, then as many bits
as the parameter says; from a quotient of 23 on, 23 zeros, a one and 32 bits.

    k = EVERY  u of every member of the class, with parameter m
    else       for each that changed, how many members it lies behind the last one, with parameter
               k, then u − 1 with parameter m. m = 0: one bit, 1 if the move is +1, 0 if −1; a
               distance of 0 moves the last one again

``count`` is how many numbers changed. Zeros in both blocks make them a multiple of 64.

*EXPONENTS*, of bfloat16 and float32. Sign and mantissa of the upper 16 bits make a byte; the
exponent takes three bits if it is in the window base … base + 6, else it is 7 and an escaped byte.
The planes have the lowest bits of 64 numbers, then their middle and their highest bits, and so on.
The lower halves of float32 are stored unchanged between bytes and planes. A block is padded to a
multiple of 64 by its own first numbers.

The window is the first of those with the most numbers of a sample of the block, every n-th.
The encoder takes the shortest form, so a code is at most one byte longer than its block. In plain
NumPy: ``tests/weights/exact_law.py``.
"""

import struct

import numpy as np

BLOCK = 1 << 20
SAME, SPARSE, EXPONENTS, RAW = range(4)
SPARSE_HEAD, EXPONENT_HEAD = struct.Struct("<BBI"), struct.Struct("<BBI")
CLASS, CLASSES = struct.Struct("<BBBI"), 4  # head of a class; as many at most
KEYS, EVERY = 256, 32
LONGEST = 23  # zeros of a quotient
HIT, WINDOW = 7, 7  # code of an escape; exponents of the window
GROUP, PLANES = 64, 24  # numbers of a group; bytes of its planes
GROUPS = BLOCK // GROUP
SAMPLE = 4096  # numbers of a block by which the window is chosen
PLAIN, BFLOAT16, FLOAT32 = range(3)  # kinds of numbers that the code distinguishes


def sparse_head(code: bytes | memoryview) -> tuple[int, int, list[tuple[int, ...]]]:
    """Return (where the bits begin, the count, (last key, k, m, bytes) of each class) of a sparse
    form. ValueError if it is none."""
    if len(code) < (at := SPARSE_HEAD.size):
        raise ValueError("no head")
    _, classes, count = SPARSE_HEAD.unpack_from(code)
    heads, start = list[tuple[int, ...]](), at + classes * CLASS.size
    if start <= len(code):
        heads = [CLASS.unpack_from(code, place) for place in range(at, start, CLASS.size)]
    lasts = [last for last, *_ in heads]
    if (
        not 0 < len(heads) <= CLASSES
        or lasts != sorted({*lasts, KEYS - 1})
        or any(k > EVERY or m > 31 for _, k, m, _ in heads)
        or start + sum(size for *_, size in heads) != len(code)
    ):
        raise ValueError("no classes")
    return start, count, heads


def whole_groups(block: np.ndarray, *, zeros: bool = False) -> np.ndarray:
    """Return the block, padded by its own first numbers or by zeros to a multiple of 64."""
    if not (missing := -len(block) % GROUP):
        return block
    whole = np.resize(block, len(block) + missing)
    whole[len(block) :] *= not zeros
    return whole


def exponent_bytes(numel: int, kind: int) -> int:
    """Return the bytes of the form without its escaped exponents."""
    groups = -(-numel // GROUP)
    return EXPONENT_HEAD.size + groups * (GROUP + PLANES + 2 * GROUP * (kind == FLOAT32))
