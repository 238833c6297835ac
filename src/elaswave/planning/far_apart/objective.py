"""What a step takes on machines far apart, without compiling a program: the objective of all planners here. Pure.

A step is the way of one micro-batch through all stages and back, and, of the resource that bounds it, what it does
beyond that way:

- a stage computes: of its workers the one with the longest share of the micro-batches;
- a link carries what the worker with most micro-batches sends over it, forward and backward at the same time;
- a stage's workers may hold only so many micro-batches (memory, or the schedule), and each is held until it has come
  back, so on a slow network the way there and back is a bound too.

Under ``gpipe`` forwards and backwards are two such phases, and nothing is held back. Behind it come

- REDUCE: of w workers of a stage each sends the others' (w - 1) / w of its layers' sums, 8 or 6 bytes a parameter.
  Sums travel while earlier layers compute: the last backward hides some, but never those of the first layer;
- REDUCED: owners send the mean gradients of their blocks, 4 bytes a parameter, to each follower;
- VOTE: recursive doubling, so as many latencies as log2 of the workers, of the longest link between them; its bytes
  are not counted;
- GATHER: owners send new parameters to those workers of the stage that hold no copy.

The vote waits for all stages, and so does the next step: of REDUCE with REDUCED, and of GATHER, the longest counts.
Where workers of two stages are in several sites the slowest pair counts, whoever meets whom.

Left out: that transfers of several links end one behind another, blocks of unequal size, receivers that several
workers send to. `time_plan` says how far off that is: it runs the programs of a plan in virtual time, each transfer
alone or with links that are shared. Behind them come REDUCE, VOTE and GATHER as the objective says, since they are no
actions of a program. `survival_of_plan` says which losses the job would survive: where the engine would put the copies
of its blocks.
"""

from functools import cached_property
from math import ceil, log2
from typing import NamedTuple

import msgspec
import numpy as np

from elaswave.blocks.placement import default_block_size, make_blocks, place_blocks
from elaswave.blocks.survival import Survival, survival_of
from elaswave.planning.costs.layers import MemoryModel, fitting, num_copies
from elaswave.planning.costs.schedules import Schedule, bounds_within, in_flight
from elaswave.planning.costs.step_time.contended import simulate_step
from elaswave.planning.costs.step_time.exact import time_programs, transfer_of
from elaswave.planning.far_apart.job import (
    FarJob,
    FarPlan,
    FarStage,
    StepParts,
    allocation_of_plan,
    costs_of_kind,
    durations_on,
    fences_of,
)
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.search.apportionment import apportion
from elaswave.planning.state_moves.target_placement import DEFAULT_SCATTER_WIDTH

GRADIENT_BYTES = 4
"""Of a mean gradient: float32."""
FAR_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")


class Group:
    """The workers of a stage, with every range of layers: all matrices are [first layer, one past the last].

    Args:
        model: of the job.
        devices: positions, ascending.
    """

    def __init__(self, model: "Model", devices: tuple[int, ...]) -> None:
        self.devices = devices
        self.width = len(devices)
        where = np.array(devices)
        self.counts = apportion(model.job.num_microbatches, 1.0 / model.rate[where])
        self.most = int(self.counts.max())
        self.busy_devices = where[self.counts > 0]
        sites = set(model.job.site[where].tolist())
        self.only_site = sites.pop() if len(sites) == 1 else None
        forward, backward = np.zeros_like(model.empty), np.zeros_like(model.empty)
        busy, busy_forward, busy_backward = (np.zeros_like(model.empty) for _ in range(3))
        for kind in sorted(set(model.kind[where].tolist())):
            own = (model.kind[where] == kind) & (self.counts > 0)
            if not own.any():
                continue
            slowest = float((1.0 / model.speed[where][own]).max())
            share = float((self.counts[own] / model.speed[where][own]).max())
            ahead, back = model.forward[kind], model.backward[kind]
            forward, backward = np.maximum(forward, ahead * slowest), np.maximum(backward, back * slowest)
            busy = np.maximum(busy, (ahead + back) * share)
            busy_forward = np.maximum(busy_forward, ahead * share)
            busy_backward = np.maximum(busy_backward, back * share)
        self.forward, self.backward = forward, backward
        self.busy, self.busy_forward, self.busy_backward = busy, busy_forward, busy_backward
        self._ends(model, where)
        memory = model.memory
        held = model.cluster.memory_bytes[where]
        fixed = memory.fixed_state(self.width)
        self.holds = np.where(model.is_range, fitting(float(held.min()) - fixed, memory.activations), -1.0)
        """Micro-batches for which there is room beside the layers; below 1: not even one."""

    def _ends(self, model: "Model", where: np.ndarray) -> None:
        width = self.width
        latency, bandwidth = model.worst_within(where)
        sums, parameters = model.sums, model.parameters
        share = (width - 1) / width
        hidden = self.backward
        waits = np.maximum(model.first_sums * share, sums * share - hidden * bandwidth) if width > 1 else 0.0 * sums
        reduce_s = (latency + waits / bandwidth) if width > 1 else waits
        self.copies_inside_stage = False
        followers = model.job.followers
        follow = model.follower_link(where) if followers else None
        if follow is None:
            reduced_s = 0.0 * sums
        else:
            self.copies_inside_stage = follow[2]
            reduced_s = follow[0] + followers * sums / model.job.sum_bytes * GRADIENT_BYTES / width / follow[1]
        self.reduce_s = np.where(model.is_range, reduce_s + reduced_s, 0.0)
        lacking = width - 1 - (min(followers, width - 1) if self.copies_inside_stage else 0)
        self.gather_s = latency + parameters * lacking / width / bandwidth if lacking > 0 else 0.0 * sums


