"""A job's name in its store, from creation to outcome: seeds, faults everywhere, and bugs that must be found."""

import pytest

from elaswave.protocol.coordinator.store_writes import OUTCOME, SPEC, TERM, KeyValue, spec_value
from elaswave.protocol.leadership.job_creation import STARTS_S
from verify.planted_bugs.lifetimes import LIFETIME_MUTANTS
from verify.simulator.checkers import Violation
from verify.simulator.lifetime_judge import SEEN_BY, LifetimeJudge
from verify.simulator.lifetime_search import (
    LIVES,
    LifetimeSummary,
    everywhere,
    parse_lifetime,
    random_lifetime,
    run_lifetime,
    run_lifetimes,
    shortest,
)
from verify.simulator.lifetimes import Agent, Life, Lifetime
from verify.simulator.schedule import parse_fault


def assert_clean(summary: LifetimeSummary) -> None:
    assert [
        f"{violation}: python -m verify lifetimes --replay '{failed}'" for failed, violation in summary.failures
    ] == []


def test_seeds_have_no_violation() -> None:
    assert_clean(run_lifetimes(map(random_lifetime, range(600))))


@pytest.mark.parametrize(("schedule", "step"), [*zip(LIVES, (20, 80, 20), strict=True)], ids=[*map(str, LIVES)])
def test_a_fault_at_every_so_manieth_instant_has_no_violation(schedule: Lifetime, step: int) -> None:
    summary = run_lifetimes(everywhere(schedule, first=3, step=step))
    assert summary.num_schedules > 100
    assert_clean(summary)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("schedule", LIVES, ids=str)
def test_a_fault_at_every_instant_has_no_violation(schedule: Lifetime) -> None:
    assert_clean(run_lifetimes(everywhere(schedule)))


@pytest.mark.slow
def test_many_seeds_have_no_violation() -> None:
    assert_clean(run_lifetimes(map(random_lifetime, range(20_000))))


@pytest.mark.parametrize("mutant", LIFETIME_MUTANTS.values(), ids=list(LIFETIME_MUTANTS))
def test_planted_bugs_are_found(mutant) -> None:
    schedule = parse_lifetime(mutant.example)
    assert run_lifetime(schedule, mutant.build).violation is not None
    assert run_lifetime(schedule).violation is None


def test_a_schedule_decides_everything_and_has_a_text() -> None:
    for seed in range(20):
        schedule = random_lifetime(seed)
        assert parse_lifetime(str(schedule)) == schedule
        logs: list[list[str]] = [[], []]
        assert run_lifetime(schedule, log=logs[0]) == run_lifetime(schedule, log=logs[1])
        assert logs[0] == logs[1] and len(logs[0]) > 10


def test_a_violation_is_shortened() -> None:
    mutant = LIFETIME_MUTANTS["asks-briefly"]
    schedule = parse_lifetime("length=3 kill:a0@16 cut:a2@90+10 lost:s@95+10")
    assert run_lifetime(schedule, mutant.build).violation is not None
    assert len(shortest(schedule, mutant.build).faults) == 1


@pytest.mark.parametrize("text", ["x=1", "seed=x", "kill:1@2", "cut:c@3+10", "back:s@3+10", "kill:a3@3"])
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no fault|neither a fault"):
        parse_lifetime(text)


@pytest.mark.parametrize(
    ("schedule", "what"),
    [
        ("", "it was told that the job has ended"),
        ("cut:a2@95+900", "the store says how the job has ended: finished"),
        ("kill:a0@60", "host 1 has the coordinator of term 2"),
        ("forge:outcome@60 cut:a2@95+900", "the store says how the job has ended: finished 1"),
        ("forge:term@60", "the coordinator of term 1 at host 0 ends"),
        ("lose:term@92", "host 0 has the coordinator of term 2"),
        ("lose:spec@60 kill:a0@62", "has the coordinator of term 2"),
        ("cut:a1@0+900 kill:a0@50 old:spec@146", "takes part in job generation 2"),
        ("mute:s@42+900 forge:entry@0", "store: remove by agent"),
        ("shut:a0@48+500 old:entry@84", "the store says how the job has ended"),
        ("forge:spec@3", "what is there was not written with this job's key"),
        ("kill:a0@60", "agent 4 of host 0 takes part in job generation 1"),
        ("kill:a0@49 shut:a1@7+500", "job generation 2"),
        ("kill:a0@50 shut:a1@7+500", "the job was created again"),
        ("seed=952027333 length=1 pause=500 kill:a0@113 mute:s@136+900 cut:a0@143+900", "the job has ended meanwhile"),
    ],
)
def test_it_leads_through_what_it_is_there_for(schedule: str, what: str) -> None:
    log: list[str] = []
    assert run_lifetime(parse_lifetime(schedule), log=log).violation is None
    assert any(what in line for line in log), log


# ------------------------------------------------------------------------------------------------------------ the judge

SPEC_2, SPEC_5 = KeyValue(SPEC, spec_value(2), 2), KeyValue(SPEC, spec_value(5), 5)
TERM_1 = KeyValue(TERM, b'{"term": 1, "holder": "a"}', 4)
ENDED_2 = KeyValue(OUTCOME, b"finished 2", 9)


