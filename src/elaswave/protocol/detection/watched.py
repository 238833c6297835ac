"""What a detector knows of one worker that has registered. No IO, no clocks."""

import math

from elaswave.protocol.detection.starvation import Starvation
from elaswave.protocol.step.activity import COMPARE, STARTING, WRITE, WorkerActivity, action_kind

SPARED_MAX_S = 60.0
"""Of a worker that has been silent for longer no silence of all is an excuse any more."""
BESIDE_STEPS = (COMPARE, "evaluate", "checkpoint", WRITE, "end")
"""Labels under which no committed step shows that a worker lives; disks and digests then compete with heartbeats."""
GAP_HALF_LIFE_S = 300.0
_NEWS_S = 10.0
"""What is seen rarely fades slowly: between two values never by more than this time's worth."""


class LongestLately:
    """The largest of recent values; an old one fades by half in each half-life.

    Args:
        half_life_s: how long that is.
    """

    def __init__(self, half_life_s: float) -> None:
        self.value_s = 0.0
        self.count = 0
        self._half_life_s = half_life_s
        self._added_s = 0.0

    def add(self, value_s: float, now_s: float) -> None:
        """One more value has been seen."""
        if self.count:
            self.value_s *= 0.5 ** (min(now_s - self._added_s, _NEWS_S) / self._half_life_s)
        self._added_s = now_s
        self.value_s = max(self.value_s, value_s)
        self.count += 1


class WatchedWorker:
    """What is known of one worker.

    Args:
        worker: its id.
        now_s: when it is heard first, as of all methods by the detector's clock.
        is_new: whether it was awaited before.
    """

    __slots__ = (
        "_patience_s",
        "alive_s",
        "back_s",
        "connected",
        "counted_s",
        "entered_s",
        "gaps",
        "last_heartbeat_s",
        "is_fresh",
        "is_new",
        "is_spared",
        "activity",
        "starvation",
        "worker",
    )

    def __init__(self, worker: int, now_s: float, *, is_new: bool) -> None:
        self.worker = worker
        self.is_new = is_new
        """Whether it was awaited before: until its first heartbeat it is about to start."""
        self.alive_s = now_s
        """Time of the newest sign of life."""
        self.last_heartbeat_s = now_s
        """Time of the newest heartbeat."""
        self.starvation = Starvation(now_s)
        """What was seen of its process since then."""
        self.counted_s = now_s
        """From when on its silence is held against it."""
        self.is_spared = False
        """Whether that is because all were silent together, and it has not been heard since."""
        self._patience_s = 0.0
        """The least bound on that."""
        self.back_s = -math.inf
        """When it was heard again that had been spared."""
        self.connected = True
        self.is_fresh = True
        """The next heartbeat is the first one of its connection: the time before it is no gap."""
        self.gaps = LongestLately(GAP_HALF_LIFE_S)
        self.activity: WorkerActivity | None = None
        self.entered_s = now_s
        """When it entered this position, at the earliest."""

    def lives(self, now_s: float) -> None:
        """There is a sign of life."""
        if self.is_spared:
            self.back_s = now_s
        self.alive_s = self.counted_s = now_s
        self.is_spared, self._patience_s = False, 0.0
        self.starvation.ends(now_s)

    def spare(self, now_s: float, sent_again_s: float) -> None:
        """Others are heard again that had been silent together with it: it has a whole bound from now on.

        Args:
            now_s: the time.
            sent_again_s: within which time its kernel sends again what was held back, at the latest.
        """
        silence_s = now_s - self.alive_s
        if silence_s <= SPARED_MAX_S:
            self.is_spared, self.counted_s = True, now_s
            self._patience_s = min(silence_s, sent_again_s)
            self.starvation.ends(now_s)

    def allowed_s(self, bound_s: float) -> float:
        """Computes how long that may last, where others would have this bound."""
        return max(bound_s, self._patience_s)

    @property
    def beside_steps(self) -> bool:
        """It evaluates, writes a checkpoint or is done: no committed step will show that it lives."""
        return self.activity is not None and action_kind(self.activity.label) in BESIDE_STEPS

    @property
    def computing(self) -> bool:
        """Whether it has said so."""
        return self.activity is not None and self.activity.computing

    @property
    def starting(self) -> bool:
        """Whether it has not begun its first step."""
        return self.is_new if self.activity is None else self.activity.label in STARTING
