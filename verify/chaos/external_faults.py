"""Carries out strikes from outside on a running job: watches its log, finds its processes, sends signals."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from elaswave.observability.processes import RunProcess, lives, read_processes, signal_process
from elaswave.observability.run_folder import EVENTS_FILE
from elaswave.untrusted import decode_json, open_binary
from verify.chaos.outside import COORDINATOR, Strike, Struck
from verify.chaos.weather import Sky

_TURN_S = 0.002
"""Between two looks at the log."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "notify": signal.SIGTERM}


class _Line(msgspec.Struct):
    """What of a line of the log is needed."""

    kind: str
    step: int = 0


class ExternalFaults:
    """Strikes a job while it runs; to be called again and again (`verify.chaos.trial.Meanwhile`).

    Args:
        run_dir: of the job; need not exist yet.
        strikes: to be carried out, each when its moment has come and its victims are there.
        sky: of the job's weather; None: it is fair.
    """

    def __init__(self, run_dir: Path, strikes: Sequence[Strike], sky: Sky | None = None) -> None:
        self._sky = sky
        self.struck: list[Struck] = []
        """What has hit, in order."""
        self.seen: list[RunProcess] = []
        """All processes that the run has named."""
        self._run_dir = run_dir
        self._begin_s = time.monotonic()
        self._waiting = list(strikes)
        self._due: list[tuple[float, Strike]] = []
        """Those whose moment has come, and when they strike."""
        self._resume: list[tuple[float, RunProcess]] = []
        """Stopped processes, and when they go on."""
        self._step = 0
        self._offset = 0

    def __call__(self) -> float:
        """Does what is due; returns the seconds until it wants to be called again."""
        for process in read_processes(self._run_dir):
            if process not in self.seen:
                self.seen.append(process)
        self._read_log()
        if self._sky is not None:
            self._sky.turn(self._step, [process for process in self.seen if lives(process)])
        now_s = time.monotonic()
        for strike in list(self._waiting):
            if self.seen if strike.moment == "start" else self._step >= strike.step:
                self._waiting.remove(strike)
                self._due.append((now_s + strike.delay_ms / 1000, strike))
        # One whose victim is not there yet, or no more, is tried again at the next look.
        self._due = [each for each in self._due if each[0] > now_s or not self._strike(each[1], now_s)]
        for at_s, process in self._resume:
            if at_s <= now_s:
                signal_process(process, signal.SIGCONT)
        self._resume = [each for each in self._resume if each[0] > now_s]
        return _TURN_S

    @property
    def left(self) -> list[str]:
        """Processes of the run that still live."""
        return [f"{process.role} {process.id} (process {process.pid})" for process in self.seen if lives(process)]

    def _read_log(self) -> None:
        try:
            with open_binary(self._run_dir / EVENTS_FILE) as log:
                log.seek(self._offset)
                content = log.read()
        except FileNotFoundError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if b'"kind":"step"' in line:
                self._step = max(self._step, decode_json(line, _Line).step)

    def _strike(self, strike: Strike, now_s: float) -> bool:
        """Strikes all victims that are there; whether there was any."""
        there = {self._name(process): process for process in read_processes(self._run_dir)}
        victims = [there[victim] for victim in strike.victims if victim in there]
        hit = [victim for victim in victims if signal_process(victim, _SIGNALS[strike.action])]
        for victim in hit:
            name = self._name(victim)
            self.struck.append(Struck(strike=str(strike), victim=name, after_s=now_s - self._begin_s))
            if strike.resume_ms is not None:
                self._resume.append((now_s + strike.resume_ms / 1000, victim))
        return bool(hit)

    @staticmethod
    def _name(process: RunProcess) -> str:
        if process.role == "worker":
            return str(process.id)
        return COORDINATOR if process.role == "coordinator" else process.role
