"""What ``plan``, ``simulate`` and ``compare`` ask for alike: a model, a kind of device, a layout, and who is lost.

Without any of it they speak of the paper's cluster: 96 Ascend 910B that train Llama-2 13B as 8 stages x 12 replicas
(ElasWave, arXiv 2510.00606, section 7).

Options that belong together reach a command as one value.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import click

from elaswave.cli.tables import format_bytes
from elaswave.config.policy_code import policies
from elaswave.config.presets import catalog, device_preset, link_preset, model_shape
from elaswave.config.values import TOKENS_PER_S
from elaswave.errors import InfeasiblePlan, UsageError
from elaswave.fences import CODECS
from elaswave.planning.costs.analytic import analytic_costs, preset_cluster
from elaswave.planning.costs.layers import ACCUMULATOR_BITS, DEFAULT_FOLLOWERS, Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.schedules import SCHEDULES, Schedule
from elaswave.planning.plan import Allocation, Planner
from elaswave.planning.policy.fault_free_policies import FaultFreeStart, fastest_fault_free, fault_free, own_starts
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.programs.prediction import time_as_it_is
from elaswave.planning.state_moves.placed_blocks import Placing, copied_bytes
from elaswave.planning.survival import SurvivalShares, survival_shares_of
from elaswave.sim.cluster.failures import racks_of
from elaswave.types import WHOLE_STAGE

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Command = TypeVar("Command", bound=Callable[..., Any])


def add_group(
    command: Command,
    name: str,
    group: "type[DataclassInstance]",
    options: Sequence[Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Command:
    """Adds options to a command, which gets their values together.

    Args:
        command: a function that click is to call.
        name: of its parameter that takes the group.
        group: a dataclass with one field for each option, of the option's name.
        options: what ``click.option`` made, in the order in which the help lists them.
    """
    names = [field.name for field in fields(group)]

    def gathering(*args: Any, **values: Any) -> Any:
        return command(*args, **{name: group(**{each: values.pop(each) for each in names})}, **values)

    gathering.__name__, gathering.__doc__ = command.__name__, command.__doc__
    gathering.__dict__.update(vars(command))
    for option in reversed(options):
        gathering = option(gathering)
    return gathering  # type: ignore[return-value]


def given_in(group: "DataclassInstance") -> list[str]:
    """Lists the names of a group's options that were given, as they are typed; None says that one was not."""
    return [f"--{name.replace('_', '-')}" for name, value in vars(group).items() if value is not None]


DEFAULT_MODEL = "llama-2-13b"
DEFAULT_DEVICE = "ascend-910b"
DEFAULT_WORKERS = 96
DEFAULT_STAGES = 8
DEFAULT_LOSE = 1
MICROBATCHES_PER_STAGE = 4
"""Micro-batches of a replica, per stage, if not given: enough that pipelines are full most of the time."""
PATTERNS = ("spread", "clustered", "random")


class _Number(click.FloatRange):
    """A finite number of a range, refused in the words of the command line."""

    def __init__(self, what: str, *, min: float, min_open: bool = False, max: float | None = None) -> None:
        super().__init__(min=min, min_open=min_open, max=max)
        self._what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number: float = super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is not {self._what}.", param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not {self._what}.", param, ctx)
        return number


POSITIVE = _Number("a number above 0", min=0, min_open=True)
NOT_NEGATIVE = _Number("a number of at least 0", min=0)
SHARE = _Number("a number above 0 and at most 1", min=0, min_open=True, max=1)


def _known(kind: str) -> str:
    """Lists the package's presets of a kind, for a help text."""
    return f"{', '.join(getattr(catalog(), kind))}, or a .toml file"


