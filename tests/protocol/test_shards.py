"""When a durable checkpoint is complete, and when it is given up: losses at every moment of its writing."""

import random

import pytest

from elaswave.protocol.coordinator.shards import Complete, GivenUp, Shards

LOST = "a worker was lost before it had written its part"


def shards(num_pieces: int = 4, members: tuple[int, ...] = (0, 1)) -> Shards[int, str]:
    return Shards(lambda step: num_pieces, lambda piece: 1, members)


def part(text: str, *pieces: int) -> dict[int, str]:
    return {piece: f"{text}{piece}" for piece in pieces}


def complete(found: object) -> dict[int, str]:
    assert isinstance(found, Complete)
    return found.pieces


def test_the_last_part_completes_it():
    job = shards()
    assert job.written(4, 1, 0, part("a", 0, 1), 20) is None
    found = job.written(4, 1, 1, part("b", 2, 3), 30)
    assert found == Complete(4, {0: "a0", 1: "a1", 2: "b2", 3: "b3"}, {(0, 1): 20, (1, 1): 30})
    assert job.pending == [4]  # until the caller has made it durable
    job.settle(4)
    assert job.pending == [] and job.is_settled(4)
    assert job.written(4, 1, 1, part("b", 2, 3), 30) is None


def test_a_loss_after_the_part_was_written_costs_nothing():
    job = shards()
    job.written(4, 1, 0, part("a", 0, 1), 20)
    assert job.decided(2, (1,), again=None, rollback=None) == []
    assert len(complete(job.written(4, 1, 1, part("b", 2, 3), 30))) == 4


def test_a_part_that_will_never_come_gives_it_up_with_a_word():
    job = shards(members=(0, 1, 2))
    job.written(4, 1, 0, part("a", 0), 10)
    assert job.decided(2, (0, 1), again=None, rollback=None) == []
    assert job.written(4, 1, 1, part("b", 1, 2), 10) == GivenUp(4, None, LOST)
    # The others had written before the loss was decided upon.
    job = shards(members=(0, 1, 2))
    job.written(4, 1, 0, part("a", 0), 10)
    job.written(4, 1, 1, part("b", 1, 2), 10)
    assert job.decided(2, (0, 1), again=None, rollback=None) == [GivenUp(4, None, LOST)]


def test_survivors_that_are_still_there_write_again():
    job = shards(members=(0, 1, 2))
    job.written(4, 1, 0, part("a", 0), 10)
    job.written(4, 1, 1, part("b", 1), 10)
    assert job.decided(2, (0, 1), again=4, rollback=None) == []
    assert job.written(4, 2, 0, part("A", 0, 2), 20) is None
    # Piece 0 was written twice: the first one counts, and both files are known.
    found = job.written(4, 2, 1, part("B", 1, 3), 20)
    assert complete(found) == {0: "a0", 1: "b1", 2: "A2", 3: "B3"}
    assert isinstance(found, Complete) and set(found.files) == {(0, 1), (1, 1), (0, 2), (1, 2)}


def test_a_part_of_the_generation_before_still_completes_it():
    job = shards(members=(0, 1, 2))
    job.written(4, 1, 0, part("a", 0), 10)
    job.written(4, 1, 2, part("c", 2, 3), 10)
    assert job.decided(2, (0, 1), again=4, rollback=None) == []
    assert len(complete(job.written(4, 1, 1, part("b", 1), 10))) == 4


def test_a_failure_counts_until_its_worker_writes_again():
    job = shards()
    assert job.failed(4, 1, 0, "the disk is full") is None
    assert job.written(4, 1, 1, part("b", 2, 3), 10) == GivenUp(4, 0, "the disk is full")
    assert job.decided(2, (1,), again=4, rollback=None) == []
    assert len(complete(job.written(4, 2, 1, part("B", 0, 1, 2, 3), 10))) == 4


def test_one_that_was_given_up_is_tried_again_if_the_survivors_are_still_there():
    job = shards(members=(0, 1, 2))
    job.settle(4)
    assert job.written(4, 1, 0, part("a", 0), 10) is None
    job.decided(2, (0, 1), again=4, rollback=None)
    job.written(4, 2, 0, part("A", 0, 1), 10)
    assert len(complete(job.written(4, 2, 1, part("B", 2, 3), 10))) == 4


def test_a_rollback_makes_later_parts_void():
    job = shards()
    job.settle(8)
    job.written(4, 1, 0, part("a", 0, 1), 10)
    job.written(12, 1, 0, part("a", 0, 1), 10)
    assert job.decided(2, (0, 1), again=None, rollback=6) == []
    assert job.pending == [4] and not job.is_settled(8)
    assert job.written(12, 1, 1, part("b", 2, 3), 10) is None  # from before
    assert job.pending == [4]
    assert job.written(12, 2, 0, part("A", 0, 1), 10) is None
    assert complete(job.written(12, 2, 1, part("B", 2, 3), 10)) == {0: "A0", 1: "A1", 2: "B2", 3: "B3"}
    assert len(complete(job.written(4, 1, 1, part("b", 2, 3), 10))) == 4  # what lies before it still counts


def test_what_is_being_committed_is_not_waited_for_again():
    """A loss while the last checkpoint is being made durable: it is not given up at the end, and needs no new parts."""
    job = shards()
    job.written(4, 1, 0, part("a", 0, 1), 20)
    complete(job.written(4, 1, 1, part("b", 2, 3), 30))
    job.commit(4)
    assert job.num_committing == 1 and job.is_committing(4)
    assert job.pending == [] and not job.is_settled(4)
    assert job.decided(2, (0,), again=4, rollback=None) == []
    assert job.written(4, 2, 0, part("A", 0, 1, 2, 3), 50) is None
    assert job.end() == []
    job.settle(4)
    assert job.is_settled(4) and job.num_committing == 0
    assert job.written(4, 2, 0, part("A", 0, 1, 2, 3), 50) is None


def test_none_is_complete_between_the_search_for_a_checkpoint_and_the_decision():
    job = shards()
    job.written(4, 1, 0, part("a", 0, 1), 20)
    job.hold()
    assert job.written(4, 1, 1, part("b", 2, 3), 30) is None
    assert job.judge(4) is None
    (found,) = job.decided(2, (0,), again=None, rollback=None)
    assert complete(found) == {0: "a0", 1: "a1", 2: "b2", 3: "b3"}
    job.hold()
    assert job.decided(3, (0,), again=None, rollback=2) == [] and job.pending == []


def test_at_the_end_whatever_is_missing_is_given_up():
    job = shards()
    job.written(4, 1, 0, part("a", 0, 1), 10)
    assert job.end() == [GivenUp(4, None, LOST)]
    assert shards().end() == []


@pytest.mark.parametrize("seed", range(200))
def test_it_is_complete_exactly_when_every_piece_is_there(seed: int) -> None:
    """Random parts, said again and in any order, against a set."""
    rng = random.Random(seed)
    members = tuple(range(rng.randint(1, 4)))
    job, there, heard = shards(6, members), set(), set()
    for _ in range(12):
        worker, pieces = rng.choice(members), rng.sample(range(6), rng.randint(0, 3))
        found = job.written(1, 1, worker, part("x", *pieces), 1)
        there.update(pieces)
        heard.add(worker)
        if len(there) == 6:
            assert isinstance(found, Complete) and set(found.pieces) == there
        elif heard == set(members):
            assert isinstance(found, GivenUp)
        else:
            assert found is None
