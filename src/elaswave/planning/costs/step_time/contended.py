"""One training step on virtual time: programs run as the executor runs them, over links that transfers share.

The fidelity ``contended``. ``exact`` answers the same question for planners, a hundred thousand times as often, and
lets every transfer have its link to itself. Here a worker has one outgoing link within its node and one between nodes
(the levels of `Cluster`), or one to each site of a network. The transfers that it sends over one link at the same time
share its bandwidth equally, as flows of one network card do; over a link of a network they go one after the other, as
frames of one connection do, since a queue there lasts so long that it matters who comes first. So a transfer may slow
down while it runs, which takes events. Receivers and switches are taken to keep up. As in the executor, sends never
keep a worker from computing.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.network import NetworkLink
from elaswave.planning.costs.step_time.exact import (
    FORWARD,
    WEIGHT,
    Durations,
    StepGraph,
    Timeline,
    durations_of,
    run_in_order,
    transfer_of,
)
from elaswave.types import Layout, Program


class StepTransfer(NamedTuple):
    """A tensor on its way between the workers of two neighbouring hops of a route."""

    source: int
    """Worker that sends."""
    target: int
    """Worker that receives."""
    is_gradient: bool
    """False: an activation."""
    microbatch: int
    stage: int
    """Of the receiving hop."""
    num_bytes: float
    start_s: float
    """When it was computed, and handed to the link."""
    sent_s: float
    """When its last byte has left."""
    end_s: float
    """When it is there: the link's latency later."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """A step and everything that happened in it; times in seconds from its beginning."""

    timeline: Timeline
    transfers: tuple[StepTransfer, ...]
    """In the order in which their last bytes leave."""
    overhead_s: float
    """Of a step beside its actions, as the costs say."""
    uncontended_s: float
    """What the step would take if every transfer had its link to itself."""

    @property
    def step_s(self) -> float:
        """Of the whole step."""
        return self.timeline.step_s + self.overhead_s

    @cached_property
    def sent_bytes(self) -> dict[int, float]:
        """Worker -> bytes of activations and gradients that it sends."""
        total = dict.fromkeys(self.timeline.layout.workers, 0.0)
        for transfer in self.transfers:
            total[transfer.source] += transfer.num_bytes
        return total

    def to_json(self) -> dict[str, object]:
        """Describes the step as plain data: gives what a person asks for, not every action."""
        return {
            "step_s": self.step_s,
            "overhead_s": self.overhead_s,
            "uncontended_s": self.uncontended_s,
            "stage_bubble_fractions": self.timeline.stage_bubble_fractions,
            "worker_bubble_fractions": {str(w): share for w, share in self.timeline.bubble_fractions.items()},
            "num_transfers": len(self.transfers),
            "sent_bytes": {str(worker): total for worker, total in self.sent_bytes.items()},
        }


def simulate_step(
    layout: Layout,
    programs: Mapping[int, Program],
    costs: Costs,
    cluster: Cluster,
    *,
    levels: Mapping[int, int] | None = None,
    durations: Durations | None = None,
) -> SimulatedStep:
    """Runs a step.

    Args:
        layout: whose routes the programs run.
        programs: of all workers, valid (see `elaswave.planning.programs.validation`).
        costs: of the model's layers.
        cluster: speeds of the workers, their nodes and links.
        levels: worker -> index of its frequency level; others run at their device's base level.
        durations: seconds of every action, instead of those of the costs and the cluster's speeds.
    Raises:
        InvalidProgramError: an action of no route, or programs that wait for each other for ever.
        KeyError: a worker of the layout that the cluster lacks.
    """
    durations = durations or durations_of(costs.layer_s, cluster.speed_of(levels))
    alone = StepGraph(layout, durations, transfer_of(costs, cluster))
    encoded = alone.encode(programs)
    uncontended_s = run_in_order(alone, encoded).makespan  # also makes sure that the programs come to their end
    run = _ContendedRun(alone, encoded, costs, cluster)
    run.run()
    overhead_s = costs.overhead_s(layout.stages)
    return SimulatedStep(
        timeline=Timeline(
            layout=layout,
            programs=programs,
            start_s=dict(zip(alone.workers, run.starts, strict=True)),
            end_s=dict(zip(alone.workers, run.ends, strict=True)),
        ),
        transfers=tuple(run.transfers),
        overhead_s=overhead_s,
        uncontended_s=uncontended_s + overhead_s,
    )


