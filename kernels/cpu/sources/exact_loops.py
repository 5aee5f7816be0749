"""The loops of ``exact``: 64 numbers as one vector where all are looked at, and a window of 57 bits
where bits are read."""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commpress.kernels.cpu.kinds import HALVES, I64, INTEGERS, OCTETS, SIGNED_WORDS, WORDS
from commpress.kernels.cpu.sources.decorators import bare
from commpress.kernels.cpu.sources.emitted import Emitted
from commpress.kernels.cpu.sources.kernel import kernel
from commpress.kernels.exact_format import (
    EXPONENT_HEAD,
    EXPONENTS,
    GAP_BITS,
    GROUP,
    HIT,
    LONGEST,
    PLANES,
    SPARSE,
    SPARSE_HEAD,
    WINDOW,
)

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_ONE = np.uint64(1)
_HEAD, _HEAD_OF_EXPONENTS = SPARSE_HEAD.size, EXPONENT_HEAD.size
_ESCAPED = np.uint64(1 << LONGEST)
_ROOM = 32  # bytes that one number may need, and more


def _vector(element):
    return ir.VectorType(element, GROUP)


_BYTES, _HALVES = _vector(_I8), _vector(_I16)


class _Emitted(Emitted):
    align = 1


def _all(element, value):
    return ir.Constant(_vector(element), [value] * GROUP)


@intrinsic
def _differing(typing, old, new, at):
    """Bit i is 1 where old[at + i] is not new[at + i]; 64 numbers."""

    def generate(*of):
        code = _Emitted(*of)
        sides = [code.load(i, code.args[2], _vector(code.element(0))) for i in range(2)]
        return code.builder.bitcast(code.builder.icmp_signed("!=", *sides), _I64)

    return types.uint64(old, new, types.intp), generate


@intrinsic
def _word(typing, array, at):
    """Eight bytes, the first one lowest."""

    def generate(*of):
        return _Emitted(*of).load(0, of[3][1], _I64)

    return types.uint64(array, types.intp), generate


@intrinsic
def _put_word(typing, array, at, word):
    def generate(*of):
        code = _Emitted(*of)
        code.store(code.args[2], 0, code.args[1])
        return code.nothing()

    return types.none(array, types.intp, types.uint64), generate


@intrinsic
def _zeros(typing, word):
    """Zeros below the lowest one; 64 of no bits."""
    return types.int64(types.uint64), lambda *of: of[1].cttz(of[3][0], ir.IntType(1)(0))


@intrinsic
def _log2(typing, value):
    """The place of the highest one."""

    def generate(*of):
        build, (word,) = of[1], of[3]
        return build.sub(_I64(63), build.ctlz(word, ir.IntType(1)(0)))

    return types.int64(types.uint64), generate


# ---------------------------------------------------------------- sparse


@kernel(old=HALVES, new=HALVES, gaps=WORDS, differences=SIGNED_WORDS)
@kernel(old=OCTETS, new=OCTETS, gaps=WORDS, differences=SIGNED_WORDS)
@kernel(old=WORDS, new=WORDS, gaps=WORDS, differences=SIGNED_WORDS)
@bare
def scan(old, new, gaps, differences):
    """Gaps and differences of the numbers that changed; their count."""
    numel, half = new.size, np.int64(1) << (8 * new.itemsize - 1)
    whole, count, last = numel // GROUP * GROUP, 0, -1
    for first in range(0, numel, GROUP):
        if first < whole:
            mask = _differing(old, new, first)
        else:
            mask = np.uint64(0)
            for i in range(first, numel):
                mask |= np.uint64(old[i] != new[i]) << np.uint64(i - first)
        while mask:
            at = first + _zeros(mask)
            mask &= mask - _ONE
            gaps[count] = np.uint32(at - last - 1)
            d = (np.int64(new[at]) - np.int64(old[at])) & (2 * half - 1)
            differences[count] = np.int32(d - ((d & half) << 1))
            last = at
            count += 1
    return count


@bare
def _flushed(out, at, held, fill):
    """Store ``fill`` bits; what is held of the last byte, if it is not full."""
    _put_word(out, at, held)
    return at + (fill >> 3), held >> np.uint64(fill & ~7), fill & 7


