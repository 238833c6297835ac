"""A computation that is interrupted between two layers goes on there in the next attempt, with the same bits."""

from collections.abc import Callable

import pytest
import torch
from tests.unit.engine.test_compute import STEP, batch, make_compute, model_of, sums
from torch import nn

from elaswave.engine.compute import Compute, Surroundings
from elaswave.errors import InterruptedWaitError
from elaswave.protocol.step.ballot import LOSS, expected_coverage
from elaswave.protocol.step.engine import Unfinished
from elaswave.protocol.step.salvage import InFlightMicrobatch, Keep, decode_rows, mask_of
from elaswave.training.definition import build_model

L, N = 4, 3
GPT = build_model("gpt", vocab_size=50, num_layers=2, hidden_size=32, num_heads=4, context_length=8, dropout=0.1)


class Interrupts(Surroundings):
    """Raises between two layers, once."""

    def __init__(self) -> None:
        self.after = 0

    def check(self) -> None:
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
