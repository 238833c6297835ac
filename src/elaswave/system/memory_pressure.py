"""Whom the kernel kills when memory is short: a worker, which the job can do without, never who holds it together.

By itself the kernel chooses the largest process, and that is often the launcher, whose end ends the job.
"""

import contextlib
from pathlib import Path

WORKER_SCORE = 500
"""Added to a worker's score, in thousandths of the machine's memory; the kernel kills the process with the highest."""
_FILE = Path("/proc/self/oom_score_adj")


def offer_to_kernel() -> None:
    """Makes this process one to be killed before others. It needs no privilege to raise one's own score, and one that
    was inherited and is higher stays; where there is no such file, the kernel chooses as it did."""
    with contextlib.suppress(OSError):
        if int(_FILE.read_text()) < WORKER_SCORE:
            _FILE.write_text(str(WORKER_SCORE))
