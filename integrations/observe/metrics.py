"""Metrics of every step, for people and programs that watch a run.

    sinks = [print, commpress.MetricsEndpoint(), commpress.to_writer(writer)]
    metrics = commpress.Metrics(state, store=store, to=sinks)
    for batch in data:
        ...
        optimizer.step()
        metrics.step()

The numbers are differences of counters that exist anyway. The training thread reads them after the
step, so that the step itself takes no longer.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from commpress.errors import InvalidArgument
from commpress.feedback import ResidualStore
from commpress.integrations.experts.expert_exchange import ExpertExchange
from commpress.integrations.observe.watch import workspaces_of
from commpress.optim.local_updates import LocalUpdates

NORMS_EVERY = 100  # steps: a norm reads all residuals once


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one rank for the step that has just ended, or for ``steps`` steps since the last
    sample.

    Bytes are those that this rank sent; ``logical_bytes`` those of float32 ring all-reduces.
    ``wire_seconds`` is time spent waiting for peers in the background (DDP and FSDP1; zero if it is
    not measured). ``errors``, ``residuals`` and ``bits`` are by group of parameters, as last
    measured: relative error of one encoding (mean over the group's tensors), norm of this rank's
    residuals, and bits that an optimizer sends per element in a compressed round.

    ``LocalUpdates``: ``rounds`` of all fragments, ``exchanges`` of one fragment, ``dropped`` (those
    in which a rank's change was not finite), and ``waited_seconds`` in which training waited; for
    the last exchange ``spread`` (of the ranks' changes around their mean, relative to it),
    ``participants``, and ``shared_weights``, a hash equal on all ranks.

    Experts: choices of this rank's tokens, those ``dropped`` beyond a capacity, copies that did not
    have to cross to other nodes (``duplicated``), and bytes sent inside the node and between nodes,
    which are not in ``wire_bytes``. ``expert_tokens`` counts tokens for each expert of this rank;
    ``imbalance`` is the load of the rank with the most, relative to the mean, by exchange, as last
    measured.

    ``commpress.elastic``: ``faults``, ranks ``lost`` and ``joined``, and ``pause_seconds`` in which
    the group was reformed; the present number of ``ranks``; for the whole run ``participation``
    (ranks in committed steps, relative to the most ranks so far) and ``goodput`` (share of the time
    without pauses).

    ``alarms`` counts those of ``compress(alarm=)``.
    """

    step: int
    steps: int
    seconds: float
    logical_bytes: int = 0
    wire_bytes: int = 0
    between_bytes: int = 0
    skipped_steps: int = 0
    late_steps: int = 0
    encode_seconds: float = 0.0
    wire_seconds: float = 0.0
    decode_seconds: float = 0.0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    stalls: int = 0
    stall_seconds: float = 0.0
    rounds: int = 0
    exchanges: int = 0
    dropped: int = 0
    waited_seconds: float = 0.0
    expert_choices: int = 0
    expert_dropped: int = 0
    expert_duplicated: int = 0
    expert_inside_bytes: int = 0
    expert_between_bytes: int = 0
    faults: int = 0
    lost: int = 0
    joined: int = 0
    pause_seconds: float = 0.0
    alarms: int = 0
    ranks: int = 0
    participation: float = 1.0
    goodput: float = 1.0
    spread: float | None = None
    participants: int = 0
    shared_weights: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    residuals: dict[str, float] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    expert_tokens: dict[str, float] = field(default_factory=dict)
    imbalance: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.logical_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def by_group(self) -> dict[str, dict[str, float]]:
        return {
            "error": self.errors,
            "residual": self.residuals,
            "bits": self.bits,
            "expert_tokens": self.expert_tokens,
            "imbalance": self.imbalance,
        }

    def scalars(self) -> dict[str, float]:
        """Return all figures in one dictionary: ``wire_bytes``, ``error/blocks.0`` and so on."""
        given = asdict(self).items()
        numbers = {
            name: value for name, value in given if name not in NO_SCALARS and value is not None
        }
        groups = {
            f"{figure}/{name}": value
            for figure, of in self.by_group.items()
            for name, value in of.items()
        }
        return numbers | {"ratio": self.ratio} | groups


NO_SCALARS = (
    "step",
    "shared_weights",
    "errors",
    "residuals",
    "bits",
    "expert_tokens",
    "imbalance",
)
Sink = Callable[[StepMetrics], object]
TOTALS = tuple(StepMetrics.__dataclass_fields__)[3:29]  # logical_bytes … alarms


