"""Which forms of traces there are, how each begins, and which published traces say nothing of machines that are lost.

Blank lines and lines that begin with # are skipped in all of them.

Rates of failures from Acme's traces of jobs, which say that a node crashed, but not which, nor when it was back.

Hu et al., Characterization of Large Language Model Development in the Datacenter (NSDI 2024); InternLM/AcmeTrace,
README.md, section Job Trace: ``state`` is NODE_FAIL where a job "is terminated due to the node crash", ``gpu_time`` is
its GPU seconds. So the crashes seen by jobs over the GPU days of jobs are a rate, of whole nodes. It is a lower bound:
jobs that hardware ended in another way are FAILED, like those that their own code ended.

Alibaba's server_event.csv of 2017: lines of ``timestamp,machine,event,detail,CPUs,memory,disk``.

alibaba/clusterdata, cluster-trace-v2017/trace_201708.md, section Machine events. Timestamps are seconds, events are

- ``add``: the machine became available; all have one at time 0;
- ``harderror``: it became unavailable because hardware failed: here it is lost;
- ``softerror``: it became unavailable for a time because of software; nothing new is placed on it, what runs "may still
  function normally": here it is drained, as a machine is that one has been told to leave.

The trace has no event for a repair, so a machine stays away unless it is added again. The published file goes back in
time seven times, so lines are sorted by time; those of one second stay in order.

Traces of single machines that come and go: lines of ``milliseconds,add or remove,node``.

The form of the spot instances' traces of Bamboo (Thorpe et al., NSDI 2023; uclasystem/bamboo, traces/*.csv).

Poll logs: lines of ``date, time, count`` that say how many machines were there when someone asked.

The form of Bamboo's traces of Google Cloud (Thorpe et al., NSDI 2023; uclasystem/bamboo, traces/gcloud/*.txt). A log
says how many, not which, and nothing of what happened between two polls:

- Machines that went are drawn from those that were there, with equal chances. Those that come are new ones.
- A count that falls by k is one loss of k machines at the instant of the poll. If they went one after the other within
  the minute or two between polls, this is harder on a job than what happened. A machine that was replaced between two
  polls is not seen, which is kinder.
- Where polls overlapped, the file goes back in time by a minute or so (v100x1-east1c.txt does, 15 times). The later
  line holds: what earlier lines said of its time and of later ones is dropped.

Philly's logs of what each server did in every minute; where one says ``NA``, it was offline.

Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training Workloads (ATC 2019);
msr-fiddle/philly-traces, README.md, which says of cluster_gpu_util that "NA" indicates that the GPU, and of
cluster_cpu_util and cluster_mem_util that the server was offline at the time of measurement. Lines are of one of:

- ``time,machineId,gpu0_util,...,gpu7_util``: each GPU is a worker; one that is never online is not there at all;
- ``time,machine_id,cpu_util``;
- ``time,machine_id,mem_total,mem_free``.

Times are as ``2017-10-03 00:08:00 PDT``. Servers may follow each other or be mixed, and a server's days stand in any
order, as they do in the published log. A server without a line stays as it was: the log does not say that it is gone.
Nor does it say why a server was offline: maintenance counts as a loss. An empty value is ``NA`` too: copies of the log
that pandas has written have it so.
"""

import csv
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import isfinite

from elaswave.errors import DataError, UsageError
from elaswave.sim.cluster.failures import DAY_S, Rates, Scenario
from elaswave.sim.cluster.traces.history import History, Kind, TraceMachines, timestamp_s

COLUMNS = ("gpu_num", "state", "gpu_time")
HEADER = "job_id,user,node_num,"
"""How such a trace begins."""


