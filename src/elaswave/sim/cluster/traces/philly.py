"""Philly's logs of what each server did in every minute; where one says ``NA``, it was offline.

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

from collections.abc import Iterable

from elaswave.sim.cluster.failures import Scenario
from elaswave.sim.cluster.traces.history import History, TraceMachines, timestamp_s

NEEDED = "time,machine,utilization of the CPU (or memory, or of each GPU), NA while it is offline"
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
            raise self._layout.empty(NEEDED)
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
            raise self._layout.fault(number, f"has {count} fields: {text[:60]!r}; needed are {as_before}: {NEEDED}")
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
