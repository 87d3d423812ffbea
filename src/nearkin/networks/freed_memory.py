"""Memory that one pass through a network frees, for the next one: a setting of the C library."""

import ctypes
import os
import sys
from contextlib import suppress
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as in glibc's malloc.h
LARGEST = 2**31 - 1


@cache
def keep_freed_memory() -> None:
    """Let this process keep what it frees, if its C library is glibc; MALLOC_... in the environment is preferred.

    glibc takes every tensor of more than 32 MB from the system, which clears its pages, and gives it back when it is
    freed. On a CPU as much time would go into pages as into the network.
    """
    if not sys.platform.startswith("linux") or any("MALLOC_" in name for name in os.environ):
        return
    if "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGEST)
        mallopt(TRIM_THRESHOLD, LARGEST)
