"""How a worker carries out programs: actions in order, tensors along the routes, and small all-reduces.

The program decides the order, the routes decide the partners; nothing here decides anything. What is received is waited
for only by the action that uses it. No torch, IO, clocks or threads.

Every method that can wait is a generator of `Wait`; its `Pause.MOMENT` stands before each action.
"""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from elaswave.planning.programs.layout import evaluation_layout
from elaswave.protocol.step.ballot import Means, add_words, means_of, score_words
from elaswave.protocol.step.engine import C, FrameKind, Key, Pause, Ports, Wait
from elaswave.protocol.step.salvage import Partial, todos_of
from elaswave.protocol.step.traffic import doubling, local_hops_of, units_by_layer
from elaswave.types import Action, ExecutionParameters, Hop, Layout, Program

T = TypeVar("T")
Life = Generator[Wait, None, T]
"""Something that a worker does, and may have to wait in."""


class Turn(NamedTuple):
    """An action of the program, with all that layout and kept work say of it beforehand."""

    action: Action
    layers: range
    kind: FrameKind
    """Of its input and its output."""
    source: Hop | None
    """Where its input comes from; None if it takes none."""
    target: Hop | None
    """Where its output goes; None if it goes nowhere."""
    runs: bool
    """False: an earlier attempt has run it, and what it returned then goes on once more."""
    keeps: bool
    """Whether a backward will need what a forward makes."""
    is_first: bool
    """Whether the micro-batch begins in these layers."""
    is_last: bool
    """Whether the micro-batch ends in these layers."""
    adds_to: tuple[int, ...]
    """Units to whose sums it adds gradients, in this order; a shared unit as often as these layers use it."""


