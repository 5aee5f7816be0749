"""Public names of a room, each loaded from its module when it is first asked for."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(room: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """``__getattr__`` of the package ``room``; ``modules`` has the names that each of its modules gives."""
    homes = {name: f"{room}.{module}" for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {room!r} has no attribute {name!r}; it offers {', '.join(homes)}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[room], name, value)
        return value

    return load
