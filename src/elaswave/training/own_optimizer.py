"""The optimizer that a person brings: a callable that makes a `torch.optim.Optimizer` of parameters."""

import threading
from collections.abc import Callable, Iterable

import torch

from elaswave.blocks.shapes import LayerShape, TensorSlot, all_tensors
from elaswave.checkpoints.format import MASTER
from elaswave.errors import OptimizerError
from elaswave.training.elementwise import Tried, try_out
from elaswave.training.parameters import Parameters, make_optimizer, stand_ins
from elaswave.training.torch_optimizer import MakeScheduler, TorchUpdater


class OwnOptimizer:
    """Makes the optimizer of a `elaswave.training.definition.Training` from a person's callables.

    The forkserver calls it first, which tries the optimizer; the processes that it forks have what was found.

    Args:
        factory: makes a `torch.optim.Optimizer` of `Parameters`.
        scheduler: makes one of `torch.optim.lr_scheduler` of that; None: options stay as they are.
    """

    def __init__(
        self, factory: Callable[[Parameters], torch.optim.Optimizer], scheduler: MakeScheduler | None = None
    ) -> None:
        self._factory, self.make_scheduler = factory, scheduler
        self._found: dict[tuple[LayerShape, ...], TorchOptimizer] = {}
        self._lock = threading.Lock()

    def __call__(self, shapes: tuple[LayerShape, ...]) -> "TorchOptimizer":
        """Returns the optimizer of a model.

        Args:
            shapes: of the model.
        Raises:
            OptimizerError: it cannot be used.
        """
        with self._lock:
            if shapes not in self._found:
                self._found[shapes] = TorchOptimizer(self._factory, self.make_scheduler, trained(shapes))
            return self._found[shapes]

    def __getstate__(self) -> dict[str, object]:
        return {"factory": self._factory, "scheduler": self.make_scheduler}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__init__(**state)  # type: ignore[misc]


def trained(shapes: Iterable[LayerShape]) -> tuple[TensorSlot, ...]:
    """Lists the tensors that an optimizer updates, in the order of the model."""
    return all_tensors(tuple(shapes))


class TorchOptimizer:
    """See `elaswave.training.optimizer.Optimizer` for what its methods promise.

    Args:
        factory, scheduler: as of `OwnOptimizer`.
        tensors: that it updates.
    Raises:
        OptimizerError: it cannot be used.
    """

    def __init__(
        self,
        factory: Callable[[Parameters], torch.optim.Optimizer],
        scheduler: MakeScheduler | None,
        tensors: tuple[TensorSlot, ...],
    ) -> None:
        if not tensors:
            raise OptimizerError("there is nothing to train: no layer has a parameter that requires a gradient")
        self._factory, self._scheduler, self._tensors = factory, scheduler, tensors
        self._tried: Tried = try_out(factory, tensors)
        self.slots: tuple[str, ...] = self._tried.slots
        self.late: tuple[str, ...] = self._tried.late
        self.given = self._try_checkpoint()
        """Its options, and those of its scheduler, as they are made; see `elaswave.training.given`."""

    def shapes(self, shapes: tuple[LayerShape, ...]) -> tuple[LayerShape, ...]:
        """Returns the shapes with group and states of each tensor."""
        return tuple(
            shape._replace(tensors=tuple(self._with_states(slot) for slot in shape.tensors)) for shape in shapes
        )

    def _with_states(self, slot: TensorSlot) -> TensorSlot:
        group = self._tried.groups.get(slot.name)
        if group is None:
            return slot
        traits = self._tried.traits[group]
        # Of a tensor without elements no block says anything.
        return slot._replace(group=group, states=(MASTER, *traits.states), scalars=traits.scalars if slot.numel else ())

    def initial(self, slot: str, tensor: TensorSlot) -> float:
        """Returns the value as the optimizer's constructor has it."""
        return self._tried.traits[tensor.group].fills.get(slot, 0.0)

    def updater(self) -> TorchUpdater:
        """Calls the person's callables."""
        optimizer = make_optimizer(self._factory, stand_ins(self._tensors))
        return TorchUpdater(optimizer, self._tried.traits, self.slots, self._scheduler)

    def _try_checkpoint(self) -> dict[str, str]:
        """Keeps and loads what a checkpoint will hold, once, before anything depends on it; gives its options."""
        one, other = self.updater(), self.updater()
        given = one.given()
        try:
            other.load(one.state(), 0)
        except Exception as error:
            raise OptimizerError(
                "the state of the optimizer or its scheduler cannot be kept in a checkpoint: "
                f"{type(error).__name__}: {error}; options and the scheduler's state_dict() must be plain values"
            ) from error
        return given