def read_rates(lines: Iterable[str], *, name: str) -> Rates:
    """Reads how often jobs met a crash of a node.

    Args:
        lines: of the trace, the header first.
        name: of the trace, for messages.
    Raises:
        DataError: a column is missing, a number is none, or no job met a crash. Names the line.
    """
    rows = csv.DictReader(lines)
    if missing := [column for column in COLUMNS if column not in (rows.fieldnames or ())]:
        raise DataError(f"trace {name}, line 1 lacks the columns {', '.join(missing)}; needed is Acme's trace of jobs")
    crashes, gpu_s = 0, 0.0
    for row in rows:
        num_gpus = _number(row["gpu_num"], "gpu_num", name, rows.line_num)
        if num_gpus > 0:
            gpu_s += _number(row["gpu_time"], "gpu_time", name, rows.line_num)
            crashes += row["state"] == "NODE_FAIL"
    if not crashes or not gpu_s:
        raise DataError(f"trace {name} has {crashes} jobs that ended as NODE_FAIL in {gpu_s / DAY_S:,.0f} GPU days: no "
                        "rate can be told; state one")  # fmt: skip
    return Rates(
        name=name,
        losses_per_worker_day=crashes / (gpu_s / DAY_S),
        whole_nodes=True,
        source=f"trace {name}: {crashes:,} jobs ended by the crash of a node in {gpu_s / DAY_S:,.0f} GPU days; repair "
        "time: our assumption, not published",
    )


def _number(text: str | None, column: str, name: str, line: int) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise DataError(f"trace {name}, line {line} has the {column} {text!r}; needed is a number of at least 0")
    return value


NEEDED_ALIBABA = "seconds,machine,add or softerror or harderror,..."
GOES: dict[str, Kind] = {"harderror": "lost", "softerror": "drained"}
MOST_DIGITS_ALIBABA = 12


def read_alibaba(lines: Iterable[tuple[int, str]], layout: TraceMachines) -> Scenario:
    """Reads a trace.

    Args:
        lines: their numbers and texts, without blank lines and comments.
        layout: of the machines.
    Raises:
        DataError: a line that is not of the form, or no line. Names the line.
    """
    events: list[tuple[int, str, str]] = []
    for number, text in lines:
        fields = [field.strip() for field in text.split(",")]
        if len(fields) < 3:
            raise layout.fault(number, f"has {len(fields)} fields: {text[:60]!r}; needed are {NEEDED_ALIBABA}")
        time, machine, event = fields[:3]
        if not (time.isascii() and time.isdigit() and len(time) <= MOST_DIGITS_ALIBABA):
            raise layout.fault(number, f"has the time {time[:40]!r}; needed are seconds, a whole number of at least 0")
        if event not in GOES and event != "add":
            raise layout.fault(number, f"says {event[:40]!r}; needed is add, softerror or harderror")
        if not machine:
            raise layout.fault(number, "names no machine")
        events.append((int(time), machine, event))
    if not events:
        raise layout.empty(NEEDED_ALIBABA)
    events.sort(key=lambda each: each[0])
    history = History(layout)
    for at_s, machine, event in events:
        if event == "add" and machine not in history:
            history.come(float(at_s), machine)
        elif event != "add" and machine in history:
            history.go(float(at_s), machine, GOES[event])
        # A machine that is away may have a further error, and one that is there be added again: nothing changes.
    return history.scenario(float(events[-1][0]))


NEEDED_EVENTS = "milliseconds,add or remove,node"
MOST_DIGITS_EVENTS = 15
"""Of a time: a float holds it exactly."""


def read_event_trace(lines: Iterable[tuple[int, str]], layout: TraceMachines) -> Scenario:
    """Reads a trace.

    Args:
        lines: their numbers and texts, without blank lines and comments.
        layout: of the machines.
    Raises:
        DataError: a line that is not of the form, goes back in time, adds a node that is there or removes one that is
            not; or no line. Names the line.
    """
    history, now_ms = History(layout), -1
    for number, text in lines:
        fields = [field.strip() for field in text.split(",")]
        if len(fields) != 3:
            raise layout.fault(number, f"has {len(fields)} fields: {text!r}; needed are 3: {NEEDED_EVENTS}")
        time, kind, node = fields
        if not (time.isascii() and time.isdigit() and len(time) <= MOST_DIGITS_EVENTS):
            raise layout.fault(
                number,
                f"has the time {time[:40]!r}; needed are milliseconds, a whole number of at least 0 and at most "
                f"{MOST_DIGITS_EVENTS} digits",
            )
        if int(time) < now_ms:
            raise layout.fault(number, f"goes back in time, from {now_ms} to {int(time)} ms; sort the trace by time")
        now_ms = int(time)
        if kind not in ("add", "remove"):
            raise layout.fault(number, f"says {kind!r}; needed is add or remove")
        if not node:
            raise layout.fault(number, "names no node")
        if kind == "add" and node in history:
            raise layout.fault(number, f"adds {node}, which is there already")
        if kind == "remove" and node not in history:
            raise layout.fault(number, f"removes {node}, which is not there")
        if kind == "add":
            history.come(now_ms / 1000, node)
        else:
            history.go(now_ms / 1000, node)
    if now_ms < 0:
        raise layout.empty(NEEDED_EVENTS)
    return history.scenario(now_ms / 1000)


