"""A job that has grown beyond its beginning: the planner knows its new workers, and what they may draw."""

from dataclasses import replace

import numpy as np
import pytest

from elaswave.config.cluster import cluster_of, emulated_costs, power_limit_w, speed_of
from elaswave.config.load import build_config
from elaswave.coordinator.planning.replanning import Replanner
from elaswave.engine.blueprint import Blueprint
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.programs.layout import validate_layout
from elaswave.types import Hop, Layout, Stage


def config(policy="elaswave", name="a100", **device):
    return build_config(
        {
            "model": {"num_layers": 12, "hidden_size": 16, "num_heads": 2, "context_length": 8},
            "batch": {"num_microbatches": 12, "microbatch_size": 1},
            "layout": {"widths": [2, 2]},
            "elastic": {"policy": policy},
            "device": {"kind": "emulated", "model": "gpt2-small", "name": name, **device},
        }
    )


def grown(layout: Layout, worker: int) -> Layout:
    """The layout with a worker more in its last stage, which gets every other micro-batch there."""
    *others, last = layout.stages
    wider = Stage(start=last.start, stop=last.stop, workers=(*last.workers, worker))
    routes = tuple(
        route if number % 2 else (*route[:-1], Hop(worker, route[-1].stage, route[-1].start, route[-1].stop))
        for number, route in enumerate(layout.routes)
    )
    return Layout(stages=(*others, wider), routes=routes, shared=layout.shared)


def test_a_worker_that_joins_has_the_devices_speed():
    given = config(speeds=[1, 0.5, 1, 1])
    assert [speed_of(given, worker) for worker in (0, 1, 4, 900)] == [1, 0.5, 1, 1]
    assert cluster_of(given, (1, 3, 7)).speed.tolist() == [0.5, 1, 1]
    assert speed_of(config(), 4) == 1
    assert cluster_of(given).speed.tolist() == [1, 0.5, 1, 1]


def test_who_joins_brings_its_power_and_who_is_lost_leaves_it():
    given = config(name="ascend-910b", frequency="emulated")
    assert power_limit_w(config(name="ascend-910b"), 4) is None  # nothing sets clocks
    assert power_limit_w(given, 4) == cluster_of(given).power_limit_w
    at_start = power_limit_w(given, 4)
    assert at_start is not None
    assert power_limit_w(given, 2) == at_start
    assert power_limit_w(given, 6) == at_start * 6 / 4


@pytest.mark.parametrize("policy", ["elaswave", "recycle_rerouting"])
def test_the_planner_answers_for_a_grown_job(policy):
    given = config(policy, name="ascend-910b", frequency="emulated")
    blueprint, costs = Blueprint(given), emulated_costs(given)
    layout = grown(blueprint.layout, 9)
    validate_layout(layout)
    replanner = Replanner(given)
    execution = replanner.within_memory(layout, blueprint.execution)
    assert replanner.predict(layout, execution, costs) > 0
    ask = replanner.at({9: 0.5})
    assert ask.predict(layout, execution, costs) > replanner.predict(layout, execution, costs)
    found = replanner.baseline(layout, execution, [1], costs)  # as the run's policy has it
    validate_layout(found.layout)
    assert found.layout.workers == (0, 2, 3, 9)
    assert found.reason.startswith(policy) and "no plan" not in found.reason


def test_a_cluster_is_joined_in_the_order_of_ids():
    given = config(speeds=[1, 0.5, 1, 1])
    start = cluster_of(given)
    measured = replace(start, speed=start.speed * 0.25)
    joined = measured.joined_by(cluster_of(given, (1, 4, 6))).joined_by(cluster_of(given, (5,)))
    assert joined.ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert joined.speed.tolist() == [0.25, 0.125, 0.25, 0.25, 1, 1, 1]
    assert joined.power_limit_w == start.power_limit_w
    assert joined.index_of(np.array([6])).tolist() == [6]


def test_a_cluster_is_not_joined_by_other_devices():
    one, other = cluster_of(config()), cluster_of(config(name="ascend-910b"))
    assert isinstance(one, Cluster)
    with pytest.raises(ValueError, match=r"the others have the devices .*, those of the cluster are .*: describe both"):
        one.joined_by(other)
