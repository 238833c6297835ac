"""``--network`` of ``elaswave plan`` and ``compare``: a job on machines far apart, planned by OP-Fence and its rivals.

Networks and devices are emulated: nothing here measures anything, and every output says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click

from elaswave.cli.tables import format_seconds, render_table, terminal_width
from elaswave.cli.whatif.cluster_options import (
    ClusterOptions,
    Command,
    add_group,
    check_some_are_left,
    choose_lost,
    given_in,
    with_speeds,
)
from elaswave.cli.whatif.layout_table import as_json
from elaswave.config.policy_code import registered
from elaswave.config.presets import model_shape
from elaswave.config.values import TOKENS_PER_S
from elaswave.errors import InfeasiblePlan, UsageError
from elaswave.fences import CODEC_WORDS, Codec, is_codec
from elaswave.observability.output import say, wrap
from elaswave.planning.costs.analytic import PARAMETER_BYTES, analytic_costs
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.far_apart.job import Copies, FarJob, FarPlan, allocation_of_plan, without_devices
from elaswave.planning.far_apart.objective import FAR_SCHEDULES, survival_of_plan, time_plan
from elaswave.planning.far_apart.op_fence import FarPlanner, op_fence

DEFAULT_FAR_MODEL = "gpt2-small"
DEFAULT_FAR_MICROBATCHES = 32
EMULATED = "networks and devices are emulated: nothing of this was measured"
_IN_FILE = {"workers", "device", "within_node", "between_nodes"}
"""Options of what the network's file says."""
_NOT_FAR = {"fence", "stages", "tensor_parallel", "power_limit_kw"}
"""Options of what is not planned here."""


@dataclass(frozen=True, kw_only=True)
class FarOptions:
    """What was given of a network; None means the default."""

    network: Path | None = None
    codec: Codec | None = None
    copies: Copies | None = None
    use_all: bool | None = None

    @property
    def without_network(self) -> list[str]:
        """Options that were given although no network was."""
        return [] if self.network is not None else given_in(self)


class _CodecName(click.ParamType):
    """A codec of a fence."""

    name = "CODEC"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Codec:
        """Reads the codec; refuses what is none."""
        if not is_codec(value):
            self.fail(f"{value!r} is no codec; give {CODEC_WORDS}", param, context)
        return str(value)


_OPTIONS = (
    click.option(
        "--network",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Sites, their workers, and the links between them: plan for machines far apart.",
    ),
    click.option(
        "--codec",
        type=_CodecName(),
        help=f"Of tensors between sites, with --network: {CODEC_WORDS}.  [default: none]",
    ),
    click.option(
        "--copies",
        type=click.Choice(["inside", "outside"]),
        help="Whether the first follower of a block is in its owner's site or in another.  [default: inside]",
    ),
    click.option(
        "--use-all", is_flag=True, default=None, help="Leave out no site and no worker, also where that were faster."
    ),
)


def far_options(command: Command) -> Command:
    """Adds the options of a network; the command gets them as ``far: FarOptions``."""

    return add_group(command, "far", FarOptions, _OPTIONS)


def check_far(far: FarOptions) -> None:
    """Refuses options of a network without one.

    Raises:
        UsageError: with their names.
    """
    if far.without_network:
        raise UsageError(f"{', '.join(far.without_network)} only mean something with --network FILE; give it")


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """A job, and what people are told about it."""

    job: FarJob
    title: str
    source: str
    tokens_per_microbatch: int
    schedules: tuple[Schedule, ...]


def _setting(options: ClusterOptions, far: FarOptions, speeds: Sequence[str]) -> _Setting:
    """Makes the job that options describe.

    Raises:
        UsageError: options that the file or the planner contradicts.
    """
    from elaswave.config.network import read_network

    given = {name for name, value in vars(options).items() if value is not None}
    for names, why in ((_IN_FILE, "the file of --network says that"), (_NOT_FAR, "OP-Fence does not plan that")):
        if found := sorted(given & names):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in found)
            raise UsageError(f"{flags} cannot be given with --network: {why}; leave it out")
    assert far.network is not None
    file = read_network(far.network)
    shape = model_shape(options.model or DEFAULT_FAR_MODEL)
    size = options.microbatch_size or 1
    schedules = FAR_SCHEDULES if options.schedule is None else (options.schedule,)
    if not set(schedules) <= set(FAR_SCHEDULES):
        raise UsageError(
            f"--schedule {options.schedule} is not planned with --network; give one of {', '.join(FAR_SCHEDULES)}"
        )
    costs = tuple(
        analytic_costs(
            shape,
            preset,
            microbatch_size=size,
            recompute=bool(options.recompute),
            accumulator_bits=options.sum_bits,
            efficiency=options.efficiency,
        )
        for preset in file.presets
    )
    job = FarJob(
        cluster=with_speeds(file.cluster, speeds),
        costs=costs,
        num_microbatches=options.microbatches or DEFAULT_FAR_MICROBATCHES,
        element_bytes=PARAMETER_BYTES,
        codec=far.codec or "none",
        memory_bandwidth_bytes_per_s=min(preset.memory_bandwidth_bytes_per_s for preset in file.presets),
        copies=far.copies or "inside",
        sum_bytes=options.sum_bits // 8,
    )
    assert job.cluster.network is not None
    return _Setting(
        job=job,
        title=f"{shape.name} on {job.cluster.num_workers} workers in {len(job.cluster.network.sites)} sites "
        f"({far.network}), {job.num_microbatches} micro-batches of {size} x {shape.context_length} tokens, codec "
        f"{job.codec}, copies {job.copies} of the site; {EMULATED}",
        source=file.source,
        tokens_per_microbatch=size * shape.context_length,
        schedules=schedules,
    )


