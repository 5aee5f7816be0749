"""Large blocks of memory go back to the system when they are freed.

glibc maps a large block by itself and unmaps it when it is freed, but raises what counts as large up to 32 MiB as such blocks
come and go. From then on gradients and temporaries come from heaps, one for each thread, where small objects that live on keep
what lies between them: memory then grows with the number of layers, though only a few are ever in use.
"""

import ctypes
import os
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = 4 << 20
CHOSEN = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")  # by the user, who is not overruled


@cache
def return_large_blocks() -> bool:
    """Fix the threshold for this process; False where the allocator is another one, or was tuned by its environment."""
    try:
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError):  # another system, another C library
        return False
    if not glibc or any(name in os.environ for name in CHOSEN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE) and mallopt(M_TRIM_THRESHOLD, 2 * LARGE))
