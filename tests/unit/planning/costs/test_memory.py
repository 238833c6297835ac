"""The one formula of a worker's memory: parameters, sums, slices of state, micro-batches in flight."""

import numpy as np
import pytest
from msgspec.structs import replace
from tests.property.clusters import make_costs

from elaswave.planning.costs.layers import MemoryModel, fitting, followers_that_fit
from elaswave.types import WHOLE_STAGE, Stage

COSTS = make_costs([1.0] * 4, parameter_bytes=10.0, activation_bytes=7.0)
"""Of each layer 10 bytes of parameters, 20 of sums, 30 of state, 7 of a micro-batch's activations."""


def test_parts_add_up_to_what_a_worker_holds():
    parts = MemoryModel.of_width(COSTS, 3, copies=2).parts(1, 3, 5)
    assert parts == (20.0, 40.0, pytest.approx(2 * 30 * 2 / 3), 2 * 7 * 5, 0.0)
    assert parts.total == pytest.approx(20 + 40 + 40 + 70)


def test_a_shared_layer_is_sliced_over_the_workers_of_both_stages():
    stages = (Stage(start=0, stop=3, workers=(0, 1)), Stage(start=2, stop=4, workers=(2,)))
    model = MemoryModel.of_stages(COSTS, stages, followers=1)
    assert float(model.fixed_bytes(0, 3)) == pytest.approx(3 * 30 + 2 * (30 / 2 + 30 / 2 + 30 / 3))
    assert model.sent_bytes(2, 4) == pytest.approx(2 * 10 + 2 * (30 / 3 + 30))
    alone = MemoryModel.of_stages(COSTS, stages[1:], followers=5)  # no other worker could hold a copy
    assert alone.sent_bytes(3, 4) == pytest.approx(10 + 30)


def test_what_fits_in_flight():
    model = MemoryModel.of_width(COSTS, 2, copies=2)
    room = np.array([2 * 60 + 14 * 3, 2 * 60 + 14 * 3 - 1, 2 * 60 - 1.0])
    assert model.most_in_flight(0, 2, room).tolist() == [3, 2, -1]
    without = fitting(np.array([0.0, -1.0]), np.zeros(2))  # activations take no memory, but the layers may not fit
    assert without[0] == np.inf and without[1] < 0
    assert float(model.total_bytes(np.array(0), np.array(2), 3)) == model.parts(0, 2, 3).total


def test_what_an_interrupted_step_goes_on_with_is_counted():
    """Of a micro-batch in flight its output; and the gradients that were given back, one more than are in flight."""
    layers = tuple(replace(layer, boundary_bytes=100.0 * 10**index) for index, layer in enumerate(COSTS.layers))
    model = MemoryModel.of_width(replace(COSTS, layers=layers), 1, copies=1)
    assert model.parts(1, 3, 2).kept == 2 * 10_000 + 3 * 100
    assert model.parts(0, 1, 2).kept == 2 * 100, "no gradient is given back to where the model begins"
    assert model.parts(1, 4, 2).kept == 3 * 100, "the loss is where the model ends"
    assert model.parts(0, 4, 9).kept == 0
    for start, stop in ((0, 4), (0, 1), (1, 3), (3, 4)):
        total = model.parts(start, stop, 2).total
        stops, starts = model.ends(2)
        assert stops[stop] - starts[start] == pytest.approx(total)
        assert float(model.total_bytes(np.array(start), np.array(stop), 2)) == pytest.approx(total)
        assert total <= model.most_bytes(2)
        room = np.array([total, total - 1.0])
        assert model.most_in_flight(start, stop, room).tolist() == [2, 1]


@pytest.mark.parametrize("memory, followers", [(60, WHOLE_STAGE), (59, 2), (41, 2), (39, 1), (1, 1)])
def test_all_of_a_stage_follow_if_their_copies_fit_into_a_share_of_the_memory(memory, followers):
    """Four workers, of which each then holds three quarters of others' 20 bytes; else as many copies as fit, or one."""
    assert followers_that_fit(4, 20.0, memory, 0.25) == followers


def test_a_worker_alone_has_nobody_to_follow():
    assert followers_that_fit(1, 1e12, 1.0, 0.25) == WHOLE_STAGE
