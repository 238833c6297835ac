"""A worker and its loaders: what is asked ahead, and what happens when loaders end, hang, or meet bad data.

The loaders are threads here, each with the socket of a real one; real processes are in tests/integration.
"""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elaswave.engine import batches
from elaswave.engine.activity import Activity
from elaswave.engine.batches import AHEAD, BatchError, Batches, BatchName, LoaderSupply, serve_batches
from elaswave.errors import InterruptedWaitError, WaitTimeoutError
from elaswave.launcher.forkserver.loaders import LoaderSockets
from elaswave.launcher.forkserver.machine import Loader
from elaswave.planning.programs.layout import make_layout
from elaswave.protocol.step.activity import DATA
from elaswave.training.dataset import UserDataError
from elaswave.types import Layout

LAYOUT = make_layout(widths=(2, 1), layers_per_stage=(2, 2), num_microbatches=6)
"""Worker 0 runs the first layers of the even micro-batches, worker 2 the last layers of all."""


class Maker:
    """Makes a batch that says what it is; `before` is called with each name first."""

    def __init__(self) -> None:
        self.made: list[BatchName] = []
        self.before: Callable[[BatchName], object] = lambda name: None

    def make(self, name: BatchName) -> tuple[Any, Any]:
        self.before(name)
        self.made.append(name)
        return expected(name)


def expected(name: BatchName) -> tuple[Any, Any]:
    return {"x": torch.tensor([name.step, name.microbatch])}, torch.tensor(name.split == "train")


class Crew:
    """A forkserver with threads as loaders, and the worker that they serve."""

    def __init__(self, worker: int, num_loaders: int, layout: Layout = LAYOUT, num_steps: int = 3) -> None:
        self.maker = Maker()
        self.lines = LoaderSockets(lambda line, worker: None, lambda line: None)
        self.worker = worker
        self.threads: list[threading.Thread] = []
        self.sockets: dict[int, socket.socket] = {}
        self.forks: list[int] = []
        self.refuses = False
        self.checks = 0
        self.interrupt_at = -1
        self.activity = Activity()
        self.theirs = self.lines.open(worker)
        self.supply = LoaderSupply(
            worker,
            self.theirs,
            num_loaders=num_loaders,
            num_steps=num_steps,
            eval_microbatches=3,
            check=self.check,
            activity=self.activity,
            log=Path("loader.log"),
        )
        self.supply.use_layout(layout)
        for index in range(num_loaders):
            self.fork(index)

    def fork(self, index: int) -> None:
        self.forks.append(index)
        line = self.sockets[index] = self.lines.hand_over(Loader(self.worker, index))
        thread = threading.Thread(target=self.serve, args=(line,), daemon=True)
        self.threads.append(thread)
        thread.start()

    def serve(self, line: socket.socket) -> None:
        with line, contextlib.suppress(SystemExit, OSError):
            serve_batches(self.maker, line)  # type: ignore[arg-type]

    def check(self) -> None:
        """What the forkserver does meanwhile, and what the machine does between layers."""
        self.checks += 1
        if self.checks == self.interrupt_at:
            raise InterruptedWaitError("a new generation")
        for loader in [] if self.refuses else self.lines.asked(self.worker):
            self.fork(loader.number)

    def get(self, step: int, microbatch: int) -> tuple[Any, Any]:
        return self.supply.get(BatchName("train", step, microbatch))

    def settle(self, num_made: int) -> list[BatchName]:
        """Waits until so many have been made; what has been made, sorted."""
        deadline_s = time.monotonic() + 20
        while len(self.maker.made) < num_made and time.monotonic() < deadline_s:
            time.sleep(0.002)
        time.sleep(0.02)  # more would be a fault
        return sorted(self.maker.made)

    def close(self) -> None:
        self.maker.before = lambda name: None
        self.theirs.close()
        for loader in self.supply._loaders.values():
            loader.line.close()
        self.supply._take_what_came = lambda: None  # type: ignore[method-assign]
        self.lines.let_go()


@pytest.fixture
def crews() -> Iterator[Callable[..., Crew]]:
    made: list[Crew] = []

    def make(*arguments: Any, **options: Any) -> Crew:
        made.append(Crew(*arguments, **options))
        return made[-1]

    yield make
    for crew in made:
        crew.close()
    for crew in made:
        for thread in crew.threads:
            thread.join(10)


def same(found: tuple[Any, Any], step: int, microbatch: int) -> bool:
    inputs, targets = expected(BatchName("train", step, microbatch))
    return torch.equal(found[0]["x"], inputs["x"]) and torch.equal(found[1], targets)