NEEDED_POLLS = "date, time, count, as 2021-12-11, 11:11:30, 55"
OVERLAP_S = 120.0
"""By how much polls may overlap; Bamboo's do by 60 s."""
MACHINES_MAX = 1_000_000


def read_polls(lines: Iterable[tuple[int, str]], layout: TraceMachines) -> Scenario:
    """Reads a poll log.

    Args:
        lines: their numbers and texts, without blank lines and comments.
        layout: of the machines; its seed draws which of them went.
    Raises:
        DataError: a line that is not of the form or goes back in time by more than polls overlap, or no line. Names
            the line.
    """
    polls: list[tuple[float, int]] = []
    for number, text in lines:
        at_s, count = _poll(number, text, layout)
        if polls and polls[-1][0] - at_s > OVERLAP_S:
            raise layout.fault(
                number,
                f"goes back in time, by {polls[-1][0] - at_s:.0f} s: {text!r}; sort the log by time (polls may overlap "
                f"by {OVERLAP_S:.0f} s)",
            )
        while polls and polls[-1][0] >= at_s:
            polls.pop()
        polls.append((at_s, count))
    if not polls:
        raise layout.empty(NEEDED_POLLS)
    return _live(polls, layout)


def _poll(number: int, text: str, layout: TraceMachines) -> tuple[float, int]:
    date, _, rest = text.partition(",")
    time, _, count = (part.strip() for part in rest.partition(","))
    at_s = timestamp_s(f"{date.strip()} {time}")
    if at_s is None:
        raise layout.fault(number, f"has no time: {text[:60]!r}; needed are {NEEDED_POLLS}")
    if not (count.isascii() and count.isdigit() and len(count) <= 7 and int(count) <= MACHINES_MAX):
        raise layout.fault(
            number, f"has the count {count[:40]!r}; needed is a whole number of at least 0 and at most {MACHINES_MAX:,}"
        )
    return at_s, int(count)


def _live(polls: list[tuple[float, int]], layout: TraceMachines) -> Scenario:
    history, rng, num_named = History(layout), random.Random(f"{layout.seed} polls"), 0
    history.begin(polls[0][0])
    for at_s, count in polls:
        there = history.machines
        for machine in rng.sample(there, max(0, len(there) - count)):
            history.go(at_s, machine)
        for _ in range(count - len(there)):
            history.come(at_s, f"machine {num_named}")
            num_named += 1
    return history.scenario(polls[-1][0])


NEEDED_PHILLY = "time,machine,utilization of the CPU (or memory, or of each GPU), NA while it is offline"
ZONES_S = {"PST": -8 * 3600, "PDT": -7 * 3600, "UTC": 0}
MOST_GPUS = 8
STRETCH_S = 600.0
"""Lines of a server that follow each other by at most so much are one stretch of time: none lies in between."""


def read_philly(lines: Iterable[tuple[int, str]], layout: TraceMachines) -> Scenario:
    """Reads a log.

    Args:
        lines: their numbers and texts, without blank lines and comments.
        layout: of the machines; where the log is of GPUs, one worker per machine means one per GPU.
    Raises:
        DataError: a line that is not of the form, several workers for each GPU, or no line. Names the line.
    """
    reader = _Reader(layout)
    for number, text in lines:
        if not text.startswith("time,"):
            reader.take(number, text)
    return reader.scenario()


