"""Files that forked children must not keep: while a child has a connection open, nobody notices that its parent has died.

Programs that a process starts do not get them: Python marks every file that it opens so.
"""

import os
import weakref
from functools import cache
from typing import Protocol


class Owner(Protocol):
    """An object with open files."""

    def forked(self) -> None:
        """Close them, in the child. Locks may be held by threads that are not there."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_in_children(owner: Owner) -> None:
    _register()
    _owners.add(owner)


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_close)


def _close() -> None:
    for owner in list(_owners):
        owner.forked()
