"""What every worker derives from the configuration alone: the model, and everything of `RunPlan`."""

import torch

from elaswave.config.schema import Config
from elaswave.models.layers import ModelSpec
from elaswave.models.registry import build_model
from elaswave.state.checkpoint_format import MASTER
from elaswave.state.flat import model_shapes
from elaswave.state.shapes import StateShapes
from elaswave.worker.optimizer import OPTIMIZERS
from elaswave.worker.run_plan import RunPlan

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Blueprint(RunPlan):
    """Everything about a run that follows from its configuration, its model included.

    Args:
        config: with its layout resolved.
    """

    def __init__(self, config: Config) -> None:
        model = config.model
        self.model: ModelSpec = build_model(
            model.family,
            vocab_size=config.data.resolved_vocab_size,
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_heads=model.num_heads,
            context_length=model.context_length,
            dropout=model.dropout,
            num_kv_heads=model.num_kv_heads,
            intermediate_size=model.intermediate_size,
            rope_theta=model.rope_theta,
        )
        layers = self.model.layers
        slots = (MASTER, *OPTIMIZERS[config.optimizer.name](config.optimizer).slots)
        super().__init__(config, StateShapes(tuple(layer.name for layer in layers), model_shapes(self.model), slots))

    @property
    def dtype(self) -> torch.dtype:
        """What forward and backward compute in."""
        return DTYPES[self.config.model.dtype]
