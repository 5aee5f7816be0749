"""Public names of a room, each loaded from its module when it is first asked for."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(room: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """``__getattr__`` of the package ``room``; ``modules`` has the names that each of its modules
    gives."""
    homes = {name: f"{room}.{module}" for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(
                f"module {room!r} has no attribute {name!r}; it offers {', '.join(homes)}"
            )
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[room], name, value)
        return value

    return load


def short_name(name: str, module: str) -> None:
    """Let ``commpress.<name>`` be another name of ``module``, whether it is imported or asked for
    as an attribute."""
    try:
        sys.modules[f"commpress.{name}"] = import_module(module)
    except ModuleNotFoundError as error:
        from commpress.errors import MissingPackage

        if (error.name or "").startswith("commpress"):
            raise
        raise MissingPackage(
            f"commpress.{name} needs {error.name}: pip install 'commpress[{name}]'"
        ) from error