class _Sending(NamedTuple):
    """A transfer under way; ordered by when it will have left, in bytes that each transfer of its link has sent."""

    leaves_at: float
    number: int
    code: int
    """The action that waits for it."""
    num_bytes: float
    start_s: float
    source: int


class _SharedLink:
    """One level of a worker's outgoing bandwidth, shared equally by what is sent over it.

    Args:
        link: the level.
    """

    def __init__(self, link: NetworkLink) -> None:
        self.latency_s = link.latency_s
        self._bandwidth = link.bandwidth_bytes_per_s
        self.sendings: list[_Sending] = []
        """A heap."""
        self.each_sent = 0.0
        """Bytes that a transfer would have sent which had been there from the beginning."""
        self._counted_at_s = 0.0
        self.version = 0
        """Rises whenever the next end may have changed."""

    def last_byte(self, num_bytes: float) -> float:
        """Computes where in `each_sent` the last byte of a transfer will be that begins now."""
        return self.each_sent + num_bytes

    def count(self, now_s: float) -> None:
        """Takes account of the time that has passed."""
        if self.sendings:
            self.each_sent += (now_s - self._counted_at_s) * self._bandwidth / len(self.sendings)
        self._counted_at_s = now_s

    def next_end_s(self) -> float:
        """Computes when the next transfer will have left if none is added."""
        left = max(0.0, self.sendings[0].leaves_at - self.each_sent)
        return self._counted_at_s + left * len(self.sendings) / self._bandwidth


class _QueuedLink(_SharedLink):
    """A link over which transfers go one after the other; `each_sent` is what all of them have sent.

    Args:
        link: between two sites.
    """

    def __init__(self, link: NetworkLink) -> None:
        super().__init__(link)
        self._queued = 0.0

    def last_byte(self, num_bytes: float) -> float:
        """Places the last byte behind those that are queued."""
        self._queued = (self._queued if self.sendings else self.each_sent) + num_bytes
        return self._queued

    def count(self, now_s: float) -> None:
        """Takes account of the time that has passed."""
        if self.sendings:
            self.each_sent += (now_s - self._counted_at_s) * self._bandwidth
        self._counted_at_s = now_s

    def next_end_s(self) -> float:
        """Computes when the first transfer will have left."""
        return self._counted_at_s + max(0.0, self.sendings[0].leaves_at - self.each_sent) / self._bandwidth


_ACTION_ENDS, _LINK_TURNS, _INPUT_ARRIVES = range(3)


