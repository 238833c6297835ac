"""What a member has heard of a history is in it, unless the store has gone back (H9)."""

import pytest

from elaswave.protocol.leadership.store_position import (
    PositionVerdict,
    StorePosition,
    compare_positions,
    first_position,
    newest_position,
)

DIGESTS = [b"one", b"two", b"three"]
OWN = StorePosition(7, 4, 3, b"three")


@pytest.mark.parametrize(
    ("heard", "meaning"),
    [
        (OWN, PositionVerdict.FITS),
        (StorePosition(7, 1, 0, b""), PositionVerdict.FITS),
        (StorePosition(7, 3, 2, b"two"), PositionVerdict.FITS),
        (StorePosition(7, 3, 4, b"four"), PositionVerdict.GONE_BACK),
        (StorePosition(7, 4, 4, b"four"), PositionVerdict.GONE_BACK),
        (StorePosition(7, 3, 2, b"other"), PositionVerdict.GONE_BACK),
        (StorePosition(7, 5, 2, b"two"), PositionVerdict.NEWER_TERM),
        (StorePosition(6, 9, 9, b"nine"), PositionVerdict.OTHER_JOB),
        (first_position(8), PositionVerdict.OTHER_JOB),
        (first_position(7), PositionVerdict.FITS),
    ],
    ids=[
        "equal",
        "none-yet",
        "before",
        "longer",
        "longer-of-own-term",
        "changed",
        "later-term",
        "earlier-founding",
        "later-founding",
        "nothing-heard",
    ],
)
def test_what_a_head_means(heard: StorePosition, meaning: PositionVerdict) -> None:
    assert compare_positions(heard, OWN, DIGESTS) is meaning


def test_the_newest_head_is_kept() -> None:
    assert newest_position(None, OWN) == OWN
    later = StorePosition(7, 5, 2, b"two")
    assert newest_position(OWN, later) == newest_position(later, OWN) == later, "the term counts first"
    assert newest_position(OWN, StorePosition(8, 1, 0, b"")) == OWN, "of the job generation that the member is of"
    assert newest_position(first_position(7), OWN) == OWN
    assert str(OWN) == "3 entries of term 4, the last one 74687265"
