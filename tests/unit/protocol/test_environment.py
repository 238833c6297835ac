"""Determinism hashes in votes: whoever computes something else is found, also by those that have never met."""

import functools

import pytest

from elaswave.protocol.step.ballot import (
    ENVIRONMENT,
    NO_HASH,
    Environment,
    flat,
    pairs_of,
    read_votes,
    text_words,
    words_text,
)


def merged(*ballots):
    """(known, own) of each worker -> what the vote says, of four places."""
    vectors = [flat(pairs_of(known, own), 4) for known, own in ballots]
    return read_votes(functools.reduce(lambda ours, theirs: list(map(max, ours, theirs)), vectors))


def test_those_that_agree_are_known_from_then_on():
    found = merged(({}, {0: 5, 1: 7}), ({}, {0: 5, 2: 9}), ({}, {0: 5, 1: 7}))
    assert found.known == {0: 5, 1: 7, 2: 9} and found.differing == ()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_those_that_differ_are_found(place):
    own = {0: 5, 1: 7, 2: 9}
    found = merged(({}, own), ({}, {**own, place: 2**62 - 1}))
    assert found.differing == (place,) and found.known == {at: own[at] for at in own if at != place}


def test_who_comes_later_is_compared_with_who_is_gone():
    assert merged(({1: 7}, {}), ({}, {1: 8})).differing == (1,)
    assert merged(({1: 7}, {}), ({}, {1: 7})).known == {1: 7}
    assert merged(({1: 7}, {1: 8})).differing == (1,), "a single worker with its own past"


def test_places_that_nobody_fills_say_nothing():
    assert merged(({}, {}), ({}, {})) == ({}, ())
    assert flat({}, 1) == [NO_HASH, NO_HASH] and ENVIRONMENT == 0


@pytest.mark.parametrize("text", ["", "torch 2.13.0, AVX512, AMD EPYC 9B14", "ä" * 56, "x" * 500])
def test_a_text_travels_as_numbers(text):
    words = text_words(text)
    assert all(0 <= word < 2**63 for word in words)
    assert words_text(words) == text[:112]


def test_an_environment_has_one_canary():
    one = Environment("a", {"matmul": 3, "gelu": 4})
    assert one.determinism_hash == Environment("b", {"gelu": 4, "matmul": 3}).determinism_hash
    assert one.determinism_hash != Environment("a", {"matmul": 3, "gelu": 5}).determinism_hash
    assert 0 <= one.determinism_hash < 2**62
