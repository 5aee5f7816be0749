"""Signs of one block in the first-level cache: packed, unpacked, and the whole encoder of a full
block.

64 floats at a time, as one vector: a comparison's mask, bits reversed within each byte, is the word
of the message, and the word made a mask again selects +s or −s. The last few of a block go through
bytes and one multiplication per eight bits.
"""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commpress.kernels.cpu.sources.decorators import jit
from commpress.kernels.cpu.sources.emitted import FLOATS, Emitted

# eight 0/1 bytes × this: the top byte holds them as bits, first one highest
_PACK = np.uint64(0x8040201008040201)
_SPREAD = np.uint64(0x0101010101010101)
_PICK = np.uint64(0x0102040810204080)  # byte j keeps bit 7 − j
_TOP_BYTE = np.uint64(56)

PLAIN, LAZY = 1, 2  # how ``residual`` is to be read; 0: not at all

_MASK, _WORD, _INT = ir.VectorType(ir.IntType(1), 64), ir.IntType(64), ir.IntType(32)
_ZERO = ir.Constant(FLOATS, [0.0] * 64)


class _Code(Emitted):
    """Code on floats and on their signs."""

    def positive(self, value):
        return self.builder.fcmp_ordered(">=", value, _ZERO)

    def signed(self, mask, scale):
        return self.builder.select(mask, scale, self.builder.fneg(scale))

    def magnitude(self, value):
        words = ir.VectorType(_INT, 64)
        bits = self.builder.and_(
            self.builder.bitcast(value, words), ir.Constant(words, [0x7FFFFFFF] * 64)
        )
        return self.builder.bitcast(bits, FLOATS)

    def store_mask(self, mask, array, index):
        word = self.builder.bswap(self.builder.bitreverse(self.builder.bitcast(mask, _WORD)))
        self.builder.store(word, self.place(array, index, _WORD), align=1)

    def stream(self, value, array, index):
        """Store past the caches; the place is a multiple of 64 bytes."""
        store = self.builder.store(value, self.place(array, index), align=64)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([_INT(1)]))

    def fetch(self, array, index):
        """Begin to bring a line into the first-level cache, wherever it is; past the end of an
        array nothing happens."""
        pointer = self.builder.bitcast(self.place(array, index), ir.IntType(8).as_pointer())
        kinds = [pointer.type, _INT, _INT, _INT]
        prefetch = self.builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer.type], ir.FunctionType(ir.VoidType(), kinds)
        )
        self.builder.call(prefetch, [pointer, _INT(0), _INT(3), _INT(1)])


@intrinsic
def _pack_64(typing, c, at, codes, byte):
    """codes[byte : byte + 8] := the bits of c[at : at + 64] >= 0, the first in the highest bit of
    its byte."""

    def generate(*call):
        code = _Code(*call)
        code.store_mask(code.positive(code.load(0, code.args[1])), 2, code.args[3])
        return code.nothing()

    return types.none(c, types.intp, codes, types.intp), generate


@intrinsic(prefer_literal=True)
def _unpack_64(typing, codes, byte, scale, out, at, add, past):
    """out[at : at + 64] := or += the scale where the bit is 1, minus the scale where it is 0;
    ``past`` the caches."""

    def generate(*call):
        code = _Code(*call)
        builder = code.builder
        word = builder.load(code.place(0, code.args[1], _WORD), align=1)
        mask = builder.bitcast(builder.bswap(builder.bitreverse(word)), _MASK)
        value = code.signed(mask, code.spread(code.args[2]))
        if adding:
            value = builder.fadd(code.load(3, code.args[4]), value)
        (code.stream if streaming else code.store)(value, 3, code.args[4])
        return code.nothing()

    if not (isinstance(add, types.BooleanLiteral) and isinstance(past, types.BooleanLiteral)):
        return None
    adding, streaming = add.literal_value, past.literal_value
    return types.none(codes, types.intp, types.float32, out, types.intp, add, past), generate