class _Memory:
    """Bytes of a worker by its range of layers."""

    def __init__(self, model: "Model") -> None:
        self._model = model
        self._fixed: dict[int, np.ndarray] = {}
        bounds = np.arange(model.job.num_layers + 1)
        self._ranges = bounds[:, None], bounds[None, :]
        of_any_width = MemoryModel.of_width(model.job.costs[0], 1, 1)
        self.activations = np.maximum(of_any_width.activation_bytes(*self._ranges), 0.0)

    def fixed_state(self, width: int) -> np.ndarray:
        """Computes the bytes with nothing in flight, in a stage of so many workers."""
        if width not in self._fixed:
            job = self._model.job
            copies = num_copies(job.followers, job.cluster.num_workers)
            self._fixed[width] = MemoryModel.of_width(job.costs[0], width, copies).fixed_bytes(*self._ranges)
        return self._fixed[width]


class Model:
    """A job as the objective sees it; remembers the groups of workers that it has been asked for.

    Args:
        job: what is planned for.
    """

    def __init__(self, job: FarJob) -> None:
        self.job = job
        self.cluster = job.cluster
        count = job.num_layers + 1
        self.empty = np.zeros((count, count))
        self.is_range = np.arange(count)[:, None] < np.arange(count)[None, :]
        self.kind = job.cluster.device
        self.speed = job.cluster.speed
        self.forward = [self._between(costs.prefix["forward_s"]) for costs in job.costs]
        self.backward = [
            self._between(costs.prefix["input_gradient_s"] + costs.prefix["weight_gradient_s"]) for costs in job.costs
        ]
        whole = np.array([float(costs.prefix["busy_s"][-1]) for costs in job.costs])
        whole = np.maximum(whole, 1e-12)
        self.rate = self.speed / whole[self.kind]
        """Whole micro-batches per second of each device."""
        first = job.costs[0]
        self.sums = self._between(first.prefix["accumulator_bytes"])
        self.parameters = self._between(first.prefix["parameter_bytes"])
        own = np.array([layer.accumulator_bytes for layer in first.layers] + [0.0])
        self.first_sums = np.where(self.is_range, own[:, None], 0.0)
        self.memory = _Memory(self)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._boundaries: dict[tuple[tuple[int, ...], tuple[int, ...]], Boundary] = {}

    def _between(self, sums: np.ndarray) -> np.ndarray:
        return np.maximum(sums[None, :] - sums[:, None], 0.0)

    @cached_property
    def latency(self) -> np.ndarray:
        """Between each two devices."""
        return self._pairs("latency_s")

    @cached_property
    def bandwidth(self) -> np.ndarray:
        """Between each two devices; infinite to itself."""
        found = self._pairs("bandwidth_bytes_per_s")
        np.fill_diagonal(found, np.inf)
        return found

    def _pairs(self, what: str) -> np.ndarray:
        network, site, node = self.cluster.network, self.job.site, self.cluster.node
        assert network is not None
        far = getattr(network, what)[site[:, None], site[None, :]]
        near = getattr(self.cluster.within_node, what)
        found: np.ndarray = np.where(node[:, None] == node[None, :], near, far).astype(np.float64)
        if what == "latency_s":
            np.fill_diagonal(found, 0.0)
        return found

    def worst_within(self, where: np.ndarray) -> tuple[float, float]:
        """Finds the largest latency and the smallest bandwidth between these devices."""
        if len(where) < 2:
            return 0.0, float("inf")
        block = np.ix_(where, where)
        return float(self.latency[block].max()), float(self.bandwidth[block].min())

    def follower_link(self, where: np.ndarray) -> tuple[float, float, bool] | None:
        """Finds the latency and bandwidth from the owners of a stage to their followers, and whether those are in the
        stage; returns None if there is no other worker."""
        sites = self.job.site
        own = set(sites[where].tolist())
        others = np.ones(len(sites), dtype=bool)
        others[where] = False
        outside = others & ~np.isin(sites, sorted(own))
        if self.job.copies == "inside":
            if len(where) > 1:
                return (*self.worst_within(where), True)
            near = others & np.isin(sites, sorted(own))
            wanted = near if near.any() else outside
        else:
            wanted = outside if outside.any() else others
        if not wanted.any():
            return (*self.worst_within(where), True) if len(where) > 1 else None
        # Each owner has the nearest: of the owners the slowest counts.
        block = np.ix_(where, np.flatnonzero(wanted))
        bandwidth, latency = self.bandwidth[block], self.latency[block]
        best = bandwidth.argmax(1)
        rows = np.arange(len(where))
        return float(latency[rows, best].max()), float(bandwidth[rows, best].min()), False

    def group(self, devices: tuple[int, ...]) -> Group:
        """Returns the group of the workers of one stage."""
        found = self._groups.get(devices)
        if found is None:
            found = self._groups[devices] = Group(self, devices)
        return found

    def boundary(self, before: Group, after: Group) -> "Boundary":
        """Returns what travels between two stages, by the first layer of the second one."""
        key = before.devices, after.devices
        found = self._boundaries.get(key)
        if found is None:
            found = self._boundaries[key] = Boundary(self, before, after)
        return found

    def worst_between(self, before: Group, after: Group) -> tuple[float, float]:
        """Finds the largest latency and the smallest bandwidth from the workers of one stage that are given something
        to those of another."""
        network = self.cluster.network
        assert network is not None
        if before.only_site is not None and after.only_site is not None and before.only_site != after.only_site:
            where = before.only_site, after.only_site
            return float(network.latency_s[where]), float(network.bandwidth_bytes_per_s[where])
        block = before.busy_devices[:, None], after.busy_devices[None, :]
        return float(self.latency[block].max()), float(self.bandwidth[block].min())

    def vote_s(self, devices: list[int]) -> float:
        """Computes the seconds of a vote of these workers."""
        if len(devices) < 2:
            return 0.0
        where = np.array(devices)
        return ceil(log2(len(devices))) * float(self.latency[np.ix_(where, where)].max())

    def held(self, groups: list[Group], schedule: Schedule) -> np.ndarray:
        """Micro-batches that a worker of each stage may hold by its schedule."""
        most = np.array([group.most for group in groups])
        return np.minimum(in_flight(np.array([group.width for group in groups]), schedule), most)

    def evaluate(self, groups: list[Group], cuts: list[int], schedule: Schedule) -> StepParts | None:
        """Computes the objective.

        Args:
            groups: of each stage.
            cuts: first layer of each stage but the first.
            schedule: ``1f1b`` or ``gpipe``.
        Returns:
            None: it does not fit into memory.
        """
        return self.evaluate_all(groups, [cuts], schedule)[0]

    def evaluate_all(self, groups: list[Group], choices: list[list[int]], schedule: Schedule) -> list[StepParts | None]:
        """Computes the objective of several cuts of the same stages; works as `evaluate` does."""
        wanted = self.held(groups, schedule).tolist()
        vote_s = self.vote_s([device for group in groups for device in group.devices])
        found: list[StepParts | None] = []
        for cuts in choices:
            ends = [0, *cuts, self.job.num_layers]
            ranges = list(zip(ends, ends[1:]))
            rooms = [float(group.holds[each]) for group, each in zip(groups, ranges)]
            if any(room < (most if schedule == "gpipe" else 1) for room, most in zip(rooms, wanted)):
                found.append(None)
                continue
            links = [self.boundary(*pair).at(cut) for pair, cut in zip(zip(groups, groups[1:]), cuts)]
            run_s, bound = _run(groups, ranges, links, list(map(min, wanted, rooms)), schedule)
            reduce_s = max(float(group.reduce_s[each]) for group, each in zip(groups, ranges))
            gather_s = max(float(group.gather_s[each]) for group, each in zip(groups, ranges))
            found.append(StepParts(run_s=run_s, bound=bound, reduce_s=reduce_s, vote_s=vote_s, gather_s=gather_s))
        return found

    def plan(self, planner: str, groups: list[Group], cuts: list[int], schedule: Schedule, parts: StepParts) -> FarPlan:
        """Makes the plan of what has been evaluated."""
        ends = [0, *cuts, self.job.num_layers]
        stages = tuple(
            FarStage(start=start, stop=stop, devices=group.devices)
            for group, start, stop in zip(groups, ends, ends[1:])
        )
        held = [
            min(float(most), float(group.holds[stage.start, stage.stop]))
            for group, stage, most in zip(groups, stages, self.held(groups, schedule))
        ]
        return FarPlan(
            planner=planner,
            stages=stages,
            num_microbatches=tuple(tuple(group.counts.tolist()) for group in groups),
            schedule=schedule,
            parts=parts,
            fences=fences_of(self.job, stages),
            codec=self.job.codec,
            in_flight=tuple(int(each) for each in held),
        )


