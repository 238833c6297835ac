"""What a worker queues on a device for its blocks at REDUCE, VOTE, APPLY and GATHER: it does not grow with blocks."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.jobs import small_config
from torch.utils._python_dispatch import TorchDispatchMode

from elaswave.blocks.placement import place_blocks
from elaswave.data.samples import Draw
from elaswave.devices.cuda import Cuda
from elaswave.devices.interface import Batch, Mark, batches_of
from elaswave.devices.loopback import Loopback
from elaswave.engine.activity import ActionTimer
from elaswave.engine.blueprint import Blueprint, materialise
from elaswave.engine.compute import Surroundings
from elaswave.engine.torch_engine import RUN_AHEAD_ACTIONS, EngineContext, TorchEngine
from elaswave.errors import InterruptedWaitError
from elaswave.state.flat import HeldBlock
from elaswave.types import Action

ALONE = {"layout.stages": 1, "layout.replicas": 1, "elastic.num_followers": 0}
VIEWS = {"detach", "select", "slice", "split", "split_with_sizes", "unsqueeze", "view"}
"""Operators that launch nothing."""
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer.ema_decay": 0.9, "optimizer.grad_clip": 0.1},
    "sgd": {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.weight_decay": 0.1},
    "sgd without momentum": {"optimizer.name": "sgd", "optimizer.momentum": 0.0, "optimizer.grad_clip": 0.0},
    "bfloat16": {"model.family": "llama", "model.dtype": "bfloat16", "elastic.accumulator_bits": 48},
    "scaled": {"elastic.consistency": "scaled"},
}


class Launches(TorchDispatchMode):
    """Counts what is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


class Alone(Surroundings):
    """An engine that has all layers and blocks, on a device with an accelerator's rules."""

    def __init__(self, folder: Path, settings: dict[str, Any], batch: Batch) -> None:
        self.device = Loopback()
        self.device.batch = batch  # type: ignore[misc]
        self.blueprint = blueprint = Blueprint(small_config(ALONE | settings))
        layout, source = blueprint.layout, blueprint.open_samples(folder)
        placement = place_blocks(layout.with_followers(0), blueprint.blocks, scatter_width=blueprint.scatter_width)
        here, store, _ = materialise(blueprint, 0, layout, placement, None, self.device)
        self.copies = list(store)
        self.interrupts = False
        context = EngineContext(
            blueprint=blueprint,
            worker=0,
            batches=lambda step, microbatch: source.batch([Draw(microbatch, 0, microbatch)], "train"),
            evaluation_batches=lambda step, microbatch: source.batch([Draw(microbatch, 0, microbatch)], "validation"),
            timer=ActionTimer(0, None, lambda until_s: None),
            run_dir=folder,
            surroundings=self,
            device=self.device,
        )
        self.engine = TorchEngine(context, here)
        self.layers = layout.layers_of(0)

    def check(self) -> None:
        if self.interrupts:
            raise InterruptedWaitError("the generation is over")

    def run(self, step: int) -> None:
        engine = self.engine
        engine.begin(step, [20] * len(self.blueprint.tensors))
        for microbatch in range(self.blueprint.layout.num_microbatches):
            for kind in ("F", "B"):
                engine.run(Action(0, kind, microbatch), self.layers, step, None, first=True, last=True)

    def frame(self, layer: int, peer: int) -> None:
        """Sums of a peer arrive: those of this worker, laid side by side as links do it."""
        owned = [copy.block.id for copy in self.copies if copy.block.layer == layer]
        *planes, word = self.engine.partial_sums_slot(layer, peer, owned)
        *parts, own_word = self.engine.partial_sums(layer, owned)
        number = len(parts) // len(planes)
        for index, plane in enumerate(planes):
            plane.copy_(torch.cat(parts[index * number : (index + 1) * number]))
        word.copy_(own_word)

    def reduce(self, step: int, peer: int | None = None) -> None:
        peers = [] if peer is None else [peer]
        for layer in range(len(self.blueprint.shapes)):
            if own := [copy for copy in self.copies if copy.block.layer == layer]:
                for each in peers:
                    self.frame(layer, each)
                self.engine.reduce(layer, own, peers)

    def apply(self, step: int) -> list[int]:
        """Returns how many blocks each call has updated."""
        engine, sizes = self.engine, []
        engine.committed(step, 0.0, updates=True)
        for batch in engine.batches(self.copies):
            engine.apply(batch, step, 5.0, 1.0, step)
            sizes.append(len(batch))
        engine.publish(self.copies)
        return sizes

    def launches(self, what: Callable[[], Any]) -> Counter[str]:
        with Launches() as counted:
            what()
        return counted.names


def state_of(copies: list[HeldBlock]) -> dict[tuple[int, str], torch.Tensor]:
    return {(copy.block.id, name): values for copy in copies for name, values in copy.slots.items()}


@pytest.mark.parametrize("case", CASES)
def test_batches_have_the_bits_of_one_block_after_the_other(case: str, tmp_path: Path) -> None:
    sides = [Alone(tmp_path, CASES[case], batch) for batch in (Batch(1, 1 << 62), Batch(7, 5000), Cuda.batch)]
    for step in range(1, 4):
        for side in sides:
            side.run(step)
            side.reduce(step)
            side.apply(step)
    one, *others = (state_of(side.copies) for side in sides)
    for other in others:
        assert one.keys() == other.keys()
        assert all(torch.equal(values, other[name]) for name, values in one.items())
    flats = [[layer.flat for layer in side.engine.layers.values()] for side in sides]
    for found in zip(*flats, strict=True):
        assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.parametrize("case", CASES)
