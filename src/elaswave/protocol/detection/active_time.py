"""Time in which the process that watches others is awake itself. No IO, no clocks.

A process that waits may itself be stopped, or not be scheduled: then nothing has been seen of the others for a long
time, and that says nothing about them. So a longer pause between two looks counts as a short one.
"""

TICK_S = 0.125
"""As how much a pause counts in which this process was not scheduled. Whoever judges others looks this often."""
ASLEEP_S = 0.5
"""A longer pause between two looks means that this process was not scheduled."""


class ActiveTime:
    """Seconds for which this process has been awake since it began to watch; to be asked often.

    Args:
        began_s: monotonic time of the beginning; None: the time of the first look.
    """

    __slots__ = ("_looked_s", "_overslept", "_passed_s")

    def __init__(self, began_s: float | None = None) -> None:
        self._looked_s = began_s
        self._passed_s = 0.0
        self._overslept = False

    def passed_s(self, now_s: float) -> float:
        """Looks at the clock, and returns the seconds since the beginning.

        Args:
            now_s: monotonic time; an earlier one than at the look before counts as the same.
        """
        if self._looked_s is None:
            self._looked_s = now_s
        elif now_s > self._looked_s:
            pause_s, self._looked_s = now_s - self._looked_s, now_s
            if pause_s > ASLEEP_S:
                self._overslept = True
                pause_s = TICK_S
            self._passed_s += pause_s
        return self._passed_s

    @property
    def seen_s(self) -> float:
        """What `passed_s` returned last."""
        return self._passed_s

    def take_overslept(self) -> bool:
        """Tells whether there was a longer pause since this was called last: what came in it may not have been read
        yet."""
        overslept, self._overslept = self._overslept, False
        return overslept
