"""Steps without a barrier between them: ReCycle's staggered optimizer as an event graph of several steps. Pure.

A stage enters its next step as soon as it has reduced its own gradients and updated its own layers: when all workers
that hold one of its layers have ended their backwards, and the step's overhead has passed. The other edges are those
within a step: activations, gradients, and every worker's order. So stages run one after the other, each ahead of the
next, and the way through the pipeline is paid once, not in every step (Gandhi et al., ReCycle, SOSP 2024, arXiv
2405.14009, section 3, staggered optimizer; the same as the optimizer's post-validation of Qi et al., Zero bubble
pipeline parallelism, ICLR 2024, section 4).

All of a stage's work of a step lies between two of its entries. So the graph of `NUM_STEPS` steps is solved step by
step: each is an ordinary step whose workers begin at different times. The *period* is the difference between the ends
of the last two. Programs are the same in every step: those of a step with a barrier, or those that list scheduling
finds for workers that begin one after the other, whichever repeats faster. With the former the period cannot exceed the
step with a barrier, since nothing begins later than it would then. Memory is that of one step: a worker has ended all
backwards of a step before it begins the next one.

In its favour: an update is never rolled back (here a norm that has to be clipped, or a sum that does not check, would
undo it), reducing a stage's gradients takes no time from the other stages' links, and what a step costs beside its
actions, the vote of all workers included, is counted for each stage by itself.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from elaswave.planning.costs.layers import Costs, HeldLayers
from elaswave.planning.costs.machines import Cluster, worker_speeds
from elaswave.planning.costs.schedules import splits_backwards
from elaswave.planning.costs.step_time.exact import (
    FORWARD,
    Durations,
    StepGraph,
    TransferSeconds,
    durations_of,
    run_in_order,
    transfer_of,
)
from elaswave.planning.plan import Allocation, Chain, levels_of
from elaswave.planning.programs.prediction import Prediction, fidelity_for
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.search.memory_limits import memory_limits
from elaswave.types import Layout, Program

NUM_STEPS = 6
"""Of the event graph: its last two steps tell the period."""
COMPILED_AGAIN = 2
"""How often programs are compiled for workers that begin one after the other: first as micro-batches arrive, then as
the graph has shown. These orders leave transfers out, which count in the graph: list scheduling would begin a weight
gradient during each of them, and what arrives would wait for its end."""

_PARTS = ("forward", "input_gradient", "weight_gradient")
_SLACK = 1e-9
"""Relative; differences of rounding."""


def period_s(cluster: Cluster, costs: Costs, allocation: Allocation, timed: Prediction, within_s: float) -> float:
    """Computes the seconds from step to step if no stage waits for others: exact where the step with a barrier is, and
    they may be below `within_s`.

    Args: as of `elaswave.planning.policy.policy_parts.PeriodOf`.
    """
    limits = memory_limits(cluster, costs, allocation) if timed.num_limited else None
    most = None if limits is None else limits.as_mapping()
    found_s = staggered_bound_s(cluster, costs, allocation, timed.found.pace_s, max_in_flight=most)
    if found_s < within_s and fidelity_for(allocation) == "exact":
        found_s = staggered_step_s(cluster, costs, allocation, max_in_flight=most, least_s=found_s)
    return min(timed.step_s, found_s)


class Repeated(NamedTuple):
    """What becomes of a step that is repeated without a barrier."""

    period_s: float
    """From the end of the last but one step to the end of the last."""
    begins_s: dict[int, float]
    """Worker -> when it begins a step, relative to the first that does."""


def repeat_programs(
    layout: Layout, programs: Mapping[int, Program], durations: Durations, transfer_s: TransferSeconds | None,
    overheads_s: Sequence[float], *, num_steps: int = NUM_STEPS,
) -> Repeated:  # fmt: skip
    """Runs several steps of the same programs, each stage entering the next when its own update is done.

    Args:
        layout: whose routes the programs run.
        programs: of all workers, valid.
        durations: seconds of every action.
        transfer_s: of every transfer; None means that they take no time.
        overheads_s: of each stage's reduce and update.
        num_steps: at least 2.
    Raises:
        InvalidProgramError: programs that wait for each other for ever.
    """
    flow = StepGraph(layout, durations, transfer_s)
    encoded = flow.encode(programs)
    position = {worker: index for index, worker in enumerate(flow.workers)}
    members = [[position[worker] for worker in stage.workers] for stage in layout.stages]
    reduces_with = _sharing_layers(layout.stages)
    begins = [0.0] * len(flow.workers)
    ended = before = 0.0
    for _ in range(num_steps):
        ends = run_in_order(flow, encoded, begins).ends
        done = [max(ends[worker][-1] if ends[worker] else begins[worker] for worker in own) for own in members]
        for own, others, overhead_s in zip(members, reduces_with, overheads_s, strict=True):
            enters = max(done[other] for other in others) + overhead_s
            for worker in own:
                begins[worker] = enters
        before, ended = ended, max(done)
    first = min(begins)
    return Repeated(ended - before, {worker: begins[index] - first for worker, index in position.items()})


def staggered_step_s(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    *,
    max_in_flight: Mapping[int, int] | None = None,
    least_s: float = 0.0,
) -> float:
    """Computes the period of an allocation's steps, its programs compiled and timed.

    Args:
        cluster: with all workers of the allocation.
        costs: of the model's layers.
        allocation: who does how much.
        max_in_flight: worker -> the most micro-batches that it may hold; None means what the schedule wants.
        least_s: a bound, as of `staggered_bound_s`: programs that reach it are not compiled again.
    """
    layout = make_routes(allocation, costs, cluster)
    durations = durations_of(costs.layer_s, cluster.speed_of(levels_of(allocation)))
    transfer_s = transfer_of(costs, cluster)
    overheads_s = _overheads_s(costs, layout.stages)
    begins_s: dict[int, float] | None = None
    shortest = float("inf")
    for tried in range(1 + COMPILED_AGAIN):
        programs = compile_programs(
            layout, allocation.schedule, max_in_flight=max_in_flight, durations=durations,
            transfer_s=None if tried else transfer_s, begins_s=begins_s,
        )  # fmt: skip
        period_s, shown_s = repeat_programs(layout, programs, durations, transfer_s, overheads_s)
        shortest = min(shortest, period_s)
        if shortest <= least_s * (1 + _SLACK):
            break
        begins_s = shown_s if tried else _first_arrivals_s(layout, durations, transfer_s)
    return shortest


def _sharing_layers(stages: Sequence[HeldLayers]) -> list[list[int]]:
    """Lists for each stage those that hold one of its layers, itself among them."""
    return [
        [index for index, other in enumerate(stages) if other.start < stage.stop and stage.start < other.stop]
        for stage in stages
    ]


def _overheads_s(costs: Costs, stages: Sequence[HeldLayers]) -> list[float]:
    """Computes the seconds of each stage's step beside its actions: of those that reduce with it, not of all stages."""
    return [costs.overhead_s([stages[index] for index in others]) for others in _sharing_layers(stages)]