class Metrics:
    """Sample metrics of ``state``, the result of ``compress`` or ``compress_fsdp`` or an optimizer
    of commpress, and pass each sample to the sinks in ``to``.

    - ``store``: a ``TieredStore``, to count its disk transfers and stalls, too.
    - ``experts``: an ``ExpertExchange``, or several by name.
    - ``elastic``: the loop returned by ``commpress.elastic``.
    - ``every``: steps between two samples.
    - ``norms_every``: steps between measurements of ``residuals``; 0 never.
    - ``group_by``: maps a parameter's name to a group; by default the name up to its first number:
      "blocks.0".
    """

    def __init__(
        self,
        state: Any = None,
        *,
        store: Any = None,
        experts: ExpertExchange | Mapping[str, ExpertExchange] | None = None,
        elastic: Any = None,
        to: Sequence[Sink] = (),
        every: int = 1,
        norms_every: int = NORMS_EVERY,
        group_by: Callable[[str], str] | None = None,
    ) -> None:
        self.experts = (
            {"experts": experts} if isinstance(experts, ExpertExchange) else dict(experts or {})
        )
        if state is None and store is None and not self.experts and elastic is None:
            raise InvalidArgument(
                "state, store, experts and elastic are all None: pass at least one of them"
            )
        if elastic is not None and not hasattr(elastic, "counters"):
            raise InvalidArgument(
                f"elastic is a {type(elastic).__name__}, expected what commpress.elastic returned"
            )
        odd = [
            type(each).__name__
            for each in self.experts.values()
            if not isinstance(each, ExpertExchange)
        ]
        if odd:
            raise InvalidArgument(
                f"experts has a {odd[0]}, expected ExpertExchange, or several of them by name"
            )
        if state is not None and not hasattr(state, "counters") and not hasattr(state, "gradients"):
            raise InvalidArgument(
                f"state is a {type(state).__name__}, expected what commpress.compress or "
                "compress_fsdp returned, an optimizer of commpress, or LocalUpdates"
            )
        if every < 1 or norms_every < 0:
            raise InvalidArgument(
                f"every is {every} and norms_every {norms_every}, expected at least 1 and 0"
            )
        self.state, self.store, self.elastic, self.to = state, store, elastic, list(to)
        self.every, self.norms_every, self.group_by = every, norms_every, group_by or by_layer
        self.steps_done = 0
        self.last: StepMetrics | None = None
        self._residuals: dict[str, float] = {}
        self._hash = ""  # hash of the shared weights of local updates
        self._seen, self._came, self._since, self._at = (
            self._totals(),
            expert_tokens(self.experts),
            0,
            perf_counter(),
        )

    def step(self) -> StepMetrics | None:
        """Count a finished step. If it ends a sample, pass that to every sink and return it."""
        self.steps_done += 1
        self._since += 1
        if self.norms_every and self.steps_done % self.norms_every == 0:
            self._residuals = residuals(self.state, self.group_by)
        if self._since < self.every:
            return None
        totals, now, came = self._totals(), perf_counter(), expert_tokens(self.experts)
        passed = {name: totals[name] - self._seen[name] for name in totals}
        sample = StepMetrics(
            self.steps_done,
            self._since,
            now - self._at,
            **passed,
            **self._of_rounds(passed["exchanges"]),
            **self._of_elastic(),
            errors=errors(self.state, self.group_by),
            residuals=self._residuals,
            bits=bits(self.state, self.group_by),
            expert_tokens={name: tokens - self._came.get(name, 0) for name, tokens in came.items()},
            imbalance={name: each.counters.imbalance for name, each in self.experts.items()},
        )
        self._seen, self._came, self._since, self._at = totals, came, 0, now
        self.last = sample
        for sink in self.to:
            sink(sample)
        return sample

    def _of_rounds(self, exchanges: int) -> dict[str, Any]:
        """Return the figures of the last exchange of local updates. The hash reads all shared
        weights, so it is computed only after an exchange."""
        if not isinstance(self.state, LocalUpdates):
            return {}
        if exchanges or self.last is None:
            self._hash = self.state.digest()
        counters = self.state.counters
        return {
            "spread": counters.spread,
            "participants": counters.participants,
            "shared_weights": self._hash,
        }

    def _totals(self) -> dict[str, Any]:
        totals: dict[str, Any] = dict.fromkeys(TOTALS, 0)
        if isinstance(self.state, LocalUpdates):
            totals |= of_local(self.state)
        elif self.state is not None:
            for counters in _counters(self.state):
                for name in (
                    "logical_bytes",
                    "wire_bytes",
                    "between_bytes",
                    "skipped_steps",
                    "late_steps",
                    "wire_seconds",
                ):
                    totals[name] += getattr(counters, name, 0)
            totals["alarms"] = getattr(getattr(self.state, "alarm", None), "sounded", 0)
        if self.state is not None:
            for workspace in workspaces_of(self.state):
                totals["encode_seconds"] += workspace.encode_seconds
                totals["decode_seconds"] += workspace.decode_seconds
        for each in self.experts.values():
            for name in ("choices", "dropped", "duplicated", "inside_bytes", "between_bytes"):
                totals[f"expert_{name}"] += getattr(each.counters, name)
        if self.store is not None:
            totals["disk_read_bytes"], totals["disk_written_bytes"] = self.store.traffic()
            totals["stalls"], totals["stall_seconds"] = (
                self.store.counters.misses,
                self.store.counters.stall_seconds,
            )
        if self.elastic is not None:
            totals |= {
                name: getattr(self.elastic.counters, name)
                for name in ("faults", "lost", "joined", "pause_seconds")
            }
        return totals

    def _of_elastic(self) -> dict[str, Any]:
        """Return the figures of an elastic loop."""
        if self.elastic is None:
            return {}
        counters = self.elastic.counters
        return {
            "ranks": self.elastic.size,
            "participation": counters.participation,
            "goodput": counters.goodput,
        }


