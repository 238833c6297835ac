"""Waits for other processes that are bounded by what is seen of them. No IO, no clocks.

A process that waits may itself be stopped, or not be scheduled: then nothing has been seen of the others for a long
time, and that says nothing about them. So a longer pause between two looks counts as a short one.
"""

ASLEEP_S = 0.5
"""A longer pause between two looks means that this process was not scheduled."""
_TICK_S = 0.125
"""As how much it counts."""


class AwakeTime:
    """Seconds for which something has been waited for while this process was awake; to be asked often.

    Args:
        now_s: monotonic time of the beginning.
    """

    def __init__(self, now_s: float) -> None:
        self._called_s = now_s
        self._passed_s = 0.0

    def passed_s(self, now_s: float) -> float:
        """Seconds since the beginning."""
        pause_s, self._called_s = now_s - self._called_s, now_s
        self._passed_s += _TICK_S if pause_s > ASLEEP_S else pause_s
        return self._passed_s


class Standstill:
    """For how long a process has used no processor time.

    Args:
        now_s: monotonic time of the beginning.
    """

    def __init__(self, now_s: float) -> None:
        self._awake = AwakeTime(now_s)
        self._cpu_s = -1.0
        self._moved_s = 0.0

    def look(self, cpu_s: float, now_s: float) -> float:
        """Takes note of what a process has used up to now.

        Args:
            cpu_s: its processor time.
            now_s: monotonic time.
        Returns:
            Seconds for which it has used none, of those in which this process was awake.
        """
        passed_s = self._awake.passed_s(now_s)
        if cpu_s != self._cpu_s:
            self._cpu_s, self._moved_s = cpu_s, passed_s
        return passed_s - self._moved_s