def _first_arrivals_s(layout: Layout, durations: Durations, transfer_s: TransferSeconds) -> dict[int, float]:
    """Maps worker to when the first micro-batch can be at its stage: where stages end up that never wait for each
    other."""
    flow = StepGraph(layout, durations, transfer_s)
    first = [float("inf")] * len(layout.stages)
    arrives = 0.0
    for node, hop in enumerate(flow.hops):
        arrives = 0.0 if flow.is_first[node] else arrives
        first[hop.stage] = min(first[hop.stage], arrives)
        arrives += flow.seconds[4 * node + FORWARD] + flow.sends_forward[node]
    return {
        worker: 0.0 if seconds == float("inf") else seconds
        for stage, seconds in zip(layout.stages, first, strict=True)
        for worker in stage.workers
    }


def staggered_bound_s(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    pace_s: float,
    *,
    max_in_flight: Mapping[int, int] | None = None,
) -> float:
    """Computes what no order of actions gets below, in closed form: for steps of too many actions.

    Every cycle of the event graph that takes one step to the next is a bound; the longest of these is taken. For a
    worker of stage s with n micro-batches, f, i and w the seconds of a micro-batch's forward, input and weight gradient
    in a stage (i + w for i, and 0 for w, where backwards are not split):

    - *pace*: the worker computes everything of a step between two entries;
    - *up*: the first stage enters, a micro-batch comes to s, n (f + i) later the last gradient goes back to the first
      stage, whose w follows;
    - *around*: the last of n forwards of s goes on to the last stage and back to the first;
    - *memory*: n times the way from s to the last stage and back, over the micro-batches that may be held, where
      `max_in_flight` says so.

    To each the overhead of its stage is added, to the pace that of the stage that has least.

    Args:
        cluster, costs, allocation, max_in_flight: as of `staggered_step_s`.
        pace_s: seconds for which the busiest worker computes.
    """
    stages = [stage for chain in allocation.chains for stage in chain.stages]
    overheads_s = _overheads_s(costs, stages)
    longest, first = pace_s + min(overheads_s), 0
    for chain in allocation.chains:
        own_s = overheads_s[first : first + len(chain.stages)]
        longest = max(longest, _longest_cycle_s(cluster, costs, chain, allocation, own_s, max_in_flight))
        first += len(chain.stages)
    return longest


def _longest_cycle_s(
    cluster: Cluster, costs: Costs, chain: Chain, allocation: Allocation, overheads_s: Sequence[float],
    max_in_flight: Mapping[int, int] | None,
) -> float:  # fmt: skip
    """Computes the longest of the cycles of one chain but the pace; 0 where stages share layers, whose micro-batches
    take different ways."""
    if any(len(cut) > 1 for cut in chain.cuts) or not chain.num_microbatches:
        return 0.0
    bounds = [chain.stages[0].start, *(next(iter(cut)) for cut in chain.cuts), chain.stages[-1].stop]
    forward, back, rest = (np.diff(costs.prefix[f"{name}_s"][bounds]) for name in _PARTS)
    if not splits_backwards(allocation.schedule):
        back, rest = back + rest, np.zeros_like(rest)
    speeds = [worker_speeds(cluster, cluster.index_of(stage.workers), stage.levels) for stage in chain.stages]
    fastest = np.array([float(own.max()) for own in speeds])
    rounds = np.array([float((stage.num_microbatches / own).max()) for stage, own in zip(chain.stages, speeds)])
    sizes = [costs.layers[stop - 1].boundary_bytes for stop in bounds[1:-1]]
    links = [min(each.transfer_s(size) for each in (cluster.within_node, cluster.between_nodes)) for size in sizes]
    # The way of one micro-batch through each stage, there and back, with the link behind it; the last has none.
    way = (forward + back) / fastest + 2 * np.array([*links, 0.0])
    up = np.concatenate([[0.0], np.cumsum(way)[:-1]]) + rounds * (forward + back)
    around = way.sum() - forward / fastest + rounds * forward
    longest = float(max(up.max(), around.max()) + rest[0] / fastest[0]) + overheads_s[0]
    if max_in_flight is not None:
        held_s = np.cumsum(way[::-1])[::-1] + rest / fastest
        for stage, seconds, overhead_s in zip(chain.stages, held_s.tolist(), overheads_s, strict=True):
            most = np.array([max_in_flight[worker] for worker in stage.workers.tolist()])
            longest = max(longest, seconds * float((stage.num_microbatches / most).max()) + overhead_s)
    return longest
