"""The objective against sums by hand: computing, links, what may be held, and the end of a step."""

from dataclasses import replace

import numpy as np
import pytest
from tests.far_jobs import far_cluster, far_costs, far_job

from elaswave.fences import coded_bytes
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.far_apart.job import costs_of_kind
from elaswave.planning.far_apart.objective import Model

SLOW = NetworkLink(bandwidth_bytes_per_s=1000.0, latency_s=0.5)


def evaluated(job, chain, cuts, schedule):
    model = Model(job)
    return model.evaluate([model.group(stage) for stage in chain], cuts, schedule)


def test_computing_bounds_a_fast_network():
    job = far_job(far_cluster([2], between=SLOW), far_costs([1.0, 2.0], boundary_bytes=0.0), followers=0)
    parts = evaluated(job, [(0,), (1,)], [1], "gpipe")
    # Forward: 1 s, then 8 x 2 s; backward: 8 x 4 s, then 2 s.
    assert parts.run_s == pytest.approx(1 + 16 + 32 + 2)
    assert parts.bound == "stage 1 computes"


def test_a_slow_link_bounds_both_phases():
    job = far_job(far_cluster([1, 1], between=SLOW), far_costs([1.0, 1.0], boundary_bytes=4000.0), followers=0)
    # Forward: 1 s, 8 transfers of 4 s, half a second of latency, 1 s; backward: 2 s each.
    assert evaluated(job, [(0,), (1,)], [1], "gpipe").run_s == pytest.approx(1 + 32 + 0.5 + 1 + 2 + 32 + 0.5 + 2)


def test_1f1b_waits_for_what_it_may_hold():
    link = NetworkLink(bandwidth_bytes_per_s=1e9, latency_s=10.0)
    job = far_job(far_cluster([1, 1], between=link), far_costs([1.0, 1.0], boundary_bytes=4.0), followers=0)
    parts = evaluated(job, [(0,), (1,)], [1], "1f1b")
    # The first stage holds 2 of 8 micro-batches: four times the way there and back.
    assert parts.run_s == pytest.approx(4 * (3 + 10 + 3 + 10), rel=1e-6)
    assert parts.bound == "what stage 0 may hold"


def test_stragglers_are_given_less():
    cluster = far_cluster([3], between=SLOW, speeds=[1.0, 1.0, 0.5])
    job = far_job(cluster, far_costs([1.0], boundary_bytes=0.0), microbatches=10, followers=0)
    assert Model(job).group((0, 1, 2)).counts.tolist() == [4, 4, 2]


def test_codecs_shrink_what_crosses_sites_only():
    costs = far_costs([1.0, 1.0, 1.0], boundary_bytes=4096.0)
    job = far_job(far_cluster([2, 1], between=SLOW), costs, codec="int8", followers=0)
    model = Model(job)
    inside = model.boundary(model.group((0,)), model.group((1,)))
    across = model.boundary(model.group((1,)), model.group((2,)))
    assert inside.ahead_s[1] == pytest.approx(4096 / 1e9)
    assert across.ahead_s[2] == pytest.approx(0.5 + coded_bytes("int8", (1024,), 4) / 1000)


def test_coding_takes_the_stages_time():
    costs = far_costs([1.0, 1.0], boundary_bytes=4096.0)
    job = far_job(far_cluster([1, 1], between=SLOW), costs, codec="int8", followers=0)
    slow = replace(job, memory_bandwidth_bytes_per_s=1000.0)
    coding_s = float(slow.coding_s[0])
    assert coding_s == pytest.approx((4096 + slow.coded_bytes[0]) / 1000)
    layers = costs_of_kind(slow, 0, (1,)).layers
    assert [layer.forward_s for layer in layers] == pytest.approx([1 + coding_s] * 2)
    assert layers[0].boundary_bytes == slow.coded_bytes[0]
    quick, long = (evaluated(each, [(0,), (1,)], [1], "gpipe").run_s for each in (job, slow))
    assert long > quick + 2 * 8 * coding_s - 1e-9


def test_reduce_and_gather_of_replicas_on_a_slow_link():
    parameters = 1000.0
    job = far_job(
        far_cluster([1, 1], between=SLOW), far_costs([1e-6], parameters=parameters), microbatches=2, followers=0
    )
    parts = evaluated(job, [(0, 1)], [], "gpipe")
    assert parts.reduce_s == pytest.approx(0.5 + 4.0, rel=1e-3)  # half of 8 bytes of each parameter
    assert parts.gather_s == pytest.approx(0.5 + 1.0)  # half of 2 bytes
    assert parts.vote_s == pytest.approx(0.5)


def test_an_eighth_of_gpt_2_to_a_follower_at_8_mbit_per_s():
    link = NetworkLink(bandwidth_bytes_per_s=1e6)
    costs = far_costs([1e-6, 1e-6], parameters=124e6 / 8)
    cluster = far_cluster([2, 1], between=link)
    outside = evaluated(far_job(cluster, costs, copies="outside"), [(0,), (1,)], [1], "gpipe")
    inside = evaluated(far_job(cluster, costs, copies="inside"), [(0,), (1,)], [1], "gpipe")
    assert outside.reduce_s == pytest.approx(62.0, rel=1e-3)
    assert inside.reduce_s < 0.1


def test_followers_in_the_stage_need_no_gather():
    cluster = far_cluster([2], between=SLOW)
    costs = far_costs([1e-6], parameters=1000.0)
    assert evaluated(far_job(cluster, costs), [(0, 1)], [], "gpipe").gather_s == 0.0
    assert evaluated(far_job(cluster, costs, followers=0), [(0, 1)], [], "gpipe").gather_s > 0.0


def test_memory_is_a_limit():
    cluster = far_cluster([1], between=SLOW, memory_bytes=100.0)
    costs = far_costs([1.0], activation_bytes=30.0)
    job = far_job(cluster, costs, followers=0)
    assert evaluated(job, [(0,)], [], "gpipe") is None  # 8 micro-batches of 30 bytes
    assert evaluated(job, [(0,)], [], "1f1b") is not None
    none = far_job(far_cluster([1], between=SLOW, memory_bytes=20.0), costs, followers=0)
    assert evaluated(none, [(0,)], [], "1f1b") is None


def test_a_job_that_does_not_fit_together_is_refused():
    job = far_job(far_cluster([2], between=SLOW), far_costs([1.0]))
    with pytest.raises(ValueError, match="the cluster has no network"):
        replace(job, cluster=replace(job.cluster, network=None, site=None))
    with pytest.raises(ValueError, match=r"costs are given for 2 of 1 kinds.*\[1, 2\] layers"):
        replace(job, costs=(far_costs([1.0]), far_costs([1.0, 1.0])))
    with pytest.raises(ValueError, match="there are 0 micro-batches"):
        replace(job, num_microbatches=0)
    with pytest.raises(ValueError, match="there are -1 followers"):
        replace(job, followers=-1)
    with pytest.raises(ValueError, match="there is no worker"):
        replace(job, cluster=job.cluster.take(np.zeros(2, dtype=bool)))
