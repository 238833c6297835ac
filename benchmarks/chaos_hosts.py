"""Chaos on hosts: jobs of four hosts, which are lost, cut off, told to leave and come back, beside a store that fails.

    python benchmarks/chaos_hosts.py [--minutes 15] [--jobs N] [--seed 1] [--only I] [--keep DIR] [--json]

Real agents on namespaces of the kernel, joined by a relay (`tests/hosts`); three members of etcd on three of the hosts,
all three of which are candidates for the coordinator. A job is a pure function of (seed, index): some rounds of one or
two faults each. After a round the network is healed, members of etcd are started again, and so is every agent that has
ended; the next round begins once all hosts take part again. At its end the job is stopped with a checkpoint, taken up
by one machine, and compared with an undisturbed run of as many steps, bit for bit. Needs root, `etcd`, and a checkout.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from harness import exit_on_sigterm, machine, print_header

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # hosts and members are those of the tests

from tests.agents import AgentProcess, Agents
from tests.etcd_processes import ETCD, cluster
from tests.hosts.world import Host, World, lacking
from tests.integration.jobs import SMALL, run_job

from elaswave.observability.processes import ProcessTable, facts_of, processes_file
from verify.chaos.cases import Draw

NUM_HOSTS = 4
NUM_MEMBERS = 3
"""Hosts that have a member of etcd, and are candidates."""
WORKERS_OF_A_HOST = 2
DELAY_S = 0.00065
"""Of each direction."""
SETTINGS: dict[str, Any] = {
    **SMALL,
    "layout.widths": "[4, 4]",
    "elastic.num_followers": NUM_HOSTS * WORKERS_OF_A_HOST - 1,
    "elastic.respawn": True,
    "elastic.max_failures_per_hour": 1000,
    "optimizer.schedule": "constant",
    "run.steps": 1_000_000,
    "run.checkpoint_every": 200,
    "net.trusted": True,
}
"""All hosts have copies of everything, so that no two losses can destroy a block."""
STEPS_BETWEEN = 20
"""Committed steps before a round, and after the last one: enough to make up for all copies."""
PATIENCE_S = 300.0
"""Bound of the time from a round to the next one, also on a machine that is busy with others."""
KINDS = (
    "kill-host",
    "kill-host",
    "kill-agent",
    "kill-coordinator",
    "cut",
    "cut",
    "cut-to",
    "cut-from",
    "part",
    "notice",
    "stop-host",
    "drop",
    "kill-member",
    "no-quorum",
)
LASTING_MS = (300, 1200, 3000, 7000)


class Fault(NamedTuple):
    """One thing that happens."""

    kind: str
    hosts: tuple[int, ...]
    """Indices of those concerned."""
    delay_ms: int
    """After the fault before it in its round."""
    lasts_ms: int
    """Of what ends by itself."""

    def __str__(self) -> str:
        where = "+".join(str(host + 1) for host in self.hosts)
        lasts = f"~{self.lasts_ms}ms" if self.lasts_ms else ""
        return f"{self.kind}:{where}{lasts}" if where else f"{self.kind}{lasts}"


def draw_rounds(seed: int, index: int) -> list[list[Fault]]:
    """The faults of a job, round by round. At least two hosts are not concerned by any fault of a round."""
    draw = Draw(seed, "hosts", index)
    return [list(_draw_round(draw)) for _ in range(2 + draw.below(3))]


def _draw_round(draw: Draw) -> Iterator[Fault]:
    left = list(range(NUM_HOSTS))
    for number in range(2 if draw.chance(40) else 1):
        kind = draw.one_of(KINDS)
        hosts: tuple[int, ...] = ()
        if kind in ("kill-member", "no-quorum"):
            down = 1 if kind == "kill-member" else 2
            first = draw.below(NUM_MEMBERS)
            hosts = tuple(sorted((first + at) % NUM_MEMBERS for at in range(down)))
        elif kind == "part":
            hosts = tuple(sorted((0, 1 + draw.below(NUM_HOSTS - 1))))
        elif kind != "kill-coordinator":
            hosts = (left.pop(draw.below(len(left))),)
        lasts = kind in ("cut", "cut-to", "cut-from", "part", "drop", "stop-host", "kill-member", "no-quorum")
        delay_ms = draw.one_of((0, 50, 400, 1500)) if number else 0
        yield Fault(kind, hosts, delay_ms, draw.one_of(LASTING_MS) if lasts else 0)


class Job:
    """One job on its hosts, while faults strike it; use `run`."""

    def __init__(self, folder: Path, seed: int, index: int) -> None:
        self._folder = folder
        self.rounds = draw_rounds(seed, index)
        self._agents: dict[int, AgentProcess] = {}
        """By the index of the host: the newest one of each."""
        self._killed: set[AgentProcess] = set()
        self.num_restarts = 0
        self._job = Agents(folder, SETTINGS, "")  # nothing runs yet

    def run(self) -> None:
        """Trains while the rounds strike, and compares.

        Raises:
            AssertionError: something is not as it must be.
        """
        with World(NUM_HOSTS, delay_s=DELAY_S) as self._world:
            places = [(host.address, _on(host)) for host in self._world.hosts[:NUM_MEMBERS]]
            with cluster(NUM_MEMBERS, places=places) as self._members:
                store = "etcd://" + ",".join(member.endpoint for member in self._members)
                candidates = ",".join(f"{host.address}:7077" for host in self._world.hosts[:NUM_MEMBERS])
                settings = {**SETTINGS, "control.hosts": NUM_HOSTS, "control.store": store}
                with Agents(self._folder, settings, candidates) as self._job:
                    for at in range(NUM_HOSTS):
                        self._start(at)
                    self._train_on("the job's beginning")
                    for faults in self.rounds:
                        self._strike(faults)
                        self._train_on(" ".join(map(str, faults)))
                    for agent in self._agents.values():
                        agent.signal(signal.SIGTERM)
                    codes = [agent.end(PATIENCE_S) for agent in self._agents.values()]
                    # An agent whose workers have handed over before it heard of the stop has left.
                    assert set(codes) <= {143, 75} and 143 in codes, f"exit codes at the stop: {codes}"
        self._compare()

    @property
    def seconds(self) -> list[float]:
        """Of every loss: from the first suspicion until the others went on."""
        lost = (each for each in self._recoveries() if each["kind"] == "lost")
        return [each["total_s"] - each["redo_s"] for each in lost]

    def count(self, kind: str) -> int:
        """Recoveries of a kind."""
        return sum(each["kind"] == kind for each in self._recoveries())

    @property
    def steps(self) -> int:
        """Committed so far."""
        return max((event["step"] for event in self._job.events("step")), default=0)

    def _recoveries(self) -> list[dict[str, Any]]:
        return [event["recovery"] for event in self._job.events("recovery")]

    def _start(self, at: int) -> None:
        host = self._world.hosts[at]
        self._agents[at] = self._job.start(f"h{host.number}", creates_job=True, before=host.enter())

    def _strike(self, faults: Iterable[Fault]) -> None:
        """Does a round: all of its faults in their order, then what ends each of those that last."""
        now_s, due = time.monotonic(), []
        for fault in faults:
            now_s += fault.delay_ms / 1e3
            due.append((now_s, lambda fault=fault: self._begin(fault)))
            due.append((now_s + fault.lasts_ms / 1e3, lambda fault=fault: self._end(fault)))
        actions: list[tuple[float, Callable[[], None]]] = sorted(due, key=lambda each: each[0])
        for when_s, act in actions:
            time.sleep(max(0.0, when_s - time.monotonic()))
            act()
        self._world.heal()

    def _begin(self, fault: Fault) -> None:
        hosts = [self._world.hosts[at] for at in fault.hosts]
        others = self._world.beside(*hosts)
        if fault.kind == "kill-host":
            (at,) = fault.hosts
            self._killed.add(self._agents[at])
            if at < NUM_MEMBERS:
                self._members[at].kill()
            hosts[0].kill()
        elif fault.kind == "kill-agent":
            agent = self._agents[fault.hosts[0]]
            self._killed.add(agent)
            agent.signal(signal.SIGKILL)
        elif fault.kind == "kill-coordinator":
            for pid in self._coordinators():
                _signal(pid, signal.SIGKILL)
        elif fault.kind == "notice":
            self._agents[fault.hosts[0]].signal(signal.SIGTERM)
        elif fault.kind == "stop-host":
            for pid in hosts[0].processes().values():
                _signal(pid, signal.SIGSTOP)
        elif fault.kind == "kill-member":
            self._members[fault.hosts[0]].kill()
        elif fault.kind == "no-quorum":
            for at in fault.hosts:
                self._members[at].stop()
        else:
            to, back = self._world.wires(others, hosts), self._world.wires(hosts, others)
            for wire in {"cut-to": to, "cut-from": back}.get(fault.kind, to + back):
                wire.is_cut, wire.loss = fault.kind != "drop", 0.5 if fault.kind == "drop" else wire.loss

    def _end(self, fault: Fault) -> None:
        if fault.kind == "stop-host":
            for pid in self._world.hosts[fault.hosts[0]].processes().values():
                _signal(pid, signal.SIGCONT)
        elif fault.kind == "no-quorum":
            for at in fault.hosts:
                self._members[at].go_on()
        elif fault.kind in ("cut", "cut-to", "cut-from", "part", "drop"):
            self._world.heal()

    def _coordinators(self) -> Iterator[int]:
        """Processes that coordinate, as their hosts' agents tell; those that wait for their turn are none."""
        for host in self._world.hosts:
            there = host.processes() if host.is_alive else {}
            for file in self._job.run_dir.glob(processes_file("*")):
                for each in msgspec.json.decode(file.read_bytes(), type=ProcessTable).processes:
                    facts = facts_of(there[each.pid]) if each.pid in there else None
                    if each.role == "coordinator" and facts is not None and facts.start_ticks == each.start_ticks:
                        yield there[each.pid]

    def _restart(self) -> None:
        """Boots hosts that were killed, and starts members and agents that have ended."""
        for at, agent in list(self._agents.items()):
            code = agent.process.poll()
            if code is None:
                _signal(agent.pid, signal.SIGCONT)  # nsenter stops itself with its child
                continue
            assert agent in self._killed or code == 75, (
                f"the agent of host {at + 1} has ended with {code}:\n{agent.text}"
            )
            host = self._world.hosts[at]
            if not host.is_alive:
                host = self._world.boot(host)
                for wire in self._world.around(host):
                    wire.delay_s = DELAY_S
                if at < NUM_MEMBERS:
                    self._members[at].before = _on(host)
            self.num_restarts += 1
            self._start(at)
        for member in self._members:
            if member.process.poll() is not None:
                member.start()

    def _train_on(self, after: str) -> None:
        """Waits until all hosts take part, and some steps more are committed."""
        deadline_s = time.monotonic() + PATIENCE_S
        begun_at: int | None = None
        while begun_at is None or self.steps < begun_at + STEPS_BETWEEN:
            self._restart()
            members = self._members_of_job()
            if len(members) < NUM_HOSTS * WORKERS_OF_A_HOST:
                begun_at = None
            elif begun_at is None:
                begun_at = self.steps
            assert time.monotonic() < deadline_s, (
                f"{PATIENCE_S:.0f} s after {after}: step {self.steps}, workers {sorted(members)}, hosts "
                f"{[(at + 1, agent.process.poll()) for at, agent in self._agents.items()]}\n"
                + "\n".join(f"host {at + 1}:\n{agent.text}" for at, agent in self._agents.items())
            )
            time.sleep(0.1)

    def _members_of_job(self) -> set[int]:
        """The workers that take part, as the log of the run tells."""
        members = set(range(NUM_HOSTS * WORKERS_OF_A_HOST))
        for each in self._recoveries():
            if each["kind"] == "joined":
                members.add(each["worker"])
            elif each["kind"] in ("lost", "drained"):
                members.discard(each["worker"])
        return members

    def _compare(self) -> None:
        settings = {**SETTINGS, "net.trusted": False, "run.steps": self.steps, "run.checkpoint_every": 0}
        resumed = run_job(self._job.run_dir, settings, resume=True)
        alone = run_job(self._folder / "alone", {**settings, "layout.widths": "[1]", "elastic.num_followers": 0})
        assert resumed.computation == alone.computation, "other bits than an undisturbed run"


