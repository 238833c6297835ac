"""A candidate waits, takes over, and shows that it lives: on a store in memory and a clock of the test's."""

import threading
from collections.abc import Callable

import pytest
from tests.fake_etcd import KEY, STRANGERS, FakeEtcd, FakeGateway, Fault, Written, answer_lost, delayed, lost

from elaswave.errors import DisplacedError, StoreError, SupersededError
from elaswave.protocol.coordinator.store_writes import (
    LEASE_HEARTBEAT,
    SPEC,
    TERM,
    Transaction,
    job_generation_of,
    lease_heartbeat_value,
    spec_value,
)
from elaswave.protocol.leadership.election import LEASE_HEARTBEAT_S, POLL_S, STILL_S, CoordinatorCandidate, Won
from elaswave.store import claim
from elaswave.store.claim import CandidateProgress, CandidateStage, LeaseHeartbeats, progress_of, stand_by
from elaswave.store.etcd_client import REQUEST_TIMEOUT_S, EtcdClient
from elaswave.store.etcd_store import found, new_nonce


class World:
    """A store, and a clock that goes on while a candidate waits."""

    def __init__(self) -> None:
        self.etcd = FakeEtcd()
        self.gateway = FakeGateway(self.etcd)
        self.now_s = 1000.0
        self.num_beats = 0
        self.on_wait: Callable[[], None] = lambda: None
        self.job_generation = found(self.client(FakeGateway(self.etcd)), spec_value(7), 1.0)

    def client(self, gateway: FakeGateway, job_generation: int = 7) -> EtcdClient:
        return EtcdClient(["a:1", "b:2"], "/elaswave/job/", gateway, KEY, job_generation=job_generation)

    def lease_heartbeat(self) -> None:
        self.num_beats += 1
        self.client(FakeGateway(self.etcd)).carry_out(
            Transaction(puts=((LEASE_HEARTBEAT, lease_heartbeat_value(1, self.num_beats)),))
        )

    def stand_by(
        self, name: str = "a/1", *, creates_job: bool = False, ended_s: float | None = None, job_generation: int = 7
    ) -> Won:
        candidate = CoordinatorCandidate(name, job_generation, new_nonce, creates_job=creates_job, ended_s=ended_s)
        client = self.client(self.gateway, job_generation)
        return stand_by(client, candidate, now_s=lambda: self.now_s, wait=self._wait)

    def _wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        assert self.now_s < 1100.0, "it never takes over"
        self.on_wait()


@pytest.fixture
def world() -> World:
    return World()


def test_the_founder_has_the_job_at_once_and_follows_itself_at_once(world: World) -> None:
    first = world.stand_by("a/1", creates_job=True)
    assert (first.term.term, first.term.name, first.missed_s) == (1, "a/1", None)
    assert world.stand_by("a/1", creates_job=True).term.term == 2
    assert world.now_s == 1000.0


def test_another_candidate_waits_until_the_beat_stands_still(world: World) -> None:
    world.stand_by("a/1", creates_job=True)
    beats_until_s = world.now_s + 10.0

    def live() -> None:
        if world.now_s <= beats_until_s:
            world.lease_heartbeat()

    world.on_wait = live
    won = world.stand_by("b/2")
    assert won.term.term == 2 and won.missed_s == beats_until_s
    assert STILL_S <= world.now_s - beats_until_s <= STILL_S + 2 * POLL_S


def test_a_coordinator_is_missed_from_its_end_on_and_that_of_another_host_since_its_beat_stands_still(
    world: World,
) -> None:
    world.stand_by("a/1", creates_job=True)
    assert world.stand_by("a/1", ended_s=990.0).missed_s == 990.0
    assert world.stand_by("b/2").missed_s == 1000.0
    begun_s = world.now_s
    assert world.stand_by("a/1", ended_s=990.0).missed_s == begun_s, "b/2 has had the job since"


@pytest.mark.parametrize("fault", [lost, answer_lost, delayed])
def test_a_claim_without_an_answer_is_made_once(world: World, fault: Fault) -> None:
    world.gateway.faults = [lambda *_: None, lambda *_: None, fault, fault]
    won = world.stand_by("a/1", creates_job=True)
    world.gateway.arrive()
    (standing,) = world.client(world.gateway).carry_out(Transaction(reads=(TERM,))).found
    assert standing is not None and (won.term.term, won.term.revision) == (1, standing.revision)
    assert set(world.gateway.timeouts_s) == {REQUEST_TIMEOUT_S}, "a candidate's requests do not get longer and longer"


def test_a_store_that_is_gone_elects_nobody(world: World) -> None:
    """Ten seconds without an answer, in which no lease heartbeat could be written either."""
    world.stand_by("a/1", creates_job=True)
    gone_until_s = 1011.0

    def gone(gateway: FakeGateway, path: str, body: bytes) -> None:
        gateway.faults.append(gone)
        if 1001.0 <= world.now_s < gone_until_s:
            raise TimeoutError("timed out")

    world.gateway.faults = [gone]
    won = world.stand_by("b/2")
    assert won.missed_s is not None and won.missed_s >= gone_until_s and world.now_s >= gone_until_s + STILL_S


def test_of_two_candidates_one_is_quicker_and_the_other_one_watches_it(world: World) -> None:
    world.stand_by("a/1", creates_job=True)
    rivals: list[Won] = []

    def quicker(gateway: FakeGateway, path: str, body: bytes) -> None:
        if b'"compare": [{' in body and not rivals:
            rival = CoordinatorCandidate("a/1", 7, new_nonce)
            client = world.client(FakeGateway(world.etcd))
            rivals.append(stand_by(client, rival, now_s=lambda: world.now_s, wait=lambda wait_s: None))
        if not rivals:
            gateway.faults.append(quicker)

    world.gateway.faults = [quicker]
    won = world.stand_by("b/2")
    assert [rival.term.term for rival in rivals] == [2] and won.term.term == 3
    assert world.now_s >= 1000.0 + 2 * STILL_S


