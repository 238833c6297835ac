"""Links per pair of sites: what they take, what is refused, and a cluster that has them."""

from dataclasses import replace

import numpy as np
import pytest
from tests.far_jobs import DEVICE, far_cluster, far_costs

from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.network import Network, NetworkLink
from elaswave.planning.costs.step_time.contended import simulate_step
from elaswave.planning.costs.step_time.exact import durations_of, transfer_of
from elaswave.planning.programs.programs import compile_programs
from elaswave.types import Hop, Layout, Stage

SLOW = NetworkLink(bandwidth_bytes_per_s=1000.0, latency_s=0.5)
FAST = NetworkLink(bandwidth_bytes_per_s=1e6)


def test_links_by_pair_and_direction():
    back = NetworkLink(bandwidth_bytes_per_s=10.0, latency_s=2.0)
    network = Network.of_links(["a", "b"], {("a", "a"): FAST, ("b", "b"): FAST, ("a", "b"): SLOW, ("b", "a"): back})
    assert network.link(0, 1) == SLOW
    assert network.link(1, 0) == back
    assert network.slowest == NetworkLink(bandwidth_bytes_per_s=10.0, latency_s=2.0)


def test_one_direction_stands_for_both():
    network = Network.of_links(["a", "b"], {("a", "a"): FAST, ("b", "b"): FAST, ("a", "b"): SLOW})
    assert network.link(1, 0) == SLOW


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="no link between a and b; each pair of sites needs one"):
        Network.of_links(["a", "b"], {("a", "a"): FAST, ("b", "b"): FAST})
    with pytest.raises(ValueError, match="links name 'c', but the sites are a"):
        Network.of_links(["a"], {("a", "c"): FAST})
    zeros, ones = np.zeros((2, 2)), np.ones((2, 2))
    with pytest.raises(ValueError, match=r"bandwidth_bytes_per_s from a to a is 0.0, needed: above 0"):
        Network(sites=("a", "b"), latency_s=zeros, bandwidth_bytes_per_s=zeros)
    with pytest.raises(ValueError, match=r"latency_s from a to a is -1.0, needed: at least 0"):
        Network(sites=("a", "b"), latency_s=-ones, bandwidth_bytes_per_s=ones)
    with pytest.raises(ValueError, match=r"two sites have one name.*shape \(1, 1\), needed: \(2, 2\)"):
        Network(sites=("a", "a"), latency_s=np.zeros((1, 1)), bandwidth_bytes_per_s=ones)
    with pytest.raises(ValueError, match="there are 0 sites"):
        Network(sites=(), latency_s=np.zeros((0, 0)), bandwidth_bytes_per_s=np.zeros((0, 0)))


def test_a_cluster_knows_the_site_of_each_worker():
    cluster = far_cluster([2, 1], between=SLOW)
    assert cluster.link_between(0, 2) == SLOW
    assert cluster.link_between(0, 1) == cluster.network.link(0, 0)
    assert cluster.without([0]).site.tolist() == [0, 1]
    assert cluster.without([1]).joined_by(cluster).site.tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match="the others are in another network"):
        cluster.joined_by(far_cluster([2, 1], between=FAST))
    with pytest.raises(ValueError, match="a network needs the site of each worker"):
        replace(cluster, site=None)
    with pytest.raises(ValueError, match="site has 1 entries for 3 workers"):
        replace(cluster, site=np.zeros(1, dtype=np.int64))
    with pytest.raises(ValueError, match="sites run from 7 to 7, needed: 0 to 1"):
        replace(cluster, site=np.full(3, 7))


def test_without_a_network_there_are_two_kinds_of_links():
    cluster = Cluster.uniform(4, DEVICE, within_node=FAST, between_nodes=SLOW, workers_per_node=2)
    assert (cluster.link_between(0, 1), cluster.link_between(0, 2)) == (FAST, SLOW)


def two_stages(num_microbatches):
    routes = tuple((Hop(0, 0, 0, 1), Hop(1, 1, 1, 2)) for _ in range(num_microbatches))
    return Layout(stages=(Stage(start=0, stop=1, workers=(0,)), Stage(start=1, stop=2, workers=(1,))), routes=routes)


def test_transfers_take_the_link_between_their_sites():
    cluster, costs = far_cluster([1, 1], between=SLOW), far_costs([1.0, 1.0], boundary_bytes=2000.0)
    assert transfer_of(costs, cluster)(Hop(0, 0, 0, 1), Hop(1, 1, 1, 2), 0) == pytest.approx(2.5)


def test_transfers_to_another_site_go_one_after_the_other():
    cluster, costs = far_cluster([1, 1], between=SLOW), far_costs([0.1, 0.1], boundary_bytes=2000.0)
    layout = two_stages(3)
    programs = compile_programs(layout, "gpipe", durations=durations_of(costs.layer_s, cluster.speed_of()))
    step = simulate_step(layout, programs, costs, cluster)
    arrived = [transfer.end_s for transfer in step.transfers if not transfer.is_gradient]
    assert arrived == pytest.approx([2.6, 4.6, 6.6])  # 2 s each, and half a second of latency


def test_durations_can_be_given():
    cluster, costs = far_cluster([1, 1], between=FAST), far_costs([1.0, 1.0], boundary_bytes=0.0)
    layout = two_stages(1)
    durations = durations_of(costs.layer_s, lambda worker: 2.0)
    programs = compile_programs(layout, "1f1b", durations=durations)
    assert simulate_step(layout, programs, costs, cluster, durations=durations).step_s == pytest.approx(3.0)
