"""A process that uses no processor time. No IO, no clocks."""

from elaswave.protocol.awake import AwakeTime


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
