"""What the forkserver and the processes that it forks are started with. Loads no torch.

An agent hears of steps from its coordinator. While it has none, `CommitCount` tells whether its workers get on (rule
H12). The memory is an anonymous mapping inherited through fork, as that of `elaswave.system.processes`.
"""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

from elaswave.engine.checks.probe import Probe
from elaswave.job.script import ReadFile
from elaswave.job.setup import JobSetup
from elaswave.transport.handshake import Secrets


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


class ForkServerSetup(NamedTuple):
    """What the forkserver and the workers are started with."""

    job: JobSetup
    keys: Secrets
    """Of those who take part, see `elaswave.job.keys.KeyRole`."""
    job_keys: Secrets
    """The job's; none where no coordinator is started."""
    commits: CommitCount | None
    """None where the agent that shares it never waits for another host's coordinator."""
    probe: Probe | None
    suffix: str
    """Of the names of files of which every host has its own in the run's folder."""
    training: Any = None
    """An `elaswave.training.definition.Training`: what is trained; None: what the configuration describes."""
    read_files: tuple[ReadFile, ...] = ()
    """Of a person's code: what it has open for reading, of which each process needs a place of its own."""
    not_taken: Sequence[str] = ()
    """What a fresh interpreter has not taken over of the script's modules; grows while modules are imported."""
    frozen: Any = None
    """Frozen parameters that the checkpoint has otherwise than they are built, by full name; the forkserver reads them
    before it forks workers."""