def _on(host: Host) -> list[str]:
    """Words before a command that uses a host's network, and ends with the test."""
    return ["nsenter", f"--net=/proc/{host.pid}/ns/net", "--"]


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def main() -> int:
    """Runs jobs; the exit code is 1 if one of them was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0, help="begin no job after so long")
    parser.add_argument("--jobs", type=int, help="at most so many")
    parser.add_argument("--seed", type=int, default=1, help="decides all jobs and faults")
    parser.add_argument("--only", type=int, help="only the job with this number")
    parser.add_argument("--keep", type=Path, help="folder for what a job has left that went wrong")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    exit_on_sigterm()
    if reason := lacking():
        parser.error(reason)
    if ETCD is None:
        parser.error("no etcd here: install a server that is called etcd (Debian: etcd-server)")
    where = machine()
    out = sys.stderr if options.json else sys.stdout
    if not options.json:
        print_header(where)
    end_s, rows = time.monotonic() + 60 * options.minutes, []
    for index in [options.only] if options.only is not None else itertools.count():
        rows.append(row(options.seed, index, options.keep))
        print(shown(rows[-1]), file=out, flush=True)
        if rows[-1]["problem"] or time.monotonic() > end_s or len(rows) == options.jobs:
            break
    good = not any(each["problem"] for each in rows)
    if options.json:
        print(json.dumps({"machine": where, "seed": options.seed, "good": good, "rows": rows}, indent=2))
    else:
        faults = sum(len(each["faults"]) for each in rows)
        lost, joined = (sum(each[kind] for each in rows) for kind in ("lost", "joined"))
        print(
            f"{len(rows)} jobs in {sum(each['seconds'] for each in rows):.0f} s: {faults} faults, {lost} workers lost, "
            f"{joined} joined, {sum(each['coordinators'] for each in rows)} new coordinators; "
            + ("same bits" if good else "NOT as they must be")
        )
    return 0 if good else 1


def row(seed: int, index: int, keep: Path | None) -> dict[str, Any]:
    """Runs a job and says what became of it."""
    folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
    begun_s, job, problem = time.monotonic(), Job(folder, seed, index), ""
    try:
        job.run()
    except AssertionError as error:
        problem = "\n".join(map(str, _chain(error)))
        if keep is not None:
            shutil.copytree(folder, keep / f"{seed}-{index}", symlinks=True, ignore_dangling_symlinks=True)
    finally:
        counted = {kind: job.count(kind) for kind in ("lost", "joined", "drained", "coordinator")}
        steps = job.steps
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "index": index,
        "faults": [str(fault) for faults in job.rounds for fault in faults],
        "rounds": [" ".join(map(str, faults)) for faults in job.rounds],
        "steps": steps,
        "lost": counted["lost"],
        "joined": counted["joined"],
        "drained": counted["drained"],
        "coordinators": counted["coordinator"],
        "restarts": job.num_restarts,
        "seconds": time.monotonic() - begun_s,
        "problem": problem,
        "replay": f"python benchmarks/chaos_hosts.py --seed {seed} --only {index}",
    }


def _chain(error: BaseException) -> list[BaseException]:
    """An error after those that it was raised beside."""
    return [*(_chain(error.__context__) if error.__context__ is not None else []), error]


def shown(found: dict[str, Any]) -> str:
    """A row for people."""
    text = (
        f"{found['index']:>4} {found['seconds']:5.0f} s {found['steps']:>6} steps, {found['lost']} lost, "
        f"{found['joined']} joined, {found['coordinators']} new coordinators: {'; '.join(found['rounds'])}"
    )
    return text if not found["problem"] else f"{text}\n{found['problem']}\nagain: {found['replay']}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
