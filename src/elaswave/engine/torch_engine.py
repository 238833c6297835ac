"""The numbers of a worker, with torch: layers, sums of gradients and the content of copies. The machine of
`elaswave.protocol` says what is done when; nothing here knows of links, generations or votes.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from elaswave.blocks.placement import Placement, ReplicaRole
from elaswave.checkpoints.checkpoint import folder_there, read_meta
from elaswave.checkpoints.format import EMA, MASTER
from elaswave.devices.interface import HOST, Device, Mark, batches_of, read_tensors, wait_for
from elaswave.engine.activity import ActionTimer
from elaswave.engine.batches import Microbatches
from elaswave.engine.blueprint import Blueprint, materialise, updater_after
from elaswave.engine.checks.determinism_check import changed_operator, environment_of
from elaswave.engine.checks.spot_checks import SpotChecks
from elaswave.engine.compute import ALONE, Compute, ComputeRules, Surroundings
from elaswave.engine.reduction import Reduction
from elaswave.hashing import MASK64, mix_words, text64
from elaswave.protocol.step.ballot import ENVIRONMENT, Environment, Scores
from elaswave.protocol.step.engine import Change, Imbalance, Loaded, Measured, MemoryKind, Unfinished
from elaswave.protocol.step.salvage import Keep
from elaswave.state.flat import FlatLayer, FlatUnit, HeldBlock
from elaswave.state.seals import Found, Seals, is_working, run_hash, run_hashes, square_sums
from elaswave.state.sums import square_sum
from elaswave.training.optimizer import Updater, average, clip_factor
from elaswave.types import Action, ExecutionParameters, Layout

RUN_AHEAD_ACTIONS = 2
"""Actions that may be queued on a device, the one that runs included: what is queued cannot be revoked, so an
interrupt takes effect after so many at most."""


class MicrobatchSource(Protocol):
    """Where micro-batches come from."""

    def __call__(self, step: int, microbatch: int) -> tuple[Any, Any]:
        """Inputs and targets of one micro-batch."""
        ...


class EngineContext(NamedTuple):
    """What an engine works with; fixed for the whole life of a worker."""

    blueprint: Blueprint
    worker: int
    batches: MicrobatchSource
    """Of training."""
    evaluation_batches: MicrobatchSource
    timer: ActionTimer
    """Measures every action, and makes it last on an emulated device."""
    run_dir: Path
    surroundings: Surroundings = ALONE
    """What the worker does beside the computation."""
    on_execution: Callable[[ExecutionParameters], None] = lambda execution: None
    """Told of the execution parameters in force."""
    on_layout: Callable[[Layout], None] = lambda layout: None
    """Told of the layout in force."""
    on_begin: Callable[[int], None] = lambda step: None
    """Told of each step that begins, perhaps again."""
    building: Callable[[], AbstractContextManager[None]] = nullcontext
    """Stands around the making and loading of layers."""
    slow_down: Callable[[float], None] = lambda factor: None
    """Makes the worker compute at a share of its speed (fault injection)."""
    slow_links: Callable[[float], None] = lambda factor: None
    """Leaves its emulated links a share of their bandwidth (fault injection)."""
    device: Device = HOST
    """What computes."""


def compute_rules(blueprint: Blueprint) -> ComputeRules:
    """Makes the rules of how a run computes."""
    config = blueprint.config
    return ComputeRules(
        blueprint.model,
        config.run.seed,
        recompute=config.model.recompute,
        lowest_trained=blueprint.state.lowest_trained,
        has_determinism_check=config.elastic.verify,
    )


class TorchEngine:
    """The numbers of one worker; see `elaswave.protocol.step.engine.Engine` for what its methods promise.

    Args:
        context: what it works with.
        here: the materialised layers of this worker's stage, and the units that they share, with current parameters.
        updater: makes the updates, and has those behind it that the parameters have; None: there were none.
        held: the copies that this worker holds.
    """

    def __init__(
        self,
        context: EngineContext,
        here: Mapping[int, FlatLayer | FlatUnit],
        updater: Updater | None = None,
        held: Iterable[HeldBlock] = (),
    ) -> None:
        self.context = context
        blueprint, elastic = context.blueprint, context.blueprint.config.elastic
        self.blocks = blueprint.blocks
        self._shapes, self._dtype = blueprint.shapes, blueprint.dtype
        self.layers: dict[int, FlatLayer | FlatUnit] = dict(here)
        """The units that are here: layers, and what they share; changed only by `use_layout` and `load`."""
        self._prepared: dict[int, FlatLayer] = {}
        """Layers that are built for a layout which is not in force yet."""
        self._own: dict[int, FlatLayer] = {}
        """The layers among them."""
        self._note_layers()
        self.reduction = Reduction(
            context.worker,
            self.blocks,
            self._shapes,
            exact=elastic.consistency == "bitwise",
            checked=elastic.verify,
            width=elastic.accumulator_bits,
            device=context.device,
            check=context.surroundings.move,
        )
        self.reduction.hold(list(self.layers))
        self.device = device = context.device
        self._place = None if device.is_host else device.place
        self._running: deque[Mark] = deque()
        """Ends of actions that are queued on the device."""
        self._untimed: list[tuple[Action, range, Mark, Mark]] = []
        """Actions whose beginning and end the device has still to come to."""
        self._microbatches = Microbatches(context.batches, context.evaluation_batches, device)
        self.compute = Compute(
            compute_rules(blueprint),
            self._own,
            self.reduction.accumulators,
            inputs=self._microbatches.inputs,
            device=device,
            surroundings=context.surroundings,
            spots=self._spot_checks(),
        )
        self._num_microbatches = blueprint.layout.num_microbatches
        self._began_ns = time.monotonic_ns()
        self.updater = updater or blueprint.optimizer.updater()
        self._environment = environment_of(blueprint, device) if elastic.verify else None
        """Found out now, since that takes as long as a small step."""
        self.seals = Seals(self.blocks, device, context.surroundings.move) if elastic.verify else None
        if self.seals is not None:
            self.seals.written_all(self.layers, held)
        self._incoming: dict[int, list[torch.Tensor]] = {}
        """By layer, constants that another worker sends."""

    def _spot_checks(self) -> SpotChecks | None:
        """Whoever repeats a micro-batch has to check the same places, so they follow from the first layout."""
        config, layout = self.context.blueprint.config, self.context.blueprint.layout
        if not config.elastic.verify or not config.elastic.spot_checks:
            return None
        return SpotChecks(
            config.run.seed,
            config.elastic.spot_checks,
            layout.num_microbatches,
            max(stage.width for stage in layout.stages),
            lambda key: changed_operator(self.environment(), key, self.device),
            self.device,
        )

    # ---------------------------------------------------------------------------------------------------- layouts

    def use_layout(self, layout: Layout, execution: ExecutionParameters, copies: Iterable[HeldBlock]) -> frozenset[int]:
        """Makes and drops units so that exactly those of the worker's stage are here."""
        layers = layout.layers_of(self.context.worker)
        wanted = (*layout.shared_units(layers), *layers)
        # Not without need: after `building` every action counts as one that never ran, which may take any time.
        with nullcontext() if self.layers.keys() >= set(wanted) else self.context.building():
            new = self._materialise(wanted, copies)
        self._num_microbatches = layout.num_microbatches
        self.compute.use_ratios(execution.ratios)
        self.context.on_execution(execution)
        self.context.on_layout(layout)
        return new

    def prepare_layout(self, layout: Layout) -> None:
        """Builds one layer that is new here in that layout, with its sums. Layers that share units are left to
        `use_layout`: they lie in units that are not here yet."""
        blueprint = self.context.blueprint
        for index in layout.layers_of(self.context.worker):
            is_new = index not in self.layers and index not in self._prepared
            if is_new and not layout.shared_units(range(index, index + 1)):
                # One layer in each attempt (M4): in the vote all wait for the slowest worker.
                self._prepared[index] = blueprint.flat_layer(index, {}, place=self._place)
                self.reduction.prepare(index)
                return

    def forget_layout(self) -> None:
        """Drops layers that were built for a layout which does not come into force."""
        self._prepared.clear()
        self.reduction.forget_prepared()

    def _materialise(self, wanted: Sequence[int], copies: Iterable[HeldBlock]) -> frozenset[int]:
        gone = set(self.layers) - set(wanted)
        for copy in copies:
            if copy.block.layer in gone:
                # Asked before the master gets memory of its own: until then its seal is that of the working copy.
                if self.seals is not None and is_working(copy, self.layers):
                    self.seals.move_out(copy)
                # It may be a view of the layer's storage, all of which would stay with it.
                copy.slots[MASTER] = copy.slots[MASTER].clone()
        # What has changed in layers is found before they go: kept sums were computed with it (K5).
        if self.seals is not None and gone:
            self.seals.drop({index: self.layers[index] for index in gone})
        for index in gone:
            del self.layers[index]
        self.compute.forget(gone)
        new = frozenset(wanted) - self.layers.keys()
        blueprint = self.context.blueprint
        units = {index: unit for index, unit in self.layers.items() if isinstance(unit, FlatUnit)}
        for index in wanted:  # shared units first: layers lie in them
            if index in new and index >= blueprint.state.num_layers:
                units[index] = self.layers[index] = FlatUnit(self._shapes[index], self._dtype, self._place)
            elif index in new:
                prepared = self._prepared.pop(index, None)
                layer = blueprint.flat_layer(index, units, place=self._place) if prepared is None else prepared
                self.layers[index] = layer
        if gone or new:
            self._note_layers()
            self.reduction.hold(list(self.layers))
            if self.seals is not None:
                self.seals.constants(self.layers)
        self.forget_layout()
        return new

    def _note_layers(self) -> None:
        self._own.clear()
        self._own.update({index: layer for index, layer in self.layers.items() if isinstance(layer, FlatLayer)})

    # -------------------------------------------------------------------------------------------------------- RUN

    def begin(self, step: int, exponents: Sequence[int], keep: Keep | None = None) -> None:
        """Empties all sums for a new attempt, but for those that are kept."""
        self._began_ns = time.monotonic_ns()
        self.context.on_begin(step)
        self._untimed.clear()
        by_layer = [[exponents[slot.id] for slot in shape.tensors] for shape in self._shapes]
        self._microbatches.clear()
        # As long as sums are kept, so is what was found of layers that were given up since (K5).
        if keep is None and self.seals is not None:
            self.seals.begin()
        self.compute.begin(step, by_layer, keep)
        self.reduction.begin(by_layer, self._num_microbatches)

    def run(
        self, action: Action, layers: range, step: int, value: Any, *, first: bool, last: bool, keeps: bool = True
    ) -> Any:
        """Runs an action, or what is left of it, and makes that last on an emulated device."""
        self._bound_run_ahead()
        compute, microbatch = self.compute, action.microbatch
        left, targets = self._left_of(action, layers), None
        if action.kind == "F" and (first or last):
            inputs, targets = self._microbatches.get(step, microbatch, train=True)
            value = inputs if first else value
        start_ns, start, checking_ns = time.monotonic_ns(), self.device.mark(), compute.checking_ns
        output: Any = None
        if action.kind == "F":
            output = compute.forward(layers, microbatch, value, targets if last else None, keeps=keeps)
        elif action.kind == "W":
            compute.backward_weights(layers, microbatch)
        elif action.kind == "I":
            output = compute.backward_input(layers, microbatch, value)
        else:
            output = compute.backward(layers, microbatch, value)
        # After I the inputs stay: W may run a layer again that asks for them.
        self._microbatches.release(step, microbatch, train=True, is_over=action.kind in ("B", "W") or not keeps)
        end = self.device.mark()
        if self.device.is_host or self.context.timer.holds:
            wait_for(end, self.context.surroundings.check)
            if left:
                self.context.timer.on_computed(action, left, start_ns + compute.checking_ns - checking_ns)
            return output
        self._running.append(end)
        if left and compute.checking_ns == checking_ns:  # a check lies between the marks
            self._untimed.append((action, left, start, end))
        return output

    def _bound_run_ahead(self) -> None:
        """Waits until few actions are queued on the device.

        Raises:
            InterruptedWaitError: the generation is over.
        """
        while len(self._running) >= RUN_AHEAD_ACTIONS:
            wait_for(self._running[0], self.context.surroundings.check)
            self._running.popleft()

    def _note_times(self) -> None:
        """Tells how long the device has taken for the actions of an attempt."""
        if self._untimed:
            # What was read for the vote need not lie behind them: it may have been nothing.
            wait_for(self._untimed[-1][-1], self.context.surroundings.move)
        for action, left, start, end in self._untimed:
            self.context.timer.on_measured(action, left, end.seconds_since(start))
        self._untimed.clear()

    def _left_of(self, action: Action, layers: range) -> range:
        """Finds the layers of an action that have not run before an interrupt."""
        resume_point = None if action.kind == "W" else self.compute.resume_point(action.kind, action.microbatch)
        if resume_point is None:
            return layers
        return (
            range(min(resume_point.at, layers.stop), layers.stop)
            if action.kind == "F"
            else range(layers.start, resume_point.at)
        )

    def output(self, action: Action) -> Any:
        """Returns what an action has returned."""
        return self.compute.output(action.kind, action.microbatch)

    def release(self, microbatch: int) -> None:
        """What the backward of a micro-batch has returned is needed no more."""
        self.compute.release(microbatch)

    def unfinished(self) -> Unfinished:
        """Tells what there is of the step."""
        found = self.compute.unfinished()
        return found._replace(can_be_kept=found.can_be_kept and self.reduction.exact)

    def evaluate(self, layers: range, step: int, microbatch: int, value: Any, *, first: bool, last: bool) -> Any:
        """Runs layers forward for a validation micro-batch."""
        self._bound_run_ahead()
        targets = None
        if first or last:
            inputs, targets = self._microbatches.get(step, microbatch, train=False)
            value = inputs if first else value
        output = self.compute.forward(layers, microbatch, value, targets if last else None, train=False)
        self._microbatches.release(step, microbatch, train=False, is_over=True)
        if not self.device.is_host:
            self._running.append(self.device.mark())
        return output

    def scores(self) -> Scores:
        """Losses and metrics."""
        return self.compute.scoring.scores

    def forget_scores(self) -> None:
        """An evaluation begins."""
        self.compute.scoring.clear()
        self.compute.refresh()

    # ----------------------------------------------------------------------------------------------------- REDUCE

    def partial_sums(self, layer: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Returns the own partial sums of blocks of a layer, with their coverage."""
        return self.reduction.frame(layer, blocks)

    def partial_sums_slot(self, layer: int, peer: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Makes the slot where a peer's partial sums arrive."""
        return self.reduction.slot(layer, peer, blocks)

    def reduce(self, layer: int, copies: Sequence[HeldBlock], peers: Sequence[int]) -> None:
        """Makes the mean gradients of owned copies of a layer."""
        self.reduction.reduce(layer, copies, peers)

    def gradients(self, copies: Sequence[HeldBlock]) -> list[torch.Tensor]:
        """Lists the mean gradients of owned copies."""
        return [_gradient(copy) for copy in copies]

    def gradients_slot(self, copies: Sequence[HeldBlock]) -> list[torch.Tensor]:
        """Makes the slot where the mean gradients of followed copies arrive."""
        sizes = [copy.num_elements for copy in copies]
        if self.device.is_host:
            memory = parts = [torch.empty(size, dtype=torch.float32) for size in sizes]
        else:  # one tensor, which one copy brings
            memory = [torch.empty(sum(sizes), dtype=torch.float32, device=self._place)]
            # Views: each copy finds its gradient where the one transfer has put it.
            parts = list(memory[0].split(sizes))
        for copy, part in zip(copies, parts, strict=True):
            copy.gradient = part
        return memory

    # ------------------------------------------------------------------------------------------------------- VOTE

    def measured(self) -> Measured:
        """Collects what the computation of this attempt brings to the ballot."""
        compute = self.compute
        # First: checksums and maxima of sums on a device are known once they are read, here by one wait.
        self.reduction.read()
        nonfinite = compute.nonfinite
        compute.look_at_late()
        self._note_times()
        maxima = {
            slot.id: maximum
            for accumulator in self.reduction.accumulators.values()
            for slot, maximum in zip(accumulator.shape.tensors, accumulator.maxima, strict=True)
        }
        partial_sums = self.reduction.partial_sums()
        # The duration is without spot checks: M4 compares attempts by it, and few of them have any.
        return Measured(
            compute.coverage,
            partial_sums,
            self.scores(),
            maxima,
            nonfinite,
            self._determinism_hashes(),
            dict(compute.writes),
            (time.monotonic_ns() - self._began_ns - compute.checking_ns) // 1000,
        )

    def _determinism_hashes(self) -> dict[int, int]:
        if not self.context.blueprint.config.elastic.verify:
            return {}
        layers = {
            ENVIRONMENT + 1 + layer: determinism_hash
            for layer, determinism_hash in self.compute.determinism_hashes.items()
        }
        return {ENVIRONMENT: self.environment().determinism_hash, **layers}

    def square_sums(self, copies: Sequence[HeldBlock]) -> list[float]:
        """Computes sums of squares of copies' mean gradients; buffers are no part of the norm."""
        if not self.device.is_host:
            return self._square_sums_there(copies)
        return [
            (0.0 if bool(_gradient(copy).isfinite().all()) else math.nan)
            if copy.is_buffers
            else square_sum(_gradient(copy))
            for copy in copies
        ]

    def _square_sums_there(self, copies: Sequence[HeldBlock]) -> list[float]:
        """Computes the same as `square_sums`, but makes it on the device and reads it by one wait."""
        if not copies:
            return []
        found = self._read(square_sums(list(map(_gradient, copies))))
        return [
            0.0 if copy.is_buffers and math.isfinite(value) else value
            for copy, value in zip(copies, found, strict=True)
        ]

    def _read(self, found: Found) -> list[Any]:
        """Reads numbers of runs, by one wait."""
        (numbers,) = read_tensors(self.device, [found.numbers], self.context.surroundings.move)
        return found.in_order(numbers)

    def gradient_hashes(self, copies: Sequence[HeldBlock]) -> list[int]:
        """Computes the hashes of copies' mean gradients."""
        return self._hashes(list(map(_gradient, copies)))

    def changes(self, copies: Collection[HeldBlock], *, given_up: bool) -> list[Change]:
        """Compares all that RUN reads, and the masters of copies, with their seals. Constants are made anew where that
        gives what they were."""
        if self.seals is None:
            return []
        working, masters = self.seals.broken(self.layers, copies)
        working += self.seals.given_up if given_up else ()
        found = [Change(MemoryKind.WORKING, block, was, now) for block, was, now in working if isinstance(block, int)]
        found += [Change(MemoryKind.COPY, block, was, now) for block, was, now in masters if isinstance(block, int)]
        for layer, broken in self.seals.broken_constants(self.layers).items():
            is_mended = self._take_constants(layer, self._made_again(layer))
            kind = MemoryKind.MENDED if is_mended else MemoryKind.CONSTANT
            found += [Change(kind, layer, each.was, each.now) for each in broken]
        return found

    def parameter_hashes(self, blocks: Sequence[int], copies: Mapping[int, HeldBlock]) -> list[int]:
        """Lists the hashes of the working copies of blocks; of those that are not here, of what copies would serve."""
        assert self.seals is not None
        elsewhere = [copies[block] for block in blocks if block not in self.seals.working]
        served = dict(zip((copy.block.id for copy in elsewhere), self._served_hashes(elsewhere), strict=True))
        known = served | {block: self.seals.working[block] for block in blocks if block not in served}
        return [known[block] for block in blocks]

    def _served_hashes(self, copies: Sequence[HeldBlock]) -> list[int]:
        assert self.seals is not None
        masters, dtype = self.seals.masters, self._dtype
        # Layers are served masters rounded to their dtype; in float32, and of buffers, the masters as they are.
        rounded = [copy for copy in copies if dtype != torch.float32 and not copy.is_buffers]
        of_rounded = self._hashes([copy.slots[MASTER].to(dtype) for copy in rounded])
        found = dict(zip((copy.block.id for copy in rounded), of_rounded, strict=True))
        return [found.get(copy.block.id, masters[copy.block.id]) for copy in copies]

    def master_hashes(self, copies: Sequence[HeldBlock]) -> list[int]:
        """Lists the hashes of masters as they were written."""
        assert self.seals is not None
        return [self.seals.masters[copy.block.id] for copy in copies]

    def state_hashes(self, copies: Sequence[HeldBlock]) -> np.ndarray:
        """Computes the hashes of the optimizer's states."""
        slots = [(place, name, each) for place, copy in enumerate(copies) for name, each in _optimizer_slots(copy)]
        hashes = np.array(self._hashes([values for _, _, values in slots]), np.uint64)
        found = np.zeros(len(copies), np.uint64)
        names = np.array([text64(name) for _, name, _ in slots], np.uint64)
        np.add.at(found, np.array([place for place, _, _ in slots], np.int64), mix_words(hashes + names))
        return found

    def _hashes(self, runs: Sequence[torch.Tensor]) -> list[int]:
        if self.device.is_host or not runs:
            return list(map(run_hash, runs))
        return [value & MASK64 for value in self._read(run_hashes(runs))]

    def counts(self) -> Mapping[tuple[int, int], int]:
        """Counts how often each (layer, micro-batch) was added."""
        return self.compute.counts

    def imbalance(self) -> Imbalance:
        """Finds where the partial sums are wrong."""
        return self.reduction.imbalance()

    def environment(self) -> Environment:
        """Finds what this process computes with."""
        if self._environment is None:
            self._environment = environment_of(self.context.blueprint, self.device)
        return self._environment

    # --------------------------------------------------------------------------------------- APPLY, GATHER, delivery

    def committed(self, step: int, loss: float, *, updates: bool) -> None:
        """Options of the optimizer, and what it keeps once, go on by one step; what was kept for another attempt
        goes."""
        self.compute.end_step(step)
        self.updater.committed(step, loss, updates=updates)

    def batches(self, copies: Sequence[HeldBlock]) -> Iterator[Sequence[HeldBlock]]:
        """Splits copies into batches as the device takes them."""
        for some in batches_of([copy.num_elements for copy in copies], self.device.batch):
            yield copies[some]

    def apply(
        self,
        copies: Sequence[HeldBlock],
        step: int,
        norm: float | None,
        scale: float,
        num_updates: int,
        written: Collection[int] = (),
    ) -> None:
        """Applies the mean gradients of copies, clipped by the norm, and forgets them. Buffers that were written take
        theirs as it is. Few batches are queued on a device, and nothing is read there."""
        # First, since it may raise: an interrupt out of `apply` has changed no copy of the batch (W5).
        self._bound_run_ahead()
        trained: list[HeldBlock] = []
        gradients: list[torch.Tensor] = []
        for copy in copies:
            gradient, copy.gradient = _gradient(copy), None
            if norm is None:
                continue
            if copy.is_buffers:
                copy.assign(gradient, written)
            else:
                trained.append(copy)
                gradients.append(gradient)
        if norm is not None and trained:
            self._update(trained, gradients, scale, norm, num_updates)
        if norm is not None and self.seals is not None:
            # On a device `publish` queues these, with those of all other batches.
            places = [copy.block.id if is_working(copy, self.layers) else copy for copy in copies]
            self.seals.written(places, [copy.slots[MASTER] for copy in copies])
        if not self.device.is_host:
            self._running.append(self.device.mark())

    def _update(
        self,
        copies: Sequence[HeldBlock],
        gradients: list[torch.Tensor],
        scale: float,
        norm: float,
        num_updates: int,
    ) -> None:
        config = self.context.blueprint.config.optimizer
        factor = scale * clip_factor(norm, config.grad_clip)
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        self.updater.update(copies, gradients, num_updates)
        if config.ema_decay:
            masters = [copy.slots[MASTER] for copy in copies]
            average([copy.slots[EMA] for copy in copies], masters, config.ema_decay)

    def publish(self, copies: Iterable[HeldBlock]) -> None:
        """Copies masters into the layers that are here, if those do not compute with the masters themselves."""
        stale: list[torch.Tensor] = []
        masters: list[torch.Tensor] = []
        places: list[int] = []
        for copy in copies:
            layer = self.layers.get(copy.block.layer)
            if layer is not None and not is_working(copy, self.layers):
                stale.append(layer.flat[copy.block.start : copy.block.stop])
                masters.append(copy.slots[MASTER])
                places.append(copy.block.id)
        if stale:
            torch._foreach_copy_(stale, masters)
        if self.seals is not None:
            self.seals.written(places, stale)
            self.seals.queue()

    def parameters_of(self, copies: Sequence[HeldBlock]) -> list[torch.Tensor]:
        """Returns the parameters of copies in the dtype that layers compute in."""
        masters = [copy.slots[MASTER] for copy in copies]
        dtype = torch.float32 if copies[0].is_buffers else self._dtype  # all are of one unit
        if self.device.is_host or dtype == torch.float32:
            return [master.to(dtype) for master in masters]
        sizes = [copy.num_elements for copy in copies]
        rounded = torch.empty(sum(sizes), dtype=dtype, device=self._place)
        torch._foreach_copy_(rounded.split(sizes), masters)
        return [rounded]

    def parameters_slot(self, layer: int, blocks: Sequence[int]) -> list[torch.Tensor]:
        """Returns the slot where parameters arrive: in the layer itself."""
        if self.seals is not None:
            # Before anybody has the slot: frames that land there before an interrupt are no change of memory (K5).
            self.seals.await_frames(blocks)
        flat = self.layers[layer].flat
        return [flat[run.start : run.stop] for run in self.reduction.runs(blocks)]

    def parameters_arrived(self, layer: int, blocks: Sequence[int]) -> None:
        """Takes their seals."""
        if self.seals is not None:
            flat = self.layers[layer].flat
            self.seals.written(blocks, [flat[self.blocks[index].start : self.blocks[index].stop] for index in blocks])
            self.seals.queue()

    def carried(self) -> str:
        """Returns what the updater keeps of the steps that have been made, beside the blocks."""
        return self.updater.state()

    def carry_on(self, carried: str, step: int) -> None:
        """Takes over what another worker's updater has kept."""
        self.updater.load(carried, step)

    # -------------------------------------------------------------------------------------------------- constants

    def constants(self, layer: int) -> list[torch.Tensor]:
        """Returns what no step writes of a layer, as bytes."""
        return [_bytes_of(values) for _, values in self._own[layer].constants()]

    def constants_slot(self, layer: int) -> list[torch.Tensor]:
        """Makes the slot where another worker's constants arrive."""
        self._incoming[layer] = [torch.empty_like(each) for each in self.constants(layer)]
        return self._incoming[layer]

    def take_constants(self, layer: int) -> bool:
        """Takes over what has arrived, if that is what this worker had."""
        return self._take_constants(layer, self._incoming.pop(layer))

    def _made_again(self, layer: int) -> list[torch.Tensor]:
        blueprint, spec = self.context.blueprint, self.context.blueprint.model.layers[layer]
        module = blueprint.build(layer)
        values = {
            spec.full_name(name): blueprint.frozen.get(spec.full_name(name), tensor.detach())
            for name, tensor in (*module.named_parameters(), *module.named_buffers(remove_duplicate=False))
        }
        return [_bytes_of(values[name]) for name, _ in self._own[layer].constants()]

    def _take_constants(self, layer: int, values: Sequence[torch.Tensor]) -> bool:
        """Puts constants in their places, given as bytes, unless one of them is not what it was."""
        assert self.seals is not None
        flat = self._own[layer]
        here = [
            (name, tensor, each.to(tensor.device).view(tensor.dtype).view(tensor.shape))
            for (name, tensor), each in zip(flat.constants(), values, strict=True)
        ]
        if not self.seals.fit(layer, [(name, each) for name, _, each in here]):
            return False
        for _, tensor, each in here:
            tensor.copy_(each)
        # Those were the built values of buffers. Forwards read copies of them, which may have changed as well.
        flat.buffers.put_back()
        return True

    # ----------------------------------------------------------------------------------------------------- copies

    def empty_copy(self, block: int, num_updates: int) -> HeldBlock:
        """Makes a follower's copy of a block, without content."""
        run, state = self.blocks[block], self.context.blueprint.state
        copy = HeldBlock(run, ReplicaRole.FOLLOWER, state.layers[run.layer], {})
        for name in state.slots_of((segment.slot for segment in copy.segments), num_updates):
            copy.slots[name] = torch.empty(run.num_elements, dtype=torch.float32, device=self._place)
        return copy

    def state(self, copy: HeldBlock) -> list[torch.Tensor]:
        """Returns master and optimizer's states."""
        return list(copy.slots.values())

    def state_slot(self, copy: HeldBlock) -> list[torch.Tensor]:
        """Returns the slot where master and optimizer's states arrive."""
        return list(copy.slots.values())

    def parameter_bytes(self, blocks: Iterable[int]) -> int:
        """Counts the bytes of the parameters of blocks, as they travel."""
        return sum(
            self.blocks[block].num_elements
            * (4 if self._shapes[self.blocks[block].layer].is_buffers else self._dtype.itemsize)
            for block in blocks
        )

    def load(self, step: int, layout: Layout, placement: Placement) -> Loaded[HeldBlock]:
        """Loads a durable checkpoint, every used byte of which is checked, or begins from the seed."""
        checkpoint = None
        if step > 0:
            folder = folder_there(self.context.run_dir, step)
            checkpoint = (folder, read_meta(folder))
        context = self.context
        self._forget()  # first: there need not be room for two states
        self.updater = updater_after(context.blueprint, checkpoint)
        with context.building():
            layers, store, progress = materialise(
                context.blueprint, context.worker, layout, placement, checkpoint, self.device
            )
        self.layers.update(layers)
        self._note_layers()
        self.reduction.hold(list(self.layers))
        if self.seals is not None:
            self.seals.written_all(layers, store)
        num_bytes = sum(layer.flat.nbytes for layer in layers.values()) + store.optimizer_bytes()
        return Loaded(store.held, progress, num_bytes)

    def _forget(self) -> None:
        """Gives up all layers and sums, what is kept of a step, and all that refers to copies."""
        self.compute.forget(self._own.keys())
        self.layers.clear()
        self._note_layers()
        self._prepared.clear()
        self.reduction.forget()
        self._microbatches.clear()
        self._incoming.clear()
        if self.seals is not None:
            self.seals.written_all({}, ())


def _optimizer_slots(copy: HeldBlock) -> list[tuple[str, torch.Tensor]]:
    return [(name, values) for name, values in copy.slots.items() if name != MASTER]


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def _gradient(copy: HeldBlock) -> torch.Tensor:
    assert copy.gradient is not None, f"block {copy.block.id} has no gradient"
    return copy.gradient
