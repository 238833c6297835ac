"""How long a job of three hosts is without a coordinator: its process is killed, its host is lost, its host is lost
together with the leader of etcd.

    python benchmarks/new_coordinator.py [--rounds 5] [--kinds process host leader] [--json]

Real agents and workers, and three members of etcd, as processes of this machine. Two of the hosts are candidates, and
the third one's workers hold copies of all state. From the kill until all members that are left have found the new
coordinator, and what was lost is decided; each kind in each round, in turns. Needs `etcd` (Debian: etcd-server).
"""

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import exit_on_sigterm, machine, print_header

sys.path.insert(0, str(Path(__file__).parents[1]))  # hosts and members are those of the tests

from tests.agents import AgentProcess, Agents, free_port
from tests.etcd_processes import ETCD, Member, cluster
from tests.integration.jobs import SMALL

from elaswave.observability.processes import read_processes

TARGETS_S = {"process": 0.5, "host": 3.0, "leader": 7.0}
"""Medians."""
SETTINGS = {
    **SMALL,
    "layout.widths": "[3]",
    "elastic.num_followers": 2,
    "control.hosts": 3,
    "optimizer.schedule": "constant",
    "run.steps": 1_000_000,
}
STEPS_BEFORE = 20
LOOK_S = 0.005


class Round(NamedTuple):
    """One loss of a coordinator."""

    kind: str
    seconds: float
    """Until there is another one."""
    steps: int
    """That were committed meanwhile."""


def main() -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=TARGETS_S, default=list(TARGETS_S))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    exit_on_sigterm()
    if ETCD is None:
        parser.error("no etcd here: install a server that is called etcd (Debian: etcd-server)")
    where = machine()
    if not options.json:
        print_header(where)
    rounds = []
    for number in range(options.rounds):
        for kind in options.kinds:
            rounds.append(measure(kind))
            if not options.json:
                print(f"round {number + 1}, {kind:8} {rounds[-1].seconds:7.2f} s, {rounds[-1].steps} steps meanwhile")
    rows = [summary(kind, [each for each in rounds if each.kind == kind]) for kind in options.kinds]
    if options.json:
        print(json.dumps({"machine": where, "rows": rows, "rounds": [each._asdict() for each in rounds]}))
    else:
        for row in rows:
            print(
                f"{row['kind']:8} median {row['median_s']:.2f}, longest {row['max_s']:.2f}; asked {row['target_s']:g}"
            )
    return 0 if all(row["median_s"] <= row["target_s"] for row in rows) else 1


def summary(kind: str, rounds: list[Round]) -> dict[str, Any]:
    """Of the rounds of one kind."""
    seconds = [each.seconds for each in rounds]
    return {
        "kind": kind,
        "median_s": statistics.median(seconds),
        "max_s": max(seconds),
        "target_s": TARGETS_S[kind],
        "steps": [each.steps for each in rounds],
    }


def measure(kind: str) -> Round:
    """One job, whose coordinator is lost once."""
    candidates = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with cluster(3) as members, tempfile.TemporaryDirectory(prefix="elaswave-bench-") as folder:
        store = "etcd://" + ",".join(member.endpoint for member in members)
        settings = {**SETTINGS, "control.store": store}
        with Agents(Path(folder), settings, ",".join(candidates)) as agents:
            founder = agents.start("a", creates_job=True)
            agents.wait_for(lambda: (agents.run_dir / "config.toml").exists(), "the creator")
            others = [agents.start(node) for node in ("b", "c")]
            agents.wait_for_step(STEPS_BEFORE)
            strikes = strikes_of(kind, agents, founder, members)
            steps, begun_s = last_step(agents), time.monotonic()
            for strike in strikes:
                strike()
            wait_for(agents, kind != "process")
            took = Round(kind, time.monotonic() - begun_s, last_step(agents) - steps)
            for agent in others if kind != "process" else (founder, *others):
                agent.signal(signal.SIGKILL)
            return took


def strikes_of(kind: str, agents: Agents, founder: AgentProcess, members: list[Member]) -> list[Callable[[], object]]:
    """What is done, all in one moment."""
    if kind == "process":
        (coordinator,) = (each.pid for each in read_processes(agents.run_dir) if each.role == "coordinator")
        return [lambda: os.kill(coordinator, signal.SIGKILL)]
    lost: list[Callable[[], object]] = [lambda: founder.signal(signal.SIGKILL)]
    if kind == "leader":
        lost.append(leader_of(members).process.kill)
    return lost


def leader_of(members: list[Member]) -> Member:
    """The member that leads the cluster."""
    for member in members:
        url = f"http://{member.endpoint}/v3/maintenance/status"
        with urllib.request.urlopen(urllib.request.Request(url, data=b"{}"), timeout=5.0) as answer:
            status = json.load(answer)
        if status["leader"] == status["header"]["member_id"]:
            return member
    raise AssertionError("etcd has no leader")


def last_step(agents: Agents) -> int:
    """The newest step that is published."""
    return max((event["step"] for event in agents.events("step")), default=0)


def wait_for(agents: Agents, has_loss: bool) -> None:
    """Waits until a new coordinator tells that it has found all members, and what became of those that were lost."""
    deadline_s = time.monotonic() + 180.0
    while time.monotonic() < deadline_s:
        kinds = {event["recovery"]["kind"] for event in agents.events("recovery")}
        if "coordinator" in kinds and ("lost" in kinds or not has_loss):
            return
        time.sleep(LOOK_S)
    raise AssertionError("there is no new coordinator after 180 s")


if __name__ == "__main__":
    sys.exit(main())
