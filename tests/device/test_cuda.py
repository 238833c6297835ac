"""Jobs and the device layer on a GPU; skipped where there is none. `scripts/test -m device` runs these alone.

Bits are compared between runs on one device: a GPU does not round as a processor does.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.integration.jobs import Job, run_job
from tests.unit.shapes import make_shape

from elaswave.blocks.shapes import INITIAL_EXPONENT
from elaswave.config.schema import OptimizerConfig
from elaswave.devices.interface import read_tensors, wait_for
from elaswave.errors import WorkerError
from elaswave.state.device_sums import (
    DeviceAccumulator,
    add_planes_on_device,
    checksum_on_device,
    pieces_of,
    reduced_gradient_on_device,
)
from elaswave.state.seals import Found, run_hash, run_hashes, square_sums
from elaswave.state.sums import ExactAccumulator
from elaswave.training.optimizer import RULES

pytestmark = [
    pytest.mark.device,
    # The driver is not asked through torch: that would keep the jobs of these tests from forking.
    pytest.mark.skipif(torch.version.cuda is None, reason=f"torch {torch.__version__} is built without CUDA"),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="there is no NVIDIA driver (/dev/nvidiactl)"),
]

SHAPE = make_shape([(7, 9), (40,), (3, 33), (5000,)])
GPU: dict[str, Any] = {"device.kind": "cuda", "device.workers_per_device": 8, "run.steps": 8}
ONE = {"layout.stages": 1, "layout.replicas": 1}
MODELS: dict[str, dict[str, Any]] = {
    "float32": {"model.dropout": 0.1},
    "bfloat16": {"model.family": "llama", "model.dtype": "bfloat16"},
}


def nothing() -> None:
    """Moves no bytes."""


def in_order(found: Found) -> list[Any]:
    return found.in_order(found.numbers.cpu())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """The training of each model by one worker on the GPU."""

    @functools.cache
    def job_of(model: str) -> Job:
        return run_job(tmp_path_factory.mktemp("alone"), MODELS[model] | GPU | ONE)

    return job_of


@pytest.mark.parametrize(
    ("model", "settings", "faults"),
    [
        ("float32", {"layout.stages": 2, "layout.replicas": 2}, []),
        ("float32", {"layout.widths": [1, 3]}, []),
        ("float32", {"layout.widths": [2, 1, 2], "layout.schedule": "zero-bubble-h2"}, []),
        ("float32", {"layout.stages": 4, "layout.replicas": 1, "layout.schedule": "gpipe"}, []),
        ("bfloat16", {"layout.stages": 2, "layout.replicas": 2, "elastic.accumulator_bits": 48}, []),
        ("bfloat16", {"layout.widths": [2, 1, 2], "model.recompute": True}, []),
        *(
            ("float32", {"layout.stages": 2, "layout.replicas": 2}, [f"kill:3@4:{phase}"])
            for phase in ("forward", "backward", "reduce", "vote", "apply", "gather")
        ),
        ("float32", {"layout.stages": 2, "layout.replicas": 2}, ["hang:2@4:backward"]),
        ("float32", {"layout.stages": 2, "layout.replicas": 2}, ["join@3", "drain:0@6"]),
    ],
)
def test_jobs_on_one_gpu_are_the_same_computation(
    alone: Callable[[str], Job], model: str, settings: dict[str, Any], faults: list[str], tmp_path: Path
) -> None:
    job = run_job(tmp_path, MODELS[model] | GPU | settings, faults=faults)
    assert job.computation == alone(model).computation


class Strikes:
    """In step 4 the device of some workers fails.

    Args:
        workers: they.
        fault: what they ask of their device.
    """

    def __init__(self, workers: tuple[int, ...], fault: Callable[[torch.device], object]) -> None:
        self.workers, self.fault = workers, fault

    def reached(self, phase: str, index: int, machine: Any) -> None:
        if machine.worker in self.workers and (machine.step, phase, index) == (4, "forward", 1):
            self.fault(machine.engine.device.place)


def asserts(place: torch.device) -> object:
    """A kernel looks for a value where none is."""
    return torch.zeros(8, device=place)[torch.tensor([1 << 20], device=place)]


def never_ends(place: torch.device) -> object:
    """A kernel runs for hours."""
    return torch.cuda._sleep(10**15)


def takes_all(place: torch.device) -> object:
    """More memory is wanted than there is."""
    return [torch.empty(1 << 36, dtype=torch.uint8, device=place) for _ in range(100)]


@pytest.mark.parametrize(
    ("fault", "detected_by", "words"),
    [
        (asserts, "exit", "broken device context: "),
        (takes_all, "exit", "out of device memory: "),
        (never_ends, "progress", ""),
    ],
)
def test_others_go_on_without_a_worker_whose_device_fails(
    fault: Any, detected_by: str, words: str, tmp_path: Path
) -> None:
    settings = {"layout.stages": 2, "layout.replicas": 2, "run.steps": 30, "elastic.respawn": True}
    whole = run_job(tmp_path / "whole", MODELS["float32"] | GPU | settings)
    job = run_job(tmp_path / "struck", MODELS["float32"] | GPU | settings, probe=Strikes((3,), fault))
    assert job.computation == whole.computation
    (lost,) = [each for each in job.result.recoveries if each.kind == "lost"]
    assert (lost.worker, lost.detected_by) == (3, detected_by)
    assert any(words in generation.reason for generation in job.result.generations)


def test_the_same_fault_of_two_devices_ends_the_job(tmp_path: Path) -> None:
    settings = {"layout.stages": 2, "layout.replicas": 2}
    with pytest.raises(WorkerError, match="device-side assert .*; the same error has ended worker [13]"):
        run_job(tmp_path, MODELS["float32"] | GPU | settings, probe=Strikes((1, 3), asserts))


def test_a_checkpoint_of_a_gpu_goes_on_on_the_processor_and_back(tmp_path: Path) -> None:
    settings = MODELS["float32"] | GPU | {"run.checkpoint_every": 4, "optimizer.schedule": "constant"}
    first = run_job(tmp_path, settings)
    (tmp_path / "result.json").unlink()
    second = run_job(tmp_path, settings | {"run.steps": 12, "device.kind": "cpu"}, resume=True)
    (tmp_path / "result.json").unlink()
    third = run_job(tmp_path, settings | {"run.steps": 16}, resume=True)
    losses = third.result.losses
    assert losses[:8] == first.result.losses and losses[:12] == second.result.losses and len(losses) == 16


@pytest.fixture(scope="module")
def cuda() -> Any:
    """The device in this process; after the jobs of this file, which fork."""
    from elaswave.devices.cuda import Cuda

    return Cuda(0)


def test_tensors_travel_in_the_order_of_the_queue(cuda: Any) -> None:
    source = torch.arange(1 << 22, dtype=torch.float32)
    brought = cuda.bring(source)
    source.zero_()  # its memory is the caller's again
    brought.mul_(2.0)
    copy = cuda.fetch(brought)
    mark = cuda.mark()
    brought = brought + 1.0
    wait_for(mark, nothing)
    assert copy.is_pinned() and torch.equal(copy, torch.arange(1 << 22, dtype=torch.float32) * 2)
    out = torch.empty_like(brought)
    cuda.bring_into(copy, out)
    (again,) = read_tensors(cuda, [out], nothing)
    assert torch.equal(again, copy)


def test_marks_tell_seconds_of_the_device(cuda: Any) -> None:
    begin = cuda.mark()
    for _ in range(10):
        torch.ones(4096, 4096, device=cuda.place) @ torch.ones(4096, 4096, device=cuda.place)
    end = cuda.mark()
    wait_for(end, nothing)
    assert 0 < end.seconds_since(begin) < 60


def test_a_seed_gives_the_same_draws(cuda: Any) -> None:
    def drawn(key: int) -> torch.Tensor:
        cuda.seed(key)
        return torch.rand(1000, device=cuda.place)

    assert torch.equal(drawn(1 << 63 | 5), drawn(1 << 63 | 5)) and not torch.equal(drawn(5), drawn(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 48])
def test_sums_hashes_and_figures_are_the_processors(cuda: Any, width: int, dtype: torch.dtype) -> None:
    host, device = ExactAccumulator(SHAPE, width=width), DeviceAccumulator(SHAPE, cuda.place, width=width)
    generator = torch.Generator().manual_seed(width)
    for number in range(4):
        found = [torch.randn(slot.shape, generator=generator).mul_(10.0**number).to(dtype) for slot in SHAPE.tensors]
        given = [None if number == index else gradient for index, gradient in enumerate(found)]
        host.add(given)
        assert math.isfinite(device.add([None if each is None else each.to(cuda.place) for each in given]))
    assert torch.equal(host.sum, device.sum.cpu())
    assert (host.maxima, host.checksum) == (device.maxima, device.checksum)
    runs = [torch.randn(300, generator=generator) for _ in range(5)]
    there = [run.to(cuda.place) for run in runs]
    assert [each & (1 << 64) - 1 for each in in_order(run_hashes(there))] == list(map(run_hash, runs))
    assert in_order(square_sums(there)) == in_order(square_sums(runs))


class Block(NamedTuple):
    """What a rule updates."""

    slots: dict[str, torch.Tensor]
    decay_runs: tuple[tuple[int, int], ...]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_blocks_that_are_updated_by_one_call_have_the_bits_of_each_alone(cuda: Any, name: str) -> None:
    rule = RULES[name](OptimizerConfig(name=name, weight_decay=0.1, momentum=0.9))
    sizes = [32, 4096, 96, 65536, 160] * 60  # more than a launch takes
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(size, generator=generator) for size in sizes]
    gradients = [torch.randn(size, generator=generator) for size in sizes]

    def updated(at_once: int) -> list[torch.Tensor]:
        blocks = []
        for value in values:
            slots = {"master": value.to(cuda.place, copy=True)}
            slots |= {slot: torch.zeros(len(value), device=cuda.place) for slot in rule.slots}
            blocks.append(Block(slots, ((0, len(value) // 2),)))
        for step in range(1, 4):
            for first in range(0, len(blocks), at_once):
                some = [gradient.to(cuda.place, copy=True) for gradient in gradients[first : first + at_once]]
                torch._foreach_mul_(some, 0.37)
                rule.update(blocks[first : first + at_once], some, learning_rate=0.01 * step, num_updates=step)
        return [each.cpu() for block in blocks for each in block.slots.values()]

    alone = updated(1)
    for at_once in (7, len(sizes)):
        assert all(torch.equal(one, other) for one, other in zip(alone, updated(at_once), strict=True))


@pytest.mark.parametrize("width", [64, 48])
def test_means_of_blocks_that_lie_side_by_side_are_the_processors(cuda: Any, width: int) -> None:
    host = ExactAccumulator(SHAPE, width=width)
    generator = torch.Generator().manual_seed(width)
    for _ in range(3):
        host.add([torch.randn(slot.shape, generator=generator) for slot in SHAPE.tensors])
    exponents, runs = [INITIAL_EXPONENT] * len(SHAPE.tensors), [(0, 32), (64, 128), (160, SHAPE.size)]
    pieces = pieces_of(SHAPE, runs)
    parts = [torch.cat([plane[start:stop] for start, stop in runs]) for plane in host.planes]
    total = add_planes_on_device([tuple(part.to(cuda.place) for part in parts)])
    found = reduced_gradient_on_device(total, pieces, exponents, 3, 1, width).cpu()
    assert torch.equal(found, reduced_gradient_on_device(total.cpu(), pieces, exponents, 3, 1, width))
    assert int(checksum_on_device(total, pieces)) == int(checksum_on_device(total.cpu(), pieces))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(cuda: Any, wrong: float) -> None:
    device = DeviceAccumulator(SHAPE, cuda.place)
    found = [torch.ones(slot.shape, device=cuda.place) for slot in SHAPE.tensors]
    found[3][4321] = wrong
    assert not math.isfinite(device.add(found))
    assert device.maxima == [0.0] * 4
