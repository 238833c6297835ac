"""One step of a run over slow links in virtual time: its programs, and what follows them, frame by frame.

Planning has formulas for REDUCE, VOTE and GATHER (`elaswave.planning.far_apart.objective`), which know neither who
follows which block nor which frames queue. Here they are what the engine sends: the frames of `traffic_of`, each behind
those that its sender has sent to the same site before, and the rounds of the vote.

Left out: what summing, applying and the frames' heads take, and evaluations, checkpoints and copies beside steps.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from elaswave.blocks.placement import Block, Placement
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.step_time.contended import simulate_step
from elaswave.protocol.step.traffic import Shipment, doubling, traffic_of
from elaswave.types import Layout, Program

GRADIENT_BYTES = 4
"""Of an element of a mean gradient."""


class FarStep(NamedTuple):
    """Seconds of a step."""

    run_s: float
    """Until the last worker has ended its program."""
    prepared_s: float
    """Until the last worker is prepared: REDUCE."""
    voted_s: float
    """Until the last worker knows the vote."""
    step_s: float
    """Until all have the parameters for the next step."""


class _Wires:
    """What each worker sends to each site, one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._free_s: dict[tuple[int, int], float] = {}

    def link(self, source: int, target: int) -> NetworkLink:
        first, second = self._cluster.index_of([source, target]).tolist()
        return self._cluster.link_between(first, second)

    def send(self, source: int, target: int, num_bytes: float, at_s: float) -> float:
        """When a frame has arrived."""
        link, site = self.link(source, target), self._cluster.site
        assert site is not None
        where = (source, int(site[self._cluster.index_of([target])[0]]))
        left_s = max(at_s, self._free_s.get(where, 0.0)) + num_bytes / link.bandwidth_bytes_per_s
        self._free_s[where] = left_s
        return left_s + link.latency_s


def far_step(
    layout: Layout,
    programs: Mapping[int, Program],
    placement: Placement,
    blocks: Sequence[Block],
    costs: Costs,
    cluster: Cluster,
    *,
    vote_bytes: float = 0.0,
    parameter_bytes: int = 4,
    sum_bytes: int = 8,
) -> FarStep:
    """Runs a step.

    Args:
        layout, programs: of the run.
        placement: who owns and follows which block.
        blocks: of the model.
        costs: of the layers, with the bytes that its links carry.
        cluster: of the layout's workers, with a network.
        vote_bytes: of a ballot.
        parameter_bytes: of an element of the parameters that workers compute with.
        sum_bytes: of an element of a partial sum.
    """
    timeline = simulate_step(layout, programs, costs, cluster).timeline
    workers = layout.workers
    end_s = {worker: timeline.end_s[worker][-1] if timeline.end_s[worker] else 0.0 for worker in workers}
    traffic = {worker: traffic_of(worker, tuple(blocks), layout, placement, placement) for worker in workers}
    sizes = [block.num_elements for block in blocks]
    wires = _Wires(cluster)

    def bytes_of(shipment: Shipment, each: int) -> float:
        return float(each * sum(sizes[block] for block in shipment.blocks))

    summed_s: dict[tuple[int, int], float] = {}
    for worker in sorted(workers, key=lambda each: end_s[each]):
        for layer in sorted(traffic[worker].partials_out, reverse=True):
            for shipment in traffic[worker].partials_out[layer]:
                at_s = wires.send(worker, shipment.peer, bytes_of(shipment, sum_bytes), end_s[worker])
                owned = (shipment.peer, layer)
                summed_s[owned] = max(summed_s.get(owned, 0.0), at_s)
    prepared_s = dict(end_s)
    for owner in workers:
        now_s = end_s[owner]
        for layer in traffic[owner].owned:
            now_s = max(now_s, summed_s.get((owner, layer), 0.0))
            for shipment in traffic[owner].reduced_out.get(layer, ()):
                at_s = wires.send(owner, shipment.peer, bytes_of(shipment, GRADIENT_BYTES), now_s)
                prepared_s[shipment.peer] = max(prepared_s[shipment.peer], at_s)
        prepared_s[owner] = max(prepared_s[owner], now_s)
    voted_s = _vote(workers, prepared_s, wires, vote_bytes)
    have_s = dict(voted_s)
    for owner in workers:
        for shipment in traffic[owner].parameters_out:
            at_s = wires.send(owner, shipment.peer, bytes_of(shipment, parameter_bytes), voted_s[owner])
            have_s[shipment.peer] = max(have_s[shipment.peer], at_s)
    return FarStep(
        run_s=max(end_s.values()),
        prepared_s=max(prepared_s.values()),
        voted_s=max(voted_s.values()),
        step_s=max(have_s.values()),
    )


def _vote(
    workers: tuple[int, ...], prepared_s: Mapping[int, float], wires: _Wires, num_bytes: float
) -> dict[int, float]:
    """When each worker knows the vote: recursive doubling."""
    roles = {worker: doubling(workers, worker) for worker in workers}
    now_s = dict(prepared_s)
    for worker, (helper, _, _) in roles.items():
        if helper is not None:
            now_s[helper] = max(now_s[helper], wires.send(worker, helper, num_bytes, prepared_s[worker]))
    for turn in range(max((len(replica_peers) for _, _, replica_peers in roles.values()), default=0)):
        before_s = dict(now_s)
        for worker, (_, _, replica_peers) in roles.items():
            if turn < len(replica_peers):
                peer = replica_peers[turn]
                now_s[peer] = max(now_s[peer], wires.send(worker, peer, num_bytes, before_s[worker]))
    for worker, (helper, _, _) in roles.items():
        if helper is not None:
            now_s[worker] = max(now_s[worker], wires.send(helper, worker, num_bytes, now_s[helper]))
    return now_s
