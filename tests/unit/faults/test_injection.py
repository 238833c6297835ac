"""Faults: what their specs mean, what is refused, what is drawn, and that they strike once, where they should."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from elaswave.coordinator.driver import CoordinatorFaults
from elaswave.errors import ConfigError, UsageError
from elaswave.faults import injection as module
from elaswave.faults.injection import (
    AwayWatch,
    Fault,
    FaultProbe,
    away_until_s,
    coordinator_fault,
    drawn_phase,
    end_of,
    never_struck,
    parse_fault,
    parse_faults,
    read_fault_records,
    strike_coordinator,
)
from elaswave.observability.processes import process_entry, write_processes
from elaswave.observability.run_folder import FAULTS_FILE
from elaswave.protocol.step.engine import PHASES

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 60

# --------------------------------------------------------------------------------------------------------------- specs

SPECS = {
    "kill:3@17": Fault(kind="kill", worker=3, step=17),
    "kill:3@17:gather": Fault(kind="kill", worker=3, step=17, phase="gather"),
    "kill:3@17:gather+2": Fault(kind="kill", worker=3, step=17, phase="gather", skip=2),
    "hang:random@1:vote": Fault(kind="hang", worker="random", step=1, phase="vote"),
    "cut:0@2:backward+1": Fault(kind="cut", worker=0, step=2, phase="backward", skip=1),
    "cut-close:12@2": Fault(kind="cut-close", worker=12, step=2),
    "kill:coordinator@4": Fault(kind="kill", worker="coordinator", step=4),
    "slow:1@5:0.5": Fault(kind="slow", worker=1, step=5, factor=0.5),
    "slow-link:1@5:0.01": Fault(kind="slow-link", worker=1, step=5, factor=0.01),
    "slow:random@30:1": Fault(kind="slow", worker="random", step=30, factor=1.0),
    "drain:1@5": Fault(kind="drain", worker=1, step=5),
    "kill-host:a@5": Fault(kind="kill-host", worker=None, step=5, host="a"),
    "away:oslo@5": Fault(kind="away", worker=None, step=5, host="oslo"),
    "away:oslo@5:2.5": Fault(kind="away", worker=None, step=5, host="oslo", seconds=2.5),
    "kill-host:rack-1/a@5:vote+1": Fault(kind="kill-host", worker=None, step=5, phase="vote", skip=1, host="rack-1/a"),
    "join@5": Fault(kind="join", worker=None, step=5),
    "kill:2+0+1@6:backward+1": Fault(kind="kill", worker=2, others=(0, 1), step=6, phase="backward", skip=1),
    "hang:3+1@6": Fault(kind="hang", worker=3, others=(1,), step=6),
    "drain:1+2@6": Fault(kind="drain", worker=1, others=(2,), step=6),
}


@pytest.mark.parametrize("spec", SPECS)
def test_specs_are_read_and_written(spec):
    assert parse_fault(spec) == SPECS[spec]
    assert str(SPECS[spec]) == spec


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("kill:1@5:any", Fault(kind="kill", worker=1, step=5)),
        ("kill:1@5:any+0", Fault(kind="kill", worker=1, step=5)),
        ("kill:1@5:vote+0", Fault(kind="kill", worker=1, step=5, phase="vote")),
        ("kill:01@05", Fault(kind="kill", worker=1, step=5)),
        ("slow:1@5:.3333333333333333", Fault(kind="slow", worker=1, step=5, factor=1 / 3)),
        ("slow:1@5:1.0", Fault(kind="slow", worker=1, step=5, factor=1.0)),
    ],
)
def test_other_ways_to_write_a_spec(spec, fault):
    assert parse_fault(spec) == fault
    assert parse_fault(str(fault)) == fault


KINDS_THAT_WORK = "kill, hang, cut, cut-close, kill-host, away, slow, slow-link, join, drain"
BAD = {
    "": [f"unknown kind ''; there are {KINDS_THAT_WORK}"],
    "explode:1@5": [f"unknown kind 'explode'; there are {KINDS_THAT_WORK}"],
    "kill\n:1@5": [f"unknown kind 'kill\\n'; there are {KINDS_THAT_WORK}"],
    "kill": [
        "no worker is given; expected kill:W[+W...]@STEP[:PHASE[+N]]",
        "no step is given; expected kill:W[+W...]@STEP[:PHASE[+N]]",
    ],
    "kill@5": ["no worker is given; expected kill:W[+W...]@STEP[:PHASE[+N]]"],
    "kill:@5": ["no worker is given; expected kill:W[+W...]@STEP[:PHASE[+N]]"],
    "cut:@5": ["no worker is given; expected cut:W@STEP[:PHASE[+N]]"],
    "kill:3": ["no step is given; expected kill:W[+W...]@STEP[:PHASE[+N]]"],
    "kill:3@": ["no step is given; expected kill:W[+W...]@STEP[:PHASE[+N]]"],
    "kill:1+@5": ["worker '' is no number, as each of several must be"],
    "kill:1+random+coordinator@5": [
        "worker 'random' is no number, as each of several must be",
        "worker 'coordinator' is no number, as each of several must be",
    ],
    "kill:1+2+1+2+3@5": ["worker 1 is named more than once", "worker 2 is named more than once"],
    "cut:1+2@5": ["cut strikes one worker; several at one instant are struck by kill, hang, drain"],
    "slow:1+2@5:0.5": ["slow strikes one worker; several at one instant are struck by kill, hang, drain"],
    "kill:3@0": ["step '0' is no whole number of at least 1"],
    "kill:3@-1": ["step '-1' is no whole number of at least 1"],
    "kill:3@4.5": ["step '4.5' is no whole number of at least 1"],
    "kill:3@4@5": ["step '4@5' is no whole number of at least 1"],
    "kill:3@" + "9" * 30: [f"step '{'9' * 30}' is no whole number of at least 1"],
    "kill:x@5": ["worker 'x' is none of a number, random or coordinator"],
    "kill:3:5": [
        "worker '3:5' is none of a number, random or coordinator",
        "no step is given; expected kill:W[+W...]@STEP[:PHASE[+N]]",
    ],
    "hang:x@5": ["worker 'x' is none of a number, random"],
    "hang:coordinator@5": ["the coordinator can only be killed, kill:coordinator@STEP"],
    "kill:coordinator@5:vote": [
        "nothing may follow the step, but ':vote' does: the coordinator takes part in no phase",
    ],
    "kill:3@5:": [f"phase '' is none of {', '.join(PHASES)}, any"],
    "kill:3@5:lunch": [f"phase 'lunch' is none of {', '.join(PHASES)}, any"],
    "kill:3@5:vote+": ["+N takes a whole number, got '+'"],
    "kill:3@5:vote+x": ["+N takes a whole number, got '+x'"],
    "kill:3@5:vote+1+1": ["+N takes a whole number, got '+1+1'"],
    "kill:3@5:any+1": ["'+1' needs a phase: the actions of any have no order of their own"],
    **{
        f"slow:3@5{colon}{factor}": [
            f"factor {factor!r} is no number above 0 and at most 1; expected slow:W@STEP:FACTOR, such as slow:1@5:0.5"
        ]
        for colon, factor in (
            ("", ""),
            (":", "fast"),
            (":", "0"),
            (":", "-0.5"),
            (":", "2"),
            (":", "inf"),
            (":", "nan"),
        )
    },
    "drain:1@5:vote": ["nothing may follow the step, but ':vote' does: expected drain:W[+W...]@STEP"],
    "join:1@5": ["a new worker has no number yet; expected join@STEP"],
    "join": ["no step is given; expected join@STEP"],
    "join@5:vote": ["nothing may follow the step, but ':vote' does: expected join@STEP"],
    "kill:x@0:lunch+y": [
        "worker 'x' is none of a number, random or coordinator",
        "step '0' is no whole number of at least 1",
        f"phase 'lunch' is none of {', '.join(PHASES)}, any",
        "+N takes a whole number, got '+y'",
    ],
}


@pytest.mark.parametrize("spec", BAD)
def test_bad_specs_are_refused_with_all_that_is_wrong(spec):
    with pytest.raises(ConfigError) as error:
        parse_fault(spec)
    assert error.value.problems == tuple(f"--fault {spec}: {problem}" for problem in BAD[spec])


# ------------------------------------------------------------------------------------------------------------ of a job


HOSTS = {0: "r/a", 1: "r/b", 2: "r/a", 3: "s/a"}


def of_job(
    *specs: str,
    seed: int = 0,
    num_workers: int = 4,
    num_steps: int = 20,
    respawns: bool = False,
    hosts: dict[int, str] | None = None,
    sites: Sequence[str] = (),
    has_agents: bool = False,
) -> tuple[Fault, ...]:
    return parse_faults(
        specs,
        seed=seed,
        workers=range(num_workers),
        num_steps=num_steps,
        respawns=respawns,
        hosts=hosts or {},
        sites=sites,
        has_agents=has_agents,
    )


def test_a_host_is_all_of_its_workers():
    faults = of_job("kill-host:r/a@5", "kill:random@6", "kill-host:s@7", hosts=HOSTS)
    assert [fault.victims for fault in faults] == [(0, 2), (1,), (3,)], "no worker that a host takes with it is drawn"
    assert str(faults[0]) == "kill-host:r/a@5"
    (rack,) = of_job("kill-host:r@5", hosts=HOSTS)
    assert rack.victims == (0, 1, 2)
    assert of_job("kill-host:r@3", "kill:6@9", respawns=True, hosts=HOSTS)[1].worker == 6


def test_hosts_that_cannot_be_killed():
    with pytest.raises(UsageError) as error:
        of_job("kill-host:a@5", "kill:2@3", "kill-host:r/a@4", "kill-host:@4", hosts=HOSTS)
    assert str(error.value).splitlines() == [
        "--fault kill-host:a@5: there is no host 'a'; the job has r, r/a, r/b, s, s/a",
        "--fault kill-host:@4: no host is given; expected kill-host:H@STEP[:PHASE[+N]]",
        "--fault kill-host:r/a@4: worker 2 is gone already by kill:2@3",
    ]
    with pytest.raises(UsageError, match="all workers are on one host; say with elastic.hosts which of them share one"):
        of_job("kill-host:a@5")


def test_several_workers_at_one_instant():
    faults = of_job("kill:2+0@5", "kill:random@6")
    assert [fault.victims for fault in faults] in ([(2, 0), (1,)], [(2, 0), (3,)]), "none that is gone is drawn"
    assert of_job("kill:0+1@3", "kill:5@9", respawns=True)[1].worker == 5, "two have come in their places"
    with pytest.raises(UsageError) as error:
        of_job("kill:3+4+5@5", "hang:1+2@3", "drain:2+0@9")
    assert str(error.value).splitlines() == [
        "--fault kill:3+4+5@5: there is no worker 4; the job has 0, 1, 2, 3",
        "--fault kill:3+4+5@5: there is no worker 5; the job has 0, 1, 2, 3",
        "--fault drain:2+0@9: worker 2 is gone already by hang:1+2@3",
    ]


def test_machines_strike_their_own_workers_only():
    assert of_job("kill:0+2@5", "drain:1+3@5", hosts=HOSTS, has_agents=True)[0].victims == (0, 2)
    assert of_job("kill:0+1@5", hosts=HOSTS)[0].victims == (0, 1), "they are on one machine, whatever it stands for"
    for kind in ("kill", "hang"):
        with pytest.raises(
            UsageError, match="they are on several machines, and none can strike the workers of another"
        ):
            of_job(f"{kind}:0+1@5", hosts=HOSTS, has_agents=True)


AT = {0: "oslo", 1: "quito/a", 2: "quito/b", 3: "lima"}


def test_a_site_that_is_away_is_all_of_its_workers():
    (fault,) = of_job("away:quito@5:60", hosts=AT, sites=["oslo", "quito"])
    assert fault.victims == (1, 2) and str(fault) == "away:quito@5:60.0"
    assert end_of(fault, 100.0) == 160.0
    (gone,) = of_job("away:oslo@5", hosts=AT, sites=["oslo", "quito"])
    assert end_of(gone, 100.0) == math.inf


def test_sites_that_cannot_be_away():
    with pytest.raises(UsageError) as error:
        of_job("away:rome@5", "away:lima@5:3", "away:oslo@5:soon", "away:oslo@5:0", "away:@4", hosts=AT, sites=["oslo"])
    assert str(error.value).splitlines() == [
        "--fault away:rome@5: there is no site 'rome' with workers; the job has oslo, quito, lima",
        "--fault away:lima@5:3: the coordinator is there, and all others would be cut off from it; put it elsewhere",
        "--fault away:oslo@5:soon: 'soon' is no number of seconds above 0; expected away:SITE@STEP[:SECONDS], such as "
        "away:oslo@5:60",
        "--fault away:oslo@5:0: '0' is no number of seconds above 0; expected away:SITE@STEP[:SECONDS], such as "
        "away:oslo@5:60",
        "--fault away:@4: no site is given; expected away:SITE@STEP[:SECONDS]",
    ]
    with pytest.raises(UsageError, match="there are no emulated links that it could cut; give sites.network"):
        of_job("away:oslo@5", hosts=AT)
    with pytest.raises(UsageError, match="all workers are at oslo: nobody could go on"):
        of_job("away:oslo@5", hosts={0: "oslo"}, sites=["oslo"])
    with pytest.raises(UsageError, match="by the clock of one host, and this job has agents: use `elaswave train`"):
        of_job("away:oslo@5", hosts=AT, sites=["oslo"], has_agents=True)


def test_a_job_without_faults():
    assert of_job() == ()


def test_all_problems_of_all_specs_are_listed():
    with pytest.raises(UsageError) as error:
        of_job("kill:4@21", "kill:1@3", "boom", "hang:1@5", "slow:1@2:0.5", "drain:1@2", "kill:2@20")
    assert str(error.value).splitlines() == [
        "--fault kill:4@21: there is no worker 4; the job has 0, 1, 2, 3",
        "--fault kill:4@21: step 21 is never reached; run.steps is 20",
        f"--fault boom: unknown kind 'boom'; there are {KINDS_THAT_WORK}",
        "--fault hang:1@5: worker 1 is gone already by kill:1@3",
        "--fault drain:1@2: worker 1 is gone already by kill:1@3",
    ]


def test_more_random_faults_than_workers():
    with pytest.raises(ConfigError, match="the other faults leave none of the 2 workers to draw from"):
        of_job("kill:1@2", "hang:random@3", "cut:random@4", num_workers=2)


def test_those_that_join_can_be_named_and_are_not_drawn():
    assert [fault.worker for fault in of_job("join@2", "join@3", "kill:5@9", "drain:4@12")] == [None, None, 5, 4]
    with pytest.raises(ConfigError, match="there is no worker 5; the job has 0, 1, 2, 3, 4"):
        of_job("join@2", "kill:5@9")
    assert of_job("kill:1@3", "kill:4@9", respawns=True)[1].worker == 4, "it has taken the place of worker 1"
    for seed in range(20):
        drawn = of_job("drain:random@2", "join@2", *["kill:random@5"] * 3, seed=seed)
        assert sorted(fault.worker for fault in drawn if fault.worker is not None) == [0, 1, 2, 3]


def test_the_coordinator_may_be_killed_more_than_once():
    assert len(of_job("kill:coordinator@2", "kill:coordinator@2", "kill:coordinator@9")) == 3


def test_random_workers_are_drawn_from_those_that_no_other_fault_loses():
    for seed in range(50):
        drawn = of_job("kill:random@3", "kill:2@9", "cut:random@4:vote", "hang:random@5", seed=seed)
        assert sorted(fault.worker for fault in drawn) == [0, 1, 2, 3]
        assert [str(fault)[-6:] for fault in drawn[2:3]] == ["4:vote"]


def test_random_workers_follow_from_the_seed_and_the_position_alone():
    assert of_job("kill:random@5", seed=3) == of_job("kill:random@5", seed=3)
    assert [f.worker for f in of_job("kill:random@5", seed=3)] == [f.worker for f in of_job("hang:random@9", seed=3)]
    by_seed = {of_job("kill:random@5", seed=seed)[0].worker for seed in range(40)}
    assert by_seed == {0, 1, 2, 3}
    second = {of_job("kill:coordinator@1", "kill:random@5", seed=seed)[1].worker for seed in range(40)}
    assert second == {0, 1, 2, 3}
    assert any(
        of_job("kill:coordinator@1", "kill:random@5", seed=seed)[1].worker
        != of_job("kill:random@5", seed=seed)[0].worker
        for seed in range(40)
    )


def test_the_phase_of_any_follows_from_the_seed_and_the_position_alone():
    assert {drawn_phase(seed, 0) for seed in range(100)} == set(PHASES)
    assert {drawn_phase(0, position) for position in range(100)} == set(PHASES)
    assert drawn_phase(7, 3) == drawn_phase(7, 3)


# --------------------------------------------------------------------------------------------------------------- probe


class Bench:
    """A probe in a simulated worker; signals and silence are written down instead of carried out."""

    def __init__(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        *specs: str,
        seed: int = 0,
        hosts: dict[int, str] | None = None,
        sites: Sequence[str] = (),
        suffix: str = "",
    ) -> None:
        self.faults = of_job(*specs, seed=seed, hosts=hosts, sites=sites)
        self.file = tmp_path / FAULTS_FILE
        self.events: list[object] = []
        self.probe = FaultProbe(
            self.faults,
            seed=seed,
            record=self.file,
            silence=self._silence,
            slow=self._slow,
            part=self.part,
            suffix=suffix,
        )

        def kill(pid: int, number: int) -> None:
            assert pid == os.getpid()
            assert read_fault_records(self.file)  # first the record
            self.events.append(signal.Signals(number).name)

        monkeypatch.setattr(module.os, "kill", kill)

    def _silence(self, engine, *, close_links):
        self.events.append(("silence", engine.worker, close_links))

    def _slow(self, engine, factor, *, links):
        assert read_fault_records(self.file)
        self.events.append(("slow-link" if links else "slow", engine.worker, engine.step, factor))

    def part(self, site, until_s):
        assert read_fault_records(self.file)
        self.events.append(("away", site, until_s))

    def step(self, worker: int, step: int, attempt: int = 1, counts: dict[str, int] | None = None) -> None:
        engine = SimpleNamespace(worker=worker, step=step, attempt=attempt)
        counts = {"forward": 2, "backward": 2, "reduce": 3, "vote": 1, "apply": 4, "gather": 3} | (counts or {})
        for phase in PHASES:
            for index in range(counts[phase]):
                self.probe.reached(phase, index, engine)


def test_a_fault_strikes_its_worker_at_its_point_only(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "kill:3@17:gather+2")
    for step in range(1, 17):
        bench.step(3, step)
    assert bench.events == [] and read_fault_records(bench.file) == []
    bench.step(3, 17)
    assert bench.events == ["SIGKILL"]
    [record] = read_fault_records(bench.file)
    assert (record.position, record.fault, record.worker) == (0, "kill:3@17:gather+2", 3)
    assert (record.step, record.attempt, record.phase, record.action) == (17, 1, "gather", 2)
    assert record.time_s > 0
    assert never_struck(bench.faults, [record]) == []


def test_a_host_is_killed_by_its_first_worker(tmp_path, monkeypatch):
    """The others are processes of the run like any: here one that sleeps."""
    other = subprocess.Popen(["sleep", "60"])
    try:
        write_processes(tmp_path, [process_entry("worker", 2, other.pid), process_entry("forkserver", 0, os.getpid())])
        bench = Bench(tmp_path, monkeypatch, "kill-host:r/a@5:vote", hosts=HOSTS)
        bench.step(0, 5)
        assert bench.events == ["SIGKILL"]
        assert other.wait(TIMEOUT_S) == -signal.SIGKILL
    finally:
        monkeypatch.undo()
        other.kill()
        other.wait(TIMEOUT_S)
    records = read_fault_records(bench.file)
    assert [(record.worker, record.loses, record.phase) for record in records] == [(0, True, "vote"), (2, True, "vote")]
    assert records[0].time_s == records[1].time_s and never_struck(bench.faults, records) == []


@pytest.mark.parametrize(
    ("spec", "sent"),
    [
        ("kill:0+2+3@5:vote", ["2 SIGSTOP", "3 SIGSTOP", "2 SIGKILL", "3 SIGKILL", "SIGKILL"]),
        ("hang:0+3+2@5:vote", ["2 SIGSTOP", "3 SIGSTOP", "SIGSTOP"]),
    ],
)
def test_the_first_of_several_stops_all_others_before_any_ends(tmp_path, monkeypatch, spec, sent):
    here = process_entry("worker", 0, os.getpid())
    others = [msgspec.structs.replace(here, id=worker) for worker in (1, 2, 3)]
    write_processes(tmp_path, [here, *others, msgspec.structs.replace(here, id=2, role="loader")], "-b")
    Bench(tmp_path, monkeypatch, spec).step(2, 5)
    bench = Bench(tmp_path, monkeypatch, spec, suffix="-b")
    monkeypatch.setattr(
        module, "signal_process", lambda process, number: bench.events.append(f"{process.id} {number.name}")
    )
    bench.step(0, 4)
    assert not bench.events and not read_fault_records(bench.file), "it is the first that is named who strikes"
    bench.step(0, 5)
    assert bench.events == sent
    records = read_fault_records(bench.file)
    assert {record.worker for record in records} == {0, 2, 3} and len({record.time_s for record in records}) == 1
    assert {record.fault for record in records} == {spec}


def test_a_site_is_cut_off_by_its_first_worker_and_the_others_read_of_it(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "drain:3@2", "away:quito@5:60", hosts=AT, sites=["quito"])
    faults = bench.faults
    told: list[tuple[str, float]] = []
    watch = AwayWatch((), bench.file, lambda site, until_s: told.append((site, until_s)))
    watch._faults = faults  # without its thread
    watch.look()
    bench.step(1, 4)
    assert not bench.events and not told
    bench.step(1, 5)
    records = read_fault_records(bench.file)
    until_s = records[0].time_s + 60
    assert bench.events == [("away", "quito", until_s)]
    assert [(record.worker, record.loses, record.action) for record in records] == [(1, True, 0), (2, True, 0)]
    watch.look()
    watch.look()
    assert told == [("quito", until_s)], "once"
    assert [away_until_s(faults, records, worker) for worker in range(4)] == [0.0, until_s, until_s, 0.0]


def test_other_workers_are_left_alone(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "kill:3@5:vote")
    for step in (4, 5, 6):
        bench.step(2, step)
    assert bench.events == []
    assert never_struck(bench.faults, read_fault_records(bench.file)) == list(bench.faults)


def test_a_fault_strikes_once_also_when_the_step_is_tried_again(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "hang:1@5:reduce+1")
    bench.step(1, 5)
    bench.step(1, 5, attempt=2)
    bench.step(1, 6)
    assert bench.events == ["SIGSTOP"]


def test_an_action_that_only_a_later_attempt_has(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "kill:1@5:forward+3")
    bench.step(1, 5)
    assert bench.events == []
    bench.step(1, 5, attempt=2, counts={"forward": 4})
    assert bench.events == ["SIGKILL"]
    assert read_fault_records(bench.file)[0].attempt == 2


def test_an_action_that_never_comes(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "kill:1@5:vote+3", "kill:2@5:vote")
    for step in (5, 6):
        bench.step(1, step)
    assert bench.events == []
    assert [str(fault) for fault in never_struck(bench.faults, [])] == ["kill:1@5:vote+3", "kill:2@5:vote"]


@pytest.mark.parametrize(("kind", "closes"), [("cut", False), ("cut-close", True)])
def test_cuts_are_left_to_the_silencer(tmp_path, monkeypatch, kind, closes):
    bench = Bench(tmp_path, monkeypatch, f"{kind}:0@2:apply")
    for step in (1, 2, 3):
        bench.step(0, step)
    assert bench.events == [("silence", 0, closes)]
    assert read_fault_records(bench.file)[0].fault == f"{kind}:0@2:apply"


def test_a_worker_becomes_slow_and_fast_again_and_is_not_lost(tmp_path, monkeypatch):
    bench = Bench(
        tmp_path, monkeypatch, "slow:1@3:0.5", "slow:1@5:0.25", "slow:1@5:1", "kill:1@7:vote", "slow-link:1@6:0.5"
    )
    for step in range(1, 7):
        bench.step(1, step)
        bench.step(1, step, attempt=2)
    assert bench.events == [("slow", 1, 3, 0.5), ("slow", 1, 5, 0.25), ("slow", 1, 5, 1.0), ("slow-link", 1, 6, 0.5)]
    bench.step(1, 7)
    assert bench.events[-1] == "SIGKILL"
    assert [record.loses for record in read_fault_records(bench.file)] == [False, False, False, False, True]


def test_a_worker_that_computes_nothing_in_the_step_becomes_slow_at_its_next_point(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "slow:1@3:0.5")
    bench.step(1, 4, counts={"forward": 0, "backward": 0})
    assert bench.events == [("slow", 1, 4, 0.5)]
    assert read_fault_records(bench.file)[0].phase == "reduce"


def test_any_strikes_at_the_beginning_of_a_drawn_phase(tmp_path, monkeypatch):
    struck = set()
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        bench = Bench(folder, monkeypatch, "kill:0@2", seed=seed)
        for step in (1, 2, 3):
            bench.step(0, step)
        [record] = read_fault_records(bench.file)
        assert (record.step, record.phase, record.action) == (2, drawn_phase(seed, 0), 0)
        struck.add(record.phase)
    assert struck == set(PHASES)


def test_any_in_a_phase_that_the_worker_does_not_have_strikes_when_the_step_is_over(tmp_path, monkeypatch):
    seed = next(seed for seed in range(100) if drawn_phase(seed, 0) == "gather")
    bench = Bench(tmp_path, monkeypatch, "kill:0@2", seed=seed)
    for step in (1, 2):
        bench.step(0, step, counts={"gather": 0})
    assert bench.events == []
    bench.step(0, 3)
    [record] = read_fault_records(bench.file)
    assert (record.step, record.phase, record.action) == (3, "forward", 0)


def test_the_coordinators_faults_are_none_of_the_workers_business(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch, "kill:coordinator@2")
    for worker in range(4):
        bench.step(worker, 2)
    assert bench.events == []


def test_records_can_be_read_while_one_is_being_written(tmp_path):
    file = tmp_path / FAULTS_FILE
    record = module.FaultRecord(
        position=0, fault="kill:1@2", worker=1, step=2, attempt=1, phase="vote", action=0, time_s=1.5
    )
    module._record(file, record)
    module._record(file, record)
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert read_fault_records(file) == [record]


# ---------------------------------------------------------------------------------------------------------- coordinator


def test_when_the_coordinator_is_to_be_killed():
    faults = of_job("kill:1@3", "kill:coordinator@4", "kill:coordinator@9")
    assert [bool(coordinator_fault(faults, step)) for step in range(1, 6)] == [False, False, False, True, True]
    due = coordinator_fault(faults, 5)  # it may not have seen every step
    assert due is not None and (due.position, str(due.fault)) == (1, "kill:coordinator@4")
    assert coordinator_fault(faults, 8, struck=[1]) is None
    due = coordinator_fault(faults, 9, struck=[1])
    assert due is not None and due.position == 2
    assert coordinator_fault(faults, 20, struck=[1, 2]) is None


class Asked:
    """A coordinator that takes note of what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    def request_join(self, count: int) -> None:
        self.asked.append(("join", count))

    def request_drain(self, worker: int, deadline_s: float | None = None) -> None:
        assert deadline_s is None, "as configured"
        self.asked.append(("drain", worker))


