"""Layouts from what a person asks for: widths of stages, layers per stage, routes of micro-batches. Pure.

Every worker computes its layout from the configuration by itself, so everything here is a deterministic function of
its arguments. Who holds which block of state is not decided here but in ``elaswave.blocks.placement``.

From a plan to a running layout: routes, what stands beside them, and the seconds of a step. Pure.

A plan's allocation says how much each worker does; `to_layout` is the one way from there to what a job runs. Workers
that the plan has nothing for stay members: they hold blocks and vote.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle, islice, pairwise
from math import lcm
from typing import NamedTuple

import msgspec
import numpy as np

from elaswave.blocks.domains import deal_over_hosts
from elaswave.blocks.placement import Block, Placement, holders_of_layers
from elaswave.errors import ConfigError
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.costs.step_time.contended import simulate_step
from elaswave.planning.costs.step_time.exact import durations_of
from elaswave.planning.plan import Allocation, levels_of
from elaswave.planning.programs.execution import compiled_by, execution_of, timed_step_s
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.routes import make_routes
from elaswave.planning.search.memory_limits import layout_limits
from elaswave.planning.search.partition import split_layers
from elaswave.types import Copies, ExecutionParameters, Hop, Layout, Stage

DEFAULT_STAGES = 2
DEFAULT_REPLICAS = 2


def resolve_widths(
    stages: int | None, replicas: int | None, widths: Sequence[int] | None, workers: int | None
) -> tuple[int, ...]:
    """Determines the number of workers of each stage.

    All unset means 2 stages x 2 replicas. ``workers`` alone means the largest number of stages, at most 2, that
    divides it. One of ``stages`` and ``replicas`` alone is completed by ``workers``, or by 2.

    Args:
        stages: number of stages of equal width.
        replicas: width of each of them.
        widths: width of each stage, instead of stages and replicas.
        workers: total number of workers.
    Returns:
        One width per stage.
    Raises:
        ConfigError: with every contradiction that was found.
    """
    problems = [
        f"{name}: {value} is below 1"
        for name, value in (("layout.stages", stages), ("layout.replicas", replicas), ("--workers", workers))
        if value is not None and value < 1
    ]
    if widths is not None:
        problems += _width_problems(widths)
        for name, value in (("layout.stages", stages), ("layout.replicas", replicas)):
            if value is not None:
                problems.append(f"{name}: {value} is given beside layout.widths = {_show(widths)}; give one of them")
    if problems:
        raise ConfigError(problems)
    if widths is not None:
        return _checked_total(tuple(widths), f"layout.widths = {_show(widths)}", workers)
    if stages is not None and replicas is not None:
        return _checked_total((replicas,) * stages, f"{stages} stages x {replicas} replicas", workers)
    if workers is None:
        return (replicas or DEFAULT_REPLICAS,) * (stages or DEFAULT_STAGES)
    if stages is None and replicas is None:
        stages = max(n for n in (1, DEFAULT_STAGES) if workers % n == 0)
    for name, value in (("layout.stages", stages), ("layout.replicas", replicas)):
        if value is not None and workers % value:
            raise ConfigError([f"--workers: {workers} workers cannot be split by {name} = {value}; give a multiple"])
    if stages is None:
        assert replicas is not None
        stages = workers // replicas
    return (workers // stages,) * stages


def _checked_total(widths: tuple[int, ...], what: str, workers: int | None) -> tuple[int, ...]:
    if workers is not None and workers != sum(widths):
        raise ConfigError([f"--workers: {workers} is given, but {what} needs {sum(widths)}; drop one of the two"])
    return widths


def _width_problems(widths: Sequence[int]) -> list[str]:
    if not widths:
        return ["layout.widths: is empty; give one width per stage, such as [1, 3]"]
    return [
        f"layout.widths: stage {stage} has width {width}, below 1" for stage, width in enumerate(widths) if width < 1
    ]


def _show(numbers: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, numbers)) + "]"


def layout_problems(
    widths: Sequence[int],
    *,
    num_layers: int,
    num_microbatches: int,
    layers_per_stage: Sequence[int] | None = None,
    counted: str = "embedding and head included",
) -> list[str]:
    """Lists everything that makes a layout impossible for a model and a batch, one line each; the list is empty if it
    is possible.

    Args:
        widths: workers per stage.
        num_layers: layers of the model, embedding and head included.
        num_microbatches: micro-batches of the global batch.
        layers_per_stage: as asked for; None means that `partition_layers` will choose.
        counted: how the layers were counted, for the messages.
    """
    problems = _width_problems(widths)
    if num_microbatches < 1:
        problems.append(f"batch.num_microbatches: {num_microbatches} is below 1")
    elif widths and max(widths) > num_microbatches:
        problems.append(
            f"layout: a stage of width {max(widths)} is wider than batch.num_microbatches = {num_microbatches}, so "
            "some of its workers would have nothing to do; narrow the stage or raise batch.num_microbatches"
        )
    if len(widths) > num_layers:
        problems.append(
            f"layout: {len(widths)} stages for a model of {num_layers} layers ({counted}); every stage needs a layer"
        )
    if layers_per_stage is None:
        return problems
    shown = f"layout.layers: {_show(layers_per_stage)}"
    if len(layers_per_stage) != len(widths):
        problems.append(f"{shown} is for {len(layers_per_stage)} stages, but there are {len(widths)}")
    if any(count < 1 for count in layers_per_stage):
        problems.append(f"{shown} leaves a stage without layers; every stage needs at least 1")
    if sum(layers_per_stage) != num_layers:
        problems.append(
            f"{shown} adds up to {sum(layers_per_stage)}, but the model has {num_layers} layers ({counted})"
        )
    return problems


def partition_layers(costs: Sequence[float], widths: Sequence[int]) -> tuple[int, ...]:
    """Splits layers into contiguous stages so that the slowest stage is as fast as possible.

    The time of a stage is the cost of its layers over its width. Among the splits with the smallest largest time it
    takes the most even one (smallest sum of width x time**2); what is still equal goes to the later stage, since
    earlier ones hold more micro-batches in flight.

    Args:
        costs: of each layer, at least 0, in any unit.
        widths: workers of each stage.
    Returns:
        Number of layers of each stage, each at least 1.
    Raises:
        ValueError: fewer layers than stages, a width below 1, no stage, or a cost that is negative or not finite.
    """
    num_layers, num_stages = len(costs), len(widths)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"cannot split {num_layers} layers into {num_stages} stages: every stage needs a layer")
    if min(widths) < 1:
        raise ValueError(f"stage widths are {_show(widths)}: each must be at least 1")
    # Whole numbers, so that ties are ties and every worker splits alike.
    common = lcm(*widths)
    bounds = split_layers(exact_prefix(costs), [common // width for width in widths])
    assert bounds is not None  # without limits there is always a split
    return tuple(stop - start for start, stop in pairwise(bounds))


def exact_prefix(costs: Sequence[float]) -> list[int]:
    """Computes the cost of the layers before each layer, and of all of them, as integers over one common denominator.

    Exact, so that ties between splits are ties.

    Args:
        costs: of each layer, at least 0, in any unit.
    Returns:
        One entry more than there are layers, the first 0, in some unit of its own.
    Raises:
        ValueError: a cost that is negative or not finite.
    """
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"layer costs are {list(costs)}: each must be finite and at least 0")
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    denominator = max(denominator for _, denominator in ratios)  # all are powers of two
    return [0, *accumulate(numerator * (denominator // own) for numerator, own in ratios)]


def make_layout(
    *,
    widths: Sequence[int],
    layers_per_stage: Sequence[int],
    num_microbatches: int,
    shared: tuple[tuple[int, ...], ...] = (),
    hosts: Mapping[str, int] | None = None,
    labels: Mapping[int, str] | None = None,
    copies: Copies = "",
) -> Layout:
    """Makes the layout with these stages, worker ids given stage by stage from 0.

    Micro-batch m runs on worker ``m % width`` of each stage, so neighbouring stages of unequal width exchange
    between many pairs of workers.

    Args:
        widths: workers of each stage.
        layers_per_stage: number of layers of each stage.
        num_microbatches: micro-batches of the global batch.
        shared: as of `Layout.shared`.
        hosts: host -> number of workers that it has; each stage is dealt over them. None: all workers are on one.
        labels: where each worker runs (`elaswave.blocks.domains`), in the place of hosts.
        copies: as of `Layout.copies`.
    Raises:
        ConfigError: the layout is impossible; every problem is listed.
        ValueError: there are more workers than the hosts have room for.
    """
    problems = layout_problems(
        widths,
        num_layers=sum(layers_per_stage),
        num_microbatches=num_microbatches,
        layers_per_stage=layers_per_stage,
    )
    if problems:
        raise ConfigError(problems)
    first_layers = [0, *accumulate(layers_per_stage)]
    first_workers = [0, *accumulate(widths)]
    stages = tuple(
        Stage(start=start, stop=stop, workers=tuple(range(first, last)))
        for (start, stop), (first, last) in zip(pairwise(first_layers), pairwise(first_workers))
    )
    routes = tuple(
        tuple(
            Hop(stage.workers[microbatch % stage.width], index, stage.start, stage.stop)
            for index, stage in enumerate(stages)
        )
        for microbatch in range(num_microbatches)
    )
    # Dealt over hosts, the loss of one takes as few stages whole as possible (D3).
    domains = tuple((labels or {}).items()) if hosts is None else deal_over_hosts(widths, hosts)
    return Layout(stages=stages, routes=routes, shared=shared, domains=domains, copies=copies)


def evaluation_layout(layout: Layout, num_microbatches: int) -> Layout:
    """Makes a layout of the same stages with the micro-batches of an evaluation.

    They take the routes of training in turn, so that every link they need is there, and so that there may be fewer
    of them than a stage has workers.
    """
    routes = islice(cycle(layout.routes), num_microbatches)
    return msgspec.structs.replace(layout, routes=tuple(routes))


def validate_layout(layout: Layout) -> None:
    """Checks that a layout is well formed, wherever it comes from.

    The stages' first layers never descend, nor do their last ones, and together they hold every layer. They may
    overlap: neighbours that share a boundary layer, or the stages of pipelines of different depth. A worker is in one
    stage, or idle. Every route passes every layer once, in order, over stages in ascending order, on workers that hold
    them.

    Raises:
        ValueError: with every fault that was found.
    """
    faults = _stage_faults(layout)
    num_layers = layout.num_layers if layout.stages else 0
    if not layout.routes:
        faults.append("there is no route: a step needs at least one micro-batch")
    for microbatch, route in enumerate(layout.routes):
        where = f"micro-batch {microbatch}"
        if not route or route[0].start != 0 or route[-1].stop != num_layers:
            faults.append(f"{where}: its route does not begin at layer 0 and end at layer {num_layers}")
        for before, after in pairwise(route):
            if before.stop != after.start:
                faults.append(f"{where}: layer {before.stop} follows, but the hop to worker {after.worker} begins at "
                              f"layer {after.start}")  # fmt: skip
            if before.stage >= after.stage:
                faults.append(f"{where}: stage {after.stage} does not come after stage {before.stage}")
        for hop in route:
            if not 0 <= hop.stage < len(layout.stages):
                faults.append(f"{where}: stage {hop.stage} is not one of the {len(layout.stages)} stages")
                continue
            stage = layout.stages[hop.stage]
            if hop.worker not in stage.workers:
                faults.append(f"{where}: worker {hop.worker} is not in stage {hop.stage}")
            if not stage.start <= hop.start < hop.stop <= stage.stop:
                faults.append(f"{where}: stage {hop.stage} holds layers [{stage.start}, {stage.stop}), but is asked to "
                              f"run [{hop.start}, {hop.stop})")  # fmt: skip
    if faults:
        raise ValueError("the layout is impossible:\n" + "\n".join(f"- {fault}" for fault in faults))


def _stage_faults(layout: Layout) -> list[str]:
    faults = []
    if not layout.stages:
        faults.append("there is no stage")
    elif layout.stages[0].start != 0:
        faults.append(f"the first stage begins at layer {layout.stages[0].start}, not 0")
    for index, stage in enumerate(layout.stages):
        if not stage.workers:
            faults.append(f"stage {index} has no workers")
        if stage.start >= stage.stop:
            faults.append(f"stage {index} has no layers: [{stage.start}, {stage.stop})")
        if list(stage.workers) != sorted(set(stage.workers)):
            faults.append(f"stage {index} lists its workers as {stage.workers}: they must ascend")
    for index, (before, after) in enumerate(pairwise(layout.stages)):
        if after.start < before.start or after.stop < before.stop:
            faults.append(
                f"stage {index + 1} holds layers [{after.start}, {after.stop}), which do not come after those of stage "
                f"{index}, [{before.start}, {before.stop}): stages must ascend in their first and in their last layer"
            )
        elif after.start > before.stop:
            faults.append(
                f"no stage holds layers [{before.stop}, {after.start}), between stages {index} and {index + 1}"
            )
    if list(layout.idle) != sorted(set(layout.idle)):
        faults.append(f"the idle workers are listed as {layout.idle}: they must ascend")
    workers = layout.workers
    for worker, following in pairwise(workers):
        if worker == following:
            where = "idle and in a stage" if worker in layout.idle else "in more than one stage"
            faults.append(f"worker {worker} is {where}")
    return faults


def peers_of(layout: Layout, placement: Placement | None = None, blocks: Sequence[Block] = ()) -> dict[int, set[int]]:
    """Finds the workers that each worker exchanges tensors with, apart from the vote. The relation is symmetric; no
    worker is its own peer.

    Args:
        layout: routes join the workers of neighbouring hops; the workers that run a layer exchange its gradients.
        placement: who holds which block: joins owners with the workers that run the block's layer, and with its
            followers. Without it every two workers that run the same layer are joined.
        blocks: that the placement is about.
    """
    peers: dict[int, set[int]] = {worker: set() for worker in layout.workers}

    def join(a: int, b: int) -> None:
        if a != b:
            peers[a].add(b)
            peers[b].add(a)

    for route in layout.routes:
        for before, after in pairwise(route):
            join(before.worker, after.worker)
    members_of_layer = holders_of_layers(layout)
    if placement is None:
        for members in set(members_of_layer):
            for a in members:
                for b in members:
                    join(a, b)
        return peers
    # Blocks are many, but pairs of a group and an owner few.
    owners_of_members = {(members_of_layer[block.layer], placement.owner[block.id]) for block in blocks}
    for members, owner in sorted(owners_of_members):
        for member in members:
            join(owner, member)
    for block in blocks:
        for follower in placement.followers[block.id]:
            join(placement.owner[block.id], follower)
    return peers


class RunningLayout(NamedTuple):
    """What a job runs, or could run: a layout of its members, and what it is expected to bring."""

    layout: Layout
    execution: ExecutionParameters
    predicted_step_s: float
    reason: str = ""
    """For people: who has planned it, and why."""


class JobModel(NamedTuple):
    """What every layout of a job is judged by."""

    cluster: Cluster
    """All workers of the job, their speeds as known."""
    schedule: Schedule
    """As configured: of layouts whose execution parameters name none."""
    followers: int
    """Live copies of every block."""
    bytes_of: Costs | None = None
    """Costs by whose bytes memory is kept to; None where it is not planned with."""

    def step_s(self, layout: Layout, execution: ExecutionParameters, costs: Costs) -> float:
        """Computes the seconds of a step: the very programs that the workers run, timed.

        Args:
            layout: of workers of the job.
            execution: beside it.
            costs: of the layers.
        """
        schedule, limits, known = compiled_by(layout, execution, self.schedule)
        durations = durations_of(costs.layer_s, self.cluster.speed_of(execution.levels))
        if self.cluster.network is not None:  # of which the programs know nothing, but steps are made of
            programs = compile_programs(layout, schedule, max_in_flight=limits, durations=known)
            return simulate_step(layout, programs, costs, self.cluster, durations=durations).step_s
        taken_s = timed_step_s(layout, schedule, durations, known=known, max_in_flight=limits)
        return taken_s + costs.overhead_s(layout.stages)

    def within_memory(self, layout: Layout, execution: ExecutionParameters) -> ExecutionParameters:
        """Returns the parameters with what workers have room for under another layout, as far as it fits at all.

        Args:
            layout: from now on.
            execution: before.
        """
        if self.bytes_of is None:
            return execution
        schedule: Schedule = execution.schedule or self.schedule  # type: ignore[assignment]
        limits = layout_limits(
            self.cluster, self.bytes_of, layout, schedule, followers=self.followers, must_fit=False
        )  # fmt: skip
        return msgspec.structs.replace(execution, in_flight=limits)


def to_layout(allocation: Allocation, job: JobModel, costs: Costs, present: Layout) -> RunningLayout:
    """Makes the running layout of a plan.

    Routes are made anew, and, if the batch stays what it is, also such that micro-batches stay with their workers;
    the faster ones are taken. (Those that stay are no faster for it, and now and then much slower: they meet in another
    order than in pipelines made anew.)

    Args:
        allocation: of the plan.
        job: the workers and their limits.
        costs: of the layers.
        present: the layout in force, of exactly the members.
    Returns:
        A valid layout of all members.
    Raises:
        ValueError: chains that cannot be one layout.
        KeyError: a worker that is not in the job.
    """
    layouts = [make_routes(allocation, costs, job.cluster)]
    if allocation.num_microbatches == present.num_microbatches:
        # First, since among equally fast ones the first is taken: micro-batches stay.
        layouts.insert(0, make_routes(allocation, costs, job.cluster, previous=present))
    planned = levels_of(allocation)
    levels = {worker: level for worker, level in planned.items() if level != job.cluster.base_level(worker)}
    speed_of = job.cluster.speed_of(levels)
    speeds = {worker: speed_of(worker) for worker in job.cluster.ids.tolist()}
    execution = execution_of(costs, speeds, schedule=allocation.schedule, levels=levels)
    found = []
    # A plan says nothing of these.
    same = {"shared": present.shared, "domains": present.domains, "copies": present.copies}
    for each in layouts:
        layout = with_idle(msgspec.structs.replace(each, **same), present).with_followers_of(present)
        own = job.within_memory(layout, execution)
        found.append(RunningLayout(layout, own, job.step_s(layout, own, costs)))
    best = min(found, key=lambda each: each.predicted_step_s)
    validate_layout(best.layout)
    return best


def without_idle(layout: Layout) -> Layout:
    """Returns a layout without the workers that no route passes; stages without any worker left are left out too."""
    busy = {hop.worker for route in layout.routes for hop in route}
    members = [tuple(worker for worker in stage.workers if worker in busy) for stage in layout.stages]
    numbers = {stage: number for number, stage in enumerate(index for index, each in enumerate(members) if each)}
    stages = tuple(msgspec.structs.replace(layout.stages[stage], workers=members[stage]) for stage in numbers)
    routes = tuple(
        tuple(Hop(hop.worker, numbers[hop.stage], hop.start, hop.stop) for hop in route) for route in layout.routes
    )
    return Layout(stages=stages, routes=routes, shared=layout.shared, domains=layout.domains, copies=layout.copies)


def with_idle(layout: Layout, present: Layout) -> Layout:
    """Returns a layout with the workers that it has nothing for.

    Those of a stage join the stage that is nearest to where they were, since they hold blocks of its layers; those that
    are idle stay so.

    Args:
        layout: as planned.
        present: of all members.
    """
    unused = sorted(set(present.workers) - set(layout.workers))
    if not unused:
        return layout
    middles = np.array([(stage.start + stage.stop) / 2 for stage in layout.stages])
    members = [list(stage.workers) for stage in layout.stages]
    idle = set(layout.idle)
    for worker in unused:
        if worker in present.idle:
            idle.add(worker)
            continue
        stage = present.stages[present.stage_of(worker)]
        members[int(np.argmin(abs(middles - (stage.start + stage.stop) / 2)))].append(worker)
    stages = tuple(
        msgspec.structs.replace(stage, workers=tuple(sorted(workers)))
        for stage, workers in zip(layout.stages, members, strict=True)
    )
    return msgspec.structs.replace(layout, stages=stages, idle=tuple(sorted(idle)))
