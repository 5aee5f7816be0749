"""Messages about what all ranks know: the first one gives them, so that a run says each once.

``rank`` is that among those who know it. Others have the message for who looks at DEBUG.
"""

import logging

log = logging.getLogger("commpress")


def warn_on_first(rank: int, message: str, *args: object) -> None:
    """Log a warning, once for all ranks."""
    log.log(logging.DEBUG if rank else logging.WARNING, message, *args, stacklevel=2)


def tell_on_first(rank: int, message: str, *args: object) -> None:
    """Log what is as it should be, once for all ranks."""
    log.log(logging.DEBUG if rank else logging.INFO, message, *args, stacklevel=2)
