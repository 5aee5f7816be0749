"""Counters, metrics and timelines."""

from commpress.integrations.observe.counters import Counters
from commpress.integrations.observe.endpoint import MetricsEndpoint
from commpress.integrations.observe.metrics import Metrics, StepMetrics, to_json_lines, to_writer
from commpress.integrations.observe.watch import Watch, watch

__all__ = ["Counters", "Metrics", "MetricsEndpoint", "StepMetrics", "Watch", "to_json_lines", "to_writer", "watch"]
