"""What the device layer for CUDA does on the host alone; the rest is in ``tests/device``."""

from collections.abc import Iterator

import pytest
import torch

from elaswave.devices.cuda import Cuda, use_deterministic_kernels


@pytest.fixture
def settings_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's settings are as before afterwards."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    before = [
        (owner, name, getattr(owner, name))
        for owner, name in (
            (cuda.matmul, "allow_tf32"),
            (cuda.matmul, "allow_bf16_reduced_precision_reduction"),
            (cuda.matmul, "allow_fp16_reduced_precision_reduction"),
            (cudnn, "allow_tf32"),
            (cudnn, "benchmark"),
            (cudnn, "deterministic"),
            (torch.utils.deterministic, "fill_uninitialized_memory"),
        )
    ]
    with_cudnn = cuda.cudnn_sdp_enabled()
    monkeypatch.setattr("os.putenv", lambda name, value: None)
    yield
    torch.use_deterministic_algorithms(False)
    cuda.enable_cudnn_sdp(with_cudnn)
    for owner, name, value in before:
        setattr(owner, name, value)


def test_what_the_host_has_made_needs_no_stream():
    device = Cuda.__new__(Cuda)  # a context would need a GPU
    word = torch.tensor([7, 8, 9])
    fetched, out = device.fetch(word[1:]), torch.empty(3, dtype=torch.int64)
    device.bring_into(word, out)
    word.zero_()
    assert fetched.tolist() == [8, 9] and out.tolist() == [7, 8, 9]


@pytest.mark.usefixtures("settings_kept")
def test_memory_that_is_made_empty_is_not_filled():
    use_deterministic_kernels()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