_OPTIONS = (
    click.option("--workers", type=click.IntRange(min=1), help=f"Number of workers.  [default: {DEFAULT_WORKERS}]"),
    click.option(
        "--stages",
        type=click.IntRange(min=1),
        help=f"Pipeline stages; workers / stages is the number of replicas.  [default: {DEFAULT_STAGES}]",
    ),
    click.option("--model", metavar="NAME|FILE", help=f"{_known('models')}.  [default: {DEFAULT_MODEL}]"),
    click.option("--device", metavar="NAME|FILE", help=f"{_known('devices')}.  [default: {DEFAULT_DEVICE}]"),
    click.option(
        "--microbatches",
        type=click.IntRange(min=1),
        help=f"Micro-batches of a step per replica.  [default: {MICROBATCHES_PER_STAGE} x stages]",
    ),
    click.option("--microbatch-size", type=click.IntRange(min=1), help="Samples of a micro-batch.  [default: 1]"),
    click.option(
        "--schedule", type=click.Choice(SCHEDULES), help="Order of forwards and backwards.  [default: fastest]"
    ),
    click.option(
        "--tensor-parallel", type=click.IntRange(min=1), help="Devices that make up one worker.  [default: 1]"
    ),
    click.option("--recompute", is_flag=True, default=None, help="Run blocks again in the backward: less memory."),
    click.option(
        "--accumulator-bits",
        type=click.Choice([str(bits) for bits in ACCUMULATOR_BITS]),
        help="Width of exact sums: 8 or 6 bytes per parameter.  [default: 64]",
    ),
    click.option(
        "--fence",
        multiple=True,
        metavar="LAYER:CODEC",
        callback=lambda context, option, values: values or None,
        help=f"A fence of the model, behind embedding or block.N: {', '.join(CODECS)}, topkR; may be repeated.",
    ),
    click.option(
        "--efficiency", type=SHARE, metavar="F", help="Share of the peak that is reached.  [default: the device's]"
    ),
    click.option("--within-node", metavar="LINK|FILE", help=f"{_known('links')}.  [default: the device's]"),
    click.option("--between-nodes", metavar="LINK|FILE", help="The same, between machines.  [default: the device's]"),
    click.option(
        "--power-limit-kw", type=POSITIVE, metavar="KW", help="Of all workers together.  [default: their base level's]"
    ),
)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """What was given of a described cluster; None means the default."""

    workers: int | None = None
    stages: int | None = None
    model: str | None = None
    device: str | None = None
    microbatches: int | None = None
    microbatch_size: int | None = None
    schedule: Schedule | None = None
    tensor_parallel: int | None = None
    recompute: bool | None = None
    accumulator_bits: str | None = None
    fence: tuple[str, ...] | None = None
    efficiency: float | None = None
    within_node: str | None = None
    between_nodes: str | None = None
    power_limit_kw: float | None = None

    @property
    def sum_bits(self) -> int:
        """Width of exact sums."""
        return int(self.accumulator_bits or ACCUMULATOR_BITS[0])

    @property
    def given(self) -> list[str]:
        """Names of the options that were given."""
        return given_in(self)


def cluster_options(command: Command) -> Command:
    """Adds the options of a described cluster; the command gets them as ``options: ClusterOptions``."""

    return add_group(command, "options", ClusterOptions, _OPTIONS)


def loss_options(command: Command) -> Command:
    """Adds the options that say who is lost."""
    for option in reversed(
        (
            click.option(
                "--lose",
                type=click.IntRange(min=0),
                default=DEFAULT_LOSE,
                show_default=True,
                help="Number of workers that are lost.",
            ),
            click.option(
                "--pattern",
                type=click.Choice(PATTERNS),
                default=PATTERNS[0],
                show_default=True,
                help="spread: over stages and replicas; clustered: one stage first; random: any workers.",
            ),
            click.option(
                "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="What chance depends on."
            ),
            click.option(
                "--speed",
                "speeds",
                multiple=True,
                metavar="WORKER=F",
                help="A worker that computes at F times the others' speed; may be given several times.",
            ),
            click.option(
                "--nodes-per-rack",
                type=click.IntRange(min=1),
                help="Machines that share a rack; elaswave keeps copies apart over racks then.  [default: 1]",
            ),
        )
    ):
        command = option(command)
    return command


