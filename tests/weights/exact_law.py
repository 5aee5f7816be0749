"""The exact block code in plain NumPy, slow and obvious: the law of ``kernels/exact_format.py``."""

from itertools import pairwise

import numpy as np

from commpress.kernels.exact_format import BFLOAT16 as BFLOAT16
from commpress.kernels.exact_format import BLOCK as BLOCK
from commpress.kernels.exact_format import (
    EXPONENT_HEAD,
    EXPONENTS,
    FLOAT32,
    GAP_BITS,
    GROUP,
    HIT,
    LONGEST,
    PLAIN,
    PLANES,
    RAW,
    SAME,
    SPARSE,
    SPARSE_HEAD,
    WINDOW,
    exponent_bytes,
    whole_groups,
    window,
)


def encode(old: np.ndarray | None, new: np.ndarray, kind: int = PLAIN) -> bytes:
    """The code of ``new``, which ``decode`` makes of it and ``old``; without ``old``, of its
    own."""
    best = bytes([RAW]) + new.tobytes()
    if old is not None:
        at = np.flatnonzero(old != new)
        if not len(at):
            return bytes([SAME])
        best = min(best, sparse(at, signed(new[at] - old[at])), key=len)
    if kind != PLAIN and 5 * len(best) > 3 * new.nbytes:  # no exponents are as short as this
        best = min(best, exponents(new, kind), key=len)
    return best


def decode(code: bytes, target: np.ndarray, kind: int = PLAIN) -> None:
    """``target``, the block before, becomes the new one. ValueError, and nothing is changed, where
    the code is damaged."""
    form = code[0] if code else -1
    if form == SPARSE:
        at, differences = unpack(code, len(target), 8 * target.itemsize)
        target[at] += differences.astype(target.dtype)
    elif form == EXPONENTS and kind != PLAIN:
        target[:] = _joined(code, len(target), kind)
    elif form == RAW and len(code) == 1 + target.nbytes:
        target[:] = np.frombuffer(code, target.dtype, offset=1)
    elif form != SAME or len(code) != 1:
        raise ValueError("damaged")


def fold(first: bytes, second: bytes, numel: int, dtype: np.dtype, kind: int = PLAIN) -> bytes:
    """One code in place of two, the second of which follows the first."""
    if first[0] == SAME or second[0] in (EXPONENTS, RAW):
        return second
    if second[0] == SAME:
        return first
    if first[0] != SPARSE:
        whole = np.zeros(numel, dtype)
        decode(first, whole, kind)
        decode(second, whole, kind)
        return encode(None, whole, kind)
    sums = np.zeros(numel, dtype)
    for code in (first, second):
        decode(code, sums, kind)
    at = np.flatnonzero(sums)
    return sparse(at, signed(sums[at])) if len(at) else bytes([SAME])


def signed(differences: np.ndarray) -> np.ndarray:
    return differences.view(f"i{differences.itemsize}").astype(np.int64)


# ---------------------------------------------------------------- sparse


def rice_parameter(gaps: int, count: int) -> int:
    """k = ⌈log₂(mean gap · ln 2)⌉, at least 0."""
    k = 0
    while count << k < gaps * 69 // 100:
        k += 1
    return k


def golomb_order(logs: np.ndarray) -> int:
    """The order of the shortest code of differences; ``logs`` counts those of each ⌊log₂ |d|⌋."""
    best, least = 0, -1
    for m in range(32):
        bits = sum(int(count) * (m + 1 + 2 * max(log - m, 0)) for log, count in enumerate(logs))
        if least < 0 or bits < least:
            best, least = m, bits
    return best


def sparse(at: np.ndarray, differences: np.ndarray) -> bytes:
    """The sparse form of ``differences`` at places in ascending order."""
    gaps = np.diff(at, prepend=-1) - 1
    sizes = np.abs(differences)
    k = rice_parameter(int(gaps.sum()), len(gaps))
    m = golomb_order(np.bincount(_log2(sizes), minlength=33))
    quotients = np.minimum(gaps >> k, LONGEST)
    rest = np.where(quotients < LONGEST, k, GAP_BITS)
    values = sizes - 1 + (1 << m)
    logs = _log2(values)
    first, low = (differences < 0) | (2 << (logs - m)), values & ((1 << logs) - 1)
    words = np.stack([1 << quotients, gaps & ((1 << rest) - 1), first, low], axis=1)
    lengths = np.stack([quotients + 1, rest, 2 + logs - m, logs], axis=1)
    return SPARSE_HEAD.pack(SPARSE, k, m, len(at)) + _bits(words.ravel(), lengths.ravel())


