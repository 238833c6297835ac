"""A script's callbacks: each committed step once, in order, whatever becomes of coordinators. No IO."""

from collections.abc import Callable, Mapping, Sequence


class StepCalls:
    """Calls back for committed steps.

    A coordinator may die before it has told of a step, and its successor tells of later ones: those wait until the
    missing one has been told of too.

    Args:
        call: takes step, loss and metrics.
    """

    def __init__(self, call: Callable[[int, float, Mapping[str, float]], None]) -> None:
        self.last_step = 0
        """The newest step that was called for, or that the job began after."""
        self.error: Exception | None = None
        """What a call has raised; nothing is called any more."""
        self._call = call
        self._waiting: dict[int, tuple[float, Mapping[str, float]]] = {}

    def begin(self, step: int) -> None:
        """The job begins after this step."""
        self.last_step = step

    def published(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """A step was committed; may be said again, and before a step that came before it."""
        if step <= self.last_step or self.error is not None:
            return
        self._waiting[step] = loss, metrics
        while self.last_step + 1 in self._waiting:
            self.last_step += 1
            try:
                self._call(self.last_step, *self._waiting.pop(self.last_step))
            except Exception as error:
                self.error = error
                return

    def finish(self, losses: Sequence[float], metrics: Mapping[str, Sequence[float]]) -> None:
        """Calls back for steps that no coordinator has told of.

        Args:
            losses: of every step from the first one.
            metrics: of the same steps by name.
        """
        for step, loss in enumerate(losses, 1):
            self.published(step, loss, {name: values[step - 1] for name, values in metrics.items()})

    def raise_error(self) -> None:
        """Raises what a call has raised, if one has: the job has ended because of it."""
        if self.error is not None:
            raise self.error
