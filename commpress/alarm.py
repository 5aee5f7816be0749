"""An alarm that compression harms a run, and what follows when it sounds.

Every so many steps all ranks look at three signs, which they add up over the ranks, so that all
judge alike: what compression has left behind grows, relative to the gradient; what was sent points
elsewhere than the gradient; the loss leaves its trend.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from commpress.codecs import codec_named
from commpress.collectives.allreduce import Outcome
from commpress.errors import InvalidArgument, check_counts
from commpress.kernels.pieces import NUMEL, RESIDUAL, SOURCE
from commpress.logs import tell_on_first, warn_on_first

WARN = "warn"
NONE = "none"  # no compression: torch's own all-reduce
WINDOW = 16  # looks without an alarm that make up what is usual
FEWEST = 3  # of these, before residuals and the cosine are judged
# of these, before the loss is judged: a trend of fewer has errors that are not small beside it
FEWEST_LOSSES = 8
CALM = 8  # looks without an alarm, after which the next pause is short again
LONGEST = 64  # looks that another codec lasts at most


class Peers(NamedTuple):
    """Ranks that look and choose together, and what this one still owes them."""

    rank: int
    size: int
    total: Callable[[torch.Tensor], torch.Tensor]  # sum of a table over the ranks; collective
    # adds this rank's residual of a parameter to a tensor
    owed: Callable[[str, torch.Tensor], None] | None = None
    in_levels: bool = False  # ranks of a node add up exactly


@dataclass
class Alarm:
    """``commpress.compress(ddp, "sign", alarm=commpress.Alarm("int8"))``; tell it the loss by
    ``state.alarm.tell(loss)``.

    - ``then``: "warn" warns and counts; a codec's name, such as "int8", goes on with that codec for
      a while; "none" without compression, and what compression owes goes with the first such step.
    - ``every``: steps between two looks.
    - ``growth``: it sounds where residuals are more than so many times as large as usual, relative
      to the gradient.
    - ``cosine``: it sounds where the cosine of the gradient and what was sent for it is below this
      share of the usual one.
    - ``deviations``: it sounds where the mean loss since the last look is so many standard
      deviations above its trend.
    - ``pause``: looks for which ``then`` lasts; twice as many each time the alarm sounds again soon
      after.

    Usual is the median of the last sixteen looks without an alarm. ``sounded`` counts alarms,
    ``why`` tells of the last one.
    """

    then: str = WARN
    every: int = 100
    growth: float = 3.0
    cosine: float = 0.5
    deviations: float = 5.0
    pause: int = 5
    sounded: int = field(default=0, init=False)
    why: str = field(default="", init=False)
    way: str = field(default="", init=False)  # the codec while the alarm lasts, or empty
    _looks: int = field(default=0, init=False)
    _until: int = field(default=0, init=False)  # the look at which the usual codec comes back
    _length: int = field(default=0, init=False)  # of the next pause
    _calm: int = field(default=0, init=False)  # looks since the last alarm was over
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

    # ------------------------------------------------------------ what is seen

    def tell(self, loss: torch.Tensor | float) -> None:
        """The loss of this rank's step: no rank waits for it before the next look."""
        self._told.append(loss.detach() if isinstance(loss, torch.Tensor) else float(loss))

    def due(self, compressed_steps: int) -> bool:
        """True if ranks look at what they sent in this step."""
        return compressed_steps >= 0 and compressed_steps % self.every == self.every - 1

    def measure(
        self, gradient: torch.Tensor, compensated: torch.Tensor, outcomes: Sequence[Outcome]
    ) -> None:
        """One bucket of this rank: its gradient, what the encoder saw, and what it proposes to
        keep."""
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

    def look(self, peers: Peers, step: int) -> None:
        """Judge ``step`` from what all ranks saw; collective."""
        losses = [value for value in map(float, self._told) if isfinite(value)]
        table = torch.tensor([*self._sums, sum(losses), len(losses)], dtype=torch.float64)
        self._sums, self._told = [0.0] * 4, []
        own, product, sent, left, loss, count = peers.total(table).tolist()
        seen = {}
        if own > 0 and sent > 0:
            seen = {"residual": sqrt(left / own), "cosine": product / sqrt(own * sent)}
        if count:
            seen["loss"] = loss / count
        if not seen and not self._looks and not self.way:
            warn_on_first(
                peers.rank,
                "the alarm sees nothing: this codec keeps no residuals here, or the step was not "
                "finite, and nobody told it a loss. Call state.alarm.tell(loss) in every step",
            )
        self.judge(step, seen, peers.rank)

    # ------------------------------------------------------------ what follows

    def judge(self, step: int, seen: Mapping[str, float], rank: int = 0) -> None:
        """Sound, go on as usual, or end what an earlier alarm began. ``rank``: of those that judge
        alike."""
        self._looks += 1
        if self.way:
            if self._looks >= self._until:
                tell_on_first(
                    rank,
                    "step %d: the alarm is over, the usual codec is back in place of %s",
                    step,
                    self.way,
                )
                self.way, self._calm = "", 0
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
            self.way, self._until = self.then, self._looks + self._length
            self._length = min(2 * self._length, LONGEST)
        if self.then != WARN or self.sounded <= 3 or self.sounded % 100 == 0:
            after = (
                f"goes on with {self.then} until look {self._until}"
                if self.way
                else "try a finer codec, or Alarm('int8')"
            )
            warn_on_first(
                rank, "compression seems to harm (alarm %d), %s; %s", self.sounded, self.why, after
            )

    def _harm(self, seen: Mapping[str, float]) -> list[str]:
        """In words, what is not as usual."""
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
        return numbers | {"sounded": self.sounded, "why": self.why, "way": self.way, "usual": usual}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if way := state["way"]:
            codec_named(way)
        self._looks, self._until, self._length, self._calm = (
            int(state[k]) for k in ("looks", "until", "length", "calm")
        )
        self.sounded, self.why, self.way = int(state["sounded"]), str(state["why"]), way
        self._usual = {
            str(name): [float(value) for value in values] for name, values in state["usual"].items()
        }
        self._sums, self._told = [0.0] * 4, []


def _next(values: Sequence[float]) -> tuple[float, float]:
    """Prediction of the next value by a straight line, not below all that were, and its error: a
    hundredth at least."""
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
    """One of the caller's own: a state keeps what its ranks saw."""
    if alarm is None:
        return None
    if isinstance(alarm, str):
        return Alarm(alarm)
    if not isinstance(alarm, Alarm):
        raise InvalidArgument(
            f"alarm is {alarm!r}, expected 'warn', a codec's name or commpress.Alarm(...)"
        )
    return replace(alarm)
