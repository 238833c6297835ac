"""Modules that are refused before the first step, by name."""

import pytest
import torch
from torch import nn

from elaswave.errors import UsageError
from elaswave.models.admission import check_hooks, check_module
from elaswave.models.layers import Layer, ModelSpec
from elaswave.state.flat import model_shapes


def channels_last():
    return nn.Sequential(nn.Conv2d(3, 8, 3)).to(memory_format=torch.channels_last)


def hooked(register):
    module = nn.Linear(4, 4)
    getattr(module.weight, register)(lambda *args: None)
    return module


class FullyShardedDataParallel(nn.Linear):
    """Stands for torch's, which needs processes."""


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.Linear(4, 4).double(), "parameter weight of layer name is float64.*with .float()"),
        (lambda: nn.Linear(4, 4).to(torch.complex64), "complex64"),
        (channels_last, "parameter 0.weight of layer name has strides .*channels_last.*contiguous_format"),
        (lambda: nn.Embedding(4, 4, sparse=True), "layer name makes sparse gradients: pass sparse=False"),
        (lambda: nn.Sequential(nn.EmbeddingBag(4, 4, sparse=True)), "layer name, module 0, makes sparse gradients"),
        (lambda: nn.DataParallel(nn.Linear(4, 4)), "layer name is wrapped in DataParallel: hand in the plain module"),
        (lambda: nn.Sequential(FullyShardedDataParallel(4, 4)), "wrapped in FullyShardedDataParallel"),
    ],
)
def test_modules_that_cannot_be_trained_are_refused(build, words):
    with pytest.raises(UsageError, match=words):
        model_shapes(ModelSpec((Layer("name", build),), lambda output, targets: output.mean()))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameters_with_hooks_are_refused(register):
    with pytest.raises(UsageError, match="parameter weight of layer name has a gradient hook"):
        check_hooks("name", hooked(register))


@pytest.mark.filterwarnings("ignore")  # torch's own about quantized tensors
@pytest.mark.parametrize("kind", ["parameter", "buffer", "temporary buffer"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.qint8, torch.quint8])
def test_tensors_of_types_that_few_operators_take_are_refused_by_name(kind, dtype):
    module, values = nn.Linear(4, 4), torch.ones(4)
    is_quantized = dtype in (torch.qint8, torch.quint8)
    special = torch.quantize_per_tensor(values, 0.1, 0, dtype) if is_quantized else values.to(dtype)
    if kind == "parameter":
        module.special = nn.Parameter(special, requires_grad=False)
    else:
        module.register_buffer("special", special, persistent=kind == "buffer")
    words = r"quantized \(q.*dequantize\(\)" if is_quantized else r"float8_.*its bits in torch\.uint8"
    with pytest.raises(UsageError, match=f"special of layer name is {words}"):
        check_module("name", module)


def test_ordinary_modules_are_taken():
    for module in (nn.Conv2d(3, 8, 1), nn.LSTM(4, 4), nn.TransformerEncoderLayer(8, 2), nn.BatchNorm2d(3)):
        check_module("name", module)
        check_hooks("name", module)