def policy_option(command: Command) -> Command:
    """Adds ``--policy``, which lists the policies there are."""
    return click.option(
        "--policy",
        metavar="NAME|CODE",
        default="elaswave",
        show_default=True,
        help=f"Who plans: {', '.join(policies())}; or your own: module:function, file.py:function.",
    )(command)


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """A job before anything happens."""

    title: str
    """What it is, for people."""
    cluster: Cluster
    costs: Costs
    allocation: Allocation
    tokens_per_microbatch: int
    """Or samples, as `unit` says."""
    unit: str = TOKENS_PER_S
    """Of throughput."""
    followers: int = DEFAULT_FOLLOWERS
    """Live copies of every block that layouts are planned with."""
    placing: Placing = Placing(followers="auto")
    """How many there are."""
    racks: tuple[int, ...] = ()
    """Rack of machine 0, 1, ...; empty: racks are not known."""
    planners: Mapping[str, Planner] = field(default_factory=policies)
    """Policies that are known, by name."""
    schedules: tuple[Schedule, ...] = SCHEDULES
    """That the job may run."""

    def tokens_per_s(self, num_microbatches: int, step_s: float) -> float:
        """Computes the throughput of steps of so many micro-batches."""
        return num_microbatches * self.tokens_per_microbatch / step_s

    @cached_property
    def step_s(self) -> float:
        """Of the fault-free job."""
        return time_as_it_is(self.cluster, self.costs, self.allocation, followers=self.followers).step_s

    @cached_property
    def own_starts(self) -> Mapping[str, FaultFreeStart]:
        """What each policy would run on all workers."""
        return own_starts(
            self.cluster, self.costs, self.allocation, self.planners, schedules=self.schedules, followers=self.followers
        )

    @cached_property
    def fault_free_step_s(self) -> float:
        """The shortest step that any policy is known to make of all workers: one for all of them."""
        return min([self.step_s, *(start.step_s for start in self.own_starts.values())])

    def survival(self, planner: Planner, allocation: Allocation) -> SurvivalShares:
        """Computes which losses at one instant leave a copy of all state, under a policy's layout of all workers."""
        placing = replace(self.placing, racks=self.racks)
        replication = policy_metadata_of(planner).replication
        return survival_shares_of(replication, allocation, self.cluster, placing, self.costs)

    def copies_of(self, planner: Planner) -> str | None:
        """Describes how many followers blocks have, and why; None under a policy that has no blocks."""
        if policy_metadata_of(planner).replication.unit != "blocks":
            return None
        return describe_copies(self.placing, self.allocation, self.cluster, self.costs)

    def capacity_left(self, left: Cluster) -> float:
        """Tokens per second of the capacity that is left: the best that any policy makes of all workers, times the
        speed of those who are left over the speed of all.

        Args:
            left: the cluster after a loss.
        """
        share = float(left.speed.sum() / self.cluster.speed.sum())
        return self.tokens_per_s(self.allocation.num_microbatches, self.fault_free_step_s) * share


