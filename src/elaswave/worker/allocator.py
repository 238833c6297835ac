"""How a worker gets its memory from the system: once, and in huge pages."""

import ctypes

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
"""The most that glibc accepts."""
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 << 20
_RESERVE_BYTES = 1 << 30
"""Address space, not memory: what is never used costs nothing."""
_STEP_BYTES = 16 << 20


def tune_allocator() -> None:
    """Makes glibc's allocator keep what is freed, and take its memory from a heap of huge pages.

    By default every larger activation and gradient is a mapping of its own, or is trimmed off the heap, and the kernel
    hands out zeroed pages again in the next micro-batch: thousands of page faults, 8 % of a step of the default model.
    In pages of 4 KiB the processor's address translation costs another 4 %. Does nothing where the C library is not
    glibc, and has no huge pages where the kernel does not offer them to who asks.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    start, stop = _grow_heap(libc)
    libc.mallopt(_M_TOP_PAD, _STEP_BYTES)
    first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    if stop - first >= _HUGE_PAGE_BYTES:
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _MADV_HUGEPAGE)


def _grow_heap(libc: ctypes.CDLL) -> tuple[int, int]:
    """Lets the heap grow by a large piece of address space, where the system allows it; the ends of what was added."""
    libc.sbrk.restype = libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(_M_TOP_PAD, _RESERVE_BYTES)
    start = libc.sbrk(0) or 0
    block = libc.malloc(ctypes.c_size_t(_LARGEST_MMAP_THRESHOLD - (1 << 20)))  # large enough to need more heap
    stop = libc.sbrk(0) or 0
    libc.free(ctypes.c_void_p(block))
    return start, stop