NOTHING_ASKED = Asked()


def test_joins_and_drains_are_asked_of_the_coordinator_once(tmp_path):
    faults = of_job("join@2", "drain:1@3", "kill:0@2", "join@3")
    asked = Asked()
    for step in (1, 2, 2, 4, 5):
        CoordinatorFaults(faults, tmp_path, asked).strike(step)  # by another coordinator each time
    assert asked.asked == [("join", 1), ("drain", 1), ("join", 1)]
    records = read_fault_records(tmp_path / FAULTS_FILE)
    assert [(record.fault, record.worker, record.step) for record in records] == [
        ("join@2", None, 2),
        ("drain:1@3", 1, 4),
        ("join@3", None, 4),
    ]
    assert not any(record.loses for record in records)


def test_several_are_asked_to_leave_in_one_turn(tmp_path):
    asked = Asked()
    CoordinatorFaults(of_job("drain:2+0@3"), tmp_path, asked).strike(3)
    assert asked.asked == [("drain", 2), ("drain", 0)]
    assert [record.worker for record in read_fault_records(tmp_path / FAULTS_FILE)] == [2, 0]


def test_killing_the_coordinator(tmp_path, monkeypatch):
    file = tmp_path / FAULTS_FILE
    killed = []
    monkeypatch.setattr(module.os, "kill", lambda pid, number: killed.append((pid, number)))
    faults = of_job("kill:coordinator@4")
    due = coordinator_fault(faults, 4)
    assert due is not None
    strike_coordinator(due, NOTHING_ASKED, step=4, record=file)
    assert killed == [(os.getpid(), signal.SIGKILL)]
    [record] = read_fault_records(file)
    assert (record.worker, record.step, record.phase) == ("coordinator", 4, None)
    assert coordinator_fault(faults, 5, struck={record.position}) is None