class LinkTimes(NamedTuple):
    """What a micro-batch's tensors take between two stages, and for how long links are busy beyond one of them."""

    ahead_s: float
    back_s: float
    beyond_ahead_s: float
    beyond_back_s: float
    coding_s: float


class Boundary:
    """Between two stages; vectors are by the first layer of the second stage, [num_layers + 1].

    Args:
        model: of the job.
        before, after: the stages' workers.
    """

    def __init__(self, model: Model, before: Group, after: Group) -> None:
        job = model.job
        (ahead_latency, ahead), (back_latency, back) = (
            model.worst_between(before, after),
            model.worst_between(after, before),
        )
        is_fence = before.only_site is None or before.only_site != after.only_site
        sizes = np.concatenate([[0.0], job.coded_bytes if is_fence else job.raw_bytes])
        self.coding_s = np.concatenate([[0.0], job.coding_s]) if is_fence else 0.0 * sizes
        sent_s = sizes / ahead
        returned_s = sizes / back
        self.ahead_s = ahead_latency + sent_s + 2 * self.coding_s
        self.back_s = back_latency + returned_s + 2 * self.coding_s
        self._most_ahead, self._most_back = before.most, after.most
        self.busy_ahead_s, self.busy_back_s = before.most * sent_s, after.most * returned_s

    def at(self, cut: int) -> LinkTimes:
        """Returns the link times for one place of the cut."""
        return LinkTimes(
            float(self.ahead_s[cut]),
            float(self.back_s[cut]),
            float(self.busy_ahead_s[cut]) * (1 - 1 / self._most_ahead),
            float(self.busy_back_s[cut]) * (1 - 1 / self._most_back),
            float(self.coding_s[cut]),
        )


