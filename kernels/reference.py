"""The reference: the meaning of every byte of a row, in plain NumPy, one row at a time.

A *row* is one message: ``width`` elements (a multiple of 8), the first ``len(c)`` of them real and
the rest padding. Its bytes are ``[scales: S × float32 LE][codes]`` with one scale per ``block``
elements (``block = 0``: one per row); the casts have codes only. Padding never enters a scale, its
codes are zero and it has no residual.

Kinds from ``BITS`` on have a *header* per block in place of the scale, and a parameter in the bits
of the kind above the lowest eight (``kind_of``): see "blocks with a header" below.

The fast paths must give the same bytes, so every floating-point sum has a fixed order.
"""

import numpy as np

CHUNK = 2048  # most consecutive elements summed in float32

SIGN_L1, SIGN_RMS, INT8, INT4, TERNARY, FP8, BF16, FP16, FP32 = range(9)
CODE_BITS = {
    SIGN_L1: 1,
    SIGN_RMS: 1,
    INT8: 8,
    INT4: 4,
    TERNARY: 2,
    FP8: 8,
    BF16: 16,
    FP16: 16,
    FP32: 32,
}
CASTS = (BF16, FP16, FP32)
# Any number of bits, top-k, random-k, random-k unbiased, powers of four.
BITS, TOP, RANDOM, UNBIASED, LOG = range(9, 14)
LEVELS = {INT8: 127, INT4: 7}
SHIFTED = 16  # flag in the parameter of BITS: the grid is moved by a random part of its step
TINY = np.float32(2.0**-100)  # a block below it is sent as zero, because 1/scale would overflow
FP8_MAX = np.float32(448.0)
# values of LOG's codes, relative to the scale
POWERS = np.array([0, 1 / 16, 1 / 4, 1, 0, -1 / 16, -1 / 4, -1], np.float32)


def kind_of(family: int, parameter: int = 0) -> int:
    """Return a kind with its parameter: TERNARY's clip in tenths of σ, BITS' number of bits and
    ``SHIFTED``, TOP's number of elements kept of a whole block, or RANDOM's and UNBIASED's number
    of elements from which one is sent."""
    return family | parameter << 8


def family_of(kind: int) -> int:
    return kind & 255


def code_bits(kind: int) -> int:
    """Return the bits per element after the headers."""
    family = family_of(kind)
    return (
        CODE_BITS[family]
        if family < BITS
        else kind >> 8 & ~SHIFTED
        if family == BITS
        else 3
        if family == LOG
        else 0
    )


# ---------------------------------------------------------------- sums and scales


def tree_sum(values: np.ndarray) -> np.floating:
    """Sum by halving: pad with zeros to a power of two, add the upper half to the lower, repeat."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    tree = np.zeros(size, values.dtype)
    tree[: len(values)] = values
    while size > 1:
        size //= 2
        tree = tree[:size] + tree[size:]
    return tree[0]


def sign_scale(c: np.ndarray, kind: int) -> np.float32:
    """Return mean |c| (``SIGN_L1``) or √(mean c²) (``SIGN_RMS``), with float32 trees per chunk and
    a float64 tree over the chunks.

    Squares overflow float32 above 1.8e19; such a block counts as not finite.
    """
    terms = np.abs(c) if kind == SIGN_L1 else c * c
    chunks = [tree_sum(terms[i : i + CHUNK]) for i in range(0, len(c), CHUNK)]
    mean = tree_sum(np.array(chunks, np.float64)) / np.float64(len(c))
    return np.float32(mean if kind == SIGN_L1 else np.sqrt(mean))


def peak_scale(c: np.ndarray, top: float | np.float32) -> np.float32:
    """Return max |c| / top, 0 for a block too small to divide by, NaN for one that is not
    finite."""
    peak = np.max(np.abs(c))
    if not np.isfinite(peak):
        return np.float32(np.nan)
    return np.float32(0) if peak < TINY else np.float32(peak / np.float32(top))


# ---------------------------------------------------------------- bits


def pack_signs(c: np.ndarray) -> np.ndarray:
    """Pack bits (c ≥ 0), the first element in the highest bit; the last byte is padded with
    zeros."""
    return np.packbits(c >= 0)


def unpack_signs(bits: np.ndarray, numel: int) -> np.ndarray:
    return np.where(np.unpackbits(bits, count=numel) > 0, np.float32(1), np.float32(-1))


def pack_codes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack unsigned codes into one stream of bits, the highest bit of the first element first; the
    last byte is padded with zeros."""
    shifts = np.arange(bits - 1, -1, -1, dtype=np.uint8)
    return np.packbits((codes[:, None] >> shifts) & np.uint8(1))


