"""Another user of this machine, who attacks: root makes the process one of `NOBODY`'s."""

import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

NOBODY = 65534
IS_ROOT = os.geteuid() == 0

needs_root = pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")


@contextmanager
def as_another(act: Callable[[], None]) -> Iterator[int]:
    """Runs a function in a process of another user, which lives until the block ends.

    Args:
        act: returns once the attack is prepared; what it raises fails the test.
    Yields:
        The process's id.
    """
    ready, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(ready)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            act()
            os.write(said, b"ready")
            signal.pause()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        os.close(said)
        assert os.read(ready, 16) == b"ready", "the attacker has failed; it has said why"
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
