"""Own datasets in a script: equal bits with and without loaders, mixtures, errors, another dataset on resume."""

import faulthandler
import functools
import gc
import os
import random
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.jobs import nothing_left
from tests.integration.own import FORK, FRESH, WAYS
from torch import nn

import elaswave
from elaswave.errors import DataError, UsageError, WorkerError
from elaswave.launcher import launcher
from elaswave.observability.processes import read_processes


class Noisy:
    """Samples with noise from all three generators, drawn a number of times that depends on the sample."""

    def __init__(self, sign: float = 1.0, num_samples: int = 50) -> None:
        self.sign = sign
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = [random.random() + np.random.rand() + torch.randn(4) for _ in range(index % 3 + 1)][-1]
        return self.sign * torch.linspace(0, index / 50, 4) + 0.1 * noise, torch.tensor([index / 50])


def trainer(run_dir: Path, dataset: Any, *, settings: dict[str, Any] | None = None, **options: Any) -> elaswave.Trainer:
    torch.manual_seed(0)
    config = {
        "run.steps": 6,
        "batch.num_microbatches": 4,
        "batch.microbatch_size": 4,
        "layout.widths": [1, 2],
        "run.eval_every": 3 if "eval_dataset" in options else 0,
        **(settings or {}),
    }
    return elaswave.Trainer(
        model=[nn.Linear(4, 16), nn.Sequential(nn.Dropout(0.1), nn.ReLU()), nn.Linear(16, 1)],
        loss=nn.functional.mse_loss,
        dataset=dataset,
        config=config,
        run_dir=run_dir,
        **options,
    )


def trained(run_dir: Path, dataset: Any, **options: Any) -> tuple[Any, ...]:
    with nothing_left():
        result = trainer(run_dir, dataset, **options).train()
    return result.losses, result.state_digest


def test_loaders_and_layouts_do_not_show(tmp_path: Path) -> None:
    expected = trained(tmp_path / "a", Noisy(), eval_dataset=Noisy(-1.0, 7))
    assert len(set(expected[0])) == 6
    alone = trained(tmp_path / "b", Noisy(), loaders=2, settings={"layout.widths": [1]}, eval_dataset=Noisy(-1.0, 7))
    assert alone == expected


@pytest.mark.slow
def test_a_mixture(tmp_path: Path) -> None:
    mixture = {"plus": (Noisy(), 3.0), "minus": (Noisy(-1.0, 20), 1.0)}
    expected = trained(tmp_path / "a", mixture)
    assert trained(tmp_path / "b", mixture, loaders=2, settings={"layout.widths": [2]}) == expected
    assert trained(tmp_path / "c", {**mixture, "minus": (Noisy(-1.0, 20), 2.0)}) != expected


