"""The survey of own data: hashes come from another process, which may fail, exit or hang."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elaswave.control import data_survey
from elaswave.control.data_survey import NUM_HASHES, survey
from elaswave.data.fingerprint import SampleHash
from elaswave.errors import LaunchError
from elaswave.observability.processes import children_of
from elaswave.training.dataset import DatasetSamples


class StartsThreads:
    """A dataset that leaves threads behind in its process, as libraries do."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        return torch.rand(3), index


def test_another_process_finds_the_hashes(tmp_path: Path) -> None:
    descriptors, threads = os.listdir("/proc/self/fd"), threading.active_count()
    found = survey(lambda: DatasetSamples(StartsThreads()), tmp_path / "log")
    assert found == list(DatasetSamples(Quiet()).hashes(NUM_HASHES))
    assert len(found) == NUM_HASHES
    assert os.listdir("/proc/self/fd") == descriptors and threading.active_count() == threads


class Quiet(StartsThreads):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3), index


class Partly:
    """Says two hashes, and then does something else."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then

    def hashes(self, num_hashes: int) -> Iterator[SampleHash]:
        yield SampleHash(sample=0, hash="a")
        yield SampleHash(sample=9, hash="b")
        self._then()


@pytest.mark.parametrize("then", [lambda: time.sleep(60), lambda: os._exit(3), lambda: 1 / 0])
def test_what_has_been_said_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    monkeypatch.setattr(data_survey, "SURVEY_S_MAX", 0.5)
    before = children_of(os.getpid())
    found = survey(lambda: Partly(then), tmp_path / "log")
    assert [each.sample for each in found] == [0, 9]
    assert children_of(os.getpid()) == before


def test_a_process_that_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LaunchError("no more processes")

    monkeypatch.setattr(data_survey, "fork", refuse)
    descriptors = os.listdir("/proc/self/fd")
    assert survey(lambda: Partly(lambda: None), tmp_path / "log") == []
    assert os.listdir("/proc/self/fd") == descriptors
