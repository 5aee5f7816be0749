"""Weights of a model at its readers: new versions as exact differences."""

from commpress.integrations.weights.http_server import WeightServer
from commpress.integrations.weights.mirror import Verified, pull, stat, verify
from commpress.integrations.weights.publisher import Publisher, Report
from commpress.integrations.weights.receiver import Receiver
from commpress.integrations.weights.weight_metrics import WeightMetrics, WeightSample

__all__ = [
    "Publisher",
    "Receiver",
    "Report",
    "Verified",
    "WeightMetrics",
    "WeightSample",
    "WeightServer",
    "pull",
    "stat",
    "verify",
]
