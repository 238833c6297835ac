"""Schedules as text, and the refusal of what is none."""

import pytest

from elaswave.protocol.coordinator.machine import StartRecord, TermRecord
from elaswave.protocol.step.loop import StepLoop
from verify.planted_bugs.mutant import with_part
from verify.simulator.job import Job
from verify.simulator.run import Build, run_schedule
from verify.simulator.schedule import (
    Conditions,
    Schedule,
    ScheduledFault,
    parse_fault,
    parse_schedule,
    random_schedule,
)
from verify.simulator.store import SimStore, StaleTermError


def test_round_trip():
    assert str(Schedule()) == ""
    assert parse_schedule("") == Schedule()
    for seed in range(200):
        schedule = random_schedule(seed)
        assert parse_schedule(str(schedule)) == schedule
        assert random_schedule(seed) == schedule
    text = "widths=2,2 seed=7 keeps_in_flight=0 kill:c@80 hang:1@30+50 cut:0-2@41"
    schedule = parse_schedule(text)
    assert str(schedule) == text
    assert schedule.job == Job(widths=(2, 2))
    assert schedule.conditions == Conditions(seed=7, keeps_in_flight=False)
    assert schedule.faults == (
        ScheduledFault("kill", "c", 80),
        ScheduledFault("hang", "1", 30, 50),
        ScheduledFault("cut", "0-2", 41),
    )
    assert [fault.workers for fault in schedule.faults] == [(), (1,), (0, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill@3", "no fault: write kind:target@instant"),
        ("kill:2@x", "no fault"),
        ("kill:2@3+x", "no fault"),
        ("kill:two@3", "no fault"),
        ("burn:2@3", "of no known kind: use one of kill, suspect"),
        ("kill:3@3", "strikes a worker that does not exist: they are 0 to 2"),
        ("colour=3", "neither a fault nor one of widths"),
        ("steps=many", "'steps=many' needs a whole number"),
        ("widths=2,x", "needs a whole number"),
        ("keeps_in_flight=yes", "needs a whole number"),
        ("widths=2,0", "every stage needs a worker"),
        ("widths=3,1", "num_microbatches must be at least 3"),
        ("agents=2 kill:a2@3", "needs an agent of a node below 2"),
        ("agents=2 hang:a1@3+9", "one of the kinds kill, disconnect, notice"),
        ("agents=2 candidates=2", "goes neither with candidates nor with num_hosts"),
    ],
)
def test_what_is_no_schedule(text, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        parse_schedule(text)


def test_a_job_may_be_given():
    job = Job(widths=(4,), num_microbatches=4)
    assert {random_schedule(seed, job).job for seed in range(20)} == {job}
    with pytest.raises(ValueError, match="no fault"):
        parse_fault("")


def test_the_store_takes_records_of_the_newest_term_only():
    store = SimStore()
    store.append(TermRecord(term=1))
    store.append(StartRecord(term=1))
    with pytest.raises(StaleTermError, match="no second beginning of term 1"):
        store.append(TermRecord(term=1))
    store.append(TermRecord(term=2))
    with pytest.raises(StaleTermError, match="takes no record of term 1: a coordinator of term 2 has taken over"):
        store.append(StartRecord(term=1))
    assert store.records == [TermRecord(term=1), StartRecord(term=1), TermRecord(term=2)]


def test_whatever_the_simulated_code_raises_is_a_violation():
    class Forgetful(StepLoop):
        def ballot(self):
            return super().ballot()._replace(coverage=0)

    outcome = run_schedule(Schedule(), Build(machine=with_part(Forgetful)))
    assert outcome.violation is not None
    assert outcome.violation.startswith("RejectedVote: worker ")
    assert outcome.violation.endswith("the vote on step 1 fails in coverage")