def _left_after(setting: _Setting, plan: FarPlan, lose: int, pattern: str, seed: int) -> tuple[tuple[int, ...], FarJob]:
    check_some_are_left(lose, setting.job.cluster.num_workers)
    check_some_are_left(lose, sum(len(stage.devices) for stage in plan.stages))
    lost = choose_lost(allocation_of_plan(setting.job, plan), lose, pattern, seed)
    return lost, without_devices(setting.job, lost)


def plan_far_apart(
    options: ClusterOptions,
    far: FarOptions,
    *,
    lose: int,
    pattern: str,
    seed: int,
    speeds: Sequence[str],
    json_mode: bool,
) -> None:
    """Prints OP-Fence's plan, and the one after the loss of workers.

    Raises:
        UsageError: options that cannot be, or a job that does not fit.
    """
    setting = _setting(options, far, speeds)
    try:
        before = op_fence(setting.job, use_all=bool(far.use_all), schedules=setting.schedules)
        lost, left = _left_after(setting, before, lose, pattern, seed)
        after = op_fence(left, use_all=bool(far.use_all), schedules=setting.schedules) if lost else None
    except InfeasiblePlan as error:
        raise UsageError(f"{setting.title}: {error}") from error
    document: dict[str, Any] = {
        "setting": setting.title,
        "emulated": True,
        "costs": setting.job.costs[0].source,
        "network": setting.source,
        "lost": list(lost),
        "before": _entry(setting, setting.job, before),
    }
    if after is not None:
        document["after"] = _entry(setting, left, after)
    if json_mode:
        say(as_json(document))
        return
    width = terminal_width()
    lines = [*wrap(setting.title, width), ""]
    lines += _render(document["before"], "before", width)
    if after is not None:
        lines += ["", *wrap(f"lost: {' '.join(map(str, lost))}", width), ""]
        lines += _render(document["after"], "after", width)
    say(*lines)


FAR_PLANNERS_GROUP = "elaswave.far_planners"
"""Of entry points: each names a mapping of planners by name."""


@cache
def far_planners() -> Mapping[str, FarPlanner]:
    """Lists OP-Fence, and what other packages have registered."""
    return {"op_fence": op_fence, **registered(FAR_PLANNERS_GROUP)}


def compare_far_apart(
    options: ClusterOptions,
    far: FarOptions,
    *,
    names: Sequence[str],
    lose: int,
    pattern: str,
    seed: int,
    speeds: Sequence[str],
    json_mode: bool,
) -> None:
    """Prints what OP-Fence and its rivals make of the same job, before and after the same loss.

    Raises:
        UsageError: a planner that is not known, options that cannot be, or a job that does not fit.
    """
    planners = far_planners()
    if not names or len(set(names)) != len(names):
        raise UsageError(
            f"--policies {','.join(names)!r}: give each planner once, separated by commas, at least one of "
            f"{', '.join(planners)}"
        )
    unknown = [name for name in names if name not in planners]
    if unknown:
        raise UsageError(
            f"--policies: with --network there is no planner {unknown[0]!r}; choose of {', '.join(planners)}"
        )
    setting = _setting(options, far, speeds)
    try:
        reference = op_fence(setting.job, use_all=bool(far.use_all), schedules=setting.schedules)
    except InfeasiblePlan as error:
        raise UsageError(f"{setting.title}: {error}") from error
    lost, left = _left_after(setting, reference, lose, pattern, seed)
    entries = []
    for name in names:
        begin, end = (_planned(setting, job, name, far, reference) for job in (setting.job, left))
        entries.append({"policy": name, "before": begin, "after": end})
    document = {
        "setting": setting.title, "emulated": True, "network": setting.source, "lost": list(lost),
        "throughput_unit": TOKENS_PER_S, "policies": entries,
    }  # fmt: skip
    if json_mode:
        say(as_json(document))
        return
    width = terminal_width()
    rows = [_row(entry) for entry in entries]
    header = ["planner", "step", "queued", "tokens/s", "stages", "fences", "after the loss", "bound"]
    lines = [*wrap(setting.title, width), *wrap(f"lost: {' '.join(map(str, lost))}", width), ""]
    lines += render_table(header, rows, width)
    lines += wrap(
        "step: by the objective; queued: its programs run in virtual time, transfers one after another", width
    )
    say(*lines)


