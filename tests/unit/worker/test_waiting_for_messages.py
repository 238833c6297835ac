"""A worker that waits for the coordinator: what still has to move meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.errors import WaitTimeoutError
from elaswave.worker.process import DIAL_TURN_S, REST_TURN_S, TURN_S, Worker

STATES = {
    "is paused": {"is_paused": True, "is_done": False},
    "is done": {"is_paused": False, "is_done": True},
    "has reported": {"is_paused": False, "is_done": False},
}


@pytest.mark.parametrize(
    ("state", "is_dialling", "has_frames", "calls", "turn_s"),
    [
        ("is paused", False, None, ["poll", "look"], REST_TURN_S),
        ("is done", False, False, ["poll", "look"], REST_TURN_S),
        ("is paused", False, True, ["poll", "look"], DIAL_TURN_S),
        ("is done", True, None, ["poll", "look"], DIAL_TURN_S),
        ("has reported", False, None, ["look"], TURN_S),
        ("has reported", True, None, ["poll", "look"], DIAL_TURN_S),
    ],
)
def test_frames_and_links_move_while_a_worker_waits(
    state: str, is_dialling: bool, has_frames: bool | None, calls: list[str], turn_s: float
) -> None:
    """One that pauses before a join has sent its last vote, and others wait for it: it stood still on its link, until
    the coordinator took this worker for one that hangs. One that has made all its steps did not answer a peer that
    dialled it again, and did not see that what it had sent was lost."""
    called: list[str] = []
    waits: list[float] = []

    def next_message(timeout_s: float) -> Any:
        waits.append(timeout_s)
        raise WaitTimeoutError("nothing yet")

    worker: Any = object.__new__(Worker)
    sites = None if has_frames is None else SimpleNamespace(has_frames=has_frames)
    vars(worker).update(
        machine=SimpleNamespace(**STATES[state], is_started=True, look_at_sent=lambda: called.append("look")),
        _setup=SimpleNamespace(sites=sites),
        _must_end=False,
        _links=SimpleNamespace(is_dialling=is_dialling, is_fetching=False, hand_over=lambda: None),
        _transport=SimpleNamespace(poll=lambda: called.append("poll")),
        _mailbox=SimpleNamespace(joining=None, next=next_message),
        _client=SimpleNamespace(disconnected_s=0.0),
        _watch=SimpleNamespace(recovering=lambda: None),
    )
    worker._wait_for_message()
    assert (called, waits) == (calls, [turn_s])
