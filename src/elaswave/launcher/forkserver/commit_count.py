"""How many steps the workers of this host have committed, in memory that they share with their agent.

An agent hears of steps from its coordinator. While it has none, this number tells whether its workers get on (rule
H12). The memory is an anonymous mapping inherited through fork, as that of `elaswave.system.death_watch`.
"""

import ctypes
import mmap


class CommitCount:
    """One number that every worker adds to. Made before any worker is forked.

    Two workers that add at once may count as one: what matters is that the number changes.
    """

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._count = ctypes.c_int64.from_buffer(self._memory)

    def add(self) -> None:
        """A worker has committed a step."""
        self._count.value += 1

    @property
    def value(self) -> int:
        """Changes whenever a worker commits a step."""
        return self._count.value
