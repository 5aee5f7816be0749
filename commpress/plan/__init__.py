"""Costs before they are paid: a simulator that runs the collectives on a modelled cluster, and
plans made with it."""
