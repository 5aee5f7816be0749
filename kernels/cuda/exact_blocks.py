"""The exact block code for weights on a device: sparse forms and hashes of many blocks per launch,
with the bytes of ``cpu.exact``.

Blocks that changed too much for that form are copied to the host and coded there.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from commpress.errors import Damaged
from commpress.kernels.cuda.modules import EXACT
from commpress.kernels.cuda.row_codec import THREADS, Launch, address, execute
from commpress.kernels.exact_format import SAME

SHORTEST = 1025  # fewest bytes for ``hashes``: xxh3 hashes shorter blocks differently
_SECRET = bytes.fromhex(  # of xxh3
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def encode(old: Sequence[torch.Tensor], new: Sequence[torch.Tensor]) -> list[bytes | None]:
    """Return the codes of blocks of integers; None for a block with a sparse form of more than 3/5
    of its size."""
    device, itemsize = new[0].device, new[0].itemsize
    most = max(block.numel() for block in new) * itemsize * 3 // 5
    room = 8 * (-(-most // 8) + 1)
    codes = torch.zeros(len(new), room, dtype=torch.uint8, device=device)
    sizes = torch.empty(len(new), dtype=torch.int64, device=device)
    rows = [codes.data_ptr() + room * i for i in range(len(new))]
    args = np.int32(itemsize), np.int64(most), address(sizes)
    _launch("encode_blocks", THREADS, old, new, rows, [0] * len(new), *args)
    lengths, found = sizes.tolist(), list[bytes | None]()
    kept = torch.cat([row[: max(n, 0)] for row, n in zip(codes, lengths, strict=True)]).cpu()
    for block, length, code in zip(new, lengths, kept.split([*map(_kept, lengths)]), strict=True):
        short = 0 <= 5 * length <= 3 * block.nbytes
        found.append((code.numpy().tobytes() or bytes([SAME])) if short else None)
    return found


def _kept(length: int) -> int:
    return max(length, 0)


def decode(codes: Sequence[bytes], targets: Sequence[torch.Tensor]) -> None:
    """Add the differences of sparse forms to blocks. Raise ``Damaged`` if a code does not fit its
    block, which is then unchanged; the others are decoded."""
    device, lengths = targets[0].device, [len(code) for code in codes]
    content = torch.frombuffer(bytearray(b"".join(codes)), dtype=torch.uint8).to(device)
    ends = np.cumsum(lengths)
    rows = [content.data_ptr() + int(end) - n for end, n in zip(ends, lengths, strict=True)]
    bad = torch.zeros(len(codes), dtype=torch.int32, device=device)
    args = np.int32(targets[0].itemsize), address(bad)
    _launch("decode_blocks", 32, targets, targets, rows, lengths, *args)
    if bad.any():
        raise Damaged(f"the code of block {int(bad.argmax())} of {len(codes)} is damaged")


def hashes(blocks: Sequence[torch.Tensor], seeds: Sequence[int]) -> list[int]:
    """Return ``checksum_of`` each block, of at least ``SHORTEST`` bytes at a multiple of 8."""
    device, itemsize = blocks[0].device, blocks[0].itemsize
    found = torch.empty(len(blocks), dtype=torch.int64, device=device)
    args = np.int32(itemsize), address(_secret(device)), address(found)
    _launch("hash_blocks", THREADS, blocks, blocks, [0] * len(blocks), seeds, *args)
    return [value & (1 << 64) - 1 for value in found.tolist()]


@lru_cache(16)
def _secret(device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(_SECRET), dtype=torch.int64).to(device)


def _launch(
    kernel: str,
    threads: int,
    old: Sequence[torch.Tensor],
    new: Sequence[torch.Tensor],
    codes: Sequence[int],
    words: Sequence[int],
    *args: np.generic,
) -> None:
    """Launch a kernel with one thread block for each block; ``table`` is described in exact.cu."""
    lines = zip(old, new, codes, words, strict=True)
    table = [(a.data_ptr(), b.data_ptr(), b.numel(), code, word) for a, b, code, word in lines]
    device = new[0].device
    on_device = torch.from_numpy(np.array(table, np.uint64).view(np.int64)).to(device)
    execute(Launch(kernel, EXACT, len(table), threads, (address(on_device), *args), device))