def test_what_is_launched_does_not_grow_with_blocks(case: str, tmp_path: Path) -> None:
    """Of two workers in a stage, to which the blocks of a layer are dealt out by turns."""
    found = []
    for block_size in (32, 64, 512):
        settings = CASES[case] | {"elastic.block_size": block_size, "layout.replicas": 2}
        side = Alone(tmp_path, settings, Batch(100_000, 1 << 26))
        side.run(1)
        side.reduce(1, peer=1)  # what is made once for each layout is there from now on
        engine, some = side.engine, [copy for copy in side.copies if copy.block.layer == 1]
        counts = {
            "partial sums, sent": side.launches(lambda side=side: side.frame(1, 1)),
            "reduce": side.launches(lambda side=side: side.reduce(1, peer=1)),
            "read": side.launches(lambda engine=engine: engine.measured()),
            "mean gradients, come": side.launches(lambda engine=engine, some=some: engine.gradients_slot(some)),
            "apply": side.launches(lambda side=side: side.apply(1)),
        }
        found.append((len(side.copies), counts))
    (most, counts), *others = found
    assert most > 10 * others[-1][0]
    for _, other in others:
        assert counts == other
    assert counts["apply"]["_fused_adamw_"] == (0 if case.startswith("sgd") else 1)
    assert counts["apply"].total() <= 10
    # Of own and come sums: laid side by side, added, made means of; and the copy that stands for the peer's frame.
    assert counts["reduce"].total() <= 30 * len(side.blueprint.shapes)


def test_hashes_and_norms_are_launched_by_lengths_of_blocks(tmp_path: Path) -> None:
    found = []
    for block_size in (32, 64):
        side = Alone(tmp_path, {"elastic.block_size": block_size}, Cuda.batch)
        side.run(1)
        side.reduce(1)
        copies, engine = side.copies, side.engine
        lengths = {copy.num_elements for copy in copies}
        engine.gradient_hashes(copies)  # keys of positions are made once
        hashes = side.launches(lambda engine=engine, copies=copies: engine.gradient_hashes(copies))
        squares = side.launches(lambda engine=engine, copies=copies: engine.square_sums(copies))
        found.append((len(copies), len(lengths), sum(hashes.values()), sum(squares.values())))
    for _, num_lengths, hashes, squares in found:
        assert hashes <= 6 * num_lengths + 6 and squares <= 30 * num_lengths + 6


def test_batches_keep_order_and_bounds(tmp_path: Path) -> None:
    side = Alone(tmp_path, {}, Batch(4, 3000))
    batches = list(side.engine.batches(side.copies))
    assert [copy for batch in batches for copy in batch] == side.copies
    assert all(len(batch) <= 4 for batch in batches)
    assert all(sum(copy.num_elements for copy in batch) <= 3000 for batch in batches)
    side.run(1)
    side.reduce(1)
    assert side.apply(1) == [len(batch) for batch in batches]


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([], Batch(2, 10), []),
        ([3], Batch(1, 1), [[3]]),
        ([1, 2, 3, 4], Batch(2, 100), [[1, 2], [3, 4]]),
        ([5, 5, 1, 9, 1, 20, 1], Batch(3, 10), [[5, 5], [1, 9], [1], [20], [1]]),
    ],
)
def test_blocks_are_cut_into_the_fewest_batches_within_bounds(
    sizes: list[int], most: Batch, expected: list[list[int]]
) -> None:
    assert [sizes[some] for some in batches_of(sizes, most)] == expected


def test_an_interrupt_comes_before_anything_of_a_batch_has_changed(tmp_path: Path) -> None:
    side = Alone(tmp_path, {}, Batch(6, 1 << 62))
    engine = side.engine
    side.run(1)
    side.reduce(1)
    engine.committed(1, 0.0, updates=True)
    first, second, third = list(engine.batches(side.copies))[:3]
    engine.apply(first, 1, 5.0, 1.0, 1)
    engine.apply(second, 1, 5.0, 1.0, 1)
    assert len(engine._running) >= RUN_AHEAD_ACTIONS

    class Never(Mark):
        def has_passed(self) -> bool:
            return False

    engine._running.extendleft([Never()])
    before = {name: values.clone() for name, values in state_of(third).items()}
    side.interrupts = True
    with pytest.raises(InterruptedWaitError):
        engine.apply(third, 1, 5.0, 1.0, 1)
    assert all(torch.equal(values, before[name]) for name, values in state_of(third).items())
    assert all(copy.gradient is not None for copy in third)
    assert all(copy.gradient is None for copy in (*first, *second))
    engine._running.popleft()
    side.interrupts = False
    engine.apply(third, 1, 5.0, 1.0, 1)
    assert any(not torch.equal(values, before[name]) for name, values in state_of(third).items())


def test_few_batches_are_queued(tmp_path: Path) -> None:
    side = Alone(tmp_path, {}, Batch(1, 1))
    side.run(1)
    side.reduce(1)
    side.apply(1)
    assert len(side.engine._running) <= RUN_AHEAD_ACTIONS
