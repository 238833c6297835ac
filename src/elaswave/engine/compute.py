"""The computation of one worker: forward and backward of layers, one autograd graph per layer.

Graphs end at every layer boundary, whether or not a stage ends there, and what crosses a boundary is contiguous and
64-byte aligned. So the bits of a layer's outputs and gradients do not depend on which other layers share its worker.
A backward runs whole (B), or in two halves (I, W) with the same bits. No communication here; the executor moves
values between workers.

A layer never shares the memory that it is given with another one that could still read it: a layer that writes its
input gets copies of it (`elaswave.engine.checks.values`).

Layers through ``torch.compile``, for fixed shapes. Whether a compilation gives the bits of every other process, the
determinism check finds out, and again after each further compilation.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from elaswave.devices.interface import HOST, Device, Reading, Readings, seed_everything
from elaswave.engine.batches import BatchError
from elaswave.engine.blueprint import leaves_of_others, refuse_leaf
from elaswave.engine.boundaries.fences import NO_MASKS, Fences
from elaswave.engine.checks.determinism_check import (
    check_again,
    check_equal,
    check_hashes,
    determinism_hash_of,
    hash_tensors,
    made_up_tree,
)
from elaswave.engine.checks.spot_checks import CheckKind, SpotChecks, check_probe
from elaswave.engine.checks.values import (
    TENSOR,
    Guarded,
    Lending,
    Lent,
    Signatures,
    Unwritten,
    WatchedTensors,
    Watching,
    at_boundary,
    check_dense,
    flatten,
    is_differentiable,
    refuse_writing_loss,
    refuse_written_gradient,
    refuse_written_parameter,
    unflatten,
)
from elaswave.engine.in_flight import (
    Again,
    Done,
    InFlight,
    LayerInputs,
    LayerRun,
    Reached,
    ResumePoint,
    Saved,
    Scored,
    Scoring,
    received,
    to_send,
    zeros_where_none,
)
from elaswave.engine.reduction import Accumulator
from elaswave.engine.split import Gradients, WeightHalf, input_half, is_exact
from elaswave.errors import CommError, UsageError
from elaswave.fences import Fence, ratios_at
from elaswave.hashing import MASK64, key64
from elaswave.models.admission import CopyOf, check_hooks
from elaswave.models.layers import Call, ModelSpec, inside
from elaswave.protocol.step.ballot import LOSS, NonFinite, coverage_key, loss_key
from elaswave.protocol.step.engine import Unfinished
from elaswave.protocol.step.salvage import Keep, encode_rows, mask_of
from elaswave.state.flat import FlatLayer
from elaswave.training.raised import said


class CompiledLayers:
    """The compiled modules of one worker."""

    def __init__(self) -> None:
        self._compiled: dict[int, tuple[nn.Module, Callable[[Any], Any]]] = {}
        """By layer, the module and what it has become."""
        self._num_graphs = 0

    def __call__(self, index: int, module: nn.Module) -> Callable[[Any], Any]:
        """Returns what runs a layer; it is compiled at its first call.

        Args:
            index: of the layer.
            module: that the worker holds for it now.
        """
        known = self._compiled.get(index)
        # A layer that was given up and has come again is another module: what was compiled for the old one reads its
        # parameters.
        if known is None or known[0] is not module:
            from torch._inductor import config  # takes a second, and only jobs that compile need it

            config.compile_threads = 1  # a pool of processes would outlive a killed worker
            known = self._compiled[index] = (module, torch.compile(module, dynamic=False))
        return known[1]

    def forget(self, layers: Collection[int]) -> None:
        """Gives up the modules of layers that are here no more."""
        self._compiled = {index: pair for index, pair in self._compiled.items() if index not in layers}

    def has_grown(self) -> bool:
        """Tells whether something has been compiled since this was last asked."""
        from torch._dynamo.utils import counters

        before, self._num_graphs = self._num_graphs, counters["stats"]["unique_graphs"]
        return self._num_graphs != before


_BATCH_WRITTEN = "what elaswave.batch() returns, which other layers read too: work on a copy"


class ErrorPlace(NamedTuple):
    """Where a computation stands, for error messages."""

    step: int
    microbatch: int
    layer: int
    layer_name: str

    def __str__(self) -> str:
        return f"step {self.step}, micro-batch {self.microbatch}, layer {self.layer} ({self.layer_name})"


class LayerError(Exception):
    """An exception inside a user's layer or loss, with the position where it was raised; its cause is the original."""

    def __init__(self, position: ErrorPlace, cause: BaseException) -> None:
        self.position = position
        super().__init__(f"{said(cause)} (at {position})")


class FetchInputs(Protocol):
    """Where `elaswave.batch` finds a micro-batch's inputs."""

    def __call__(self, step: int, microbatch: int, *, train: bool) -> Any:
        """Fetches the inputs, of training or of evaluation."""
        ...


def no_inputs(step: int, microbatch: int, *, train: bool) -> Any:
    """Refuses to fetch inputs where there is nothing to fetch."""
    raise UsageError(f"no inputs of micro-batch {microbatch} are known here")


class ComputeRules(NamedTuple):
    """How a run computes: the same on every worker and under every layout."""

    model: ModelSpec
    """The whole model's layers and loss."""
    seed: int
    """The run's."""
    recompute: bool = False
    """Whether only layer inputs are kept, and each layer runs again in backward; a layer's own wish counts as well."""
    lowest_trained: int = 0
    """The first layer with a parameter that is trained; those below run forward only."""
    has_determinism_check: bool = False
    """Whether each layer's first micro-batch runs again, and a made-up one
    (`elaswave.engine.checks.determinism_check`)."""


class Surroundings:
    """What a worker does beside its computation where that lets it; a computation that is alone has these, and nothing
    happens."""

    def check(self) -> None:
        """Notes that bytes may move; it is called between layers, and while something is waited for that ends by
        itself.

        Raises:
            InterruptedWaitError: the generation is over.
        """

    def move(self) -> None:
        """The device is waited for: bytes may move. Never raises."""

    def elsewhere(self) -> AbstractContextManager[None]:
        """Stands around a wait for a foreign part."""
        return nullcontext()


ALONE = Surroundings()


class _Deferred(NamedTuple):
    """A layer without a gradient of its input: all of its backward is left to W."""

    saved: Saved
    reached: Reached


class _Half(NamedTuple):
    """A layer in whose graph W goes on."""

    saved: Saved
    run: LayerRun
    half: WeightHalf
    expected: Sequence[int] | None
    """Where the place is checked: hashes of the gradients that it is to find."""


class _Known(NamedTuple):
    """A layer whose gradients are known: W only adds them."""

    buffers: Sequence[torch.Tensor]
    """As its forward has left them."""
    gradients: Gradients


