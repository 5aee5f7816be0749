"""``codec="auto"``: every way for a few steps in turn, then the fastest that sends gradients in
time.

Which way a step goes is a pure function of its number, so ranks need not ask each other. At the end
the ranks exchange what their steps took, once: a step counts as its slowest rank, all ranks see the
same seconds and so decide alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist

from commpress.codecs import codec_named
from commpress.codecs.planned import PLAIN
from commpress.errors import InvalidArgument
from commpress.integrations.ddp.lateness import LATE

AUTO = "auto"
# from the most exact to the coarsest; what may change a loss is tried only if asked for
WAYS = (PLAIN, "int8", "int4")
# tried as well where ranks reduce in one level, and kept if it sends gradients in time
LOW_RANK = "powersgd-4"
UNTIMED = 3  # first steps: DDP rebuilds its buckets, memory is touched, kernels are compiled
MARGIN = 0.03  # of its seconds that a coarser way must save over a finer one to be worth it


@dataclass
class Trial:
    """``rounds`` rounds of ``consecutive`` steps of each way, of which the first does not count."""

    ways: tuple[str, ...] = WAYS
    # of these, ways that nobody asked for, which must send gradients in time
    judged: tuple[str, ...] = ()
    consecutive: int = 3
    rounds: int = 4
    _step: int = 0  # of the trial, not of the run: a resumed run tries again
    _began: float = -1.0
    _took: dict[int, float] = field(default_factory=dict)  # step → seconds until the next one began
    _late: dict[str, float] = field(default_factory=dict)  # way → its lateness
    instead: str = ""  # the best of the other ways, where one that is judged was chosen

    @property
    def steps(self) -> int:
        return UNTIMED + self.consecutive * self.rounds * len(self.ways)

    def way(self, step: int) -> str:
        """Of a step of the trial."""
        return self.ways[max(step - UNTIMED, 0) // self.consecutive % len(self.ways)]

    def begin(self, now: float) -> str | None:
        """The next step begins; its way, or None if the trial is over."""
        step = self._step
        if step > 0:
            self._took[step - 1] = now - self._began
        self._step, self._began = step + 1, now
        return self.way(step) if step < self.steps else None

    @property
    def looks(self) -> bool:
        """True if the step that has begun is the last of a way that is judged."""
        step = self._step - 1
        last = UNTIMED + self.consecutive * (self.rounds - 1) * len(self.ways)
        return (
            step >= last
            and (step - last) % self.consecutive == self.consecutive - 1
            and self.way(step) in self.judged
        )

    def see(self, lateness: float) -> None:
        """Take in the lateness of the last step."""
        self._late[self.way(self._step - 1)] = lateness

    def seconds(self) -> list[float]:
        """Of every step that counts, in order: what the ranks exchange."""
        return [self._took[step] for step in self._counting()]

    def _counting(self) -> list[int]:
        return [step for step in range(UNTIMED, self.steps) if (step - UNTIMED) % self.consecutive]

    def agreed(self, group: dist.ProcessGroup, device: torch.device) -> tuple[str, str]:
        """``decide``, with the slowest rank's seconds of every step; collective over ``group``."""
        seconds = torch.tensor(self.seconds(), dtype=torch.float32, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        return self.decide(seconds.tolist())

    def decide(self, slowest: list[float]) -> tuple[str, str]:
        """The way to go on with, and why. ``slowest``: of each step that counts, the slowest rank's
        seconds."""
        of: dict[str, list[float]] = {way: [] for way in self.ways}
        for step, seconds in zip(self._counting(), slowest, strict=True):
            of[self.way(step)].append(seconds)
        medians = {way: median(took) for way, took in of.items()}
        able = [way for way in self.ways if self._late.get(way, 0.0) <= LATE]
        chosen = _best(medians, able)
        self.instead = (
            _best(medians, [way for way in able if way not in self.judged])
            if chosen in self.judged
            else ""
        )
        measured = ", ".join(f"{way} {1e3 * seconds:.4g} ms" for way, seconds in medians.items())
        kept = [
            f"{way} keeps back {late:.2g} gradients (at most {LATE:g})"
            for way, late in self._late.items()
        ]
        return chosen, "; ".join([f"{chosen}, because a step took {measured}", *kept])


def _best(medians: dict[str, float], able: Sequence[str]) -> str:
    """The fastest, or a finer way that takes hardly longer."""
    best = min(medians[way] for way in able)
    return next(way for way in able if medians[way] * (1 - MARGIN) <= best)


def with_low_rank(trial: Trial, codec: object) -> Trial:
    """The same with ``LOW_RANK``, unless ``codec`` names all ways or somebody has asked for it."""
    if codec != AUTO or LOW_RANK in trial.ways:
        return trial
    at = len(WAYS)
    return Trial((*trial.ways[:at], LOW_RANK, *trial.ways[at:]), (LOW_RANK,))


def trial_of(codec: object, allow: str | Sequence[str] | None = None) -> Trial | None:
    """Of 'auto', with what ``allow`` names beside the usual codecs, or of 'auto:int8,sign' to try
    only these beside no compression; None of any other codec."""
    if not isinstance(codec, str) or not (codec == AUTO or codec.startswith(AUTO + ":")):
        if allow is not None:
            raise InvalidArgument(
                f"allow is {allow!r}, but codec is {codec!r}: it is for codec='auto', which tries "
                "several"
            )
        return None
    _, colon, names = codec.partition(":")
    more = allow.split(",") if isinstance(allow, str) else list(allow or ())
    named = names.split(",") if colon else [*WAYS[1:], *more]
    if colon and more:
        raise InvalidArgument(
            f"allow is {allow!r}, but codec is {codec!r}, which names all that is tried: leave "
            "allow out"
        )
    ways = tuple(dict.fromkeys([PLAIN, *(name.strip() for name in named)]))
    for way in ways[1:]:
        codec_named(way)
    return Trial(ways)
