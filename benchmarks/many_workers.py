"""What a job of many workers costs its hosts: start-up, memory and messages of the control plane.

    python benchmarks/many_workers.py [--agents 8] [--workers 8] [--steps 20] [--json]

Real agents, each with a forkserver, and real workers, all as processes of this machine over loopback; the model is
tiny, so that the workers fit. Start-up is from the first agent's start until the first step is committed. Memory is the
proportional set size of each process: what several share is counted once. Messages and bytes are those that the
coordinator's process sends and receives on its control connections, counted in it, as they go into its sockets. Nearly
all processor time here is the workers'; so times say something only of machines with as few cores as this one.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # hosts are those of the tests

from harness import exit_on_sigterm, machine, print_header
from tests import agents as hosts_of_tests
from tests.agents import Agents, free_port

from elaswave.observability.processes import RunProcess, process_entry, read_processes

SETTINGS: dict[str, Any] = {
    "model.num_layers": 2,
    "model.hidden_size": 16,
    "model.num_heads": 2,
    "model.context_length": 8,
    "batch.microbatch_size": 1,
    "elastic.block_size": 1024,
    "elastic.rebalance": False,
    "elastic.respawn": False,
    "optimizer.schedule": "constant",
    "run.steps": 1_000_000,
}
COUNTS = "ELASWAVE_BENCH_COUNTS"
"""Variable with the file into which a coordinator's process writes what it has counted."""
START_S = 1800.0
"""Bound of every wait: 64 workers that share two cores take minutes to start."""
EVERY_S = 0.2
"""Between two writes of that file."""
ROLES = ("coordinator", "launcher", "template", "worker", "loader", "committer")
"""In the order of the table."""


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--workers", type=int, default=8, help="of each agent")
    parser.add_argument("--steps", type=int, default=20, help="over which messages are counted")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    options = parser.parse_args()
    exit_on_sigterm()
    where = machine()
    found = measure(options.agents, options.workers, options.steps)
    if options.json:
        print(json.dumps({"machine": where, **found}, indent=2))
    else:
        print_header(where)
        print_tables(found)
    return 0


def measure(num_agents: int, workers_each: int, num_steps: int) -> dict[str, Any]:
    """One job."""
    hosts_of_tests.WAIT_S = START_S
    num_workers = num_agents * workers_each
    settings = {
        **SETTINGS,
        "layout.widths": f"[{num_workers // 2}, {num_workers - num_workers // 2}]",
        "batch.num_microbatches": num_workers,
        "control.hosts": num_agents,
    }
    with tempfile.TemporaryDirectory(prefix="elaswave-bench-") as folder:
        counts = Path(folder) / "counts.json"
        os.environ[COUNTS] = str(counts)
        with Agents(Path(folder) / "job", settings, f"127.0.0.1:{free_port()}") as agents:
            command = (sys.executable, __file__, "agent")
            begun_s = time.monotonic()
            hosts = [agents.start("h0", creates_job=True, launcher=command)]
            agents.wait_for(lambda: (agents.run_dir / "config.toml").exists(), "the creator")
            hosts += [agents.start(f"h{number}", launcher=command) for number in range(1, num_agents)]
            agents.wait_for(lambda: len(agents.events("step")) >= 1, "the first step")
            started_s = time.monotonic() - begun_s
            agents.wait_for_step(5)
            first, before = len(agents.events("step")), read_counts(counts)
            agents.wait_for_step(first + num_steps)
            last, after = len(agents.events("step")), read_counts(counts)
            memory = memory_by_role(agents, [host.pid for host in hosts])
            for host in hosts:
                host.signal(signal.SIGKILL)
    seconds = after["at_s"] - before["at_s"]
    passed = {
        kind: {name: number - before[kind].get(name, 0) for name, number in after[kind].items()}
        for kind in ("received", "sent")
    }
    return {
        "agents": num_agents,
        "workers": num_workers,
        "start_up_s": started_s,
        "start_up_messages": {kind: sum(before[kind].values()) for kind in ("received", "sent")},
        "memory": memory,
        "steps": last - first,
        "seconds": seconds,
        "received": passed["received"],
        "sent": passed["sent"],
        "received_bytes": after["received_bytes"] - before["received_bytes"],
        "sent_bytes": after["sent_bytes"] - before["sent_bytes"],
    }


def read_counts(path: Path) -> dict[str, Any]:
    """What the coordinator's process has counted, and those before it, if it has followed others."""
    found = [json.loads(each.read_text()) for each in path.parent.glob(f"{path.stem}.*.json")]
    counts: dict[str, Any] = {name: sum(each[name] for each in found) for name in ("received_bytes", "sent_bytes")}
    for kind in ("received", "sent"):
        counts[kind] = sum((Counter(each[kind]) for each in found), Counter())
    return counts | {"at_s": max(each["at_s"] for each in found)}


