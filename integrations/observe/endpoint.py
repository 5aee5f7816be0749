"""Metrics over HTTP, in the formats of ``prometheus_client``, by default for this machine only.

endpoint = commpress.MetricsEndpoint(port=9400 + dist.get_rank())
metrics = commpress.Metrics(state, to=[endpoint])          # curl http://127.0.0.1:9400/metrics
"""

import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.observe.limited_server import LimitedServer, is_loopback, listening
from commpress.integrations.observe.metrics import TOTALS, StepMetrics
from commpress.integrations.weights.publisher import Report

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.exposition import choose_encoder
except ModuleNotFoundError as error:
    raise MissingPackage(
        "MetricsEndpoint needs prometheus_client: pip install 'commpress[metrics]'"
    ) from error

log = logging.getLogger("commpress")

AT_ONCE = 8  # connections, each with a thread
# an IPv6 address or a name, and a port
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]*))(?::[0-9]*)?")
_LABEL = re.compile(r"(?!__)[A-Za-z_][A-Za-z0-9_]*\Z")
HELP = {
    "steps": "Steps taken.",
    "logical_bytes": "Bytes that float32 ring all-reduces would have sent.",
    "wire_bytes": "Bytes this rank sent.",
    "between_bytes": "Bytes that left the node, counted with a topology.",
    "skipped_steps": "Steps skipped because gradients were not finite.",
    "late_steps": "Steps for which this rank was late, with wait=.",
    "encode_seconds": "Seconds in kernels that encode.",
    "wire_seconds": "Seconds spent waiting for peers in the background.",
    "decode_seconds": "Seconds in kernels that decode.",
    "disk_read_bytes": "Bytes the tiered store read from disk.",
    "disk_written_bytes": "Bytes the tiered store wrote to disk.",
    "stalls": "Waits for tensors of the tiered store.",
    "stall_seconds": "Seconds spent so.",
    "rounds": "Rounds of local updates.",
    "exchanges": "Exchanges of one fragment in these rounds.",
    "dropped": "Exchanges without the change of some rank, which was not finite.",
    "waited_seconds": "Seconds in which training waited for an exchange.",
    "faults": "Times that ranks were lost.",
    "lost": "Ranks that were lost.",
    "joined": "Ranks that have joined.",
    "pause_seconds": "Seconds in which the group was reformed.",
    "alarms": "Alarms that compression harms.",
    "ranks": "Ranks that there are.",
    "participation": "Ranks in committed steps, as a share of the most ranks so far.",
    "goodput": "Share of the time without pauses.",
    "spread": (
        "Spread of the ranks' changes around their mean, relative to it, in the last exchange."
    ),
    "participants": "Ranks that took part in the last exchange.",
    "shared_weights": "Hash of the shared weights, equal on every rank.",
    "step_seconds": "Seconds of the last step.",
    "compression_error": "Relative error of one encoding, by group of parameters.",
    "bits": (
        "Bits that an optimizer sends per element in a compressed round, by group of parameters."
    ),
    "expert_choices": "Choices of experts by this rank's tokens.",
    "expert_dropped": "Choices beyond an expert's capacity.",
    "expert_duplicated": "Copies of tokens that did not have to cross to other nodes.",
    "expert_inside_bytes": "Bytes this rank sent for experts inside its node.",
    "expert_between_bytes": "Bytes this rank sent for experts to other nodes.",
    "expert_tokens": "Tokens for an expert of this rank since the last sample.",
    "imbalance": "Choices of the rank with the most, relative to the mean.",
    "weights_version": "The newest version of published weights.",
    "weights_bytes": "Bytes of its differences.",
    "weights_anchor_bytes": "Bytes of all weights in addition, for late readers.",
    "weights_dense_bytes": "Bytes of the uncompressed weights.",
    "weights_density": "Share of the weights that changed.",
    "weights_seconds": "Seconds until the version was available.",
    "weights_scan_seconds": "Seconds of these in which training waited.",
    "weights_ratio": "Factor by which bytes are fewer than those of uncompressed weights.",
    "weights_behind": "Versions that a reader is behind.",
    "weights_asked": "Seconds since a reader asked.",
    "residual_norm": "Norm of the residuals on this rank, by group of parameters.",
}

# names of families that differ from the figure's
FAMILIES = {"error": "compression_error", "residual": "residual_norm"}