def _planned(setting: _Setting, job: FarJob, name: str, far: FarOptions, reference: FarPlan) -> dict[str, Any]:
    """Describes what a planner makes of a job, as JSON."""
    try:
        if name != "op_fence":
            plan = far_planners()[name](job, schedules=setting.schedules)
        elif job is setting.job:
            plan = reference
        else:
            plan = op_fence(job, use_all=bool(far.use_all), schedules=setting.schedules)
    except InfeasiblePlan as error:
        return {"feasible": False, "reason": f"no plan: {error}"}
    return {"feasible": True, **_entry(setting, job, plan)}


def _entry(setting: _Setting, job: FarJob, plan: FarPlan) -> dict[str, Any]:
    """Describes a plan as JSON."""
    network = job.cluster.network
    assert network is not None
    timing = time_plan(job, plan)
    ids, site = job.cluster.ids, job.site
    used = {device for stage in plan.stages for device in stage.devices}
    return {
        "planner": plan.planner,
        "step_time_s": plan.step_s,
        "throughput": job.num_microbatches * setting.tokens_per_microbatch / plan.step_s,
        "throughput_unit": TOKENS_PER_S,
        "schedule": plan.schedule,
        "run_s": plan.parts.run_s,
        "reduce_s": plan.parts.reduce_s,
        "vote_s": plan.parts.vote_s,
        "gather_s": plan.parts.gather_s,
        "bound": plan.parts.bound,
        "programs_s": timing.alone_s,
        "queued_s": timing.shared_s,
        "gap": timing.gap,
        "codec": plan.codec,
        "fences": list(plan.fences),
        "copies": job.copies,
        "survival": survival_of_plan(job, plan),
        "left_out": [int(ids[device]) for device in range(len(ids)) if device not in used],
        "stages": [
            {
                "start": stage.start,
                "stop": stage.stop,
                "sites": list(dict.fromkeys(network.sites[int(site[device])] for device in stage.devices)),
                "workers": [int(ids[device]) for device in stage.devices],
                "num_microbatches": list(counts),
                "in_flight": held,
            }
            for stage, counts, held in zip(plan.stages, plan.num_microbatches, plan.in_flight, strict=True)
        ],
    }


def _render(entry: dict[str, Any], title: str, width: int) -> list[str]:
    """Describes a plan for people."""
    lines = wrap(
        f"{title}: a step takes {format_seconds(entry['step_time_s'])}, {entry['throughput']:,.0f} {TOKENS_PER_S}, "
        f"schedule {entry['schedule']}; {entry['bound']}",
        width,
    )
    rows = [
        [
            str(number),
            " ".join(map(str, stage["workers"])),
            ", ".join(stage["sites"]),
            f"{stage['start']} to {stage['stop'] - 1}",
            " ".join(map(str, stage["num_microbatches"])),
        ]
        for number, stage in enumerate(entry["stages"])
    ]
    lines += render_table(["stage", "workers", "sites", "layers", "micro-batches"], rows, width)
    seconds = ", ".join(f"{name} {format_seconds(entry[f'{name}_s'])}" for name in ("run", "reduce", "vote", "gather"))
    lines += wrap(
        f"{seconds}; programs in virtual time: {format_seconds(entry['programs_s'])} where each transfer has its link, "
        f"{format_seconds(entry['queued_s'])} where they queue",
        width,
    )
    fences = " ".join(map(str, entry["fences"])) or "none"
    lines += wrap(f"fences before the layers: {fences}; codec {entry['codec']}; copies {entry['copies']}", width)
    if (survival := entry["survival"]) is not None:
        sites = {site for stage in entry["stages"] for site in stage["sites"]}
        only = f"; it does not survive the loss of {', '.join(sites)}, its only site" if len(sites) == 1 else ""
        lines += wrap(f"the job {survival.describe()}{only}", width)
    if entry["left_out"]:
        lines += wrap(f"left out, they cost more than they bring: {' '.join(map(str, entry['left_out']))}", width)
    return lines


def _row(entry: dict[str, Any]) -> list[str]:
    begin, end = entry["before"], entry["after"]
    later = format_seconds(end["step_time_s"]) if end["feasible"] else "-"
    if not begin["feasible"]:
        return [entry["policy"], *["-"] * 5, later, begin["reason"]]
    return [
        entry["policy"],
        format_seconds(begin["step_time_s"]),
        format_seconds(begin["queued_s"]),
        f"{begin['throughput']:,.0f}",
        str(len(begin["stages"])),
        str(len(begin["fences"])),
        later,
        begin["bound"],
    ]
