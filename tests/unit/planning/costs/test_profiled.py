"""Costs from timings: exact where timings separate layers, by shares where they do not, whatever the noise."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.profiled import ActionTiming, CostMeter, prediction_error
from elaswave.types import Kind


def costs_of(forward_s: list[float], *, input_share: float = 1.0, weight_share: float = 1.0) -> Costs:
    return Costs(
        layers=tuple(
            LayerCosts(
                name=str(index),
                forward_s=seconds,
                input_gradient_s=seconds * input_share,
                weight_gradient_s=seconds * weight_share,
                parameter_bytes=1.0,
                accumulator_bytes=2.0,
                optimizer_bytes=3.0,
                activation_bytes=4.0,
                boundary_bytes=5.0,
            )
            for index, seconds in enumerate(forward_s)
        ),
        step_overhead_s=0.5,
    )


def timing(
    worker: int, start: int, stop: int, kind: Kind, seconds: float, *, stage: int = 0, count: int = 4
) -> ActionTiming:
    return ActionTiming(worker=worker, stage=stage, start=start, stop=stop, kind=kind, seconds=seconds, count=count)


def run_of(
    truth: Costs, ranges: dict[int, tuple[int, int]], speeds: dict[int, float] | None = None
) -> list[ActionTiming]:
    """What workers would report."""
    return [
        timing(worker, start, stop, kind, truth.between(field, start, stop) / (speeds or {}).get(worker, 1.0))
        for worker, (start, stop) in ranges.items()
        for kind, field in (("F", "forward_s"), ("I", "input_gradient_s"), ("W", "weight_gradient_s"))
    ]


def forwards(costs: Costs) -> list[float]:
    return [layer.forward_s for layer in costs.layers]


def test_within_a_stage_the_described_shares_count() -> None:
    meter = CostMeter(costs_of([1, 2, 3, 4]))
    meter.add([timing(0, 0, 2, "F", 0.6), timing(1, 2, 4, "F", 0.7), timing(0, 0, 2, "B", 3), timing(1, 2, 4, "B", 7)])
    costs = meter.costs()
    assert forwards(costs) == pytest.approx([0.2, 0.4, 0.3, 0.4])
    assert [layer.input_gradient_s for layer in costs.layers] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert [layer.weight_gradient_s for layer in costs.layers] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert costs.layers[2].activation_bytes == 4
    assert costs.step_overhead_s == 0.5
    assert costs.source.startswith("measured: medians of the last 1 reports of 2 workers")


def test_a_backward_is_parted_as_described_until_its_halves_are_measured() -> None:
    meter = CostMeter(costs_of([1, 1], input_share=3, weight_share=1))
    meter.add([timing(0, 0, 2, "F", 2), timing(0, 0, 2, "B", 8)])
    (first, _) = meter.costs().layers
    assert (first.input_gradient_s, first.weight_gradient_s) == pytest.approx((3, 1))
    meter.add([timing(0, 0, 2, "I", 2), timing(0, 0, 2, "W", 6)])
    (first, _) = meter.costs().layers
    assert (first.input_gradient_s, first.weight_gradient_s) == pytest.approx((1, 3))


def test_what_was_not_measured_is_the_description_scaled() -> None:
    meter = CostMeter(costs_of([1, 1, 2]))
    meter.add([timing(0, 0, 2, "F", 1.0)])
    costs = meter.costs()
    assert forwards(costs) == pytest.approx([0.5, 0.5, 1.0])
    assert costs.layers[2].input_gradient_s == pytest.approx(1.0)


def test_overlapping_ranges_separate_a_shared_layer() -> None:
    truth = costs_of([1, 5, 2])
    meter = CostMeter(costs_of([1, 1, 1]))
    meter.add(run_of(truth, {0: (0, 1), 1: (0, 2), 2: (1, 3), 3: (2, 3)}))
    assert forwards(meter.costs()) == pytest.approx(forwards(truth))


def test_former_layouts_separate_layers_too() -> None:
    truth = costs_of([1, 5, 2, 3])
    meter = CostMeter(costs_of([1, 1, 1, 1]))
    meter.add(run_of(truth, {0: (0, 2), 1: (2, 4)}))
    meter.add(run_of(truth, {0: (0, 1), 1: (1, 4)}))
    costs = meter.costs()
    assert forwards(costs)[:2] == pytest.approx([1, 5])
    assert sum(forwards(costs)[2:]) == pytest.approx(5)


def test_a_layer_that_is_described_as_free_may_cost_something() -> None:
    meter = CostMeter(costs_of([0, 1]))
    meter.add([timing(0, 0, 1, "F", 0.25), timing(1, 1, 2, "F", 1)])
    assert forwards(meter.costs()) == pytest.approx([0.25, 1])


def test_outliers_do_not_count() -> None:
    meter = CostMeter(costs_of([1, 1]), window=9)
    for report in range(9):
        meter.add([timing(0, 0, 2, "F", 100.0 if report in (2, 5, 6) else 2.0)])
    assert forwards(meter.costs()) == pytest.approx([1, 1])


def test_costs_are_kept_current() -> None:
    meter = CostMeter(costs_of([1, 1]), window=3)
    for seconds in (2.0, 2.0, 2.0, 6.0, 6.0):
        meter.add([timing(0, 0, 2, "F", seconds)])
    assert forwards(meter.costs()) == pytest.approx([3, 3])
    # Another layout: the former one's timings end with the window, as soon as newer ones tell of all its layers.
    for _ in range(3):
        meter.add([timing(0, 0, 1, "F", 1.0)])
    assert sum(forwards(meter.costs())) == pytest.approx(6)
    meter.add([timing(1, 1, 2, "F", 1.0)])
    assert forwards(meter.costs()) == pytest.approx([1, 1])
    assert meter.num_reports == 9


def test_stragglers_are_told_from_costly_layers() -> None:
    truth = costs_of([1, 2, 3, 4])
    speeds = {1: 0.5, 4: 0.8}
    meter = CostMeter(costs_of([1, 1, 1, 1]))
    meter.add(run_of(truth, {0: (0, 2), 1: (0, 2), 2: (0, 2), 3: (2, 4), 4: (2, 4)}, speeds))
    assert meter.speeds() == pytest.approx({0: 1, 1: 0.5, 2: 1, 3: 1, 4: 0.8})
    costs = meter.costs()
    assert costs.between("forward_s", 0, 2) == pytest.approx(3)
    assert costs.between("forward_s", 2, 4) == pytest.approx(7)


def test_known_speeds_are_taken_out() -> None:
    truth = costs_of([1, 2])
    meter = CostMeter(costs_of([1, 2]))
    meter.add(run_of(truth, {0: (0, 1), 1: (1, 2)}, {1: 0.5}), speeds={1: 0.5})
    assert forwards(meter.costs()) == pytest.approx([1, 2])
    assert meter.speeds() == {0: 1, 1: 1}


def test_a_frequency_level_is_taken_out() -> None:
    meter = CostMeter(costs_of([1, 2]))
    meter.add([msgspec.structs.replace(timing(0, 0, 2, "F", 6), level_speed=0.5)])
    assert forwards(meter.costs()) == pytest.approx([1, 2])


def test_actions_of_no_time_tell_no_speed() -> None:
    meter = CostMeter(costs_of([1, 2]))
    meter.add([timing(0, 0, 2, "F", 0.0), timing(1, 0, 2, "F", 0.0), timing(1, 0, 2, "I", 1.0)])
    assert meter.speeds() == {0: 1, 1: 1}


def test_the_rest_of_a_step() -> None:
    meter = CostMeter(costs_of([1]))
    meter.add([timing(0, 0, 1, "F", 1)])
    for step_s in (10.0, 12.0, 90.0):
        meter.add_step(step_s, 9.0)
    assert meter.costs().step_overhead_s == 3


@settings(max_examples=60, deadline=None)
@given(
    truth=st.lists(st.floats(0.01, 10), min_size=2, max_size=10),
    described=st.lists(st.floats(0, 10), min_size=10, max_size=10),
    cuts=st.sets(st.integers(1, 9), max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_ranges_are_met_through_noise(truth: list[float], described: list[float], cuts: set[int], seed: int) -> None:
    """Every stage's seconds come out as they went in, within the noise; no layer is negative; nothing is lost."""
    generator = np.random.default_rng(seed)
    ends = [0, *sorted(cut for cut in cuts if cut < len(truth)), len(truth)]
    meter = CostMeter(costs_of(described[: len(truth)]))
    right = costs_of(truth)
    for _ in range(11):
        for stage, (start, stop) in enumerate(zip(ends, ends[1:])):
            noise = 1 + 0.02 * generator.uniform(-1, 1) + (5.0 if generator.uniform() < 0.1 else 0.0)
            meter.add([timing(stage, start, stop, "F", right.between("forward_s", start, stop) * noise)])
    costs = meter.costs()
    for start, stop in zip(ends, ends[1:]):
        assert costs.between("forward_s", start, stop) == pytest.approx(
            right.between("forward_s", start, stop), rel=0.03
        )
    assert all(layer.forward_s >= 0 for layer in costs.layers)