class MetricsEndpoint:
    """Serve metrics over HTTP, as a sink of ``Metrics`` and ``WeightMetrics``; ``url`` is its
    address.

    - ``port``: port to listen on; 0 takes a free one.
    - ``host``: IPv4 or IPv6 address of this machine to listen on; "0.0.0.0" or "::" for all. There
      is no authentication: everybody who can reach the address can read the figures.
    - ``labels``: labels of every line, such as rank="3".
    - ``timeout``: seconds after which an unfinished connection is closed.
    """

    def __init__(
        self,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        labels: dict[str, object] | None = None,
        timeout: float = 10.0,
    ) -> None:
        if not timeout > 0:
            raise InvalidArgument(f"timeout is {timeout!r}, expected seconds above 0")
        self._labels = {name: str(value) for name, value in (labels or {}).items()}
        for name in self._labels:
            if not _LABEL.match(name) or name == "group":
                raise InvalidArgument(
                    f"labels have {name!r}, expected names of letters, digits and _ that do not "
                    "begin with a digit or __, and not 'group', which names groups of parameters"
                )
        self._totals: dict[str, float] = dict.fromkeys(("steps", *TOTALS), 0)
        self._shown: tuple[dict[str, float], StepMetrics | None] = (dict(self._totals), None)
        self._weights: Report | None = None
        registry = CollectorRegistry()
        registry.register(self)  # takes any object with collect()
        self._server = _serve(host, port, make_wsgi_app(registry), timeout)
        self.host, self.port = host, self._server.server_port
        self.url = self._server.start("commpress-metrics", host) + "/metrics"
        if not self._server.inside:
            log.warning(
                "everybody who can reach %s can read metrics there, without authentication",
                self.url,
            )

    def __call__(self, sample: StepMetrics | Report) -> None:
        if isinstance(sample, Report):
            self._weights = sample
            return
        self._totals["steps"] += sample.steps
        for name in TOTALS:
            self._totals[name] += getattr(sample, name)
        self._shown = (dict(self._totals), sample)  # in one go: readers see no half

    def close(self) -> None:
        self._server.close()

    def collect(self) -> Iterator[Metric]:
        """Yield metric families, for a registry of ``prometheus_client``."""
        totals, last = self._shown
        for name, value in totals.items():
            yield self._family(CounterMetricFamily, name, [({}, value)])
        if last is not None:
            yield self._family(GaugeMetricFamily, "step_seconds", [({}, last.seconds / last.steps)])
            if last.shared_weights:
                if last.spread is not None:
                    yield self._family(GaugeMetricFamily, "spread", [({}, last.spread)])
                yield self._family(GaugeMetricFamily, "participants", [({}, last.participants)])
                yield self._family(
                    InfoMetricFamily, "shared_weights", [({}, {"hash": last.shared_weights})]
                )
            for name in ("ranks", "participation", "goodput") if last.ranks else ():
                yield self._family(GaugeMetricFamily, name, [({}, getattr(last, name))])
            for name, groups in last.by_group.items():
                if groups:
                    of = [({"group": g}, v) for g, v in groups.items()]
                    yield self._family(GaugeMetricFamily, FAMILIES.get(name, name), of)

        if (weights := self._weights) is not None:
            told = {"version": [(dict[str, str](), float(weights.version))]}
            for name, value in weights.scalars().items():
                figure, _, reader = name.partition("/")
                told.setdefault(figure, []).append(({"reader": reader} if reader else {}, value))
            for figure, values in told.items():
                yield self._family(GaugeMetricFamily, f"weights_{figure}", values)

    def _family(
        self, kind: type[Any], name: str, values: list[tuple[dict[str, str], Any]]
    ) -> Metric:
        family = kind(f"commpress_{name}", HELP[name], labels=[*self._labels, *values[0][0]])
        for labels, value in values:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family


# ---------------------------------------------------------------- the server


class _Server(LimitedServer, WSGIServer):
    at_once = AT_ONCE
    inside = False  # listens on loopback only


class _Silent(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Print nothing, unlike the base class."""


def _serve(host: str, port: int, answer: Callable[..., Iterable[bytes]], timeout: float) -> _Server:
    def make(family: socket.AddressFamily, address: str) -> _Server:
        kind = type("Server", (_Server,), {"address_family": family, "stranger_seconds": timeout})
        server: _Server = make_server(address, port, answer, kind, _Silent)
        server.inside = is_loopback(address)
        server.set_app(_checked(answer, inside=server.inside))
        return server

    return listening(host, port, make)


def _checked(
    answer: Callable[..., Iterable[bytes]], *, inside: bool
) -> Callable[..., Iterable[bytes]]:
    """Answer only requests with valid headers.

    ``inside``: also require a loopback address as Host, so that another site's page cannot read
    metrics through a domain name that it resolves to this machine.
    """

    def checked(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        host = _HOST.fullmatch(environ.get("HTTP_HOST", ""))
        if host is None or not _is_readable(environ.get("HTTP_ACCEPT", "")):
            status, why = "400 Bad Request", b"the Host or Accept header cannot be read\n"
        elif inside and not is_loopback((host[1] or host[2]).lower()):
            status, why = "403 Forbidden", b"the Host header is not a loopback address\n"
        else:
            return answer(environ, start_response)
        start_response(status, [("Content-Type", "text/plain")])
        return [why]

    return checked


def _is_readable(accept: str) -> bool:
    """Return whether ``prometheus_client`` can read the header: it raises for versions that are no
    numbers."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return False
    return True
