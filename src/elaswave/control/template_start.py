"""How an agent waits for its template: until workers can be forked, or what keeps it from that is known."""

import time
from collections.abc import Callable
from pathlib import Path

from elaswave.control.job_processes import TICK_S, JobProcesses
from elaswave.control.launcher_waits import how_it_stands_still
from elaswave.control.standstill import Standstill
from elaswave.control.template_messages import Prepared, Unprepared
from elaswave.errors import LaunchError, UsageError


def await_prepared(processes: JobProcesses, log: Path, turn: Callable[[], None]) -> Prepared:
    """Waits until the template has loaded torch and the model.

    Args:
        processes: of this agent; nothing else comes from them yet.
        log: the template's.
        turn: called again and again meanwhile.
    Returns:
        What the template has found.
    Raises:
        LaunchError: torch or the model cannot be loaded.
        UsageError: what is to be trained cannot be.
    """
    standstill = Standstill(time.monotonic())
    while True:
        processes.selector.select(TICK_S)
        for message in processes.hear_template():
            if isinstance(message, Prepared):
                return message
            assert isinstance(message, Unprepared), message
            if message.is_usage:
                raise UsageError(message.text)
            raise _unprepared(message.text, log)
        ended = processes.template_end()
        if ended is not None:
            raise _unprepared(f"it {ended}", log)
        still = how_it_stands_still(standstill, processes.template_facts(), time.monotonic())
        if still is not None:
            raise _unprepared(still, log)
        turn()


def _unprepared(text: str, log: Path) -> LaunchError:
    return LaunchError(
        f"the template process, from which workers are forked, cannot load torch and the model: {text}; see {log}"
    )
