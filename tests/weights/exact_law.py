"""The exact block code in plain NumPy, slow and obvious: the law of ``kernels/exact_format.py``."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from commpress.kernels.exact_format import BFLOAT16 as BFLOAT16
from commpress.kernels.exact_format import BLOCK as BLOCK
from commpress.kernels.exact_format import (
    CLASS,
    EVERY,
    EXPONENT_HEAD,
    EXPONENTS,
    FLOAT32,
    GROUP,
    HIT,
    KEYS,
    LONGEST,
    PLAIN,
    PLANES,
    RAW,
    SAME,
    SAMPLE,
    SPARSE,
    SPARSE_HEAD,
    WINDOW,
    exponent_bytes,
    sparse_head,
    whole_groups,
)

Class = tuple[int, int, int]  # its last key, k and m


def encode(
    old: np.ndarray | None, new: np.ndarray, kind: int = PLAIN, classes: Sequence[Class] = ()
) -> bytes:
    """The code of ``new``, which ``decode`` makes of it and ``old``; without ``old``, of its own.
    With ``classes`` the sparse form may be taken, with these."""
    best = bytes([RAW]) + new.tobytes()
    if old is not None and np.array_equal(old, new):
        return bytes([SAME])
    if classes:
        best = min(best, sparse(old, new, classes), key=len)
    if kind != PLAIN and 5 * len(best) > 3 * new.nbytes:  # no exponents are as short as this
        best = min(best, exponents(new, kind), key=len)
    return best


def decode(code: bytes, target: np.ndarray, kind: int = PLAIN) -> None:
    """``target``, the block before, becomes the new one. ValueError, and nothing is changed, where
    the code is damaged."""
    form = code[0] if code else -1
    if form == SPARSE:
        target += moves(code, target)[: len(target)].astype(target.dtype)
    elif form == EXPONENTS and kind != PLAIN:
        target[:] = _joined(code, len(target), kind)
    elif form == RAW and len(code) == 1 + target.nbytes:
        target[:] = np.frombuffer(code, target.dtype, offset=1)
    elif form != SAME or len(code) != 1:
        raise ValueError("damaged")


# ---------------------------------------------------------------- sparse


def classes_of(code: bytes) -> list[Class]:
    """The classes of a sparse form, none of another."""
    return [(last, k, m) for last, k, m, _ in sparse_head(code)[2]] if code[0] == SPARSE else []


def members(old: np.ndarray, classes: Sequence[Class]) -> list[np.ndarray]:
    """The places of each class, in ascending order."""
    keys = old.astype(np.int64) << 1 >> 8 * (old.itemsize - 1) & 255
    lows = [0, *(last + 1 for last, _, _ in classes)]
    ranges = zip(lows, classes, strict=False)
    return [np.flatnonzero((low <= keys) & (keys <= last)) for low, (last, _, _) in ranges]


def sparse(old: np.ndarray, new: np.ndarray, classes: Sequence[Class]) -> bytes:
    moved, old = signed(whole_groups(new - old, zeros=True)), whole_groups(old, zeros=True)
    found, heads = [], []
    for at, (last, k, m) in zip(members(old, classes), classes, strict=True):
        bits, before = Writer(), -1
        for rank, d in enumerate(moved[at].tolist()):
            u = 2 * d if d >= 0 else -2 * d - 1
            if k == EVERY:
                bits.number(u, m)
            elif d:
                for _ in range(1 if m else abs(d)):
                    bits.number(rank - before, k)
                    before = rank
                    if m:
                        bits.number(u - 1, m)
                    else:
                        bits.put(int(d > 0), 1)
        found.append(bits.content())
        heads.append(CLASS.pack(last, k, m, len(found[-1])))
    head = SPARSE_HEAD.pack(SPARSE, len(classes), np.count_nonzero(moved))
    return b"".join([head, *heads, *found])


def moves(code: bytes, old: np.ndarray) -> np.ndarray:
    """The sum that a sparse form adds to each number."""
    at, left, heads = sparse_head(code)
    old = whole_groups(old, zeros=True)
    found = np.zeros(len(old), np.int64)
    for places, (_, k, m, size) in zip(members(old, classes_of(code)), heads, strict=True):
        bits, rank = Reader(code[at : at + size]), -1
        at += size
        while k != EVERY or rank + 1 < len(places):
            step = 1 if k == EVERY else bits.number(k)
            if step is None:
                break
            rank += step
            if not 0 <= rank < len(places):
                raise ValueError("damaged")
            u = bits.number(m) if m or k == EVERY else bits.take(1)
            if u is None:
                raise ValueError("damaged")
            u += k != EVERY
            left -= bool(u and step)
            found[places[rank]] += -(u + 1 >> 1) if u & 1 else u >> 1
        if bits.bytes_read != size:
            raise ValueError("damaged")
    if left:
        raise ValueError("damaged")
    return found


def signed(differences: np.ndarray) -> np.ndarray:
    return differences.view(f"i{differences.itemsize}").astype(np.int64)


class Writer:
    """Bits of a byte string, the lowest of a byte first."""

    def __init__(self) -> None:
        self._bits: list[str] = []  # each word's, its lowest last

    def put(self, word: int, length: int) -> None:
        self._bits.append(f"{word:0{length}b}" if length else "")

    def number(self, value: int, k: int) -> None:
        quotient = value >> k
        self.put(1 << min(quotient, LONGEST), min(quotient, LONGEST) + 1)
        if quotient < LONGEST:
            self.put(value & ((1 << k) - 1), k)
        else:
            self.put(value, 32)

    def content(self) -> bytes:
        bits = "".join(reversed(self._bits))
        return int(bits or "0", 2).to_bytes(-(-len(bits) // 8), "little")


class Reader:
    """Such bits; behind the end there are zeros."""

    def __init__(self, content: bytes) -> None:
        self._number, self._at = int.from_bytes(content, "little"), 0

    @property
    def bytes_read(self) -> int:
        return (self._at + 7) // 8

    def take(self, count: int) -> int:
        found = self._number >> self._at & ((1 << count) - 1)
        self._at += count
        return found

    def number(self, k: int) -> int | None:
        """None, and nothing is read, where more zeros follow than begin a number."""
        ahead = self._number >> self._at & ((1 << LONGEST + 1) - 1)
        if not ahead:
            return None
        quotient = (ahead & -ahead).bit_length() - 1
        self._at += quotient + 1
        return self.take(32) if quotient == LONGEST else quotient << k | self.take(k)


# ---------------------------------------------------------------- exponents


def window(tops: np.ndarray) -> int:
    """The first exponent of the window that has most of a sample."""
    sample = tops[:: max(1, len(tops) // SAMPLE)] >> 7 & 255
    counts = np.bincount(sample, minlength=KEYS)
    return int(np.argmax([counts[e : e + WINDOW].sum() for e in range(KEYS - WINDOW + 1)]))


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
