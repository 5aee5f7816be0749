"""Metrics of published weights, into the sinks of ``commpress.Metrics``."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from commpress.errors import InvalidArgument
from commpress.integrations.weights.http_server import WeightServer
from commpress.integrations.weights.publisher import Publisher, Report

FIGURES = "bytes", "anchor_bytes", "dense_bytes", "density", "seconds", "scan_seconds", "ratio"


@dataclass(frozen=True)
class WeightSample(Report):
    """One version. By reader: the versions ``behind``, and seconds since it ``asked``."""

    behind: dict[str, int] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)

    @property
    def step(self) -> int:
        return self.version

    @property
    def ratio(self) -> float:
        return self.dense_bytes / self.bytes if self.bytes else 1.0

    def scalars(self) -> dict[str, float]:
        """All but the version, flat: ``bytes``, ``behind/10.0.0.7`` and so on."""
        return {name: getattr(self, name) for name in FIGURES} | {
            f"{figure}/{reader}": value
            for figure, readers in (("behind", self.behind), ("asked", self.asked))
            for reader, value in readers.items()
        }


class WeightMetrics:
    """``metrics = WeightMetrics(publisher, server, to=[commpress.MetricsEndpoint()])``, then
    ``metrics.step()`` after each training step: every version is told to all sinks once.

    ``server``, a ``WeightServer``, knows the readers; those of a copy count as one.
    """

    def __init__(
        self,
        publisher: Publisher,
        server: WeightServer | None = None,
        *,
        to: Sequence[Callable[[Any], object]],
    ) -> None:
        if not to or callable(to):
            raise InvalidArgument(f"to is {to!r}, expected sinks such as [print]")
        self._publisher, self._server, self._to = publisher, server, list(to)
        self._told = 0

    def step(self) -> WeightSample | None:
        """The sample of the newest version that can be had, unless the sinks have it already."""
        report = self._publisher.report
        if report is None or report.version == self._told:
            return None
        readers = {} if self._server is None else self._server.readers
        sample = WeightSample(
            **asdict(report),
            behind={name: report.version - version for name, (version, _) in readers.items()},
            asked={name: seconds for name, (_, seconds) in readers.items()},
        )
        for sink in self._to:
            sink(sample)
        self._told = report.version
        return sample