def memory_by_role(agents: Agents, sessions: list[int]) -> dict[str, dict[str, float]]:
    """Role -> number of processes and MB of all of them."""
    found: dict[str, list[float]] = defaultdict(list)
    for process in processes_of(agents, sessions):
        found[process.role].append(pss_mb(process.pid))
    return {
        role: {"processes": len(found[role]), "mb": sum(found[role]), "mb_max": max(found[role])}
        for role in ROLES
        if role in found
    }


def processes_of(agents: Agents, launchers: list[int]) -> list[RunProcess]:
    """Of all hosts: those that their run folder names, and those that it does not."""
    named = [each for file in agents.run_dir.glob("processes*.json") for each in _named_in(agents.run_dir, file)]
    known = {each.pid for each in named}
    return [*named, *(process_entry("launcher", 0, pid) for pid in launchers if pid not in known)]


def _named_in(run_dir: Path, file: Path) -> list[RunProcess]:
    return read_processes(run_dir, file.stem.removeprefix("processes"))


def pss_mb(pid: int) -> float:
    """The proportional set size of a process; 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in text.splitlines() if line.startswith("Pss:"))


def print_tables(found: dict[str, Any]) -> None:
    """For people."""
    print(f"{found['workers']} workers on {found['agents']} agents: the first step after {found['start_up_s']:.1f} s")
    print(f"\n{'processes':<12} {'number':>6} {'MB':>8} {'largest':>8}")
    for role, each in found["memory"].items():
        print(f"{role:<12} {each['processes']:>6} {each['mb']:>8.0f} {each['mb_max']:>8.1f}")
    print(f"\nthe coordinator's control connections, {found['steps']} steps in {found['seconds']:.1f} s")
    print(f"{'':<26} {'number':>8} {'a second':>9} {'a step':>8}")
    for kind in ("received", "sent"):
        total = sum(found[kind].values())
        print(f"{kind:<26} {_row(total, found)} {found[kind + '_bytes'] / found['seconds'] / 1e3:>8.1f} KB/s")
        for name, number in sorted(found[kind].items(), key=lambda each: -each[1]):
            if number:
                print(f"  {name:<24} {_row(number, found)}")


def _row(number: int, found: dict[str, Any]) -> str:
    return f"{number:>8,} {number / found['seconds']:>9.1f} {number / max(1, found['steps']):>8.2f}"


# ------------------------------------------------------------------------------------------------- in the agents


def run_agent() -> int:
    """`elaswave agent`, in which a coordinator counts its messages."""
    from elaswave.channel import server, wire
    from elaswave.cli.main import main as command

    counted = _Counts(Path(os.environ[COUNTS]))
    arrived, write, take = server.ControlServer.arrived, server._Connection.write, wire.Session.take
    feed = wire.Session.feed

    def count_arrived(self: Any, connection: Any, frames: list[Any]) -> None:
        counted.add("received", [_name(frame.kind, frame.message) for frame in frames])
        arrived(self, connection, frames)

    def count_write(self: Any, kind: Any, number: int, payload: bytes) -> bool:
        counted.add("sent", [kind.name.lower()])
        return write(self, kind, number, payload)

    def count_take(self: Any) -> bytes:
        data = take(self)
        counted.bytes["sent_bytes"] += len(data)
        return data

    def count_feed(self: Any, data: bytes) -> list[Any]:
        counted.bytes["received_bytes"] += len(data)
        return feed(self, data)

    server.ControlServer.arrived = count_arrived  # type: ignore[method-assign]
    server._Connection.write = count_write  # type: ignore[method-assign]
    wire.Session.take = count_take  # type: ignore[method-assign]
    wire.Session.feed = count_feed  # type: ignore[method-assign]
    return int(command(["agent", *sys.argv[2:]]) or 0)


class _Counts:
    """What one process has counted; only a coordinator's counts anything that is written."""

    def __init__(self, path: Path) -> None:
        self.bytes: Counter[str] = Counter()
        self._path = path
        self._kinds: dict[str, Counter[str]] = {"received": Counter(), "sent": Counter()}
        self._written_s = 0.0

    def add(self, kind: str, names: list[str]) -> None:
        """Messages have come, or gone."""
        self._kinds[kind].update(names)
        now_s = time.monotonic()
        if now_s - self._written_s > EVERY_S:
            self._written_s = now_s
            path = self._path.with_suffix(f".{os.getpid()}.json")
            temporary = path.with_suffix(f".{threading.get_ident()}")
            temporary.write_text(
                json.dumps({"at_s": now_s, **self._kinds, "received_bytes": 0, "sent_bytes": 0} | self.bytes)
            )
            os.replace(temporary, path)


def _name(kind: Any, message: Any) -> str:
    return str(kind.name.lower()) if message is None else type(message).__name__


if __name__ == "__main__":
    sys.exit(run_agent() if sys.argv[1:2] == ["agent"] else main())
