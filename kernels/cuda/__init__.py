"""The CUDA path."""
