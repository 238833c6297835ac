"""A computation that is interrupted between two layers goes on there in the next attempt, with the same bits."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.engine.test_compute import SEED, STEP, Table, batch, make_compute, model_of, sums
from tests.unit.held import make_held
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from elaswave.engine.checks.spot_checks import CheckKind, SpotChecks
from elaswave.engine.compute import Compute, ComputeRules, Surroundings, _Known
from elaswave.errors import InterruptedWaitError
from elaswave.models.layers import Layer, ModelSpec, aux_loss, check_wait
from elaswave.models.layers import batch as inputs_of_batch
from elaswave.protocol.step.ballot import LOSS, expected_coverage
from elaswave.protocol.step.engine import Unfinished
from elaswave.protocol.step.salvage import InFlightMicrobatch, Keep, decode_rows, mask_of
from elaswave.state.sums import ExactAccumulator
from elaswave.training.definition import build_model

L, N = 4, 3
GPT = build_model("gpt", vocab_size=50, num_layers=2, hidden_size=32, num_heads=4, context_length=8, dropout=0.1)


def _stack() -> tuple[tuple[str, int], ...]:
    frame, found = sys._getframe(2), []
    while frame is not None:
        found.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


class Interrupts(Surroundings):
    """Raises at one call, once."""

    def __init__(self) -> None:
        self.after = 0
        self.places: list[tuple[tuple[str, int], ...]] = []
        """Where it was called from."""

    def check(self) -> None:
        self.places.append(_stack())
        self.after -= 1
        if self.after == 0:
            raise InterruptedWaitError("a new generation begins")


def exponents(compute: Compute) -> list[list[int]]:
    return [[40] * len(accumulator.shape.tensors) for _, accumulator in sorted(compute.accumulators.items())]


def keep_all(compute: Compute, found: Unfinished) -> Keep:
    """What the decision lets the only worker keep."""
    table = decode_rows(found.rows)
    covered = tuple(table.get((layer, 0), 0) for layer in range(L))
    layers = frozenset(layer for layer in range(L) if covered[layer])
    return Keep(
        layers,
        found.losses,
        {microbatch_in_flight.microbatch: microbatch_in_flight for microbatch_in_flight in found.in_flight},
        (*covered, found.losses),
    )


def actions(compute: Compute) -> list[Callable[[], object]]:
    def forward(number: int) -> Callable[[], object]:
        tokens, targets = batch(number)
        return lambda: compute.forward(range(L), number, tokens, targets)

    def backward(number: int) -> Callable[[], object]:
        return lambda: compute.backward(range(L), number, None)

    return [forward(0), forward(1), backward(0), forward(2), backward(1), backward(2)]


@pytest.fixture(scope="module")
def undisturbed() -> Compute:
    compute = make_compute(GPT)
    for act in actions(compute):
        act()
    return compute


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("after", range(1, 2 * L * N + 1))
def test_it_goes_on_where_it_was_interrupted(undisturbed: Compute, after: int, recompute: bool) -> None:
    interrupts = Interrupts()
    interrupts.after = after
    compute = make_compute(GPT, surroundings=interrupts, recompute=recompute)
    todo = actions(compute)
    with pytest.raises(InterruptedWaitError):
        while todo:
            todo[0]()
            todo.pop(0)
    found = compute.unfinished()
    assert found.can_be_kept
    compute.begin(STEP, exponents(compute), keep_all(compute, found))
    if todo[0] is not None and any(microbatch_in_flight.backward == 0 for microbatch_in_flight in found.in_flight):
        todo.pop(0)  # it was interrupted after its last layer
    ran: list[int] = []
    compute._run_layer = _noting(compute._run_layer, ran)  # type: ignore[method-assign]
    for act in todo:
        act()
    assert compute.coverage == undisturbed.coverage == expected_coverage(L, N)
    assert compute.counts == undisturbed.counts
    assert compute.losses == undisturbed.losses
    for index, total in sums(undisturbed).items():
        assert sums(compute)[index].equal(total)
        assert compute.accumulators[index].maxima == undisturbed.accumulators[index].maxima
        assert compute.accumulators[index].checksum == undisturbed.accumulators[index].checksum
    if not recompute:
        assert len(ran) == len(set(ran)), "a layer ran forward again"
    compute.end_step(STEP)
    assert compute._saved == compute._losses == {}
    assert compute.unfinished().in_flight == ()


@pytest.mark.parametrize("after", range(1, L))
def test_a_whole_backward_goes_on_in_two_halves(after: int) -> None:
    """The schedule may change with the loss that has interrupted it."""
    tokens, targets = batch(0)
    alone = make_compute(GPT)
    alone.forward(range(L), 0, tokens, targets)
    alone.backward(range(L), 0, None)
    interrupts = Interrupts()
    compute = make_compute(GPT, surroundings=interrupts)
    compute.forward(range(L), 0, tokens, targets)
    interrupts.after = after
    with pytest.raises(InterruptedWaitError):
        compute.backward(range(L), 0, None)
    compute.begin(STEP, exponents(compute), keep_all(compute, compute.unfinished()))
    compute.backward_input(range(L), 0, None)
    compute.backward_weights(range(L), 0)
    assert (compute.coverage, compute.counts) == (alone.coverage, alone.counts)
    for index, total in sums(alone).items():
        assert sums(compute)[index].equal(total)


def _noting(run_layer, ran):  # type: ignore[no-untyped-def]
    def run(index, microbatch, given, train):  # type: ignore[no-untyped-def]
        ran.append((index, microbatch))
        return run_layer(index, microbatch, given, train)

    return run


def test_what_is_not_kept_is_emptied() -> None:
    compute = make_compute(GPT)
    first, second, *_ = actions(compute)
    first(), second(), compute.backward(range(L), 0, None)
    assert compute.unfinished().losses == 0b11
    compute.begin(STEP, exponents(compute), Keep(frozenset(), 0, {}, (0,) * (L + 1)))
    assert compute.unfinished() == Unfinished(True)
    assert compute.coverage == 0 and compute.counts == {} and compute._saved == {}
    assert not any(total.any() for total in sums(compute).values())


def test_covered_layers_pass_gradients_without_adding(undisturbed: Compute) -> None:
    """Layers 2 and 3 and the loss of micro-batch 0 are in another worker's sums."""
    compute = make_compute(GPT)
    compute.begin(STEP, exponents(compute), Keep(frozenset(), 0, {}, (0, 0, 1, 1, 1)))
    forward, *_ = actions(compute)
    forward()
    compute.backward(range(L), 0, None)
    assert compute.counts == {(0, 0): 1, (1, 0): 1}
    assert compute.losses == {} and not compute.accumulators[2].sum.any()
    whole = make_compute(GPT)
    forward, *_ = actions(whole)
    forward()
    whole.backward(range(L), 0, None)
    assert compute.accumulators[0].sum.equal(whole.accumulators[0].sum)


