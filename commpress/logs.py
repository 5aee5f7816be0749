"""Messages that concern all ranks: rank 0 logs them, so that each appears once in a run.

``rank`` counts among the ranks concerned. The others log the message at level DEBUG.
"""

import logging

log = logging.getLogger("commpress")


def warn_on_first(rank: int, message: str, *args: object) -> None:
    """Log a warning, once for all ranks."""
    log.log(logging.DEBUG if rank else logging.WARNING, message, *args, stacklevel=2)


def tell_on_first(rank: int, message: str, *args: object) -> None:
    """Log an expected event, once for all ranks."""
    log.log(logging.DEBUG if rank else logging.INFO, message, *args, stacklevel=2)