class Execution(Generic[C]):
    """Carries out the programs of one worker, and names the frames of the attempt in hand.

    Args:
        ports: what the worker stands on.
        layout, parameters: in force.
        copies: the blocks that are held; the engine makes room beside them.
    """

    def __init__(self, ports: Ports[C], layout: Layout, parameters: ExecutionParameters, copies: Iterable[C]) -> None:
        self.worker, self.terms, self.engine, self.links, self.observer, *_ = ports
        self.step = 0
        """The step that is being tried, or was tried last: every frame carries it. Never the next one, which is
        `elaswave.protocol.step.machine.WorkerMachine.next_step`."""
        self.attempt = 0
        """The attempt of `step` that is being made; 0 outside of an attempt."""
        self.kept: tuple[Partial, ...] = ()
        """What all workers have kept of the step in the present attempt."""
        self.use_layout(layout, parameters, copies)

    def use_layout(self, layout: Layout, parameters: ExecutionParameters, copies: Iterable[C]) -> frozenset[int]:
        """Takes over a layout; returns the layers that are new here, yet without values."""
        new = self.engine.use_layout(layout, parameters, copies)
        self.layout = layout
        self.parameters = parameters
        self.program: Program = self.terms.compile(self.worker, layout, parameters)
        self._turns: tuple[Turn, ...] = ()
        self._num_added: dict[int, int] = {}
        """Unit -> how often these turns add to it."""
        self._turns_of: tuple[Program, tuple[Partial, ...]] | None = None
        return new

    # --------------------------------------------------------------------------------------------------------- frames

    def key(self, kind: FrameKind, a: int, b: int, peer: int) -> Key:
        """Names a frame of the present attempt (W3)."""
        return Key(kind, self.step, self.attempt, a, b, peer)

    def receive(self, keys: Sequence[Key]) -> Life[list[Any]]:
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
            (values,) = yield from self.receive([self.key(kind, part, 1, helper)])
            return values
        if lender is not None:
            (theirs,) = yield from self.receive([self.key(kind, part, 0, lender)])
            values = merge(values, theirs)
        # Turns 0 and 1 name the frames from and to a worker that lends.
        for turn, partner in enumerate(partners, start=2):
            self.links.send(self.key(kind, part, turn, partner), values)
            (theirs,) = yield from self.receive([self.key(kind, part, turn, partner)])
            values = merge(values, theirs)
        if lender is not None:
            self.links.send(self.key(kind, part, 1, lender), values)
        return values

    # ------------------------------------------------------------------------------------------------------------ RUN

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Lists what RUN does, in order; made anew when the program is another one, or other work is kept."""
        if self._turns_of is None or self._turns_of[0] is not self.program or self._turns_of[1] is not self.kept:
            self._turns_of = (self.program, self.kept)
            self._turns = self._make_turns()
            self._num_added = dict(Counter(unit for turn in self._turns for unit in turn.adds_to))
        return self._turns

    def _make_turns(self) -> tuple[Turn, ...]:
        parts, units = local_hops_of(self.worker, self.layout), units_by_layer(self.layout)
        todos = todos_of(self.layout, self.kept, self.terms.lowest_trained)
        turns = []
        for action in self.program:
            todo = todos.get((action.stage, action.microbatch))
            if todo is None or not todo.includes(action.kind):
                continue
            part, runs = parts[action.stage, action.microbatch], todo.runs(action.kind)
            source = target = None
            if action.kind == "F":
                source = part.before if runs and todo.takes_input else None
                target = part.after if todo.sends_output else None
            elif action.kind != "W":  # which is local: the gradients of the inputs have gone back before it
                source = part.after if runs and todo.takes_gradient else None
                target = part.before if todo.sends_gradient else None
            # I leaves the gradients of parameters to W.
            adds = runs and action.kind in ("B", "W")
            turns.append(
                Turn(
                    action,
                    part.layers,
                    FrameKind.ACTIVATION if action.kind == "F" else FrameKind.GRADIENT,
                    source,
                    target,
                    runs,
                    todo.keeps,
                    part.before is None,
                    part.after is None,
                    tuple(unit for layer in reversed(part.layers) for unit in units[layer]) if adds else (),
                )
            )
        return tuple(turns)

    def run(self, on_layer_done: Callable[[int], None]) -> Life[None]:
        """Does RUN: carries out the program's actions in order.

        Args:
            on_layer_done: called with each unit once its last gradient of the step has been added here; at the
                beginning for one that is held here, but runs elsewhere.
        """
        turns = self.turns
        remaining = self._num_added.copy()
        for layer in sorted((layer for layer in self.engine.layers if layer not in remaining), reverse=True):
            on_layer_done(layer)  # its owners wait for this worker's sum all the same
        local: dict[Key, Any] = {}
        given_back: dict[int, deque[int]] = {}
        for turn in turns:
            action = turn.action
            self.observer.acting(action)
            yield Pause.MOMENT
            value = None
            if turn.source is not None:
                value = yield from self._input(turn.kind, turn.source, action, local)
            self.observer.computing(action)
            if turn.runs:
                output = self.engine.run(
                    action, turn.layers, self.step, value, first=turn.is_first, last=turn.is_last, keeps=turn.keeps
                )
            else:
                output = self.engine.output(action)
            if turn.target is not None:
                self._pass_on(turn.kind, turn.target, action, output, local)
                if turn.kind is FrameKind.GRADIENT:
                    self._release(given_back.setdefault(turn.target.worker, deque()), action.microbatch, turn.target)
            for unit in turn.adds_to:
                remaining[unit] -= 1
                if remaining[unit] == 0:
                    on_layer_done(unit)
            self.observer.acted(action)

    def _release(self, given_back: deque[int], microbatch: int, target: Hop) -> None:
        """Keeps the newest gradients that a worker was sent, as many as it may have yet to use (S2)."""
        given_back.append(microbatch)
        # One that is wanted after all is made again (`todos_of`): that costs time, and changes no result.
        if len(given_back) > len(self.layout.stages) - target.stage:
            self.engine.release(given_back.popleft())

    def _input(self, kind: FrameKind, source: Hop, action: Action, local: dict[Key, Any]) -> Life[Any]:
        key = self.key(kind, action.microbatch, action.stage, source.worker)
        if source.worker == self.worker:
            return local.pop(key)
        yield (key,)
        return self.links.take(key)

    def _pass_on(self, kind: FrameKind, target: Hop, action: Action, value: Any, local: dict[Key, Any]) -> None:
        key = self.key(kind, action.microbatch, target.stage, target.worker)
        if target.worker == self.worker:
            local[key] = value
        else:
            self.links.send(key, value)

    # ----------------------------------------------------------------------------------------------------- evaluation

    def run_evaluation(self, step: int) -> Life[None]:
        """Runs the validation micro-batches after a step; forward only, without dropout."""
        layout = evaluation_layout(self.layout, self.terms.eval_microbatches)
        parts = local_hops_of(self.worker, layout)
        local: dict[Key, Any] = {}
        # No attempt has the number 0: frames of a step have other names (W3).
        self.step, self.attempt = step, 0
        self.observer.evaluation_begins()
        self.engine.forget_scores()
        for action in self.terms.compile(self.worker, layout, self.parameters, forward_only=True):
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

    def evaluation_means(self) -> Life[Means]:
        """Merges what the validation micro-batches came to: loss and metrics, equal on all workers."""
        num_microbatches, num_metrics = self.terms.eval_microbatches, len(self.terms.metrics)
        words = score_words(self.engine.scores(), num_microbatches, num_metrics)
        self.observer.doing("evaluate", computing=False)
        total = yield from self.all_reduce(FrameKind.EVALUATION_LOSS, words, add_words)
        yield Pause.SENT
        return means_of(total, num_microbatches, num_microbatches)
