"""The loops of ``exact``: 64 numbers as one vector where all are looked at, and a window of 57 bits
where bits are read."""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from commpress.kernels import exact_format as law
from commpress.kernels.cpu.kinds import HALVES, I64, OCTETS, TABLE, WORDS
from commpress.kernels.cpu.sources.decorators import bare
from commpress.kernels.cpu.sources.emitted import Emitted
from commpress.kernels.cpu.sources.kernel import kernel
from commpress.kernels.exact_format import CLASSES, EVERY, GROUP, GROUPS, KEYS, LONGEST, PLANES

_I8, _I16, _I64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_ANY = OCTETS, HALVES, WORDS
_ONE = np.uint64(1)
_HEAD, _CLASS = law.EXPONENT_HEAD.size, law.CLASS.size
_ESCAPED = np.uint64(1 << LONGEST)
_ROOM = 32  # bytes that one number may need, and more
_LOWEST, _HIGHEST = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)  # of each byte
_WORTH = 64  # a class is one of its own where that saves more than one bit in so many
_READ = 57  # bits that one read gives at least
_NONE = 64  # bits of a code, where none follows
# [rank << 8 | byte]: the place in a byte of the one that has ``rank`` others below it
_PLACES = np.zeros(8 << 8, np.uint8)
for _byte in range(256):
    for _rank, _place in enumerate(i for i in range(8) if _byte >> i & 1):
        _PLACES[_rank << 8 | _byte] = _place


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
def _ones(typing, word):
    """The number of its ones."""
    return types.int64(types.uint64), lambda *of: of[1].ctpop(of[3][0])


@intrinsic
def _at_most(typing, counts, at, number):
    """The number of counts, of 64 from ``at`` on, that are no more than ``number``."""

    def generate(*of):
        code = _Emitted(*of)
        numbers = code.spread(code.builder.trunc(code.args[2], _I16))
        upto = code.builder.icmp_unsigned("<=", code.load(0, code.args[1], _HALVES), numbers)
        return code.builder.ctpop(code.builder.bitcast(upto, _I64))

    return types.int64(counts, types.intp, types.int64), generate


# ---------------------------------------------------------------- sparse


@intrinsic
def _divide(typing, values, at, lasts, masks, group):
    """Set bit i of a class's mask of this group where values[at + i] belongs to the class."""

    def generate(*of):
        code, (_, at, lasts, _, group) = _Emitted(*of), of[3]
        build, element = code.builder, code.element(0)
        keys = build.shl(code.load(0, at, _vector(element)), _all(element, 1))
        if element != _I8:
            keys = build.trunc(build.lshr(keys, _all(element, element.width - 8)), _BYTES)
        before = _I64(0)
        for c in range(CLASSES):
            last = code.spread(build.trunc(build.extract_value(lasts, c), _I8))
            upto = build.bitcast(build.icmp_unsigned("<=", keys, last), _I64)
            mask = build.and_(upto, build.not_(before))
            code.store(mask, 3, build.add(group, _I64(c * GROUPS)))
            before = upto
        return code.nothing()

    return types.none(values, types.intp, lasts, masks, types.intp), generate


@bare
def _first_above(numbers, rank):
    """Eight times the first of eight bytes that is greater."""
    greater = (numbers | _HIGHEST) - (rank + _ONE) * _LOWEST & _HIGHEST
    return np.uint64(_zeros(greater) & 56)


@bare
def _key(value, itemsize):
    return np.int64(value) << 1 >> (8 * itemsize - 8) & (KEYS - 1)


