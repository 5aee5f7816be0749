"""Kernels: the functions of this folder that are called from outside it, with the kinds of their
arguments."""

from collections import defaultdict
from collections.abc import Callable
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

from commpress.kernels.cpu.kinds import Kind


class Declared(NamedTuple):
    """A kernel as its file declares it; it is compiled for each of the ``variants``."""

    function: Any  # Numba's dispatcher
    variants: list[tuple[Kind, ...]]


# by family, which is the name of a file
KERNELS: dict[str, dict[str, Declared]] = defaultdict(dict)


def kernel(**kinds: Kind | tuple[Kind, ...]) -> Callable[[Any], Any]:
    """Declare what the arguments are; where there are several kinds, each of them. May be said more
    than once."""

    def declare(function: Any) -> Any:
        names, name = list(signature(function.py_func).parameters), function.py_func.__name__
        if names != list(kinds):
            raise TypeError(
                f"{name} takes {', '.join(names)}, but kinds are given for {', '.join(kinds)}"
            )
        family = KERNELS[function.py_func.__module__.rpartition(".")[2]]
        each = [(kind,) if isinstance(kind, Kind) else kind for kind in kinds.values()]
        family.setdefault(name, Declared(function, [])).variants.extend(product(*each))
        return function

    return declare
