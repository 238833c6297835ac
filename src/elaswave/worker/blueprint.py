"""What every worker of a run derives from its configuration and its training: the model, and all of `RunPlan`."""

from pathlib import Path

import torch

from elaswave.config.schema import Config
from elaswave.data.sampler import Sampler
from elaswave.models.layers import ModelSpec
from elaswave.state.checkpoint_format import EMA, MASTER
from elaswave.state.flat import model_shapes
from elaswave.state.shapes import StateShapes, with_states
from elaswave.training.builtin import builtin_training
from elaswave.training.definition import Samples, Training
from elaswave.training.tokens import sampler_of
from elaswave.worker.run_plan import RunPlan


class Blueprint(RunPlan):
    """Everything about a run that follows from its configuration and what is trained.

    Args:
        config: with its layout resolved.
        training: what is trained; None: what the configuration describes.
    """

    def __init__(self, config: Config, training: Training | None = None) -> None:
        self.training = training = training or builtin_training(config)
        layers = training.model.layers
        shapes = model_shapes(training.model)
        self.optimizer = optimizer = training.make_optimizer(shapes)
        names = tuple(layer.name for layer in layers)
        averages = (EMA,) if config.optimizer.ema_decay else ()
        # What is there before the first update comes first: what comes with it is added at the end.
        slots = (MASTER, *averages, *optimizer.slots)
        shapes = with_states(optimizer.shapes(shapes), averages)
        super().__init__(config, StateShapes(names, shapes, slots, optimizer.late))

    @property
    def model(self) -> ModelSpec:
        """Layers and loss."""
        return self.training.model

    @property
    def dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return self.training.dtype

    def open_samples(self, cache_dir: Path) -> Samples:
        """The data of the run.

        Args:
            cache_dir: where generated text is kept.
        """
        return self.training.open_samples(cache_dir)

    def sampler(self, samples: Samples) -> Sampler:
        """Which samples make up which micro-batch of training."""
        return sampler_of(self.config, samples.num_samples("train"), samples.sources)