def _run(
    groups: list[Group],
    ranges: list[tuple[int, int]],
    links: list[LinkTimes],
    held: list[float],
    schedule: Schedule,
) -> tuple[float, str]:
    """Computes the seconds until the last backward has ended, and tells what bounds them."""
    forward = [float(group.forward[each]) for group, each in zip(groups, ranges)]
    backward = [float(group.backward[each]) for group, each in zip(groups, ranges)]
    coding = _coding(groups, links)
    if schedule == "gpipe":
        ahead = _phase(
            forward,
            [float(group.busy_forward[each]) + coded for group, each, coded in zip(groups, ranges, coding)],
            [link.ahead_s for link in links],
            [link.beyond_ahead_s for link in links],
        )
        back = _phase(
            backward,
            [float(group.busy_backward[each]) + coded for group, each, coded in zip(groups, ranges, coding)],
            [link.back_s for link in links],
            [link.beyond_back_s for link in links],
        )
        return ahead[0] + back[0], max(ahead, back)[1]
    way = [first + second for first, second in zip(forward, backward)]
    total = sum(way) + sum(link.ahead_s + link.back_s for link in links)
    most, bound = 0.0, "the way of one micro-batch"
    for index, (group, each) in enumerate(zip(groups, ranges)):
        beyond = float(group.busy[each]) + 2 * coding[index] - way[index]
        if beyond > most:
            most, bound = beyond, f"stage {index} computes"
    for index, link in enumerate(links):
        beyond = max(link.beyond_ahead_s, link.beyond_back_s)
        if beyond > most:
            most, bound = beyond, f"the link from stage {index} to {index + 1}"
    there_and_back = 0.0
    for index in reversed(range(len(groups))):
        there_and_back += way[index]
        if index < len(links):
            there_and_back += links[index].ahead_s + links[index].back_s
        beyond = (groups[index].most / held[index] - 1) * there_and_back
        if beyond > most:
            most, bound = beyond, f"what stage {index} may hold"
    return total + most, bound


