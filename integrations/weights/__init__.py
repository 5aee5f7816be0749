"""Weights of a model at its readers: new versions as exact differences."""

from commpress.integrations.weights.http_server import WeightServer
from commpress.integrations.weights.mirror import pull, stat, verify
from commpress.integrations.weights.publisher import Publisher, Report
from commpress.integrations.weights.receiver import Receiver
from commpress.integrations.weights.weight_metrics import WeightMetrics
from commpress.integrations.weights.weight_records import Version

__all__ = [
    "Publisher",
    "Receiver",
    "Report",
    "Version",
    "WeightMetrics",
    "WeightServer",
    "pull",
    "stat",
    "verify",
]
