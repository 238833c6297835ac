"""A step over slow links in virtual time, against sums by hand."""

import numpy as np
import pytest
from benchmarks.far_step import far_step

from elaswave.blocks.placement import Placement, make_blocks
from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.costs.machines import Cluster, DeviceSpec, FrequencyLevel
from elaswave.planning.costs.network import Network, NetworkLink
from elaswave.planning.programs.execution import programs_of
from elaswave.planning.programs.layout import make_layout
from elaswave.types import ExecutionParameters

DEVICE = DeviceSpec(
    name="d", flops_per_s=1.0, memory_bytes=1e9, levels=(FrequencyLevel(speed=1.0, power_w=1.0),), source=""
)
FAST = NetworkLink(bandwidth_bytes_per_s=1e9, latency_s=0.0)
LAYER = LayerCosts(
    forward_s=1.0, input_gradient_s=1.0, weight_gradient_s=1.0, parameter_bytes=0.0, accumulator_bytes=0.0,
    optimizer_bytes=0.0, activation_bytes=0.0, boundary_bytes=100.0,
)  # fmt: skip


def cluster(num_workers: int) -> Cluster:
    """Each worker at a site of its own: 100 bytes a second and 10 s there, 50 and 20 s back."""
    latency, bandwidth = np.full((num_workers, num_workers), 10.0), np.full((num_workers, num_workers), 100.0)
    latency[np.tril_indices(num_workers, -1)] = 20.0
    bandwidth[np.tril_indices(num_workers, -1)] = 50.0
    network = Network(
        sites=tuple(f"s{site}" for site in range(num_workers)), latency_s=latency, bandwidth_bytes_per_s=bandwidth
    )
    ids = np.arange(num_workers, dtype=np.int64)
    return Cluster(
        ids=ids, node=ids, speed=np.ones(num_workers), memory_bytes=np.full(num_workers, 1e9), device=0 * ids,
        devices=(DEVICE,), within_node=FAST, between_nodes=FAST, network=network, site=ids,
    )  # fmt: skip


def run(widths, owner, followers, num_microbatches=1, vote_bytes=0.0):
    layout = make_layout(
        widths=widths, layers_per_stage=(1,) * len(widths), num_microbatches=num_microbatches, shared=()
    )
    programs = programs_of(layout, ExecutionParameters(), "gpipe")
    blocks = make_blocks([25] * len(widths), 32)
    placement = Placement.of(owners=owner, followers=followers)
    costs = Costs(layers=(LAYER,) * len(widths))
    return far_step(layout, programs, placement, blocks, costs, cluster(sum(widths)), vote_bytes=vote_bytes)


def test_a_pipeline_of_two_sites_without_followers() -> None:
    step = run((1, 1), (0, 1), ((), ()))
    # forward, there, forward and backward, back, backward
    assert step.run_s == pytest.approx(1 + 11 + 3 + 22 + 2)
    assert step.prepared_s == step.run_s
    # worker 1 has been prepared long before; the vote's one round ends with what worker 0 sends
    assert step.voted_s == step.step_s == pytest.approx(step.run_s + 10)


def test_the_bytes_of_a_vote_count() -> None:
    assert run((1, 1), (0, 1), ((), ()), vote_bytes=200).voted_s == pytest.approx(39 + 2 + 10)


def test_mean_gradients_go_to_followers() -> None:
    step = run((1, 1), (0, 1), ((1,), (0,)))
    # worker 0 ends at 39 and sends 100 bytes; what worker 1 has sent to it long before is there
    assert step.prepared_s == pytest.approx(39 + 1 + 10)


def test_replicas_send_sums_to_the_owner_and_get_parameters() -> None:
    step = run((2,), (0,), ((),), num_microbatches=2)
    assert step.run_s == 3
    # 200 bytes of sums to the owner, over the slow way back
    assert step.prepared_s == pytest.approx(3 + 4 + 20)
    # the vote: the owner sends at 27; then 100 bytes of parameters behind it
    assert step.voted_s == pytest.approx(27 + 10)
    assert step.step_s == pytest.approx(27 + 1 + 10)
