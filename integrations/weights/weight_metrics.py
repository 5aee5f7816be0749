"""Metrics of published weights, into the sinks of ``commpress.Metrics``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from commpress.errors import InvalidArgument
from commpress.integrations.weights.http_server import WeightServer
from commpress.integrations.weights.publisher import Publisher, Report


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
        self._publisher, self._server, self._to, self._told = publisher, server, list(to), 0

    def step(self) -> Report | None:
        """The report of the newest version that can be had, unless the sinks have it already."""
        report = self._publisher.report
        if report is None or report.version == self._told:
            return None
        readers = ({} if self._server is None else self._server.readers).items()
        behind = {name: report.version - version for name, (version, _) in readers}
        report = replace(report, behind=behind, asked={name: ago for name, (_, ago) in readers})
        for sink in self._to:
            sink(report)
        self._told = report.version
        return report
