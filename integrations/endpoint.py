"""Metrics over HTTP on this machine, in Prometheus's text format. Off unless made; loopback only.

    endpoint = commpress.MetricsEndpoint(port=9400 + dist.get_rank())
    metrics = commpress.Metrics(state, to=[endpoint])          # curl http://127.0.0.1:9400/metrics
"""

import ipaddress
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from commpress.errors import InvalidArgument
from commpress.integrations.metrics import TOTALS, StepMetrics

TYPE = "text/plain; version=0.0.4; charset=utf-8"
HELP = {
    "steps": "Steps taken.",
    "logical_bytes": "Bytes that float32 ring all-reduces would have sent.",
    "wire_bytes": "Bytes this rank sent.",
    "between_bytes": "Bytes of them that left the node, where there is a topology.",
    "skipped_steps": "Steps skipped because gradients were not finite.",
    "encode_seconds": "Seconds in kernels that encode.",
    "wire_seconds": "Seconds spent waiting for peers in the background.",
    "decode_seconds": "Seconds in kernels that decode.",
    "disk_read_bytes": "Bytes the tiered store read from disk.",
    "disk_written_bytes": "Bytes the tiered store wrote to disk.",
    "stalls": "Times a tensor of the tiered store had to be waited for.",
    "stall_seconds": "Seconds spent so.",
    "step_seconds": "Seconds of the last step.",
    "compression_error": "Relative error of one encoding, by group of parameters.",
    "owed_norm": "Norm of what compression has left behind on this rank, by group of parameters.",
}


class MetricsEndpoint:
    """A sink of ``Metrics``. Port 0 takes a free one; ``url`` says where. ``labels`` are put on every line, as rank="3"."""

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1", labels: dict[str, object] | None = None) -> None:
        try:
            inside = ipaddress.ip_address(host).is_loopback
        except ValueError:
            inside = False
        if not inside:
            raise InvalidArgument(
                f"host is {host!r}, expected a loopback address such as 127.0.0.1: nobody is asked who he is here. "
                "To read metrics from elsewhere, forward the port (ssh -L) or put a proxy in front"
            )
        self._labels = {name: str(value) for name, value in (labels or {}).items()}
        for name in self._labels:
            if not name.isidentifier():
                raise InvalidArgument(f"labels have {name!r}, expected names of letters, digits and _")
        self._totals: dict[str, float] = dict.fromkeys(("steps", *TOTALS), 0)
        self._shown: tuple[dict[str, float], StepMetrics | None] = (dict(self._totals), None)
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint._answer(self)

            def log_message(self, *_: Any) -> None:
                """Nothing: a library does not print."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.host, self.port = host, int(self._server.server_address[1])
        self.url = f"http://{host}:{self.port}/metrics"
        threading.Thread(target=self._server.serve_forever, name="commpress-metrics", daemon=True).start()

    def __call__(self, sample: StepMetrics) -> None:
        self._totals["steps"] += sample.steps
        for name in TOTALS:
            self._totals[name] += getattr(sample, name)
        self._shown = (dict(self._totals), sample)  # readers get the old pair or the new one

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        """By its own name only: a page of another site must not read this through a name that it points here."""
        asked = urlsplit("//" + request.headers.get("Host", "")).hostname
        if asked not in ("localhost", self.host):
            request.send_error(403, "asked by a name that is not this machine's loopback")
        elif request.path.split("?")[0] != "/metrics":
            request.send_error(404, "there is only /metrics")
        else:
            body = self.text().encode()
            request.send_response(200)
            request.send_header("Content-Type", TYPE)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)

    def text(self) -> str:
        totals, last = self._shown
        lines: list[str] = []
        for name, value in totals.items():
            self._family(lines, f"{name}_total", "counter", HELP[name], [({}, value)])
        if last is not None:
            self._family(lines, "step_seconds", "gauge", HELP["step_seconds"], [({}, last.seconds / last.steps)])
            for name, groups in (("compression_error", last.errors), ("owed_norm", last.owed)):
                self._family(lines, name, "gauge", HELP[name], [({"group": g}, v) for g, v in groups.items()])
        return "\n".join(lines) + "\n"

    def _family(
        self, lines: list[str], name: str, kind: str, says: str, values: list[tuple[dict[str, str], float]]
    ) -> None:
        if not values:
            return
        lines += [f"# HELP commpress_{name} {says}", f"# TYPE commpress_{name} {kind}"]
        for labels, value in values:
            pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in (self._labels | labels).items())
            lines.append(f"commpress_{name}{{{pairs}}} {value!r}" if pairs else f"commpress_{name} {value!r}")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
