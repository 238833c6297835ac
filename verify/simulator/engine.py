"""The toy engine of a simulated worker: what `elaswave.engine.torch_engine` does with tensors, in whole numbers.

A slot is a function: a frame that was posted for is given to it the moment it arrives, as the real one's bytes land.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from elaswave.blocks.placement import Block, Placement, ReplicaRole, holders_of_layers, roles_of
from elaswave.hashing import MASK64, mix64
from elaswave.protocol.step.ballot import ENVIRONMENT, Environment, Scores
from elaswave.protocol.step.engine import Change, Imbalance, Loaded, Measured, MemoryKind, TrainingProgress, Unfinished
from elaswave.protocol.step.salvage import Keep
from elaswave.types import Action, ExecutionParameters, Layout
from verify.simulator.host import Host
from verify.simulator.job import (
    BlockState,
    backward,
    forward,
    from_units,
    initial_state,
    loss_of,
    parameter,
    sample,
    update,
)
from verify.simulator.sums import ResumePoint, ToySums

Slot = Callable[[Any], None]


class ToyCopy:
    """A held copy of a block."""

    __slots__ = ("block", "gradient", "role", "seal", "state")

    def __init__(self, block: Block, role: ReplicaRole, state: BlockState) -> None:
        self.block = block
        self.role = role
        self.state = state
        self.seal: int | None = None
        """Its master as it was written last; None of a copy that has just come."""
        self.gradient: int | None = None


class ToyEngine:
    """The numbers of one simulated worker; see `elaswave.protocol.step.engine.Engine`.

    Args:
        host: the worker, whose world is told what is computed.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._see = host.world.see
        self._job = host.job
        self._model = host.model
        self.layers: tuple[int, ...] = ()
        self.parameters: dict[int, int] = {}
        """By block, of the layers that are here."""
        self.seals: dict[int, int] = {}
        """The same as they were written."""
        self._broken_constants: set[int] = set()
        """Layers that are here and whose constants have changed."""
        self._sent_constants = True
        """Whether those that another worker has sent are right."""
        self.slips: int | None = None
        """Which copy the next update writes wrongly, and what of it; None: none."""
        self._gone: list[Change] = []
        """Of layers that are here no more."""
        self._ran: set[int] = set()
        """Layers of which this worker has run a micro-batch."""
        self.sums = ToySums(host.model)
        self._losses: dict[int, float] = {}
        """Of an evaluation."""
        self._ratio = 1
        """Of an adaptive fence, of which the numbers here know nothing: only whether all agree."""
        self.begin(0, host.model.progress.grids.exponents)

    def use_layout(self, layout: Layout, execution: ExecutionParameters, copies: Iterable[ToyCopy]) -> frozenset[int]:
        """Makes room for the layers of the worker's stage."""
        self._ratio = execution.ratios.get(0, 1)
        before, self.layers = self.layers, _units_of(layout, self._host.id)
        self.sums.forget(set(before) - set(self.layers))
        here = self._blocks_here()
        self._gone += [each for each in self._changed_parameters() if each.place not in here]
        self.parameters = {block: self.parameters[block] for block in here if block in self.parameters}
        self.seals = {block: self.seals[block] for block in here if block in self.seals}
        return frozenset(self.layers) - frozenset(before)

    def written_all(self, parameters: dict[int, int], copies: Iterable[ToyCopy]) -> None:
        """All that is here has just been made."""
        self.parameters, self.seals = parameters, dict(parameters)
        for copy in copies:
            copy.seal = copy.state[0]

    def prepare_layout(self, layout: Layout) -> None:
        """Room costs nothing here."""

    def forget_layout(self) -> None:
        """Nothing was prepared."""

    def _blocks_here(self) -> list[int]:
        return [block for layer in self.layers for block in self._model.blocks_of_layer[layer]]

    # -------------------------------------------------------------------------------------------------------- RUN

    def begin(self, step: int, exponents: Sequence[int], keep: Keep | None = None) -> None:
        """Empties all sums but those that are kept."""
        self._began = self._host.world.now
        self._exponents = exponents
        if keep is None:
            self._gone = []
        self.received: dict[tuple[int, int], tuple[int, Sequence[int]]] = {}
        self.sums.begin(self.layers, keep)
        self._sent = 0
        host = self._host
        for layer, microbatch in self.sums.added():
            self._see.kept(host.id, host.generation, step, host.machine.attempt, layer, microbatch)
        for block in self._blocks_here():
            if step:
                self._see.used_parameter(host.id, step, block, self.parameters[block])

    def run(
        self, action: Action, layers: range, step: int, value: Any, *, first: bool, last: bool, keeps: bool = True
    ) -> Any:
        """Runs an action, from where an earlier attempt was interrupted in it."""
        if action.kind == "F":
            output = self._forward(layers, step, action.microbatch, value, first=first, last=last, keeps=keeps)
        else:
            output = self._backward(layers, step, action.microbatch, value, last=last)
        return self._host.handed_on(output)

    def _forward(
        self, layers: range, step: int, microbatch: int, value: Any, *, first: bool, last: bool, keeps: bool
    ) -> int:
        sums, model = self.sums, self._model
        resume_point = sums.forwards.get(microbatch)
        if resume_point is None:
            resume_point = ResumePoint(layers, layers.start, sample(step, microbatch) if first else value)
        x = resume_point.value
        for layer in range(resume_point.at, layers.stop):
            if keeps:
                sums.inputs[microbatch, layer] = x
            x = forward(layer, step, microbatch, [self.parameters[block] for block in model.blocks_used[layer]], x)
            x ^= layer in self._broken_constants
            if keeps:
                sums.forwards[microbatch] = ResumePoint(layers, layer + 1, x)
            self._host.between_layers()
        if last:
            if not sums.is_covered(layers.stop, microbatch):
                sums.losses[microbatch] = loss_of(x)
            if keeps:
                sums.inputs[microbatch, layers.stop] = x
                sums.forwards[microbatch] = ResumePoint(layers, layers.stop + 1, x)
        if not keeps and microbatch not in sums.backwards:
            sums.forwards.pop(microbatch, None)
            for layer in layers:
                sums.inputs.pop((microbatch, layer), None)
        return x

    def _backward(self, layers: range, step: int, microbatch: int, value: Any, *, last: bool) -> int:
        sums, model, host = self.sums, self._model, self._host
        sums.forwards.pop(microbatch, None)
        resume_point = sums.backwards.get(microbatch)
        if resume_point is None:
            resume_point = ResumePoint(
                layers, layers.stop, sums.inputs.pop((microbatch, layers.stop)) if last else value
            )
            sums.backwards[microbatch] = resume_point
        for layer in reversed(range(layers.start, resume_point.at)):
            blocks = model.blocks_used[layer]
            parameters = [self.parameters[block] for block in blocks]
            x = sums.inputs.pop((microbatch, layer))
            dy, gradients = backward(self._job, step, parameters, x, resume_point.value)
            if not sums.is_covered(layer, microbatch):
                sums.add(layer, microbatch, dict(zip(blocks, gradients, strict=True)), self._exponents)
                self._see.coded(host.id, step, layer, microbatch, self._ratio)
                self._see.computed(host.id, host.generation, step, host.machine.attempt, layer, microbatch)
            resume_point = sums.backwards[microbatch] = ResumePoint(layers, layer, dy)
            host.between_layers()
        if layers.start == 0:
            sums.backwards.pop(microbatch)  # nobody is sent it
        return resume_point.value

    def output(self, action: Action) -> int:
        """What an action has returned."""
        fronts = self.sums.forwards if action.kind == "F" else self.sums.backwards
        return fronts[action.microbatch].value

    def release(self, microbatch: int) -> None:
        """A gradient is needed no more."""
        self.sums.backwards.pop(microbatch, None)

    def unfinished(self) -> Unfinished:
        """What there is of the step."""
        return self.sums.unfinished()

    def evaluate(self, layers: range, step: int, microbatch: int, value: Any, *, first: bool, last: bool) -> Any:
        """Runs layers forward."""
        x: int = sample(step, microbatch) if first else value
        for layer in layers:
            parameters = [self.parameters[block] for block in self._model.blocks_used[layer]]
            x = forward(layer, step, microbatch, parameters, x)
        if last:
            self._losses[microbatch] = loss_of(x)
        return x

    def scores(self) -> Scores:
        """Losses."""
        return Scores(self._losses)

    def forget_scores(self) -> None:
        """An evaluation begins."""
        self._losses = {}

    # ----------------------------------------------------------------------------------------------------- REDUCE

    def partial_sums(self, layer: int, blocks: Sequence[int]) -> tuple[int, list[int]]:
        """Coverage, and the own partial sums."""
        coverage = self.sums.coverage(layer)
        self._sent += coverage
        return coverage, [self.sums.words[block] for block in blocks]

    def partial_sums_slot(self, layer: int, peer: int, blocks: Sequence[int]) -> Slot:
        """Where a peer's arrive."""

        def arrive(value: tuple[int, list[int]]) -> None:
            self.received[layer, peer] = value

        return arrive

    def reduce(self, layer: int, copies: Sequence[ToyCopy], peers: Sequence[int]) -> None:
        """Adds up."""
        totals = [self.sums.words.get(copy.block.id, 0) for copy in copies]
        for peer in peers:
            coverage, sums = self.received[layer, peer]
            self._sent -= coverage
            totals = [total + part for total, part in zip(totals, sums, strict=True)]
        for copy, total in zip(copies, totals, strict=True):
            self._sent -= total
            copy.gradient = from_units(total, self._exponents[layer])

    def gradients(self, copies: Sequence[ToyCopy]) -> list[int]:
        """Of owned copies."""
        return [_gradient(copy) for copy in copies]

    def gradients_slot(self, copies: Sequence[ToyCopy]) -> Slot:
        """Where those of followed copies arrive."""

        def arrive(value: list[int]) -> None:
            for copy, gradient in zip(copies, value, strict=True):
                copy.gradient = gradient

        return arrive

    # ------------------------------------------------------------------------------------------------------- VOTE

    def measured(self) -> Measured:
        """What was computed."""
        self._host.check()
        sums = self.sums
        balance = (sum(sums.checksums.values()) + self._sent) & MASK64
        duration = self._host.world.now - self._began
        return Measured(
            sums.total_coverage,
            balance,
            Scores(sums.losses),
            sums.maxima,
            None,
            self._determinism_hashes(),
            duration_us=duration,
        )

    def _determinism_hashes(self) -> dict[int, int]:
        """The same everywhere; a layer's is known once one of its micro-batches has run here."""
        self._ran.update(unit for unit, _ in self.sums.masks)
        return {ENVIRONMENT: 1, **{ENVIRONMENT + 1 + layer: 7 + layer for layer in self._ran}}

    def square_sums(self, copies: Sequence[ToyCopy]) -> list[float]:
        """Stand for the squares: the gradients themselves."""
        return [float(_gradient(copy)) for copy in copies]

    def gradient_hashes(self, copies: Sequence[ToyCopy]) -> list[int]:
        """Of the gradients."""
        return [_gradient(copy) & MASK64 for copy in copies]

    def state_hashes(self, copies: Sequence[ToyCopy]) -> list[int]:
        """Of the momenta."""
        return [mix64(copy.state[1]) for copy in copies]

    def _changed_parameters(self) -> list[Change]:
        return [
            Change(MemoryKind.WORKING, block, was & MASK64, self.parameters[block] & MASK64)
            for block, was in self.seals.items()
            if self.parameters[block] != was
        ]

    def changes(self, copies: Collection[ToyCopy], *, given_up: bool) -> list[Change]:
        """What has flipped."""
        found = self._changed_parameters() + (self._gone if given_up else [])
        found += [
            Change(MemoryKind.COPY, copy.block.id, copy.seal & MASK64, copy.state[0] & MASK64)
            for copy in copies
            if copy.seal is not None and copy.seal != copy.state[0]
        ]
        return found + [self._changed_constant(layer) for layer in sorted(self._broken_constants & set(self.layers))]

    def _changed_constant(self, layer: int) -> Change:
        """The lowest of those that have a layer makes them anew, the others get them sent: in a vote."""
        is_first = self._host.id == min(holders_of_layers(self._host.machine.layout)[layer])
        is_mended = is_first or not self._host.is_voting
        if is_mended:
            self._broken_constants.discard(layer)
        return Change(MemoryKind.MENDED if is_mended else MemoryKind.CONSTANT, layer, 1, 2)

    def constants_slot(self, layer: int) -> Slot:
        """Where they arrive."""

        def arrive(value: bool) -> None:
            self._sent_constants = value

        return arrive

    def constants(self, layer: int) -> bool:
        """Whether they are right."""
        return layer not in self._broken_constants

    def take_constants(self, layer: int) -> bool:
        """Takes those that have come."""
        if self._sent_constants:
            self._broken_constants.discard(layer)
        return self._sent_constants

    def places(self, *, copies: bool) -> list[tuple[str, int]]:
        """All that can flip.

        Args:
            copies: also copies that are held.
        """
        found = [("parameters", block) for block in sorted(self.seals)]
        found += [("constants", layer) for layer in self.layers if layer < self._model.terms.num_layers]
        held = self._host.machine.copies if copies else {}
        return found + [("copy", block) for block, copy in held.items() if copy.seal is not None]

    def flip(self, what: str, index: int) -> None:
        """A bit flips."""
        if what == "constants":
            self._broken_constants.add(index)
        elif what == "parameters":
            self.parameters[index] ^= 1 << 7
        else:
            copy = self._host.machine.copies[index]
            copy.state = (copy.state[0] ^ 1 << 17, copy.state[1])

    def parameter_hashes(self, blocks: Sequence[int], copies: Mapping[int, ToyCopy]) -> list[int]:
        """The parameters themselves."""
        return [
            (
                self.seals.get(block, self.parameters[block])
                if block in self.parameters
                else parameter(copies[block].state)
            )
            & MASK64
            for block in blocks
        ]

    def master_hashes(self, copies: Sequence[ToyCopy]) -> list[int]:
        """The masters themselves."""
        return [(copy.state[0] if copy.seal is None else copy.seal) & MASK64 for copy in copies]

    def counts(self) -> Mapping[tuple[int, int], int]:
        """How often each (layer, micro-batch) was added."""
        return self.sums.counts()

    def imbalance(self) -> Imbalance:
        """Nothing here changes a sum."""
        return Imbalance({}, {}, 0)

    def environment(self) -> Environment:
        """Nothing here differs."""
        return Environment("toy", {})

    # --------------------------------------------------------------------------------------- APPLY, GATHER, delivery

    def committed(self, step: int, loss: float, *, updates: bool) -> None:
        """Nothing but blocks has a state here."""

    def batches(self, copies: Sequence[ToyCopy]) -> list[Sequence[ToyCopy]]:
        """As many at once as the job says."""
        number = self._job.blocks_at_once
        return [copies[first : first + number] for first in range(0, len(copies), number)]

    def apply(
        self,
        copies: Sequence[ToyCopy],
        step: int,
        norm: float | None,
        scale: float,
        num_updates: int,
        written: Collection[int] = (),
    ) -> None:
        """Updates copies."""
        assert norm is not None and scale == 1.0, "no step of the toy job is skipped, and no loss has counts"
        for copy in copies:
            gradient, copy.gradient = _gradient(copy), None
            copy.state = update(copy.state, gradient, norm, step)
        if copies and self.slips is not None:
            self._slip(copies[self.slips // 2 % len(copies)], of_master=self.slips % 2 == 1)
        for copy in copies:
            copy.seal = copy.state[0]
            self._see.applied(self._host.id, copy.block.id, step, copy.state)

    def _slip(self, copy: ToyCopy, *, of_master: bool) -> None:
        master, momentum = copy.state
        copy.state = (master ^ 1 << 17, momentum) if of_master else (master, momentum ^ 1 << 17)
        self.slips = None
        self._see.slipped(self._host.id, copy.block.id)

    def publish(self, copies: Iterable[ToyCopy]) -> None:
        """Copies masters into the layers."""
        for copy in copies:
            if copy.block.layer in self.layers:
                self.parameters[copy.block.id] = self.seals[copy.block.id] = parameter(copy.state)

    def parameters_of(self, copies: Sequence[ToyCopy]) -> list[int]:
        """Of copies."""
        return [parameter(copy.state) for copy in copies]

    def parameters_slot(self, layer: int, blocks: Sequence[int]) -> Slot:
        """Where parameters arrive."""

        def arrive(value: list[int]) -> None:
            self.parameters.update(zip(blocks, value, strict=True))

        for block in blocks:  # a wait for several frames may be interrupted when some have arrived
            self.seals.pop(block, None)
        return arrive

    def parameters_arrived(self, layer: int, blocks: Sequence[int]) -> None:
        """They are sealed."""
        self.seals.update((block, self.parameters[block]) for block in blocks)

    def parameter_bytes(self, blocks: Iterable[int]) -> int:
        """One for each."""
        return sum(1 for _ in blocks)

    # ----------------------------------------------------------------------------------------------------- copies

    def empty_copy(self, block: int, num_updates: int) -> ToyCopy:
        """A follower's copy without content."""
        return ToyCopy(self._model.blocks[block], ReplicaRole.FOLLOWER, (0, 0))

    def state(self, copy: ToyCopy) -> BlockState:
        """Master and momentum."""
        return copy.state

    def state_slot(self, copy: ToyCopy) -> Slot:
        """Where they arrive."""

        def arrive(value: BlockState) -> None:
            copy.state = value

        return arrive

    def carried(self) -> str:
        """Nothing but blocks has a state here."""
        return "toy"

    def carry_on(self, carried: str, step: int) -> None:
        """Nothing to take over."""
        assert carried == "toy"

    def load(self, step: int, layout: Layout, placement: Placement) -> Loaded[ToyCopy]:
        """From the simulated disk, or from the seed."""
        host, model = self._host, self._model
        states, grid = {block.id: initial_state(block.id) for block in model.blocks}, model.progress.grids.exponents
        if step:
            states, grid = host.world.disk[step]
        copies = {
            block: ToyCopy(model.blocks[block], role, states[block])
            for block, role in roles_of(host.id, placement, model.blocks).items()
        }
        for block, copy in copies.items():
            self._see.loaded(host.id, block, step, copy.state)
        self.layers = _units_of(layout, host.id)
        self.written_all({block: parameter(states[block]) for block in self._blocks_here()}, copies.values())
        progress = TrainingProgress(step, model.progress.grids._replace(exponents=grid))
        return Loaded(copies, progress, len(copies))


def _units_of(layout: Layout, worker: int) -> tuple[int, ...]:
    layers = layout.layers_of(worker)
    return (*layers, *layout.shared_units(layers))


def _gradient(copy: ToyCopy) -> int:
    assert copy.gradient is not None, f"block {copy.block.id} has no gradient"
    return copy.gradient
