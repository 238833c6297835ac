"""What datasets and collate functions hold: connections are refused by name, whatever they stand in."""

import collections
import functools
import http.client
import io
import logging
import logging.handlers
import multiprocessing
import os
import selectors
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elaswave.api import given
from elaswave.api.given import refuse_connections, without_new_connections
from elaswave.errors import UsageError
from elaswave.training.dataset import DatasetSamples


class Data:
    """A dataset with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), torch.zeros(1)


class Slotted:
    __slots__ = ("empty", "inner")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


CONNECTION: Any = None
"""That `Reads` and `collate_by_global` name."""


class Reads(Data):
    def __getitem__(self, index: int) -> Any:
        return [CONNECTION for _ in range(index)]

    def download(self) -> Any:
        return CONNECTION


class Downloads(Data):
    def download(self) -> Any:
        return CONNECTION


def helper(samples: Any) -> Any:
    return CONNECTION, samples


def collate_by_global(samples: Any) -> Any:
    return (lambda: helper(samples))()


@pytest.fixture
def line() -> Iterator[socket.socket]:
    one, other = socket.socketpair()
    with one, other:
        yield one


def refusal(dataset: Any = None, collate: Callable[[Any], Any] = list, **others: Any) -> str | None:
    samples = DatasetSamples(Data() if dataset is None else dataset, collate, **others)
    try:
        refuse_connections(samples.parts)
    except UsageError as error:
        return str(error).partition(":")[0]
    return None


def generated(line: socket.socket) -> Iterator[bytes]:
    inner = line
    yield inner.recv(1)


def test_a_socket_is_found_wherever_it_is_held(line: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    what = " is an open socket (socket.socket)"
    pair = types.SimpleNamespace(first=[1, (line,)])
    local = threading.local()
    local.line = line
    assert refusal(Data(line=line)) == f"dataset.line{what}"
    assert refusal(Data(rest={"a": pair})) == f"dataset.rest['a'].first[1][0]{what}"
    assert refusal(Data(rest=collections.deque([Slotted(line)]))) == f"dataset.rest[0].inner{what}"
    assert refusal(Data(rest={line})) == f"dataset.rest[0]{what}"
    assert refusal(Data(rest=local)) == f"dataset.rest.line{what}"
    assert refusal(Data(rest=generated(line))) == f"dataset.rest.line{what}"
    assert refusal(torch.utils.data.Subset(Data(line=line), range(3))) == f"dataset.dataset.line{what}"
    assert refusal(eval_dataset=Data(line=line)) == f"eval_dataset.line{what}"
    assert refusal({"books": (Data(line=line), 1.0)}) == f"dataset['books'].line{what}"
    assert refusal(collate=functools.partial(min, line)) == f"collate.args[0]{what}"
    assert refusal(collate=Data(line=line).__getitem__) == f"collate.__self__.line{what}"
    assert refusal(collate=lambda samples: (line, samples)) == f"collate's line{what}"
    assert refusal(collate=lambda samples, line=line: samples) == f"collate's default{what}"
    monkeypatch.setattr(Data, "shared", line, raising=False)
    assert refusal() == f"dataset.shared{what}"


def test_a_socket_that_samples_are_made_with_is_found_among_the_globals(
    line: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CONNECTION", line)
    assert refusal(Reads()) == "dataset.__getitem__'s CONNECTION is an open socket (socket.socket)"
    assert refusal(collate=collate_by_global) == "collate's helper's CONNECTION is an open socket (socket.socket)"
    assert refusal(Downloads()) is None, "no sample is made with it"


def test_pipes_connections_and_files_for_writing_are_found(tmp_path: Path) -> None:
    queue: Any = multiprocessing.SimpleQueue()
    assert refusal(Data(queue=queue)) == "dataset.queue._reader is an open pipe (multiprocessing.connection.Connection)"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert "dataset.process.std" in str(refusal(Data(process=process)))
        assert "is an open pipe" in str(refusal(Data(out=process.stdout)))
        process.kill()
    for mode in ("w+b", "a+b"):
        with tempfile.NamedTemporaryFile(mode) as file:
            assert "is a file that is open for reading and writing" in str(refusal(Data(file=file)))
    with selectors.EpollSelector() as selector:
        assert "is an open descriptor of the kernel's" in str(refusal(Data(selector=selector)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = http.client.HTTPConnection(*server.getsockname())
        assert refusal(Data(client=client)) is None, "it connects when it is asked"
        client.connect()
        assert refusal(Data(client=client)) == "dataset.client.sock is an open socket (socket.socket)"
        client.close()
        assert refusal(Data(client=client)) is None
    base = sqlite3.connect(tmp_path / "base")
    assert refusal(Data(base=base)) == "dataset.base is an open connection to a database of sqlite"
    assert refusal(Data(cursor=base.cursor())) == "dataset.cursor is an open connection to a database of sqlite"
    base.close()
    assert refusal(Data(base=base)) is None
    in_memory = sqlite3.connect(":memory:")
    assert refusal(Data(base=in_memory)) is None
    in_memory.close()


def test_a_hdf5_file_may_be_open_for_reading() -> None:
    def opened(mode: str) -> Any:
        file = types.new_class("File", (), {}, lambda body: body.update(__module__="h5py._hl.files", mode=mode))()
        type(file).file = property(lambda self: self)
        return file

    assert refusal(Data(file=opened("r"))) is None
    assert "HDF5 file that is open for writing (mode 'r+')" in str(refusal(Data(file=opened("r+"))))


def test_what_processes_may_share_is_not_refused(
    line: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("tests.held")
    handler = logging.handlers.DatagramHandler("127.0.0.1", 9)
    handler.createSocket = lambda: setattr(handler, "sock", line)  # type: ignore[method-assign]
    handler.createSocket()
    logger.addHandler(handler)
    closed = socket.socket()
    closed.close()
    around: dict[str, Any] = {"logger": logger, "closed": closed, "memory": io.BytesIO(b"x"), "module": os}
    around["itself"] = around
    with open(tmp_path / "read", "w+b") as file:
        file.write(b"a")
    with open(tmp_path / "read", "rb") as read, open(tmp_path / "log", "a") as log:
        out = io.StringIO()
        out.line = line  # type: ignore[attr-defined]  # as a notebook's standard output has connections
        monkeypatch.setattr(sys, "stdout", out)
        kept = Data(read=read, log=log, lock=threading.Lock(), out=sys.stdout, by_process={os.getpid(): line}, **around)
        assert refusal(kept, lambda samples: (os.path, samples)) is None
    logger.removeHandler(handler)
    handler.sock = None


def test_no_more_is_looked_at_than_a_bound_and_the_nearest_first(
    line: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "OBJECTS_MAX", 50)
    many = [[index] for index in range(100)]
    assert len(list(given.held({"dataset": many}))) == 50
    assert refusal(Data(many=many, line=line)) is not None
    assert refusal(Data(many=[many, [line]])) is None


def test_what_data_has_connected_to_meanwhile_is_closed_and_set_back(line: socket.socket, tmp_path: Path) -> None:
    """A dataset that connects when its first sample is asked for may be trained on a second time."""
    inner = Data(link=None, count=0, known=None, kept=line)
    data = Data(inner=inner)
    with pytest.raises(ValueError, match="the job"), without_new_connections({"dataset": data}):
        inner.link = sqlite3.connect(tmp_path / "a.db")  # type: ignore[attr-defined]
        inner.count, inner.known, data.late = 5, [1], Data()  # type: ignore[attr-defined]
        opened = inner.link  # type: ignore[attr-defined]
        data.socket = own = socket.socket()  # type: ignore[attr-defined]
        raise ValueError("the job")
    assert vars(inner) == {"link": None, "count": 5, "known": [1], "kept": line}
    assert set(vars(data)) == {"inner", "late"} and own.fileno() == -1
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened.execute("select 1")
    inner.kept = None  # type: ignore[attr-defined]
    refuse_connections({"dataset": data})


def test_what_each_thread_has_connected_for_itself_is_left_alone(tmp_path: Path) -> None:
    own = OfThread()
    own.link = None
    with without_new_connections({"dataset": Data(own=own)}):
        own.link = sqlite3.connect(tmp_path / "a.db")
    assert own.link is not None and own.link.execute("select 1").fetchone() == (1,)
    own.link.close()


class OfThread(threading.local):
    link: sqlite3.Connection | None