def of_local(local: LocalUpdates) -> dict[str, Any]:
    """Return the totals of local updates; logical bytes are those of a float32 ring all-reduce in
    every step."""
    counters, ranks = local.counters, local.channel.size
    numel = sum(p.numel() for group in local.param_groups for p in group["params"])
    return {
        "logical_bytes": 8 * (ranks - 1) * numel // ranks * counters.steps,
        "wire_bytes": counters.sent_bytes,
        "wire_seconds": local.channel.waited,
        "rounds": counters.rounds,
        "exchanges": counters.exchanges,
        "dropped": counters.dropped,
        "waited_seconds": counters.waited,
    }


def expert_tokens(experts: Mapping[str, ExpertExchange]) -> dict[str, float]:
    """Return the tokens for each expert of this rank, by exchange and number: "experts/3"."""
    return {
        f"{name}/{number}": tokens
        for name, each in experts.items()
        for number, tokens in zip(
            each.counters.experts.tolist(), each.counters.tokens_here, strict=True
        )
    }


def _counters(state: Any) -> list[Any]:
    return [state.counters] if hasattr(state, "counters") else [state.gradients, state.weights]


# ---------------------------------------------------------------- by group


def by_layer(name: str) -> str:
    """Return the name up to its first number, as 'module.blocks.0' of 'module.blocks.0.qkv.weight',
    or its module, as 'head' of 'head.weight'."""
    numbered = re.match(r"(?:\D*\.)?\d+(?=\.|$)", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def errors(state: Any, group: Callable[[str], str]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for counters in _counters(state) if state is not None else ():
        for name, error in getattr(counters, "errors", {}).items():
            found.setdefault(group(name), []).append(error)
    return {name: sum(values) / len(values) for name, values in found.items()}


def bits(state: Any, group: Callable[[str], str]) -> dict[str, float]:
    """Return, by group, the bits per element that an optimizer sends in a compressed round."""
    sent: dict[str, float] = {}
    numel: dict[str, int] = {}
    for counters in _counters(state) if state is not None else ():
        for name, share in getattr(counters, "shares", {}).items():
            sent[group(name)] = sent.get(group(name), 0.0) + share.bits * share.numel
            numel[group(name)] = numel.get(group(name), 0) + share.numel
    return {name: value / max(numel[name], 1) for name, value in sent.items()}


def residuals(state: Any, group: Callable[[str], str]) -> dict[str, float]:
    """Return ‖sent residual‖ of this rank by group. Call it between steps only, because it settles
    lazy residuals."""
    squares: dict[str, float] = {}
    for store in stores_of(state):
        for (name, _), sent, _ in store.places():
            squares[group(name)] = squares.get(group(name), 0.0) + float(sent.square().sum())
    return {name: value**0.5 for name, value in squares.items()}


def stores_of(state: Any) -> list[ResidualStore]:
    """Return the state's stores of residuals and those of its channels, each once."""
    if state is None:
        return []
    parts = [state, *vars(state).values()]
    found = [
        store
        for part in parts
        if isinstance(store := getattr(part, "residuals", None), ResidualStore)
    ]
    return list({id(store): store for store in found}.values())


# ---------------------------------------------------------------- sinks


def to_json_lines(path: str | Path) -> Sink:
    """Append each sample to a file, as one JSON object per line with ``step`` and all figures."""
    file = Path(path)

    def write(sample: StepMetrics) -> None:
        with file.open("a") as lines:
            told = asdict(sample) | {"step": sample.step, "ratio": sample.ratio}
            lines.write(json.dumps(told) + "\n")

    return write


def to_writer(writer: Any, prefix: str = "commpress/") -> Sink:
    """Write each sample to TensorBoard, or to any object with ``add_scalar(tag, value, step)``."""

    def write(sample: StepMetrics) -> None:
        for name, value in sample.scalars().items():
            writer.add_scalar(prefix + name, value, sample.step)

    return write
