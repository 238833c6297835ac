"""A worker that waits for the coordinator: what still has to move meanwhile."""

from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.errors import WaitTimeoutError
from elaswave.protocol.step.machine import WorkerMachine
from elaswave.worker.process import DIAL_TURN_S, REST_TURN_S, TURN_S, Worker

STATES = ("is_paused", "is_done", "is_unsound")


class WaitingMachine:
    """A machine that has nothing to do.

    Args:
        state: one of `STATES`; another one: it waits for a decision.
        called: told that it has looked at what was sent.
    """

    is_started = True
    is_at_rest = WorkerMachine.is_at_rest

    def __init__(self, state: str, called: list[str]) -> None:
        vars(self).update({name: name == state for name in STATES})
        self.look_at_sent = lambda: called.append("look")


@pytest.mark.parametrize(
    ("state", "is_dialling", "has_frames", "calls", "turn_s"),
    [
        ("is_paused", False, None, ["poll", "look"], REST_TURN_S),
        ("is_done", False, False, ["poll", "look"], REST_TURN_S),
        ("is_paused", False, True, ["poll", "look"], DIAL_TURN_S),
        ("is_done", True, None, ["poll", "look"], DIAL_TURN_S),
        ("is_unsound", False, None, ["poll", "look"], REST_TURN_S),
        ("is_unsound", True, None, ["poll", "look"], DIAL_TURN_S),
        ("has reported", False, None, ["recovering", "look"], TURN_S),
        ("has reported", True, None, ["recovering", "poll", "look"], DIAL_TURN_S),
    ],
)
def test_frames_and_links_move_while_a_worker_waits(
    state: str, is_dialling: bool, has_frames: bool | None, calls: list[str], turn_s: float
) -> None:
    """One that pauses before a join has sent its last vote, and others wait for it: it stood still on its link, until
    the coordinator took this worker for one that hangs. One that has made all its steps did not answer a peer that
    dialled it again, and did not see that what it had sent was lost. One whose copies are wrong said of itself that it
    recovers, for which it may be blamed if that takes long."""
    called: list[str] = []
    waits: list[float] = []

    def next_message(timeout_s: float) -> Any:
        waits.append(timeout_s)
        raise WaitTimeoutError("nothing yet")

    worker: Any = object.__new__(Worker)
    sites = None if has_frames is None else SimpleNamespace(has_frames=has_frames)
    vars(worker).update(
        machine=WaitingMachine(state, called),
        _setup=SimpleNamespace(sites=sites),
        _must_end=False,
        _links=SimpleNamespace(is_dialling=is_dialling, is_fetching=False, hand_over=lambda: None),
        _transport=SimpleNamespace(poll=lambda: called.append("poll")),
        _mailbox=SimpleNamespace(joining=None, next=next_message),
        _client=SimpleNamespace(disconnected_s=0.0),
        _watch=SimpleNamespace(recovering=lambda: called.append("recovering")),
    )
    worker._wait_for_message()
    assert (called, waits) == (calls, [turn_s])