class At:
    """A judge at a time, and an agent."""

    def __init__(self) -> None:
        self.now = 1000
        self.judge = LifetimeJudge(lambda: self.now)
        self.agent = Agent(Life(Lifetime()), 1, 7)
        self.agent.job_generation = 2


@pytest.fixture
def at() -> At:
    return At()


def test_a_job_that_was_written_to_is_not_removed(at: At) -> None:
    at.judge.changed(at.agent, "lease_heartbeat", {SPEC: SPEC_2}, {SPEC: SPEC_2})
    at.now += round(STARTS_S / 0.05)
    at.judge.changed(at.agent, "remove", {SPEC: SPEC_2}, {})
    at.judge.changed(at.agent, "lease_heartbeat", {SPEC: SPEC_2}, {SPEC: SPEC_2})
    with pytest.raises(Violation, match="agent 7 removes a job whose coordinator has written 0 ago"):
        at.judge.changed(at.agent, "remove", {SPEC: SPEC_2}, {})


@pytest.mark.parametrize("why", ["claim", "lease_heartbeat", "entry", "end"])
def test_nobody_changes_another_founding(at: At, why: str) -> None:
    with pytest.raises(Violation, match=f"{why} of agent 7, of job generation 2, where job generation 5 is"):
        at.judge.changed(at.agent, why, {SPEC: SPEC_5}, {SPEC: SPEC_5})
    with pytest.raises(Violation, match=f"{why} of agent 7, of job generation 2, where nothing is"):
        at.judge.changed(at.agent, why, {}, {})


def test_a_claim_raises_the_term_by_one(at: At) -> None:
    term = KeyValue(TERM, b'{"term": 3, "holder": "a"}', 4)
    with pytest.raises(Violation, match="agent 7 claims a term that is not the next one"):
        at.judge.changed(at.agent, "claim", {SPEC: SPEC_2}, {SPEC: SPEC_2, TERM: term})


def test_an_end_leaves_an_outcome_and_nothing_else(at: At) -> None:
    at.judge.changed(at.agent, "end", {SPEC: SPEC_2}, {OUTCOME: ENDED_2})
    for after in ({}, {SPEC: SPEC_2, OUTCOME: ENDED_2}):
        with pytest.raises(Violation, match="the end of job generation 2 leaves keys, or no outcome"):
            at.judge.changed(at.agent, "end", {SPEC: SPEC_2}, after)


def test_a_founding_undoes_no_end_that_it_has_not_seen_nor_that_of_its_own_job(at: At) -> None:
    at.agent.outcome_seen = 9
    at.judge.changed(at.agent, "found", {OUTCOME: ENDED_2}, {SPEC: SPEC_5})
    at.agent.outcome_seen = 0
    with pytest.raises(Violation, match="agent 7 removes an outcome that it has not seen"):
        at.judge.changed(at.agent, "found", {OUTCOME: ENDED_2}, {SPEC: SPEC_5})
    at.judge.changed(at.agent, "end", {SPEC: SPEC_2}, {OUTCOME: ENDED_2})
    at.agent.outcome_seen, at.agent.saw = 9, 2
    with pytest.raises(Violation, match="creates the job again that it has seen, and that has ended since"):
        at.judge.changed(at.agent, "found", {OUTCOME: ENDED_2}, {SPEC: SPEC_5})


def test_members_and_outcomes_are_of_one_founding(at: At) -> None:
    at.judge.took(2, 2)
    with pytest.raises(Violation, match="the coordinator of job generation 5 takes an agent of job generation 2"):
        at.judge.took(5, 2)
    at.judge.sent(2, ENDED_2)
    with pytest.raises(Violation, match="of job generation 5 takes the outcome of job generation 2 for its own"):
        at.judge.sent(5, ENDED_2)
    with pytest.raises(Violation, match="an agent of job generation 2 takes a forged outcome for its own"):
        at.judge.sent(2, ENDED_2._replace(is_genuine=False))


def test_who_could_have_read_the_outcome_does_not_end_without(at: At) -> None:
    at.judge.given_up(1, 2, 0, at.now)
    at.judge.changed(at.agent, "end", {SPEC: SPEC_2}, {OUTCOME: ENDED_2})
    at.judge.trouble(2, at.now + 900)
    at.now += SEEN_BY
    at.judge.given_up(1, 2, 0, at.now)
    at.judge.given_up(1, 2, at.now, at.now + 1)
    at.judge.given_up(2, 2, 0, at.now + 1)
    with pytest.raises(Violation, match="the agent of host 1 ends without the outcome, which it could read for"):
        at.judge.given_up(1, 2, 0, at.now + 1)
    at.judge.given_up(1, 3, 0, at.now + 1)
    at.judge.stranger("outcome")
    at.judge.given_up(1, 2, 0, at.now + 1)


def test_what_strangers_do_to_a_key_ends_no_job(at: At) -> None:
    strangers = [parse_fault("forge:term@3")]
    at.judge.over(strangers)
    at.judge.changed(at.agent, "claim", {SPEC: SPEC_2}, {SPEC: SPEC_2, TERM: TERM_1})
    at.judge.over(())
    with pytest.raises(Violation, match="a stranger has ended the job"):
        at.judge.over(strangers)
    at.judge.over([*strangers, parse_fault("kill:a0@4")])
    at.judge.is_over(1)
    at.judge.over(strangers)
