"""What a member has heard of a history is in it, unless the store has gone back (H9)."""

import pytest

from elaswave.protocol.leadership.heads import Head, Heard, beginning, judge, newest

DIGESTS = [b"one", b"two", b"three"]
OWN = Head(7, 4, 3, b"three")


@pytest.mark.parametrize(
    ("heard", "meaning"),
    [
        (OWN, Heard.FITS),
        (Head(7, 1, 0, b""), Heard.FITS),
        (Head(7, 3, 2, b"two"), Heard.FITS),
        (Head(7, 3, 4, b"four"), Heard.GONE_BACK),
        (Head(7, 4, 4, b"four"), Heard.GONE_BACK),
        (Head(7, 3, 2, b"other"), Heard.GONE_BACK),
        (Head(7, 5, 2, b"two"), Heard.NEWER_TERM),
        (Head(6, 9, 9, b"nine"), Heard.OTHER_JOB),
        (beginning(8), Heard.OTHER_JOB),
        (beginning(7), Heard.FITS),
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
def test_what_a_head_means(heard: Head, meaning: Heard) -> None:
    assert judge(heard, OWN, DIGESTS) is meaning


def test_the_newest_head_is_kept() -> None:
    assert newest(None, OWN) == OWN
    later = Head(7, 5, 2, b"two")
    assert newest(OWN, later) == newest(later, OWN) == later, "the term counts first"
    assert newest(OWN, Head(8, 1, 0, b"")) == OWN, "of the founding that the member is of"
    assert newest(beginning(7), OWN) == OWN
    assert str(OWN) == "3 entries of term 4, the last one 74687265"
