"""What policies hold more than once, the smallest sets of workers that are fatal, and how that is said."""

from itertools import combinations

import numpy as np
import pytest
from tests.unit.planning_cases import layers, machines

from elaswave.planning.plan import Allocation
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.planning.policy.replication import WholeGroups, WholeStages, WithoutCopies, layer_ranges
from elaswave.planning.state_moves.placed_blocks import PlacedBlocks, Placing
from elaswave.planning.survival import percent, survival

COSTS = layers(1, 1, 1, 1)


def job(num_workers: int, num_stages: int = 2) -> Allocation:
    return rectangle(machines(num_workers), COSTS, num_stages=num_stages, num_microbatches=num_workers, schedule="1f1b")


def copies_of(allocation: Allocation):
    cluster = machines(len(allocation.workers))
    return [
        WithoutCopies(allocation), WholeStages(allocation), WholeStages(allocation, {1}), WholeGroups(allocation),
        WholeGroups(allocation, {0}), PlacedBlocks.of(allocation, cluster, Placing(followers=0), COSTS),
        PlacedBlocks.of(allocation, cluster, Placing(scatter_width=1), COSTS),
        PlacedBlocks.of(allocation, cluster, Placing(scatter_width=None, knows_hosts=False), COSTS),
        PlacedBlocks.of(allocation, cluster, Placing(followers=2, scatter_width=1), COSTS),
    ]  # fmt: skip


@pytest.mark.parametrize("num_workers", [4, 6, 8])
@pytest.mark.parametrize("index", range(9))
def test_losses_are_fatal_if_they_contain_a_fatal_set(index, num_workers):
    """Every set of up to four workers; groups that are lost worker by worker have sets as large as there are groups."""
    copies = copies_of(job(num_workers))[index]
    fatal = [frozenset(each) for size in range(1, 5) for each in copies.fatal_sets(size)]
    assert all(not one < other for one in fatal for other in fatal)
    for size in range(1, 5):
        for gone in map(frozenset, combinations(range(num_workers), size)):
            assert copies.lost_with(gone) == any(each <= gone for each in fatal), (gone, fatal)


def test_layers_are_cut_where_other_workers_run_them():
    allocation = job(4)
    found = [(each.start, each.stop, each.members.tolist()) for each in layer_ranges(allocation)]
    assert found == [(0, 2, [0, 1]), (2, 4, [2, 3])]
    both = Allocation(chains=(*allocation.chains, *job(3, num_stages=3).chains), schedule="1f1b")
    found = [(each.start, each.stop, each.members.tolist()) for each in layer_ranges(both)]
    assert found[0] == (0, 1, [0, 1])  # worker 0 of the second pipeline, too
    assert [start for start, _, _ in found] == [0, 1, 2, 3] or len(found) == 3


def survived(num_workers: int, num_stages: int, make, hosts: int = 4):
    allocation = job(num_workers, num_stages)
    cluster = machines(num_workers, workers_per_node=hosts)
    return survival(make(allocation, cluster), allocation.workers, cluster.node)


def test_what_a_job_survives():
    everybody = Placing(scatter_width=None, knows_hosts=False)
    found = survived(64, 4, lambda allocation, cluster: PlacedBlocks.of(allocation, cluster, everybody, COSTS))
    assert found.workers == (1, 1 - 480 / 2016)  # 4 stages of 16: all 4 x 120 pairs of a stage
    assert found.describe() == "survives any one worker; 76 % of pairs; no whole host"
    replica_peers = survived(
        64, 4, lambda allocation, cluster: PlacedBlocks.of(allocation, cluster, Placing(scatter_width=2), COSTS)
    )
    assert replica_peers.workers == (1, 1 - 64 / 2016)  # each has two replica peers
    assert replica_peers.describe() == "survives any one worker; 97 % of pairs; any whole host"
    assert survived(8, 2, lambda a, _: WholeStages(a)).describe() == "survives any three workers; no whole host"
    assert (
        survived(8, 2, lambda a, _: WithoutCopies(a)).describe() == "survives no loss of single workers; no whole host"
    )
    two_groups = survived(4, 2, lambda a, _: WholeGroups(a), hosts=1)
    assert two_groups.describe() == "survives any one worker; 33 % of pairs; any whole host"
    narrow = survived(4, 4, lambda a, _: WholeStages(a), hosts=1)
    assert narrow.describe() == "survives no loss of single workers; no whole host"


def test_more_fatal_sets_than_are_listed_are_estimated(monkeypatch):
    monkeypatch.setattr("elaswave.planning.survival.LISTED_MAX", 10)
    monkeypatch.setattr("elaswave.planning.survival.DRAWN", 2000)
    stages = Placing(scatter_width=None, knows_hosts=False)
    found = survived(16, 4, lambda allocation, cluster: PlacedBlocks.of(allocation, cluster, stages, COSTS))
    assert found.drawn
    assert found.workers[1] == pytest.approx(1 - 24 / 120, abs=0.03)
    assert "; about " in found.describe()
    assert found == survived(16, 4, lambda allocation, cluster: PlacedBlocks.of(allocation, cluster, stages, COSTS))


def test_shares_are_never_rounded_to_all():
    assert [percent(share) for share in (0.96, 0.994, 0.996, 0.99999)] == ["96 %", "99 %", "99.6 %", "99.999 %"]
    assert percent(1 - 1e-12) == "all but 1.0e-12"


def test_hosts_are_counted_each_once():
    nodes = np.array([3, 1, 3, 1])
    found = survival(WholeStages(job(4)), np.arange(4), nodes)  # stages 0, 1 and 2, 3
    assert (found.hosts, found.num_hosts) == (2, 2)


def test_what_a_job_survives_of_racks():
    allocation, racks = job(4), np.array([0, 0, 1, 1])  # stages 0, 1 and 2, 3
    found = survival(WholeStages(allocation), allocation.workers, allocation.workers, racks)
    assert (found.racks, found.num_racks) == (0, 2)
    assert found.describe().endswith("any whole host; no whole rack")
    by_stage = survival(WholeStages(allocation), allocation.workers, allocation.workers, np.array([0, 1, 0, 1]))
    assert by_stage.describe().endswith("any whole host; any whole rack")
