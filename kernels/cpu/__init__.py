"""The fast CPU path."""
