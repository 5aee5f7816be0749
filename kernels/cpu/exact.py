"""The fast path of the exact block code: the bytes of ``exact_format``, by compiled loops."""

import threading

import numpy as np

from commpress.errors import Damaged
from commpress.kernels import exact_format as law
from commpress.kernels.cpu.calls import Kernels

loops = Kernels("exact_loops")

_SPARE = 128  # bytes after a code that the loops may overwrite
_STEPS = 512  # moves that are read before they are added, few enough for the nearest cache


class _Scratch(threading.local):
    """Scratch memory of one thread, because a new allocation of this size takes longer than the
    work."""

    def __init__(self) -> None:
        self.table = np.empty((6, law.KEYS), np.int64)
        self.masks = np.empty((law.CLASSES + 1, law.GROUPS), np.int64)
        self.counts = np.empty(law.GROUPS, np.uint16)
        self.steps = np.empty((2, _STEPS), np.int64)
        self.code = np.empty(5 * law.BLOCK + _SPARE, np.uint8)  # any form of any block


_scratch = _Scratch()


def compare(old: np.ndarray, new: np.ndarray) -> int:
    """Return how many numbers have changed; what ``encode`` needs to know is in the scratch."""
    return loops.scan(old, new, _scratch.table, _scratch.masks)


def encode(old: np.ndarray | None, new: np.ndarray, kind: int = law.PLAIN) -> bytes:
    """Return the code of ``new``, from which ``decode`` restores it with the help of ``old``, or by
    itself without ``old``. Blocks are unsigned integers."""
    _check(new)
    found, limit = b"", 1 + new.nbytes  # bytes of the shortest form so far
    if old is not None:
        table, masks = _scratch.table, _scratch.masks
        sides = law.whole_groups(old, zeros=True), law.whole_groups(new, zeros=True)
        if not (count := compare(*sides)):
            return bytes([law.SAME])
        room, classes = _scratch.code[: limit + _SPARE], loops.classify(table)
        size = loops.pack(*sides, table, masks, classes, room)
        head = law.SPARSE_HEAD.pack(law.SPARSE, classes, count)
        head += b"".join(law.CLASS.pack(*each) for each in table[:4, :classes].T.tolist())
        if 0 <= size < limit - len(head):
            found, limit = head + room[:size].tobytes(), len(head) + size
    if kind != law.PLAIN and 5 * limit > 3 * new.nbytes:
        whole = law.whole_groups(new)
        room = _scratch.code[: law.exponent_bytes(len(whole), kind) + len(whole)]
        size = loops.split(whole, _scratch.table, room)
        if 0 < size < limit:
            found = room[:size].tobytes()
    return found or bytes([law.RAW]) + new.tobytes()


def decode(code: bytes | memoryview, target: np.ndarray, kind: int = law.PLAIN) -> None:
    """Turn ``target``, the earlier block, into the new one. Raise ``Damaged`` if the code does not
    fit the block; ``target`` may then be partly written.
    """
    _check(target)
    content = np.frombuffer(code, np.uint8)
    form = int(content[0]) if len(content) else -1
    if form in (law.SPARSE, law.EXPONENTS):
        whole = law.whole_groups(target, zeros=True)
        read = _moved(content, whole) if form == law.SPARSE else _joined(content, whole, kind)
        if read:
            if whole is not target:
                target[:] = whole[: len(target)]
            return
    elif form == law.RAW and len(content) == 1 + target.nbytes:
        target.view(np.uint8)[:] = content[1:]
        return
    elif form == law.SAME and len(content) == 1:
        return
    raise Damaged(
        f"the code of a block of {len(target):,} numbers is damaged: {len(content):,} bytes of "
        f"form {form}"
    )


def _moved(content: np.ndarray, whole: np.ndarray) -> bool:
    try:
        _, count, heads = law.sparse_head(content.data)
    except ValueError:
        return False
    table = _scratch.table
    table[0] = law.KEYS - 1
    table[:4, : len(heads)] = np.transpose(heads)
    rooms = _scratch.masks, len(heads), _scratch.counts, _scratch.steps
    return loops.apply(content, whole, table, *rooms) == count


def _joined(content: np.ndarray, whole: np.ndarray, kind: int) -> bool:
    end = law.exponent_bytes(len(whole), kind)
    fits = kind != law.PLAIN and whole.itemsize == 2 * kind and len(content) >= end
    if not fits or law.EXPONENT_HEAD.unpack_from(content.data)[2] != len(content) - end:
        return False
    return not loops.join(content, whole)


def _check(block: np.ndarray) -> None:
    if block.dtype not in (np.uint8, np.uint16, np.uint32) or not 0 < len(block) <= law.BLOCK:
        raise ValueError(
            f"a block is {len(block)} numbers of {block.dtype}, expected 1 to {law.BLOCK} of "
            "uint8, uint16 or uint32"
        )
