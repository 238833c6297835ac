"""Plans as values: their JSON form, and allocations that cannot be."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.planning_cases import layers, machines

from elaswave.config.policy_code import policies
from elaswave.planning.costs.machines import ClusterEvent
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy.policy_parts import rectangle

COSTS = layers(*[1.0] * 9)


def plan_of(policy: str) -> Plan:
    cluster = machines(12)
    start = rectangle(cluster, COSTS, num_stages=3, num_microbatches=16, schedule="1f1b")
    return policies()[policy](cluster.without([5]), COSTS, start, ClusterEvent(kind="lost", workers=(5,)))


@pytest.mark.parametrize("policy", list(policies()))
def test_a_plan_has_a_json_form(policy: str) -> None:
    found = plan_of(policy)
    found.allocation.check()
    document = found.to_json()
    assert json.loads(json.dumps(document)) == json.loads(json.dumps(document, allow_nan=False))
    stages = [stage for chain in document["chains"] for stage in chain["stages"]]
    assert sorted(worker for stage in stages for worker in stage["workers"]) == sorted(found.allocation.workers)
    assert sum(chain["num_microbatches"] for chain in document["chains"]) == document["num_microbatches"]
    assert len(document["memory_bytes"]) == len(found.allocation.workers)


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (0, {"start": 1}, "chain 0: it begins at layer 1, needed: 0"),
        (1, {"start": 6}, "stage 1 holds layers [6, 6), needed: at least one"),
        (1, {"start": 4}, "micro-batches are cut at layers {3: 16} behind stage 0, which ends at 3, and the next one"),
        (1, {"workers": np.array([7, 6, 4])}, "the workers of stage 1 do not ascend"),
        (1, {"workers": np.array([4, 6, 8])}, "worker 8 is in two stages"),
        (1, {"workers": np.array([4])}, "stage 1 has 1 workers, micro-batches of 3 and levels of 3"),
        (1, {"num_microbatches": np.array([17, -1, 0])}, "stage 1 has a number of micro-batches or a level below 0"),
        (1, {"num_microbatches": np.array([5, 5, 5])}, "stage 1 runs 15 micro-batches of 16"),
    ],
)
def test_an_allocation_that_cannot_be(stage: int, changes: dict[str, Any], message: str) -> None:
    (chain,) = plan_of("recycle").allocation.chains
    stages = [replace(each, **changes) if index == stage else each for index, each in enumerate(chain.stages)]
    with pytest.raises(ValueError, match=re.escape(message)):
        Allocation(chains=(replace(chain, stages=tuple(stages)),), schedule="1f1b").check()


def test_chains_that_do_not_fit_together() -> None:
    (chain,) = plan_of("recycle").allocation.chains
    with pytest.raises(ValueError, match="15 micro-batches of 16 are cut behind stage 0"):
        Allocation(chains=(replace(chain, cuts=({3: 15}, {6: 16})),), schedule="1f1b").check()
    with pytest.raises(ValueError, match="3 stages with 1 cuts, needed: at least one stage, a cut between each two"):
        Allocation(chains=(replace(chain, cuts=chain.cuts[:1]),), schedule="1f1b").check()
    shorter = replace(chain, stages=chain.stages[:2], cuts=chain.cuts[:1])
    with pytest.raises(ValueError, match="chains end at different layers; worker 0 is in two stages"):
        Allocation(chains=(chain, shorter), schedule="1f1b").check()
    with pytest.raises(ValueError, match="the schedule is '2f2b', needed: one of 1f1b, gpipe, zero-bubble"):
        Allocation(chains=(chain,), schedule="2f2b").check()  # type: ignore[arg-type]