# ------------------------------------------------------------------------------------------------------- real processes

PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from elaswave.faults.injection import FaultProbe, coordinator_fault, parse_faults, strike_coordinator

faults = parse_faults([sys.argv[1]], seed=0, workers=range(4), num_steps=9)
record = Path(sys.argv[2])
assert "torch" not in sys.modules
if due := coordinator_fault(faults, 2):
    strike_coordinator(due, None, step=2, record=record)
probe = FaultProbe(
    faults,
    seed=0,
    record=record,
    silence=lambda engine, close_links: None,
    slow=lambda engine, factor, links: None,
    part=lambda site, until_s: None,
)
probe.reached("vote", 0, SimpleNamespace(worker=1, step=2, attempt=1))
print("went on")
"""


def start(spec: str, file: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, spec, str(file)], env=environment, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("spec", ["kill:1@2:vote", "kill:coordinator@2"])
def test_a_kill_is_the_end_and_its_record_outlives_it(tmp_path, spec):
    file = tmp_path / FAULTS_FILE
    with start(spec, file) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (-signal.SIGKILL, "")
    assert [record.fault for record in read_fault_records(file)] == [spec]


def test_a_hung_process_stands_still_until_it_is_woken(tmp_path):
    file = tmp_path / FAULTS_FILE
    with start("hang:1@2:vote", file) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        assert len(read_fault_records(file)) == 1
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, output) == (0, "went on\n")
