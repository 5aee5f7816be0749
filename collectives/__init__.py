"""Algorithms over ranks."""
