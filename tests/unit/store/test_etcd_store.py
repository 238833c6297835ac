"""Answers of etcd that are lost, late or refused: nothing is lost, written twice, or written by who was replaced."""

import json
import random
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.fake_etcd import (
    KEY,
    STRANGERS,
    FakeEtcd,
    FakeGateway,
    Fault,
    Written,
    answer_lost,
    delayed,
    fine,
    lost,
    says,
)
from tests.unit.reports import decision_of

from elaswave.blocks.placement import Placement
from elaswave.errors import DisplacedError, StoreError, SupersededError
from elaswave.protocol.coordinator.store_writes import (
    NOBODY,
    SPEC,
    Claim,
    KeyValue,
    Transaction,
    job_generation_of,
    spec_value,
)
from elaswave.protocol.messages import Decision
from elaswave.store import etcd_store
from elaswave.store.etcd_client import EtcdClient
from elaswave.store.etcd_entries import CHUNK_BYTES, entry_key, pack_records
from elaswave.store.etcd_store import EtcdStore, found, remove
from elaswave.store.store import Owner

PREFIX = "/elaswave/job/"
SPEC_7 = KeyValue(SPEC, spec_value(7), 1)


class Said(msgspec.Struct, frozen=True, tag=True):
    text: str


Record = Said | Decision


class World:
    """A cluster, and those who use it."""

    def __init__(self) -> None:
        self.etcd = FakeEtcd()
        self.said: list[str] = []
        self.broken: list[StoreError] = []
        self.num_turns = 0
        self.stores: list[EtcdStore[Record]] = []
        found(self.client(FakeGateway(self.etcd)), spec_value(7), 1.0)

    def client(self, gateway: FakeGateway, key: bytes = KEY) -> EtcdClient:
        return EtcdClient(["a:1", "b:2", "c:3"], PREFIX, gateway, key)

    def open(
        self, gateway: FakeGateway | None = None, *, patience_s: float = 30.0, job_generation: int = 0
    ) -> EtcdStore[Record]:
        owner = Owner(post=lambda call: call(), turn=self._turn, say=self.said.append, broken=self.broken.append)
        client = self.client(gateway or FakeGateway(self.etcd))
        client.job_generation = job_generation
        store: EtcdStore[Record] = EtcdStore(client, Record, owner, patience_s=patience_s)
        self.stores.append(store)
        return store

    def _turn(self) -> None:
        self.num_turns += 1

    def texts(self) -> list[str]:
        """What a new coordinator reads."""
        store = self.open()
        store.close()
        return [
            record.text if isinstance(record, Said) else f"generation {record.generation}" for record in store.records()
        ]

    def backup(self) -> Callable[[], None]:
        """Copies what the cluster holds; returns what puts it in the place of what it holds then."""
        keys, revision = dict(self.etcd.keys), self.etcd.revision

        def restore() -> None:
            self.etcd.keys, self.etcd.revision = dict(keys), revision

        return restore

    def keys(self, folder: str) -> list[str]:
        names = [key.decode().removeprefix(PREFIX) for key in self.etcd.keys]
        return sorted(name for name in names if name.startswith(folder))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name, value in {"RETRY_S": 0.0, "TURN_S": 0.005, "SLOW_S": 0.0, "CLOSE_S": 0.2}.items():
        monkeypatch.setattr(etcd_store, name, value)
    world = World()
    yield world
    for store in world.stores:
        store.close()


UNSURE: list[Fault] = [lost, answer_lost, delayed, says(503, 14, "etcdserver: request timed out"), says(500, 2, "?")]


@pytest.mark.parametrize("fault", UNSURE)
@pytest.mark.parametrize("times", [1, 4])
def test_a_record_whose_answer_does_not_come_is_written_once(world: World, fault: Fault, times: int) -> None:
    gateway = FakeGateway(world.etcd)
    store = world.open(gateway)
    store.append(Said("one"))
    gateway.faults = [fault] * times
    store.append(Said("two"))
    assert store.records() == [Said("one"), Said("two")]
    gateway.arrive()
    store.append(Said("three"))
    gateway.arrive()
    store.close()
    assert world.texts() == ["one", "two", "three"]
    assert world.keys("rec/") == [entry_key(at) for at in range(3)]
    assert set(gateway.endpoints) == {"a:1", "b:2", "c:3"} if times > 2 else True


