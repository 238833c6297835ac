"""What a long calculation shows on standard error: how far it is, and how long it will take.

On a terminal one line is written anew; elsewhere a line comes now and then. What is short shows nothing.
"""

import sys
import time
from collections.abc import Callable
from typing import TextIO

from elaswave.visible import visible

_TERMINAL_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 5.0
_QUIET_S = 2.0


class Waiting:
    """How far one calculation is.

    Args:
        what: what is done, in a few words.
        stream: where to; standard error if None.
        clock: monotonic seconds.
    """

    def __init__(self, what: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._stream = stream or sys.stderr
        self._clock = clock
        self._began_s = clock()
        self._next_s = self._began_s + _QUIET_S
        self._is_terminal = self._stream.isatty()
        self._shown = False

    def at(self, done: float, detail: str = "") -> None:
        """Shows how far it is, if it is time to; cheap enough for an inner loop.

        Args:
            done: share of the work that is done, 0 to 1.
            detail: what else there is to say.
        """
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (_TERMINAL_INTERVAL_S if self._is_terminal else _LINE_INTERVAL_S)
        self._shown = True
        left = f", about {_duration((now_s - self._began_s) * (1 - done) / done)} left" if done > 0 else ""
        text = visible(f"{self._what}: {100 * done:.3g} %{left}{', ' if detail else ''}{detail}")
        self._write(f"\r\033[K{text}" if self._is_terminal else f"{text}\n")

    def close(self) -> None:
        """Clears the line on a terminal."""
        if self._shown and self._is_terminal:
            self._write("\r\033[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _duration(seconds: float) -> str:
    for unit, size in (("years", 365 * 86400.0), ("days", 86400.0), ("hours", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