class _Reader:
    """A log as far as it was read: stretches of time in which a server stayed as it was, not what every minute said."""

    def __init__(self, layout: TraceMachines) -> None:
        self._layout = layout
        self._num_fields: int | None = None
        self._times: dict[str, float] = {}
        """Seconds of each text of a time: many lines share one."""
        self._heard: dict[str, float] = {}
        """When each server last said something."""
        self._online: dict[tuple[str, int], bool] = {}
        self._stretches: list[tuple[float, bool, str, int]] = []
        """When each begins, whether online, server, and its GPU or 0."""
        self._ends = (float("inf"), 0.0)

    def take(self, number: int, text: str) -> None:
        fields = [field.strip() for field in text.split(",")]
        if len(fields) > 4 and fields[-1] == "":
            fields.pop()  # lines of GPUs end with a comma
        self._check_fields(number, text, len(fields))
        at_s, server = self._seconds(number, fields[0]), fields[1]
        if not server:
            raise self._layout.fault(number, "names no server")
        goes_on = 0 <= at_s - self._heard.get(server, float("-inf")) <= STRETCH_S
        self._heard[server] = at_s
        self._ends = min(self._ends[0], at_s), max(self._ends[1], at_s)
        per_gpu = len(fields) > 4
        for gpu, value in enumerate(fields[2:] if per_gpu else fields[2:3]):
            online = self._value(number, value)
            if not goes_on or self._online[server, gpu] != online:
                self._stretches.append((at_s, online, server, gpu))
                self._online[server, gpu] = online

    def scenario(self) -> Scenario:
        if not self._heard:
            raise self._layout.empty(NEEDED_PHILLY)
        history, per_gpu = History(self._layout), (self._num_fields or 0) > 4
        begin_s, end_s = self._ends
        history.begin(begin_s)
        for at_s, online, server, gpu in sorted(self._stretches):
            machine = f"{server} gpu{gpu}" if per_gpu else server
            if online and machine not in history:
                history.come(at_s, machine, node=server if per_gpu else None)
            elif not online and machine in history:
                history.go(at_s, machine)
        return history.scenario(end_s)

    def _check_fields(self, number: int, text: str, count: int) -> None:
        if not 3 <= count <= 2 + MOST_GPUS or count != (self._num_fields or count):
            as_before = f"{self._num_fields}, as before" if self._num_fields else f"3 to {2 + MOST_GPUS}"
            raise self._layout.fault(
                number, f"has {count} fields: {text[:60]!r}; needed are {as_before}: {NEEDED_PHILLY}"
            )
        if count > 4 and self._layout.workers_per_node != 1:
            raise self._layout.fault(number, "is of single GPUs, each of which is a worker; leave out workers per node")
        self._num_fields = count

    def _seconds(self, number: int, text: str) -> float:
        if text not in self._times:
            local, _, zone = text.rpartition(" ")
            local_s = timestamp_s(local)
            if local_s is None or zone not in ZONES_S:
                raise self._layout.fault(
                    number, f"has the time {text[:40]!r}; needed is one as 2017-10-03 00:08:00 PDT, or PST, or UTC"
                )
            self._times[text] = local_s - ZONES_S[zone]
        return self._times[text]

    def _value(self, number: int, text: str) -> bool:
        if text.strip('"') in ("NA", ""):
            return False
        try:
            float(text)
        except ValueError as error:
            raise self._layout.fault(number, f"says {text[:40]!r}; needed is a number, or NA while offline") from error
        return True


Lines = Iterable[tuple[int, str]]
SAMPLE = 80
"""Characters of a line that a message shows."""


@dataclass(frozen=True)
class TraceFormat:
    """One form."""

    begins: re.Pattern[str]
    """What the first line looks like."""
    read: Callable[[Lines, TraceMachines], Scenario]
    needed: str
    """Of a line, for people."""


