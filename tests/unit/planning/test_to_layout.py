"""From a plan to a running layout: the one function."""

import numpy as np
from tests.property.clusters import make_cluster, make_costs
from tests.unit.planning_cases import plan

from elaswave.planning.costs.machines import ClusterEvent
from elaswave.planning.policy.fault_free_policies import fault_free
from elaswave.planning.programs.layout import JobModel, to_layout, validate_layout
from elaswave.planning.programs.prediction import step_s
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.search.recovery import survivor_layout


def test_a_plan_becomes_a_layout_of_all_members_with_the_step_that_its_programs_take():
    cluster, costs = make_cluster([1.0] * 6), make_costs([1.0, 2.0, 1.0, 2.0])
    before = fault_free(cluster, costs, 2, 3, 12)
    present = survivor_layout(make_routes(before, costs, cluster), [1])
    found = plan(cluster.without([1]), costs, before, ClusterEvent(kind="lost", workers=(1,)))
    job = JobModel(cluster, "1f1b", 1, costs)
    running = to_layout(found.allocation, job, costs, present)
    validate_layout(running.layout)
    assert running.layout.workers == present.workers
    assert running.execution.schedule == found.allocation.schedule
    assert running.predicted_step_s == job.step_s(running.layout, running.execution, costs)
    exact = step_s(cluster, costs, found.allocation, "exact")
    assert running.predicted_step_s <= exact * (1 + 1e-9)
    assert step_s(cluster, costs, found.allocation, "bound") <= exact * 1.15
    assert step_s(cluster, costs, found.allocation, "contended") >= exact * (1 - 1e-9)


def test_workers_that_a_plan_has_nothing_for_stay_members():
    cluster, costs = make_cluster([1.0] * 4), make_costs([1.0] * 4)
    present = make_routes(fault_free(cluster, costs, 2, 2, 4), costs, cluster)
    smaller = fault_free(cluster.take(np.array([0, 1])), costs, 2, 1, 4)
    running = to_layout(smaller, JobModel(cluster, "1f1b", 1), costs, present)
    assert running.layout.workers == (0, 1, 2, 3)
    assert {hop.worker for route in running.layout.routes for hop in route} == {0, 1}
    assert not running.execution.in_flight
