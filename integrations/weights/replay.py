"""Blocks rebuilt from the codes of versions, each checked by its hash."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from commpress.checksum import checksum_of
from commpress.errors import Damaged
from commpress.integrations.weights.places import AT_ONCE, CHUNK, ReadablePlace
from commpress.integrations.weights.weight_layout import host_zeros
from commpress.integrations.weights.weight_records import PayloadFile, VersionRecord
from commpress.kernels.cpu.exact import decode


@dataclass(eq=False)
class ReadAhead:
    """A file, read more or less in order: the chunks after one that was asked for are under way."""

    _place: ReadablePlace
    _file: PayloadFile
    _ahead: int = AT_ONCE

    def __post_init__(self) -> None:
        self._ends = [0, *np.cumsum(self._file.sizes).tolist()]
        self._coming = dict[int, Future[bytes]]()
        self.read(0, 0)

    def __iter__(self) -> Iterator[bytes]:
        for first in range(0, self._ends[-1], CHUNK):
            yield self.read(first, min(first + CHUNK, self._ends[-1]))

    def code(self, block: int) -> bytes:
        """The code of a block."""
        return self.read(self._ends[block], self._ends[block + 1])

    def read(self, first: int, end: int) -> bytes:
        """Its bytes from ``first`` to ``end``; Damaged if it does not have them."""
        name, begin, start = self._file.name, self._place.begin, first // CHUNK * CHUNK
        ahead = range(start, min(end + self._ahead * CHUNK, self._ends[-1]), CHUNK)
        self._coming = {at: self._coming.get(at) or begin(name, at, CHUNK) for at in ahead}
        try:
            content = b"".join(self._coming[at].result() for at in range(start, end, CHUNK))
        except FileNotFoundError as error:
            raise Damaged(f"{name} is not there", file=name) from error
        found = content[first - start : end - start]
        if len(found) < end - first:
            raise Damaged(f"{name} ends before byte {end:,}", file=name)
        return found


def hash_of(content: np.ndarray, part: int, block: int) -> int:
    """The hash of a block, which in another's place is no match."""
    return checksum_of(content.data.cast("B"), part << 36 | block)


class Rebuilder:
    """Blocks of the last of some versions that follow each other in one layout.

    ``anchored``: the first of them stands for itself; without, blocks begin as those of the version
    before.
    """

    def __init__(
        self, place: ReadablePlace, versions: Sequence[VersionRecord], *, anchored: bool
    ) -> None:
        self.layout = layout = versions[-1].layout
        self.blocks = [layout.blocks(part) for part in range(len(layout.parts))]
        self._recent: dict[int, tuple[int, torch.Tensor]] = {}
        share = max(1, AT_ONCE // (len(versions) * max(len(layout.parts), 1)))
        files = [record.differences for record in versions]
        files[0] = versions[0].anchors if anchored else files[0]
        ahead = [[ReadAhead(place, file, share) for file in each] for each in files]
        self._steps = list(zip(versions, ahead, strict=True))

    def into(self, part: int, block: int, target: torch.Tensor) -> None:
        """``target``, the block before if there is no anchor, becomes that of the last version.

        Damaged if that is not what was published.
        """
        numbers = self.layout.numbers(self.blocks[part][block][0])
        content = numbers.patterns(target)
        for record, files in self._steps:
            decode(files[part].code(block), content, numbers.kind)
            if hash_of(content, part, block) != int(record.hashes[part][block]):
                raise Damaged(
                    f"block {block} of part {part} of version {record.version} is not what was "
                    "published: bytes changed on the way, or it was made from other weights"
                )

    def rebuilt(self, part: int, block: int) -> torch.Tensor:
        """One that begins with an anchor. The last one of each part is still there."""
        if part not in self._recent or self._recent[part][0] != block:
            pieces = self.blocks[part][block]
            numel = sum(piece.numel for piece in pieces)
            content = host_zeros([numel], self.layout.numbers(pieces[0]).dtype)
            self.into(part, block, content)
            self._recent[part] = block, content
        return self._recent[part][1]
