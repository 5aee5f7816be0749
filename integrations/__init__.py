"""Glue to other people's objects."""
