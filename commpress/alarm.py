"""An alarm that sounds where compression seems to harm a run, and the reaction to it.

At regular intervals the ranks sum three indicators, so that all come to the same judgement:
residuals grow relative to the gradient; the direction of what was sent departs from the gradient's;
the loss departs from its trend.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from commpress.codecs import codec_named
from commpress.collectives.allreduce import Outcome
from commpress.collectives.channel import Channel
from commpress.errors import InvalidArgument, check_counts
from commpress.kernels.pieces import NUMEL, RESIDUAL, SOURCE
from commpress.logs import tell_on_first, warn_on_first
from commpress.work import Steps

WARN = "warn"
NONE = "none"  # without compression, by torch's own all-reduce
WINDOW = 16  # the usual value is the median over this many looks without an alarm
FEWEST = 3  # looks before residuals and the cosine are judged
# looks before the loss is judged: the error of a trend through fewer is too large
FEWEST_LOSSES = 8
CALM = 8  # looks without an alarm after which ``pause`` is no longer doubled
LONGEST = 64  # limit of the doubled ``pause``, in looks


class Peers(NamedTuple):
    """Ranks that judge and choose together, with this rank's access to its residuals."""

    channel: Channel
    # adds this rank's residual of a parameter to a tensor
    add_residual: Callable[[str, torch.Tensor], None] | None = None

    def total(self, table: torch.Tensor) -> Steps[torch.Tensor]:
        """Sum a small table over the ranks, in double."""
        every = yield from self.channel.gathered(table.flatten().tolist())
        return torch.from_numpy(every.sum(axis=0)).view(table.shape)


