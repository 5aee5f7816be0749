"""Counters, metrics and timelines."""
