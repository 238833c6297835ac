"""How long a step takes exactly: its actions as flat lists, and programs timed as the executor runs them. Pure.

Every hop of every route is a *node*; the nodes of one route are neighbours in forward order, so the node before n is
n - 1 and the one after it is n + 1. A step has thousands of actions and is timed for every candidate of a plan, hence
lists and numbers instead of objects. An action is a *code*: four times its node plus its kind. The compiler of programs
(`elaswave.planning.programs.programs`) orders these lists, too.

Every worker runs its program in order and begins each action as soon as its input is there; transfers overlap with
computing. That is all an executor does, so a time follows from the programs and the durations alone: no events are
needed, each worker is simply run until it lacks an input. Links that are shared, and so make transfers wait for each
other, are the simulator's concern (``elaswave.planning.costs.step_time.contended``), as is drawing.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import NamedTuple

from elaswave.errors import InvalidProgramError
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.types import Action, Hop, Kind, Layout, Program

Durations = Callable[[Hop, Kind], float]
"""Seconds of an action of this kind on the hop's worker, for the hop's layers. B takes as long as I and W."""

TransferSeconds = Callable[[Hop, Hop, int], float]
"""Seconds from the end of an action on the first hop's worker until the tensor is on the second's: an activation if
the second hop comes later on the route, else its gradient. The number is the layer whose output it is (of)."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W")
FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""What a code leaves over when divided by four: index into `KINDS`."""

_NEVER = float("inf")
_TICKS = 1 << 24
"""The longest duration in ticks, where durations are rounded: see `Flow`."""


def durations_of(layer_s: Sequence[tuple[float, float, float]], speed_of: Callable[[int], float]) -> Durations:
    """Makes the seconds of actions from the seconds of layers and the speeds of workers.

    Args:
        layer_s: of each layer's forward, input gradient and weight gradient, on a worker of speed 1.
        speed_of: speed of a worker, that of its frequency level included; asked once for each worker.
    """
    sums: dict[str, list[float]] = {
        kind: list(accumulate((seconds[part] for seconds in layer_s), initial=0.0)) for part, kind in enumerate("FIW")
    }
    speeds: dict[int, float] = {}

    def durations(hop: Hop, kind: Kind) -> float:
        speed = speeds.get(hop.worker)
        if speed is None:
            speed = speeds[hop.worker] = speed_of(hop.worker)
        return sum(sums[part][hop.stop] - sums[part][hop.start] for part in ("IW" if kind == "B" else kind)) / speed

    return durations


def transfer_of(costs: Costs, cluster: Cluster) -> TransferSeconds:
    """Makes the seconds of transfers between workers, each as if it had its link to itself.

    Args:
        costs: bytes at the layers' boundaries.
        cluster: nodes and sites of the workers and the links between them.
    Returns:
        A function that raises KeyError for a worker that the cluster lacks.
    """
    sizes = [layer.boundary_bytes for layer in costs.layers]
    places: dict[int, tuple[int, int]] = {}

    def place_of(worker: int) -> tuple[int, int]:
        """Finds a worker's node and its position in the cluster."""
        found = places.get(worker)
        if found is None:
            position = int(cluster.index_of([worker])[0])
            found = places[worker] = (int(cluster.node[position]), position)
        return found

    def transfer_s(source: Hop, target: Hop, layer: int) -> float:
        if source.worker == target.worker:
            return 0.0
        (node, position), (other_node, other) = place_of(source.worker), place_of(target.worker)
        if node != other_node and cluster.network is not None:
            return cluster.link_between(position, other).transfer_s(sizes[layer])
        return (cluster.within_node if node == other_node else cluster.between_nodes).transfer_s(sizes[layer])

    return transfer_s