def test_a_forward_whose_output_alone_is_needed_keeps_nothing_for_a_backward() -> None:
    compute = make_compute(GPT, range(2))
    tokens, _ = batch(0)
    output = compute.forward(range(2), 0, tokens, None).clone()
    keeping = compute._saved
    assert keeping and compute.unfinished().in_flight == (InFlightMicrobatch(0, 0, 2, 2),)
    assert compute.output("F", 0).equal(output)
    compute.begin(STEP, exponents(compute))
    assert compute.forward(range(2), 0, tokens, None, keeps=False).equal(output)
    assert compute._saved == {} and compute.unfinished().in_flight == ()


def test_an_output_is_made_again_beside_a_backward_that_goes_on() -> None:
    """Whoever had the output is lost, and its gradient has come before."""
    interrupts = Interrupts()
    compute, other = make_compute(GPT, range(2), surroundings=interrupts), make_compute(GPT, range(2, 4))
    tokens, targets = batch(0)
    output = compute.forward(range(2), 0, tokens, None).clone()
    other.forward(range(2, 4), 0, output.clone(), targets)
    gradient = other.backward(range(2, 4), 0, None)
    interrupts.after = 1
    with pytest.raises(InterruptedWaitError):
        compute.backward(range(2), 0, gradient.clone())
    found = compute.unfinished()
    assert found.in_flight == (InFlightMicrobatch(0, 0, 2, 2, 1),)
    covered = (0, 1, 0, 0, 0)
    compute.begin(STEP, exponents(compute), Keep(frozenset({1}), 0, {0: found.in_flight[0]}, covered))
    assert compute.forward(range(2), 0, tokens, None, keeps=False).equal(output)
    compute.backward(range(2), 0, None)
    assert compute.counts == {(0, 0): 1, (1, 0): 1}
    assert other.output("B", 0).equal(gradient)
    other.release(0)
    assert other.unfinished().in_flight == ()


