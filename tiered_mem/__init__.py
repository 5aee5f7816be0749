"""Tensors that live on the fastest tier with room; see ``commpress.tiered_mem.store``."""
