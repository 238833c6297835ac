"""Sees a process die before its memory is torn down.

The kernel gives a dead child to its parent, and closes its sockets, only after it has released all its memory: 20 ms
for a small worker on a quiet machine, 100 to 240 ms when all cores are busy, because the dying process does that work
itself, in its turn. Robust mutexes it releases first. So every worker holds one, in memory that it shares with the
coordinator, and a thread that waits for it learns within 1 to 3 ms (3 to 20 on busy cores) that its owner is dying.

The memory is an anonymous mapping inherited through fork: it has no name and leaves nothing behind. Where the C
library has no robust mutexes, this class reports nothing, and only the agent sees, later, that a process has ended.
"""

import ctypes
import errno
import mmap
from collections.abc import Sequence

_SLOT_BYTES = 64
"""Room of one mutex (40 bytes in glibc on 64-bit machines), on a cache line of its own."""
_SHARED, _ROBUST = 1, 1
_DEAD = (errno.EOWNERDEAD, errno.ENOTRECOVERABLE)


class DeathWatch:
    """One robust mutex for each worker. Made before any worker is forked.

    Args:
        workers: ids of the workers.
    """

    def __init__(self, workers: Sequence[int]) -> None:
        self._slots = {worker: index * _SLOT_BYTES for index, worker in enumerate(workers)}
        self._memory = mmap.mmap(-1, max(1, len(workers)) * _SLOT_BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._libc = ctypes.CDLL(None)
        attributes = ctypes.create_string_buffer(_SLOT_BYTES)
        try:
            failed = (
                self._libc.pthread_mutexattr_init(attributes)
                or self._libc.pthread_mutexattr_setpshared(attributes, _SHARED)
                or self._libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
                or any(self._libc.pthread_mutex_init(self._mutex(worker), attributes) for worker in workers)
            )
        except AttributeError:
            failed = True
        self.works = not failed
        """Whether this C library can do it."""

    def _mutex(self, worker: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + self._slots[worker])

    def live(self, worker: int) -> None:
        """Called once by the worker's main thread: from now on its end is seen."""
        if self.works and worker in self._slots:
            self._libc.pthread_mutex_lock(self._mutex(worker))

    def wait(self, worker: int) -> bool:
        """Blocks until the worker's main thread has ended; to be called from a thread of its own.

        Returns:
            True once it has; False if the worker has never said that it lives, or nothing can be told here.
        """
        if not self.works or worker not in self._slots:
            return False
        result = int(self._libc.pthread_mutex_lock(self._mutex(worker)))
        if result == 0:
            self._libc.pthread_mutex_unlock(self._mutex(worker))
        return result in _DEAD