def test_between_the_halves_of_a_backward_a_microbatch_begins_anew() -> None:
    compute = make_compute(GPT)
    first, second, *_ = actions(compute)
    first(), second()
    compute.backward_input(range(L), 0, None)
    found = compute.unfinished()
    assert [microbatch_in_flight.microbatch for microbatch_in_flight in found.in_flight] == [1] and found.rows == ()
    compute.begin(STEP, exponents(compute), keep_all(compute, found))
    assert {number for _, number in compute._saved} == {1} and not compute._left


def test_layers_that_are_gone_take_their_microbatches_with_them() -> None:
    compute = make_compute(GPT)
    first, second, *_ = actions(compute)
    first(), second(), compute.backward(range(L), 0, None)
    compute.forget({3})
    assert compute.unfinished().in_flight == ()
    assert all(layer != 3 for layer, _ in compute._saved)


def test_layers_that_are_gone_leave_no_activations_in_memory() -> None:
    """A worker that goes back to a checkpoint loads it before its next attempt begins."""
    compute = make_compute(GPT)
    first, second, *_ = actions(compute)
    first(), second(), compute.backward_input(range(L), 0, None)
    # The inputs of the first layer are the test's own.
    leaves = [leaf for (layer, _), saved in compute._saved.items() if layer for leaf in saved.given.leaves]
    leaves += [leaf for loss in compute._losses.values() for leaf in (*loss.given.leaves, loss.scored.total)]
    leaves += [leaf for left in compute._left.values() if isinstance(left, _Known) for leaf in left.gradients]
    storages = [StorageWeakRef(leaf.untyped_storage()) for leaf in leaves]
    assert len(storages) > 2 * L
    leaves.clear()
    compute.forget(range(L))
    assert all(storage.expired() for storage in storages)


