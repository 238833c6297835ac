"""The survey of own data and the loss: findings come from another process, which may fail, exit or hang."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elaswave.data.fingerprint import FIRST_LOSS, Finding
from elaswave.errors import LaunchError
from elaswave.launcher.forkserver import loaders
from elaswave.launcher.forkserver.loaders import probe_dataset
from elaswave.observability.processes import children_of

LOSS = Finding(what=FIRST_LOSS, value="0x1.0p+1")


def nothing() -> None:
    """Does no harm."""


class Says:
    """Finds two samples and a loss, and does something else after each."""

    def __init__(self, after_data: Callable[[], object] = nothing, before_loss: Callable[[], object] = nothing) -> None:
        self._after_data, self._before_loss = after_data, before_loss

    def data(self) -> Iterator[Finding]:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # as libraries leave threads behind
        yield Finding(what="a", value="1", sample=0)
        yield Finding(what="b", value="2", sample=9)
        self._after_data()

    def loss(self) -> Finding:
        self._before_loss()
        return LOSS


def test_another_process_finds_out(tmp_path: Path) -> None:
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    found = probe_dataset(Says, tmp_path / "log")
    assert [each.what for each in found] == ["a", "b", FIRST_LOSS] and found[-1] == LOSS
    assert os.listdir("/proc/self/fd") == descriptors and threading.active_count() == threads


HARM = [lambda: time.sleep(60), lambda: os._exit(3), lambda: 1 / 0]


@pytest.mark.parametrize("then", HARM)
def test_what_has_been_said_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    monkeypatch.setattr(loaders, "PROBE_S_MAX", 0.5)
    before = children_of(os.getpid())
    found = probe_dataset(lambda: Says(after_data=then), tmp_path / "log")
    assert [each.sample for each in found] == [0, 9]
    assert children_of(os.getpid()) == before


@pytest.mark.parametrize("then", HARM)
def test_a_loss_that_does_not_come_leaves_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]
) -> None:
    monkeypatch.setattr(loaders, "LOSS_S_MAX", 0.5)
    found = probe_dataset(lambda: Says(before_loss=then), tmp_path / "log")
    assert [each.sample for each in found[:2]] == [0, 9]
    if then is HARM[0]:
        assert found[2] == Finding(what=FIRST_LOSS, value="", text="it takes more than 0.5 s")
    assert len(found) == (3 if then is HARM[0] else 2)


def test_a_process_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LaunchError("no more processes")

    monkeypatch.setattr(loaders, "fork", refuse)
    descriptors = os.listdir("/proc/self/fd")
    assert probe_dataset(Says, tmp_path / "log") == []
    assert os.listdir("/proc/self/fd") == descriptors
