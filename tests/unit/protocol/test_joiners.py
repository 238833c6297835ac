"""The joiners of a job as its coordinator sees them, and what a successor knows of them."""

import math
from typing import Any

import msgspec
import pytest
from tests.integration.jobs import small_config
from tests.unit.shapes import make_shape

from elaswave.blocks.placement import Placement
from elaswave.blocks.shapes import StateShapes
from elaswave.coordinator.driver import founders_of
from elaswave.job.plan import RunPlan, identity_of
from elaswave.protocol.events import LeavingRecord, NewGenerationRecord
from elaswave.protocol.membership.admissions import Founders
from elaswave.protocol.membership.effects import PlaceTaken, StepPublished
from elaswave.protocol.membership.hosts import Came, Hosts
from elaswave.protocol.membership.joiners import BACKOFF_S_MIN, AdmissionResult, Joiners, MembershipTerms
from elaswave.protocol.messages import PROTOCOL_VERSION, Decision, Joining
from elaswave.protocol.step.ballot import Ballot, Request, Scores, VoteShape, encode_certificate, pairs_of
from elaswave.store.store import JournalRecord, Published, core_records, membership_records

NAMES = ("embedding", "block.0", "block.1", "store_position")
SHAPES = StateShapes(NAMES, tuple(make_shape([(4,)], layer=layer, first_id=layer) for layer in range(4)), ("master",))
FACTS = {"num_bytes": 12, "sample": "ab"}
DETERMINISM_HASHES = {0: 100, 1: 101, 2: 102, 3: 103, 4: 104}


class Job:
    """A journal, what people were told, and the joiners that its newest coordinator knows."""

    def __init__(self, **settings: Any) -> None:
        config = small_config({"elastic.respawn": True, "layout.stages": 2, "layout.replicas": 1, **settings})
        self.plan = RunPlan(config, SHAPES)
        self.identity = identity_of(self.plan, FACTS)
        self.journal: list[JournalRecord] = []
        self.told: list[str] = []
        self.away_until_s: dict[int, float] = {}
        self.take_over()

    def take_over(self) -> Joiners:
        """The next coordinator reads the journal, as it lies on the disk."""
        written = [msgspec.json.encode(record) for record in self.journal]
        self.journal = [msgspec.json.decode(line, type=JournalRecord) for line in written]
        config, hosts = self.plan.config, Hosts(home=11)
        hosts.connected(hosts.add(Came(0, "a", 11, 0), 0.0))
        terms = MembershipTerms(
            self.plan.layout, respawns=config.elastic.respawns, layer_names=tuple(self.plan.state.layer_names)
        )
        self.joiners = Joiners(
            terms,
            hosts,
            membership_records(self.journal),
            lambda vector, environment: founders_of(self.plan, self.identity, vector, environment),
            lambda worker: self.away_until_s.get(worker, 0.0),
        )
        return self.joiners

    def due(self, now_s: float) -> list[int]:
        """Who is started now."""
        return self._started(self.joiners.due(now_s))

    def request(self, count: int, now_s: float, request: int = 0) -> list[int]:
        """Who is started for a person."""
        return self._started(self.joiners.request(count, now_s, request))

    def _started(self, records: list[PlaceTaken]) -> list[int]:
        self.journal += records
        return [record.worker for record in records]

    def ended(self, worker: int, now_s: float) -> None:
        """A worker has ended."""
        self.told += self.joiners.ended(worker, now_s)

    def left(self, worker: int, within_s: float, now_s: float) -> None:
        """A worker is to leave."""
        self.journal.append(self.joiners.left(worker, within_s, now_s))

    def publish(self, step: int, members: tuple[int, ...] = (0, 1)) -> list[AdmissionResult]:
        """A step is committed and published."""
        self.journal.append(Published(step=step, loss=2.0, finished_s=float(step)))
        founders, answers = self.joiners.committed(members, vote(self.plan), "Processor A")
        self.journal += [] if founders is None else [founders]
        return answers

    def joining(self, worker: int, **differs: Any) -> Joining:
        own = Joining(
            worker=worker,
            address=f"unix:/{worker}",
            protocol=PROTOCOL_VERSION,
            environment="Processor A",
            determinism_hashes={0: 100, 1: 101, 2: 102, 4: 104},
            **self.identity._asdict(),
        )
        return msgspec.structs.replace(own, **differs)


def vote(plan: RunPlan) -> bytes:
    shape = VoteShape(plan.config.batch.num_microbatches, len(plan.tensors), num_determinism_hashes=1 + len(NAMES))
    ballot = Ballot(
        coverage=0,
        residency=0,
        agreement=0,
        partial_sums=0,
        next_state=17,
        scores=Scores({}),
        square_sums=(),
        maxima={},
        nonfinite=None,
        request=Request.NONE,
        determinism_hashes=pairs_of({}, DETERMINISM_HASHES),
    )
    return encode_certificate(shape.vector_of(ballot))