def test_a_job_whose_keys_are_gone_has_no_candidates(world: World) -> None:
    world.etcd.keys.clear()
    with pytest.raises(StoreError, match="holds no job: its keys were removed"):
        world.stand_by()


def test_a_candidate_of_the_last_founding_does_not_take_the_job(world: World) -> None:
    assert world.stand_by(creates_job=True, job_generation=world.job_generation).term.term == 1
    with pytest.raises(StoreError, match="the job was created again; who is of the last one does not follow there"):
        world.stand_by(creates_job=True, job_generation=world.job_generation - 1)


def test_a_beat_goes_on_through_requests_without_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LEASE_HEARTBEAT_S", 0.001)
    won = world.stand_by("a/1", creates_job=True)
    written = threading.Event()

    def note(gateway: FakeGateway, path: str, body: bytes) -> None:
        written.set()

    beats = LeaseHeartbeats(world.client(FakeGateway(world.etcd, [lost, answer_lost, note])), won.term)
    assert written.wait(30)
    beats.stop()
    (lease_heartbeat,) = world.client(world.gateway).carry_out(Transaction(reads=(LEASE_HEARTBEAT,))).found
    assert lease_heartbeat is not None and LEASE_HEARTBEAT_S < STILL_S / 3


@pytest.mark.parametrize("is_early", [True, False])
def test_who_was_replaced_learns_it_by_its_beat(world: World, is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LEASE_HEARTBEAT_S", 0.001)
    first = world.stand_by("a/1", creates_job=True)
    world.stand_by("a/1")
    told, errors = threading.Event(), list[SupersededError]()
    beats = LeaseHeartbeats(world.client(FakeGateway(world.etcd)), first.term)
    if is_early:
        beats._thread.join(30)
    beats.tell(lambda error: (errors.append(error), told.set()))  # type: ignore[func-returns-value]
    assert told.wait(30)
    assert "a/1 has taken over as its number 2" in str(errors[0])
    beats.stop()


def test_reports_are_lines() -> None:
    lines = CandidateProgress(CandidateStage.HOLDS, 3).line() + CandidateProgress(CandidateStage.SERVES, 3).line()
    assert progress_of(lines) == [
        CandidateProgress(CandidateStage.HOLDS, 3),
        CandidateProgress(CandidateStage.SERVES, 3),
    ]
    assert progress_of(b"") == []


# ------------------------------------------------------------------------------------------------------ strangers (H14)


def write(world: World, key: str, value: bytes | None) -> None:
    """Somebody who may write to the store does; None: removes."""
    world.etcd.revision += 1
    name = f"/elaswave/job/{key}".encode()
    if value is None:
        world.etcd.keys.pop(name, None)
    else:
        world.etcd.keys[name] = Written(value, world.etcd.revision, 1)


def stored(world: World, key: str) -> bytes:
    return world.etcd.keys[f"/elaswave/job/{key}".encode()].value


def test_beats_that_a_stranger_writes_keep_no_dead_coordinator_alive(world: World) -> None:
    world.stand_by("a/1", creates_job=True)
    beats: list[bytes] = []
    for _ in range(3):
        world.lease_heartbeat()
        beats.append(stored(world, "lease_heartbeat"))

    def go_on() -> None:
        write(world, "lease_heartbeat", (*beats, b"forged")[int(4 * world.now_s) % 4])

    world.on_wait = go_on
    won = world.stand_by("b/2")
    assert won.term.term == 2 and world.now_s <= 1000.0 + STILL_S + 2 * POLL_S


@pytest.mark.parametrize("key", ["spec", "term"])
@pytest.mark.parametrize("value", [b"forged", None])
def test_a_claim_that_a_stranger_takes_away_is_followed_by_a_newer_one(
    world: World, key: str, value: bytes | None
) -> None:
    world.stand_by("a/1", creates_job=True)
    first = stored(world, "term")
    assert world.stand_by("a/1").term.term == 2
    waits: list[None] = []

    def strike() -> None:
        waits.append(None)
        if len(waits) == 2:
            write(world, key, first if (key, value) == ("term", b"forged") else value)

    world.on_wait = strike
    won = world.stand_by("b/2")
    assert (won.term.term, won.term.name) == (3, "b/2")
    (spec,) = world.client(world.gateway).carry_out(Transaction(reads=(SPEC,))).found
    assert job_generation_of(spec) == 7


def test_a_coordinator_whose_claim_was_taken_away_is_told_to_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "LEASE_HEARTBEAT_S", 0.001)
    won = world.stand_by("a/1", creates_job=True)
    write(world, "term", b"forged")
    told, errors = threading.Event(), list[StoreError]()
    beats = LeaseHeartbeats(world.client(FakeGateway(world.etcd)), won.term)
    beats.tell(lambda error: (errors.append(error), told.set()))  # type: ignore[func-returns-value]
    assert told.wait(30) and isinstance(errors[0], DisplacedError)
    beats.stop()


def test_a_job_of_another_key_is_not_claimed(world: World) -> None:
    other = EtcdClient(["a:1"], "/elaswave/job/", FakeGateway(world.etcd), STRANGERS)
    world.etcd.keys.clear()
    found(other, spec_value(9), 1.0)
    before = dict(world.etcd.keys)
    with pytest.raises(StoreError, match="holds what was not written with this job's key"):
        world.stand_by(creates_job=True)
    assert world.etcd.keys == before
