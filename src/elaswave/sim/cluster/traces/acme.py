"""Rates of failures from Acme's traces of jobs, which say that a node crashed, but not which, nor when it was back.

Hu et al., Characterization of Large Language Model Development in the Datacenter (NSDI 2024); InternLM/AcmeTrace,
README.md, section Job Trace: ``state`` is NODE_FAIL where a job "is terminated due to the node crash", ``gpu_time`` is
its GPU seconds. So the crashes seen by jobs over the GPU days of jobs are a rate, of whole nodes. It is a lower bound:
jobs that hardware ended in another way are FAILED, like those that their own code ended.
"""

import csv
from collections.abc import Iterable
from math import isfinite

from elaswave.errors import DataError
from elaswave.sim.cluster.failures import DAY_S, Rates

COLUMNS = ("gpu_num", "state", "gpu_time")
HEADER = "job_id,user,node_num,"
"""How such a trace begins."""


def read_rates(lines: Iterable[str], *, name: str) -> Rates:
    """How often jobs met a crash of a node.

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
