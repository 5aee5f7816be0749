"""Public names of a package, each loaded from its module when it is first used."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(room: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for the package ``room``; ``modules`` maps each of its modules to
    the names it provides."""
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
    """Make ``commpress.<name>`` another name of ``module``, for imports and as an attribute."""
    try:
        sys.modules[f"commpress.{name}"] = import_module(module)
    except ModuleNotFoundError as error:
        from commpress.errors import MissingPackage

        if (error.name or "").startswith("commpress"):
            raise
        raise MissingPackage(
            f"commpress.{name} needs {error.name}: pip install 'commpress[{name}]'"
        ) from error
