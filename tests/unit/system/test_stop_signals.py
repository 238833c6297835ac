"""Which signals end a job, who else may hear them, and what interrupts its end."""

import faulthandler
import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from tests.signals import hearing_signals

from elaswave.errors import StoppedBySignalError
from elaswave.launcher.local_job import StopRequest
from elaswave.system.processes import STOP_SIGNALS, USER_SIGNALS, ending_early, is_ours, stop_signals, undisturbed


@pytest.fixture(autouse=True)
def default_handlers() -> Iterator[None]:
    with hearing_signals():
        yield


@pytest.mark.parametrize("number", USER_SIGNALS)
def test_a_schedulers_signal_asks_for_a_stop_and_before_the_job_it_unwinds(number: int) -> None:
    asked = StopRequest(None)
    with ending_early():
        with pytest.raises(StoppedBySignalError, match="before the job had begun") as caught:
            os.kill(os.getpid(), number)
        assert caught.value.signal_number == number
        with stop_signals(asked.on_signal):
            os.kill(os.getpid(), number)
        assert asked.signal == number and asked.name == USER_SIGNALS[number]
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_scripts_own_handler_stays() -> None:
    heard: list[int] = []

    def own(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    asked = StopRequest(None)
    signal.signal(signal.SIGUSR1, own)
    with ending_early(), stop_signals(asked.on_signal), undisturbed():
        os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1] and asked.signal is None


def test_so_does_one_that_python_does_not_know() -> None:
    assert is_ours(signal.SIGUSR2)
    with open(os.devnull, "w") as nothing:
        faulthandler.register(signal.SIGUSR2, file=nothing)
        try:
            assert not is_ours(signal.SIGUSR2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    assert is_ours(signal.SIGUSR2)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_what_is_ignored_stays_ignored(number: int) -> None:
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        asked = StopRequest(None)
        with stop_signals(asked.on_signal):
            os.kill(os.getpid(), number)
        assert asked.signal is None
    finally:
        signal.signal(number, previous)


def test_only_the_second_signal_interrupts_and_nothing_interrupts_the_end() -> None:
    asked = StopRequest(None)
    with stop_signals(asked.on_signal):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(StoppedBySignalError):
            os.kill(os.getpid(), signal.SIGINT)
        for number in STOP_SIGNALS:
            os.kill(os.getpid(), number)
        with undisturbed():
            for number in STOP_SIGNALS:
                os.kill(os.getpid(), number)
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