class _ContendedRun:
    """The simulation.

    Args:
        flow: nodes and durations; its transfers are not used.
        encoded: the programs.
        costs, cluster: sizes and links of transfers.
    """

    def __init__(self, flow: StepGraph, encoded: list[list[int]], costs: Costs, cluster: Cluster) -> None:
        self._flow = flow
        self._encoded = encoded
        self._sizes = [layer.boundary_bytes for layer in costs.layers]
        where = cluster.index_of(flow.workers)
        self._nodes = cluster.node[where].tolist()
        network = cluster.network
        # A link's number: 0 within the node, else 1, or 1 + the site that it leads to.
        self._sites = [0] * len(where) if cluster.site is None else cluster.site[where].tolist()
        self._links = [
            [
                _SharedLink(cluster.within_node),
                *(
                    [_SharedLink(cluster.between_nodes)]
                    if network is None
                    else [_QueuedLink(network.link(site, target)) for target in range(len(network.sites))]
                ),
            ]
            for site in self._sites
        ]
        self._num_links = len(self._links[0]) if self._links else 1
        self.starts: list[list[float]] = [[] for _ in encoded]
        self.ends: list[list[float]] = [[] for _ in encoded]
        self.transfers: list[StepTransfer] = []
        self._arrived = {4 * node for node in flow.first_nodes}
        """Inputs that are there: of a forward under its code, gradients under that of B."""
        self._busy = [False] * len(encoded)
        self._now_s = 0.0
        self._events: list[tuple[float, int, int, int, int]] = []
        """(time, number, kind, and two more numbers)."""
        self._number = 0

    def run(self) -> None:
        """Runs everything to its end."""
        for worker in range(len(self._encoded)):
            self._start(worker)
        while self._events:
            self._now_s, _, kind, first, second = heapq.heappop(self._events)
            if kind == _ACTION_ENDS:
                self._busy[first] = False
                self._hand_on(first, second)
                self._start(first)
            elif kind == _LINK_TURNS:
                self._turn(first, second)
            else:
                self._arrived.add(first)
                self._start(second)
        assert all(len(ends) == len(program) for ends, program in zip(self.ends, self._encoded, strict=True))

    def _at(self, time_s: float, kind: int, first: int, second: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, kind, first, second))

    def _start(self, worker: int) -> None:
        """Begins the worker's next action if it is free and the input is there."""
        position = len(self.starts[worker])
        if self._busy[worker] or position == len(self._encoded[worker]):
            return
        code = self._encoded[worker][position]
        kind = code & 3
        if kind != WEIGHT and (code - kind + (kind != FORWARD)) not in self._arrived:
            return
        self._busy[worker] = True
        end_s = self._now_s + self._flow.seconds[code]
        self.starts[worker].append(self._now_s)
        self.ends[worker].append(end_s)
        self._at(end_s, _ACTION_ENDS, worker, code)

    def _hand_on(self, worker: int, code: int) -> None:
        """Sends on what an action has computed."""
        flow = self._flow
        node, kind = code >> 2, code & 3
        if kind == FORWARD and flow.is_last[node]:
            self._arrived.add(4 * node + 1)
        if kind == WEIGHT or (flow.is_last[node] if kind == FORWARD else flow.is_first[node]):
            return
        target = node + 1 if kind == FORWARD else node - 1
        receiver = flow.worker[target]
        waiting = 4 * target + (kind != FORWARD)
        num_bytes = self._sizes[flow.hops[min(node, target)].stop - 1]
        number = 0 if self._nodes[worker] == self._nodes[receiver] else 1 + self._sites[receiver]
        link = self._links[worker][number]
        link.count(self._now_s)
        self._number += 1
        heapq.heappush(
            link.sendings,
            _Sending(link.last_byte(num_bytes), self._number, waiting, num_bytes, self._now_s, worker),
        )
        self._plan_turn(worker, number)

    def _plan_turn(self, worker: int, number: int) -> None:
        link = self._links[worker][number]
        link.version += 1
        self._at(link.next_end_s(), _LINK_TURNS, self._num_links * worker + number, link.version)

    def _turn(self, which: int, version: int) -> None:
        """Ends the transfers that have left a link."""
        worker, number = divmod(which, self._num_links)
        link = self._links[worker][number]
        if version != link.version:
            return
        link.count(self._now_s)
        link.each_sent = max(link.each_sent, link.sendings[0].leaves_at)
        while link.sendings and link.sendings[0].leaves_at <= link.each_sent:
            self._arrive(heapq.heappop(link.sendings), self._now_s + link.latency_s)
        if link.sendings:
            self._plan_turn(worker, number)

    def _arrive(self, sending: _Sending, end_s: float) -> None:
        node = sending.code >> 2
        hop = self._flow.hops[node]
        self.transfers.append(
            StepTransfer(
                source=self._flow.workers[sending.source],
                target=hop.worker,
                is_gradient=sending.code & 3 != FORWARD,
                microbatch=self._flow.microbatch[node],
                stage=hop.stage,
                num_bytes=sending.num_bytes,
                start_s=sending.start_s,
                sent_s=self._now_s,
                end_s=end_s,
            )
        )
        self._at(end_s, _INPUT_ARRIVES, sending.code, self._flow.worker[node])
