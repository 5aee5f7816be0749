"""One block in the first-level cache: its scale, its codes, and back. Written for the vectoriser.

Whole-block passes over contiguous scratch, no branch inside a loop. Signs have a file of their own,
``signs``.
"""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from commpress.kernels.cpu.sources.decorators import jit
from commpress.kernels.reference import BF16, FP8, FP32, INT4, INT8, TERNARY, TINY

MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITY = np.uint32(0x7F800000)
SIGN = np.uint32(0x80000000)
_FP16_BIAS = np.float32(2.0**112)
_ABOVE = np.float32(2.0**14)  # of floats this large the last bit is 2⁻⁹


@intrinsic
def bits_of(typing, value):
    """The bits of a float32 as uint32."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def float_of(typing, bits):
    """The float32 with these bits."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


# --------------------------------------- arrays of bfloat16, seen as uint16: chosen while compiling


def widened(x, work):
    """``x`` as float32: itself, or in ``work``."""


@overload(widened)
def _widened(x, work):
    if x.dtype == types.float32:
        return lambda x, work: x

    def from_bf16(x, work):
        patterns = work.view(np.uint32)
        for i in range(x.size):
            patterns[i] = np.uint32(x[i]) << np.uint32(16)
        return work[: x.size]

    return from_bf16


def narrowed(values, out):
    """``out`` := ``values``, which ``widened`` gave for it, rounded to even; nothing to do in
    float32."""


@overload(narrowed)
def _narrowed(values, out):
    if out.dtype == types.float32:
        return lambda values, out: None

    def to_bf16(values, out):
        patterns = values.view(np.uint32)
        for i in range(out.size):
            bits = patterns[i]
            code = (
                bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            ) >> np.uint32(16)
            out[i] = np.uint16(0x7FC0) if (bits & MAGNITUDE) > INFINITY else np.uint16(code)

    return to_bf16


@jit
def is_cast(kind):
    return BF16 <= kind <= FP32


@jit
def tree_sum(c, tree, size, squares):
    """The float32 halving tree over |c| or c² of ``size`` (a power of two) elements, zero padded by
    the caller."""
    half = size // 2
    low, high = c[:half], c[half:size]
    if half == 0:
        return c[0] * c[0] if squares else abs(c[0])
    if squares:
        for i in range(half):
            tree[i] = low[i] * low[i] + high[i] * high[i]
    else:
        for i in range(half):
            tree[i] = abs(low[i]) + abs(high[i])
    while half > 1:
        half //= 2
        upper = tree[half : 2 * half]
        for i in range(half):
            tree[i] = tree[i] + upper[i]
    return tree[0]


@jit
def peak_bits(c, n):
    """max |c| as its bit pattern, in which every NaN and infinity is larger than every finite
    number."""
    patterns = c.view(np.uint32)
    peak = np.uint32(0)
    for i in range(n):
        magnitude = patterns[i] & MAGNITUDE
        peak = max(peak, magnitude)
    return peak


@jit
def uniform(index, key):
    h = np.uint32(index) + np.uint32(key)
    h ^= h >> np.uint32(16)
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h ^= h >> np.uint32(15)
    h = np.uint32(h * np.uint32(0x846CA68B))
    h ^= h >> np.uint32(16)
    return np.float32(h >> np.uint32(9)) * np.float32(2.0**-23)


# Results are cast to 32 bits, or Numba computes with 64, and half as many fit into a register.


@jit
def _encode_fp8(c, n, scale, inverse, left, codes):
    """Codes of ``c · inverse``, ties to even: a code is the top of the float's bits, and below 2⁻⁶
    the number of steps of 2⁻⁹, which are the last bits of a float just above 2¹⁴."""
    for i in range(n):
        pattern = bits_of(c[i] * inverse)
        sign, magnitude = np.uint32(pattern & SIGN), np.uint32(pattern & MAGNITUDE)
        above = float_of(magnitude) + _ABOVE
        odd = np.uint32(np.uint32(magnitude >> np.uint32(20)) & np.uint32(1))
        rounded = np.uint32(np.uint32(magnitude + np.uint32(0x7FFFF)) + odd)
        small = magnitude < np.uint32(0x3C800000)
        steps = np.uint32(bits_of(above) & np.uint32(15))
        top = np.uint32(np.uint32(rounded >> np.uint32(20)) - np.uint32(960))
        code = np.uint32(steps if small else top)
        codes[i] = np.uint8(np.uint32(code | np.uint32(sign >> np.uint32(24))))
        value = above - _ABOVE if small else float_of(np.uint32(rounded & np.uint32(0xFFF00000)))
        left[i] = c[i] - float_of(np.uint32(bits_of(value) | sign)) * scale


