"""Every kind of store keeps what it has acknowledged, in order, and takes nothing of who was replaced."""

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import pytest
from tests.etcd_processes import Member, cluster, needs_etcd
from tests.fake_etcd import KEY, FakeEtcd, FakeGateway

from elaswave.errors import StoreError, SupersededError
from elaswave.protocol.coordinator.store_writes import spec_value
from elaswave.store import etcd_store
from elaswave.store.etcd_client import EtcdClient, HttpGateway
from elaswave.store.etcd_store import EtcdStore
from elaswave.store.file_store import FileStore
from elaswave.store.store import Owner, Store


class Raised(msgspec.Struct, frozen=True, tag=True):
    generation: int
    reason: str = ""


class Decided(msgspec.Struct, frozen=True, tag=True):
    generation: int
    vector: bytes = b""


class Renamed(msgspec.Struct, frozen=True, tag=True):
    text: str


class Began(msgspec.Struct, frozen=True, tag=True):
    term: int


Record = Raised | Decided


class Place(Protocol):
    """Where one job's records are kept; stores of them are opened again and again."""

    def open(self, record_type: object = Record) -> Store: ...


class FilePlace:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"

    def open(self, record_type: object = Record) -> Store:
        return FileStore(self.path, record_type)


OWNER = Owner(post=lambda call: call(), turn=lambda: None, say=print, broken=print)


class EtcdPlace:
    def __init__(self, client: Callable[[], EtcdClient]) -> None:
        self.client = client
        with closing(client()) as founder:
            etcd_store.found(founder, spec_value(7), 10.0)

    def open(self, record_type: object = Record) -> Store:
        return EtcdStore(self.client(), record_type, OWNER, patience_s=10.0)


@pytest.fixture(scope="module")
def members() -> Iterator[list[Member]]:
    with cluster(3) as members:
        yield members


_numbers = count()
KINDS = ["file", "etcd in memory", pytest.param("etcd", marks=needs_etcd)]


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "file":
        return FilePlace(tmp_path)
    if request.param == "etcd in memory":
        etcd = FakeEtcd()
        return EtcdPlace(lambda: EtcdClient(["a:1", "b:2"], "/elaswave/job/", FakeGateway(etcd), KEY))
    members: list[Member] = request.getfixturevalue("members")
    endpoints = [member.endpoint for member in members]
    prefix = f"/elaswave/job-{next(_numbers)}/"
    return EtcdPlace(lambda: EtcdClient(endpoints, prefix, HttpGateway(), KEY))


def found(place: Place) -> list:
    store = place.open()
    try:
        return store.records()
    finally:
        store.close()


def test_records_come_back_in_their_order_and_with_their_types(place):
    store = place.open()
    assert store.records() == []
    store.append(Raised(1, "worker 3 is lost"))
    store.append(Decided(1, b"\x00" * 2000), Raised(2))
    store.append()
    records = [Raised(1, "worker 3 is lost"), Decided(1, b"\x00" * 2000), Raised(2)]
    assert store.records() == records
    store.close()
    assert found(place) == records
    store = place.open()
    store.append(Decided(2))
    store.close()
    assert found(place) == [*records, Decided(2)]


def test_what_is_added_keeps_its_place_among_what_is_appended(place):
    store = place.open()
    store.add(Raised(1))
    store.add(Raised(2), Raised(3))
    store.append(Raised(4))
    assert store.records() == [Raised(1), Raised(2), Raised(3), Raised(4)]
    store.add(Raised(5))
    store.close()
    assert found(place) == [Raised(1), Raised(2), Raised(3), Raised(4), Raised(5)]


def test_a_call_for_when_it_is_durable_comes_then_and_once(place):
    store = place.open()
    called: list[list] = []
    store.when_durable(lambda: called.append(store.records()))
    assert called == [[]]
    store.add(Raised(1))
    store.when_durable(lambda: called.append(store.records()))
    store.append(Raised(2))
    assert called[1:] in ([[Raised(1)]], [[Raised(1), Raised(2)]])
    store.append(Raised(3))
    assert len(called) == 2
    store.close()


def test_the_list_of_records_belongs_to_the_caller(place):
    store = place.open()
    store.append(Raised(1))
    store.records().clear()
    assert store.records() == [Raised(1)]
    store.close()


def test_records_of_any_size_come_back(place):
    """Larger than what etcd takes in a request, and many that are together."""
    records = [Decided(1, bytes(range(256)) * 8192), *[Decided(at, b"x" * 200_000) for at in range(2, 8)]]
    store = place.open()
    store.append(records[0])
    for record in records[1:]:
        store.add(record)
    store.close()
    assert found(place) == records


def test_at_most_one_of_two_coordinators_writes(place):
    """The second is refused while the first lives, or the first is from then on."""
    first = place.open()
    first.append(Raised(1))
    try:
        second = place.open()
    except StoreError as error:
        assert "another coordinator holds" in str(error)
        first.append(Raised(2))
        first.close()
        assert found(place) == [Raised(1), Raised(2)]
        return
    with pytest.raises(SupersededError, match="takes no record of this coordinator: .* has taken over"):
        first.append(Raised(9))
    for write in (first.append, first.add):
        with pytest.raises(SupersededError):
            write(Raised(9))
    second.append(Raised(2))
    first.close()
    second.close()
    assert found(place) == [Raised(1), Raised(2)]


def test_a_coordinator_that_was_replaced_writes_nothing_more(place):
    store = place.open(Began | Raised)
    store.append(Began(2), Raised(1))
    for records in ((Began(1),), (Raised(2), Began(1))):
        with pytest.raises(SupersededError, match="no record of term 1: a coordinator of term 2 has taken over"):
            store.append(*records)
    store.append(Raised(2), Began(2))
    store.close()
    store = place.open(Began | Raised)
    with pytest.raises(SupersededError, match="takes no record of term 1"):
        store.append(Began(1))
    store.append(Began(3))
    assert store.records() == [Began(2), Raised(1), Raised(2), Began(2), Began(3)]
    store.close()


def test_a_closed_store_takes_no_records(place):
    store = place.open()
    store.close()
    store.close()
    for write in (store.append, store.add):
        with pytest.raises(StoreError, match="takes no records: it is closed"):
            write(Raised(1))
    assert found(place) == []


def test_records_of_another_release_are_refused(place):
    store = place.open()
    store.append(Raised(1))
    store.close()
    with pytest.raises(StoreError, match="entry 0 holds another kind of record.*another release"):
        place.open(Renamed)
    assert found(place) == [Raised(1)]
