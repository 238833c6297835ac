"""Silence that is nobody's fault: a process that could run and gets no processor is slow, and not hung.

On a machine with far more work than cores a healthy worker may wait for a processor longer than the bound on its
silence. The kernel of its host knows. So the coordinator asks the agent there while a worker has been silent for a
quarter of its bound, and the agent answers with durations: how much of the time since its look before the process could
have run, and did not (`elaswave.observability.processes`). That much of the silence does not count, nor is
anything learned from it. A process that is stopped, sleeps or waits for a disk does not wait for a processor, so that a
hang is noticed as soon as ever.

No IO, no clocks.
"""

EXCUSED_MAX_S = 20.0
"""No more than this of a silence is excused: who gets no processor for so long is of no use to the others."""
FRESH_LOOK_S = 0.5
"""How old the newest look may be when a worker is held for lost; agents look every 0.2 s."""
LOOK_GRACE_S = 1.0
"""For how long a newer one is waited for: an agent may have to wait for a processor too."""
LOOK_GAP_S = 5.0
"""As how much a longer time between two looks counts: agents look every second, and what lies between is not known."""


class Starvation:
    """For how long one worker's process has waited for a processor since the worker's newest sign of life.

    Args:
        now_s: time of that sign, as of all methods by the detector's clock.
    """

    __slots__ = ("_is_reported", "_looked_s", "_since_s", "_waited_s")

    def __init__(self, now_s: float) -> None:
        self.ends(now_s)

    def ends(self, now_s: float) -> None:
        """There is a sign of life."""
        self._since_s = now_s
        self._looked_s: float | None = None
        self._waited_s = 0.0
        self._is_reported = False

    def looked(self, waited_s: float, now_s: float) -> None:
        """Somebody has looked at the process.

        Args:
            waited_s: seconds of those since the look before in which it has waited for a processor.
            now_s: the time.
        """
        before_s = self._since_s if self._looked_s is None else self._looked_s
        self._looked_s = now_s
        self._waited_s += max(0.0, min(waited_s, now_s - before_s))

    @property
    def excused_s(self) -> float:
        """Seconds of the silence that do not count."""
        return min(self._waited_s, EXCUSED_MAX_S)

    @property
    def finding(self) -> str:
        """The part of a reason that tells of it."""
        return f"; for {self._waited_s:.2f} s of that time it waited for a processor" if self._waited_s else ""

    def condemns(self, silence_s: float, bound_s: float, now_s: float, can_look: bool) -> bool:
        """Tells whether a silence is one, by all that is known.

        Args:
            silence_s: how long it has lasted; longer than its bound.
            bound_s: how long it may last.
            now_s: the time.
            can_look: whether a newer look can be expected.
        """
        excess_s = silence_s - self.excused_s - bound_s
        if excess_s <= 0.0:
            return False
        is_fresh = self._looked_s is not None and now_s - self._looked_s <= FRESH_LOOK_S
        return is_fresh or not can_look or excess_s > LOOK_GRACE_S

    def take_excuse(self) -> str:
        """Explains for people why a silence above its bound is none; empty if that was said before or nothing was
        seen."""
        if self._is_reported or not self._waited_s:
            return ""
        self._is_reported = True
        return f"but for {self._waited_s:.2f} s of that time it waited for a processor, which does not count"


class Stillness:
    """For how long a process has been seen to use no processor time.

    Args:
        now_s: when it was started, as of all methods by one clock.
    """

    __slots__ = ("_cpu_s", "looked_s", "still_s")

    def __init__(self, now_s: float) -> None:
        self._cpu_s: float | None = None
        self.looked_s = now_s
        """When it was looked at last."""
        self.still_s = 0.0

    @property
    def was_seen(self) -> bool:
        """Whether anybody has looked at it."""
        return self._cpu_s is not None

    def looked(self, cpu_s: float, now_s: float) -> None:
        """Somebody has looked at the process.

        Args:
            cpu_s: processor time that it has used up to now.
            now_s: the time.
        """
        if cpu_s == self._cpu_s:
            self.still_s += min(now_s - self.looked_s, LOOK_GAP_S)
        else:
            self.still_s = 0.0
        self._cpu_s, self.looked_s = cpu_s, now_s