@intrinsic(prefer_literal=True)
def _load_64(
    typing, x, gain, residual, residual_at, stale, c, tree, at, codes, byte, i, kind, squares, more
):
    """c[i : i + 64] := gain · x + residual; signs packed; tree[at : at + 64] := or, if ``more``, +=
    c² or |c|."""

    def generate(*call):
        code = _Code(*call)
        builder, args = code.builder, code.args
        start = args[10]
        value = builder.fmul(code.load(0, start), code.spread(args[1]))
        if how:
            owed = code.load(2, builder.add(args[3], start))
            if how == LAZY:
                owed = builder.fsub(owed, code.signed(code.positive(owed), code.spread(args[4])))
            value = builder.fadd(value, owed)
        code.store(value, 5, start)
        byte = builder.add(args[9], builder.lshr(start, ir.Constant(start.type, 3)))
        code.store_mask(code.positive(value), 8, byte)
        size = builder.fmul(value, value) if square else code.magnitude(value)
        code.store(builder.fadd(code.load(6, args[7]), size) if adding else size, 6, args[7])
        return code.nothing()

    if not (
        isinstance(kind, types.IntegerLiteral)
        and all(isinstance(f, types.BooleanLiteral) for f in (squares, more))
    ):
        return None
    how, square, adding = kind.literal_value, squares.literal_value, more.literal_value
    integer, real = types.intp, types.float32
    return types.none(
        x,
        real,
        residual,
        integer,
        real,
        c,
        tree,
        integer,
        codes,
        integer,
        integer,
        kind,
        squares,
        more,
    ), generate


@jit
def _load(x, gain, residual, residual_at, stale, c, tree, codes, byte, half, kind, squares):
    """Of a block of two halves. In the order of memory: processors fetch ahead what is read in
    order."""
    for i in range(0, half, 64):
        _load_64(
            x, gain, residual, residual_at, stale, c, tree, i, codes, byte, i, kind, squares, False
        )
    for i in range(0, half, 64):
        _load_64(
            x,
            gain,
            residual,
            residual_at,
            stale,
            c,
            tree,
            i,
            codes,
            byte,
            half + i,
            kind,
            squares,
            True,
        )


@intrinsic
def _halve_128(typing, tree):
    """The last seven halvings of the tree: from 128 elements to their sum."""

    def generate(*call):
        code = _Code(*call)
        builder, zero = code.builder, ir.Constant(ir.IntType(64), 0)
        value = builder.fadd(code.load(0, zero), code.load(0, ir.Constant(zero.type, 64)))
        width = 64
        while width > 1:
            width //= 2
            parts = [
                ir.Constant(ir.VectorType(_INT, width), list(range(s, s + width)))
                for s in (0, width)
            ]
            low, high = (builder.shuffle_vector(value, value, part) for part in parts)
            value = builder.fadd(low, high)
        return builder.extract_element(value, _INT(0))

    return types.float32(tree), generate


@intrinsic(prefer_literal=True)
def _leave_64(typing, c, i, scale, left, at, past):
    """left[at : at + 64] := c − scale · sgn(c), ``past`` the caches if nobody will read it soon."""

    def generate(*call):
        code = _Code(*call)
        value, args = code.load(0, code.args[1]), code.args
        rest = code.builder.fsub(value, code.signed(code.positive(value), code.spread(args[2])))
        (code.stream if literal else code.store)(rest, 3, args[4])
        return code.nothing()

    if not isinstance(past, types.BooleanLiteral):
        return None
    literal = past.literal_value
    return types.none(c, types.intp, types.float32, left, types.intp, past), generate


@intrinsic
def _fetch_64(typing, array, at):
    """Begin to bring array[at : at + 64] into the caches."""

    def generate(*call):
        code = _Code(*call)
        for line in range(0, 64, 16):
            at = code.args[1]
            code.fetch(0, code.builder.add(at, ir.Constant(at.type, line)))
        return code.nothing()

    return types.none(array, types.intp), generate