def decision(*members: int) -> Decision:
    job = Job()
    return Decision(
        term=1, generation=2, members=members, lost=(), evidence=None, resume_step=2, resume_attempt=1,
        layout=job.plan.layout, placement=Placement.of((), ()), deliver=(), rollback=None, evaluate=False,
        checkpoint=False, published=1, promoted=0, reason="",
    )  # fmt: skip


def test_a_joiner_is_compared_with_those_that_began():
    job = Job()
    assert job.publish(1) == []
    assert job.joiners.received(job.joining(2)) == [AdmissionResult(job.joining(2), None)]
    (answer,) = job.joiners.received(job.joining(3, data_hash=1))
    assert answer.problem == "its data are others: give it the files that the run trains on"
    (answer,) = job.joiners.received(job.joining(4, determinism_hashes={0: 100, 2: 7}, environment="Processor B"))
    assert answer.problem is not None and "the same kind as block.0 give other bits" in answer.problem
    (answer,) = job.joiners.received(job.joining(4, determinism_hashes={0: 99}, environment="Processor B"))
    assert answer.problem is not None and "Processor B, and the job Processor A" in answer.problem


def test_one_that_comes_before_the_first_step_is_answered_with_it():
    job = Job()
    assert job.joiners.received(job.joining(2)) == job.joiners.received(job.joining(2)) == []
    assert job.joiners.received(job.joining(3, model_hash=1)) == []
    job.ended(3, 1.0)
    assert job.publish(1) == [AdmissionResult(job.joining(2), None)], "once, and nobody who has ended"
    assert job.publish(2) == []


def test_a_successor_compares_with_the_founders_and_not_with_itself():
    job = Job()
    job.publish(1)
    (founders,) = [record for record in job.journal if isinstance(record, Founders)]
    assert founders.determinism_hashes == DETERMINISM_HASHES
    job.identity = job.identity._replace(libraries="torch 99")
    joiners = job.take_over()
    assert joiners.received(job.joining(2, libraries=founders.libraries))[0].problem is None
    (answer,) = joiners.received(job.joining(3))
    assert answer.problem is not None and "it has torch 99, and the job" in answer.problem
    job.publish(2)
    assert sum(isinstance(record, Founders) for record in job.journal) == 1
    assert core_records(job.journal) == []


def test_places_and_back_offs_outlive_the_coordinator():
    job = Job()
    job.publish(1)
    job.ended(1, 10.0)
    assert (job.joiners.next_s, job.due(10.5), job.due(11.0)) == (11.0, [], [2])
    assert job.journal[-1] == PlaceTaken(worker=2, place=1, at_s=11.0, backoff_s=2.0)
    assert job.request(1, 12.0) == [3]
    joiners = job.take_over()
    assert joiners.started == [2, 3] and math.isinf(joiners.next_s)
    job.ended(1, 10.0)  # the agent tells every coordinator of all ends
    job.ended(2, 13.0)
    assert job.due(20.0) == [4], "ids are never used again"
    job.ended(4, 21.0)
    assert job.due(30.0) == [5]
    job.ended(5, 31.0)
    assert "place 1 stays empty: workers 2, 4 and 5" in job.told[0]


def test_a_request_that_comes_again_starts_nobody_else():
    job = Job()
    job.publish(1)
    assert job.request(2, 5.0, request=7) == job.joiners.started_for(7) == [2, 3]
    joiners = job.take_over()
    assert joiners.started_for(7) == [2, 3], "nor with a successor, whether it was answered before or not"
    assert (joiners.started_for(8), joiners.started_for(0)) == ([], [])
    assert job.request(1, 9.0) == [4] and joiners.started_for(0) == []


def test_who_has_been_a_member_is_known_to_a_successor_too():
    job = Job()
    job.joiners.joined([2])
    assert [job.joiners.was_member(worker) for worker in (0, 1, 2, 3)] == [True, True, True, False]
    job.journal.append(NewGenerationRecord(term=1, generation=2, members=(0, 3), lost=(1,), reason=""))
    assert [job.take_over().was_member(worker) for worker in (0, 1, 2, 3)] == [True, True, False, True]


@pytest.mark.parametrize("is_decided", [True, False])
def test_a_successor_takes_a_place_again_whose_process_is_there_still(is_decided):
    job = Job()
    job.publish(1)
    job.journal.append(NewGenerationRecord(term=1, generation=2, members=(0,), lost=(1,), reason="worker 1 is stopped"))
    if is_decided:
        job.journal.append(decision(0))
    joiners = job.take_over()
    joiners.take_over((0,), 10.0)
    assert job.due(11.0) == [2]
    joiners = job.take_over()
    joiners.take_over((0,), 12.0)
    assert joiners.next_s == math.inf, "once"


