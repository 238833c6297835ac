"""Which copies are wrong, from what all workers have found together."""

import pytest

from elaswave.blocks.placement import Placement
from elaswave.protocol.step.engine import Change, MemoryKind
from elaswave.protocol.step.soundness import (
    MAX_REPORTED,
    ReplicaMismatch,
    changes_in,
    describe_mismatches,
    judge_copies,
    words_of,
)

TWO = Placement.of((0, 1), ((1,), (0,)))
THREE = Placement.of((0, 1), ((1, 2), (0, 2)))


def state(block: int, **hashes: int) -> ReplicaMismatch:
    return ReplicaMismatch(block, "state", {int(worker[1:]): value for worker, value in hashes.items()})


def test_a_copy_that_is_not_as_it_was_written_is_wrong_whatever_others_hold():
    found = judge_copies(TWO, [(1, Change(MemoryKind.COPY, 0, 7, 8))], [])
    assert found.wrong == {(0, 1)} and found.needs_copies


def test_of_three_voters_two_win():
    assert judge_copies(THREE, [], [state(0, w0=5, w1=5, w2=6)]).wrong == {(0, 2)}
    assert judge_copies(THREE, [], [state(1, w0=5, w1=6, w2=5)]).wrong == {(1, 1)}  # also against the owner


def test_where_no_majority_agrees_no_copy_is_known_to_be_right():
    assert judge_copies(TWO, [], [state(0, w0=5, w1=6)]).wrong == {(0, 0), (0, 1)}
    assert judge_copies(THREE, [], [state(0, w0=5, w1=6, w2=7)]).wrong == {(0, 0), (0, 1), (0, 2)}


def test_a_copy_whose_memory_has_changed_still_says_what_was_written():
    changes = [(0, Change(MemoryKind.COPY, 0, 5, 9))]
    assert judge_copies(THREE, changes, [state(0, w0=5, w1=5, w2=6)]).wrong == {(0, 0), (0, 2)}
    assert judge_copies(TWO, changes, [state(0, w0=5, w1=6)]).wrong == {(0, 0), (0, 1)}


def test_who_has_only_just_been_given_a_copy_does_not_vote_and_another_attempt_is_enough():
    found = judge_copies(TWO, [], [state(0, w0=5, w1=5, w2=6)])
    assert not found.wrong and not found.needs_copies


def test_working_copies_are_sent_again_and_never_counted():
    found = judge_copies(THREE, [], [ReplicaMismatch(0, "parameters", {0: 5, 1: 6, 2: 6})])
    assert not found.wrong and found.needs_copies


def test_a_wrong_gradient_is_gone_with_its_attempt():
    found = judge_copies(TWO, [], [ReplicaMismatch(0, "gradient", {0: 5, 1: 6})])
    assert not found.wrong and not found.needs_copies


def test_what_has_changed_on_several_workers_at_once_was_written_by_code():
    changes = [(worker, Change(MemoryKind.WORKING, 4, 1, 2)) for worker in (0, 2)]
    assert judge_copies(TWO, changes, []).of_code == {4: (0, 2)}
    both = [(0, Change(MemoryKind.WORKING, 4, 1, 2)), (0, Change(MemoryKind.COPY, 4, 1, 2))]
    assert not judge_copies(TWO, both, []).of_code


def test_constants_come_from_the_first_worker_that_has_them():
    changes = [(0, Change(MemoryKind.CONSTANT, 3, 1, 2)), (1, Change(MemoryKind.MENDED, 3, 1, 2))]
    found = judge_copies(TWO, changes, [])
    assert not found.needs_copies
    assert found.sources([[], [], [], [0, 1, 2]]) == [(3, 0, 1)]
    alone = judge_copies(TWO, changes[:1], [])
    assert alone.sources([[], [], [], [0]]) == [(3, 0, None)]


@pytest.mark.parametrize("number", [0, 1, MAX_REPORTED, MAX_REPORTED + 3])
def test_what_is_told_of_changes_is_read_again(number):
    changes = [Change(MemoryKind.COPY, index, 11, 12) for index in range(number)]
    words = words_of(changes)
    assert len(words) == len(words_of([]))
    assert changes_in(words) == changes[:MAX_REPORTED]


def test_findings_name_worker_block_layer_and_the_hashes_of_all_copies():
    changes = [(0, Change(MemoryKind.WORKING, 4, 1, 2)), (0, Change(MemoryKind.COPY, 4, 1, 2))]
    (first, second) = describe_mismatches(THREE, changes, [state(0, w0=5, w1=5, w2=-1)], lambda change: "blocks.1")
    assert first == (
        "on worker 0 the master of block 4 (layer blocks.1) has changed in memory since it was written, from "
        "0000000000000001 to 0000000000000002"
    )
    assert "block 0 differs between its owner, worker 0, and its followers, workers [1, 2], in its state" in second
    assert "worker 2: ffffffffffffffff" in second
