"""What every worker of a run derives from its configuration and its training: the model, and all of `RunPlan`."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from elaswave.blocks.shapes import StateShapes, with_states
from elaswave.checkpoints.format import EMA, MASTER
from elaswave.config.schema import Config
from elaswave.data.sampler import Sampler
from elaswave.engine.admission import build_as_described
from elaswave.errors import UsageError
from elaswave.job.plan import RunPlan
from elaswave.models.foreign.layer import check_kinds
from elaswave.models.layers import ModelSpec
from elaswave.state.flat import FlatLayer, FlatUnit, model_shapes
from elaswave.training.builtin import builtin_training
from elaswave.training.definition import Samples, Training
from elaswave.training.tokens import sampler_of


class Blueprint(RunPlan):
    """Everything about a run that follows from its configuration and what is trained.

    Args:
        config: with its layout resolved.
        training: what is trained; None: what the configuration describes.
    Raises:
        UsageError: nothing of the model is trained.
    """

    def __init__(self, config: Config, training: Training | None = None) -> None:
        self.training = training = training or builtin_training(config)
        layers = training.model.layers
        every = model_shapes(training.model)
        shapes = tuple(shape for shape in every if not shape.is_buffers)
        buffers = every[len(shapes) :]  # the last units; no optimizer knows of them
        self.optimizer = optimizer = training.make_optimizer(shapes)
        names = tuple(layer.name for layer in layers)
        averages = (EMA,) if config.optimizer.ema_decay else ()
        # What is there before the first update comes first: what comes with it is added at the end.
        slots = (MASTER, *averages, *optimizer.slots)
        shapes = with_states(optimizer.shapes(shapes), averages) + buffers
        self.frozen: Mapping[str, torch.Tensor] = {}
        """Values of frozen parameters that are not as built, by full name; see `elaswave.engine.frozen`."""
        super().__init__(config, StateShapes(names, shapes, slots, optimizer.late))
        if self.state.lowest_trained == len(names):
            raise UsageError(
                "no parameter of the model requires a gradient, so there is nothing to train: call requires_grad_() on "
                "what is to be trained, or use Trainer.evaluate"
            )

    @property
    def model(self) -> ModelSpec:
        """Layers and loss."""
        return self.training.model

    @property
    def dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return self.training.dtype

    def build(self, index: int) -> nn.Module:
        """A layer's module with its initial values.

        Args:
            index: its position in the model.
        Raises:
            UsageError: it cannot be built, is another one than for its shapes, or has foreign parts of another kind
                than the run was begun with.
        """
        layer = self.model.layers[index]
        module = build_as_described(layer, self.config.run.seed, index, self.shapes)
        check_kinds(layer.name, module, self.config.model.foreign)
        return module

    def flat_layer(
        self,
        index: int,
        units: Mapping[int, FlatUnit],
        module: nn.Module | None = None,
        place: torch.device | None = None,
    ) -> FlatLayer:
        """A layer, as `FlatLayer` makes it.

        Args:
            index: its position in the model.
            units: the shared units that are here.
            module: built before; None: it is built.
            place: where it computes; None: in the host's memory.
        """
        return FlatLayer(
            self.model.layers[index],
            self.shapes[index],
            self.dtype,
            units=units,
            module=self.build(index) if module is None else module,
            frozen=self.frozen,
            place=place,
        )

    def open_samples(self, cache_dir: Path) -> Samples:
        """The data of the run.

        Args:
            cache_dir: where generated text is kept.
        """
        return self.training.open_samples(cache_dir)

    def sampler(self, samples: Samples) -> Sampler:
        """Which samples make up which micro-batch of training."""
        return sampler_of(self.config, samples.num_samples("train"), samples.sources)
