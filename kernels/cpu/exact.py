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
        self.code = np.empty(0, np.uint8)

    def room(self, size: int) -> np.ndarray:
        if len(self.code) < size:
            self.code = np.empty(size, np.uint8)
        return self.code[:size]


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
        room, classes = _scratch.room(limit + _SPARE), loops.classify(table)
        size = loops.pack(*sides, table, masks, classes, room)
        head = law.SPARSE_HEAD.pack(law.SPARSE, classes, count)
        head += b"".join(law.CLASS.pack(*each) for each in table[:4, :classes].T.tolist())
        if 0 <= size < limit - len(head):
            found, limit = head + room[:size].tobytes(), len(head) + size
    if kind != law.PLAIN and 5 * limit > 3 * new.nbytes:
        whole = law.whole_groups(new)
        room = _scratch.room(law.exponent_bytes(len(whole), kind) + len(whole))
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
    if form == law.SPARSE:
        if _moved(content, target):
            return
    elif form == law.EXPONENTS and kind != law.PLAIN and target.itemsize == 2 * kind:
        if _joined(content, target, kind):
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


def _moved(content: np.ndarray, target: np.ndarray) -> bool:
    try:
        _, count, heads = law.sparse_head(content.data)
    except ValueError:
        return False
    table, whole = _scratch.table, law.whole_groups(target, zeros=True)
    table[0] = law.KEYS - 1
    table[:4, : len(heads)] = np.transpose(heads)
    rooms = _scratch.counts, _scratch.steps
    moved = loops.apply(content, whole, table, _scratch.masks, len(heads), *rooms)
    if whole is not target:
        target[:] = whole[: len(target)]
    return moved == count


def _joined(content: np.ndarray, target: np.ndarray, kind: int) -> bool:
    end = law.exponent_bytes(len(target), kind)
    if len(content) < end or law.EXPONENT_HEAD.unpack_from(content.data)[2] != len(content) - end:
        return False
    odd = -len(target) % law.GROUP
    whole = np.empty(len(target) + odd, target.dtype) if odd else target
    if loops.join(content, whole):
        return False
    if odd:
        target[:] = whole[: len(target)]
    return True


def _check(block: np.ndarray) -> None:
    if block.dtype not in (np.uint8, np.uint16, np.uint32) or not 0 < len(block) <= law.BLOCK:
        raise ValueError(
            f"a block is {len(block)} numbers of {block.dtype}, expected 1 to {law.BLOCK} of "
            "uint8, uint16 or uint32"
        )