class StepGraph:
    """The nodes of a layout with their durations.

    Args:
        layout: well formed (see `elaswave.planning.programs.layout.validate_layout`).
        durations: seconds; None means balanced: a forward takes as long as its stage is wide, and so does each half of
            a backward.
        transfer_s: None means that transfers take no time.
        ticks: round durations to whole numbers of a common small unit, so that times which are equal on paper are
            equal: a compiler that broke such ties by rounding errors would order actions at random.
        numbers: of the routes' micro-batches in a larger layout, of which this one is a part; None means from 0.
    Raises:
        ValueError: a duration or a transfer that is negative or not finite; transfers without durations.
    """

    def __init__(
        self,
        layout: Layout,
        durations: Durations | None = None,
        transfer_s: TransferSeconds | None = None,
        *,
        ticks: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if durations is None and transfer_s is not None:
            raise ValueError("seconds of transfers are given, but none of actions: give durations as well")
        self.layout = layout
        self.workers: tuple[int, ...] = layout.workers
        index = {worker: position for position, worker in enumerate(self.workers)}
        hops = [hop for route in layout.routes for hop in route]
        self.hops = hops
        known = range(layout.num_microbatches) if numbers is None else numbers
        self.microbatch = [number for number, route in zip(known, layout.routes, strict=True) for _ in route]
        self.worker = [index[hop.worker] for hop in hops]
        """Position in `workers` of each node's worker."""
        self.is_first, self.is_last = [False] * len(hops), [False] * len(hops)
        self.first_nodes: list[int] = []
        """First node of each route."""
        position = 0
        for route in layout.routes:
            self.first_nodes.append(position)
            self.is_first[position] = True
            position += len(route)
            self.is_last[position - 1] = True
        self.seconds = self._durations(durations)
        """By code."""
        self.sends_forward, self.sends_back = self._transfers(transfer_s)
        """Seconds to the node after each one, and to the node before it."""
        self.scale = 1.0
        """Units of `seconds` in a second of the durations."""
        if ticks and durations is not None:
            self._round()

    def in_ticks(self) -> "StepGraph":
        """Returns the same graph with rounded durations: see `ticks`. This is for flows that were made with
        durations."""
        rounded = copy(self)
        rounded._round()
        return rounded

    def _round(self) -> None:
        longest = max(self.seconds, default=0.0) or max([*self.sends_forward, *self.sends_back], default=0.0) or 1.0
        self.scale = scale = _TICKS / longest
        known: dict[float, int] = {}

        def whole(values: list[float]) -> list[float]:
            known.update({value: round(value * scale) for value in {*values} - known.keys()})
            return [known[value] for value in values]

        self.seconds = whole(self.seconds)
        self.sends_forward, self.sends_back = whole(self.sends_forward), whole(self.sends_back)

    @property
    def digest(self) -> bytes:
        """Of all that times depend on: that of equal flows is the same, whoever the workers are."""
        shape = array("q", (len(self.workers), len(self.first_nodes), *self.first_nodes, *self.worker))
        seconds = array("d", (*self.seconds, *self.sends_forward, *self.sends_back))
        return blake2b(shape.tobytes() + seconds.tobytes(), digest_size=16).digest()

    def _durations(self, durations: Durations | None) -> list[float]:
        known: dict[tuple[int, int, int, int], tuple[float, float, float, float]] = {}
        seconds: list[float] = []
        for hop in self.hops:
            key = (hop.worker, hop.stage, hop.start, hop.stop)
            found = known.get(key)
            if found is None:
                if durations is None:
                    width = self.layout.stages[hop.stage].width
                    found = (width, 2 * width, width, width)
                else:
                    forward, first, second = (durations(hop, kind) for kind in ("F", "I", "W"))
                    found = (forward, first + second, first, second)
                if not all(0 <= value < float("inf") for value in found):
                    raise ValueError(
                        f"an action of worker {hop.worker} on layers [{hop.start}, {hop.stop}) takes {found} s "
                        "(forward, backward, its halves), needed: at least 0 and finite"
                    )
                known[key] = found
            seconds += found
        return seconds

    def _transfers(self, transfer_s: TransferSeconds | None) -> tuple[list[float], list[float]]:
        forward: list[float] = [0] * len(self.hops)
        back: list[float] = [0] * len(self.hops)
        if transfer_s is None:
            return forward, back
        known: dict[tuple[int, ...], tuple[float, float]] = {}
        for node, hop in enumerate(self.hops):
            if self.is_last[node]:
                continue
            after = self.hops[node + 1]
            key = (hop.worker, hop.stage, hop.start, hop.stop, after.worker, after.stage, after.start, after.stop)
            found = known.get(key)
            if found is None:
                found = (transfer_s(hop, after, hop.stop - 1), transfer_s(after, hop, hop.stop - 1))
                if not all(0 <= value < float("inf") for value in found):
                    raise ValueError(
                        f"transfers between workers {hop.worker} and {after.worker} take {found} s, needed: at least "
                        "0 and finite"
                    )
                known[key] = found
            forward[node], back[node + 1] = found
        return forward, back

    def encode(self, programs: Mapping[int, Program]) -> list[list[int]]:
        """Programs as codes, in the order of `workers`; a worker without a program has an empty one.

        Raises:
            InvalidProgramError: an action of no route, or on another worker than its route says.
        """
        num_stages = len(self.layout.stages)
        codes = {
            (microbatch * num_stages + hop.stage): 4 * node
            for node, (microbatch, hop) in enumerate(zip(self.microbatch, self.hops, strict=True))
        }
        kinds: dict[str, int] = {kind: number for number, kind in enumerate(KINDS)}
        encoded = []
        for position, worker in enumerate(self.workers):
            own = [
                codes.get(action.microbatch * num_stages + action.stage, -4) + kinds[action.kind]
                for action in programs.get(worker, ())
            ]
            for code, action in zip(own, programs.get(worker, ())):
                if code < 0 or self.worker[code >> 2] != position:
                    raise InvalidProgramError(f"worker {worker} cannot run {action}: no route passes it there")
            encoded.append(own)
        return encoded

    def decode(self, encoded: Sequence[Sequence[int]]) -> dict[int, Program]:
        """Decodes the programs of these codes."""
        microbatch, hops = self.microbatch, self.hops
        return {
            worker: tuple(Action(hops[code >> 2].stage, KINDS[code & 3], microbatch[code >> 2]) for code in own)
            for worker, own in zip(self.workers, encoded, strict=True)
        }


class Times(NamedTuple):
    """When every action begins and ends, in the unit of the flow; lists as the programs are."""

    starts: list[list[float]]
    ends: list[list[float]]

    @property
    def makespan(self) -> float:
        """When the last action ends."""
        return max((own[-1] for own in self.ends if own), default=0)


def run_in_order(flow: StepGraph, encoded: Sequence[Sequence[int]], begins: Sequence[float] | None = None) -> Times:
    """Runs programs as the executor does: every worker in its order, each action as soon as its input is there.

    Args:
        flow: durations and transfers.
        encoded: the program of each of the flow's workers.
        begins: before when each of the flow's workers does nothing; None means that all begin at 0.
    Raises:
        InvalidProgramError: some worker waits for ever.
    """
    seconds, worker_of, is_last, is_first = flow.seconds, flow.worker, flow.is_last, flow.is_first
    sends_forward, sends_back = flow.sends_forward, flow.sends_back
    inputs, gradients = [_NEVER] * len(worker_of), [_NEVER] * len(worker_of)
    for node in flow.first_nodes:
        inputs[node] = 0
    starts: list[list[float]] = [[] for _ in encoded]
    ends: list[list[float]] = [[] for _ in encoded]
    stuck = [False] * len(encoded)
    runnable = list(range(len(encoded)))
    while runnable:
        worker = runnable.pop()
        program, own_starts, own_ends = encoded[worker], starts[worker], ends[worker]
        stuck[worker] = False
        clock = own_ends[-1] if own_ends else begins[worker] if begins else 0
        for position in range(len(own_ends), len(program)):
            code = program[position]
            node, kind = code >> 2, code & 3
            arrived = inputs[node] if kind == FORWARD else 0 if kind == WEIGHT else gradients[node]
            if arrived > clock:
                if arrived == _NEVER:
                    stuck[worker] = True
                    break
                clock = arrived
            end = clock + seconds[code]
            receiver = -1
            if kind == FORWARD:
                if is_last[node]:
                    gradients[node] = end
                else:
                    inputs[node + 1] = end + sends_forward[node]
                    receiver = worker_of[node + 1]
            elif kind != WEIGHT and not is_first[node]:
                gradients[node - 1] = end + sends_back[node]
                receiver = worker_of[node - 1]
            own_starts.append(clock)
            own_ends.append(end)
            clock = end
            if receiver >= 0 and stuck[receiver]:
                stuck[receiver] = False
                runnable.append(receiver)
    for position, worker in enumerate(flow.workers):
        if stuck[position]:
            code = encoded[position][len(ends[position])]
            action = f"{flow.hops[code >> 2].stage}{KINDS[code & 3]}{flow.microbatch[code >> 2]}"
            raise InvalidProgramError(
                f"worker {worker} waits for the input of {action} for ever; "
                "see elaswave.planning.programs.validation for why"
            )
    return Times(starts, ends)


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """When each action of a step begins and ends, in seconds from the step's beginning."""

    layout: Layout
    programs: Mapping[int, Program]
    start_s: Mapping[int, list[float]]
    """Worker -> one entry per action of its program."""
    end_s: Mapping[int, list[float]]

    @cached_property
    def step_s(self) -> float:
        """Until the last action ends. What a step costs beside its actions is not in it."""
        return max((ends[-1] for ends in self.end_s.values() if ends), default=0.0)

    @cached_property
    def busy_s(self) -> dict[int, float]:
        """Worker -> seconds in which it computes."""
        return {worker: sum(self.end_s[worker]) - sum(starts) for worker, starts in self.start_s.items()}

    @cached_property
    def bubble_fractions(self) -> dict[int, float]:
        """Worker -> share of the step in which it does not compute."""
        return {worker: self._bubble([worker]) for worker in self.start_s}

    @cached_property
    def stage_bubble_fractions(self) -> list[float]:
        """For each stage the share of its workers' time in which they do not compute."""
        return [self._bubble(stage.workers) for stage in self.layout.stages]

    def _bubble(self, workers: list[int] | tuple[int, ...]) -> float:
        if self.step_s == 0:
            return 0.0
        return 1.0 - sum(self.busy_s[worker] for worker in workers) / (len(workers) * self.step_s)


def time_programs(
    layout: Layout,
    programs: Mapping[int, Program],
    durations: Durations,
    transfer_s: TransferSeconds | None = None,
) -> Timeline:
    """Times a step.

    Args:
        layout: whose routes the programs run.
        programs: of all workers, valid (see `elaswave.planning.programs.validation`).
        durations: seconds of every action.
        transfer_s: seconds of every transfer; None means that they take no time.
    Raises:
        InvalidProgramError: an action of no route, or programs that wait for each other for ever.
        ValueError: a duration that is negative or not finite.
    """
    flow = StepGraph(layout, durations, transfer_s)
    times = run_in_order(flow, flow.encode(programs))
    return Timeline(
        layout=layout,
        programs=programs,
        start_s=dict(zip(flow.workers, times.starts, strict=True)),
        end_s=dict(zip(flow.workers, times.ends, strict=True)),
    )