def unpack(code: bytes, numel: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and differences of a sparse form."""
    if len(code) < SPARSE_HEAD.size:
        raise ValueError("damaged")
    _, k, m, count = SPARSE_HEAD.unpack_from(code)
    bits = Bits(code[SPARSE_HEAD.size :])
    if k > GAP_BITS or m > 31 or not 0 < count <= numel:
        raise ValueError("damaged")
    at, places, differences = -1, [], []
    for _ in range(count):
        quotient = bits.zeros(LONGEST)
        at += 1 + (bits.take(GAP_BITS) if quotient == LONGEST else quotient << k | bits.take(k))
        negative, log = bits.take(1), m + bits.zeros(32)
        size = (1 << log | bits.take(log)) - (1 << m) + 1
        if at >= numel or log > 32 or size > 1 << (width - 1):
            raise ValueError("damaged")
        places.append(at)
        differences.append(-size if negative else size)
    if bits.bytes_read != len(bits.content):
        raise ValueError("damaged")
    return np.array(places), np.array(differences)


class Bits:
    """Bits of a byte string, the lowest of a byte first; behind the end there are zeros."""

    def __init__(self, content: bytes) -> None:
        self.content, self._number, self._at = content, int.from_bytes(content, "little"), 0

    @property
    def bytes_read(self) -> int:
        return (self._at + 7) // 8

    def take(self, count: int) -> int:
        found = self._number >> self._at & ((1 << count) - 1)
        self._at += count
        return found

    def zeros(self, most: int) -> int:
        count = 0
        while not self.take(1):
            count += 1
            if count > most:
                raise ValueError("damaged")
        return count


def _log2(values: np.ndarray) -> np.ndarray:
    return np.frexp(values.astype(np.float64))[1] - 1


def _bits(words: np.ndarray, lengths: np.ndarray) -> bytes:
    """The lowest ``lengths`` bits of each word, one behind the other."""
    of = np.repeat(np.arange(len(words)), lengths)
    within = np.arange(len(of)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.packbits((words[of] >> within & 1).astype(np.uint8), bitorder="little").tobytes()


# ---------------------------------------------------------------- exponents


def exponents(block: np.ndarray, kind: int) -> bytes:
    new = whole_groups(block)
    tops = new.astype(np.int64) >> (16 if kind == FLOAT32 else 0)
    base = window(tops)
    codes = (tops >> 7 & 255) - base
    escaped = (codes < 0) | (codes >= WINDOW)
    codes[escaped] = HIT
    planes = [
        np.packbits((codes >> j & 1).astype(np.uint8), bitorder="little").reshape(-1, 8)
        for j in range(3)
    ]
    parts = [
        EXPONENT_HEAD.pack(EXPONENTS, base, int(escaped.sum())),
        (tops & 127 | tops >> 8 & 128).astype(np.uint8).tobytes(),
        (new & 0xFFFF).astype("<u2").tobytes() if kind == FLOAT32 else b"",
        np.concatenate(planes, axis=1).tobytes(),
        (tops[escaped] >> 7 & 255).astype(np.uint8).tobytes(),
    ]
    return b"".join(parts)


def _joined(code: bytes, numel: int, kind: int) -> np.ndarray:
    end = exponent_bytes(numel, kind)
    if len(code) < end or EXPONENT_HEAD.unpack_from(code)[2] != len(code) - end:
        raise ValueError("damaged")
    base, groups = code[1], -(-numel // GROUP)
    starts = np.cumsum(
        [
            EXPONENT_HEAD.size,
            groups * GROUP,
            2 * groups * GROUP * (kind == FLOAT32),
            groups * PLANES,
        ]
    )
    low, half, plane = (np.frombuffer(code[a:b], np.uint8) for a, b in pairwise(starts))
    bits = np.unpackbits(plane.reshape(-1, 3, 8), axis=2, bitorder="little").astype(np.int64)
    codes = (bits[:, 0] | bits[:, 1] << 1 | bits[:, 2] << 2).ravel()
    found, escaped = (base + codes) & 255, codes == HIT
    if int(escaped.sum()) != len(code) - end:
        raise ValueError("damaged")
    found[escaped] = np.frombuffer(code[end:], np.uint8)
    tops = found << 7 | low.astype(np.int64) & 127 | (low.astype(np.int64) & 128) << 8
    joined = (
        (tops << 16 | half.view("<u2")).astype(np.uint32)
        if kind == FLOAT32
        else tops.astype(np.uint16)
    )
    return joined[:numel]
