"""Words of a plan: rings of a library, a grid of parallelism, codecs of its dimensions. Loads no
torch."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from commpress.codecs.registry import codec_named
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.errors import InvalidArgument

RINGS = {"plain": 4, "bf16-ring": 2}  # ways to average that are no codec → bytes of an element
AXES = ("pp", "dp", "ep", "sp", "tp")  # from the outermost: neighbours share tensors


class Grid(NamedTuple):
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        return int(np.prod(self))

    def __str__(self) -> str:
        return " ".join(f"{name}{n}" for name, n in zip(AXES, self, strict=True) if n > 1) or "dp1"

    def groups(self, order: np.ndarray, *axes: str) -> np.ndarray:
        """[groups, members]: ranks that differ in these axes alone."""
        at = [AXES.index(axis) for axis in axes]
        places = np.moveaxis(order.reshape(self), at, range(-len(at), 0))
        return places.reshape(-1, int(np.prod([self[i] for i in at])))


@dataclass(frozen=True)
class MeshDims:
    """Codecs of a mesh's dimensions, as ``compress(dims=)`` has them."""

    dp: str = "none"
    pp: str = "none"
    # of tokens on their way to experts and back, as ``parallelise(codec=)`` has it
    ep: str = "none"

    def __post_init__(self) -> None:
        for name in (self.dp, self.pp, self.ep):
            if isinstance(codec_named(name), WholeTensorCodec):
                raise InvalidArgument(
                    f"codec {name!r} takes whole tensors: expected one of rows on a mesh, such as "
                    "int8"
                )


def dims_of(text: str) -> dict[str, str]:
    """The names of codecs that 'dp=int4,ep=int8' gives to dimensions; ``MeshDims`` looks them
    up."""
    found = {}
    for part in text.split(",") if text else ():
        name, equals, codec = part.strip().partition("=")
        if name not in ("dp", "pp", "ep") or not equals:
            raise InvalidArgument(
                f"dims are {text!r}, expected codecs of dp, pp and ep, such as "
                "dp=int4,pp=int8,ep=int8"
            )
        found[name] = codec
    return found


def speeds_of(text: str | None, size: int) -> list[float] | None:
    if not text:
        return None
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != size or min(found) <= 0:
        raise InvalidArgument(
            f"--speeds is {text!r}, expected {size} positive numbers, one for each rank"
        )
    return found
