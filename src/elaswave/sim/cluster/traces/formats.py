"""Which forms of traces there are, how each begins, and which published traces say nothing of machines that are lost.

Blank lines and lines that begin with # are skipped in all of them.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from elaswave.errors import DataError, UsageError
from elaswave.sim.cluster.failures import Scenario
from elaswave.sim.cluster.traces import acme, alibaba, events, philly, polls
from elaswave.sim.cluster.traces.history import TraceMachines

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
    "polls": TraceFormat(re.compile(r"\d{4}-\d\d-\d\d\s*,\s*\d\d:\d\d:\d\d\s*,"), polls.read_polls, polls.NEEDED),
    "philly": TraceFormat(
        re.compile(r"time,machine_?[iI]d,|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+,"), philly.read_philly, philly.NEEDED
    ),
    "alibaba-2017": TraceFormat(
        re.compile(r"\d+,\d+,(add|softerror|harderror)\b"), alibaba.read_alibaba, alibaba.NEEDED
    ),
    "events": TraceFormat(re.compile(r"[^,{[]*,\s*[a-z]*\s*,[^,]*$"), events.read_event_trace, events.NEEDED),
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
        re.compile(re.escape(acme.HEADER)),
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
