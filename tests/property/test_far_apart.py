"""OP-Fence against brute force: all orders of stages, all ways to part the devices, all cuts, by the same objective."""

import random

import numpy as np
import pytest
from tests.far_jobs import DEVICE, far_costs, far_job
from tests.property.far_apart_brute_force import best_step_s

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.network import Network, NetworkLink
from elaswave.planning.far_apart.op_fence import op_fence

WITHIN = 1.05
"""Of the best plan there is."""


def random_job(seed, sizes, speeds, num_layers):
    """Links, layers and devices by chance; memory scarce in a third of the jobs."""
    rng = random.Random(seed)
    names = [f"s{number}" for number in range(len(sizes))]
    links = {}
    for first in names:
        for second in names:
            rate = 1e8 if first == second else 10 ** rng.uniform(4, 8)
            delay = 0.0 if first == second else rng.choice([0.001, 0.02, 0.2])
            links[first, second] = NetworkLink(bandwidth_bytes_per_s=rate, latency_s=delay)
    network = Network.of_links(names, links)
    count = sum(sizes)
    layers = [rng.choice([0.005, 0.01, 0.02, 0.04]) for _ in range(num_layers)]
    costs = far_costs(
        layers,
        boundary_bytes=rng.choice([1e3, 1e5]),
        parameters=rng.choice([1e3, 1e5]),
        activation_bytes=rng.choice([0.0, 1e5]),
    )
    cluster = Cluster(
        ids=np.arange(count),
        node=np.arange(count),
        speed=np.array([rng.choice(speeds) for _ in range(count)]),
        memory_bytes=np.full(count, rng.choice([1e12, 1e12, 8e5 + 30e5])),
        device=np.zeros(count, dtype=np.int64),
        devices=(DEVICE,),
        within_node=links["s0", "s0"],
        between_nodes=network.slowest,
        network=network,
        site=np.repeat(np.arange(len(sizes)), sizes),
    )
    return far_job(cluster, costs, microbatches=rng.choice([4, 8]), codec=rng.choice(["none", "int8"]),
                   copies=rng.choice(["inside", "outside"]))  # fmt: skip


def check(job, *, use_all):
    best = best_step_s(job, use_all=use_all)
    if best is None:
        with pytest.raises(InfeasiblePlan):
            op_fence(job, use_all=use_all)
        return None
    ratio = op_fence(job, use_all=use_all).step_s / best
    assert ratio <= WITHIN, ratio
    return ratio


@pytest.mark.parametrize("use_all", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_small_jobs(seed, use_all):
    sizes = ([2, 2], [3, 1], [1, 1, 2], [2, 1, 1], [4], [1, 2])[seed]
    check(random_job(seed, sizes, [1.0, 0.5], 4), use_all=use_all)


@pytest.mark.parametrize("seed", range(3))
def test_eight_devices(seed):
    sizes = ([4, 4], [2, 6], [3, 3, 2])[seed]
    check(random_job(100 + seed, sizes, [1.0], 4), use_all=True)


@pytest.mark.slow
@pytest.mark.parametrize("use_all", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_many_jobs(seed, use_all):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    speeds = [1.0, 0.5] if sum(sizes) <= 5 else [1.0]
    check(random_job(1000 + seed, sizes, speeds, rng.choice([4, 5])), use_all=use_all)
