"""What an exception tells of a device."""

import pytest
import torch

from elaswave.devices import faults
from elaswave.devices.faults import DeviceFault, FaultClass, fault_of
from elaswave.errors import DeviceError

ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with TORCH_USE_CUDA_DSA."
)


@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("CUDA error: an illegal memory access was encountered", FaultClass.CONTEXT),
        ("CUDA error: device-side assert triggered", FaultClass.CONTEXT),
        ("CUDA error: misaligned address", FaultClass.CONTEXT),
        ("CUDA error: unspecified launch failure", FaultClass.CONTEXT),
        ("CUDA error: the launch timed out and was terminated", FaultClass.CONTEXT),
        ("CUDA error: uncorrectable ECC error encountered", FaultClass.LOST),
        ("CUDA error: uncorrectable NVLink error detected during the execution", FaultClass.LOST),
        ("CUDA error: unknown error", FaultClass.LOST),
        ("CUDA driver error: device lost", FaultClass.LOST),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", FaultClass.LOST),
        ("CUDA error: out of memory", FaultClass.MEMORY),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", FaultClass.MEMORY),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`", FaultClass.CONTEXT),
        ("CUDA error: invalid configuration argument", FaultClass.OTHER),
        ("HIP error: an illegal memory access was encountered", FaultClass.CONTEXT),
    ],
)
def test_words_of_devices_have_their_class(kind: type[Exception], words: str, expected: FaultClass) -> None:
    assert fault_of(kind(words + ADVICE)) == DeviceFault(expected, words)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", FaultClass.CONTEXT),
        ("Triton Error [CUDA]: out of memory", FaultClass.MEMORY),
        ("Triton Error [CUDA]: an illegal memory access was encountered", FaultClass.CONTEXT),
    ],
)
def test_so_do_those_of_libraries(words: str, expected: FaultClass) -> None:
    assert fault_of(RuntimeError(words)) == DeviceFault(expected, words)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: an illegal memory access was encountered"),  # a person's code that speaks of one
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory"),
        MemoryError(),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_none_of_a_device(error: BaseException) -> None:
    assert fault_of(error) is None


def test_memory_is_known_by_its_type_whatever_it_says() -> None:
    assert fault_of(torch.OutOfMemoryError("no words")) == DeviceFault(FaultClass.MEMORY, "no words")
    assert fault_of(torch.OutOfMemoryError()) == DeviceFault(FaultClass.MEMORY, "OutOfMemoryError")
    assert fault_of(torch.AcceleratorError("no known words")) == DeviceFault(FaultClass.OTHER, "no known words")


def test_torch_without_these_types_is_understood_by_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "_NO_MEMORY", faults._types("NoSuchError"))
    monkeypatch.setattr(faults, "_OF_DEVICES", faults._types("NoSuchError"))
    words = "CUDA out of memory. Tried to allocate 2.00 GiB"
    assert fault_of(RuntimeError(words)) == DeviceFault(FaultClass.MEMORY, words)


def test_what_a_fault_has_led_to_tells_of_it() -> None:
    broken = torch.AcceleratorError("CUDA error: device-side assert triggered")
    try:
        try:
            raise broken
        except RuntimeError as error:
            raise ValueError("a layer's own words") from error
    except ValueError as raised:
        assert fault_of(raised) == DeviceFault(FaultClass.CONTEXT, str(broken))
    try:
        try:
            raise broken
        except RuntimeError:
            raise ValueError("nothing to do with it") from None
    except ValueError as raised:
        assert fault_of(raised) is None
    circle = ValueError("a circle")
    circle.__cause__ = KeyError()
    circle.__cause__.__cause__ = circle
    assert fault_of(circle) is None


def test_a_device_that_cannot_be_opened_and_what_may_be_touched() -> None:
    unopened = fault_of(DeviceError("cuda:0 cannot be used"))
    assert unopened == DeviceFault(FaultClass.UNOPENED, "cuda:0 cannot be used")
    forbidding = [kind for kind in FaultClass if DeviceFault(kind, "").forbids_touch]
    assert forbidding == [FaultClass.CONTEXT, FaultClass.LOST, FaultClass.OTHER]
    assert [kind for kind in FaultClass if DeviceFault(kind, "").is_of_the_device] == [FaultClass.LOST]
