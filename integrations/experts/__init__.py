"""Layers with experts on different ranks."""

from commpress.integrations.experts.dispatch import AllToAll
from commpress.integrations.experts.expert_exchange import ExpertExchange

__all__ = ["AllToAll", "ExpertExchange"]
