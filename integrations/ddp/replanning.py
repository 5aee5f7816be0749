"""A codec for every layer, chosen anew every so many steps from the gradients of that moment
(``plan.choice``).

In a step that is due, every rank measures what each option loses of its own gradients, before they
are reduced. Between that step and the next the ranks add up their errors, once, and each solves the
same problem: so all come to the same codecs. Layers that travel exactly stay as they are. Gradients
that are not finite change nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from commpress.codecs import Codec, Policy, codec_named
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.collectives.buckets import Span
from commpress.errors import InvalidArgument
from commpress.plan.choice import OPTIONS, assign_by, errors_of


@dataclass(frozen=True)
class Ruled:
    """A policy: codecs by name, ``base`` for all other parameters."""

    base: Policy
    rules: dict[str, str]

    def choose(self, name: str, numel: int) -> Codec:
        return (
            codec_named(self.rules[name]) if name in self.rules else self.base.choose(name, numel)
        )


@dataclass
class Replanning:
    """``uniform`` is the codec whose error, were it every layer's, bounds the choice."""

    every: int
    uniform: str
    base: Policy  # which layers travel exactly
    ranks: int
    rules: dict[str, str] = field(default_factory=dict)  # name → codec, of the last choice
    why: str = ""
    _errors: dict[str, list[float]] = field(default_factory=dict)
    _numels: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.uniform, str) or self.every < 1:
            raise InvalidArgument(
                f"replan_every is {self.every} with codec {self.uniform!r}, expected a number "
                "from 1 and a name such as 'int4'"
            )
        if isinstance(codec_named(self.uniform), WholeTensorCodec):
            raise InvalidArgument(
                f"replan_every is {self.every} with codec {self.uniform!r}, which compresses whole "
                "tensors, and errors of codecs of rows are compared: choose one of these, such as "
                "'int4', or leave replan_every out"
            )
        self.options = tuple(dict.fromkeys([*OPTIONS, self.uniform]))

    def due(self, compressed_steps: int) -> bool:
        return compressed_steps >= 0 and compressed_steps % self.every == 0

    @property
    def measured(self) -> bool:
        return bool(self._errors)

    def measure(self, spans: Sequence[Span], buffer: torch.Tensor) -> None:
        """Of the layers in a bucket that nobody has reduced yet."""
        for span in spans:
            if not self.base.choose(span.name, span.numel).lossless:
                self._errors[span.name] = errors_of(
                    buffer[span.source : span.source + span.numel], self.options
                )
                self._numels[span.name] = span.numel

    def decide(self, group: dist.ProcessGroup, device: torch.device, step: int) -> Policy:
        """Collective over ``group``."""
        names = sorted(self._errors)
        table = torch.tensor(
            [self._errors[name] for name in names], dtype=torch.float64, device=device
        )
        dist.all_reduce(table, group=group)
        self._errors.clear()
        if torch.isfinite(table).all():
            rows = dict(zip(names, table.tolist(), strict=True))
            found = assign_by(
                rows, self._numels, self.options, ranks=self.ranks, uniform=self.uniform
            )
            self.rules |= found.rules
            self.why = (
                f"of step {step}: {found.gain:.2f} times fewer bytes than {self.uniform} for every "
                "layer, at its error"
            )
        return self.policy()

    def policy(self) -> Policy:
        return Ruled(self.base, dict(self.rules)) if self.rules else self.base

    def load(self, rules: Mapping[str, str]) -> Policy:
        for codec in rules.values():
            codec_named(codec)
        self.rules = dict(rules)
        self._errors.clear()
        return self.policy()