FORMATS = {
    "polls": TraceFormat(re.compile(r"\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d:\d\d\s*,"), read_polls, NEEDED_POLLS),
    "philly": TraceFormat(
        re.compile(r"time,machine_?[iI]d,|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+,"), read_philly, NEEDED_PHILLY
    ),
    "alibaba-2017": TraceFormat(re.compile(r"\d+,\d+,(add|softerror|harderror)\b"), read_alibaba, NEEDED_ALIBABA),
    "events": TraceFormat(re.compile(r"[^,{[]*,\s*[a-z]*\s*,[^,]*$"), read_event_trace, NEEDED_EVENTS),
}
"""By name, in the order in which they are tried."""

_USE_PHILLY = "Philly's cluster_cpu_util says when each server was offline"
REFUSED = (
    (
        re.compile(r"[{[]"),
        "looks like Philly's cluster_job_log, which says when jobs began and ended, not why, nor which machine was "
        f"lost; {_USE_PHILLY}",
    ),
    (
        re.compile(r"machineId\s*,\s*number of GPUs|m\d+\s*,\s*\d+\s*,\s*\d+ ?GB"),
        f"looks like Philly's cluster_machine_list, in which nothing happens; {_USE_PHILLY}",
    ),
    (
        re.compile(re.escape(HEADER)),
        "looks like Acme's trace of jobs, which says that a node crashed, but not which, nor when it was back; give it "
        "as --rate FILE, which counts the crashes",
    ),
    (
        re.compile(r"m_\d+,"),
        "looks like Alibaba's trace of 2018, whose machine_meta does not say what a machine's status means, and whose "
        "other tables say nothing of machines; of Alibaba's, server_event.csv of 2017 tells of machines that fail",
    ),
    (
        re.compile(r"(job_name|inst_id|user|gpu_type|worker_name|machine),|[0-9a-f]{12,},"),
        "looks like Alibaba's trace of GPUs of 2020, which tells of jobs and their instances, not of machines that "
        "fail; of Alibaba's, server_event.csv of 2017 does",
    ),
    (
        re.compile(r"PAR1"),
        "is Parquet, as Alibaba's trace of GPUs of 2026 is: it lists the servers of every hour, and does not say that "
        "one was lost; of Alibaba's, server_event.csv of 2017 does",
    ),
)
"""How a published trace begins that cannot be simulated, and why."""


def read_trace(
    lines: Iterable[str],
    *,
    name: str = "trace",
    trace_format: str | None = None,
    workers_per_node: int = 1,
    nodes_per_rack: int = 1,
    seed: int = 0,
) -> Scenario:
    """Reads a trace.

    Args:
        lines: of the trace, first one first.
        name: of the trace, for messages.
        trace_format: one of `FORMATS`; None looks at the first line.
        workers_per_node: workers that come and go with each machine.
        nodes_per_rack: machines that share a rack, in the order in which they first come.
        seed: of what the trace leaves open (`polls`: which machines went).
    Raises:
        DataError: a trace of no known form, one that says nothing of machines, or one that is damaged. Names the line.
        UsageError: there is no such form.
        ValueError: fewer than one worker or node.
    """
    if trace_format is not None and trace_format not in FORMATS:
        raise UsageError(f"there is no format {trace_format!r} of traces; choose one of {', '.join(FORMATS)}")
    layout = TraceMachines(name, workers_per_node=workers_per_node, nodes_per_rack=nodes_per_rack, seed=seed)
    numbered = _numbered(lines)
    first = next(numbered, None)
    if first is None:
        raise layout.empty(FORMATS[trace_format].needed if trace_format else _known())
    found = trace_format or _recognise(*first, layout)
    return FORMATS[found].read(chain([first], numbered), layout)


def _numbered(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            yield number, text


def _recognise(number: int, text: str, layout: TraceMachines) -> str:
    for name, known in FORMATS.items():
        if known.begins.match(text):
            return name
    for begins, why in REFUSED:
        if begins.match(text):
            raise DataError(f"trace {layout.name} {why}")
    raise layout.fault(
        number,
        f"is of no known form: {text[:SAMPLE]!r}; known are lines of {_known()}; --trace-format NAME reads it as one "
        "of them and says what is wrong",
    )


def _known() -> str:
    return "; ".join(f"{known.needed} ({name})" for name, known in FORMATS.items())
