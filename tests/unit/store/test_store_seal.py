"""What counts that stands in a store to which others write: each value in its place alone."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.fake_etcd import KEY, STRANGERS

from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.store.seal import MAGIC, StoreSeal
from elaswave.transport.handshake import derived

SEAL = StoreSeal(KEY, "/elaswave/job/")


def test_a_value_counts_in_its_place_alone() -> None:
    stored = SEAL.sealed("term", b"value", 7)
    assert SEAL.opened("term", stored, 7) == b"value"
    assert SEAL.opened("lease_heartbeat", stored, 7) is None, "another key"
    assert SEAL.opened("term", stored, 8) is None, "another job generation"
    for seal in (StoreSeal(KEY, "/elaswave/job2/"), StoreSeal(STRANGERS, "/elaswave/job/")):
        assert seal.opened("term", stored, 7) is None, "another job, another key of the job"
    assert SEAL.opened("spec", SEAL.sealed("spec", b"value", 0), 9) == b"value", "it tells the job generation"


def test_names_do_not_run_into_each_other() -> None:
    """A key and a value that are as long together as another pair."""
    stored = SEAL.sealed("ab", b"c", 7)
    tag = stored[len(MAGIC) : -1]
    assert SEAL.opened("a", MAGIC + tag + b"bc", 7) is None
    assert StoreSeal(KEY, "/elaswave/").opened("job/ab", stored, 7) is None


@given(st.binary(max_size=200), st.sampled_from(["spec", "term", "rec/0"]))
def test_what_is_none_of_it_is_never_opened(junk: bytes, key: str) -> None:
    assert SEAL.opened(key, junk, 7) is None
    assert SEAL.opened(key, MAGIC + junk, 7) is None
    stored = SEAL.sealed(key, b"value", 7)
    assert SEAL.opened(key, stored + junk, 7) == (None if junk else b"value")


def test_a_flipped_bit_is_seen() -> None:
    stored = SEAL.sealed("term", b"value", 7)
    for at in range(len(stored)):
        assert SEAL.opened("term", stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :], 7) is None


def test_heads_are_known_again() -> None:
    store_position = SEAL.seal_position(StorePosition(7, 2, 3, b"digest"))
    assert SEAL.knows(store_position) and not StoreSeal(STRANGERS, "/elaswave/job/").knows(store_position)
    for other in (
        StorePosition(8, 2, 3, b"digest"),
        StorePosition(7, 3, 3, b"digest"),
        StorePosition(7, 2, 4, b"digest"),
        StorePosition(7, 2, 3, b"d"),
    ):
        assert not SEAL.knows(other)
        assert not SEAL.knows(msgspec.structs.replace(other, seal=store_position.seal))


def test_the_stores_key_does_not_give_the_jobs_away() -> None:
    """With what seals the store nobody makes the proof of a handshake."""
    assert SEAL._key == derived(KEY, "store") != KEY[:32] and derived(KEY, "store") != derived(KEY, "read")