@pytest.mark.parametrize(
    "changes", [{"start": 2}, {"count": 0}, {"seconds": -1.0}, {"seconds": math.inf}, {"level_speed": 0.0}]
)
def test_impossible_timings(changes: dict[str, float]) -> None:
    good = {"worker": 3, "stage": 0, "start": 0, "stop": 2, "kind": "F", "seconds": 1.0, "count": 1}
    with pytest.raises(ValueError, match="worker 3 reports"):
        ActionTiming(**(good | changes))  # type: ignore[arg-type]


def test_what_a_meter_refuses() -> None:
    with pytest.raises(ValueError, match="window is 0"):
        CostMeter(costs_of([1]), window=0)
    meter = CostMeter(costs_of([1]))
    with pytest.raises(ValueError, match="no action has been timed"):
        meter.costs()
    with pytest.raises(ValueError, match=r"layers \[0, 2\), but the analytic costs have 1 layers"):
        meter.add([timing(0, 0, 2, "F", 1)])
    with pytest.raises(ValueError, match="speed of worker 0 is 0"):
        meter.add([timing(0, 0, 1, "F", 1)], speeds={0: 0.0})
    with pytest.raises(ValueError, match="a step of 1.0 s with 2.0 s of actions"):
        meter.add_step(1.0, 2.0)


def test_the_error_of_a_prediction() -> None:
    assert prediction_error(9.0, [10.0, 10.0, 50.0]) == pytest.approx(0.1)
    assert prediction_error(12.0, [10.0]) == pytest.approx(-0.2)
    for nothing in ([], [0.0]):
        with pytest.raises(ValueError, match="are no measure"):
            prediction_error(1.0, nothing)
