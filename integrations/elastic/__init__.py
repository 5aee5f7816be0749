"""Loops that outlive their ranks: healing, positions in data, snapshots, and the loop itself."""

from commpress.integrations.elastic.loop import Elastic, elastic
from commpress.integrations.elastic.sampler import ElasticSampler
from commpress.integrations.elastic.snapshots import Snapshots

__all__ = ["Elastic", "ElasticSampler", "Snapshots", "elastic"]