@jit
def encode_signs(
    x,
    gain,
    residual,
    residual_at,
    stale,
    left,
    left_at,
    codes,
    byte,
    step,
    squares,
    whole_row,
    past,
    c,
    tree,
):
    """A full block of ``step`` elements (a power of two, at least 256): its codes, ``left`` := what
    stays behind; its scale.

    As ``_load``, ``tree_sum``, ``pack_signs`` and a subtraction, in two passes instead of five.
    ``whole_row``: one scale for many blocks, so ``left`` := c and the result is the sum. ``past``:
    ``left`` is memory that nobody reads soon, so it is stored past the caches, unless it is
    ``residual`` itself and in them already. While it is stored, what the next block will read is
    fetched.
    """
    half = step // 2
    past = (
        past
        and left.ctypes.data != residual.ctypes.data
        and (left.ctypes.data + 4 * left_at) % 64 == 0
    )
    how = 0 if residual.size == 0 else PLAIN if stale == 0 else LAZY
    if squares:
        if how == 0:
            _load(x, gain, residual, residual_at, stale, c, tree, codes, byte, half, 0, True)
        elif how == PLAIN:
            _load(x, gain, residual, residual_at, stale, c, tree, codes, byte, half, 1, True)
        else:
            _load(x, gain, residual, residual_at, stale, c, tree, codes, byte, half, 2, True)
    elif how == 0:
        _load(x, gain, residual, residual_at, stale, c, tree, codes, byte, half, 0, False)
    elif how == PLAIN:
        _load(x, gain, residual, residual_at, stale, c, tree, codes, byte, half, 1, False)
    else:
        _load(x, gain, residual, residual_at, stale, c, tree, codes, byte, half, 2, False)
    while half > 128:
        half //= 2
        for i in range(half):
            tree[i] = tree[i] + tree[half + i]
    total = _halve_128(tree)
    mean = np.float64(total) / np.float64(step)
    scale = np.float32(0) if whole_row else np.float32(np.sqrt(mean) if squares else mean)
    if past:
        for i in range(0, step, 64):
            _fetch_64(x, step + i)
            _fetch_64(residual, residual_at + step + i)
            _leave_64(c, i, scale, left, left_at + i, True)
    else:
        for i in range(0, step, 64):
            _fetch_64(x, step + i)
            _fetch_64(residual, residual_at + step + i)
            _leave_64(c, i, scale, left, left_at + i, False)
    return total if whole_row else scale


@jit
def mean_signs(received, stride, byte, scales, count, n, out):
    """out[:n] := the sum of a block's rows, added in the order of their senders, divided by
    ``count``; n in whole words."""
    for i in range(0, n, 64):
        _unpack_64(received, byte + i // 8, scales[0], out, i, False, False)
        for s in range(1, scales.size):
            _unpack_64(received, s * stride + byte + i // 8, scales[s], out, i, True, False)
    for i in range(n):
        out[i] = out[i] / count


@jit
def pack_signs(c, n, flags, codes):
    wide = n // 64 * 64
    for i in range(0, wide, 64):
        _pack_64(c, i, codes, i // 8)
    if wide == n:
        return
    rest = (n - wide + 7) // 8
    for i in range(n - wide):
        flags[i] = c[wide + i] >= 0
    for i in range(n - wide, 8 * rest):
        flags[i] = 0
    words = flags.view(np.uint64)
    for i in range(rest):
        codes[wide // 8 + i] = np.uint8((words[i] * _PACK) >> _TOP_BYTE)


@jit
def stream_signs(codes, n, scale, out):
    """``unpack_signs`` past the caches, if ``out`` begins with a line and ends with one; whether it
    does."""
    if out.ctypes.data % 64 or n % 64:
        return False
    for i in range(0, n, 64):
        _unpack_64(codes, i // 8, scale, out, i, False, True)
    return True


@jit
def unpack_signs(codes, n, scale, flags, out, add):
    wide = n // 64 * 64
    if add:
        for i in range(0, wide, 64):
            _unpack_64(codes, i // 8, scale, out, i, True, False)
    else:
        for i in range(0, wide, 64):
            _unpack_64(codes, i // 8, scale, out, i, False, False)
    if wide == n:
        return
    words = flags.view(np.uint64)
    for i in range((n - wide + 7) // 8):
        words[i] = (np.uint64(codes[wide // 8 + i]) * _SPREAD) & _PICK
    for i in range(n - wide):
        value = scale if flags[i] else -scale
        out[wide + i] = out[wide + i] + value if add else value
