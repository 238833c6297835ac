"""Workers are told that a checkpoint is settled once that is durable: until then they keep what they know of it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from elaswave.coordinator.records.recorder import RunRecorder


def test_a_checkpoint_is_settled_when_its_record_is_durable() -> None:
    recorder: Any = RunRecorder.__new__(RunRecorder)
    durable: list[Callable[[], None]] = []
    given: list[object] = []
    recorder._store = SimpleNamespace(add=given.append, when_durable=durable.append)
    recorder._terminal = SimpleNamespace(say_trouble=lambda text: None)
    recorder._write = lambda event: None
    recorder.state = SimpleNamespace(apply=lambda record: None)
    recorder.checkpoints = SimpleNamespace(is_settled=lambda step: step == 4)
    recorder.settled, recorder._settling = [], set()
    recorder.checkpoint_given_up(4, None, "no room")
    assert len(given) == 1
    assert (recorder.settled, recorder.is_settled(4)) == ([], False)
    durable[0]()
    assert (recorder.settled, recorder.is_settled(4), recorder.is_settled(5)) == ([4], True, False)