@dataclass
class Alarm:
    """Watch whether compression harms training: ``commpress.compress(ddp, "sign",
    alarm=commpress.Alarm("int8"))``; call ``state.alarm.tell(loss)`` in every step.

    - ``then``: reaction to an alarm. "warn" warns and counts; a codec's name, such as "int8", uses
      that codec for a while; "none" stops compression for a while and sends the residuals with the
      first exact step.
    - ``every``: steps between two looks.
    - ``growth``: sound if residuals, relative to the gradient, exceed this multiple of their usual
      size.
    - ``cosine``: sound if the cosine of the gradient and of what was sent for it is below this
      share of its usual value.
    - ``deviations``: sound if the mean loss since the last look exceeds its trend by this many
      standard deviations.
    - ``pause``: number of looks for which ``then`` lasts; doubled each time the alarm sounds again
      soon after.

    A usual value is the median of the last sixteen looks without an alarm. ``sounded`` counts
    alarms, ``why`` describes the last one.
    """

    then: str = WARN
    every: int = 100
    growth: float = 3.0
    cosine: float = 0.5
    deviations: float = 5.0
    pause: int = 5
    sounded: int = field(default=0, init=False)
    why: str = field(default="", init=False)
    active: str = field(default="", init=False)  # codec in use while the alarm lasts, else ""
    _looks: int = field(default=0, init=False)
    _until: int = field(default=0, init=False)  # look at which the usual codec returns
    _length: int = field(default=0, init=False)  # looks of the next pause
    _calm: int = field(default=0, init=False)  # looks since the end of the last alarm
    _usual: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)
    _sums: list[float] = field(default_factory=lambda: [0.0] * 4, init=False, repr=False)
    _told: list[Any] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        check_counts(every=self.every, pause=self.pause)
        for name in ("every", "pause"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)!r}, expected at least 1")
        for name in ("growth", "cosine", "deviations"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not (isfinite(value) and value > 0)
            ):
                raise InvalidArgument(f"{name} is {value!r}, expected a positive number")
        if self.then not in (WARN, NONE):
            codec_named(self.then)
        self._length = self.pause

    # ------------------------------------------------------------ looking

    def tell(self, loss: torch.Tensor | float) -> None:
        """Record the loss of this rank's step. A GPU's loss is read at the next look, so no step
        waits for it."""
        self._told.append(loss.detach() if isinstance(loss, torch.Tensor) else float(loss))

    def due(self, compressed_steps: int) -> bool:
        """Return whether ranks examine what they send in this step."""
        return compressed_steps >= 0 and compressed_steps % self.every == self.every - 1

    def measure(
        self, gradient: torch.Tensor, compensated: torch.Tensor, outcomes: Sequence[Outcome]
    ) -> None:
        """Add one bucket of this rank: its gradient, the encoder's input, and the proposed
        residuals."""
        for outcome in outcomes:
            if outcome.proposed is None:
                continue
            outcome.proposed.settle(outcome.message.pieces)
            residual = outcome.proposed.floats()
            for line in outcome.message.pieces.table:
                if line[RESIDUAL] < 0:
                    continue
                place = slice(int(line[SOURCE]), int(line[SOURCE] + line[NUMEL]))
                left = residual[line[RESIDUAL] : line[RESIDUAL] + line[NUMEL]]
                own, sent = gradient[place], compensated[place] - left
                pairs = (own, own), (own, sent), (sent, sent), (left, left)
                for i, (a, b) in enumerate(pairs):
                    self._sums[i] += float(torch.dot(a, b))

    def look(self, peers: Peers, step: int) -> Steps[None]:
        """Judge ``step`` by the indicators of all ranks; collective."""
        losses = [value for value in map(float, self._told) if isfinite(value)]
        table = torch.tensor([*self._sums, sum(losses), len(losses)], dtype=torch.float64)
        self._sums, self._told = [0.0] * 4, []
        own, product, sent, left, loss, count = (yield from peers.total(table)).tolist()
        seen = {}
        if own > 0 and sent > 0:
            seen = {"residual": sqrt(left / own), "cosine": product / sqrt(own * sent)}
        if count:
            seen["loss"] = loss / count
        if not seen and not self._looks and not self.active:
            warn_on_first(
                peers.channel.rank,
                "the alarm has nothing to judge: this codec keeps no residuals here, or the step "
                "was not finite, and no loss was told. Call state.alarm.tell(loss) in every step",
            )
        self.judge(step, seen, peers.channel.rank)

    # ------------------------------------------------------------ judging

    def judge(self, step: int, seen: Mapping[str, float], rank: int = 0) -> None:
        """Sound the alarm, end an earlier one, or record usual values. ``rank`` counts among the
        ranks that judge together."""
        self._looks += 1
        if self.active:
            if self._looks >= self._until:
                tell_on_first(
                    rank,
                    "step %d: the alarm is over, the usual codec is back in place of %s",
                    step,
                    self.active,
                )
                self.active, self._calm = "", 0
            return
        harm = self._harm(seen)
        if not harm:
            for name, value in seen.items():
                self._usual[name] = [*self._usual.get(name, []), value][-WINDOW:]
            self._calm += 1
            if self._calm >= CALM:
                self._length = self.pause
            return
        self.sounded += 1
        self.why = f"step {step}: {'; '.join(harm)}"
        if self.then != WARN:
            self.active, self._until = self.then, self._looks + self._length
            self._length = min(2 * self._length, LONGEST)
        if self.then != WARN or self.sounded <= 3 or self.sounded % 100 == 0:
            after = (
                f"goes on with {self.then} until look {self._until}"
                if self.active
                else "try a finer codec, or Alarm('int8')"
            )
            warn_on_first(
                rank, "compression seems to harm (alarm %d), %s; %s", self.sounded, self.why, after
            )

    def _harm(self, seen: Mapping[str, float]) -> list[str]:
        """Describe in words each indicator that is far from its usual value."""
        usual = {
            name: median(values) for name, values in self._usual.items() if len(values) >= FEWEST
        }
        found = []
        if seen.get("residual", 0.0) > self.growth * usual.get("residual", inf):
            found.append(
                f"residuals are {seen['residual']:.3g} times as large as the gradient, usually "
                f"{usual['residual']:.3g}"
            )
        if seen.get("cosine", inf) < self.cosine * max(usual.get("cosine", 0.0), 0.0):
            found.append(
                f"the cosine of sent and true gradient is {seen['cosine']:.3g}, usually "
                f"{usual['cosine']:.3g}"
            )
        losses = self._usual.get("loss", [])
        if "loss" in seen and len(losses) >= FEWEST_LOSSES:
            expected, spread = _next(losses)
            if seen["loss"] > expected + self.deviations * spread:
                found.append(
                    f"the loss is {seen['loss']:.4g}, by its trend {expected:.4g} give or take "
                    f"{spread:.2g}"
                )
        return found

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        usual = {name: list(values) for name, values in self._usual.items()}
        numbers = {
            "looks": self._looks,
            "until": self._until,
            "length": self._length,
            "calm": self._calm,
        }
        return numbers | {
            "sounded": self.sounded,
            "why": self.why,
            "way": self.active,
            "usual": usual,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if way := state["way"]:
            codec_named(way)
        self._looks, self._until, self._length, self._calm = (
            int(state[k]) for k in ("looks", "until", "length", "calm")
        )
        self.sounded, self.why, self.active = int(state["sounded"]), str(state["why"]), way
        self._usual = {
            str(name): [float(value) for value in values] for name, values in state["usual"].items()
        }
        self._sums, self._told = [0.0] * 4, []


def _next(values: Sequence[float]) -> tuple[float, float]:
    """Predict the next value by a straight line, at least the smallest value so far, and the error
    of this prediction, at least a hundredth of it."""
    count, places = len(values), range(len(values))
    middle, mean = fmean(places), fmean(values)
    lever = sum((x - middle) ** 2 for x in places)
    slope = sum((x - middle) * (y - mean) for x, y in zip(places, values, strict=True)) / lever
    around = sum(
        (y - mean - slope * (x - middle)) ** 2 for x, y in zip(places, values, strict=True)
    ) / (count - 2)
    expected = max(mean + slope * (count - middle), min(values))
    return expected, max(
        sqrt(around * (1 + 1 / count + (count - middle) ** 2 / lever)), 0.01 * abs(expected)
    )


def alarm_of(alarm: Alarm | str | None) -> Alarm | None:
    """Return a copy of the caller's alarm, or one for a name: each state has its own, which keeps
    what its ranks have observed."""
    if alarm is None:
        return None
    if isinstance(alarm, str):
        return Alarm(alarm)
    if not isinstance(alarm, Alarm):
        raise InvalidArgument(
            f"alarm is {alarm!r}, expected 'warn', a codec's name or commpress.Alarm(...)"
        )
    return replace(alarm)
