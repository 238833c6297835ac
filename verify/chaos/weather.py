"""What befalls a whole job from outside, beside signals to single processes: its disk, its files, its limits, its time.

A case may have one such weather. It comes when a step is in the log, and may pass after some time:

    usr1        SIGUSR1 to the command, as a scheduler sends it: the job stops with a checkpoint, exit code 138
    truncate    the file of tokens, which workers have mapped, is cut short: the job ends with its name
    full        the run folder's file system has no room any more
    readonly    it cannot be written any more
    pids        no process of the job may start a process or a thread any more

After each the job may have its reference run's bits all the same, or the end that is told in `ENDS`. `full` and
`readonly` need a file system of their own, and `pids` a control group: where this process may not make them, the job
has none of it.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from elaswave.observability.processes import RunProcess, signal_process
from verify.chaos.cases import Draw, Ending

Kind = Literal["usr1", "truncate", "full", "readonly", "pids"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PERCENT = 40
"""How many cases have weather."""
ENDS: dict[Kind, tuple[int, str]] = {
    "usr1": (128 + signal.SIGUSR1, r"stopped (after step \d+|by SIGUSR1)"),
    "truncate": (1, r"data\S* was cut short|cut short while the job reads it: \S+/data/"),
    "full": (1, r"No space left on device|cannot be written|could not be written"),
    "readonly": (1, r"Read-only file system|cannot be written|could not be written"),
    "pids": (1, r"cannot be started|Resource temporarily unavailable"),
}
"""Exit code, and what the error must say, where a job does not end with the bits."""
_DISK_MB = 256
_GROUPS = (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
_FILLER = ".filler"


class Weather(NamedTuple):
    """One weather, such as ``full@8~1500ms``."""

    kind: Kind
    step: int
    """It comes when this step is in the log."""
    passes_ms: int | None
    """After how long it passes; None: it stays, or is one moment."""

    def __str__(self) -> str:
        return f"{self.kind}@{self.step}" + ("" if self.passes_ms is None else f"~{self.passes_ms}ms")


def parse_weather(text: str) -> Weather:
    """The inverse of ``str(weather)``.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"([a-z0-9]+)@(\d+)(?:~(\d+)ms)?", text)
    if found is None or found[1] not in KINDS:
        raise ValueError(f"{text!r} is no weather: write kind@step~passes, such as full@8~1500ms")
    return Weather(found[1], int(found[2]), None if found[3] is None else int(found[3]))


def draw_weather(seed: int, index: int, num_steps: int) -> str:
    """Draws what a case has; empty: fair weather.

    Args:
        seed: of the bench.
        index: of the case, from 0.
        num_steps: of the job.
    """
    draw = Draw(seed, "weather", index)
    if not draw.chance(PERCENT):
        return ""
    kind = draw.one_of(KINDS)
    passes_ms = draw.one_of((300, 1500, 4000, None)) if kind in ("full", "readonly", "pids") else None
    return str(Weather(kind, 1 + draw.below(num_steps - 2), passes_ms))


def is_expected(weather: Weather, ending: Ending) -> bool:
    """Whether a job on which this weather has come may end like that, other than with the bits."""
    code, words = ENDS[weather.kind]
    return ending.exit_code == code and ending.error is not None and re.search(words, ending.error) is not None


class Sky:
    """Makes the weather of one job.

    Args:
        run_dir: of the job, which has not begun.
        weather: what is to come; None: none is.
    """

    def __init__(self, run_dir: Path, weather: Weather | None) -> None:
        self.has_come = False
        """Whether it has."""
        self.is_there = False
        """Whether it has not passed."""
        self._run_dir = run_dir
        self._weather = weather
        self._passes_s = float("inf")
        self._group: Path | None = None
        self._is_mounted = False
        if weather is not None and weather.kind in ("full", "readonly"):
            run_dir.mkdir(parents=True)
            self._is_mounted = _mount("-t", "tmpfs", "-o", f"size={_DISK_MB}m", "elaswave", str(run_dir))

    def turn(self, step: int, processes: Sequence[RunProcess]) -> None:
        """Does what is due.

        Args:
            step: the newest in the log.
            processes: of the job.
        """
        weather, now_s = self._weather, time.monotonic()
        if weather is None:
            return
        if not self.has_come and processes and step >= weather.step:
            self.has_come = self.is_there = self._begin(weather.kind, processes)
            if not self.has_come:
                self._weather = None  # it cannot be made here
            elif weather.passes_ms is not None:
                self._passes_s = now_s + weather.passes_ms / 1000
        elif self.is_there and now_s >= self._passes_s:
            self.clear()

    def _begin(self, kind: Kind, processes: Sequence[RunProcess]) -> bool:
        if kind == "usr1":
            return any(signal_process(each, signal.SIGUSR1) for each in processes if each.role == "launcher")
        if kind == "truncate":
            files = [path for path in sorted((self._run_dir / "data").glob("*")) if path.is_file()]
            for path in files:
                os.truncate(path, 0)
            return bool(files)
        if kind == "pids":
            return self._limit(processes)
        if not self._is_mounted:
            return False
        if kind == "readonly":
            return _mount("-o", "remount,ro", str(self._run_dir))
        with contextlib.suppress(OSError), open(self._run_dir / _FILLER, "wb", buffering=0) as filler:
            while filler.write(bytes(1 << 16)):
                pass
        return True

    def _limit(self, processes: Sequence[RunProcess]) -> bool:
        """Puts the job's processes into a control group that has no room for another one."""
        for base in _GROUPS:
            group = base / f"elaswave-chaos-{os.getpid()}"
            try:
                group.mkdir()
                self._group = group
                for process in processes:
                    with contextlib.suppress(ProcessLookupError):
                        (group / "cgroup.procs").write_text(str(process.pid))
                (group / "pids.max").write_text((group / "pids.current").read_text())
                return True
            except OSError:
                with contextlib.suppress(OSError):
                    group.rmdir()
        self._group = None
        return False

    def clear(self) -> None:
        """It passes."""
        self.is_there = False
        if self._group is not None:
            (self._group / "pids.max").write_text("max")
        if self._is_mounted:
            _mount("-o", "remount,rw", str(self._run_dir))
            (self._run_dir / _FILLER).unlink(missing_ok=True)

    def close(self) -> None:
        """After the job: takes back what was made, and keeps what the job has left."""
        if self._group is not None:
            self.clear()
            with contextlib.suppress(OSError):
                self._group.rmdir()
        if self._is_mounted:
            self.clear()
            self._is_mounted = False
            kept = self._run_dir.with_name(self._run_dir.name + "-kept")
            shutil.copytree(self._run_dir, kept, symlinks=True)
            subprocess.run(["umount", "--lazy", str(self._run_dir)], check=True)
            self._run_dir.rmdir()
            kept.rename(self._run_dir)


def _mount(*arguments: str) -> bool:
    if os.geteuid() != 0:
        return False
    done = subprocess.run(["mount", *arguments], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    return done.returncode == 0
