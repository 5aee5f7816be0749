"""Blocks with a header: any number of bits with outliers apart, top-k, one at random, powers of
four."""

import numpy as np

from commpress.kernels.cpu.sources.block_codes import INFINITY, MAGNITUDE, peak_bits, uniform
from commpress.kernels.cpu.sources.decorators import jit
from commpress.kernels.reference import BITS, LOG, SHIFTED, TINY, TOP, UNBIASED

WITH_HEADER = BITS  # kinds of this family and above have headers
_SIGN = np.int32(0x7FFFFFFF)


@jit
def header_bytes(kind, span, block):
    """Bytes before the codes of one block of ``span`` elements."""
    family, parameter = kind & 255, kind >> 8
    if family == BITS:
        return 20
    if family == TOP:
        return 6 * ((span * parameter + block - 1) // block)
    if family == LOG:
        return 4
    return 4 + 4 * ((span + parameter - 1) // parameter)


@jit
def _put(header, at, pattern, count):
    """The lowest ``count`` bytes of a pattern, little endian."""
    for i in range(count):
        header[at + i] = np.uint8((pattern >> np.uint32(8 * i)) & np.uint32(255))


@jit
def _get(header, at, count):
    pattern = np.uint32(0)
    for i in range(count):
        pattern |= np.uint32(header[at + i]) << np.uint32(8 * i)
    return pattern


@jit
def encode_with_header(c, n, kind, first, key, work, left, header, codes):
    """Header and codes of one block, ``left`` := c − decoded; returns NaN if the block is not
    finite."""
    family, parameter = kind & 255, kind >> 8
    header[:] = 0
    peak = peak_bits(c, n)
    if peak >= INFINITY:
        for i in range(n):
            left[i] = c[i]
        codes[:] = 0
        _put(header, 0, np.uint32(0x7FC00000), 4)
        if family == TOP:
            header[4 * (header.size // 6) :] = 0xFF
        return np.float32(np.nan)
    if family == BITS:
        shift = uniform(first, key) if parameter & SHIFTED else np.float32(-1)
        return _encode_bits(c, n, parameter & ~SHIFTED, shift, work, left, header, codes)
    if family == TOP:
        return _encode_top(c, n, work, left, header)
    if family == LOG:
        return _encode_powers(c, n, peak, work, left, header, codes)
    seed = np.uint32(key + np.uint32(np.uint32(first) * np.uint32(0x9E3779B1)))
    return _encode_random(c, n, parameter, family == UNBIASED, seed, work, left, header)


@jit
def decode_with_header(header, codes, n, kind, gain, work, out, add):
    """out := or += the decoded block, each value times ``gain``."""
    family, parameter = kind & 255, kind >> 8
    patterns = work.view(np.uint32)
    if family == BITS:
        _decode_bits(header, codes, n, parameter & ~SHIFTED, gain, work, out, add)
        return
    if family == LOG:
        _decode_powers(header, codes, n, gain, work, out, add)
        return
    if not add:
        for i in range(n):
            out[i] = np.float32(0)
    if family == TOP:
        count = header.size // 6
        for i in range(count):
            place = np.int64(_get(header, 4 * count + 2 * i, 2))
            if place < n:
                patterns[0] = _get(header, 4 * i, 4)
                out[place] += work[0] * gain
        return
    seed = _get(header, 0, 4)
    for i in range((n + parameter - 1) // parameter):
        start = i * parameter
        place = start + np.int64(uniform(start, seed) * np.float32(min(parameter, n - start)))
        patterns[0] = _get(header, 4 + 4 * i, 4)
        out[place] += work[0] * gain


# ---------------------------------------------------------------- any number of bits


@jit
def _extremes(c, n):
    """The least and the greatest element, as integers that compare like floats: that vectorises."""
    patterns = c.view(np.int32)
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for i in range(n):
        p = patterns[i]
        order = np.int32(p ^ ((p >> np.int32(31)) & _SIGN))
        low, high = min(low, order), max(high, order)
    return low, high


@jit
def _float_at(order, work):
    patterns = work.view(np.int32)
    patterns[0] = order ^ ((order >> 31) & _SIGN)
    return work[0]


@jit
def _encode_bits(c, n, bits, shift, work, left, header, codes):
    """``shift`` < 0: none."""
    low_order, high_order = _extremes(c, n)
    low, high = _float_at(low_order, work), _float_at(high_order, work)
    least = greatest = 0
    while c[least] != low:
        least += 1
    while c[greatest] != high:
        greatest += 1
    bottom, top = c[least], c[greatest]
    other = 0
    while other < n and other in (least, greatest):
        other += 1
    low, high = np.float32(0), np.float32(0)
    if other < n:
        c[least] = c[other]
        c[greatest] = c[other]
        low_order, high_order = _extremes(c, n)
        low, high = min(_float_at(low_order, work), low), max(_float_at(high_order, work), high)
    span = np.float32(high - low)
    levels, step, inverse, zero = (
        np.float32((1 << bits) - 1),
        np.float32(0),
        np.float32(0),
        np.float32(0),
    )
    if not np.isfinite(span):
        step = np.float32(np.nan)
    elif span >= TINY:
        steps = levels if shift < 0 else levels - np.float32(1)
        step, inverse = np.float32(span / steps), np.float32(steps / span)
        zero = np.float32(0) - low * inverse
        zero = np.rint(zero) if shift < 0 else zero + shift
    if shift < 0:
        for i in range(n):
            work[i] = min(max(np.rint(c[i] * inverse) + zero, np.float32(0)), levels)
    else:
        for i in range(n):
            work[i] = min(max(np.rint(c[i] * inverse + zero), np.float32(0)), levels)
    for i in range(n):
        left[i] = c[i] - (work[i] - zero) * step
    if other < n:
        c[least], c[greatest] = bottom, top
    work[least] = work[greatest] = np.float32(0)
    left[least] = left[greatest] = np.float32(0)
    for i in range(n, (n + 7) // 8 * 8):
        work[i] = np.float32(0)
    _pack(work, n, bits, codes)
    spare = work.view(np.uint32)
    work[0], work[1], work[2], work[3] = step, zero, bottom, top
    for i in range(4):
        _put(header, 4 * i, spare[i], 4)
    _put(header, 16, np.uint32(least), 2)
    _put(header, 18, np.uint32(greatest), 2)
    return step


@jit
def _pack(work, n, bits, codes):
    """Eight codes to so many bytes as a code has bits, the first code in the highest."""
    if bits == 8:
        for i in range(n):
            codes[i] = np.uint8(work[i])
        return
    for g in range((n + 7) // 8):
        word = np.uint64(0)
        for i in range(8):
            word = (word << np.uint64(bits)) | np.uint64(np.int32(work[8 * g + i]))
        for i in range(bits):
            codes[g * bits + i] = np.uint8((word >> np.uint64(8 * (bits - 1 - i))) & np.uint64(255))


@jit
def _unpack(codes, n, bits, work):
    if bits == 8:
        for i in range(n):
            work[i] = np.float32(codes[i])
        return
    mask = np.uint64((1 << bits) - 1)
    for g in range((n + 7) // 8):
        word = np.uint64(0)
        for i in range(bits):
            word = (word << np.uint64(8)) | np.uint64(codes[g * bits + i])
        for i in range(8):
            work[8 * g + i] = np.float32(np.int32((word >> np.uint64(bits * (7 - i))) & mask))


@jit
def _decode_bits(header, codes, n, bits, gain, work, out, add):
    spare = work.view(np.uint32)
    for i in range(4):
        spare[i] = _get(header, 4 * i, 4)
    step, zero, bottom, top = work[0] * gain, work[1], work[2] * gain, work[3] * gain
    least, greatest = np.int64(_get(header, 16, 2)), np.int64(_get(header, 18, 2))
    _unpack(codes, n, bits, work)
    for i in range(n):
        work[i] = (work[i] - zero) * step
    if n:
        work[min(least, n - 1)] = bottom
        work[min(greatest, n - 1)] = top
    if add:
        for i in range(n):
            out[i] += work[i]
    else:
        for i in range(n):
            out[i] = work[i]


# ---------------------------------------------------------------- powers of four


@jit
def _encode_powers(c, n, peak, work, left, header, codes):
    patterns = work.view(np.uint32)
    patterns[0] = peak
    scale = work[0]
    if scale < TINY:
        for i in range(n):
            left[i] = c[i]
        codes[:] = 0
        return np.float32(0)
    half, eighth = scale * np.float32(1 / 2), scale * np.float32(1 / 8)
    fourth, sixteenth = scale * np.float32(1 / 4), scale * np.float32(1 / 16)
    for i in range(n):
        size = abs(c[i])
        level = np.float32(size >= half) + np.float32(size >= eighth) + np.float32(size > 0)
        value = scale if size >= half else fourth if size >= eighth else sixteenth
        value = value if size > 0 else np.float32(0)
        below = c[i] < 0
        left[i] = c[i] - (-value if below else value)
        work[i] = level + (np.float32(4) if below else np.float32(0))
    for i in range(n, (n + 7) // 8 * 8):
        work[i] = np.float32(0)
    _pack(work, n, 3, codes)
    _put(header, 0, peak, 4)
    return scale


@jit
def _decode_powers(header, codes, n, gain, work, out, add):
    spare = work.view(np.uint32)
    spare[0] = _get(header, 0, 4)
    scale = work[0] * gain
    _unpack(codes, n, 3, work)
    for i in range(n):
        code = np.uint32(np.int32(work[i]))
        level = code & np.uint32(3)  # 1/16, 1/4, 1 as patterns
        size = (
            (np.uint32(121) + np.uint32(2) * level) << np.uint32(23) if level > 0 else np.uint32(0)
        )
        spare[i] = size | ((code & np.uint32(4)) << np.uint32(29))
    if add:
        for i in range(n):
            out[i] += work[i] * scale
    else:
        for i in range(n):
            out[i] = work[i] * scale


# ---------------------------------------------------------------- sparse


@jit
def _encode_top(c, n, work, left, header):
    """The threshold is the pattern of the count-th largest magnitude, found bit by bit: each a pass
    that vectorises."""
    slots = header.size // 6
    count = min(slots, n)
    source, patterns = c.view(np.uint32), work.view(np.uint32)
    for i in range(n):
        patterns[i] = source[i] & MAGNITUDE
        left[i] = c[i]
    threshold = np.uint32(0)
    for b in range(30, -1, -1):
        trial = np.uint32(threshold | (np.uint32(1) << np.uint32(b)))
        reach = np.int32(0)
        for i in range(n):
            reach += np.int32(patterns[i] >= trial)
        if reach >= count:
            threshold = trial
        if reach == count:
            break
    equal = count
    for i in range(n):
        equal -= patterns[i] > threshold
    slot = 0
    for i in range(n):
        if patterns[i] > threshold or (patterns[i] == threshold and equal > 0):
            equal -= patterns[i] == threshold
            value = c[i] + np.float32(0)
            left[i] = c[i] - value
            work[n] = value
            _put(header, 4 * slot, patterns[n], 4)
            _put(header, 4 * slots + 2 * slot, np.uint32(i), 2)
            slot += 1
    for s in range(slot, slots):
        _put(header, 4 * slots + 2 * s, np.uint32(0xFFFF), 2)
    return np.float32(0)


@jit
def _encode_random(c, n, run, unbiased, seed, work, left, header):
    for i in range(n):
        left[i] = c[i]
    patterns = work.view(np.uint32)
    finite = True
    _put(header, 0, seed, 4)
    for i in range((n + run - 1) // run):
        start = i * run
        length = np.float32(min(run, n - start))
        place = start + np.int64(uniform(start, seed) * length)
        value = c[place] + np.float32(0)
        if unbiased:
            value = value * length
            finite = finite and np.isfinite(value)
        left[place] = c[place] - value
        work[0] = value
        _put(header, 4 + 4 * i, patterns[0], 4)
    return np.float32(0) if finite else np.float32(np.nan)
