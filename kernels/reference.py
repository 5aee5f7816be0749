"""The law: what every byte of a row means, in plain NumPy, one row at a time.

A *row* is one message: ``width`` elements (a multiple of 8), the first ``len(c)`` of them real and the rest padding.
Its bytes are ``[scales: S × float32 LE][codes]`` with one scale per ``block`` elements (``block = 0``: one per row);
the casts have codes only.
Padding never enters a scale, its codes are zero and its residual does not exist.

The fast paths must give these bytes bit for bit, hence the fixed order of every floating-point sum.
"""

import numpy as np

CHUNK = 2048  # the longest run of elements summed in float32

SIGN_L1, SIGN_RMS, INT8, INT4, TERNARY, FP8, BF16, FP16, FP32 = range(9)
CODE_BITS = {SIGN_L1: 1, SIGN_RMS: 1, INT8: 8, INT4: 4, TERNARY: 2, FP8: 8, BF16: 16, FP16: 16, FP32: 32}
CASTS = (BF16, FP16, FP32)
LEVELS = {INT8: 127, INT4: 7}
TINY = np.float32(2.0**-100)  # below this a block is sent as zero: 1/scale would overflow
FP8_MAX = np.float32(448.0)


# ---------------------------------------------------------------- sums and scales


def tree_sum(values: np.ndarray) -> np.floating:
    """Sum by halving: pad with zeros to a power of two, add the upper half onto the lower, repeat."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    tree = np.zeros(size, values.dtype)
    tree[: len(values)] = values
    while size > 1:
        size //= 2
        tree = tree[:size] + tree[size:]
    return tree[0]


def sign_scale(c: np.ndarray, kind: int) -> np.float32:
    """mean |c| (``SIGN_L1``) or √(mean c²) (``SIGN_RMS``): float32 trees per chunk, a float64 tree over the chunks.

    Squares overflow float32 above 1.8e19; such a block reads as not finite.
    """
    terms = np.abs(c) if kind == SIGN_L1 else c * c
    chunks = [tree_sum(terms[i : i + CHUNK]) for i in range(0, len(c), CHUNK)]
    mean = tree_sum(np.array(chunks, np.float64)) / np.float64(len(c))
    return np.float32(mean if kind == SIGN_L1 else np.sqrt(mean))


def peak_scale(c: np.ndarray, top: float | np.float32) -> np.float32:
    """max |c| / top, 0 for a block too small to divide by, NaN for one that is not finite."""
    peak = np.max(np.abs(c))
    if not np.isfinite(peak):
        return np.float32(np.nan)
    return np.float32(0) if peak < TINY else np.float32(peak / np.float32(top))


# ---------------------------------------------------------------- bits


def pack_signs(c: np.ndarray) -> np.ndarray:
    """Bit = (c ≥ 0), first element in the highest bit; the last byte is filled with zeros."""
    return np.packbits(c >= 0)


def unpack_signs(bits: np.ndarray, numel: int) -> np.ndarray:
    return np.where(np.unpackbits(bits, count=numel) > 0, np.float32(1), np.float32(-1))


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned codes of 2, 4 or 8 bits, first element in the highest bits."""
    per_byte = 8 // bits
    padded = np.zeros(-(-len(codes) // per_byte) * per_byte, np.uint8)
    padded[: len(codes)] = codes
    out = np.zeros(len(padded) // per_byte, np.uint8)
    for i in range(per_byte):
        out |= (padded[i::per_byte] << np.uint8(8 - bits * (i + 1))).astype(np.uint8)
    return out


def unpack_codes(packed: np.ndarray, bits: int, numel: int) -> np.ndarray:
    shifts = np.arange(8 - bits, -1, -bits, dtype=np.uint8)
    return ((packed[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:numel]


def uniform(index: np.ndarray, key: int) -> np.ndarray:
    """A float32 in [0, 1 − 2⁻²³] for each element index: a counter-based hash, so every path draws the same noise."""
    h = index.astype(np.uint32) + np.uint32(key)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return (h >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23)


def to_fp8(c: np.ndarray) -> np.ndarray:
    """float32 in [−448, 448] to e4m3fn bytes, ties to even."""
    magnitude = np.abs(c).astype(np.float32)
    bits = magnitude.view(np.uint32)
    normal = (bits + np.uint32(0x7FFFF) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = normal - np.uint32((127 - 7) << 3)
    small = np.rint(magnitude * np.float32(512)).astype(np.uint32)  # below 2⁻⁶ the step is 2⁻⁹
    code = np.where(magnitude < np.float32(2.0**-6), small, normal).astype(np.uint8)
    return code | (np.signbit(c).astype(np.uint8) << np.uint8(7))


def from_fp8(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    small = mantissa * np.float32(2.0**-9)
    normal = (np.float32(1) + mantissa / np.float32(8)) * np.exp2(exponent.astype(np.float32) - np.float32(7))
    value = np.where(exponent == 0, small, normal).astype(np.float32)
    return np.where(codes & 128, -value, value)


def to_bf16(c: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bit patterns, ties to even."""
    bits = np.asarray(c, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bf16(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_fp16(c: np.ndarray) -> np.ndarray:
    """float32 to float16, saturating: what does not fit stays in the residual."""
    return np.clip(c, np.float32(-65504), np.float32(65504)).astype(np.float16)


def cast_codes(c: np.ndarray, kind: int) -> np.ndarray:
    """Little-endian bytes of a cast."""
    return {BF16: to_bf16, FP16: to_fp16, FP32: lambda v: v}[kind](c).view(np.uint8)


def uncast(codes: np.ndarray, kind: int, numel: int) -> np.ndarray:
    raw = codes[: numel * CODE_BITS[kind] // 8].copy()
    if kind == BF16:
        return from_bf16(raw.view(np.uint16))
    return raw.view(np.float16 if kind == FP16 else np.float32).astype(np.float32)


# ---------------------------------------------------------------- blocks and rows


def encode_block(c: np.ndarray, kind: int, first: int, key: int) -> tuple[np.float32, np.ndarray]:
    """Scale and codes of one block whose first element has index ``first`` in the whole buffer."""
    if kind in (SIGN_L1, SIGN_RMS):
        return sign_scale(c, kind), pack_signs(c)
    zeros = np.zeros(len(c), np.uint8)
    if kind in LEVELS:
        scale = peak_scale(c, LEVELS[kind])
        if not scale > 0:
            return scale, pack_codes(zeros, CODE_BITS[kind])
        inverse = np.float32(np.float32(LEVELS[kind]) / np.max(np.abs(c)))
        codes = np.rint(c * inverse).astype(np.int8).view(np.uint8) & np.uint8((1 << CODE_BITS[kind]) - 1)
        return scale, pack_codes(codes, CODE_BITS[kind])
    if kind == TERNARY:
        scale = peak_scale(c, 1)
        if not scale > 0:
            return scale, pack_codes(zeros, 2)
        draw = uniform(np.arange(first, first + len(c), dtype=np.uint32), key) * scale
        codes = np.where(draw < np.abs(c), np.where(c > 0, np.uint8(1), np.uint8(3)), np.uint8(0))
        return scale, pack_codes(codes, 2)
    scale = peak_scale(c, FP8_MAX)
    if not scale > 0:
        return scale, zeros
    inverse = np.float32(FP8_MAX / np.max(np.abs(c)))
    return scale, to_fp8(np.clip(c * inverse, -FP8_MAX, FP8_MAX))


def decode_block(scale: np.float32, codes: np.ndarray, kind: int, numel: int) -> np.ndarray:
    if kind in (SIGN_L1, SIGN_RMS):
        return unpack_signs(codes, numel) * scale
    if kind == FP8:
        return from_fp8(codes[:numel]) * scale
    bits = CODE_BITS[kind]
    unsigned = unpack_codes(codes, bits, numel).astype(np.int32)
    signed = np.where(unsigned >= 1 << (bits - 1), unsigned - (1 << bits), unsigned)
    return signed.astype(np.float32) * scale


def row_bytes(kind: int, width: int, block: int) -> int:
    return 4 * scale_count(kind, width, block) + width * CODE_BITS[kind] // 8


def scale_count(kind: int, width: int, block: int) -> int:
    if kind in CASTS:
        return 0
    return -(-width // block) if block and width else 1


def encode_row(c: np.ndarray, kind: int, width: int, block: int, *, first: int = 0, key: int = 0) -> np.ndarray:
    """The bytes of one row; ``first`` is the index of its first element in the whole buffer."""
    scales = np.zeros(scale_count(kind, width, block), np.float32)
    codes = np.zeros(width * CODE_BITS[kind] // 8, np.uint8)
    if kind in CASTS:
        codes[: len(c) * CODE_BITS[kind] // 8] = cast_codes(c, kind)
        return codes
    step = block or width
    for k, start in enumerate(range(0, len(c), step or 1)):
        scales[k], packed = encode_block(c[start : start + step], kind, first + start, key)
        at = start * CODE_BITS[kind] // 8
        codes[at : at + len(packed)] = packed
    return np.concatenate([scales.view(np.uint8), codes])


def decode_row(row: np.ndarray, kind: int, numel: int, width: int, block: int, gain: float = 1.0) -> np.ndarray:
    """The first ``numel`` elements; each scale is multiplied by ``gain`` before it meets a code."""
    count = scale_count(kind, width, block)
    if kind in CASTS:
        return uncast(row, kind, numel) * np.float32(gain)
    scales, codes = row[: 4 * count].copy().view(np.float32), row[4 * count :]
    out = np.zeros(numel, np.float32)
    step = block or width
    for k, start in enumerate(range(0, numel, step or 1)):
        stop = min(start + step, numel)
        at = start * CODE_BITS[kind] // 8
        out[start:stop] = decode_block(np.float32(scales[k] * np.float32(gain)), codes[at:], kind, stop - start)
    return out


# ---------------------------------------------------------------- fused forms


def compensate(x: np.ndarray, residual: np.ndarray, gain: float = 1.0) -> np.ndarray:
    """c = gain · x + residual, two roundings."""
    return x.astype(np.float32) * np.float32(gain) + residual


def encode_with_residual(
    x: np.ndarray, residual: np.ndarray, kind: int, width: int, block: int, *, gain: float = 1.0, key: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of bytes for the whole buffer ``x`` and the residual c − decode(encode(c)) that stays behind."""
    c = compensate(x, residual, gain)
    rows, left = [], np.zeros_like(c)
    for first in range(0, len(c), width):
        part = c[first : first + width]
        rows.append(encode_row(part, kind, width, block, first=first, key=key))
        left[first : first + width] = part - decode_row(rows[-1], kind, len(part), width, block)
    return np.stack(rows), left


def decode_mean(rows: np.ndarray, kind: int, numel: int, width: int, block: int) -> np.ndarray:
    """The mean of the P decoded rows, added in rank order, then divided by P."""
    total = decode_row(rows[0], kind, numel, width, block)
    for row in rows[1:]:
        total = total + decode_row(row, kind, numel, width, block)
    return total / np.float32(len(rows))
