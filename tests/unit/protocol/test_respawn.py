"""The policy by which places are taken again: scripts of what happens, and what is answered at what second."""

import math
from collections.abc import Sequence

import pytest

from elaswave.protocol.membership.effects import PlaceTaken
from elaswave.protocol.membership.joiners import PlaceClosed, Respawn


def play(respawn: Respawn, script: str) -> list[str]:
    """Carries out what a script says.

    Args:
        respawn: the machine.
        script: `SECONDS WHAT ARGUMENT`, separated by `;`; between two of them the machine is asked whenever it wants.
    Returns:
        What was answered: `SECONDS+WORKER@PLACE`, or `SECONDS closed PLACE`.
    """
    told: list[str] = []

    def note(now_s: float, answers: Sequence[PlaceTaken | PlaceClosed]) -> None:
        for answer in answers:
            what = f"+{answer.worker}@{answer.place}" if isinstance(answer, PlaceTaken) else f" closed {answer.place}"
            told.append(f"{now_s:g}{what}")

    for line in [*script.split(";"), "1e9 end"]:
        at, what, *arguments = line.split()
        now_s, numbers = float(at), [int(word) for word in arguments]
        while respawn.next_s <= now_s:
            note(respawn.next_s, respawn.tick(respawn.next_s))
        if what == "dies":
            note(now_s, respawn.ended(numbers[0], now_s))
        elif what == "commit":
            respawn.committed(numbers)
        elif what == "leaves":
            respawn.left(numbers[0])
        elif what == "join":
            note(now_s, respawn.join(numbers[0], now_s))
        elif what == "stop":
            respawn.stop()
        elif what == "journal":
            respawn.spawned(PlaceTaken(worker=numbers[0], place=numbers[1], at_s=now_s))
    return told


@pytest.mark.parametrize(
    ("what", "script", "expected"),
    [
        ("a place is taken again", "0 commit 0 1 2; 10 dies 1", ["11+3@1"]),
        ("an end is told twice", "0 commit 0 1 2; 10 dies 1; 10 dies 1; 12 dies 1", ["11+3@1"]),
        ("two at once", "0 commit 0 1 2; 10 dies 2; 10 dies 0", ["11+3@0", "11+4@2"]),
        ("ids are never used again", "0 commit 0 1 2; 10 dies 2; 20 commit 0 1 3; 20 dies 3", ["11+3@2", "22+4@2"]),
        ("a stranger's end", "5 dies 17", []),
        (
            "the back-off doubles up to a minute",
            "0 commit 0 1 2; 0 dies 0; 2 commit 3; 2 dies 3; 5 commit 4; 5 dies 4; 10 commit 5; 10 dies 5; 20 commit 6;"
            "20 dies 6; 50 commit 7; 50 dies 7; 90 commit 8; 90 dies 8; 160 commit 9; 160 dies 9",
            ["1+3@0", "4+4@0", "9+5@0", "18+6@0", "36+7@0", "82+8@0", "150+9@0", "220+10@0"],
        ),
        (
            "and begins anew after a minute of life",
            "0 commit 0 1 2; 0 dies 0; 2 commit 3; 2 dies 3; 64 commit 4; 64 dies 4",
            ["1+3@0", "4+4@0", "65+5@0"],
        ),
        (
            "three that never commit close the place",
            "0 commit 0 1 2; 10 dies 1; 12 dies 3; 15 dies 4; 20 dies 5",
            ["11+3@1", "14+4@1", "19+5@1", "20 closed 1"],
        ),
        (
            "also three that live for long",
            "0 commit 0 1 2; 10 dies 1; 500 dies 3; 600 dies 4; 700 dies 5",
            ["11+3@1", "501+4@1", "601+5@1", "700 closed 1"],
        ),
        (
            "a commit in between counts anew",
            "0 commit 0 1 2; 10 dies 1; 12 dies 3; 15 commit 0 4; 15 dies 4; 20 dies 5; 30 dies 6; 50 dies 7",
            ["11+3@1", "14+4@1", "19+5@1", "28+6@1", "46+7@1", "50 closed 1"],
        ),
        ("a beginning without commits", "1 dies 0; 3 dies 3; 6 dies 4", ["2+3@0", "5+4@0", "6 closed 0"]),
        ("places do not share their deaths", "1 dies 0; 3 dies 3; 3 dies 1", ["2+3@0", "4+4@1", "5+5@0"]),
        ("who leaves on request is not replaced", "0 commit 0 1 2; 5 leaves 1; 6 dies 1", []),
        ("more are wanted", "5 join 2; 6 commit 3 4; 7 dies 4", ["5+3@3", "5+4@4", "8+5@4"]),
        ("a closed place and a new one", "0 commit 0 1 2; 1 leaves 0; 1 dies 0; 5 join 1", ["5+3@3"]),
        ("the job is stopping", "0 commit 0 1 2; 5 dies 1; 5.5 stop; 6 dies 2; 7 join 1", []),
        (
            "a successor reads who has had which place",
            "0 journal 3 1; 0 journal 4 1; 0 journal 5 3; 0 dies 1; 0 dies 3; 1 dies 4; 2 commit 5",
            ["1 closed 1"],
        ),
        (
            "and of whom steps were committed",
            "0 commit 0 1 2; 0 journal 3 1; 0 commit 0 2 3; 0 journal 4 1; 1 dies 4; 3 dies 5; 6 dies 6",
            ["2+5@1", "5+6@1", "6 closed 1"],
        ),
        ("and takes the next id", "0 journal 3 1; 0 commit 3; 1 dies 3; 1.5 join 1", ["1.5+4@3", "2+5@1"]),
    ],
)
def test_places_are_taken_again(what: str, script: str, expected: list[str]) -> None:
    assert play(Respawn((0, 1, 2), enabled=True), script) == expected, what


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("0 commit 0 1 2; 5 dies 1; 6 dies 2", []),
        ("0 commit 0 1 2; 5 dies 1; 6 join 2; 7 dies 4", ["6+3@3", "6+4@4"]),
    ],
)
def test_where_it_is_off_only_what_is_asked_for_is_started(script: str, expected: list[str]) -> None:
    assert play(Respawn((0, 1, 2), enabled=False), script) == expected


def test_the_number_aimed_at_follows_from_what_is_asked_for() -> None:
    respawn = Respawn((4, 9), enabled=True)
    assert (respawn.num_wanted, respawn.next_s) == (2, math.inf)
    respawn.ended(9, 1.0)
    assert (respawn.num_wanted, respawn.next_s) == (2, 2.0), "a place that waits is still wanted"
    assert [(taken.worker, taken.place) for taken in respawn.join(2, 1.5)] == [(10, 2), (11, 3)]
    assert respawn.num_wanted == 4
    respawn.left(4)
    assert (respawn.num_wanted, respawn.workers) == (3, {4, 9, 10, 11})


def test_a_closed_place_says_who_has_died_in_it_and_what_to_do() -> None:
    respawn = Respawn((0, 1), enabled=True)
    respawn.ended(0, 0.0)
    for now_s in (10.0, 20.0):
        (spawn,) = respawn.tick(now_s)
        told = respawn.ended(spawn.worker, now_s)
    assert told == [
        PlaceClosed(
            0,
            "place 0 stays empty: workers 0, 2 and 3, one after the other, have ended before they had committed a "
            "step; their logs say why, and `elaswave ctl RUN join` has another one started",
        )
    ]
