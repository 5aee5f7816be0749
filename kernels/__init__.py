"""Arithmetic on arrays: what the bits of a message mean. Knows nothing of ranks."""

if __name__ != "commpress.kernels":
    raise ImportError(
        f"commpress.kernels was imported as {__name__!r}: the root of a commpress checkout lies on sys.path and hides "
        "other packages of that name. Remove it from sys.path / PYTHONPATH, or run `pytest` instead of `python -m pytest`."
    )
