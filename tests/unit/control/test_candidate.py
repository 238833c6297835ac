"""A candidate waits, takes over, and shows that it lives: on a store in memory and a clock of the test's."""

import threading
from collections.abc import Callable

import pytest
from tests.fake_etcd import FakeEtcd, FakeGateway, Fault, answer_lost, delayed, lost

from elaswave.control import candidate
from elaswave.control.candidate import Beats, Progress, Stage, Won, progress_of, stand_by
from elaswave.control.etcd_client import REQUEST_TIMEOUT_S, EtcdClient
from elaswave.control.etcd_keys import found
from elaswave.errors import StoreError, SupersededError
from elaswave.protocol.election import BEAT_S, POLL_S, STILL_S, Watch
from elaswave.protocol.store_writes import BEAT, TERM, Transaction


class World:
    """A store, and a clock that goes on while a candidate waits."""

    def __init__(self) -> None:
        self.etcd = FakeEtcd()
        self.gateway = FakeGateway(self.etcd)
        self.now_s = 1000.0
        self.on_wait: Callable[[], None] = lambda: None
        self.founded = found(self.client(FakeGateway(self.etcd)), b"a test", 1.0)

    def client(self, gateway: FakeGateway) -> EtcdClient:
        return EtcdClient(["a:1", "b:2"], "/elaswave/job/", gateway)

    def beat(self) -> None:
        self.client(FakeGateway(self.etcd)).carry_out(Transaction(puts=((BEAT, b"again"),)))

    def stand_by(
        self, name: str = "a/1", *, founds: bool = False, ended_s: float | None = None, founded: int = 0
    ) -> Won:
        watch = Watch(name, founds=founds)
        client = self.client(self.gateway)
        now_s = lambda: self.now_s  # noqa: E731
        return stand_by(client, watch, name, founded=founded, ended_s=ended_s, now_s=now_s, wait=self._wait)

    def _wait(self, wait_s: float) -> None:
        self.now_s += wait_s
        assert self.now_s < 1100.0, "it never takes over"
        self.on_wait()


@pytest.fixture
def world() -> World:
    return World()


def test_the_founder_has_the_job_at_once_and_follows_itself_at_once(world: World) -> None:
    first = world.stand_by("a/1", founds=True)
    assert (first.term.term, first.term.name, first.missed_s) == (1, "a/1", None)
    assert world.stand_by("a/1", founds=True).term.term == 2
    assert world.now_s == 1000.0


def test_another_candidate_waits_until_the_beat_stands_still(world: World) -> None:
    world.stand_by("a/1", founds=True)
    beats_until_s = world.now_s + 10.0

    def live() -> None:
        if world.now_s <= beats_until_s:
            world.beat()

    world.on_wait = live
    won = world.stand_by("b/2")
    assert won.term.term == 2 and won.missed_s == beats_until_s
    assert STILL_S <= world.now_s - beats_until_s <= STILL_S + 2 * POLL_S


def test_a_coordinator_is_missed_from_its_end_on_and_that_of_another_host_since_its_beat_stands_still(
    world: World,
) -> None:
    world.stand_by("a/1", founds=True)
    assert world.stand_by("a/1", ended_s=990.0).missed_s == 990.0
    assert world.stand_by("b/2").missed_s == 1000.0
    begun_s = world.now_s
    assert world.stand_by("a/1", ended_s=990.0).missed_s == begun_s, "b/2 has had the job since"


@pytest.mark.parametrize("fault", [lost, answer_lost, delayed])
def test_a_claim_without_an_answer_is_made_once(world: World, fault: Fault) -> None:
    world.gateway.faults = [lambda *_: None, fault, fault]
    won = world.stand_by("a/1", founds=True)
    world.gateway.arrive()
    (standing,) = world.client(world.gateway).carry_out(Transaction(reads=(TERM,))).found
    assert standing is not None and (won.term.term, won.term.revision) == (1, standing.revision)
    assert set(world.gateway.timeouts_s) == {REQUEST_TIMEOUT_S}, "a candidate's requests do not get longer and longer"


def test_a_store_that_is_gone_elects_nobody(world: World) -> None:
    """Ten seconds without an answer, in which no beat could be written either."""
    world.stand_by("a/1", founds=True)
    gone_until_s = 1011.0

    def gone(gateway: FakeGateway, path: str, body: bytes) -> None:
        gateway.faults.append(gone)
        if 1001.0 <= world.now_s < gone_until_s:
            raise TimeoutError("timed out")

    world.gateway.faults = [gone]
    won = world.stand_by("b/2")
    assert won.missed_s is not None and won.missed_s >= gone_until_s and world.now_s >= gone_until_s + STILL_S


def test_of_two_candidates_one_is_quicker_and_the_other_one_watches_it(world: World) -> None:
    world.stand_by("a/1", founds=True)
    rivals: list[Won] = []

    def quicker(gateway: FakeGateway, path: str, body: bytes) -> None:
        if b'"compare": [{' in body and not rivals:
            rival = Watch("a/1")
            client = world.client(FakeGateway(world.etcd))
            rivals.append(stand_by(client, rival, "a/1", now_s=lambda: world.now_s, wait=lambda wait_s: None))
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
    assert world.stand_by(founds=True, founded=world.founded).term.term == 1
    with pytest.raises(StoreError, match="the job was founded again; who is of the last one does not follow there"):
        world.stand_by(founds=True, founded=world.founded - 1)


def test_a_beat_goes_on_through_requests_without_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "BEAT_S", 0.001)
    won = world.stand_by("a/1", founds=True)
    written = threading.Event()

    def note(gateway: FakeGateway, path: str, body: bytes) -> None:
        written.set()

    beats = Beats(world.client(FakeGateway(world.etcd, [lost, answer_lost, note])), won.term)
    assert written.wait(30)
    beats.stop()
    (beat,) = world.client(world.gateway).carry_out(Transaction(reads=(BEAT,))).found
    assert beat is not None and BEAT_S < STILL_S / 3


@pytest.mark.parametrize("is_early", [True, False])
def test_who_was_replaced_learns_it_by_its_beat(world: World, is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate, "BEAT_S", 0.001)
    first = world.stand_by("a/1", founds=True)
    world.stand_by("a/1")
    told, errors = threading.Event(), list[SupersededError]()
    beats = Beats(world.client(FakeGateway(world.etcd)), first.term)
    if is_early:
        beats._thread.join(30)
    beats.tell(lambda error: (errors.append(error), told.set()))  # type: ignore[func-returns-value]
    assert told.wait(30)
    assert "a/1 has taken over as its number 2" in str(errors[0])
    beats.stop()


def test_reports_are_lines() -> None:
    lines = Progress(Stage.HOLDS, 3).line() + Progress(Stage.SERVES, 3).line()
    assert progress_of(lines) == [Progress(Stage.HOLDS, 3), Progress(Stage.SERVES, 3)]
    assert progress_of(b"") == []
