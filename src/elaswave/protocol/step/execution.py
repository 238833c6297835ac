"""How a worker carries out programs: actions in order, tensors along the routes, and small all-reduces.

The program decides the order, the routes decide the partners; nothing here decides anything. What is received is waited
for only by the action that uses it. No torch, IO, clocks or threads.

Every method that can wait is a generator of `Wait`; its `Pause.MOMENT` stands before each action.
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from elaswave.planning.programs.layout import evaluation_layout
from elaswave.protocol.step.ballot import add_words
from elaswave.protocol.step.engine import C, Engine, FrameKind, JobTerms, Key, Links, Pause, StepObserver, Wait
from elaswave.protocol.step.salvage import Partial, Todo, todos_of
from elaswave.protocol.step.scores import Means, means_of, score_words
from elaswave.protocol.step.traffic import adds_gradients, contributions, doubling, parts_of, units_by_layer
from elaswave.types import Action, ExecutionParameters, Hop, Layout, Program

T = TypeVar("T")
Life = Generator[Wait, None, T]
"""Something that a worker does, and may have to wait in."""


class Execution(Generic[C]):
    """Carries out the programs of one worker.

    Args:
        worker: its id.
        terms: what is known of the job.
        engine: its numbers, with the layers of the layout.
        links: its links to the others.
        observer: is told what happens.
        layout, execution: in force.
        copies: the blocks held at the last committed step.
    """

    def __init__(
        self,
        worker: int,
        terms: JobTerms,
        engine: Engine[C],
        links: Links,
        observer: StepObserver,
        layout: Layout,
        execution: ExecutionParameters,
        copies: Mapping[int, C],
    ) -> None:
        self.worker = worker
        self.terms = terms
        self.engine = engine
        self.links = links
        self.observer = observer
        self.step = 0
        self.attempt = 0
        self.copies: dict[int, C] = dict(sorted(copies.items()))
        """The copies held at the last committed step, by block."""
        self.kept: tuple[Partial, ...] = ()
        """What all workers have kept of the step in the present attempt."""
        self._use_layout(layout, execution)

    def _use_layout(self, layout: Layout, execution: ExecutionParameters) -> frozenset[int]:
        """Takes over a layout; returns the layers that are new here, yet without values."""
        new = self.engine.use_layout(layout, execution, self.copies.values())
        self.layout = layout
        self.execution = execution
        self.program: Program = self.terms.compile(self.worker, layout, execution)
        return new

    # --------------------------------------------------------------------------------------------------------- frames

    def key(self, kind: FrameKind, a: int, b: int, peer: int) -> Key:
        """Name of a frame of the present attempt (W3)."""
        return Key(kind, self.step, self.attempt, a, b, peer)

    def _receive(self, keys: Sequence[Key]) -> Life[list[Any]]:
        """Waits until frames are here, and takes them."""
        if keys:
            yield tuple(keys)
        return [self.links.take(key) for key in keys]

    def all_reduce(
        self,
        kind: FrameKind,
        values: Sequence[int],
        merge: Callable[[Sequence[int], Sequence[int]], list[int]],
        part: int = 0,
    ) -> Life[Sequence[int]]:
        """Merges one sequence of whole numbers of every worker, by recursive doubling; all get the same.

        Args:
            kind, part: name it among those of the attempt.
            values: signed 64-bit integers; as many on every worker.
            merge: associative and commutative.
        """
        helper, lender, partners = doubling(self.layout.workers, self.worker)
        if helper is not None:
            self.links.send(self.key(kind, part, 0, helper), values)
            (values,) = yield from self._receive([self.key(kind, part, 1, helper)])
            return values
        if lender is not None:
            (theirs,) = yield from self._receive([self.key(kind, part, 0, lender)])
            values = merge(values, theirs)
        for turn, partner in enumerate(partners, start=2):
            self.links.send(self.key(kind, part, turn, partner), values)
            (theirs,) = yield from self._receive([self.key(kind, part, turn, partner)])
            values = merge(values, theirs)
        if lender is not None:
            self.links.send(self.key(kind, part, 1, lender), values)
        return values

    # ------------------------------------------------------------------------------------------------------------ RUN

    def run(self, on_layer_done: Callable[[int], None]) -> Life[None]:
        """RUN: the program's actions in order.

        Args:
            on_layer_done: called with each unit once its last gradient of the step has been added here; at the
                beginning for one that is held here, but runs elsewhere.
        """
        parts, units = parts_of(self.worker, self.layout), units_by_layer(self.layout)
        todos = todos_of(self.layout, self.kept, self.terms.lowest_trained)
        program = [action for action in self.program if _includes(todos, action)]
        own = tuple(action for action in program if todos[action.stage, action.microbatch].backward)
        remaining = contributions(own, parts, self.engine.layers, units)
        for layer in sorted((layer for layer, count in remaining.items() if count == 0), reverse=True):
            on_layer_done(layer)  # its owners wait for this worker's sum all the same
        local: dict[Key, Any] = {}
        given_back: dict[int, deque[int]] = {}
        for action in program:
            self.observer.acting(action)
            yield Pause.MOMENT
            part, todo = parts[action.stage, action.microbatch], todos[action.stage, action.microbatch]
            forward, runs = action.kind == "F", todo.runs(action.kind)
            source, target = (part.before, part.after) if forward else (part.after, part.before)
            takes, sends = (
                (todo.takes_input, todo.sends_output) if forward else (todo.takes_gradient, todo.sends_gradient)
            )
            kind = FrameKind.ACTIVATION if forward else FrameKind.GRADIENT
            value = None
            if runs and takes and source is not None and action.kind != "W":
                value = yield from self._input(kind, source, action, local)
            self.observer.computing(action)
            output = (
                self.engine.run(
                    action,
                    part.layers,
                    self.step,
                    value,
                    first=part.before is None,
                    last=part.after is None,
                    keeps=todo.keeps,
                )
                if runs
                else self.engine.output(action)
            )
            if sends and target is not None and action.kind != "W":
                self._pass_on(kind, target, action, output, local)
                if not forward:
                    self._release(given_back.setdefault(target.worker, deque()), action.microbatch, target)
            if runs and adds_gradients(action):
                for layer in reversed(part.layers):
                    for unit in units[layer]:
                        remaining[unit] -= 1
                        if remaining[unit] == 0:
                            on_layer_done(unit)
            self.observer.acted(action)

    def _release(self, given_back: deque[int], microbatch: int, target: Hop) -> None:
        """Keeps the newest gradients that a worker was sent, as many as it may have yet to use (S2)."""
        given_back.append(microbatch)
        if len(given_back) > len(self.layout.stages) - target.stage:
            self.engine.release(given_back.popleft())

    def _input(self, kind: FrameKind, source: Hop, action: Action, local: dict[Key, Any]) -> Life[Any]:
        key = self.key(kind, action.microbatch, action.stage, source.worker)
        if source.worker == self.worker:
            return local.pop(key)
        (value,) = yield from self._receive([key])
        return value

    def _pass_on(self, kind: FrameKind, target: Hop, action: Action, value: Any, local: dict[Key, Any]) -> None:
        key = self.key(kind, action.microbatch, target.stage, target.worker)
        if target.worker == self.worker:
            local[key] = value
        else:
            self.links.send(key, value)

    # ----------------------------------------------------------------------------------------------------- evaluation

    def is_sound(self) -> bool:
        """Whether nothing has changed in this worker's memory since it was written."""
        return True

    def evaluate(self, step: int) -> Life[Means | None]:
        """Validation loss and metrics after a step, equal on all workers; forward only, without dropout. None: what it
        was computed with is not sound here."""
        num_microbatches, num_metrics = self.terms.eval_microbatches, len(self.terms.metrics)
        layout = evaluation_layout(self.layout, num_microbatches)
        parts = parts_of(self.worker, layout)
        local: dict[Key, Any] = {}
        self.step, self.attempt = step, 0
        self.observer.evaluation_begins()
        self.engine.forget_scores()
        for action in self.terms.compile(self.worker, layout, self.execution, forward_only=True):
            self.observer.doing("evaluate", computing=True)
            yield Pause.MOMENT
            part, value = parts[action.stage, action.microbatch], None
            if part.before is not None:
                value = yield from self._input(FrameKind.EVALUATION, part.before, action, local)
            self.observer.computing(action)
            first, last = part.before is None, part.after is None
            output = self.engine.evaluate(part.layers, step, action.microbatch, value, first=first, last=last)
            if part.after is not None:
                self._pass_on(FrameKind.EVALUATION, part.after, action, output, local)
            self.observer.acted(action)
        if not self.is_sound():
            return None
        words = score_words(self.engine.scores(), num_microbatches, num_metrics)
        self.observer.doing("evaluate", computing=False)
        total = yield from self.all_reduce(FrameKind.EVALUATION_LOSS, words, add_words)
        yield Pause.SENT
        return means_of(total, num_microbatches, num_microbatches)


def _includes(todos: Mapping[tuple[int, int], Todo], action: Action) -> bool:
    todo = todos.get((action.stage, action.microbatch))
    return todo is not None and todo.includes(action.kind)