def test_nothing_is_kept_after_something_that_is_not_finite() -> None:
    class Spoil(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(float("nan"))

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table(tokens)

    compute = make_compute(model_of(Table, Spoil))
    tokens, targets = batch(0)
    compute.forward(range(2), 0, tokens, targets)
    assert not compute.unfinished().can_be_kept
    assert compute.counts == {(LOSS, 0): 1} and mask_of(compute.losses) == 1


class Waited(torch.autograd.Function):
    """A parameter whose gradient has to be waited for."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        check_wait()
        return gradients[0]


class Asks(nn.Module):
    """Waits in each of its runs: forward for the micro-batch, backward for the gradient of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ Waited.apply(self.weight) * (inputs_of_batch() > 9)[..., None]


class Routes(Asks):
    """The same with an auxiliary loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        aux_loss(self.weight.square().mean())
        return super().forward(x)


class Fixed(Table):
    """A first layer of which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table.requires_grad_(False)


class AsksAsLoss(nn.Module):
    """A loss that waits. It has a parameter, which is not trained, and a leaf of its own, for which it is run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)

    def forward(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        made = torch.zeros((), requires_grad=True)
        return (output * self.scale * (inputs_of_batch() > 9)[..., None]).square().mean() + 0 * made


class Everywhere(SpotChecks):
    """Runs everything again."""

    def due(self, layer: int, microbatch: int) -> CheckKind:
        return CheckKind.RUN


class Waiting:
    """A worker that can be interrupted wherever it waits, and what it has made."""

    def __init__(self, layers: range, kinds: str, *, recompute: bool, has_spots: bool) -> None:
        self.layers, self.interrupts, self.gradients = layers, Interrupts(), dict[int, torch.Tensor]()
        modules = (Fixed, Asks, Asks, Routes)
        model = ModelSpec(
            tuple(Layer(f"l{index}", module, recompute=recompute) for index, module in enumerate(modules)),
            AsksAsLoss(),
            {"mean": lambda output, targets: output.mean().item()},
        )
        held, _, shapes = make_held(model, layers, SEED)
        self.exponents = [[40] * len(shape.tensors) for shape in shapes]
        self.compute = Compute(
            ComputeRules(model, SEED, lowest_trained=1, has_determinism_check=True),
            held,
            {index: ExactAccumulator(shapes[index]) for index in held},
            inputs=self._inputs,
            surroundings=self.interrupts,
            spots=Everywhere(SEED, 0.005, N, 1) if has_spots else None,
        )
        self.compute.begin(STEP, self.exponents)
        turns = "F0 F1 I0 I1 W0 W1" if kinds == "FIW" else "F0 B0 F1 B1"
        self._program = [(turn[0], int(turn[1])) for turn in turns.split()]

    def _inputs(self, step: int, microbatch: int, *, train: bool) -> torch.Tensor:
        self.interrupts.check()
        return batch(microbatch)[0]

    def run(self) -> None:
        """Makes what is left of the step."""
        facts = self.compute.unfinished()
        table, in_flight = decode_rows(facts.rows), {each.microbatch: each for each in facts.in_flight}
        for kind, microbatch in self._program:
            is_covered = all(table.get((layer, 0), 0) >> microbatch & 1 for layer in self.layers)
            if is_covered or not self._is_run(kind, in_flight.get(microbatch)):
                continue
            tokens, targets = batch(microbatch)
            if kind == "F":
                vectors = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(microbatch))
                given = tokens if self.layers.start == 0 else vectors
                self.compute.forward(self.layers, microbatch, given, targets)
            elif kind == "W":
                self.compute.backward_weights(self.layers, microbatch)
            else:
                run = self.compute.backward if kind == "B" else self.compute.backward_input
                run(self.layers, microbatch, None)

    def _is_run(self, kind: str, found: InFlightMicrobatch | None) -> bool:
        if found is None or kind == "W":
            return True
        if kind == "F":
            return found.backward is None and found.forward <= L
        return found.backward != self.layers.start

    def results(self) -> tuple[object, ...]:
        compute = self.compute
        gradients = [compute.output("B", microbatch) for microbatch in (0, 1)] if self.layers.start else []
        scores = compute.scoring.scores
        added = [
            (accumulator.sum.tolist(), accumulator.maxima, accumulator.checksum)
            for _, accumulator in sorted(compute.accumulators.items())
        ]
        return [each.tolist() for each in gradients], scores, added, compute.coverage, sorted(compute.counts.items())


@pytest.mark.parametrize(
    ("first", "kinds", "recompute", "has_spots"),
    [
        (0, "FB", False, False),
        (2, "FIW", False, False),
        (3, "FIW", True, True),
        pytest.param(0, "FB", True, True, marks=pytest.mark.slow),
        pytest.param(0, "FIW", False, True, marks=pytest.mark.slow),
        pytest.param(0, "FIW", True, False, marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_wherever_it_has_waited(first: int, kinds: str, recompute: bool, has_spots: bool) -> None:
    """Between layers, and within layers and loss: in a first run or one that checks it, forward, backward, or in the
    second half of a backward."""

    def waiting() -> Waiting:
        return Waiting(range(first, L), kinds, recompute=recompute, has_spots=has_spots)

    undisturbed = waiting()
    undisturbed.run()
    places = undisturbed.interrupts.places
    last = {place: after for after, place in enumerate(places, start=1)}
    for after in sorted({*last.values(), *(places.index(place) + 1 for place in last)}):
        worker = waiting()
        worker.interrupts.after = after
        with pytest.raises(InterruptedWaitError):
            worker.run()
        found = worker.compute.unfinished()
        worker.compute.begin(STEP, worker.exponents, keep_all(worker.compute, found))
        worker.run()
        assert worker.results() == undisturbed.results(), f"interrupted at wait {after} of {len(places)}"
        worker.compute.end_step(STEP)
        assert worker.compute._saved == worker.compute._losses == worker.compute._left == {}
