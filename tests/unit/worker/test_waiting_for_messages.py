"""A worker that waits for the coordinator: what still has to move meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.errors import WaitTimeoutError
from elaswave.worker.process import DIAL_TURN_S, TURN_S, Worker


@pytest.mark.parametrize(
    ("is_dialling", "has_frames", "polls", "turn_s"),
    [(False, None, 0, TURN_S), (False, False, 0, TURN_S), (False, True, 1, DIAL_TURN_S), (True, None, 1, DIAL_TURN_S)],
)
def test_frames_on_emulated_links_move_while_a_worker_waits(
    is_dialling: bool, has_frames: bool | None, polls: int, turn_s: float
) -> None:
    """One that pauses before a join has sent its last vote, and others wait for it: it stood still on its link, until
    the coordinator took this worker for one that hangs."""
    polled: list[None] = []
    waits: list[float] = []

    def next_message(timeout_s: float) -> Any:
        waits.append(timeout_s)
        raise WaitTimeoutError("nothing yet")

    worker: Any = object.__new__(Worker)
    sites = None if has_frames is None else SimpleNamespace(links=SimpleNamespace(has_frames=has_frames))
    vars(worker).update(
        machine=SimpleNamespace(is_paused=True, is_done=False, is_started=True),
        _setup=SimpleNamespace(sites=sites),
        _must_end=False,
        _links=SimpleNamespace(is_dialling=is_dialling),
        _transport=SimpleNamespace(poll=lambda: polled.append(None)),
        _mailbox=SimpleNamespace(joining=None, next=next_message),
        _client=SimpleNamespace(disconnected_s=0.0),
    )
    worker._wait_for_message()
    assert (len(polled), waits) == (polls, [turn_s])