@kernel(gaps=WORDS, differences=SIGNED_WORDS, count=I64, logs=INTEGERS, out=OCTETS)
@bare
def pack(gaps, differences, count, logs, out):
    """out := the sparse form, with zeros behind it; its bytes, or −1 where it may not fit."""
    total = 0
    for log in range(33):
        logs[log] = 0
    for j in range(count):
        total += gaps[j]
        logs[_log2(np.uint64(abs(np.int64(differences[j]))))] += 1
    k, m, least = 0, 0, -1
    while count << k < total * 69 // 100:
        k += 1
    for order in range(32):
        bits = 0
        for log in range(33):
            bits += logs[log] * (order + 1 + 2 * max(log - order, 0))
        if least < 0 or bits < least:
            m, least = order, bits
    out[0], out[1], out[2] = SPARSE, k, m
    for i in range(4):
        out[3 + i] = np.uint8(count >> (8 * i) & 255)
    at, end, held, fill = _HEAD, out.size - _ROOM, np.uint64(0), np.int64(0)
    low, first = np.uint64((1 << k) - 1), np.uint64(1 << m)
    for j in range(count):
        if at > end:
            return -1
        gap = np.uint64(gaps[j])
        quotient = gap >> np.uint64(k)
        if quotient < np.uint64(LONGEST):
            word = (_ONE | (gap & low) << _ONE) << quotient
            length = np.int64(quotient) + 1 + k
        else:
            word = _ESCAPED | gap << np.uint64(LONGEST + 1)
            length = np.int64(LONGEST + 1 + GAP_BITS)
        held |= word << np.uint64(fill)
        fill += length
        at, held, fill = _flushed(out, at, held, fill)
        d = np.int64(differences[j])
        value = np.uint64(abs(d) - 1) + first
        log = _log2(value)
        zeros = log - m
        held |= (np.uint64(d < 0) | np.uint64(2) << np.uint64(zeros)) << np.uint64(fill)
        fill += 2 + zeros
        if fill + log > 63:
            at, held, fill = _flushed(out, at, held, fill)
        held |= (value & ((_ONE << np.uint64(log)) - _ONE)) << np.uint64(fill)
        fill += log
        at, held, fill = _flushed(out, at, held, fill)
    if fill:
        _put_word(out, at, held)
        at += 1
    return at


@bare
def _bits_from(code, bit):
    """Read at least 57 bits of a code, the first one lowest; zeros follow its end."""
    at = bit >> 3
    if at + 8 <= code.size:
        word = _word(code, at)
    else:
        word = np.uint64(0)
        for i in range(at, code.size):
            word |= np.uint64(code[i]) << np.uint64(8 * (i - at))
    return word >> np.uint64(bit & 7)


@kernel(code=OCTETS, target=(OCTETS, HALVES, WORDS))
@bare
def apply(code, target):
    """Add the differences of a sparse form to a block; 0, or −1 where it is none of such a
    block."""
    if code.size < _HEAD:
        return -1
    numel, most = target.size, np.int64(1) << (8 * target.itemsize - 1)
    k, m = np.int64(code[1]), np.int64(code[2])
    count = np.int64(0)
    for i in range(4):
        count |= np.int64(code[3 + i]) << (8 * i)
    if k > GAP_BITS or m > 31 or not 0 < count <= numel:
        return -1
    bit, at = np.int64(8 * _HEAD), np.int64(-1)
    for _ in range(count):
        word = _bits_from(code, bit)
        quotient = _zeros(word)
        if quotient < LONGEST:
            rest = word >> np.uint64(quotient + 1) & ((_ONE << np.uint64(k)) - _ONE)
            at += 1 + (quotient << k | np.int64(rest))
            bit += quotient + 1 + k
        elif quotient == LONGEST:
            at += 1 + np.int64(word >> np.uint64(LONGEST + 1) & np.uint64((1 << GAP_BITS) - 1))
            bit += LONGEST + 1 + GAP_BITS
        else:
            return -1
        if at >= numel:
            return -1
        word = _bits_from(code, bit)
        zeros = _zeros(word >> _ONE)
        log = m + zeros
        if zeros > 32 or log > 32:
            return -1
        bit += 2 + zeros
        rest = word >> np.uint64(2 + zeros) if 2 + zeros + log <= 57 else _bits_from(code, bit)
        bit += log
        value = _ONE << np.uint64(log) | (rest & ((_ONE << np.uint64(log)) - _ONE))
        size = np.int64(value) - (np.int64(1) << m) + 1
        if size > most:
            return -1
        now = np.int64(target[at]) + (-size if word & _ONE else size)
        target[at] = now & (2 * most - 1)
    return 0 if (bit + 7) >> 3 == code.size else -1


# ---------------------------------------------------------------- exponents