def unpack_codes(packed: np.ndarray, bits: int, numel: int) -> np.ndarray:
    stream = np.unpackbits(packed[: -(-numel * bits // 8)], count=numel * bits).reshape(numel, bits)
    return (stream.astype(np.int32) << np.arange(bits - 1, -1, -1)).sum(1).astype(np.uint8)


def uniform(index: np.ndarray, key: int) -> np.ndarray:
    """Return a float32 in [0, 1 − 2⁻²³] for each element index by a counter-based hash, so that
    every path draws the same noise."""
    h = index.astype(np.uint32) + np.uint32(key)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return (h >> np.uint32(9)).astype(np.float32) * np.float32(2.0**-23)


def to_fp8(c: np.ndarray) -> np.ndarray:
    """Convert float32 in [−448, 448] to e4m3fn bytes, ties to even."""
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
    normal = (np.float32(1) + mantissa / np.float32(8)) * np.exp2(
        exponent.astype(np.float32) - np.float32(7)
    )
    value = np.where(exponent == 0, small, normal).astype(np.float32)
    return np.where(codes & 128, -value, value)


def to_bf16(c: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16 bit patterns, ties to even."""
    bits = np.asarray(c, np.float32).view(np.uint32)
    return (
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    ).astype(np.uint16)


def from_bf16(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_fp16(c: np.ndarray) -> np.ndarray:
    """Convert float32 to float16, saturating: the excess stays in the residual."""
    return np.clip(c, np.float32(-65504), np.float32(65504)).astype(np.float16)


def cast_codes(c: np.ndarray, kind: int) -> np.ndarray:
    """Return the little-endian bytes of a cast."""
    return {BF16: to_bf16, FP16: to_fp16, FP32: lambda v: v}[kind](c).view(np.uint8)


def uncast(codes: np.ndarray, kind: int, numel: int) -> np.ndarray:
    raw = codes[: numel * CODE_BITS[kind] // 8].copy()
    if kind == BF16:
        return from_bf16(raw.view(np.uint16))
    return raw.view(np.float16 if kind == FP16 else np.float32).astype(np.float32)


# ---------------------------------------------------------------- blocks and rows


def encode_block(c: np.ndarray, kind: int, first: int, key: int) -> tuple[np.float32, np.ndarray]:
    """Return scale and codes of one block; ``first`` is its first element's index in the whole
    buffer."""
    if kind in (SIGN_L1, SIGN_RMS):
        return sign_scale(c, kind), pack_signs(c)
    zeros = np.zeros(len(c), np.uint8)
    if family_of(kind) == TERNARY and kind != TERNARY:
        limit = np.float32(np.float32((kind >> 8) / 10) * sign_scale(c, SIGN_RMS))
        return encode_block(
            np.clip(c, -limit, limit) if np.isfinite(limit) else c, TERNARY, first, key
        )
    if kind in LEVELS:
        scale = peak_scale(c, LEVELS[kind])
        if not scale > 0:
            return scale, pack_codes(zeros, CODE_BITS[kind])
        inverse = np.float32(np.float32(LEVELS[kind]) / np.max(np.abs(c)))
        codes = np.rint(c * inverse).astype(np.int8).view(np.uint8) & np.uint8(
            (1 << CODE_BITS[kind]) - 1
        )
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
    bits = code_bits(kind)
    unsigned = unpack_codes(codes, bits, numel).astype(np.int32)
    signed = np.where(unsigned >= 1 << (bits - 1), unsigned - (1 << bits), unsigned)
    return signed.astype(np.float32) * scale


def row_bytes(kind: int, width: int, block: int) -> int:
    return row_header_bytes(kind, width, block) + width * code_bits(kind) // 8


def scale_count(kind: int, width: int, block: int) -> int:
    if kind in CASTS:
        return 0
    return -(-width // block) if block and width else 1


def encode_row(
    c: np.ndarray, kind: int, width: int, block: int, *, first: int = 0, key: int = 0
) -> np.ndarray:
    """Return the bytes of one row; ``first`` is its first element's index in the whole buffer."""
    bits = code_bits(kind)
    codes = np.zeros(width * bits // 8, np.uint8)
    if kind in CASTS:
        codes[: len(c) * bits // 8] = cast_codes(c, kind)
        return codes
    step, headers = block or width, []
    for start in range(0, width, step or 1):
        part, span = c[start : start + step], min(step, width - start)
        if len(part) == 0:
            header, packed = (
                np.zeros(header_bytes(kind, span, block), np.uint8),
                np.zeros(0, np.uint8),
            )
        elif family_of(kind) >= BITS:
            header, packed = encode_with_header(part, kind, span, block, first + start, key)
        else:
            scale, packed = encode_block(part, kind, first + start, key)
            header = np.array([scale], np.float32).view(np.uint8)
        headers.append(header)
        codes[start * bits // 8 :][: len(packed)] = packed
    return (
        np.concatenate([*headers, codes])
        if headers
        else np.concatenate([np.zeros(4, np.uint8), codes])
    )


def decode_row(
    row: np.ndarray, kind: int, numel: int, width: int, block: int, gain: float = 1.0
) -> np.ndarray:
    """Return the first ``numel`` elements; each scale is multiplied by ``gain`` before its
    codes."""
    if kind in CASTS:
        return uncast(row, kind, numel) * np.float32(gain)
    codes = row[row_header_bytes(kind, width, block) :]
    out = np.zeros(numel, np.float32)
    step, at = block or width, 0
    for start in range(0, numel, step or 1):
        stop, size = min(start + step, numel), header_bytes(kind, min(step, width - start), block)
        header, packed = row[at : at + size].copy(), codes[start * code_bits(kind) // 8 :]
        if family_of(kind) >= BITS:
            out[start:stop] = decode_with_header(
                header, packed, kind, stop - start, np.float32(gain)
            )
        else:
            scale = np.float32(header.view(np.float32)[0] * np.float32(gain))
            out[start:stop] = decode_block(scale, packed, family_of(kind), stop - start)
        at += size
    return out


# ---------------------------------------------------------------- blocks with a header


def header_bytes(kind: int, span: int, block: int) -> int:
    """Return the bytes before the codes of one block of ``span`` elements; ``block`` is the length
    of a whole one."""
    family, parameter = family_of(kind), kind >> 8
    if family == BITS:
        return 20  # step, zero, least and greatest element float32, then two places uint16
    if family == TOP:
        return 6 * -(-span * parameter // block)  # values float32, then their places uint16
    if family in (RANDOM, UNBIASED):
        return 4 + 4 * -(-span // parameter)  # seed uint32, then one value per run
    return 0 if family in CASTS else 4


def row_header_bytes(kind: int, width: int, block: int) -> int:
    """Return the bytes of all headers of one row."""
    if kind in CASTS or not block or not width:
        return 0 if kind in CASTS else 4
    whole, rest = divmod(width, block)
    return whole * header_bytes(kind, block, block) + (
        header_bytes(kind, rest, block) if rest else 0
    )


def encode_with_header(
    c: np.ndarray, kind: int, span: int, block: int, first: int, key: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return header and codes. A block that is not finite begins with a NaN and, for top-k, has no
    places."""
    family, parameter = family_of(kind), kind >> 8
    header, codes = np.zeros(header_bytes(kind, span, block), np.uint8), np.zeros(len(c), np.uint8)
    if not np.isfinite(c).all():
        header[:4] = np.array([np.nan], np.float32).view(np.uint8)
        if family == TOP:
            header[4 * (len(header) // 6) :] = 0xFF
    elif family == BITS:
        shift = uniform(np.array([first], np.uint32), key)[0] if parameter & SHIFTED else None
        header[:], codes = encode_bits(c, code_bits(kind), shift)
    elif family == LOG:
        header[:], codes = encode_powers(c)
    elif family == TOP:
        places = top_places(c, min(len(header) // 6, len(c)))
        values = np.zeros(len(header) // 6, np.float32)
        values[: len(places)] = c[places] + np.float32(0)
        every = np.full(len(values), 0xFFFF, "<u2")
        every[: len(places)] = places
        header[:] = np.concatenate([values.view(np.uint8), every.view(np.uint8)])
    else:
        seed = block_seed(first, key)
        values = np.zeros(len(header) // 4 - 1, np.float32)
        places = random_places(len(c), parameter, seed)
        values[: len(places)] = c[places] + np.float32(0)
        if family == UNBIASED:
            values[: len(places)] *= run_lengths(len(c), parameter)
        header[:] = np.concatenate([np.array([seed], "<u4").view(np.uint8), values.view(np.uint8)])
    return header, pack_codes(codes, code_bits(kind)) if code_bits(kind) else np.zeros(0, np.uint8)


def decode_with_header(
    header: np.ndarray, codes: np.ndarray, kind: int, numel: int, gain: np.float32
) -> np.ndarray:
    family, parameter = family_of(kind), kind >> 8
    out = np.zeros(numel, np.float32)
    if family == BITS:
        step, zero, least, greatest = header[:16].view(np.float32)
        places = header[16:].view("<u2")
        out = (unpack_codes(codes, code_bits(kind), numel).astype(np.float32) - zero) * (
            step * gain
        )
        out[places[0]], out[places[1]] = least * gain, greatest * gain
    elif family == LOG:
        out = POWERS[unpack_codes(codes, code_bits(kind), numel)] * (
            header.view(np.float32)[0] * gain
        )
    elif family == TOP:
        count = len(header) // 6
        values, places = header[: 4 * count].view(np.float32), header[4 * count :].view("<u2")
        out[places[places < numel]] = values[places < numel] * gain
    else:
        places = random_places(numel, parameter, int(header[:4].view("<u4")[0]))
        out[places] = header[4:].view(np.float32)[: len(places)] * gain
    return out


def encode_bits(
    c: np.ndarray, bits: int, shift: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode the least and the greatest element exactly, the others as (code − zero) · step, on a
    grid over their range and 0.

    Zero is on the grid, so no element is further from its code than from zero: a contraction for
    any number of bits. With ``shift``, drawn from [0, 1), the grid has one step less and is shifted
    down by ``shift`` of a step: then the code is unbiased instead, with variance step² / 12.
    """
    levels, places = np.float32((1 << bits) - 1), (int(np.argmin(c)), int(np.argmax(c)))
    rest = np.ones(len(c), bool)
    rest[list(places)] = False
    low, high = np.float32(np.min(c[rest], initial=0)), np.float32(np.max(c[rest], initial=0))
    span, step, zero, codes = (
        np.float32(high - low),
        np.float32(0),
        np.float32(0),
        np.zeros(len(c), np.uint8),
    )
    if not np.isfinite(span):
        step = np.float32(np.nan)
    elif span >= TINY:
        steps = levels if shift is None else levels - np.float32(1)
        step, inverse = np.float32(span / steps), np.float32(steps / span)
        zero = np.float32(0) - low * inverse
        if shift is None:
            zero = np.rint(zero)
            codes[rest] = np.clip(np.rint(c[rest] * inverse) + zero, 0, levels).astype(np.uint8)
        else:
            zero = np.float32(zero + shift)
            codes[rest] = np.clip(np.rint(c[rest] * inverse + zero), 0, levels).astype(np.uint8)
    floats = np.array([step, zero, c[places[0]], c[places[1]]], np.float32)
    return np.concatenate([floats.view(np.uint8), np.array(places, "<u2").view(np.uint8)]), codes


def encode_powers(c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest magnitude, and for each element a sign and the nearest of its 1, 1/4 and
    1/16 by ratio; only 0 becomes 0."""
    scale, size = peak_scale(c, 1), np.abs(c)
    levels = (
        (size >= scale / np.float32(2)).astype(np.uint8)
        + (size >= scale / np.float32(8))
        + (size > 0)
    )
    codes = np.where(scale > 0, levels + 4 * (c < 0).astype(np.uint8), np.uint8(0))
    return np.array([scale], np.float32).view(np.uint8), codes.astype(np.uint8)


def top_places(c: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the ``count`` largest magnitudes, the first of equal ones, in ascending
    order."""
    return np.sort(np.lexsort((np.arange(len(c)), -np.abs(c)))[:count])


def block_seed(first: int, key: int) -> int:
    return (key + first * 0x9E3779B1) & 0xFFFFFFFF


def random_places(numel: int, run: int, seed: int) -> np.ndarray:
    """Return one uniformly drawn place in each ``run`` of elements."""
    starts = np.arange(0, numel, run)
    offsets = (uniform(starts.astype(np.uint32), seed) * run_lengths(numel, run)).astype(np.int64)
    return starts + offsets


def run_lengths(numel: int, run: int) -> np.ndarray:
    return np.minimum(run, numel - np.arange(0, numel, run)).astype(np.float32)


# ---------------------------------------------------------------- fused forms


def compensate(x: np.ndarray, residual: np.ndarray, gain: float = 1.0) -> np.ndarray:
    """Return c = gain · x + residual, with two roundings."""
    return x.astype(np.float32) * np.float32(gain) + residual


def encode_with_residual(
    x: np.ndarray,
    residual: np.ndarray,
    kind: int,
    width: int,
    block: int,
    *,
    gain: float = 1.0,
    key: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of bytes for the whole buffer ``x``, and the residual c − decode(encode(c))."""
    c = compensate(x, residual, gain)
    rows, left = [], np.zeros_like(c)
    for first in range(0, len(c), width):
        part = c[first : first + width]
        rows.append(encode_row(part, kind, width, block, first=first, key=key))
        left[first : first + width] = part - decode_row(rows[-1], kind, len(part), width, block)
    return np.stack(rows), left


def decode_mean(
    rows: np.ndarray, kind: int, numel: int, width: int, block: int, divisor: float = 0.0
) -> np.ndarray:
    """Return the sum of the P decoded rows in rank order, divided by P, or by ``divisor`` if a row
    stands for several ranks."""
    total = decode_row(rows[0], kind, numel, width, block)
    for row in rows[1:]:
        total = total + decode_row(row, kind, numel, width, block)
    return total / np.float32(divisor or len(rows))
