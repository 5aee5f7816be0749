"""Layers whose experts lie on different ranks."""
