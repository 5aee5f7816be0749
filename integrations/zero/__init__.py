"""Optimizers whose state is spread over the ranks of a group."""
