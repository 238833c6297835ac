"""What a person's code raises in a layer, the loss or the data, and how its worker reports it."""

import re
import socket
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.unit.engine.test_layer_calls import (
    SIZE,
    Block,
    Head,
    Table,
    cross_entropy,
    inputs_of,
    make_compute,
    model_of,
    refused,
    run_one,
    targets_of,
)
from torch import nn

from elaswave.channel.messages.worker import Failed
from elaswave.data.samples import Draw
from elaswave.engine import batches
from elaswave.engine.batches import BatchError, BatchMaker, BatchName, NotMade
from elaswave.engine.checks.rehearsal import interruptible
from elaswave.engine.compute import Compute, ErrorPlace, LayerError
from elaswave.errors import EndedBySignal, InterruptedWaitError, StoppedBySignalError
from elaswave.models.admission import CopyOf
from elaswave.models.layers import Layer, ModelSpec, batch
from elaswave.training.dataset import DatasetSamples, UserDataError
from elaswave.worker import process as worker_process
from elaswave.worker.control import failure_message

PLACE = ErrorPlace(2, 3, 1, "middle")


class Ends(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sys.exit(3)


class Interrupts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


class Asks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * batch().sum()


@pytest.mark.parametrize(
    ("layer", "words"), [(Ends, "SystemExit: 3 (at step 3, "), (Interrupts, "KeyboardInterrupt (at step 3, ")]
)
def test_what_is_no_exception_is_located_as_well(layer: type, words: str) -> None:
    with pytest.raises(LayerError) as caught:
        run_one(Table, layer, Head)
    assert words in str(caught.value) and "layer 1" in str(caught.value)


def test_the_loss_that_ends_the_process_is_named() -> None:
    with pytest.raises(LayerError, match=r"SystemExit: over .*\(loss\)"):
        run_one(Table, Head, loss=lambda output, targets: sys.exit("over"))


@pytest.mark.parametrize(
    "error", [InterruptedWaitError("a new generation"), BatchError(BatchName("train", 3, 0), "E", "s")]
)
def test_what_ends_a_wait_for_the_inputs_is_none_of_the_layers(error: Exception) -> None:
    def fetch(step: int, microbatch: int, *, train: bool) -> Any:
        raise error

    compute: Compute = make_compute(model_of(Table, Asks, Head))
    compute._fetch = fetch
    with pytest.raises(type(error)):
        compute.forward(range(3), 0, inputs_of(0), targets_of(0))


class Infers(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.map(x)


@pytest.mark.parametrize("train", [True, False])
def test_a_layer_in_inference_mode_is_named(train: bool) -> None:
    compute = make_compute(model_of(Table, Infers, Head))
    with pytest.raises(
        LayerError, match=r"layer l1 returns a float32 tensor .* that torch\.inference_mode\(\) has made"
    ):
        compute.forward(range(3), 0, inputs_of(0), targets_of(0), train=train)


@pytest.mark.parametrize("loss", [lambda o, t: torch.tensor(5.0), lambda o, t: o.detach().mean()])
def test_a_loss_without_a_graph_is_refused(loss: Any) -> None:
    assert "the loss returned a tensor without a graph" in refused(Table, Head, loss=loss)
    make_compute(model_of(Table, Head, loss=loss)).forward(range(2), 0, inputs_of(0), targets_of(0), train=False)


def test_a_loss_or_metric_that_writes_what_it_is_given_is_refused() -> None:
    def writes_targets(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets[targets == 2] = 0
        return cross_entropy(output, targets)

    def writes_output(output: torch.Tensor, targets: torch.Tensor) -> float:
        return float(output.sigmoid_().mean())

    assert "the loss writes its targets, which" in refused(Table, Head, loss=writes_targets)
    for metric in (writes_output, lambda output, targets: targets.zero_().sum()):
        assert "the metric odd writes what it is given, which" in refused(Table, Head, metrics={"odd": metric})
    compute = make_compute(model_of(Table, Head, loss=lambda output, targets: cross_entropy(output, targets["ids"][0])))
    compute.forward(range(2), 0, inputs_of(0), {"ids": (targets_of(0),), "mask": None})


def test_a_weight_of_another_layers_instance_is_named() -> None:
    first = nn.Linear(SIZE, SIZE)

    class Reaches(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.map(x) @ first.weight

    layers = (Layer("table", Table), Layer("first", CopyOf(first, "first")), Layer("x", Reaches), Layer("head", Head))
    compute = make_compute(ModelSpec(layers, cross_entropy))
    with pytest.raises(LayerError, match=r"layer x reaches parameter first\.weight, which is not its own"):
        compute.forward(range(4), 0, inputs_of(0), targets_of(0))


@pytest.mark.parametrize(("whole", "words"), [(True, "(model.recompute=false)"), (False, "(Layer(recompute=False))")])
def test_recomputation_is_switched_off_where_it_was_switched_on(whole: bool, words: str) -> None:
    class Writes(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.map(x.relu_())

    layers = (Layer("table", Table), Layer("x", Writes, recompute=not whole), Layer("head", Head))
    compute = make_compute(ModelSpec(layers, cross_entropy), recompute=whole)
    with pytest.raises(LayerError, match=re.escape(words)):
        compute.forward(range(3), 0, inputs_of(0), targets_of(0))


@pytest.mark.parametrize(
    "cause", [KeyboardInterrupt(), EndedBySignal(143), StoppedBySignalError(10, "stopped"), ValueError("own")], ids=repr
)
def test_a_signal_to_an_evaluation_ends_it_as_itself(cause: BaseException) -> None:
    """It may come while a layer runs, in the script's own process."""
    error = LayerError(PLACE, cause)
    error.__cause__ = cause
    with pytest.raises(LayerError if isinstance(cause, ValueError) else type(cause)), interruptible():
        raise error


class Data:
    """Sample 3 ends the process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 3:
            sys.exit(7)
        return torch.zeros(2), torch.zeros(1)


def draw(sample: int) -> Draw:
    return Draw(sample, 0, sample)


def test_a_sample_or_collate_that_ends_the_process_is_named() -> None:
    with pytest.raises(UserDataError, match=r"SystemExit: 7 \(in dataset\[3\]\)"):
        DatasetSamples(Data()).batch([draw(2), draw(3)], "train")
    with pytest.raises(UserDataError, match=r"SystemExit: 2 \(in collate of dataset\[1\]\)"):
        DatasetSamples(Data(), lambda samples: sys.exit(2)).batch([draw(1)], "train")


def test_a_loader_answers_with_what_a_sample_raises() -> None:
    config = SimpleNamespace(batch=SimpleNamespace(microbatch_size=1))
    sampler = SimpleNamespace(draws=lambda step, microbatch: [draw(3)])
    maker = BatchMaker(config, DatasetSamples(Data()), sampler)  # type: ignore[arg-type]
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        batches._answer(maker, theirs, BatchName("train", 1, 0))
        answer = msgspec.msgpack.decode(ours.recv(batches.MESSAGE_BYTES_MAX), type=NotMade)
    assert answer.kind == "SystemExit" and "in dataset[3]" in answer.summary and "sys.exit(7)" in answer.traceback_text


@pytest.mark.parametrize("cause", [ValueError("bad \udcff name"), SystemExit(3), ValueError("x" * 3_000_000)])
def test_a_report_can_be_sent_and_is_not_too_long(cause: BaseException) -> None:
    error = LayerError(PLACE, cause)
    error.__cause__ = cause
    failed = failure_message(0, error)
    assert failed.kind == type(cause).__name__ and failed.signature.endswith("at step 2, micro-batch 3")
    assert "(at step 2, micro-batch 3, layer 1 (middle))" in failed.summary
    assert len(msgspec.msgpack.encode(failed)) < 60_000


def test_a_worker_reports_what_is_no_exception(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    sent: list[Failed] = []
    client = SimpleNamespace(send=lambda message, durable: sent.append(message), close=lambda timeout_s: None)

    def start(*arguments: object) -> None:
        sys.exit(4)  # a builder, say

    def none(*arguments: object, **options: object) -> Any:
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(worker_process, "Worker", start)
    monkeypatch.setattr(worker_process, "StreamTransport", none)
    monkeypatch.setattr(worker_process, "Mailbox", none)
    monkeypatch.setattr(worker_process, "_open_device", none)
    setup: Any = SimpleNamespace(worker=1, key=b"", listen="", joins=False, sites=None)
    setup._replace = lambda **changes: setup
    assert worker_process.run_worker(setup, lambda mailbox: client) == 1  # type: ignore[arg-type,return-value]
    assert sent[0].summary == "SystemExit: 4" and "sys.exit(4)" in sent[0].traceback_text
    assert "sys.exit(4)" in capfd.readouterr().err