@pytest.mark.parametrize("fault", UNSURE)
def test_an_opening_whose_answers_do_not_come_succeeds(world: World, fault: Fault) -> None:
    world.open().append(Said("one"))
    for before in range(4):
        store = world.open(FakeGateway(world.etcd, [fine] * before + [fault]))
        store.append(Said(f"after {before}"))
        store.close()
    assert world.texts() == ["one", *[f"after {before}" for before in range(4)]]


def test_what_a_replaced_coordinator_has_sent_is_not_written_when_it_arrives_late(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    first = world.open(gateway)
    first.append(Said("one"))

    def taken_over_meanwhile(gateway: FakeGateway, path: str, body: bytes) -> None:
        gateway.late.append((path, body))
        world.open().append(Said("two"))
        raise TimeoutError

    gateway.faults = [taken_over_meanwhile]
    with pytest.raises(SupersededError, match="takes no record of this coordinator: .* has taken over as its number 2"):
        first.append(Said("late"))
    gateway.arrive()
    assert world.texts() == ["one", "two"]


def test_a_replaced_coordinator_writes_nothing_though_its_successor_has_written_nothing_yet(world: World) -> None:
    """Its place in the journal is still free: only the term says that it must not write."""
    gateway = FakeGateway(world.etcd)
    first = world.open(gateway)
    first.append(Said("one"))
    successors: list[EtcdStore[Record]] = []

    def taken_over_meanwhile(gateway: FakeGateway, path: str, body: bytes) -> None:
        gateway.late.append((path, body))
        successors.append(world.open())
        raise TimeoutError

    gateway.faults = [taken_over_meanwhile]
    with pytest.raises(SupersededError):
        first.append(Said("late"))
    gateway.arrive()
    (successor,) = successors
    successor.append(Said("two"))
    assert world.texts() == ["one", "two"]


def test_a_record_that_arrived_before_the_take_over_is_read_by_the_successor(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    first = world.open(gateway)

    def arrives_and_is_taken_over(gateway: FakeGateway, path: str, body: bytes) -> None:
        world.etcd.carry_out(path, body)
        assert world.open().records() == [Said("one")]
        raise TimeoutError

    gateway.faults = [arrives_and_is_taken_over]
    with pytest.raises(SupersededError):
        first.append(Said("one"))
    assert world.texts() == ["one"]


def test_of_two_that_take_over_at_once_one_does(world: World) -> None:
    def another_one_is_faster(gateway: FakeGateway, path: str, body: bytes) -> None:
        world.open().append(Said("mine"))

    with pytest.raises(SupersededError, match="another coordinator has taken over in this moment"):
        world.open(FakeGateway(world.etcd, [fine, another_one_is_faster]))
    assert world.texts() == ["mine"]


def test_who_waits_has_turns_says_once_what_for_and_says_when_it_is_over(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    store = world.open(gateway)
    answers = threading.Event()

    def silent(gateway: FakeGateway, path: str, body: bytes) -> None:
        if not answers.is_set():
            gateway.faults.append(silent)
            answers.wait(0.01)
            raise TimeoutError

    def turn() -> None:
        world.num_turns += 1
        if world.num_turns == 5:
            answers.set()

    store._owner = store._owner._replace(turn=turn)
    gateway.faults = [silent]
    store.append(Said("one"))
    store.append(Said("two"))
    assert world.num_turns >= 5
    waits, over = world.said
    assert "the coordinator waits for its store etcd://a:1,b:2,c:3/elaswave/job/, which has not answered for" in waits
    assert "no answer within" in waits and "steps go on meanwhile" in waits
    assert "answers again" in over
    assert world.texts() == ["one", "two"]


def silent_for_ever(gateway: FakeGateway, path: str, body: bytes) -> None:
    gateway.faults.append(silent_for_ever)
    raise ConnectionRefusedError("Connection refused")


def test_a_wait_has_an_end_and_the_store_takes_no_more(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    store = world.open(gateway, patience_s=0.05)
    gateway.faults = [silent_for_ever]
    with pytest.raises(
        StoreError, match=r"has not taken a record for 0 s \(.*Connection refused\); .*store_patience_s"
    ):
        store.append(Said("one"))
    for write in (store.append, store.add):
        with pytest.raises(StoreError, match="has not taken a record"):
            write(Said("two"))
    with pytest.raises(
        StoreError, match="has not answered for 0 s .*Connection refused.* majority of its members runs"
    ):
        world.open(FakeGateway(world.etcd, [silent_for_ever]), patience_s=0.05)
    with pytest.raises(StoreError, match="has not answered"):
        remove(world.client(FakeGateway(world.etcd, [silent_for_ever])), 0.05)


def test_an_end_does_not_wait_for_a_store_that_is_gone(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    store = world.open(gateway)
    gateway.faults = [silent_for_ever]
    store.add(Said("one"))
    store.close()
    assert not store._thread.is_alive() and world.texts() == []
    assert world.broken == []


def test_what_was_added_is_written_without_anybody_who_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "BATCH_S", 0.02)
    store = world.open()
    written = threading.Event()
    for number in range(20):
        store.add(Said(str(number)))
    store.when_durable(written.set)
    assert written.wait(30)
    assert len(store.records()) == 20 and len(world.keys("rec/")) < 20


def test_what_is_added_waits_for_others_and_not_longer(world: World) -> None:
    store = world.open()
    assert etcd_store.BATCH_S <= 2
    store.add(Said("one"))
    called: list[int] = []
    store.when_durable(lambda: called.append(1))
    assert (store.records(), called) == ([], [])
    store.append(Said("two"))
    assert called == [1]
    assert world.keys("rec/") == [entry_key(0)]


def test_a_replaced_coordinator_that_only_adds_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_store, "BATCH_S", 0.0)
    told = threading.Event()
    first = world.open()
    first._owner = first._owner._replace(broken=lambda error: (world.broken.append(error), told.set()))
    world.open()
    called: list[int] = []
    first.add(Said("late"))
    first.when_durable(lambda: called.append(1))
    assert told.wait(30)
    assert isinstance(world.broken[0], SupersededError) and called == []
    assert world.texts() == []


# -------------------------------------------------------------------------------------------------------------- blobs


def placed(generation: int, size: int) -> Decision:
    return msgspec.structs.replace(decision_of(generation), placement=Placement.of([generation] * size, [()] * size))


def test_a_large_placement_travels_in_chunks_before_the_record_that_names_them(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    store = world.open(gateway)
    seen: list[str] = []

    def watch(gateway: FakeGateway, path: str, body: bytes) -> None:
        gateway.faults.append(watch)
        seen.append("rec" if world.keys("rec/") else f"{len(world.keys('blob/'))} chunks")

    gateway.faults = [watch]
    decision = placed(2, 600_000)
    store.append(decision)
    assert seen[:4] == ["0 chunks", "1 chunks", "2 chunks", "3 chunks"]
    assert all(len(written.value) <= CHUNK_BYTES + 40 for written in world.etcd.keys.values())
    store.close()
    assert world.open().records() == [decision]


def test_superseded_placements_are_removed_and_the_newest_one_is_read(world: World) -> None:
    store = world.open()
    store.append(placed(2, 10))
    store.append(Said("between"))
    store.append(placed(3, 10))
    store.append(Said("after"))
    store.close()
    assert len(world.keys("blob/")) == 1
    old, between, new, after = world.open().records()
    assert isinstance(old, Decision) and old.placement == Placement.of((), ())
    assert new == placed(3, 10)


def test_what_a_dead_coordinator_could_not_remove_its_successor_removes(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    store = world.open(gateway)
    store.append(placed(2, 10))
    gateway.faults = [fine, fine, lost]  # the chunk, the record, the removal
    store.append(placed(3, 10))
    store.close()
    assert len(world.keys("blob/")) == 2
    store = world.open()
    store.append(Said("one"))
    store.close()
    assert len(world.keys("blob/")) == 1


def test_a_removal_that_is_late_takes_no_placement_that_counts_again(world: World) -> None:
    for arrives_before_the_record in (True, False):
        gateway = FakeGateway(world.etcd)
        store = world.open(gateway)
        store.append(placed(2, 10))
        gateway.faults = [fine, fine, delayed]
        store.append(placed(3, 10))
        store.append(Said("the thread is done"))  # with the removal: it comes after each record
        store._garbage.clear()
        gateway.late = gateway.late[:1]

        def removal_arrives(gateway: FakeGateway, path: str, body: bytes) -> None:
            gateway.arrive()

        gateway.faults = [fine, removal_arrives] if arrives_before_the_record else [fine, fine, removal_arrives]
        store.append(placed(2, 10))
        store.close()
        records = world.open().records()
        assert records[-1] == placed(2, 10)


def test_a_chunk_that_is_gone_when_its_record_is_written_is_written_again(world: World) -> None:
    gateway = FakeGateway(world.etcd)
    store = world.open(gateway)

    def chunk_goes(gateway: FakeGateway, path: str, body: bytes) -> None:
        for key in world.keys("blob/"):
            del world.etcd.keys[(PREFIX + key).encode()]

    gateway.faults = [fine, chunk_goes]
    store.append(placed(2, 10))
    store.close()
    assert world.open().records() == [placed(2, 10)]


def test_records_that_fit_into_no_transaction_are_refused() -> None:
    with pytest.raises(StoreError, match="1 records take 101 chunks .* needs control.store=file"):
        pack_records([Said("x" * (101 * CHUNK_BYTES - 100))], b"", b"")


# ------------------------------------------------------------------------------------------------------------- damage


def change(world: World, key: str, edit: Callable[[bytes], bytes]) -> None:
    name = (PREFIX + key).encode()
    world.etcd.keys[name] = world.etcd.keys[name]._replace(value=edit(world.etcd.keys[name].value))


def test_every_damage_is_noticed(world: World) -> None:
    store = world.open()
    for text in ("one", "two", "three"):
        store.append(Said(text))
    store.append(placed(2, 10))
    store.close()
    good = dict(world.etcd.keys)
    (chunk,) = world.keys("blob/")
    swap = good[(PREFIX + entry_key(2)).encode()].value
    for break_it, problem in (
        (
            lambda: world.etcd.keys.pop((PREFIX + entry_key(1)).encode()),
            "entry 1 is missing, .* although rec/0*2 is there",
        ),
        (lambda: change(world, entry_key(1), lambda value: swap), "entry 1 .* was not written with the job's key"),
        (
            lambda: change(world, entry_key(1), lambda value: value[:-1]),
            "entry 1 .* was not written with the job's key",
        ),
        (lambda: change(world, entry_key(0), lambda value: value.replace(b"one", b"six")), "entry 0 is missing, or"),
        (lambda: world.etcd.keys.pop((PREFIX + chunk).encode()), "blob .* has 0 of"),
        (lambda: change(world, chunk, lambda value: bytes(len(value))), "blob .* or other ones"),
        (lambda: world.etcd.keys.clear(), "holds no job: its keys were removed"),
    ):
        world.etcd.keys = dict(good)
        break_it()
        with pytest.raises(StoreError, match=problem):
            world.open()


def test_a_job_whose_keys_were_removed_is_written_by_nobody(world: World) -> None:
    store = world.open()
    remove(world.client(FakeGateway(world.etcd)), 1.0)
    assert world.etcd.keys == {}
    with pytest.raises(DisplacedError, match="was removed, forged, or replaced by an older claim"):
        store.append(Said("one"))
    with pytest.raises(StoreError, match="holds no job: its keys were removed"):
        world.open()


@pytest.mark.parametrize(("name", "is_removed"), [("host", True), ("other", False), ("", True)])
def test_keys_stay_if_another_candidate_has_the_job(world: World, name: str, is_removed: bool) -> None:
    term = Claim("host", "nonce", NOBODY, SPEC_7, 7).transaction().puts[0][1]
    client = world.client(FakeGateway(world.etcd))
    client.job_generation = 7
    client.transact([], [client.put("term", term)])
    remove(client, 1.0, name)
    assert bool(world.etcd.keys) is not is_removed


def test_keys_of_a_job_that_nobody_has_are_removed(world: World) -> None:
    remove(world.client(FakeGateway(world.etcd)), 1.0, "host")
    assert world.etcd.keys == {}


def test_a_job_is_founded_once(world: World) -> None:
    etcd = FakeEtcd()
    found(world.client(FakeGateway(etcd, [answer_lost])), spec_value(8, by="me"), 1.0)
    with pytest.raises(StoreError, match="holds another job"):
        found(world.client(FakeGateway(etcd)), spec_value(9), 1.0)


# ------------------------------------------------------------------------------------------------------------- chance


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_lost_or_late_what_is_acknowledged_is_read_in_its_order(world: World, seed: int) -> None:
    """Coordinators follow each other over a bad network, and those that were replaced go on trying."""
    draw = random.Random(seed)
    gateways: list[FakeGateway] = []
    acknowledged: list[str] = []

    def something(gateway: FakeGateway, path: str, body: bytes) -> None:
        gateway.faults.append(something)
        if draw.random() < 0.2:
            draw.choice(gateways).arrive()
        fault = draw.choice([fine, fine, fine, lost, answer_lost, delayed])
        return fault(gateway, path, body)

    stores: list[EtcdStore[Record]] = []
    for term in range(4):
        gateways.append(FakeGateway(world.etcd, [something]))
        stores.append(world.open(gateways[-1]))
        for number in range(draw.randrange(6)):
            text = f"{term}.{number}"
            stores[-1].append(Said(text) if draw.random() < 0.7 else placed(10 * term + number + 1, 5))
            acknowledged.append(text)
        for old in stores[:-1]:
            with pytest.raises(SupersededError):
                old.append(Said("never"))
    for gateway in gateways:
        gateway.arrive()
    stores[-1].close()
    records = world.open().records()
    assert len(records) == len(acknowledged) and Said("never") not in records
    assert [text for text, record in zip(acknowledged, records) if record == Said(text)] == [
        record.text for record in records if isinstance(record, Said)
    ]
    newest = [record for record in records if isinstance(record, Decision)][-1:]
    assert all(record == placed(record.generation, 5) for record in newest)


def test_the_term_tells_who_holds_it(world: World) -> None:
    world.open()
    world.open()
    term = json.loads(world.etcd.keys[(PREFIX + "term").encode()].value[40:])
    assert term["term"] == 2 and ":" in term["holder"] and len(term["nonce"]) == 24


def test_a_coordinator_whose_last_entry_is_gone_ends_the_job(world: World) -> None:
    store = world.open()
    store.append(Said("one"))
    restore = world.backup()
    store.append(Said("two"))
    restore()
    with pytest.raises(StoreError, match=r"has gone back, .*there were 2 entries of term 1, .*, and rec/0+1 is not"):
        store.append(Said("three"))
    assert world.texts() == ["one"]


def test_a_coordinator_whose_claim_is_gone_makes_room_for_one_that_reads_what_is_there(world: World) -> None:
    world.open().append(Said("one"))
    restore = world.backup()
    store = world.open()
    restore()
    with pytest.raises(DisplacedError, match="what coordinator number 2 held was removed, forged, or replaced"):
        store.append(Said("two"))
    assert world.texts() == ["one"]


def test_a_coordinator_that_finds_an_older_copy_learns_it_from_the_members(world: World) -> None:
    first = world.open()
    first.append(Said("one"))
    restore = world.backup()
    first.append(Said("two"))
    heard = first.store_position
    first.close()
    second = world.open()
    second.check(heard)
    second.close()
    restore()
    second = world.open()
    with pytest.raises(StoreError, match="has heard of 2 entries of term 1, .* and there are 1 entries of term 2"):
        second.check(heard)
    before = dict(world.etcd.keys)
    restore()
    third = world.open()
    third.append(Said("another two"))
    with pytest.raises(StoreError, match="has gone back"):
        third.check(heard)
    assert len(world.etcd.keys) == len(before) + 1


def test_a_head_of_a_later_term_ends_a_replaced_coordinator_and_not_the_job(world: World) -> None:
    first = world.open()
    restore = world.backup()
    second = world.open()
    second.append(Said("one"))
    with pytest.raises(SupersededError, match="has taken over as its number 2"):
        first.check(second.store_position)
    restore()
    again = world.open(), world.open()
    later = world.client(FakeGateway(world.etcd)).seal.seal_position(
        msgspec.structs.replace(second.store_position, term=9)
    )
    with pytest.raises(StoreError, match="has gone back") as caught:
        again[1].check(later)
    assert not isinstance(caught.value, SupersededError)


def test_a_job_that_was_founded_again_has_another_history(world: World) -> None:
    first = world.open()
    first.append(Said("one"))
    heard = first.store_position
    first.close()
    remove(world.client(FakeGateway(world.etcd)), 1.0)
    found(world.client(FakeGateway(world.etcd)), spec_value(8), 1.0)
    world.open().check(heard)


# ---------------------------------------------------------------------------------------------------------- strangers


def write(world: World, key: str, value: bytes | None) -> None:
    """Somebody who may write to the store does; None: removes."""
    name = (PREFIX + key).encode()
    world.etcd.revision += 1
    if value is None:
        world.etcd.keys.pop(name, None)
    else:
        world.etcd.keys[name] = Written(value, world.etcd.revision, 1)


def stored(world: World, key: str) -> bytes:
    return world.etcd.keys[(PREFIX + key).encode()].value


FORGED = [b"", b"{", b'{"term": 99, "holder": "x", "nonce": "n"}', b"\xff" * 100, b"x" * 2**20]


@pytest.mark.parametrize("value", [*FORGED, None], ids=range(len(FORGED) + 1))
@pytest.mark.parametrize("key", ["spec", "term"])
def test_a_forged_key_costs_a_coordinator_at_most_and_no_record(world: World, key: str, value: bytes | None) -> None:
    store = world.open()
    store.append(Said("one"))
    write(world, key, value)
    if key == "term":
        with pytest.raises(DisplacedError, match="number 1 held was removed, forged, or replaced by an older claim"):
            store.append(Said("lost"))
    else:
        store.append(Said("two"))
    again = world.open(job_generation=7)
    assert again.records()[0] == Said("one") and again.store_position.term == 2, "its term is a newer one"
    assert found_spec(world) == 7
    again.append(Said("three"))
    assert world.texts()[-1] == "three"


def test_where_both_are_forged_the_entries_tell_whose_job_it_is(world: World) -> None:
    world.open().append(Said("one"))
    for value in (b"forged", None):
        write(world, "spec", value)
        write(world, "term", value)
        store = world.open(job_generation=7)
        assert store.records() == [Said("one")]
    assert (store.store_position.term, found_spec(world)) == (2, 7)


def found_spec(world: World) -> int:
    (spec,) = world.client(FakeGateway(world.etcd)).carry_out(Transaction(reads=(SPEC,))).found
    return job_generation_of(spec)


def test_a_stranger_in_the_place_of_the_next_entry_is_replaced_and_told_of(world: World) -> None:
    store = world.open()
    write(world, entry_key(0), b"forged")
    store.append(Said("one"))
    write(world, entry_key(1), stored(world, entry_key(0)))  # an own value, moved
    store.append(Said("two"))
    write(world, entry_key(2), b"x" * 2**20)
    assert world.texts() == ["one", "two"]
    (line,) = world.said
    assert "rec/0000000000000000 of the store" in line and "written without the job's key: it is replaced" in line


def test_an_entry_that_was_removed_and_is_put_back_ends_the_coordinator_and_not_the_job(world: World) -> None:
    first = world.open()
    first.append(Said("one"))
    kept = stored(world, entry_key(0))
    write(world, entry_key(0), None)
    second = world.open()
    write(world, entry_key(0), kept)
    with pytest.raises(DisplacedError, match="one that was removed has been put back"):
        second.append(Said("two"))
    assert world.texts() == ["one"]


def test_values_of_another_founding_or_another_job_do_not_count(world: World) -> None:
    store = world.open()
    store.append(Said("one"))
    old = {key: stored(world, key) for key in ("term", entry_key(0))}
    remove(world.client(FakeGateway(world.etcd)), 1.0)
    found(world.client(FakeGateway(world.etcd)), spec_value(8), 1.0)
    for key, value in old.items():
        write(world, key, value)
    again = world.open()
    assert again.records() == [] and again.store_position.term == 1
    again.append(Said("new"))
    assert world.texts() == ["new"]


def test_a_head_that_no_coordinator_has_told_ends_nothing(world: World) -> None:
    store = world.open()
    store.append(Said("one"))
    store_position = store.store_position
    for forged in (
        msgspec.structs.replace(store_position, length=99),
        msgspec.structs.replace(store_position, term=99),
        msgspec.structs.replace(store_position, digest=b"another"),
        msgspec.structs.replace(store_position, term=99, length=99, seal=b""),
        msgspec.structs.replace(store_position, length=-1),
    ):
        assert store.check(forged)
    assert not store.check(msgspec.structs.replace(store_position, job_generation=99))
    store.append(Said("two"))


def test_a_stranger_who_founds_a_job_of_this_name_is_told_of_and_nothing_is_removed(world: World) -> None:
    before = dict(world.etcd.keys)
    stranger = world.client(FakeGateway(world.etcd), STRANGERS)
    for call in (
        lambda: found(stranger, spec_value(9), 1.0),
        lambda: EtcdStore(stranger, Record, Owner(print, print, print, print), patience_s=1.0),  # type: ignore[arg-type]
        lambda: remove(stranger, 1.0, "a/1", b"finished", 7),
    ):
        with pytest.raises(StoreError, match="not written with this job's key: .*older release.* del --prefix /elasw"):
            call()
    assert world.etcd.keys == before


def test_an_entry_that_is_put_back_brings_no_job_to_life_that_is_over(world: World) -> None:
    world.open().append(Said("one"))
    kept = stored(world, entry_key(0))
    remove(world.client(FakeGateway(world.etcd)), 1.0, "", b"finished", 7)
    write(world, entry_key(0), kept)
    before = dict(world.etcd.keys)
    with pytest.raises(StoreError, match="holds no job: its keys were removed"):
        world.open(job_generation=7)
    assert world.etcd.keys == before


def test_names_and_values_of_any_size_hinder_no_opening(world: World) -> None:
    world.open().append(Said("one"))
    for number in range(150):
        write(world, f"rec/{number:016d}x", b"junk")
        write(world, f"blob/{number % 30}", b"junk")
    write(world, "rec/\udcff".encode(errors="surrogateescape").decode("latin-1"), b"x" * 2**20)
    store = world.open()
    assert store.records() == [Said("one")]
    store.append(Said("two"))
    store.append(Said("three"))
    store.close()
    assert world.keys("blob/") == [], "they are nobody's"


def test_a_long_journal_is_read_whole_and_a_gap_at_any_request_is_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_store, "_PAGE", 3)
    store = world.open()
    for number in range(7):
        store.append(Said(str(number)))
    assert world.texts() == [str(number) for number in range(7)]
    kept = dict(world.etcd.keys)
    for at in range(6):
        world.etcd.keys = dict(kept)
        write(world, entry_key(at), b"forged")
        with pytest.raises(StoreError, match=f"entry {at} is missing, or was not written with the job's key"):
            world.open()