def describe_machines(options: ClusterOptions, *, num_workers: int) -> tuple[Cluster, Costs]:
    """Makes the cluster and costs that options describe.

    Args:
        options: as given.
        num_workers: in the cluster.
    Raises:
        UsageError: an unknown name, or a figure that cannot be.
    """
    shape = model_shape(options.model or DEFAULT_MODEL)
    preset = device_preset(options.device or DEFAULT_DEVICE)
    within_node = link_preset(options.within_node).link if options.within_node else None
    between_nodes = link_preset(options.between_nodes).link if options.between_nodes else None
    tensor_parallel = options.tensor_parallel or 1
    try:
        cluster = preset_cluster(
            num_workers,
            preset,
            tensor_parallel=tensor_parallel,
            within_node=within_node,
            between_nodes=between_nodes,
            power_limit_w="base level" if options.power_limit_kw is None else options.power_limit_kw * 1000,
        )
        costs = analytic_costs(
            shape,
            preset,
            microbatch_size=options.microbatch_size or 1,
            recompute=bool(options.recompute),
            accumulator_bits=options.sum_bits,
            tensor_parallel=tensor_parallel,
            efficiency=options.efficiency,
            within_node=within_node,
            between_nodes=between_nodes,
            fences=options.fence or (),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return cluster, costs


def with_speeds(cluster: Cluster, speeds: Sequence[str]) -> Cluster:
    """Makes the cluster with other speeds of single workers.

    Args:
        cluster: of workers at their devices' speed.
        speeds: as given: WORKER=F.
    Raises:
        UsageError: not of this form, a worker that is not there, or an impossible speed.
    """
    found, given = cluster.speed.copy(), set()
    for text in speeds:
        worker, _, factor = text.partition("=")
        try:
            index, speed = int(worker), float(factor)
        except ValueError as error:
            raise UsageError(f"--speed {text!r}: needed is WORKER=F, as 3=0.7") from error
        if not 0 <= index < cluster.num_workers:
            raise UsageError(f"--speed {text}: there are the workers 0 to {cluster.num_workers - 1}")
        if not 0 < speed < float("inf"):
            raise UsageError(f"--speed {text}: a speed is a number above 0")
        if index in given:
            raise UsageError(f"--speed {text}: worker {index} has a speed already; give each worker one")
        given.add(index)
        found[index] = speed
    return replace(cluster, speed=found)


def describe_setting(
    options: ClusterOptions,
    *,
    num_workers: int | None = None,
    speeds: Sequence[str] = (),
    nodes_per_rack: int | None = None,
) -> PlannedJob:
    """Makes the job that options describe, undisturbed.

    Args:
        options: as given.
        num_workers: instead of the one in the options, where something else decides it (a trace).
        speeds: of single workers, as `with_speeds` takes them.
        nodes_per_rack: neighbouring machines that share a rack; None: racks are not known.
    Raises:
        UsageError: options that contradict each other, or a job that does not fit.
    """
    num_workers = num_workers or options.workers or DEFAULT_WORKERS
    num_stages = options.stages or DEFAULT_STAGES
    if num_workers % num_stages:
        raise UsageError(
            f"{num_workers} workers cannot be split into {num_stages} stages of one width; give --stages that divides "
            "--workers"
        )
    num_replicas = num_workers // num_stages
    shape = model_shape(options.model or DEFAULT_MODEL)
    per_replica = options.microbatches or MICROBATCHES_PER_STAGE * num_stages
    if num_stages > shape.num_layers + 2:
        raise UsageError(
            f"{num_stages} stages for the {shape.num_layers + 2} layers of {shape.name}; give fewer stages"
        )
    cluster, costs = describe_machines(options, num_workers=num_workers)
    cluster = with_speeds(cluster, speeds)
    num_microbatches = per_replica * num_replicas

    try:
        if options.schedule is None:
            allocation = fastest_fault_free(cluster, costs, num_stages, num_replicas, num_microbatches)
        else:
            allocation = fault_free(
                cluster, costs, num_stages, num_replicas, num_microbatches, schedule=options.schedule
            )
    except InfeasiblePlan as error:
        machines = f"{num_workers} x {cluster.devices[0].name} as {num_stages} stages x {num_replicas} replicas"
        raise does_not_fit(error, f"{shape.name} on {machines}") from error
    microbatch_size = options.microbatch_size or 1
    return PlannedJob(
        title=f"{shape.name} on {num_workers} x {cluster.devices[0].name}, {num_stages} stages x {num_replicas} "
        f"replicas, {per_replica * num_replicas} micro-batches of {microbatch_size} x {shape.context_length} tokens",
        cluster=cluster,
        costs=costs,
        allocation=allocation,
        tokens_per_microbatch=microbatch_size * shape.context_length,
        schedules=SCHEDULES if options.schedule is None else (options.schedule,),
        racks=racks_of(int(cluster.node.max()) + 1, nodes_per_rack or 1),
    )


def does_not_fit(error: InfeasiblePlan, what: str = "the job") -> UsageError:
    """Makes the error that tells a person whose job does not fit on the machines described."""
    if str(error).startswith("power"):
        return UsageError(f"{what} cannot run: {error}; give a higher --power-limit-kw, or fewer --workers")
    return UsageError(
        f"{what} does not fit: {error}; try more --stages, --recompute, --tensor-parallel, or another --device"
    )


def describe_copies(placing: Placing, allocation: Allocation, there: Cluster, costs: Costs) -> str:
    """Describes how many followers the blocks of a job have, and why: of elaswave.

    Args:
        placing: how they are chosen.
        allocation: of the job.
        there: the cluster, with all of its workers.
        costs: of the layers.
    """
    if placing.followers != "auto":
        plural = "" if placing.followers == 1 else "s"
        return f"each block has {placing.followers} follower{plural} beside its owner, as asked for"
    stages = [stage for chain in allocation.chains for stage in chain.stages]
    numbers = [placing.followers_of(stage, there, costs) for stage in stages]
    most = max(copied_bytes(costs, stage.start, stage.stop) * (stage.width - 1) / stage.width for stage in stages)
    memory = format_bytes(round(float(there.memory_bytes.min())))
    limit = f"of a worker's {memory}, of which {placing.copies_memory:.0%} may be taken"
    if set(numbers) == {WHOLE_STAGE}:
        return f"auto: all of a stage follow its blocks, since their copies take {format_bytes(round(most))} {limit}"
    few = [f"{number} of {stage.width - 1}" for number, stage in zip(numbers, stages) if number != WHOLE_STAGE]
    return (
        f"auto: {' or '.join(dict.fromkeys(few))} others of a stage follow its blocks, since copies of all of it take "
        f"{format_bytes(round(most))} {limit}"
    )


def check_some_are_left(num_lost: int, num_workers: int) -> None:
    """Refuses a loss of all workers.

    Raises:
        UsageError: no worker would be left.
    """
    if num_lost >= num_workers:
        raise UsageError(f"{num_lost} of {num_workers} workers would be lost: --lose must leave at least one")


def check_racks_are_of_machines(nodes_per_rack: int | None, other: object, of: str) -> None:
    """Refuses racks where machines are not those of a described cluster.

    Args:
        nodes_per_rack: as given.
        other: the option that describes something else; none if there is no such option.
        of: what it describes.
    Raises:
        UsageError: both were given.
    """
    if nodes_per_rack is not None and other:
        raise UsageError(f"--nodes-per-rack is of a described cluster, but {other} has {of}; leave it out")


def choose_lost(allocation: Allocation, num_lost: int, pattern: str, seed: int) -> tuple[int, ...]:
    """Chooses who is lost, of the workers of an allocation's first chain.

    Args:
        allocation: before the loss.
        num_lost: how many.
        pattern: ``spread``: another stage and another replica each time, as long as there is one; ``clustered``: the
            workers of one stage, then of the next; ``random``: any workers.
        seed: equal seeds choose the same workers.
    Returns:
        Ascending ids.
    Raises:
        UsageError: no worker would be left.
    """
    stages = [stage.workers.tolist() for stage in allocation.chains[0].stages]
    check_some_are_left(num_lost, sum(map(len, stages)))
    rng = random.Random(seed)
    if pattern == "random":
        return tuple(sorted(rng.sample([worker for stage in stages for worker in stage], num_lost)))
    if pattern == "clustered":
        first = rng.randrange(len(stages))
        order = [
            worker
            for offset in range(len(stages))
            for worker in rng.sample(
                stages[(first + offset) % len(stages)], len(stages[(first + offset) % len(stages)])
            )
        ]
        return tuple(sorted(order[:num_lost]))
    turns = rng.sample(range(len(stages)), len(stages))
    replicas = rng.sample(range(max(map(len, stages))), max(map(len, stages)))
    lost: set[int] = set()
    while len(lost) < num_lost:
        turn = len(lost)
        left = [stages[turns[(turn + skipped) % len(turns)]] for skipped in range(len(turns))]
        stage = next(each for each in left if not lost.issuperset(each))
        wanted = replicas[turn % len(replicas)]
        lost.add(next(w for r in range(len(stage)) if (w := stage[(wanted + r) % len(stage)]) not in lost))
    return tuple(sorted(lost))