@pytest.mark.parametrize("num_loaders", [1, 3])
def test_batches_come_and_the_next_ones_are_made_ahead(crews: Callable[..., Crew], num_loaders: int) -> None:
    crew = crews(0, num_loaders)
    crew.supply.begin(1)
    ahead = AHEAD * num_loaders
    order = [BatchName("train", step, index) for step in (1, 2, 3) for index in (0, 2, 4)]
    crew.check(), crew.supply.begin(1)
    assert crew.settle(ahead) == order[:ahead]
    for count, name in enumerate(order):
        assert same(crew.get(name.step, name.microbatch), name.step, name.microbatch)
        wanted = min(len(order), count + 1 + ahead)
        assert crew.settle(wanted) == order[:wanted], "in a row, each once, and none after the last step"


def test_what_was_not_foreseen_comes_as_well(crews: Callable[..., Crew]) -> None:
    crew = crews(0, 1)
    assert same(crew.get(2, 3), 2, 3)
    inputs, targets = crew.supply.get(BatchName("validation", 0, 2))
    assert inputs["x"].tolist() == [0, 2] and not targets
    assert same(crew.get(2, 3), 2, 3), "again, as a step that is tried again asks"


def test_a_new_layout_changes_what_is_made_ahead(crews: Callable[..., Crew]) -> None:
    crew = crews(0, 1)
    alone = make_layout(widths=(1, 1), layers_per_stage=(2, 2), num_microbatches=6)
    crew.supply.begin(1)
    crew.get(1, 0)
    crew.settle(3)
    crew.supply.use_layout(alone)
    crew.supply.begin(1)
    for index in range(6):
        assert same(crew.get(1, index), 1, index)
    assert {name.microbatch for name in crew.maker.made if name.step == 1} == set(range(6))


def test_evaluations_are_made_ahead(crews: Callable[..., Crew]) -> None:
    crew = crews(2, 1)
    crew.supply.get(BatchName("validation", 0, 0))
    assert crew.settle(3) == [BatchName("validation", 0, index) for index in range(3)]


def test_an_interrupt_leaves_the_wait_and_nothing_is_lost(crews: Callable[..., Crew]) -> None:
    crew, gate = crews(0, 1), threading.Event()
    crew.maker.before = lambda name: gate.wait(20)
    crew.interrupt_at = 3
    with pytest.raises(InterruptedWaitError):
        crew.get(1, 0)
    gate.set()
    assert same(crew.get(1, 0), 1, 0)
    assert crew.maker.made.count(BatchName("train", 1, 0)) == 1


