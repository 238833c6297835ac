"""The end of a worker's process that is no member any more."""

import os
import subprocess
import sys

from elaswave.devices.opening import PLACE_TIMEOUT_S
from elaswave.launcher.forkserver.worker_main import FENCED_OFF_S
from elaswave.worker.process import FLUSH_TIMEOUT_S

STUCK = """
import sys, threading, time
from elaswave.launcher.forkserver.worker_main import end_later
end_later(3, "it has been computing 1F0 for 9 s", float(sys.argv[1]))
if sys.argv[2] == "stuck":
    threading.Event().wait()
"""


def run(after_s: float, how: str) -> tuple[int, str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STUCK, str(after_s), how]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    return result.returncode, result.stdout


def test_a_process_whose_main_thread_does_not_come_back_is_ended_by_another_one() -> None:
    status, said = run(0.5, "stuck")
    assert status == 1
    assert said == "worker 3 is no member any more, and has been stuck for 0.5 s: it has been computing 1F0 for 9 s\n"


def test_one_that_ends_by_itself_is_not_held_up() -> None:
    assert run(200.0, "well") == (0, "")


def test_last_messages_have_their_time_and_a_place_is_waited_for_longer() -> None:
    assert FLUSH_TIMEOUT_S < FENCED_OFF_S < PLACE_TIMEOUT_S
