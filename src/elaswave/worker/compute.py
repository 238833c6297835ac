"""The computation of one worker: forward and backward of layers, one autograd graph per layer.

Graphs end at every layer boundary, whether or not a stage ends there, and what crosses a boundary is contiguous and
64-byte aligned. So the bits of a layer's outputs and gradients do not depend on which other layers share its worker.
A backward runs whole (B), or in two halves (I, W) with the same bits. No communication here; the executor moves
tensors between workers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from elaswave.hashing import MASK64
from elaswave.models.layers import ModelSpec
from elaswave.protocol.ballot import NonFinite, coverage_key
from elaswave.state.flat import FlatLayer
from elaswave.state.sums import Accumulator
from elaswave.worker.random_state import seed_everything
from elaswave.worker.split import Gradients, WeightHalf, input_half, is_exact


class ErrorPlace(NamedTuple):
    """Where a computation stands, for error messages."""

    step: int
    microbatch: int
    layer: int
    layer_name: str

    def __str__(self) -> str:
        return f"step {self.step}, micro-batch {self.microbatch}, layer {self.layer} ({self.layer_name})"


class SamplesPlace(NamedTuple):
    """Samples that could not be loaded, for error messages."""

    step: int
    microbatch: int
    split: str
    samples: tuple[int, ...]

    def __str__(self) -> str:
        what = "samples" if self.split == "train" else f"{self.split} samples"
        return f"step {self.step}, micro-batch {self.microbatch}, {what} {', '.join(map(str, self.samples))}"


class LayerError(Exception):
    """An exception inside a user's layer, loss or dataset, with the position where it was raised; its cause is the
    original."""

    def __init__(self, position: ErrorPlace | SamplesPlace, cause: BaseException) -> None:
        self.position = position
        super().__init__(f"{type(cause).__name__}: {cause} (at {position})")


def at_boundary(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous and 64-byte aligned, else such a copy.

    Kernels round differently on other strides and alignments.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % 64 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class _Saved(NamedTuple):
    """What one layer keeps between forward and backward."""

    input: torch.Tensor
    output: torch.Tensor | None
    """None where the layer is recomputed."""


class _Deferred(NamedTuple):
    """A layer without a gradient of its input: all of its backward is left to W."""

    saved: _Saved
    gradient: torch.Tensor


class Compute:
    """Runs layers [start, ...) of a stage for single micro-batches and adds up their gradients.

    Args:
        model: the whole model's layers and loss.
        layers: the materialised layers of this worker, by layer index.
        accumulators: one per materialised layer.
        seed: the run's seed.
        recompute: keep only layer inputs and run each layer again in backward.
        between_layers: called after each layer, so that transfers make progress while this worker computes.
    """

    def __init__(
        self,
        model: ModelSpec,
        layers: Mapping[int, FlatLayer],
        accumulators: Mapping[int, Accumulator],
        *,
        seed: int,
        recompute: bool,
        between_layers: Callable[[], None],
    ) -> None:
        self.model = model
        self.layers = layers
        self.accumulators = accumulators
        self.losses: dict[int, float] = {}
        """Loss of each micro-batch whose last layer ran here, in nats per token."""
        self.counts: dict[tuple[int, int], int] = {}
        """How often (layer, micro-batch) was added; names the culprit when coverage fails."""
        self.nonfinite: NonFinite | None = None
        self._seed = seed
        self._recompute = recompute
        self._between_layers = between_layers
        self._step = 0
        self._saved: dict[tuple[int, int], _Saved] = {}
        self._loss_inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._left: dict[tuple[int, int], WeightHalf | _Deferred | Gradients] = {}
        """What W has to do, or what is already known, of each layer and micro-batch between I and W."""
        self._splits: dict[int, bool] = {}
        """Whether the halves of a layer's backward have the bits of the whole; found out at its first one."""

    @property
    def coverage(self) -> int:
        """Sum of `coverage_key` over everything added, modulo 2**64."""
        return sum(accumulator.coverage for accumulator in self.accumulators.values()) & MASK64

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return len(self.model.layers)

    def begin(self, step: int, exponents: Sequence[Sequence[int]]) -> None:
        """Empties everything for a new attempt of a step.

        Args:
            exponents: grid exponents per layer of the model and tensor of the layer.
        """
        self._step = step
        self.losses.clear()
        self.counts.clear()
        self.nonfinite = None
        self._saved.clear()
        self._loss_inputs.clear()
        self._left.clear()
        for index, accumulator in self.accumulators.items():
            accumulator.reset(exponents[index])

    def forward(
        self, layers: range, microbatch: int, value: torch.Tensor, targets: torch.Tensor | None, *, train: bool = True
    ) -> torch.Tensor:
        """Runs layers in order; after the model's last layer also the loss.

        Args:
            layers: the hop's layers, all materialised here.
            microbatch: index in the global batch.
            value: input of the first of them: int64 tokens, or an activation.
            targets: int64 targets where the last of them is the model's last, else None.
            train: keep what backward needs (False: evaluation).
        Returns:
            The last layer's output, detached.
        """
        for index in layers:
            value = at_boundary(value.detach())
            if train and value.is_floating_point():
                value.requires_grad_(True)
            with self._at(microbatch, index):
                output = self._run_layer(index, microbatch, value, train)
            if train:
                self._saved[index, microbatch] = _Saved(value, None if self._recompute else output)
            value = output.detach()
            self._between_layers()
        if layers.stop == self.num_layers:
            assert targets is not None
            self._forward_loss(microbatch, at_boundary(value), targets, train)
        return at_boundary(value)

    def backward(self, layers: range, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Runs layers backward and adds their parameters' gradients to the accumulators.

        Args:
            layers: the hop's layers.
            microbatch: index in the global batch.
            gradient: of the last layer's output; None where the loss is here.
        Returns:
            The gradient of the first layer's input; None for integer inputs.
        """
        return self._back(layers, microbatch, gradient, self._backward_layer)

    def backward_input(self, layers: range, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The first half of a backward (I): as `backward`, but leaves parameters' gradients to `backward_weights`.

        Layers that are fed with tokens have no gradient of their input: there everything is left.
        """
        return self._back(layers, microbatch, gradient, self._input_gradient)

    def backward_weights(self, layers: range, microbatch: int) -> None:
        """The second half of a backward (W): adds the parameters' gradients to the accumulators.

        Args:
            layers, microbatch: as `backward_input` was called with.
        """
        for index in reversed(layers):
            left = self._left.pop((index, microbatch))
            with self._at(microbatch, index):
                if isinstance(left, WeightHalf):
                    self._add(index, microbatch, left.run())
                elif isinstance(left, _Deferred):
                    self._backward_layer(index, microbatch, *left)
                else:
                    self._add(index, microbatch, left)
            self._between_layers()

    def _back(
        self,
        layers: range,
        microbatch: int,
        gradient: torch.Tensor | None,
        one_layer: Callable[[int, int, _Saved, torch.Tensor], torch.Tensor | None],
    ) -> torch.Tensor | None:
        if layers.stop == self.num_layers:
            gradient = self._backward_loss(microbatch)
        result: torch.Tensor | None = gradient
        for index in reversed(layers):
            saved = self._saved.pop((index, microbatch))
            assert result is not None
            with self._at(microbatch, index):
                result = one_layer(index, microbatch, saved, at_boundary(result))
            self._between_layers()
        return result

    def _run_layer(self, index: int, microbatch: int, value: torch.Tensor, train: bool) -> torch.Tensor:
        layer = self.layers[index]
        if layer.module.training is not train:
            layer.module.train(train)
        seed_everything(self._seed, self._step, microbatch, index, "forward")
        with torch.set_grad_enabled(train):
            output: torch.Tensor = layer.module(value)
        return output

    def _backward_layer(
        self, index: int, microbatch: int, saved: _Saved, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        *found, input_gradient = self._whole(index, saved, self._output(index, microbatch, saved), gradient)
        self._add(index, microbatch, found)
        return self._passed_on(saved, input_gradient)

    def _input_gradient(
        self, index: int, microbatch: int, saved: _Saved, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        if not saved.input.requires_grad:
            self._left[index, microbatch] = _Deferred(saved, gradient)
            return None
        parameters = self.layers[index].parameters
        output = self._output(index, microbatch, saved)
        if self._splits.get(index, False):
            halves = input_half(output, saved.input, parameters, gradient)
            if halves is not None:
                input_gradient, self._left[index, microbatch] = halves
                return self._passed_on(saved, input_gradient)
        is_first = index not in self._splits
        *found, input_gradient = whole = self._whole(index, saved, output, gradient, retain_graph=is_first)
        if is_first:
            answer = is_exact(output, saved.input, parameters, gradient, whole)
            if answer is not None:
                self._splits[index] = answer
        self._left[index, microbatch] = found
        return self._passed_on(saved, input_gradient)

    def _output(self, index: int, microbatch: int, saved: _Saved) -> torch.Tensor:
        return self._run_layer(index, microbatch, saved.input, train=True) if saved.output is None else saved.output

    def _whole(
        self, index: int, saved: _Saved, output: torch.Tensor, gradient: torch.Tensor, *, retain_graph: bool = False
    ) -> Gradients:
        """Gradients of the layer's parameters and, last, of its input (None where it has none)."""
        wanted: list[torch.Tensor] = list(self.layers[index].parameters)
        if saved.input.requires_grad:
            wanted.append(saved.input)
        found: Gradients = []
        if wanted:
            found += torch.autograd.grad(output, wanted, gradient, allow_unused=True, retain_graph=retain_graph)
        return found if saved.input.requires_grad else [*found, None]

    def _add(self, index: int, microbatch: int, gradients: Gradients) -> None:
        """Adds a layer's gradients, all or nothing, and counts them."""
        accumulator = self.accumulators[index]
        if not accumulator.add(gradients):
            self._note_nonfinite(microbatch, index)
        accumulator.coverage = (accumulator.coverage + coverage_key(index, microbatch)) & MASK64
        self.counts[index, microbatch] = self.counts.get((index, microbatch), 0) + 1

    @staticmethod
    def _passed_on(saved: _Saved, input_gradient: torch.Tensor | None) -> torch.Tensor | None:
        if not saved.input.requires_grad:
            return None
        return torch.zeros_like(saved.input) if input_gradient is None else at_boundary(input_gradient)

    def _forward_loss(self, microbatch: int, output: torch.Tensor, targets: torch.Tensor, train: bool) -> None:
        with self._at(microbatch, self.num_layers):
            seed_everything(self._seed, self._step, microbatch, self.num_layers, "forward")
            output = output.detach().requires_grad_(train)
            with torch.set_grad_enabled(train):
                loss = self.model.loss(output, targets)
            value = float(loss.detach())
        self.losses[microbatch] = value
        if train:
            self._loss_inputs[microbatch] = (output, loss)
            if value - value != 0.0:
                self._note_nonfinite(microbatch, self.num_layers)

    def _backward_loss(self, microbatch: int) -> torch.Tensor:
        output, loss = self._loss_inputs.pop(microbatch)
        with self._at(microbatch, self.num_layers):
            return torch.autograd.grad(loss, output)[0]

    def _note_nonfinite(self, microbatch: int, layer: int) -> None:
        """Keeps the first in the order (micro-batch, loss first, last layer first)."""
        found = NonFinite(microbatch, layer)
        if self.nonfinite is None or (found.microbatch, -found.layer) < (
            self.nonfinite.microbatch,
            -self.nonfinite.layer,
        ):
            self.nonfinite = found

    def layer_name(self, layer: int) -> str:
        """Name of a layer, "loss" for the one past the last."""
        return self.model.layers[layer].name if layer < self.num_layers else "loss"

    @contextmanager
    def _at(self, microbatch: int, layer: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            position = ErrorPlace(self._step, microbatch, layer, self.layer_name(layer))
            raise LayerError(position, error) from error