def _coding(groups: list[Group], links: list[LinkTimes]) -> list[float]:
    """Computes the seconds that each stage codes in one direction, of all micro-batches of its busiest worker."""
    found = [0.0] * len(groups)
    for index, link in enumerate(links):
        found[index] += groups[index].most * link.coding_s
        found[index + 1] += groups[index + 1].most * link.coding_s
    return found


def _phase(way: list[float], busy: list[float], link_way: list[float], link_beyond: list[float]) -> tuple[float, str]:
    """Computes the seconds of a direction in which nothing is held back, and tells what bounds them."""
    beyond = [(whole - one, f"stage {index} computes") for index, (whole, one) in enumerate(zip(busy, way))]
    beyond += [(each, f"the link from stage {index} to {index + 1}") for index, each in enumerate(link_beyond)]
    most, bound = max(beyond)
    return sum(way) + sum(link_way) + max(0.0, most), bound


class FarTiming(NamedTuple):
    """Seconds of a step by three ways."""

    objective_s: float
    alone_s: float
    """By `time_programs`: each transfer has its link to itself."""
    shared_s: float
    """By `simulate_step`: what a worker sends to one site waits for what it has sent there before."""

    @property
    def gap(self) -> float:
        """By how much the objective is off `time_programs`: positive if it promises a longer step."""
        return self.objective_s / self.alone_s - 1


def time_plan(job: FarJob, plan: FarPlan) -> FarTiming:
    """Compiles the programs of a plan and runs them in virtual time.

    Args:
        job: for which it was planned.
        plan: by any planner.
    """
    costs = msgspec.structs.replace(costs_of_kind(job, 0, plan.fences), end_link=None, step_overhead_s=0.0)
    layout = make_routes(allocation_of_plan(job, plan), costs, job.cluster)
    durations, transfer_s = durations_on(job, plan.fences), transfer_of(costs, job.cluster)
    held = {
        int(job.cluster.ids[device]): most
        for stage, most in zip(plan.stages, plan.in_flight, strict=True)
        for device in stage.devices
    }
    programs = compile_programs(
        layout,
        plan.schedule,
        max_in_flight=bounds_within(layout, plan.schedule, held),
        durations=durations,
        transfer_s=transfer_s,
    )
    end_s = plan.step_s - plan.parts.run_s
    alone_s = time_programs(layout, programs, durations, transfer_s).step_s
    shared_s = simulate_step(layout, programs, costs, job.cluster, durations=durations).timeline.step_s
    return FarTiming(plan.step_s, alone_s + end_s, shared_s + end_s)


BLOCKS_MAX = 4096
"""Who holds copies together does not depend on more."""


def survival_of_plan(job: FarJob, plan: FarPlan) -> Survival | None:
    """Tells what the loss of workers and of sites leaves; returns None for a model without parameters.

    Args:
        job: for which it was planned.
        plan: by any planner.
    """
    network = job.cluster.network
    assert network is not None
    layout = make_routes(allocation_of_plan(job, plan), costs_of_kind(job, 0, plan.fences), job.cluster)
    names = {worker: network.sites[site] for worker, site in zip(job.cluster.ids.tolist(), job.site.tolist())}
    layout = msgspec.structs.replace(
        layout, domains=tuple((worker, names[worker]) for worker in layout.workers), copies=job.copies
    )
    sizes = [ceil(layer.parameter_bytes / job.element_bytes) for layer in job.costs[0].layers]
    size = max(default_block_size(sum(sizes)), sum(sizes) // BLOCKS_MAX)
    blocks = make_blocks(sizes, size)
    placement = place_blocks(layout.with_followers(job.followers), blocks, scatter_width=DEFAULT_SCATTER_WIDTH)
    return survival_of(placement, layout)