@pytest.mark.parametrize("loaders", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_in_the_dataset(tmp_path: Path, loaders: int) -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == elaswave.sample_order(0, 50, 3, 2, 4, 4)[1]:
                raise OSError("no such image")
            return super().__getitem__(index)

    run = trainer(tmp_path, Broken(), loaders=loaders, settings={"run.seed": 0})
    index = elaswave.sample_order(0, 50, 3, 2, 4, 4)[1]
    with nothing_left(), pytest.raises(WorkerError) as caught:
        run.train()
    expected = f"OSError: no such image (in dataset[{index}]) (at step 3, micro-batch 2)"
    assert caught.value.summary.startswith(expected)
    assert 'raise OSError("no such image")' in caught.value.traceback_text


@pytest.mark.slow
def test_another_dataset_is_refused_on_resume(tmp_path: Path) -> None:
    trained(tmp_path / "a", Noisy(), settings={"run.checkpoint_every": 3})
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    more = {"run.steps": 8}
    with nothing_left(), pytest.raises(DataError, match="it had 50 samples in dataset and now has 49"):
        trainer(tmp_path / "a", Noisy(num_samples=49), resume=True, settings=more).train()
    with nothing_left(), pytest.raises(DataError, match="of 32 samples that were compared .* have changed"):
        trainer(tmp_path / "a", Noisy(sign=2.0), resume=True, settings=more).train()
    resumed = trained(tmp_path / "b", Noisy(), resume=True, settings=more, loaders=1)
    assert resumed == trained(tmp_path / "c", Noisy(), settings=more)


def test_what_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dataset is empty"):
        trainer(tmp_path, [])
    with pytest.raises(UsageError, match="loaders"):
        trainer(tmp_path, Noisy(), loaders=-1)
    with nothing_left(), pytest.raises(DataError, match="dataset has 3 samples, fewer than one micro-batch"):
        trainer(tmp_path, Noisy(num_samples=3)).train()
    assert not read_processes(tmp_path)


class Records:
    """Samples in a file that is opened before training; refuses to read where another process has moved the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open()

    def open(self) -> None:
        self.file = self.path.open("rb", buffering=0)
        self.stands_at = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path = state["path"]
        self.open()

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.file.tell() == self.stands_at, "another process reads with this one's place"
        self.file.seek(32 * index)
        values = torch.frombuffer(bytearray(self.file.read(32)), dtype=torch.float32)
        self.stands_at = self.file.tell()
        return values[:4], values[7:]


class Lookup(nn.Module):
    """Opens a file where it is built, which is in the forkserver too, and reads it at each call."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.descriptor = os.open(path, os.O_RDONLY)
        self.stands_at = 0

    def __del__(self) -> None:
        os.close(self.descriptor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert os.lseek(self.descriptor, 0, os.SEEK_CUR) == self.stands_at, "another process has read"
        os.read(self.descriptor, 1)
        self.stands_at += 1
        return x


@pytest.mark.parametrize("way", [FORK, pytest.param(FRESH, marks=pytest.mark.slow)])
def test_each_process_has_its_own_place_in_files_that_were_open_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr("elaswave.api.trainer.forkserver_environment", WAYS[way])
    path = tmp_path / "records"
    path.write_bytes(torch.rand(50, 8, generator=torch.Generator().manual_seed(0)).numpy().tobytes())
    records = Records(path)
    opened = launcher.open_data

    def reads_meanwhile(*arguments: Any) -> Any:
        records.file.read(7)  # once the forkserver is there
        records.stands_at = 7
        return opened(*arguments)

    monkeypatch.setattr(launcher, "open_data", reads_meanwhile)
    torch.manual_seed(0)
    lookup = elaswave.Layer("lookup", functools.partial(Lookup, path))
    run = elaswave.Trainer(
        [nn.Linear(4, 16), lookup, nn.Linear(16, 1)],
        nn.functional.mse_loss,
        records,
        config={"run.steps": 2, "batch.num_microbatches": 4, "batch.microbatch_size": 4, "layout.widths": [2]},
        run_dir=tmp_path / "run",
        loaders=1 if way == FRESH else 0,
    )
    with nothing_left():
        try:
            assert not run.train().recoveries, "a worker that reads wrongly is lost"
            assert records.file.tell() == records.stands_at
        finally:
            gc.collect()  # layers that were built in this process, for its first loss, with their descriptors
    records.file.close()


def test_data_that_holds_a_connection_is_refused_before_anything_begins(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(UsageError, match=r"dataset\.line is an open socket .*os\.getpid\(\)"):
        dataset = Noisy()
        dataset.line = ours  # type: ignore[attr-defined]
        trainer(tmp_path / "run", dataset).train()
    assert not (tmp_path / "run").exists()


class Table:
    """Rows of a file that each process maps when it reads the first one; each has a page of its own."""

    def __init__(self, path: Path) -> None:
        self.path, self.script = path, os.getpid()
        self.rows: np.ndarray | None = None
        np.random.default_rng(0).random((50, 1024), np.float32).tofile(path)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.rows is None:
            if os.getpid() != self.script:
                faulthandler.disable()  # pytest's, which would show what is to happen
            self.rows = np.memmap(self.path, np.float32, "r", shape=(50, 1024))
        row = torch.tensor(self.rows[index])
        return row[:4], row[4:5]


@pytest.mark.parametrize("loaders", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_that_is_cut_short_while_it_is_mapped_is_named(tmp_path: Path, loaders: int) -> None:
    path = tmp_path / "table.bin"

    def cut(step: int, loss: float, metrics: Any) -> None:
        if step == 40:
            os.truncate(path, 2 * 4096)

    endless = {
        "run.steps": 10**6,
        "run.checkpoint_every": 20,
        "elastic.respawn": False,
        "layout.widths": [2],
    }
    table = Table(path)
    job = trainer(tmp_path / "run", table, settings=endless, loaders=loaders, callbacks=[cut])
    with nothing_left():
        with pytest.raises(elaswave.errors.RecoveryError) as caught:
            job.train()
        table.rows = None  # this process has mapped the file too, to compare samples
    who = "loader 0 of worker" if loaders else "worker"
    assert re.match(rf"{who} \d was killed by SIGBUS: a file was cut short while the job reads it", str(caught.value))
    assert f"{path}, of which {50 * 4096} bytes are mapped into memory, has 8192 now" in str(caught.value)
    assert "continues from the checkpoint of step" in str(caught.value)
