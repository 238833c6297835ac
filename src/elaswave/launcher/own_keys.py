"""The keys that an agent's processes go by, and how they are exchanged while the job runs.

An agent that starts no coordinator only ever holds what those who take part must hold, and is told it. The one that
starts them reads the job's new key itself, from the file beside its old one: so the job's key crosses no connection to
an agent, and who holds a joining key alone, whomever it poses as, neither learns the job's nor gives it another one.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from elaswave.errors import UsageError
from elaswave.job.key_files import JobKey, KeyRole, next_file, read_key
from elaswave.launcher.forkserver.messages import TakeKeys
from elaswave.protocol.coordinator.key_change import RETIRED_MAX
from elaswave.transport.handshake import KeyRing, Secrets


class AgentKeys:
    """Of one agent.

    Args:
        key: that it was given.
        file: where the job's key stands, on the host where it is changed.
        starts_coordinators: whether it needs the job's own.
        told: the secrets of participants that the coordinator has told already; none: those that are made of `key`.
    Raises:
        UsageError: the key is of a role that may not do what this agent does.
    """

    def __init__(self, key: JobKey, file: Path, *, starts_coordinators: bool, sent: tuple[bytes, ...] = ()) -> None:
        self.job = Secrets((key.held(KeyRole.JOB),) if starts_coordinators else ())
        """The job's; none where no coordinator is started."""
        self.ring = KeyRing(Secrets(sent or (key.held(KeyRole.JOINING),)))
        """Of those who take part."""
        self._file = file

    def take(self, keys: tuple[bytes, ...]) -> str:
        """From now on others count.

        Args:
            keys: of those who take part.
        Returns:
            Why this agent cannot go by them; empty: it does.
        """
        if self.job.accepted:
            known = {JobKey(key, None).held(KeyRole.JOINING): key for key in self._known()}
            missing = [key for key in keys if key not in known]
            if missing:
                return f"it stands neither in {next_file(self._file)} nor in {self._file}, where the agent looks"
            job = tuple(known[key] for key in keys)
            left = tuple(key for key in self.job.accepted if key not in job)
            retired = tuple(key for key in (*self.job.retired, *left) if key not in job)
            self.job = Secrets(job, retired[-RETIRED_MAX:])
        self.ring.now = Secrets(keys)
        return ""

    def for_forkserver(self) -> TakeKeys:
        """What the template is told, which forks workers, and may fork coordinators."""
        return TakeKeys(keys=self.ring.now.accepted, job_keys=self.job.accepted, retired=self.job.retired)

    def _known(self) -> Iterator[bytes]:
        """The job's keys that may count. One that was retired never does again: the old file may still be there."""
        yield from self.job.accepted
        for file in (next_file(self._file), self._file):
            with contextlib.suppress(UsageError):
                key = read_key(file)
                if key.role is KeyRole.JOB and key.secret not in self.job.retired:
                    yield key.secret
