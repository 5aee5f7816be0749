"""Layers whose experts lie on different ranks."""

from commpress.integrations.experts.dispatch import AllToAll

__all__ = ["AllToAll"]
