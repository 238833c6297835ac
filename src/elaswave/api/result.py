"""What a training gives to its script: losses, digest, recoveries, and the weights."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from elaswave.api.export import stored_weights
from elaswave.checkpoints.checkpoint import checkpoint_of_step
from elaswave.errors import UsageError
from elaswave.models.admission import without_values
from elaswave.models.layers import Layer
from elaswave.observability.result import Recovery, RunResult, from_json_float


class Result:
    """A training that has ended.

    Args:
        run_dir: folder of the run.
        record: what ``result.json`` holds.
        layers: of the model.
    """

    def __init__(self, run_dir: Path, record: RunResult, layers: tuple[Layer, ...]) -> None:
        self.run_dir = run_dir
        self.record = record
        """Everything that ``result.json`` holds."""
        self._layers = layers

    def __repr__(self) -> str:
        loss = f", loss {self.losses[-1]:.4f}" if self.losses else ""
        return f"<Result of {self.record.steps} steps{loss}, state {self.state_digest}, in {self.run_dir}>"

    @property
    def losses(self) -> list[float]:
        """Mean loss of every step from the first one, also after a resume."""
        return [from_json_float(loss) for loss in self.record.losses]

    @property
    def val_losses(self) -> dict[int, float]:
        """Loss on the evaluation dataset, by the step after which it was measured."""
        return dict(zip(self.record.val_steps, map(from_json_float, self.record.val_losses), strict=True))

    @property
    def state_digest(self) -> str:
        """Hash of the final state; equal for the same computation under any layout and through any failure."""
        return self.record.state_digest

    @property
    def recoveries(self) -> list[Recovery]:
        """What happened to workers, and how training went on."""
        return list(self.record.recoveries)

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Returns the final weights, under the names that ``nn.Sequential`` of all layers gives them, in the layers'
        type.

        They are read from the run's last checkpoint, with persistent buffers and frozen parameters. A tied tensor is
        there under each of its names. What a module's ``get_extra_state`` returns is as the module has it now.

        Args:
            ema: their moving average instead, which ``optimizer.ema_decay`` keeps.
        Raises:
            CheckpointError: the run folder lacks the checkpoint of the last step, or it is damaged, or has no average.
        """
        weights = stored_weights(checkpoint_of_step(self.run_dir, self.record.steps), ema=ema).tensors
        ties = {layer.full_name(name): target for layer in self._layers for name, target in layer.ties.items()}
        state: dict[str, torch.Tensor] = {}
        for layer in self._layers:
            first: dict[int, str] = {}
            for name, value in without_values(layer).state_dict(keep_vars=True).items():
                full = layer.full_name(name)
                if layer.keeps_names and name in layer.ties:  # the network has it under its own names
                    continue
                if name.rpartition(".")[2] == "_extra_state":  # of get_extra_state: no state of the training
                    state[full] = value
                    continue
                known = first.setdefault(id(value), full)  # a tensor may have several names in a layer
                state[full] = weights[ties.get(known, known)].to(value.dtype)
        return state

    def load_into(self, model: nn.Module | Sequence[nn.Module], *, ema: bool = False) -> None:
        """Copies the final weights into a model, every one of them.

        Args:
            model: the ``nn.Sequential`` of all layers, a module with the same names, or the list of layers.
            ema: as of `state_dict`.
        Raises:
            UsageError: a list of other things than one module for each layer.
            RuntimeError: names or shapes differ, as ``load_state_dict`` says it.
            CheckpointError: as `state_dict`.
        """
        if isinstance(model, nn.Module):
            model.load_state_dict(self.state_dict(ema=ema), strict=True)
            return
        modules = list(model)
        if len(modules) != len(self._layers) or not all(isinstance(module, nn.Module) for module in modules):
            shown = ", ".join(type(module).__name__ for module in modules)
            raise UsageError(
                f"weights of {len(self._layers)} layers are to be loaded into [{shown}]; give one module for each "
                "layer (what a Layer's build makes), or an nn.Sequential of all"
            )
        state = self.state_dict(ema=ema)
        for layer, module in zip(self._layers, modules, strict=True):
            prefix = f"{layer.name}."
            own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            module.load_state_dict(own, strict=True)
