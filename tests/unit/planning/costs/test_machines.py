"""Workers as columns: where each is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaswave.planning.costs.machines import Cluster, DeviceSpec
from elaswave.planning.costs.network import NetworkLink

LINK = NetworkLink(bandwidth_bytes_per_s=1e9, latency_s=0.0)
DEVICE = DeviceSpec(name="device", flops_per_s=1e12, memory_bytes=1e9, source="made up")


def cluster_of(ids: list[int]) -> Cluster:
    everybody = Cluster.uniform(ids[-1] + 1, DEVICE, within_node=LINK, between_nodes=LINK)
    return everybody.take(np.array(ids))


@given(st.sets(st.integers(0, 40), min_size=1), st.lists(st.integers(-3, 44), max_size=40))
def test_workers_are_found_whatever_ids_are_missing(ids, wanted):
    """Few and many of them, with few gaps between ids and with many."""
    ids = sorted(ids)
    cluster = cluster_of(ids)
    there = [worker for worker in wanted if worker in ids]
    assert cluster.index_of(there).tolist() == [ids.index(worker) for worker in there]
    if there != wanted:
        with pytest.raises(KeyError, match="not all of the workers .* are in the cluster"):
            cluster.index_of(wanted)
