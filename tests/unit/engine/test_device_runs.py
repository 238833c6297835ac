"""While micro-batches run on a device the host reads nothing of it: what it has to know comes at the vote, at once."""

import math
from typing import Any

import pytest
import torch
from tests.unit.held import make_held
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave.devices.interface import HOST
from elaswave.devices.loopback import LOOKS, Loopback
from elaswave.engine.compute import ALONE, Compute, ComputeRules, Surroundings
from elaswave.protocol.step.ballot import NonFinite
from elaswave.state.device_sums import DeviceAccumulator
from elaswave.state.sums import ExactAccumulator
from elaswave.training.definition import build_model

SEED, STEP = 5, 3
MODEL = build_model("gpt", vocab_size=50, num_layers=2, hidden_size=16, num_heads=2, context_length=8, dropout=0.2)
READS = {torch.Tensor.numpy, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu}


class HostReads(Exception):
    """The host has asked for a number of the device."""


class _NoScalars(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise HostReads(str(func))
        return func(*args, **(kwargs or {}))


class _NoReads(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            raise HostReads(str(func))
        return func(*args, **(kwargs or {}))


def make_compute(device: Any, surroundings: Surroundings = ALONE) -> Compute:
    held, units, shapes = make_held(MODEL, None, SEED, torch.float32)
    make = ExactAccumulator if device.is_host else lambda shape: DeviceAccumulator(shape, device.place)
    compute = Compute(
        ComputeRules(MODEL, SEED),
        held,
        {index: make(shapes[index]) for index in (*held, *units)},
        device=device,
        surroundings=surroundings,
    )
    compute.begin(STEP, [[40] * len(shape.tensors) for shape in shapes])
    return compute


def run(compute: Compute, microbatch: int) -> None:
    generator = torch.Generator().manual_seed(microbatch)
    tokens = torch.randint(0, 50, (4, 9), generator=generator)
    compute.forward(range(4), microbatch, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    compute.backward(range(4), microbatch, None)


def test_nothing_is_read_while_microbatches_run_and_all_at_once_then():
    looked: list[int] = []

    class Looking(Surroundings):
        def move(self) -> None:
            looked.append(1)

    device, host = make_compute(Loopback(), Looking()), make_compute(HOST)
    for microbatch in range(3):
        if microbatch == 0:  # the first one of a layer is looked at
            run(device, microbatch)
        else:
            with _NoScalars(), _NoReads():
                run(device, microbatch)
        run(host, microbatch)
    assert not looked
    assert device.nonfinite is None and len(looked) == LOOKS
    assert device.losses == host.losses and device.coverage == host.coverage and len(looked) == LOOKS
    for index, accumulator in device.accumulators.items():
        assert torch.equal(accumulator.sum, host.accumulators[index].sum)
        assert accumulator.maxima == host.accumulators[index].maxima


def test_the_check_sees_what_is_read():
    with pytest.raises(HostReads), _NoScalars():
        float(torch.ones(1))
    with pytest.raises(HostReads), _NoReads():
        torch.ones(1).numpy()


@pytest.mark.parametrize("device", [HOST, Loopback()], ids=["host", "loopback"])
def test_the_first_thing_that_is_not_finite_is_named(device):
    compute = make_compute(device)
    with torch.no_grad():
        compute.layers[1].parameters[0].fill_(math.nan)
    for microbatch in (1, 2):
        run(compute, microbatch)
    assert compute.nonfinite == NonFinite(1, compute.num_layers)
    assert not compute.unfinished().can_be_kept
    compute.begin(STEP + 1, [[40] * len(each.shape.tensors) for each in compute.accumulators.values()])
    assert compute.nonfinite is None


@pytest.mark.parametrize("device", [HOST, Loopback()], ids=["host", "loopback"])
def test_a_gradient_that_is_not_finite_is_named(device):
    """Though the loss is finite."""
    compute = make_compute(device)
    for microbatch in (0, 1):
        run(compute, microbatch)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 50, (4, 9), generator=generator)
    compute.forward(range(4), 2, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    compute._losses[2].scored.total.register_hook(lambda gradient: gradient * math.inf)
    compute.backward(range(4), 2, None)
    found = compute.nonfinite
    assert found is not None and found.microbatch == 2 and found.layer < compute.num_layers