class TestTrouble:
    def test_a_loader_that_ends_is_replaced(self, crews: Callable[..., Crew]) -> None:
        crew = crews(0, 2)
        crew.get(1, 0)
        crew.settle(5)
        for index in (0, 1):
            crew.sockets[index].shutdown(socket.SHUT_RDWR)
        for index in (2, 4):
            assert same(crew.get(1, index), 1, index)
        crew.supply.begin(2)
        for index in (0, 2, 4):
            assert same(crew.get(2, index), 2, index)
        assert sorted(crew.forks) == [0, 0, 1, 1]

    def test_loaders_that_end_over_one_batch_are_its_fault(self, crews: Callable[..., Crew]) -> None:
        crew = crews(0, 1)

        def exit_at_two(name: BatchName) -> None:
            if name == BatchName("train", 1, 2):
                raise SystemExit

        crew.maker.before = exit_at_two
        assert same(crew.get(1, 0), 1, 0)
        with pytest.raises(BatchError, match=r"3 loaders, .* ended while they made it.*see loader.log \(at step 1, mi"):
            crew.get(1, 2)
        assert len(crew.forks) <= 1 + batches.ENDS_MAX
        assert same(crew.get(1, 4), 1, 4)

    def test_a_loader_that_hangs_is_replaced(self, crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batches, "HANG_S", 0.1)
        crew, gate = crews(0, 1), threading.Event()
        held: list[BatchName] = []

        def hang_once(name: BatchName) -> None:
            if not held:
                held.append(name)
                gate.wait(20)

        crew.maker.before = hang_once
        crew.activity.compute("0F0")
        assert same(crew.get(1, 0), 1, 0)
        assert crew.activity.label == DATA, "the coordinator's clock begins again"
        assert crew.forks == [0, 0]
        gate.set()

    def test_loaders_that_hang_over_one_batch_are_its_fault(
        self, crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batches, "HANG_S", 0.05)
        crew, gate = crews(0, 2), threading.Event()
        crew.maker.before = lambda name: gate.wait(20) if name.microbatch == 0 else None
        with pytest.raises(BatchError, match=r"2 loaders, .* have not made it, the last one within 0.1 s"):
            crew.get(1, 0)
        gate.set()

    def test_the_first_batches_may_take_any_time_as_long_as_the_loader_computes(
        self, crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batches, "HANG_S", 0.02)
        monkeypatch.setattr(batches, "LOOK_S", 0.0)
        cpu_s = itertools.count()
        monkeypatch.setattr(batches, "family_cpu_s", lambda pid: float(next(cpu_s)))
        crew = crews(0, 1)
        crew.supply._take_what_came()
        (loader,) = crew.supply._loaders.values()
        loader.pid = 1
        crew.maker.before = lambda name: time.sleep(0.3)
        assert same(crew.get(1, 0), 1, 0)
        assert crew.forks == [0]
        monkeypatch.setattr(batches, "FIRST_S", 0.05)
        crew.maker.before = lambda name: time.sleep(0.3) if len(crew.forks) == 1 else None
        assert same(crew.get(1, 4), 1, 4)
        assert crew.forks == [0, 0], "but not for ever"

    def test_the_bound_is_learned(self, crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
        crew, name = crews(0, 1), BatchName("train", 1, 0)
        assert crew.supply.hang_bound_s(name) == batches.HANG_S
        for index in range(batches.LEARNED):
            crew.get(1, index)
        assert crew.supply.hang_bound_s(name) == batches.HANG_FLOOR_S
        crew.supply._longest_s = 15.0
        assert crew.supply.hang_bound_s(name) == 60.0

    def test_an_exception_comes_to_the_worker_when_the_batch_is_asked_for(self, crews: Callable[..., Crew]) -> None:
        crew = crews(0, 1)

        def bad(name: BatchName) -> None:
            if name.microbatch == 2:
                try:
                    raise OSError("no such image")
                except OSError as error:
                    raise UserDataError("dataset[17]", error) from error
            if name.microbatch == 4:
                raise ValueError("odd")

        crew.maker.before = bad
        assert same(crew.get(1, 0), 1, 0)
        with pytest.raises(BatchError) as caught:
            crew.get(1, 2)
        assert str(caught.value) == "OSError: no such image (in dataset[17]) (at step 1, micro-batch 2)"
        assert caught.value.kind == "OSError" and 'raise OSError("no such image")' in caught.value.traceback_text
        with pytest.raises(BatchError, match="ValueError: odd"):
            crew.get(1, 4)
        assert crew.forks == [0], "it goes on"

    def test_a_batch_that_cannot_travel(self, crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
        crew = crews(0, 1)
        monkeypatch.setattr(crew.maker, "make", lambda name: (lambda: None, None))
        with pytest.raises(BatchError, match="[Pp]ickle"):
            crew.get(1, 0)

    def test_a_template_that_forks_none(self, crews: Callable[..., Crew], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(batches, "REPLACE_S", 0.05)
        crew = crews(0, 1)
        crew.refuses = True
        crew.get(1, 0)
        crew.settle(3)
        crew.sockets[0].shutdown(socket.SHUT_RDWR)
        with pytest.raises(WaitTimeoutError, match="the forkserver has forked no loader for 0 s"):
            crew.get(3, 5)


class TestBatches:
    """What the engine sees."""

    class Supply:
        def __init__(self) -> None:
            self.asked: list[BatchName] = []
            self.labels: list[str] = []
            self.activity = Activity()
            self.use_layout = lambda layout: None

        def begin(self, step: int) -> None:
            pass

        def get(self, name: BatchName) -> tuple[Any, Any]:
            self.asked.append(name)
            self.labels.append(self.activity.label)
            time.sleep(0.001)
            return name, name

    def test_the_worker_says_that_it_is_at_its_data_and_how_long(self) -> None:
        supply, waited = self.Supply(), []
        batches = Batches(supply, supply.activity, waited.append)
        supply.activity.compute("0F3")
        name = BatchName("train", 1, 3)
        assert batches.training(1, 3) == (name, name) and supply.labels == [DATA]
        assert supply.activity.label == "0F3" and waited[0] >= 0.001
        assert batches.evaluation(5, 2)[0] == BatchName("validation", 0, 2)
        assert len(waited) == 1, "evaluation is no part of a step"
        supply.activity.wait("evaluate")
        batches.training(1, 4)
        assert supply.activity.label == DATA, "it did not compute before"