@bare
def _divide_all(values, table, masks):
    """masks := for each class, those of its members in each group. ``table``: last keys."""
    lasts = table[0, 0], table[0, 1], table[0, 2], table[0, 3]
    for group in range(values.size // GROUP):
        _divide(values, group * GROUP, lasts, masks, group)


@bare
def _move(old, new, at):
    """new − old, signed, in the bits that they have."""
    half = np.int64(1) << (8 * new.itemsize - 1)
    d = (np.int64(new[at]) - np.int64(old[at])) & (2 * half - 1)
    return d - ((d & half) << 1)


@kernel(old=HALVES, new=HALVES, table=TABLE, masks=TABLE)
@kernel(old=OCTETS, new=OCTETS, table=TABLE, masks=TABLE)
@kernel(old=WORDS, new=WORDS, table=TABLE, masks=TABLE)
@bare
def scan(old, new, table, masks):
    """Count what has changed. ``table``: for each key its numbers, by one in 64 of them, how many
    changed, and by how many units. ``masks``: which changed, the last row."""
    size, count = new.itemsize, 0
    for row in range(3):
        for key in range(KEYS):
            table[row, key] = 0
    for first in range(0, new.size, GROUP):
        probe = first + (first // GROUP * 0x9E37 >> 8) % GROUP
        table[0, _key(old[probe], size)] += GROUP
        mask = _differing(old, new, first)
        masks[CLASSES, first // GROUP] = np.int64(mask)
        while mask:
            at = first + _zeros(mask)
            mask &= mask - _ONE
            key = _key(old[at], size)
            table[1, key] += 1
            table[2, key] += abs(_move(old, new, at))
            count += 1
    return count


@bare
def _rice(total, count):
    """(the parameter for so many numbers of this sum, about the bits that they take)."""
    k = 0
    while k < 31 and count << k < total * 69 // 100:
        k += 1
    quotients = max((total >> k) * 15 // 16 - count // 3, 0) if k else total
    return k, count * (k + 1) + quotients


@bare
def _shortest(table, i, j):
    """(about the bits of a class of entries i and j, its parameters of gaps and of moves)."""
    numel, changed, units = table[0, i], table[1, i], table[2, i]
    if i != j:
        numel, changed, units = numel + table[0, j], changed + table[1, j], units + table[2, j]
    if not changed:
        return 0, 0, 0
    numel = max(numel, changed)
    m, least = _rice(2 * units - changed // 2, numel)
    gap, places = _rice(numel, changed)
    order, sizes = _rice(2 * units - changed * 3 // 2, changed)
    order = max(order, 1)
    k = EVERY
    if places + sizes < least:
        k, m, least = gap, order, places + sizes
    if places + changed + (units - changed) * (gap + 2) < least:
        k, m, least = gap, 0, places + changed + (units - changed) * (gap + 2)
    return least, k, m


@kernel(table=TABLE)
@bare
def classify(table):
    """Join neighbours among keys into classes, those first where that costs least. ``table``: the
    last key of each class and its parameters; their count."""
    count = 0
    for key in range(KEYS):
        if table[0, key] + table[1, key]:
            for row in range(3):
                table[row, count] = table[row, key]
            table[3, count], table[4, count] = key, _shortest(table, count, count)[0]
            if count:
                table[5, count - 1] = _shortest(table, count - 1, count)[0]
            count += 1
    while count > 1:
        best, least, total = 0, np.int64(1) << 62, table[4, count - 1]
        for i in range(count - 1):
            total += table[4, i]
            loss = table[5, i] - table[4, i] - table[4, i + 1]
            if loss < least:
                best, least = i, loss
        if count <= CLASSES and least > 8 * _CLASS + total // _WORTH:
            break
        for row in range(3):
            table[row, best] += table[row, best + 1]
        table[3, best], table[4, best] = table[3, best + 1], table[5, best]
        count -= 1
        for i in range(best + 1, count):
            for row in range(6):
                table[row, i] = table[row, i + 1]
        for i in range(max(best - 1, 0), min(best + 1, count - 1)):
            table[5, i] = _shortest(table, i, i + 1)[0]
    for i in range(count):
        _, table[1, i], table[2, i] = _shortest(table, i, i)
        table[0, i] = table[3, i]
    for i in range(count - 1, CLASSES):
        table[0, i] = KEYS - 1
    return count


@bare
def _put(out, at, held, fill, number, k, bit):
    """Append a Rice code, and a bit if ``bit`` is 1 more than that: (bytes that are whole, bits
    that are held beside them)."""
    quotient = number >> np.uint64(k)
    if quotient < np.uint64(LONGEST):
        word = (_ONE | (number & ((_ONE << np.uint64(k)) - _ONE)) << _ONE) << quotient
        length = np.int64(quotient) + 1 + k
    else:
        word, length = _ESCAPED | number << np.uint64(LONGEST + 1), LONGEST + 33
    held |= (word | np.uint64(bit >> 1) << np.uint64(length)) << np.uint64(fill)
    fill += length + (bit > 0)
    _put_word(out, at, held)
    return at + (fill >> 3), (held >> np.uint64(fill & 56) if fill < 64 else np.uint64(0)), fill & 7


@kernel(old=HALVES, new=HALVES, table=TABLE, masks=TABLE, classes=I64, out=OCTETS)
@kernel(old=OCTETS, new=OCTETS, table=TABLE, masks=TABLE, classes=I64, out=OCTETS)
@kernel(old=WORDS, new=WORDS, table=TABLE, masks=TABLE, classes=I64, out=OCTETS)
@bare
def pack(old, new, table, masks, classes, out):
    """out := the bits of all classes, whose bytes are in ``table`` then; their sum, or −1 where
    they may not fit."""
    _divide_all(old, table, masks)
    at, end = 0, out.size - _ROOM
    for c in range(classes):
        k, m, start, rank, before = table[1, c], table[2, c], at, np.int64(0), np.int64(-1)
        held, fill = np.uint64(0), np.int64(0)
        for group in range(old.size // GROUP):
            mask = np.uint64(masks[c, group])
            here = mask if k == EVERY else mask & np.uint64(masks[CLASSES, group])
            while here:
                place = _zeros(here)
                below = here ^ (here - _ONE)
                here &= here - _ONE
                d = _move(old, new, group * GROUP + place)
                u = np.uint64(2 * d if d >= 0 else -2 * d - 1)
                if k == EVERY:
                    if at > end:
                        return -1
                    at, held, fill = _put(out, at, held, fill, u, m, 0)
                    continue
                now = rank + _ones(mask & below) - 1
                for _ in range(1 if m else abs(d)):
                    if at > end:
                        return -1
                    step, before = np.uint64(now - before), now
                    at, held, fill = _put(out, at, held, fill, step, k, 0 if m else 1 + (d > 0))
                    if m:
                        at, held, fill = _put(out, at, held, fill, u - _ONE, m, 0)
            rank += _ones(mask)
        if fill:
            _put_word(out, at, held)
            at += 1
        table[3, c] = at - start
    return at


@bare
def _bits_from(code, bit, end):
    """Read at least 57 bits of a code, the first one lowest; zeros follow its last byte."""
    at = bit >> 3
    if at + 8 <= end:
        word = _word(code, at)
    else:
        word = np.uint64(0)
        for i in range(at, end):
            word |= np.uint64(code[i]) << np.uint64(8 * (i - at))
    return word >> np.uint64(bit & 7)


@bare
def _number(word, k):
    """(the number whose Rice code is the first of these bits, the bits of that code), or (0,
    ``_NONE``)."""
    quotient = _zeros(word)
    if quotient < LONGEST:
        rest = word >> np.uint64(quotient + 1) & ((_ONE << np.uint64(k)) - _ONE)
        return quotient << k | np.int64(rest), quotient + 1 + k
    if quotient > LONGEST:
        return np.int64(0), np.int64(_NONE)
    return np.int64(word >> np.uint64(LONGEST + 1) & np.uint64(0xFFFFFFFF)), np.int64(LONGEST + 33)


@bare
def _size(word, k, m):
    """The same of the size of a move: one bit where it has no parameter."""
    return _number(word, m) if m or k == EVERY else (np.int64(word & _ONE), np.int64(1))


@bare
def _read(code, bit, end, k, m, rank, members, steps):
    """Read moves of a class until ``steps`` is full: (how many, or −1 where the code is none; the
    bit behind them; the last rank; how many numbers they move). Ranks are in the first row, moves
    in the second."""
    n, count = 0, 0
    while n < steps.shape[1] and (k != EVERY or rank + 1 < members):
        word = _bits_from(code, bit, end)
        step, length = (np.int64(1), np.int64(0)) if k == EVERY else _number(word, k)
        if length > _READ:
            break
        u, size = _size(word >> np.uint64(length), k, m)
        if length + size > _READ:  # as seldom as a code's end
            u, size = _size(_bits_from(code, bit + length, end), k, m)
        u += k != EVERY
        rank += step
        if size > _READ or not 0 <= rank < members:
            return -1, bit, rank, count
        bit += length + size
        steps[0, np.uint64(n)], steps[1, np.uint64(n)] = rank, u >> 1 ^ -(u & 1)
        n += 1
        count += (u != 0) & (step != 0)
    return n, bit, rank, count


@bare
def _count(masks, c, groups, counts):
    """Count the members of a class up to each of the eight bytes of a group, in the last row of
    ``masks``; ``counts``: of each group and the earlier ones among 64. Returns the sum of all."""
    for group in range(groups):
        mask = np.uint64(masks[c, group])
        twos = mask - (mask >> _ONE & _LOWEST * np.uint64(0x55))
        fours = twos & _LOWEST * np.uint64(0x33)
        fours += twos >> np.uint64(2) & _LOWEST * np.uint64(0x33)
        eights = fours + (fours >> np.uint64(4)) & _LOWEST * np.uint64(0x0F)
        masks[CLASSES, group] = np.int64(eights * _LOWEST)
    for group in range(groups, -(-groups // GROUP) * GROUP):
        masks[CLASSES, group] = 0
    members = np.int64(0)
    for first in range(0, groups, GROUP):
        upto = np.int64(0)
        for group in range(first, first + GROUP):
            upto += masks[CLASSES, group] >> 56
            counts[group] = upto
        members += upto
    return members


@bare
def _find(masks, c, counts, steps, n, first, before):
    """Replace ranks by places. ``first``: a group, at which 64 begin in which the first rank may
    lie; ``before``: members before it. Returns both for the next ranks.

    Nothing here depends on the rank before but for one branch in 64 groups.
    """
    for i in range(n):
        rank = steps[0, np.uint64(i)] - before
        while rank >= counts[first + GROUP - 1]:
            rank -= counts[first + GROUP - 1]
            before += counts[first + GROUP - 1]
            first += GROUP
        group = np.uint64(first + _at_most(counts, first, rank))
        upto = np.uint64(masks[CLASSES, group])
        left = np.uint64(rank) + (upto >> np.uint64(56)) - np.uint64(counts[group])
        at = _first_above(upto, left)
        left -= upto << np.uint64(8) >> at & np.uint64(255)
        byte = np.uint64(masks[c, group]) >> at & np.uint64(255)
        place = np.uint64(_PLACES[left << np.uint64(8) | byte])
        steps[0, np.uint64(i)] = np.int64(group * np.uint64(GROUP) + at + place)
    return first, before


@bare
def _apply(code, start, end, target, k, m, masks, c, counts, steps):
    """Add the moves of one class, from these bytes; how many moved, or −1 where the code is none of
    such a class. Read, found and added in turns, many at a time, so that no read waits for memory
    and few branches are taken by chance."""
    most = (np.int64(1) << (8 * target.itemsize)) - 1
    members = _count(masks, c, target.size // GROUP, counts)
    bit, rank, first, before = 8 * start, np.int64(-1), np.int64(0), np.int64(0)
    n, total = steps.shape[1], 0
    while n == steps.shape[1]:
        n, bit, rank, count = _read(code, bit, end, k, m, rank, members, steps)
        if n < 0:
            return -1
        first, before = _find(masks, c, counts, steps, n, first, before)
        for i in range(n):
            place = np.uint64(steps[0, np.uint64(i)])
            target[place] = np.int64(target[place]) + steps[1, np.uint64(i)] & most
        total += count
    return total if (bit + 7) >> 3 == end else -1


@kernel(code=OCTETS, target=_ANY, table=TABLE, masks=TABLE, classes=I64, counts=HALVES, steps=TABLE)
@bare
def apply(code, target, table, masks, classes, counts, steps):
    """Add the moves of all classes, whose heads are the columns of ``table``, and whose bytes end
    ``code``; how many moved, or −1 where the code is none of such classes."""
    _divide_all(target, table, masks)
    total, end = 0, code.size
    for c in range(classes):
        end -= table[3, c]
    for c in range(classes):
        start, end = end, end + table[3, c]
        moved = _apply(code, start, end, target, table[1, c], table[2, c], masks, c, counts, steps)
        if moved < 0:
            return -1
        total += moved
    return total


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
        escaped = build.icmp_unsigned(">=", codes, _all(_I8, law.WINDOW))
        codes = build.select(escaped, _all(_I8, law.HIT), codes)
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


@bare
def _window(values, shift, counts):
    """The first exponent of the window that has most of a sample. ``counts``: the first row."""
    for exponent in range(KEYS):
        counts[0, exponent] = 0
    for i in range(0, values.size, max(values.size // law.SAMPLE, 1)):
        counts[0, np.uint64(values[i]) >> shift & np.uint64(255)] += 1
    inside = base = most = 0
    for exponent in range(KEYS):
        inside += counts[0, exponent]
        if exponent >= law.WINDOW:
            inside -= counts[0, exponent - law.WINDOW]
        if inside > most and exponent >= law.WINDOW - 1:
            base, most = exponent - law.WINDOW + 1, inside
    return base


@kernel(values=(HALVES, WORDS), table=TABLE, out=OCTETS)
@bare
def split(values, table, out):
    """out := the exponent form of whole groups; its bytes, or −1 where it does not fit."""
    numel, shift = values.size, np.uint64(8 * values.itemsize - 9)
    base = _window(values, shift, table)
    half = _HEAD + numel
    plane = half + numel * (values.itemsize - 2)
    end = plane + numel // GROUP * PLANES
    at = end
    for first in range(0, numel, GROUP):
        if at + GROUP > out.size:
            return -1
        mask = _split(values, first, base, out, _HEAD + first, half + 2 * first, plane)
        plane += PLANES
        while mask:
            out[at] = np.uint64(values[first + _zeros(mask)]) >> shift & np.uint64(255)
            mask &= mask - _ONE
            at += 1
    out[0], out[1] = law.EXPONENTS, base
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
    half = _HEAD + numel
    plane = half + numel * (target.itemsize - 2)
    at = plane + numel // GROUP * PLANES
    for first in range(0, numel, GROUP):
        mask = _join(code, _HEAD + first, half + 2 * first, plane, base, target, first)
        plane += PLANES
        while mask:
            i = first + _zeros(mask)
            mask &= mask - _ONE
            if at >= code.size:
                return -1
            target[i] = np.uint64(target[i]) & keep | np.uint64(code[at]) << shift
            at += 1
    return 0 if at == code.size else -1
