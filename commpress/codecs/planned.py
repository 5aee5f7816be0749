"""A plan in a file: the codec of each parameter, or that nothing should be compressed.

JSON of at most 4 MiB, written by ``commpress plan`` and read by the hook, the backend and the
trainers:

    {"format": "commpress plan", "version": 1, "codec": "int8", "min_numel": 256, "topology": null,
     "bucket_mb": 25.0, "rules": {"head.weight": "bits6"},
     "why": "int8 takes 210 ms a step, plain 480 ms"}

``codec`` applies to every parameter without a rule; "plain" means: do not compress. Nothing in a
file is ever evaluated: codecs are names that ``codec_named`` knows.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from commpress.codecs.codec import Codec
from commpress.codecs.family import EXACT
from commpress.codecs.registry import codec_named
from commpress.documents import Document
from commpress.errors import InvalidArgument

FILE = Document("commpress plan", 1, 1 << 22, "commpress plan")
PLAIN = "plain"
_TYPES: dict[str, tuple[type, ...]] = {
    "codec": (str,),
    "min_numel": (int,),
    "topology": (str, type(None)),
    "bucket_mb": (int, float),
    "rules": (dict,),
    "why": (str,),
}


@dataclass(frozen=True)
class Planned:
    """The policy of a plan; parameters are known by their exact names."""

    codec: str
    rules: Mapping[str, str] = field(default_factory=dict)
    min_numel: int = 256
    topology: str | None = None  # ranks of each node, if two levels are faster
    bucket_mb: float = 25.0  # DDP's bucket size that the plan assumed
    why: str = ""

    def __post_init__(self) -> None:
        for name in {self.codec, *self.rules.values()} - {PLAIN}:
            codec_named(name)
        if self.codec == PLAIN and self.rules:
            raise InvalidArgument(
                "the codec of a plan is 'plain', but it has rules: send single parameters exactly "
                "by 'none'"
            )
        if PLAIN in self.rules.values():
            raise InvalidArgument(
                "a rule of a plan is 'plain', expected a codec: 'none' sends a parameter exactly"
            )
        if self.min_numel < 0 or not self.bucket_mb > 0:
            raise InvalidArgument(
                f"a plan has min_numel {self.min_numel} and bucket_mb {self.bucket_mb}, expected "
                "positive numbers"
            )

    @property
    def compresses(self) -> bool:
        return self.codec != PLAIN

    def choose(self, name: str, numel: int) -> Codec:
        if not self.compresses or numel < self.min_numel:
            return EXACT
        return codec_named(self.rules.get(name, self.codec))

    def save(self, path: str | Path) -> None:
        FILE.write(path, asdict(self))


def load_plan(path: str | Path) -> Planned:
    """Read a file of ``Planned.save``; raise ``InvalidArgument`` for any other."""
    values = FILE.read(path)
    for key, value in values.items():
        if key not in _TYPES or not isinstance(value, _TYPES[key]) or isinstance(value, bool):
            raise InvalidArgument(
                f"{path} has {key} {value!r}, which is no entry of a plan: make it again with "
                "commpress plan"
            )
    rules = values.get("rules", {})
    if "codec" not in values or not all(isinstance(codec, str) for codec in rules.values()):
        raise InvalidArgument(
            f"{path} has no codec, or a rule without a codec's name: make it again with "
            "commpress plan"
        )
    return Planned(**values)
