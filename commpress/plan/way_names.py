"""Ways to average that are no codec, by name: rings of a library and local updates. Loads no
torch."""

from dataclasses import dataclass

from commpress.codecs.registry import codec_named
from commpress.codecs.sparse import SparseCodec
from commpress.errors import InvalidArgument

RINGS = {"plain": 4, "bf16-ring": 2}  # bytes of an element
PREFIX = "local:"
CODECS = ("int4", "bits2", "topk-64+bits2")  # from fine to coarse
EVERY = 30  # steps of a round that a plan considers

# Per cent of held-out loss above synchronous training, the rates of both searched: 1.1 M
# parameters, 4 ranks, 2,000 steps (docs/local_updates.md). Other models and longer runs lose
# less or more; what is not here was not measured.
LOSS = {
    (10, "none"): 1.6, (10, "int4"): 1.3, (10, "bits2"): 1.7, (10, "sign"): 9.0,
    (30, "none"): 2.8, (30, "int4"): 3.4, (30, "bits2"): 3.7, (30, "sign"): 8.8,
    (100, "none"): 10.3, (100, "int4"): 10.8,
}  # fmt: skip


@dataclass(frozen=True)
class LocalWay:
    """Options of ``LocalUpdates`` that decide what it costs. As text: local:CODEC:H:τ, of which H
    and τ may be left out."""

    codec: str
    every: int = EVERY
    overlap: int = 0

    def __post_init__(self) -> None:
        codec_named(self.codec)
        if self.every < 1 or not 0 <= self.overlap <= self.every:
            raise InvalidArgument(
                f"{self} is no way to train: expected every of at least 1 and overlap from 0 to "
                "that"
            )

    @property
    def hidden(self) -> bool:
        """True if an exchange is under way for a whole round, as with every="auto", which then
        finds its length."""
        return self.overlap == self.every

    @property
    def name(self) -> str:
        if self.hidden:
            return f"local {self.codec}, {self.every} steps, hidden"
        return f"local {self.codec}, every {self.every}" + (
            f", overlap {self.overlap}" if self.overlap else ""
        )

    @property
    def call(self) -> str:
        sparse = "outer=SparseLoCo(), " if self.sparse else ""
        if self.hidden:
            codec = "" if self.codec == CODECS[0] else f', {sparse}codec="{self.codec}"'
            return f"LocalUpdates(inner{codec})"
        late = f", overlap={self.overlap}" if self.overlap else ""
        return f'LocalUpdates(inner, every={self.every}, {sparse}codec="{self.codec}"{late})'

    @property
    def sparse(self) -> bool:
        return isinstance(codec_named(self.codec), SparseCodec)

    @property
    def effect(self) -> str:
        gap = None if self.overlap else LOSS.get((self.every, self.codec))
        return "another loss" + (
            ", not measured" if gap is None else f": {gap:+.1f} % in a small GPT"
        )


def local_way(text: str) -> LocalWay:
    codec, *numbers = text.removeprefix(PREFIX).split(":")
    if not codec or len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise InvalidArgument(
            f"way is {text!r}, expected local:CODEC, local:CODEC:H or local:CODEC:H:N, as "
            "local:int4:30:5"
        )
    return LocalWay(codec, *map(int, numbers))
