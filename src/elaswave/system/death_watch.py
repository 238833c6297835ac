"""Sees a process die before its memory is torn down.

The kernel gives a dead child to its parent, and closes its sockets, only after it has released all its memory: 20 ms
for a small worker on a quiet machine, 100 to 240 ms when all cores are busy, because the dying process does that work
itself, in its turn. Robust mutexes it releases first. So every worker holds one, in memory that it shares with the
coordinator, and a thread that waits for it learns within 1 to 3 ms (3 to 20 on busy cores) that its owner is dying.

The memory is an anonymous mapping inherited through fork: it has no name and leaves nothing behind. It is made before
anybody is forked, so it has room for workers to come: a worker's slot is its id modulo the number of slots, and names
the worker that has taken it. Where the C library has no robust mutexes, or the slot's owner still lives, nothing is
reported, and only the agent sees, later, that a process has ended.
"""

import ctypes
import errno
import mmap

NUM_SLOTS = 4096
"""Far more than workers that live at once."""
_SLOT_BYTES = 64
"""A cache line for each worker: its mutex (at most 48 bytes in glibc on 64-bit machines), then who has taken it."""
_OWNER_AT = 56
_SHARED, _ROBUST = 1, 1


class DeathWatch:
    """One robust mutex for each worker that lives. Made before any worker is forked."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, NUM_SLOTS * _SLOT_BYTES)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._libc = ctypes.CDLL(None)
        self._attributes = ctypes.create_string_buffer(_SLOT_BYTES)
        try:
            failed = (
                self._libc.pthread_mutexattr_init(self._attributes)
                or self._libc.pthread_mutexattr_setpshared(self._attributes, _SHARED)
                or self._libc.pthread_mutexattr_setrobust(self._attributes, _ROBUST)
            )
        except AttributeError:
            failed = True
        self.works = not failed
        """Whether this C library can do it."""

    def _mutex(self, worker: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._base + worker % NUM_SLOTS * _SLOT_BYTES)

    def _owner(self, worker: int) -> ctypes.c_int64:
        """Who has taken the worker's slot: its id plus 1, 0 if nobody has yet."""
        return ctypes.c_int64.from_address(self._base + worker % NUM_SLOTS * _SLOT_BYTES + _OWNER_AT)

    def live(self, worker: int) -> None:
        """Called once by the worker's main thread: from now on its end is seen."""
        if not self.works:
            return
        mutex, owner = self._mutex(worker), self._owner(worker)
        result = int(self._libc.pthread_mutex_trylock(mutex)) if owner.value else errno.ENOTRECOVERABLE
        if result == errno.EBUSY:  # its owner lives
            return
        if result == errno.EOWNERDEAD:  # nobody has watched it
            self._libc.pthread_mutex_consistent(mutex)
        elif result == errno.ENOTRECOVERABLE:  # new, or its owner's end was seen
            self._libc.pthread_mutex_init(mutex, self._attributes)
            self._libc.pthread_mutex_lock(mutex)
        owner.value = worker + 1

    def wait(self, worker: int) -> bool:
        """Blocks until the worker's main thread has ended; to be called from a thread of its own.

        Returns:
            True once it has; False if the worker has never said that it lives, or nothing can be told here.
        """
        if not self.works or self._owner(worker).value != worker + 1:
            return False
        mutex = self._mutex(worker)
        result = int(self._libc.pthread_mutex_lock(mutex))
        if result != errno.ENOTRECOVERABLE:
            # Not made consistent: everybody else who waits, or comes later, is told ENOTRECOVERABLE.
            self._libc.pthread_mutex_unlock(mutex)
        return result in (errno.EOWNERDEAD, errno.ENOTRECOVERABLE)
