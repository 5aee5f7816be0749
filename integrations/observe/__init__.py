"""Counters, metrics and timelines."""

from typing import TYPE_CHECKING

from commpress.collectives.channel import Counters
from commpress.integrations.observe.metrics import Metrics, StepMetrics, to_json_lines, to_writer
from commpress.integrations.observe.watch import Watch, watch
from commpress.lazy import lazily

if TYPE_CHECKING:
    from commpress.integrations.observe.endpoint import MetricsEndpoint

# loaded on use, because it needs an optional package
__getattr__ = lazily(__name__, {"endpoint": ["MetricsEndpoint"]})

__all__ = [
    "Counters",
    "Metrics",
    "MetricsEndpoint",
    "StepMetrics",
    "Watch",
    "to_json_lines",
    "to_writer",
    "watch",
]