class _LossRun(NamedTuple):
    """What the loss keeps between forward and backward."""

    given: LayerInputs
    scored: Scored
    lent: Lent
    targets: Any
    found: Gradients | None = None
    """The gradients of its inputs, once they are made: its graph is used up then."""


class Compute:
    """Runs layers [start, ...) of a stage for single micro-batches and adds up their gradients.

    Args:
        rules: of the run.
        layers: the materialised layers of this worker, by layer index.
        accumulators: one per materialised layer.
        inputs: fetches the inputs of a micro-batch for layers that ask for them.
        device: where the layers are.
        surroundings: what the worker does beside it.
        spots: what is run again later than at a first micro-batch; None: nothing.
    """

    def __init__(
        self,
        rules: ComputeRules,
        layers: Mapping[int, FlatLayer],
        accumulators: Mapping[int, Accumulator],
        *,
        inputs: FetchInputs = no_inputs,
        device: Device = HOST,
        surroundings: Surroundings = ALONE,
        spots: SpotChecks | None = None,
    ) -> None:
        self.rules = rules
        self.model = model = rules.model
        self.layers = layers
        self.accumulators = accumulators
        self._device = device
        self._readings = Readings(device, surroundings.move)
        """What the device has computed and the host is to know: losses, and whether gradients were finite."""
        self._watching = Watching(self._readings, by_sums=rules.has_determinism_check)
        self._lending = Lending(self._who, self._watching)
        self.scoring = Scoring(model, self._readings, self._watching)
        """Losses and metrics of the micro-batches whose last layer ran here."""
        self.counts: dict[tuple[int, int], int] = {}
        """How often (unit, micro-batch) was added; names the culprit when coverage fails."""
        self.writes: dict[int, tuple[int, int]] = {}
        """What forwards have left in buffers, by tensor; see `elaswave.protocol.step.ballot.BufferTensor`."""
        self._nonfinite: NonFinite | None = None
        self._watched: list[tuple[int, int, Reading]] = []
        """Micro-batch, layer, and a number that is finite if all was, which has not been looked at."""
        self.determinism_hashes: dict[int, int] = {}
        """By layer, what it makes of made-up numbers; of those that have run here."""
        self._spots = spots
        if not rules.has_determinism_check and (names := [layer.name for layer in model.layers if layer.compile]):
            raise UsageError(
                f"layers {', '.join(names)} are to be compiled: whether they compute the same bits in every process is "
                "found out in votes. Set elastic.verify=true, or leave out compile=True"
            )
        self.fences = Fences(model.fences) if model.fences else None
        """None of a model without any."""
        self._surroundings = surroundings
        self._fetch = inputs
        self._step = 0
        self._in_flight_microbatches = InFlight()
        self._covered: Sequence[int] = ()
        """By layer, the loss last: micro-batches that are in some worker's sums already; empty for none."""
        self._saved: dict[tuple[int, int], Saved] = {}
        self._losses: dict[int, _LossRun] = {}
        self._left: dict[tuple[int, int], _Half | _Deferred | _Known] = {}
        """What W has to do, or what is already known, of each layer and micro-batch between I and W."""
        self._splits: dict[int, bool] = {}
        """Whether the halves of a layer's backward have the bits of the whole; found out at its first one."""
        self._signatures = Signatures(self._boundary_name, device.place)
        self._borrowed: list[WatchedTensors] = []
        """What `elaswave.batch` has returned to the layer that runs."""
        self._guards: dict[int, Guarded] = {}
        """By layer (or loss): its parameters, as they are until the next step."""
        self._is_repeated = False
        """A run is done again, with parameters at other places."""
        self._compiled = CompiledLayers()
        self._proven: set[tuple[int, bool]] = set()
        """What has run twice, beside layers in training, which have a determinism check: the loss, and all in
        evaluation."""
        self._needs_graph: set[int] = set()
        """Layers (or loss) that differentiate within their forward, and run with a graph in evaluation too."""
        self._admitted: set[tuple[int, bool]] = set()
        """Layers (or loss) whose first run has been looked at, and whether in training."""

    @property
    def losses(self) -> Mapping[int, float]:
        """Loss of each micro-batch whose last layer ran here."""
        return self.scoring.losses

    @property
    def coverage(self) -> int:
        """Sum of `coverage_key` over everything added, and of `loss_key` over all losses, modulo 2**64."""
        added = sum(accumulator.coverage for accumulator in self.accumulators.values())
        return (added + sum(map(loss_key, self.scoring.scored))) & MASK64

    @property
    def nonfinite(self) -> NonFinite | None:
        """The first thing in the order (micro-batch, loss first, last layer first) that was not finite; waits for the
        device."""
        for microbatch, layer, largest in self._watched:
            if not math.isfinite(largest.value):
                self._note_nonfinite(microbatch, layer)
        self._watched.clear()
        return self._nonfinite

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.model.layers)

    def begin(self, step: int, exponents: Sequence[Sequence[int]], keep: Keep | None = None) -> None:
        """Empties everything for a new attempt of a step, but for what is kept of an earlier one.

        Args:
            exponents: grid exponents per unit of the model and tensor of the unit.
            keep: as of `elaswave.protocol.step.engine.Engine.begin`.
        """
        self._step = step
        if self._spots is not None:
            self._spots.begin(step)
        self._replay_ratios(step)
        self.refresh()
        keep = keep or Keep(frozenset(), 0, {}, ())
        self._covered = keep.covered
        # A layer stays with all that it adds to. Of those that share a unit the decision keeps all that have added to
        # it, or none (S3).
        kept = {unit for layer in keep.layers for unit in self._units_of(layer)}
        tensors = {slot.id for layer in keep.layers for slot in self.layers[layer].buffers.tensors}
        self.scoring.keep(keep.losses, lambda layer, number: layer in keep.layers and self._has_added(layer, number))
        self.counts = {
            (unit, number): count
            for (unit, number), count in self.counts.items()
            if unit in kept or (unit == LOSS and keep.losses >> number & 1)
        }
        self.writes = {tensor: pair for tensor, pair in self.writes.items() if tensor in tensors}
        self._nonfinite = None
        self._watched.clear()
        self._keep_in_flight(keep.in_flight.keys())
        for index, accumulator in self.accumulators.items():
            # The sum goes together with the knowledge of what is in it (S1).
            if index not in kept:
                accumulator.reset(exponents[index])

    def _units_of(self, layer: int) -> set[int]:
        """Lists all that a layer's backward adds to."""
        shape = self.layers[layer].shape
        return {layer, *(use.unit for use in shape.shared)} | (set() if shape.buffers is None else {shape.buffers})

    def _has_added(self, layer: int, microbatch: int) -> bool:
        return bool(self.accumulators[layer].covered.get(0, 0) >> microbatch & 1)

    def _keep_in_flight(self, microbatches: Collection[int]) -> None:
        self._in_flight_microbatches.keep(microbatches)
        self._saved = {place: saved for place, saved in self._saved.items() if place[1] in microbatches}
        self._losses = {number: value for number, value in self._losses.items() if number in microbatches}
        # Between the halves of its backward a micro-batch is not kept (S5).
        self._left.clear()

    def forget(self, layers: Collection[int]) -> None:
        """These layers are here no more, nor is what depends on them."""
        self._guards.clear()
        for microbatch in self._in_flight_microbatches.through(layers):
            self._in_flight_microbatches.end(microbatch)
        self._saved = {place: saved for place, saved in self._saved.items() if place[0] not in layers}
        self._left = {place: left for place, left in self._left.items() if place[0] not in layers}
        if self.num_layers - 1 in layers:
            self._losses.clear()
        self._borrowed.clear()
        self._compiled.forget(layers)

    def end_step(self, step: int) -> None:
        """A step is committed: nothing of it runs again. It may be told of later, when the next one has begun."""
        if step == self._step:
            self._keep_in_flight(())
            self._replay_ratios(step + 1)  # also for an evaluation before it begins

    def use_ratios(self, ratios: Mapping[int, int]) -> None:
        """Adaptive fences have these ratios, by boundary, unless all of them were given before the run."""
        if self.fences is not None and not self.model.fence_ratios:
            self.fences.use_ratios(ratios)

    def _replay_ratios(self, step: int) -> None:
        if self.fences is not None and self.model.fence_ratios:
            known = ratios_at(self.model.fence_ratios, step)
            positions = {layer.name: index for index, layer in enumerate(self.model.layers)}
            self.fences.use_ratios({positions[after]: ratio for after, ratio in known.items()})

    def unfinished(self) -> Unfinished:
        """Tells what there is of the step. A micro-batch between the halves of its backward begins anew."""
        rows = {
            (unit, use): mask
            for unit, accumulator in self.accumulators.items()
            for use, mask in accumulator.covered.items()
        }
        # A worker that has seen something that is not finite keeps nothing of the step (S5).
        in_flight = self._in_flight_microbatches.facts({number for _, number in self._left})
        return Unfinished(self.nonfinite is None, encode_rows(rows), mask_of(self.scoring.scored), in_flight)

    def resume_point(self, kind: str, microbatch: int) -> ResumePoint | None:
        """Tells how far a forward ("F") or backward has come of which something is kept."""
        return (
            self._in_flight_microbatches.forward(microbatch)
            if kind == "F"
            else self._in_flight_microbatches.backward(microbatch)
        )

    def output(self, kind: str, microbatch: int) -> Any:
        """Returns what a forward ("F") or backward has returned."""
        resume_point = self.resume_point(kind, microbatch)
        assert resume_point is not None, f"micro-batch {microbatch} has no output to be handed on again"
        return resume_point.value if kind == "F" else to_send(resume_point.value)

    def release(self, microbatch: int) -> None:
        """What the backward of a micro-batch has returned is needed no more."""
        self._in_flight_microbatches.end(microbatch)

    def refresh(self) -> None:
        """Takes over the buffers that lie in flat storage now: a step or an evaluation begins."""
        self._guards.clear()
        for layer in self.layers.values():
            layer.refresh()

    def forward(
        self, layers: range, microbatch: int, value: Any, targets: Any, *, train: bool = True, keeps: bool = True
    ) -> Any:
        """Runs layers in order, from where it was interrupted before; after the model's last layer also the loss.

        Args:
            layers: the hop's layers, all materialised here.
            microbatch: index in the global batch.
            value: input of the first of them: the micro-batch's inputs, or what the layer before has returned.
            targets: of the loss, where the last of them is the model's last; else not used.
            train: False: evaluation.
            keeps: in training, keep what backward needs.
        Returns:
            The last layer's output, detached, as it stands at the boundary behind it
            (`elaswave.engine.boundaries.fences`).
        """
        resume_point, first = self._in_flight_microbatches.forward(microbatch) if train else None, layers.start
        if resume_point is not None:
            first, value = resume_point.at, resume_point.value
        elif train and keeps:
            self._in_flight_microbatches.end(microbatch)  # its backward is to run, whatever one before has made
        for index in range(first, layers.stop):
            with self._at(microbatch, index):
                given = self._given(index, value if self.fences is None else self.fences.opened(value), train)
                run = self._run_layer(index, microbatch, given, train)
                left: Sequence[torch.Tensor] = ()
                if train and keeps:
                    left = self.layers[index].buffers.left()
                    self._check_forward(index, microbatch, given, run, left)
                if not train:
                    again = partial(self._run_layer, index, microbatch, train=False)
                    self._prove_evaluation(index, given, run, again)
                before, value = value, run.value()
                if self.fences is not None:
                    value = self.fences.closed(index, value, before, given.leaves)
                if train and keeps:
                    kept = None if self._is_recomputed(index) or not self._keeps_run(index) else run
                    # No backward uses this run, so there is no later look at what it was lent.
                    if kept is None:
                        self._look(index, given, run.lent, train=True, is_over=False, is_dropped=True)
                    masks = NO_MASKS if self.fences is None else self.fences.masks(before, value)
                    self._saved[index, microbatch] = Saved(given, kept, left, masks)
                    self._in_flight_microbatches.went(microbatch, layers, index + 1, value)
            # The layer is noted as run: an interrupt that comes here costs nothing of it (S2).
            self._surroundings.check()
        if layers.stop == self.num_layers:
            value = value if self.fences is None else self.fences.opened(value)
            self._forward_loss(microbatch, value, targets, train, keeps)
            if train and keeps:
                self._in_flight_microbatches.went(microbatch, layers, layers.stop + 1, None)
        # No backward will come here that frees these. One that an earlier attempt has begun still needs them.
        if train and not keeps and self._in_flight_microbatches.backward(microbatch) is None:
            self._in_flight_microbatches.end(microbatch)
            for index in layers:
                self._saved.pop((index, microbatch), None)
        return value

    def backward(self, layers: range, microbatch: int, gradient: Any) -> Any:
        """Runs layers backward and adds their parameters' gradients to the accumulators.

        Args:
            layers: the hop's layers.
            microbatch: index in the global batch.
            gradient: of the last layer's output, as the next worker's `backward` has returned it; None where the loss
                is here.
        Returns:
            The gradient of the first layer's input, to be handed on; None where that is the model's first.
        """
        return self._back(layers, microbatch, gradient, self._backward_layer)

    def backward_input(self, layers: range, microbatch: int, gradient: Any) -> Any:
        """Runs the first half of a backward (I): does the same as `backward`, but leaves parameters' gradients to
        `backward_weights`.

        Layers without a gradient of their input (the first one) leave everything.
        """
        return self._back(layers, microbatch, gradient, self._input_gradient)

    def backward_weights(self, layers: range, microbatch: int) -> None:
        """Runs the second half of a backward (W): adds the parameters' gradients to the accumulators.

        Args:
            layers, microbatch: as `backward_input` was called with.
        """
        for index in reversed(layers):
            left = self._left.get((index, microbatch))
            if left is None:  # a whole backward was interrupted below it, and goes on under a schedule that halves it
                continue
            with self._at(microbatch, index):
                if isinstance(left, _Half):
                    with inside(self._call(microbatch, train=True)):
                        found = left.half.run()
                    self._look_after_backward(index, left.saved.given, left.run)
                    self._check_weights(index, found, left.expected)
                    self._add(index, microbatch, found, left.saved.buffers)
                elif isinstance(left, _Deferred):
                    self._backward_layer(index, microbatch, *left)
                else:
                    self._add(index, microbatch, left.gradients, left.buffers)
            del self._left[index, microbatch]  # not before: while it is there, the micro-batch would begin anew
            self._surroundings.check()

    def _back(
        self,
        layers: range,
        microbatch: int,
        gradient: Any,
        one_layer: Callable[[int, int, Saved, Reached], list[torch.Tensor]],
    ) -> Any:
        resume_point, last = self._in_flight_microbatches.backward(microbatch), layers.stop
        if resume_point is not None:
            last, reached = resume_point.at, resume_point.value
        else:
            reached = self._backward_loss(microbatch) if layers.stop == self.num_layers else received(gradient)
            # Noted before any layer runs: frames die with their generation, so the gradient that has come is kept (S2).
            self._in_flight_microbatches.returned(microbatch, layers, layers.stop, reached)
        for index in reversed(range(layers.start, last)):
            saved = self._saved[index, microbatch]
            # Interrupted in the midst of the layer, it is run again from its input: its graph may be used up.
            self._saved[index, microbatch] = saved._replace(run=None)
            with self._at(microbatch, index):
                before = reached.gradients
                gradients = before if self.fences is None else self.fences.opened_gradients(before, saved.masks)
                aligned = reached._replace(gradients=list(map(at_boundary, gradients)))
                versions = [each._version for each in aligned.gradients]
                passed_on = one_layer(index, microbatch, saved, aligned)
                if [each._version for each in aligned.gradients] != versions:
                    refuse_written_gradient(self._who(index))
                if self.fences is not None:
                    passed_on = self.fences.closed_gradients(
                        index - 1, passed_on, before, aligned.gradients, saved.masks
                    )
                reached = reached._replace(gradients=passed_on)
            del self._saved[index, microbatch]
            self._in_flight_microbatches.returned(microbatch, layers, index, reached)
            self._surroundings.check()
        # Nobody waits for a gradient from here, so none has to be kept for being sent again.
        if layers.start <= self.rules.lowest_trained:
            self._in_flight_microbatches.end(microbatch)
            return None
        return to_send(reached)

    def try_out(self, index: int, value: Any, *, prove: bool) -> Any:
        """Runs one layer on a micro-batch for its determinism hash alone: nothing is added, and no loss is made.

        Args:
            index: of the layer.
            value: its input.
            prove: also run it backward, and note its determinism hash.
        Returns:
            Its output, detached.
        """
        with self._at(0, index):
            self.layers[index].refresh()
            given = self._given(index, value, True)
            run = self._run_layer(index, 0, given, train=True)
            if prove:
                saved = Saved(given, run, self.layers[index].buffers.left())
                if self._has_backward(index):
                    reached = Reached(
                        [
                            torch.zeros_like(at_boundary(leaf.detach()))
                            for leaf in run.leaves
                            if is_differentiable(leaf)
                        ],
                        None,
                    )
                    found = self._gradients(index, 0, run, reached, given.inputs)
                    self._prove(index, 0, saved, run, reached, found)
                else:
                    self._nothing(index, 0, saved)
        return run.value()

    # ---------------------------------------------------------------------------------------------------------- forward

    def _given(self, index: int, value: Any, train: bool) -> LayerInputs:
        """Makes of a value what a layer keeps of it. The model's inputs have no gradient."""
        structure, leaves = flatten(value)
        if index == 0:
            self._signatures.check(-1, train, structure, leaves)
        given = LayerInputs(structure, [at_boundary(leaf.detach()) for leaf in leaves])
        if train or index in self._needs_graph:
            self._begin_graph(index, given)
        return given

    def _begin_graph(self, index: int, given: LayerInputs) -> None:
        if index > self.rules.lowest_trained:
            for leaf in given.leaves:
                if is_differentiable(leaf):
                    leaf.requires_grad_(True)

    def _run_layer(
        self, index: int, microbatch: int, given: LayerInputs, train: bool, *, admits: bool = True
    ) -> LayerRun:
        layer = self.layers[index]
        layer.set_training(train)
        layer.buffers.restore()
        call = self._call(microbatch, train)
        self._seed_draws(microbatch, index)
        has_graph = train and self._has_backward(index)
        is_first = admits and (index, train) not in self._admitted
        unwritten = Unwritten(layer.module) if is_first and self.rules.has_determinism_check else None
        guard = self._guard(index, layer.module)
        with inside(call), torch.set_grad_enabled(has_graph or index in self._needs_graph):
            lent = self._lending.lend(index, given.leaves, train=train)
            try:
                structure, leaves = flatten(self._callable(index)(unflatten(given.structure, lent.leaves)))
            except RuntimeError as error:
                if not self._begins_to_need_a_graph(index, given, error):
                    raise
                # From the top: the failed run may have written buffers and has used up draws.
                return self._run_layer(index, microbatch, given, train, admits=admits)
        layer.buffers.look()
        self._signatures.check(index, train, structure, leaves)
        wrote = self._look(index, given, lent, train=train, is_over=not has_graph)
        if wrote and train and self._is_recomputed(index):
            off = "model.recompute=false" if self.rules.recompute else "Layer(recompute=False)"
            raise UsageError(
                f"{self._who(index)} writes its input, and is to be run again from it: use operations that do not "
                f"work in place, or switch recomputation off ({off})"
            )
        if unwritten is not None:
            unwritten.check(self._who(index))
        if (name := guard.written(elsewhere=self._is_repeated)) is not None:
            refuse_written_parameter(f"the forward of {self._who(index)}", name)
        run = LayerRun(structure, leaves, call.aux_losses, lent if not wrote and has_graph else None)
        if is_first and train:
            check_hooks(self.layer_name(index), layer.module)

            def again() -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
                # This run is part of an admission: it must not begin another one.
                second = self._run_layer(index, microbatch, given, train, admits=False)
                return [*second.leaves, *second.aux_losses], [*layer.parameters, *given.leaves]

            self._admit(index, [*leaves, *run.aux_losses], [*layer.parameters, *given.leaves], again)
        if is_first:
            self._admitted.add((index, train))
        return run

    def _guard(self, index: int, module: nn.Module) -> Guarded:
        """Guards the parameters of a layer, or what the loss has as a module."""
        guard = self._guards.get(index)
        if guard is None or guard.module is not module:
            guard = self._guards[index] = Guarded(module, buffers=index == self.num_layers)
        return guard

    def _begins_to_need_a_graph(self, index: int, given: LayerInputs, error: RuntimeError) -> bool:
        """Tells whether a run without a graph has failed for want of one; from now on there is one, that begins with
        what is given, as in training."""
        if torch.is_grad_enabled() or "does not require grad" not in str(error):
            return False
        self._needs_graph.add(index)
        self._begin_graph(index, given)
        return True

    def _look(
        self, index: int, given: LayerInputs, lent: Lent | None, *, train: bool, is_over: bool, is_dropped: bool = False
    ) -> bool:
        """Tells, after a forward or a backward, whether the layer writes its input. Refuses what may not be written."""
        borrowed, self._borrowed = self._borrowed, []
        for watched in borrowed:
            self._watching.expect(watched, lambda: f"{self._who(index)} writes {_BATCH_WRITTEN}")
        if lent is None:
            return False
        return self._lending.look(
            index, given.leaves, lent, train=train, is_over=is_over or (is_dropped and not lent.are_copies)
        )

    def _look_after_backward(self, index: int, given: LayerInputs, run: LayerRun) -> None:
        self._look(index, given, run.lent, train=True, is_over=True)
        name = self._guard(index, self.layers[index].module).written(elsewhere=self._is_repeated)
        if name is not None:
            refuse_written_parameter(f"the backward of {self._who(index)}", name)

    def _prove_evaluation(
        self, index: int, given: LayerInputs, run: LayerRun, again: Callable[[LayerInputs], LayerRun]
    ) -> None:
        """Runs the first micro-batch of evaluation here a second time: a module may do something else then.

        Args:
            index: of the layer, or the loss.
            given, run: of the first run.
            again: the second run.
        """
        if self.rules.has_determinism_check and (index, False) not in self._proven:
            module = self._loss_module if index == self.num_layers else self.layers[index].module
            done = Done(given, run, Reached([], None), [])
            self._run_again(index, module, [], done, lambda given, reached: (again(given), []))
            self._proven.add((index, False))

    def _run_again(
        self,
        index: int,
        module: nn.Module | None,
        names: Sequence[str],
        done: Done,
        again: Again,
        *,
        lends: bool = False,
    ) -> None:
        """Compares with a second run; see `elaswave.engine.checks.determinism_check.check_again`."""
        if module is not None:
            self._guard(index, module)  # after an interrupt it may be the first: its parameters are in their places yet
        with self._repeating():
            check_again(self._who(index), module, names, done, again, lends=lends)

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        self._is_repeated = True
        try:
            yield
        finally:
            self._is_repeated = False

    def _seed_draws(self, microbatch: int, index: int) -> None:
        """Whatever a forward draws is keyed by what it is for."""
        parts = (self.rules.seed, self._step, microbatch, index, "forward")
        seed_everything(*parts)
        self._device.seed(key64(*parts))

    def _has_backward(self, index: int) -> bool:
        """Tells whether anything runs backward in a layer: not below the lowest that is trained."""
        return index >= self.rules.lowest_trained

    def _keeps_run(self, index: int) -> bool:
        """Tells whether a layer's outputs are needed once more: by its backward, or by the determinism check."""
        return self._has_backward(index) or (self.rules.has_determinism_check and index not in self.determinism_hashes)

    def _callable(self, index: int) -> Callable[[Any], Any]:
        module = self.layers[index].module
        return self._compiled(index, module) if self.model.layers[index].compile else module

    def _call(self, microbatch: int, train: bool) -> Call:
        """Makes a call for one run of a layer; what a part that is run again says goes to a call of its own, which is
        forgotten."""
        key = (self.rules.seed, self._step, microbatch)
        around = self._surroundings
        return Call(lambda: self._lend_batch(microbatch, train), key, around.check, around.elsewhere)

    def _lend_batch(self, microbatch: int, train: bool) -> Any:
        value = self._fetch(self._step, microbatch, train=train)
        self._borrowed.append(self._watching.watch(value))
        return value

    def _is_recomputed(self, index: int) -> bool:
        return self.rules.recompute or self.model.layers[index].recompute

    def _admit(
        self,
        index: int,
        outputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor],
        again: Callable[[], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
    ) -> None:
        """Looks at the graph of a first micro-batch. A leaf that is not the layer's own is one that it makes within the
        call, as a force field does to differentiate by it, if a second run has another one.

        Args:
            index: of the layer, or the loss.
            outputs, own: of its first run: with their graphs; parameters and inputs.
            again: runs it a second time; answers with the same.
        """
        who = self._who(index)
        found = leaves_of_others(who, outputs, own)
        if not found:
            return
        lasting = {id(leaf) for leaf in leaves_of_others(who, *again())}
        for leaf in found:
            if id(leaf) in lasting:
                refuse_leaf(who, leaf, self._parameter_names())

    def _parameter_names(self) -> dict[int, str]:
        """Maps ``id`` to the name of each parameter, of all layers that are here."""
        instances = [(each, each.build.module) for each in self.model.layers if isinstance(each.build, CopyOf)]
        return {
            id(parameter): f"parameter {layer.full_name(name)}"
            for layer, module in (*instances, *((each.spec, each.module) for each in self.layers.values()))
            for name, parameter in module.named_parameters()
        }

    # --------------------------------------------------------------------------------------------------------- backward

    def _backward_layer(self, index: int, microbatch: int, saved: Saved, reached: Reached) -> list[torch.Tensor]:
        if self._has_backward(index):
            run = self._output(index, microbatch, saved)
            found, passed_on = self._whole(index, microbatch, saved, run, reached)
        else:
            found, passed_on = self._nothing(index, microbatch, saved), []
        self._add(index, microbatch, found, saved.buffers)
        return passed_on

    def _nothing(self, index: int, microbatch: int, saved: Saved) -> Gradients:
        """Returns what a layer in which nothing runs backward brings; the determinism check looks at its forward."""
        none: Gradients = [None] * len(self.layers[index].parameters)
        if self.rules.has_determinism_check and index not in self.determinism_hashes:
            run = self._output(index, microbatch, saved)
            zeros = [torch.zeros_like(leaf) for leaf in run.leaves if is_differentiable(leaf)]
            self._prove(index, microbatch, saved, run, Reached(zeros, None), none)
        return none

    def _input_gradient(self, index: int, microbatch: int, saved: Saved, reached: Reached) -> list[torch.Tensor]:
        inputs = saved.given.inputs
        # No layer before waits for a gradient: a first half would bring nobody on earlier.
        if not inputs:
            self._left[index, microbatch] = _Deferred(saved, reached)
            return []
        run = self._output(index, microbatch, saved)
        is_compiled = self.model.layers[index].compile  # its graph is one node
        # The cut runs from one output to one input; an auxiliary loss is one more output.
        if len(inputs) > 1 or len(reached.gradients) != 1 or run.aux_losses or is_compiled:
            found, passed_on = self._whole(index, microbatch, saved, run, reached)
            self._left[index, microbatch] = _Known(saved.buffers, found)
            return passed_on
        (output,) = filter(is_differentiable, run.leaves)
        parameters, (gradient,) = self.layers[index].parameters, reached.gradients
        if self._splits.get(index, False):
            with inside(self._call(microbatch, train=True)):
                halves = input_half(output, inputs[0], parameters, gradient)
            if halves is not None:
                input_gradient, half = halves
                self._look_after_backward(index, saved.given, run)
                done = Done(saved.given, run, reached, [input_gradient])
                expected = self._check_input_half(index, microbatch, done)
                # The outputs go: the second half goes on from nodes of their graph.
                self._left[index, microbatch] = _Half(saved, run._replace(leaves=[]), half, expected)
                return zeros_where_none(inputs, [input_gradient])
        # The first time the graph stays after the whole backward, for the comparison with the halves.
        is_first = index not in self._splits
        found, passed_on = self._whole(index, microbatch, saved, run, reached, retain_graph=is_first)
        if is_first and run.lent is not None and not self._lending.lends(index):
            self._splits[index] = False  # its backward writes its copy of the input, so it cannot be compared
        elif is_first:
            with inside(self._call(microbatch, train=True)):
                answer = is_exact(output, inputs[0], parameters, gradient, [*found, *passed_on])
            # Values that are not finite tell nothing of rounding: a later micro-batch answers.
            if answer is not None:
                self._splits[index] = answer
        self._left[index, microbatch] = _Known(saved.buffers, found)
        return passed_on

    def _output(self, index: int, microbatch: int, saved: Saved) -> LayerRun:
        return saved.run or self._run_layer(index, microbatch, saved.given, train=True)

    def _whole(
        self,
        index: int,
        microbatch: int,
        saved: Saved,
        run: LayerRun,
        reached: Reached,
        *,
        retain_graph: bool = False,
    ) -> tuple[Gradients, list[torch.Tensor]]:
        """Gradients of the layer's parameters, and of its inputs (zeros where none flows)."""
        num_parameters, inputs = len(self.layers[index].parameters), saved.given.inputs
        # Here and not in the forward: their weight, the count of the loss, comes with the gradient; and another attempt
        # keeps them together with the layer's coverage, which grows in the backward.
        if run.aux_losses and not self._is_covered(index, microbatch):
            values = [self._readings.note(value) for value in run.aux_losses]
            self.scoring.note_aux_losses(index, microbatch, values, reached.weight)
        found = self._gradients(index, microbatch, run, reached, inputs, retain_graph=retain_graph)
        self._look_after_backward(index, saved.given, run)
        self._check_backward(index, microbatch, Done(saved.given, run, reached, found))
        if self.model.layers[index].compile and self._compiled.has_grown():
            self.determinism_hashes.pop(index, None)
        if self.rules.has_determinism_check and index not in self.determinism_hashes:
            self._prove(index, microbatch, saved, run, reached, found)
        return found[:num_parameters], zeros_where_none(inputs, found[num_parameters:])

    def _gradients(
        self,
        index: int,
        microbatch: int,
        run: LayerRun,
        reached: Reached,
        inputs: Sequence[torch.Tensor],
        *,
        retain_graph: bool = False,
    ) -> Gradients:
        """Gradients of the layer's parameters and of its inputs; None where none flows."""
        ends = list(zip(filter(is_differentiable, run.leaves), reached.gradients, strict=True))
        ends += [(value, torch.full_like(value, reached.weight)) for value in run.aux_losses]
        ends = [(output, gradient) for output, gradient in ends if output.requires_grad]
        wanted = [*self.layers[index].parameters, *inputs]
        if not ends or not wanted:
            return [None] * len(wanted)
        outputs, gradients = zip(*ends, strict=True)
        with inside(self._call(microbatch, train=True)):
            found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, retain_graph=retain_graph)
        check_dense(self._who(index), self.layers[index].parameter_names, found)
        return list(found)

    def _prove(
        self, index: int, microbatch: int, saved: Saved, run: LayerRun, reached: Reached, found: Gradients
    ) -> None:
        """Has the determinism check look at a layer's first micro-batch here."""
        done = Done(saved.given, run, reached, found)
        self.check_layer_again(index, microbatch, done)

        determinism_hash, is_known_by_bits = self._determinism_hash_of(index, microbatch, done)
        if self.model.layers[index].compile and not is_known_by_bits:
            raise UsageError(
                f"{self._who(index)} is to be compiled, and does not run on made-up numbers: whether it computes the "
                "same bits in every process cannot be told. Leave out compile=True"
            )
        self.determinism_hashes[index] = determinism_hash

    def _determinism_hash_of(self, index: int, microbatch: int, done: Done) -> tuple[int, bool]:
        """Computes a layer's determinism hash, and tells whether it is one of bits."""

        def from_scratch(given: LayerInputs, reached: Reached) -> tuple[LayerRun, Gradients]:
            """Runs the layer in the same way in any process at any time: nothing but shapes and types goes into it."""
            step, fetch = self._step, self._fetch
            # The inputs are fetched of the micro-batch in hand, which are there; only their types and shapes remain.
            self._step, self._fetch = 0, lambda *place, train: made_up_tree(fetch(step, microbatch, train=train))
            try:
                with self._repeating(), self.layers[index].buffers.made_up():
                    run = self._run_layer(index, 0, given, train=True)
                    return run, self._gradients(index, 0, run, reached, given.inputs)
            finally:
                self._step, self._fetch = step, fetch

        layer = self.layers[index]
        return determinism_hash_of(layer.module, layer.built, done, from_scratch)

    def check_layer_again(self, index: int, microbatch: int, done: Done) -> None:
        """Runs a layer forward and backward a second time, with its memory elsewhere; adds nothing to any sum.

        Args:
            index: of the layer.
            microbatch: of the step that is being computed.
            done: its run, whose gradients have not been added yet.
        Raises:
            UsageError: the second run has other bits, or has written what it was lent.
        """

        def again(given: LayerInputs, reached: Reached) -> tuple[LayerRun, Gradients]:
            run = self._run_layer(index, microbatch, given, train=True)
            return run, self._gradients(index, microbatch, run, reached, given.inputs)

        layer, lends = self.layers[index], self._lending.lends(index)
        self._run_again(index, layer.module, layer.parameter_names, done, again, lends=lends)

    def check_loss_again(self, microbatch: int, loss: _LossRun, found: Gradients) -> None:
        """Runs the loss forward and backward a second time, as `check_layer_again` does a layer.

        Args:
            microbatch: of the step that is being computed.
            loss: its run.
            found: the gradients of its inputs.
        Raises:
            UsageError: the second run has other bits, or has written what it was lent.
        """

        def again(given: LayerInputs, reached: Reached) -> tuple[LayerRun, Gradients]:
            scored, _ = self._run_loss(microbatch, given, loss.targets, train=True)
            return _run_of(scored), list(torch.autograd.grad(scored.total, given.inputs, allow_unused=True))

        index, done = self.num_layers, Done(loss.given, _run_of(loss.scored), Reached([], None), found)
        self._run_again(index, self._loss_module, [], done, again, lends=self._lending.lends(index))

    # ------------------------------------------------------------------------------------------------------ spot checks

    @property
    def checking_ns(self) -> int:
        """Time that spot checks of the present attempt have taken."""
        return 0 if self._spots is None else self._spots.spent_ns

    def _due(self, index: int, microbatch: int) -> CheckKind | None:
        """Tells what is checked of a place; nothing of one that is in some worker's sums already."""
        if self._spots is None or self._is_covered(index, microbatch):
            return None
        return self._spots.due(index, microbatch)

    def _check_forward(
        self, index: int, microbatch: int, given: LayerInputs, run: LayerRun, left: Sequence[torch.Tensor]
    ) -> None:
        """Checks a forward's output before it goes on: runs it again, or the layer's probe, where that is due.

        Args:
            left: in buffers.
        """
        kind = self._due(index, microbatch)
        if self._spots is None or kind is None or (kind is CheckKind.PROBE and index not in self.determinism_hashes):
            return
        self._surroundings.check()  # a check takes longer than a layer
        layer, who, done = self.layers[index], self._who(index), Done(given, run, Reached([], None), [])
        left_again: list[torch.Tensor] = []

        def again(given: LayerInputs, reached: Reached) -> tuple[LayerRun, Gradients]:
            run = self._run_layer(index, microbatch, given, train=True)
            left_again.extend(layer.buffers.left())
            return run, []

        with self._spots.aside():
            if kind is CheckKind.RUN:
                self._run_again(index, layer.module, [], done, again)
                names = [f"what it leaves in buffer {slot.name}" for slot in layer.buffers.tensors]
                check_equal(who, names, left, left_again)
            else:
                determinism_hash, is_known_by_bits = self._determinism_hash_of(index, microbatch, done)
                if is_known_by_bits:
                    check_probe(who, determinism_hash, self.determinism_hashes[index])

    def _check_backward(self, index: int, microbatch: int, done: Done) -> None:
        """Checks gradients before they go on or are added: makes them again where that is due."""
        if self._spots is not None and self._due(index, microbatch) is CheckKind.RUN:
            with self._spots.aside():
                self.check_layer_again(index, microbatch, done)

    def _check_input_half(self, index: int, microbatch: int, done: Done) -> Sequence[int] | None:
        """Does the same as `_check_backward`, but between the halves of a backward.

        Args:
            done: with the gradient of the input alone.
        Returns:
            Hashes of the gradients of parameters that the second half is to find; None where nothing is due.
        """
        if self._spots is None or self._due(index, microbatch) is not CheckKind.RUN:
            return None
        layer, expected = self.layers[index], list[int]()

        def again(given: LayerInputs, reached: Reached) -> tuple[LayerRun, Gradients]:
            run = self._run_layer(index, microbatch, given, train=True)
            *found, passed_on = self._gradients(index, microbatch, run, reached, given.inputs)
            expected.extend(hash_tensors([gradient]) for gradient in found)
            return run, [passed_on]

        with self._spots.aside():
            self._run_again(index, layer.module, [], done, again)
        return expected

    def _check_weights(self, index: int, found: Gradients, expected: Sequence[int] | None) -> None:
        """Checks the same as `_check_input_half`, but of what the second half has found."""
        if expected is not None and self._spots is not None:
            names = [f"the gradient of {name}" for name in self.layers[index].parameter_names]
            with self._spots.aside():
                check_hashes(self._who(index), names, found, expected)

    def _check_loss(self, microbatch: int, loss: _LossRun, found: Gradients) -> None:
        """Checks the loss before its gradient goes on: runs it again, or an operator of the environment, where that is
        due."""
        kind = self._due(self.num_layers, microbatch)
        if self._spots is not None and kind is not None:
            with self._spots.aside():
                if kind is CheckKind.RUN:
                    self.check_loss_again(microbatch, loss, found)
                else:
                    self._spots.check_operator()

    # ------------------------------------------------------------------------------------------------------------- sums

    def _add(self, index: int, microbatch: int, gradients: Gradients, buffers: Sequence[torch.Tensor]) -> None:
        """Adds what a layer's backward brings to its units: to its own sums, to those of what it shares with others,
        and what its forward has left in its buffers.

        Args:
            gradients: of its parameters, in their order.
            buffers: as its forward has left them.
        """
        if self._is_covered(index, microbatch):
            return  # a gradient has only passed it
        layer = self.layers[index]
        shape, num_own = layer.shape, len(layer.shape.tensors)
        self._add_to(index, index, microbatch, gradients[:num_own])
        for use, gradient in zip(shape.shared, gradients[num_own:], strict=True):
            # Each use is a term of its own, so that the sum is the same wherever the layers of the unit are cut apart.
            self._add_to(use.unit, index, microbatch, [gradient], use.use)
        if shape.buffers is not None:
            self._add_to(shape.buffers, index, microbatch, buffers)
            self._note_writes(layer, buffers)

    def _add_to(
        self, unit: int, layer: int, microbatch: int, gradients: Sequence[torch.Tensor | None], use: int = 0
    ) -> None:
        """Adds gradients to a unit, and counts them."""
        accumulator = self.accumulators[unit]
        added = accumulator.add(gradients)
        if isinstance(added, torch.Tensor):
            self._watched.append((microbatch, layer, self._readings.note(added)))
        elif not added:
            self._note_nonfinite(microbatch, layer)
        # Also where nothing was added since it is not finite: the vote is to tell of that, not of a micro-batch that is
        # missing.
        accumulator.coverage = (accumulator.coverage + coverage_key(unit, microbatch, use)) & MASK64
        accumulator.covered[use] = accumulator.covered.get(use, 0) | 1 << microbatch
        self.counts[unit, microbatch] = self.counts.get((unit, microbatch), 0) + 1

    def _is_covered(self, layer: int, microbatch: int) -> bool:
        """Tells whether it is in some worker's sums already; the loss is one past the last layer."""
        return bool(self._covered) and bool(self._covered[layer] >> microbatch & 1)

    def _note_writes(self, layer: FlatLayer, left: Sequence[torch.Tensor]) -> None:
        for slot, (first, second) in zip(layer.buffers.tensors, layer.buffers.writes(left), strict=True):
            before = self.writes.get(slot.id, (first, second))
            self.writes[slot.id] = (max(before[0], first), max(before[1], second))

    # ------------------------------------------------------------------------------------------------------------- loss

    def _forward_loss(self, microbatch: int, output: Any, targets: Any, train: bool, keeps: bool) -> None:
        index = self.num_layers
        # A loss that some worker has kept counts there (S1); here it only has to make the gradient.
        counts = not train or not self._is_covered(index, microbatch)
        with self._at(microbatch, index):
            given = self._given(index, output, train)
            scored, lent = self._run_loss(microbatch, given, targets, train)
            if train and given.inputs and not scored.total.requires_grad:
                raise UsageError(
                    "the loss returned a tensor without a graph, so nothing could be trained: compute it from the "
                    "last layer's output by torch's operations, without detach(), torch.no_grad() or numbers in between"
                )
            if train and (index, train) not in self._admitted:

                def again() -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
                    return [self._run_loss(microbatch, given, targets, train)[0].total], given.leaves

                self._admit(index, [scored.total], given.leaves, again)
                self._admitted.add((index, train))
            if not train:
                self._prove_evaluation(
                    index,
                    given,
                    _run_of(scored),
                    lambda given: _run_of(self._run_loss(microbatch, given, targets, train=False)[0]),
                )
            # Not before: an interrupt may come out of any run of the loss, and what is noted does not run again.
            if counts:
                self.scoring.note(microbatch, scored)
            if self.model.metrics and counts:
                self.scoring.measure(microbatch, output, targets)
        if train and keeps:
            self._losses[microbatch] = _LossRun(given, scored, lent, targets)
        if train and counts:
            self.counts[LOSS, microbatch] = self.counts.get((LOSS, microbatch), 0) + 1
            self._watched.append((microbatch, index, self.scoring.scored[microbatch]))

    def _run_loss(self, microbatch: int, given: LayerInputs, targets: Any, train: bool) -> tuple[Scored, Lent]:
        index, call = self.num_layers, self._call(microbatch, train)
        self._seed_draws(microbatch, index)
        guard = None if self._loss_module is None else self._guard(index, self._loss_module)
        with inside(call), torch.set_grad_enabled(train or index in self._needs_graph):
            lent = self._lending.lend(index, given.leaves, train=train)
            try:
                argument = unflatten(given.structure, lent.leaves)
                scored = self.scoring.loss(argument, targets)
            except RuntimeError as error:
                if not self._begins_to_need_a_graph(index, given, error):
                    raise
                return self._run_loss(microbatch, given, targets, train)
        if call.aux_losses:
            raise UsageError("aux_loss was called in the loss: add the value to what the loss returns")
        self._look(index, given, lent, train=train, is_over=not train)
        if guard is not None and (name := guard.written(elsewhere=self._is_repeated)) is not None:
            refuse_writing_loss(name)
        return scored, lent

    @property
    def _loss_module(self) -> nn.Module | None:
        return self.model.loss if isinstance(self.model.loss, nn.Module) else None

    def _backward_loss(self, microbatch: int) -> Reached:
        index, loss = self.num_layers, self._losses[microbatch]
        inputs = loss.given.inputs
        with self._at(microbatch, index):
            found = loss.found
            if found is None:
                found = list(torch.autograd.grad(loss.scored.total, inputs, allow_unused=True))
                self._look(index, loss.given, loss.lent, train=True, is_over=True)
                self._losses[microbatch] = loss._replace(found=found)  # a check may be interrupted
            self._check_loss(microbatch, loss, found)
            if self.rules.has_determinism_check and (index, True) not in self._proven:
                self.check_loss_again(microbatch, loss, found)
                self._proven.add((index, True))
        del self._losses[microbatch]
        return Reached(zeros_where_none(inputs, found), loss.scored.count)

    def look_at_late(self) -> None:
        """Waits for the device, and refuses what was written there since this was called before.

        Raises:
            LayerError: names the first.
        """
        if (late := self._watching.late()) is not None:
            (microbatch, layer), message = late
            raise LayerError(self.place(microbatch, layer), UsageError(message))

    def _note_nonfinite(self, microbatch: int, layer: int) -> None:
        """Keeps the first in the order (micro-batch, loss first, last layer first)."""
        found = NonFinite(microbatch, layer)
        if self._nonfinite is None or (found.microbatch, -found.layer) < (
            self._nonfinite.microbatch,
            -self._nonfinite.layer,
        ):
            self._nonfinite = found

    # ------------------------------------------------------------------------------------------------------------ names

    def fence_bypasses(self) -> dict[str, int]:
        """Counts the tensors that have passed a fence as they were, since they were not finite, by fence and
        direction."""
        found = {} if self.fences is None else self.fences.bypassed
        return {
            f"{Fence(self.layer_name(boundary), self.model.fences[boundary])} {direction}": count
            for (boundary, direction), count in sorted(found.items())
        }

    def layer_name(self, layer: int) -> str:
        """Returns the name of a layer, "loss" for the one past the last."""
        return self.model.layers[layer].name if layer < self.num_layers else "loss"

    def _who(self, index: int) -> str:
        return f"layer {self.layer_name(index)}" if index < self.num_layers else "the loss"

    def _boundary_name(self, boundary: int) -> str:
        return "the model is given" if boundary < 0 else f"{self._who(boundary)} returns"

    def _at(self, microbatch: int, layer: int) -> "_Located":
        return _Located(self, microbatch, layer)

    def place(self, microbatch: int, layer: int) -> ErrorPlace:
        """Tells where the computation of a layer stands."""
        return ErrorPlace(self._step, microbatch, layer, self.layer_name(layer))


def _run_of(scored: Scored) -> LayerRun:
    """Makes of a run of the loss one of a layer."""
    counts = [] if scored.count is None else [torch.tensor(scored.count)]
    return LayerRun(TENSOR, [scored.total, *counts], [])


class _Located:
    """Adds the place to an exception that is raised inside, as a context manager; a class for the same reason as
    `inside`."""

    __slots__ = ("_compute", "_layer", "_microbatch")

    def __init__(self, compute: Compute, microbatch: int, layer: int) -> None:
        self._compute, self._microbatch, self._layer = compute, microbatch, layer

    def __enter__(self) -> None:
        self._compute._watching.at = (self._microbatch, self._layer)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        # Also sys.exit and an interrupt that the layer raises. What ends a wait of the worker within `elaswave.batch`
        # is none of the layer's.
        if error is not None and not isinstance(error, CommError | BatchError):
            raise LayerError(self._compute.place(self._microbatch, self._layer), error) from error