@jit
def _decode_fp8(codes, n, scale, out):
    """out += the values of ``codes``: their fields aligned with those of a float; where the
    exponent is 0, less the 1 that a float's fraction implies."""
    for i in range(n):
        code = np.uint32(codes[i])
        magnitude = np.uint32(code & np.uint32(127))
        sign = np.uint32(np.uint32(code & np.uint32(128)) << np.uint32(24))
        small = magnitude < np.uint32(8)
        bias = np.uint32(121 << 23) if small else np.uint32(120 << 23)
        value = float_of(np.uint32(np.uint32(magnitude << np.uint32(20)) + bias))
        value -= np.float32(2.0**-6) if small else np.float32(0)
        out[i] += float_of(np.uint32(bits_of(value) | sign)) * scale


@jit
def quantize_peak(c, n, kind, first, key, work, left, codes):
    """Codes of int8, int4, ternary and fp8 blocks, ``left`` := c − decoded; returns the scale."""
    top = np.float32(1)
    if kind == INT8:
        top = np.float32(127)
    elif kind == INT4:
        top = np.float32(7)
    elif kind == FP8:
        top = np.float32(448)
    pattern = peak_bits(c, n)
    work_bits = work.view(np.uint32)
    work_bits[0] = pattern
    peak = work[0]
    if pattern >= INFINITY or peak < TINY:
        scale = np.float32(np.nan) if pattern >= INFINITY else np.float32(0)
        for i in range(n):
            left[i] = c[i]
        for i in range((n * (2 if kind == TERNARY else 4 if kind == INT4 else 8) + 7) // 8):
            codes[i] = 0
        return scale
    scale = np.float32(peak / top)
    inverse = np.float32(top / peak)
    if kind == INT8:
        signed = codes.view(np.int8)
        for i in range(n):
            q = np.rint(c[i] * inverse)
            signed[i] = np.int8(q)
            left[i] = c[i] - q * scale
    elif kind == INT4:
        for i in range(n):
            q = np.rint(c[i] * inverse)
            work[i] = q
            left[i] = c[i] - q * scale
        if n % 2:
            work[n] = np.float32(0)
        for i in range((n + 1) // 2):
            codes[i] = np.uint8(
                ((np.int32(work[2 * i]) & 15) << 4) | (np.int32(work[2 * i + 1]) & 15)
            )
    elif kind == TERNARY:
        for i in range(n):
            sent = uniform(first + i, key) * scale < abs(c[i])
            q = np.float32(0)
            if sent:
                q = np.float32(1) if c[i] > 0 else np.float32(-1)
            work[i] = q
            left[i] = c[i] - q * scale
        for i in range(n, (n + 3) // 4 * 4):
            work[i] = np.float32(0)
        for i in range((n + 3) // 4):
            code = 0
            for j in range(4):
                code = (code << 2) | (np.int32(work[4 * i + j]) & 3)
            codes[i] = np.uint8(code)
    else:
        _encode_fp8(c, n, scale, inverse, left, codes)
    return scale


@jit
def quantize_clipped(c, n, kind, step, first, key, tree, work, left, codes):
    """TernGrad: ternary of c clipped to ± so many root mean squares; what is clipped stays in
    ``left`` too."""
    for i in range(n, step):
        c[i] = np.float32(0)
    mean = np.float64(tree_sum(c, tree, step, True)) / np.float64(n)
    limit = np.float32(np.float32((kind >> 8) / 10) * np.float32(np.sqrt(mean)))
    for i in range(n):
        tree[i] = c[i]
    if np.isfinite(limit):
        for i in range(n):
            c[i] = min(max(c[i], -limit), limit)
    scale = quantize_peak(c, n, TERNARY, first, key, work, left, codes)
    for i in range(n):
        left[i] = tree[i] - work[i] * scale if scale > 0 else tree[i]
    return scale


@jit
def cast(c, n, kind, work, left, codes):
    """Codes of bf16, fp16 and fp32 blocks, ``left`` := c − decoded; returns the largest |c|, NaN if
    not finite."""
    pattern = peak_bits(c, n)
    finite = np.float32(np.nan) if pattern >= INFINITY else np.float32(0)
    source, decoded = c.view(np.uint32), work.view(np.uint32)
    if kind == FP32:
        raw = c.view(np.uint8)
        for i in range(4 * n):
            codes[i] = raw[i]
        for i in range(n):
            left[i] = np.float32(0)
        return finite
    for i in range(n):
        bits = source[i]
        if kind == BF16:
            code = (
                bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
            ) >> np.uint32(16)
            decoded[i] = code << np.uint32(16)
        else:
            code = _to_fp16(c[i], bits)
            decoded[i] = _shift_fp16(code)
            work[i] = work[i] * _FP16_BIAS
        codes[2 * i] = np.uint8(code)
        codes[2 * i + 1] = np.uint8(code >> np.uint32(8))
        left[i] = c[i] - work[i]
    return finite


@jit
def _to_fp16(value, pattern):
    """Ties to even, saturating at ±65504."""
    magnitude = min(pattern & MAGNITUDE, np.uint32(0x477FE000))
    if magnitude < np.uint32(0x38800000):  # below 2⁻¹⁴ the step is 2⁻²⁴
        code = np.uint32(np.rint(abs(value) * np.float32(2.0**24)))
    else:
        rounded = magnitude + np.uint32(0xFFF) + ((magnitude >> np.uint32(13)) & np.uint32(1))
        code = np.uint32(min((rounded >> np.uint32(13)) - np.uint32(112 << 10), np.uint32(0x7BFF)))
    return np.uint32(code | ((pattern >> np.uint32(16)) & np.uint32(0x8000)))


@jit
def _shift_fp16(code):
    """The float32 pattern whose value is that of a finite float16 over 2¹¹²: fields aligned,
    exponent bias not yet."""
    return ((code & np.uint32(0x7FFF)) << np.uint32(13)) | (
        (code & np.uint32(0x8000)) << np.uint32(16)
    )


@jit
def uncast(codes, n, kind, gain, work, out, add):
    """out := or += the decoded block, each value times ``gain``."""
    patterns = work.view(np.uint32)
    if kind == FP32:
        raw = work.view(np.uint8)
        for i in range(4 * n):
            raw[i] = codes[i]
    elif kind == BF16:
        for i in range(n):
            patterns[i] = (
                np.uint32(codes[2 * i]) | (np.uint32(codes[2 * i + 1]) << np.uint32(8))
            ) << np.uint32(16)
    else:
        for i in range(n):
            patterns[i] = _shift_fp16(
                np.uint32(codes[2 * i]) | (np.uint32(codes[2 * i + 1]) << np.uint32(8))
            )
        for i in range(n):
            work[i] = work[i] * _FP16_BIAS
    if add:
        for i in range(n):
            out[i] += work[i] * gain
    else:
        for i in range(n):
            out[i] = work[i] * gain


@jit
def dequantize(codes, n, kind, scale, out, add):
    """out := or += the decoded block of int8, int4, ternary or fp8."""
    if not add:
        for i in range(n):
            out[i] = np.float32(0)
    if kind == INT8:
        signed = codes.view(np.int8)
        for i in range(n):
            out[i] += np.float32(signed[i]) * scale
    elif kind == INT4:
        for i in range(n):
            code = np.int32(codes[i >> 1] >> (4 - 4 * (i & 1))) & 15
            out[i] += np.float32(code - ((code & 8) << 1)) * scale
    elif kind & 255 == TERNARY:
        for i in range(n):
            code = np.int32(codes[i >> 2] >> (6 - 2 * (i & 3))) & 3
            out[i] += np.float32(code - ((code & 2) << 1)) * scale
    elif kind == FP8:
        _decode_fp8(codes, n, scale, out)
