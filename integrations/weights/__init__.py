"""Weights of a model at its readers: new versions as exact differences."""

from typing import TYPE_CHECKING

from commpress.lazy import lazily

if TYPE_CHECKING:
    from commpress.integrations.weights.http_server import WeightServer
    from commpress.integrations.weights.mirror import Verified, pull, stat, verify
    from commpress.integrations.weights.publisher import Publisher, Report
    from commpress.integrations.weights.receiver import Receiver
    from commpress.integrations.weights.sglang_folder import SglangFolder
    from commpress.integrations.weights.weight_metrics import WeightMetrics, WeightSample

__all__ = [
    "Publisher",
    "Receiver",
    "Report",
    "SglangFolder",
    "Verified",
    "WeightMetrics",
    "WeightSample",
    "WeightServer",
    "pull",
    "stat",
    "verify",
]
__getattr__ = lazily(
    __name__,
    {
        "http_server": ["WeightServer"],
        "mirror": ["Verified", "pull", "stat", "verify"],
        "publisher": ["Publisher", "Report"],
        "receiver": ["Receiver"],
        "sglang_folder": ["SglangFolder"],
        "weight_metrics": ["WeightMetrics", "WeightSample"],
    },
)
