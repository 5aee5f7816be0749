"""Everything that Numba compiles, and nothing else: no torch here, and nobody outside calls
Numba."""
