"""What a worker says of the error that ends it: faults of devices. Others are in test_raised_in_layers.py."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaswave.engine.compute import ErrorPlace, LayerError
from elaswave.errors import DeviceError, FencedOffError, SpotCheckError, UsageError
from elaswave.worker import process as worker_process
from elaswave.worker.control import FailureLocation, failure_message

ASSERTED = "CUDA error: device-side assert triggered"
LOST = "CUDA error: uncorrectable ECC error encountered"
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB\nmore")


def in_layer(cause: BaseException, microbatch: int) -> LayerError:
    error = LayerError(ErrorPlace(7, microbatch, 2, "block.1"), cause)
    error.__cause__ = cause
    return error


def test_memory_names_the_place_at_which_it_was_lacking() -> None:
    failed = failure_message(1, in_layer(NO_MEMORY, 3), FailureLocation(7, "1F3"))
    assert failed.signature == "OutOfMemoryError at step 7, micro-batch 3"
    assert failed.summary == (
        "out of device memory: CUDA out of memory. Tried to allocate 1.00 GiB "
        "(at step 7, micro-batch 3, layer 2 (block.1), in forward of micro-batch 3 in stage 1)"
    )
    assert failure_message(2, in_layer(NO_MEMORY, 3), FailureLocation(7, "0B3")).signature == failed.signature
    assert failure_message(2, in_layer(NO_MEMORY, 4), FailureLocation(7, "0B4")).signature != failed.signature
    assert failure_message(2, NO_MEMORY, FailureLocation(7, "apply")).summary.endswith("(at step 7, in apply)")


def test_a_broken_context_is_the_same_wherever_in_its_step_it_is_met() -> None:
    asserted = torch.AcceleratorError(ASSERTED)
    met = [
        failure_message(1, in_layer(asserted, 3), FailureLocation(7, "1W3")),
        failure_message(2, in_layer(asserted, 4), FailureLocation(7, "1I4")),
        failure_message(3, asserted, FailureLocation(7, "reduce")),
    ]
    assert {each.signature for each in met} == {f"{ASSERTED} at step 7"}
    assert "layer 2 (block.1), in backward, weight half of micro-batch 3 in stage 1; what failed may" in met[0].summary
    assert met[2].summary.startswith(f"broken device context: {ASSERTED} (met at step 7, in reduce; ")
    assert failure_message(1, asserted, FailureLocation(8, "1F0")).signature != met[0].signature


def test_a_lost_device_is_the_same_as_no_other() -> None:
    lost = torch.AcceleratorError(LOST)
    one, other = (failure_message(worker, lost, FailureLocation(7, "1F3")) for worker in (1, 2))
    assert one.signature != other.signature and one.summary == other.summary
    assert one.summary.startswith(f"lost device: {LOST} (met at step 7, ")


def test_a_device_that_cannot_be_opened_is_the_same_on_all_workers() -> None:
    failed = failure_message(1, DeviceError("cuda:0 cannot be used"))
    assert failed.summary == "device cannot be opened: cuda:0 cannot be used"
    assert failed.signature == failure_message(2, DeviceError("cuda:1 cannot be used")).signature


def test_what_a_spot_check_has_found_makes_the_workers_step_doubtful() -> None:
    found = [
        failure_message(worker, in_layer(SpotCheckError("other bits"), 3), FailureLocation(7, "1F3"))
        for worker in (1, 2)
    ]
    assert {each.signature for each in found} == {"SpotCheckError at step 7, layer 2"}
    assert failure_message(3, in_layer(SpotCheckError("other bits"), 4)).signature == found[0].signature
    assert found[0].is_wrong and not found[0].is_common
    assert found[0].summary == "SpotCheckError: other bits (at step 7, micro-batch 3, layer 2 (block.1))"
    assert not failure_message(1, in_layer(UsageError("not deterministic"), 3), FailureLocation(7, "1F3")).is_wrong


class Held:
    """What asks the device when it is given back, such as a tensor."""


@pytest.mark.parametrize("error", [torch.AcceleratorError, FencedOffError])
def test_nothing_of_the_device_is_given_back_on_the_way_out(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Held]] = []

    class Worker:
        failure_location = FailureLocation(3, "1F0")

        def __init__(self, *_: object) -> None:
            self.layer = Held()
            held.append(weakref.ref(self.layer))

        def train(self) -> None:
            value = Held()
            held.append(weakref.ref(value))
            raise error(ASSERTED)

        def close(self) -> None:
            """Sets clocks back."""

    client = SimpleNamespace(send=lambda message, durable: None, close=lambda timeout_s: None)
    for name in ("StreamTransport", "Mailbox", "_open_device"):
        monkeypatch.setattr(worker_process, name, lambda *arguments, **options: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(worker_process, "Worker", Worker)
    untouched: list[Any] = []
    monkeypatch.setattr(worker_process, "_UNTOUCHED", untouched)
    setup: Any = SimpleNamespace(worker=1, key=b"", listen="", joins=False, sites=None)
    setup._replace = lambda **changes: setup
    num_frozen = gc.get_freeze_count()
    try:
        assert worker_process.run_worker(setup, lambda mailbox: client) == 1  # type: ignore[arg-type,return-value]
        assert (gc.get_freeze_count() > num_frozen) == issubclass(error, RuntimeError)
    finally:
        gc.unfreeze()
    assert all(each() is not None for each in held)
    untouched.clear()
    gc.collect()
    assert all(each() is None for each in held)
