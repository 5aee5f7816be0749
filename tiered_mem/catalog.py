"""What a store holds: blocks by number, tensors by name, and the one lock that guards them."""

import threading
from collections.abc import Iterable

from commpress.errors import InvalidArgument
from commpress.tiered_mem.blocks import Block
from commpress.tiered_mem.manifest import Extent
from commpress.tiered_mem.pending import caller


class Catalog:
    """``changed`` is the store's lock, and the condition on which everybody waits and that every change notifies. It is
    held whenever a method here is called, and never while bytes move."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.Lock())
        self.blocks: dict[int, Block] = {}
        self.names: dict[str, Block] = {}
        self.cutting = False  # a commit waits until nobody writes
        self._next = 1

    def new_block(self) -> Block:
        block = self.blocks[self._next] = Block(self._next)
        self._next += 1
        return block

    def block(self, name: str) -> Block:
        try:
            return self.names[name]
        except (KeyError, TypeError):
            raise InvalidArgument(f"no tensor {name!r:.200} in the store; it holds {len(self.names)}") from None

    def blocks_of(self, names: str | Iterable[str]) -> list[Block]:
        """The blocks of these tensors, each once."""
        return list(dict.fromkeys(self.block(name) for name in ([names] if isinstance(names, str) else names)))

    def extents(self) -> set[Extent]:
        """Where the current state lies on disk."""
        return {chunk.extent for block in self.blocks.values() for chunk in block.chunks}

    def barred(self, who: object) -> bool:
        """While a commit waits for writers to finish, only those who write already may write more."""
        return self.cutting and not any(
            use.writer == who for block in self.blocks.values() for use in block.uses.values()
        )

    def admit_writer(self) -> None:
        while self.barred(caller()):
            self.changed.wait()