@intrinsic
def _split(typing, values, at, base, out, low, half, plane):
    """Store bytes, halves and planes of 64 numbers; bit i is 1 where the i-th one's exponent is
    escaped."""

    def generate(*of):
        code, (_, at, base, _, low, half, plane) = _Emitted(*of), of[3]
        build, element = code.builder, code.element(0)
        tops = words = code.load(0, at, _vector(element))
        if element != _I16:
            code.store(build.trunc(words, _HALVES), 3, half)
            tops = build.trunc(build.lshr(words, _all(element, 16)), _HALVES)
        sign = build.and_(build.lshr(tops, _all(_I16, 8)), _all(_I16, 128))
        lows = build.or_(build.and_(tops, _all(_I16, 127)), sign)
        code.store(build.trunc(lows, _BYTES), 3, low)
        exponents = build.trunc(build.lshr(tops, _all(_I16, 7)), _BYTES)
        codes = build.sub(exponents, code.spread(build.trunc(base, _I8)))
        escaped = build.icmp_unsigned(">=", codes, _all(_I8, WINDOW))
        codes = build.select(escaped, _all(_I8, HIT), codes)
        for j in range(3):
            bits = build.icmp_unsigned("!=", build.and_(codes, _all(_I8, 1 << j)), _all(_I8, 0))
            code.store(build.bitcast(bits, _I64), 3, build.add(plane, _I64(8 * j)))
        return build.bitcast(escaped, _I64)

    return types.uint64(values, *[types.intp] * 2, out, *[types.intp] * 3), generate


@intrinsic
def _join(typing, code, low, half, plane, base, target, at):
    """Store 64 numbers, exponents that are escaped as 7; bit i is 1 where the i-th is so."""

    def generate(*of):
        code, (_, low, half, plane, base, _, at) = _Emitted(*of), of[3]
        build, element = code.builder, code.element(5)
        lows = build.zext(code.load(0, low, _BYTES), _HALVES)
        codes, words = _all(_I8, 0), []
        for j in range(3):
            words.append(code.load(0, build.add(plane, _I64(8 * j)), _I64))
            bits = build.zext(build.bitcast(words[j], _vector(ir.IntType(1))), _BYTES)
            codes = build.or_(codes, build.shl(bits, _all(_I8, j)))
        exponents = build.zext(build.add(codes, code.spread(build.trunc(base, _I8))), _HALVES)
        tops = build.or_(build.shl(exponents, _all(_I16, 7)), build.and_(lows, _all(_I16, 127)))
        tops = build.or_(tops, build.shl(build.and_(lows, _all(_I16, 128)), _all(_I16, 8)))
        if element != _I16:
            halves = build.zext(code.load(0, half, _HALVES), _vector(element))
            tops = build.shl(build.zext(tops, _vector(element)), _all(element, 16))
            tops = build.or_(tops, halves)
        code.store(tops, 5, at)
        return build.and_(build.and_(*words[:2]), words[2])

    return types.uint64(code, *[types.intp] * 4, target, types.intp), generate


@kernel(values=(HALVES, WORDS), base=I64, out=OCTETS)
@bare
def split(values, base, out):
    """out := the exponent form of whole groups; its bytes, or −1 where it does not fit."""
    numel, shift = values.size, np.uint64(8 * values.itemsize - 9)
    half = _HEAD_OF_EXPONENTS + numel
    plane = half + numel * (values.itemsize - 2)
    end = plane + numel // GROUP * PLANES
    at = end
    for first in range(0, numel, GROUP):
        if at + GROUP > out.size:
            return -1
        mask = _split(values, first, base, out, _HEAD_OF_EXPONENTS + first, half + 2 * first, plane)
        plane += PLANES
        while mask:
            out[at] = np.uint64(values[first + _zeros(mask)]) >> shift & np.uint64(255)
            mask &= mask - _ONE
            at += 1
    out[0], out[1] = EXPONENTS, base
    for i in range(4):
        out[2 + i] = np.uint8((at - end) >> (8 * i) & 255)
    return at


@kernel(code=OCTETS, target=(HALVES, WORDS))
@bare
def join(code, target):
    """target := whole groups, from a form whose length fits; 0, or −1 where its escapes are not as
    many as it says."""
    numel, shift = target.size, np.uint64(8 * target.itemsize - 9)
    keep, base = ~(np.uint64(255) << shift), np.int64(code[1])
    half = _HEAD_OF_EXPONENTS + numel
    plane = half + numel * (target.itemsize - 2)
    at = plane + numel // GROUP * PLANES
    for first in range(0, numel, GROUP):
        mask = _join(code, _HEAD_OF_EXPONENTS + first, half + 2 * first, plane, base, target, first)
        plane += PLANES
        while mask:
            i = first + _zeros(mask)
            mask &= mask - _ONE
            if at >= code.size:
                return -1
            target[i] = np.uint64(target[i]) & keep | np.uint64(code[at]) << shift
            at += 1
    return 0 if at == code.size else -1
