"""The processes of a run: `processes.json` in its folder, and what the kernel says of one in ``/proc``.

The file names the processes that live, so that a person or a tool can find the one that is meant. A process is named by
its id and its start time together: the kernel gives an id to another process once its owner has ended.

`ProcessorWaits` is how long a process could run while its host had no processor for it. Linux counts that for each
thread, in ``/proc/PID/task/TID/schedstat``: nanoseconds on a processor, nanoseconds in wait of one, turns. A wait is
added when it ends; before that it shows as a thread that is runnable (R) and whose counts do not change. A stopped (T),
sleeping (S) or blocked (D) thread waits for something else. Workers look at themselves with every heartbeat of an
action, so the files are read by the plainest calls: with `pathlib` a look took three times as long, and most of a
heartbeat went into it.

`MappedFiles` names files that processes have mapped into memory and that have become shorter since. A process that
reads a page of a mapping behind the end of its file is killed by SIGBUS, wherever it stands, and has no chance to say
which file it was. Whoever reads there next dies as well. So who sees such a death looks which mappings reach behind the
end of their file: in ``/proc/PID/maps`` of those that live, and in what was seen of all a while ago, since the one that
died may have been the only one.
"""

import contextlib
import mmap
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from elaswave.untrusted import read_json

PROCESSES_FILE = "processes.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/time"
FIRST_LOOK_S = 1.0
LAST_LOOK_S = 30.0
"""Between two looks, which become rarer: what a job maps it maps at its beginning."""
Role = Literal["launcher", "forkserver", "template", "coordinator", "candidate", "worker", "loader", "committer"]


class RunProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of a run."""

    role: Role
    id: int
    """Of a worker, or of its loaders, the worker's id; of coordinators their number, from 1; else 0."""
    pid: int
    start_ticks: int
    """When it was started, in clock ticks since the machine's start: field 22 of ``/proc/PID/stat``."""