def test_a_successor_knows_who_has_committed_steps():
    job = Job()
    job.journal += [
        Published(step=1, loss=2.0, finished_s=1.0),
        PlaceTaken(worker=2, place=1, at_s=11.0),
        decision(0, 2),
        Published(step=2, loss=2.0, finished_s=2.0),
        PlaceTaken(worker=3, place=1, at_s=20.0),
        PlaceTaken(worker=4, place=1, at_s=30.0),
    ]
    job.take_over()
    job.ended(4, 31.0)
    assert (job.told, job.due(60.0)) == ([], [5]), "two have died since worker 2 had committed step 2"
    job.ended(5, 61.0)
    assert len(job.told) == 1


@pytest.mark.parametrize("settings", [{"elastic.respawn": False}, {"elastic.policy": "recycle_rerouting"}])
def test_rivals_and_runs_that_shrink_take_no_place_again(settings):
    job = Job(**settings)
    job.publish(1)
    job.ended(1, 10.0)
    assert math.isinf(job.joiners.next_s) and job.due(1e6) == []
    assert job.request(2, 20.0) == [2, 3], "what is asked for is started all the same"


def test_nobody_takes_the_place_of_one_that_has_left_under_an_earlier_coordinator():
    job = Job()
    job.journal.append(LeavingRecord(term=1, worker=1))
    joiners = job.take_over()
    job.ended(1, 10.0)  # the agent tells every coordinator of all ends
    assert joiners.next_s == math.inf


def test_nobody_takes_the_place_of_one_that_was_asked_to_leave_or_when_the_job_stops():
    job = Job()
    job.publish(1)
    job.left(0, 30.0, 4.0)
    job.ended(0, 5.0)
    job.ended(1, 5.0)
    job.joiners.stop()
    assert job.due(1e6) == job.request(1, 1e6) == []


def test_a_successor_goes_on_with_the_back_off_and_does_not_begin_it_anew():
    job = Job()
    job.publish(1)
    job.ended(1, 10.0)
    assert job.due(11.0) == [2]
    job.ended(2, 12.0)
    assert (job.joiners.next_s, job.due(14.0)) == (14.0, [3])
    joiners = job.take_over()
    job.ended(3, 20.0)
    assert joiners.next_s == 24.0, "as after 1 s and 2 s"


def test_a_successor_waits_from_when_the_others_went_on():
    job = Job()
    job.publish(1)
    job.journal.append(PlaceTaken(worker=2, place=1, at_s=10.0, backoff_s=8.0))
    job.journal.append(
        NewGenerationRecord(term=1, generation=2, members=(0, 2), joined=(2,), lost=(), reason="", at_s=11.0)
    )
    job.journal.append(NewGenerationRecord(term=1, generation=3, members=(0,), lost=(2,), reason="", at_s=20.0))
    joiners = job.take_over()
    joiners.take_over((0,), 25.0)
    assert joiners.next_s == 28.0


def test_a_successor_knows_of_notices_that_joiners_have_had():
    """The agent tells it only that their processes have ended."""
    job = Job()
    job.publish(1)
    assert job.request(2, 5.0) == [2, 3]
    job.left(2, 0.0, 6.0)
    joiners = job.take_over()
    job.ended(2, 7.0)
    assert joiners.next_s == math.inf
    job.ended(3, 7.0)
    assert joiners.next_s == 8.0, "which has had none"


def test_a_successor_counts_with_what_is_left_of_the_time_of_those_that_leave():
    job = Job()
    job.left(1, 30.0, 100.0)
    job.journal.append(LeavingRecord(term=1, worker=1))
    assert job.take_over().leave_at_s == {1: 130.0}
    job.left(1, 5.0, 104.0)
    assert job.take_over().leave_at_s == {1: 109.0}, "a notice has come in between"


def test_nobody_takes_a_place_at_a_site_that_is_away():
    """Until it is back; a successor knows it as well."""
    job = Job()
    job.publish(1)
    job.away_until_s[1] = 70.0
    job.ended(1, 10.0)
    assert job.joiners.next_s == 70.0 + BACKOFF_S_MIN
    assert job.due(70.0) == [] and job.due(71.0) == [2]

    job = Job()
    job.publish(1)
    job.away_until_s[1] = 70.0
    job.journal.append(
        NewGenerationRecord(term=1, generation=2, members=(0,), lost=(1,), reason="it is silent", at_s=10.0)
    )
    assert job.take_over().next_s == 70.0 + BACKOFF_S_MIN


def test_a_successor_knows_of_which_hosts_a_worker_has_committed() -> None:
    job = Job()
    for records, num_fruitless in (([], 1), ([StepPublished()], 0)):
        hosts = Hosts((0, 1), home=11)
        for number, node in enumerate("ab"):
            hosts.restore(Came(number, node, 11 + number, 0), 0.0)
        Joiners(MembershipTerms(job.plan.layout), hosts, records, lambda vector, environment: no_founders())
        hosts.give_up(hosts.numbered(1))
        answer = hosts.hello("b", 30, 0)
        assert isinstance(answer, Came) and answer.num_fruitless == num_fruitless


def no_founders() -> Founders:
    raise AssertionError("no step is committed here")
