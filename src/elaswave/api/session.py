"""What ``elaswave run`` hands to the script that it runs: options that are stronger than the script's own.

A script makes its `Trainer` by itself, so the options of the command wait here, in the one process that runs the
script. Without the command there are none.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from elaswave.errors import UsageError
from elaswave.launcher.launcher import FinishedJob, JobOptions


class ScriptSession:
    """The command's options, and the jobs that the script has run.

    Args:
        options: of the jobs.
        workers: number of workers; None: the script decides.
        overrides: as ``--set`` takes them.
    """

    def __init__(self, options: JobOptions, workers: int | None, overrides: tuple[str, ...]) -> None:
        self.workers = workers
        self.overrides = overrides
        self.jobs: list[FinishedJob] = []
        """Those that have ended well."""
        self._options = options
        self._num_begun = 0

    def begin_job(self, run_dir: Path | None, resume: bool) -> JobOptions:
        """The options of the script's next job.

        Args:
            run_dir, resume: as the script has them.
        Raises:
            UsageError: the command's options are for one job, and the script runs another one.
        """
        self._num_begun += 1
        given = self._options
        for option, is_set in (
            ("--run-dir", given.run_dir is not None),
            ("--resume", given.resume),
            ("--overwrite", given.overwrite),
            ("--json", given.as_json),
        ):
            if is_set and self._num_begun > 1:
                raise UsageError(
                    f"the script trains a second time, and {option} is for one training: leave it out, and give "
                    "run_dir to each Trainer"
                )
        return given._replace(run_dir=given.run_dir or run_dir, resume=given.resume or (resume and not given.overwrite))

    @property
    def has_begun(self) -> bool:
        """Whether the script has begun to train."""
        return self._num_begun > 0


_NO_COMMAND = ScriptSession(JobOptions(), None, ())
_current: ScriptSession | None = None


def current_session() -> ScriptSession:
    """The session of the command that runs this process's script; one without options where there is none."""
    return _NO_COMMAND if _current is None else _current


@contextlib.contextmanager
def active(session: ScriptSession) -> Iterator[ScriptSession]:
    """While inside, the script's trainers get their options from this session."""
    global _current
    before, _current = _current, session
    try:
        yield session
    finally:
        _current = before