class ProcessTable(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `processes.json`."""

    processes: list[RunProcess]


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernel says of a process."""

    state: str
    """One letter: R, S, D, T (stopped), t (traced), Z (ended, but not reaped)."""
    parent: int
    cpu_s: float
    """Processor time that it has used, in user and system mode, as fine as the clock ticks (10 ms)."""
    ended_cpu_s: float = 0.0
    """That of its children that have ended."""
    start_ticks: int

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, for as long as nobody lets it go on. One that is traced is not: it stands at
        each call that is traced for an instant, or under the eyes of a person with a debugger."""
        return self.state == "T"


def facts_of(pid: int) -> ProcessFacts | None:
    """Reads what the kernel says of a process; None if there is none with this id, or no ``/proc``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # its name may hold anything, and comes first
    return ProcessFacts(
        state=fields[0],
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        ended_cpu_s=(int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK"),
        start_ticks=int(fields[19]),
    )


def children_of(pid: int) -> list[int]:
    """Lists the processes whose parent a process is; none where there is no ``/proc``."""
    try:
        found = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []
    return [each for each in found if (facts := facts_of(each)) is not None and facts.parent == pid]


def family_cpu_s(pid: int) -> float:
    """Computes the processor time that a process and all that it has started have used, such as compilers and the
    processes of a pool: it grows while any of them computes. The result is 0 where there is no process, or no
    ``/proc``."""
    total_s, todo = 0.0, [pid]
    while todo:
        each = todo.pop()
        facts = facts_of(each)
        if facts is not None:
            total_s += facts.cpu_s + facts.ended_cpu_s
            todo += _children_at_once(each)
    return total_s


def _children_at_once(pid: int) -> list[int]:
    """Does the same as `children_of`, by what the kernel keeps: a look at all processes of a machine takes too long."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        return [int(child) for thread in threads for child in _contents(f"/proc/{pid}/task/{thread}/children").split()]
    except OSError:
        return []


def _contents(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""  # the thread has just ended, or the kernel does not tell


def process_entry(role: Role, number: int, pid: int) -> RunProcess:
    """Makes the entry of a process that lives now."""
    facts = facts_of(pid)
    return RunProcess(role=role, id=number, pid=pid, start_ticks=0 if facts is None else facts.start_ticks)


def processes_file(suffix: str) -> str:
    """Returns the name of the file in the folder of a run of several hosts, of which each has its own.

    Args:
        suffix: of all hosts but the first.
    """
    stem, _, kind = PROCESSES_FILE.partition(".")
    return f"{stem}{suffix}.{kind}"


def write_processes(run_dir: Path, processes: Sequence[RunProcess], suffix: str = "") -> None:
    """Replaces `processes.json` at once. Where that cannot be done (a full disk), the old one goes: a run can do
    without the file, but the file must not name who is gone.

    Args:
        run_dir: the run's folder.
        processes: those that live.
        suffix: as of `processes_file`.
    """
    path = run_dir / processes_file(suffix)
    temporary = run_dir / f".{path.name}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(msgspec.json.encode(ProcessTable(processes=list(processes))) + b"\n")
        os.replace(temporary, path)
    except OSError:
        for file in (temporary, path):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def remove_processes(run_dir: Path, suffix: str = "") -> None:
    """Removes `processes.json`: the run has no processes any more, or this host has none."""
    with contextlib.suppress(OSError):
        (run_dir / processes_file(suffix)).unlink(missing_ok=True)


def read_processes(run_dir: Path, suffix: str = "") -> list[RunProcess]:
    """Reads the processes that `processes.json` names and that live; none if there is no such file."""
    try:
        table: ProcessTable = read_json(run_dir / processes_file(suffix), ProcessTable)
    except (OSError, ValueError):
        return []  # it is missing, or no run has written it
    return [process for process in table.processes if lives(process)]


def lives(process: RunProcess) -> bool:
    """Tells whether the very process lives that an entry names, not another one with its id."""
    facts = facts_of(process.pid)
    return facts is not None and facts.start_ticks == process.start_ticks and facts.state != "Z"


def signal_process(process: RunProcess, number: signal.Signals) -> bool:
    """Sends a signal to the very process that an entry names.

    Returns:
        Whether it was there.
    """
    try:
        pid_fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor holds on to one process; only after it is open does the look at the start time say which.
        if not lives(process):
            return False
        signal.pidfd_send_signal(pid_fd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(pid_fd)


class ProcessorWaits:
    """Looks at one process, again and again.

    Args:
        pid: its id.
        now_s: monotonic time of the first look, which this is.
    """

    def __init__(self, pid: int, now_s: float) -> None:
        self._folder = f"/proc/{pid}/task"
        self._looked_s = now_s
        self._counts = self._read()

    def look(self, now_s: float) -> float:
        """Takes another look.

        Args:
            now_s: monotonic time.
        Returns:
            Seconds since the look before in which the process has waited for a processor: those of the thread that
            waited longest, since the others may depend on it. 0 if the process has ended, or its kernel does not count.
        """
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        before, self._counts = self._counts, self._read()
        longest_s = 0.0
        for thread, counts in self._counts.items():
            known = before.get(thread)
            if known is None:
                continue  # it has begun since
            if counts != known:
                longest_s = max(longest_s, (counts[1] - known[1]) * 1e-9)
            elif self._is_runnable(thread):
                longest_s = passed_s
        return min(longest_s, passed_s)  # a wait that has ended may have begun before that look, and have been counted

    def _read(self) -> dict[str, tuple[int, ...]]:
        try:
            threads = os.listdir(self._folder)
        except OSError:
            return {}  # it has ended
        found = {thread: tuple(map(int, self._contents(thread, "schedstat").split())) for thread in threads}
        return {thread: counts for thread, counts in found.items() if len(counts) == 3}

    def _is_runnable(self, thread: str) -> bool:
        return self._contents(thread, "stat").rpartition(b")")[2].split()[:1] == [b"R"]

    def _contents(self, thread: str, name: str) -> bytes:
        """Reads the contents of a file of one thread; nothing if the thread has just ended, or the kernel does not
        count."""
        try:
            file = os.open(f"{self._folder}/{thread}/{name}", os.O_RDONLY)
        except OSError:
            return b""
        try:
            return os.read(file, 4096)
        except OSError:
            return b""
        finally:
            os.close(file)


def clock_here() -> str:
    """Returns a name of this process's monotonic clock. Two processes with the same one can compare their readings."""
    try:
        return f"{_BOOT.read_text().strip()}/{os.stat(_NAMESPACE).st_ino}"
    except OSError:
        return f"of process {os.getpid()} only"


class MappedFiles:
    """What the processes of one host's part of a job have mapped.

    Args:
        now_s: monotonic time.
    """

    def __init__(self, now_s: float) -> None:
        self._ends: dict[str, int] = {}
        """Path -> up to where it was mapped, in bytes."""
        self._has_begun = False
        self._interval_s = FIRST_LOOK_S
        self._due_s = now_s + FIRST_LOOK_S

    def is_due(self, now_s: float) -> bool:
        """Tells whether it is time to look; says so once."""
        if now_s < self._due_s:
            return False
        self._interval_s = min(2 * self._interval_s, LAST_LOOK_S)
        self._due_s = now_s + self._interval_s
        return True

    def has_begun(self) -> None:
        """The first step has been made, and with it the first micro-batches: now it is time, whenever it was last."""
        if not self._has_begun:
            self._has_begun, self._due_s, self._interval_s = True, 0.0, FIRST_LOOK_S

    def look(self, pids: Iterable[int]) -> None:
        """Notes what these processes have mapped now."""
        for pid in pids:
            for path, end in _mapped_by(pid).items():
                self._ends[path] = max(end, self._ends.get(path, 0))

    def cut_short(self, pids: Iterable[int]) -> list[str]:
        """Finds the files that end before what is, or was, mapped of them: lists what is to be said of each.

        Others may be about to read there too, so what was seen before is tried first: it takes a hundredth of a look.
        """
        found = self._cut_short()
        if not found:
            self.look(pids)
            found = self._cut_short()
        return found

    def _cut_short(self) -> list[str]:
        found = []
        for path, end in sorted(self._ends.items()):
            try:
                size = os.stat(path).st_size
            except OSError:
                continue  # one that is gone is kept by its mappings as it was
            if end > -(-size // mmap.PAGESIZE) * mmap.PAGESIZE:
                found.append(f"{path}, of which {end} bytes are mapped into memory, has {size} now")
        return found


def _mapped_by(pid: int) -> dict[str, int]:
    """Maps each path to the place up to which a process has mapped it for reading, as ``/proc/PID/maps`` has it."""
    ends: dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/maps", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return {}  # it has ended
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or not fields[5].startswith(b"/") or not fields[1].startswith(b"r"):
            continue
        begin, _, stop = fields[0].partition(b"-")
        path = os.fsdecode(fields[5])
        end = int(fields[2], 16) + int(stop, 16) - int(begin, 16)
        if not path.endswith(" (deleted)") and not path.startswith("/dev/"):
            ends[path] = max(end, ends.get(path, 0))
    return ends
