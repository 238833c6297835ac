"""The tag channels of the data plane, one number per purpose, so that no two kinds of frames can be confused."""

from enum import IntEnum


class Channel(IntEnum):
    """First field of every tag; the comment gives the meaning of the tag's last two."""

    ACTIVATION = 1  # micro-batch, stage of the receiver
    GRADIENT = 2  # micro-batch, stage of the receiver
    PARTIAL_SUM = 3  # layer, 0
    REDUCED = 4  # layer, 0
    VOTE = 5  # used by the collective
    PARAMETERS = 6  # layer, 0
    DIAGNOSIS = 7  # used by the collective
    EVALUATION = 8  # micro-batch, stage of the receiver
    EVALUATION_LOSS = 9  # used by the collective
    BASE_COPY = 10  # block, 0
    DELIVERY = 11  # layer, 0


WAIT_TIMEOUT_S = 600.0
"""Bound of every wait on a peer. A peer's death ends a wait at once; this is for a peer that is alive and silent."""
