"""Sequences that are longer than one rank: rings, heads for positions, states passed on, groups of
different size."""

from commpress.integrations.sequence.groups import SequenceGroups, divide_sequences
from commpress.integrations.sequence.sequence_parallel import SequenceParallel

__all__ = ["SequenceGroups", "SequenceParallel", "divide_sequences"]
