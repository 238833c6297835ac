"""A script's callbacks hear of each step once, in order."""

from collections.abc import Mapping

from elaswave.launcher.local_job import StepCalls


def heard(calls: StepCalls, steps: list[int]) -> None:
    for step in steps:
        calls.published(step, step / 10, {"accuracy": step / 20})


def test_steps_are_called_for_once_and_in_order_whatever_is_said_when() -> None:
    found: list[tuple[int, float, float]] = []
    calls = StepCalls(lambda step, loss, metrics: found.append((step, loss, metrics["accuracy"])))
    calls.begin(4)
    heard(calls, [5, 5, 7, 8, 3, 6, 7, 9])
    assert found == [(5, 0.5, 0.25), (6, 0.6, 0.3), (7, 0.7, 0.35), (8, 0.8, 0.4), (9, 0.9, 0.45)]
    assert calls.last_step == 9


def test_nothing_is_called_after_an_exception() -> None:
    found: list[int] = []

    def call(step: int, loss: float, metrics: Mapping[str, float]) -> None:
        found.append(step)
        if step == 2:
            raise KeyError("x")

    calls = StepCalls(call)
    calls.raise_error()
    heard(calls, [1, 3, 2, 4])
    assert found == [1, 2]
    try:
        calls.raise_error()
    except KeyError as error:
        assert error is calls.error
    else:
        raise AssertionError("the error was lost")


def test_the_steps_that_no_coordinator_has_told_of_follow_at_the_end() -> None:
    called: list[tuple[int, float, Mapping[str, float]]] = []
    calls = StepCalls(lambda step, loss, metrics: called.append((step, loss, metrics)))
    calls.published(1, 4.0, {"accuracy": 0.1})
    calls.published(3, 2.0, {"accuracy": 0.3})
    calls.finish([4.0, 3.0, 2.0], {"accuracy": [0.1, 0.2, 0.3]})
    assert called == [(1, 4.0, {"accuracy": 0.1}), (2, 3.0, {"accuracy": 0.2}), (3, 2.0, {"accuracy": 0.3})]
