"""``elaswave compare``: what every policy would make of the same loss on the same cluster."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from elaswave.cli.tables import format_bytes, format_seconds, render_table, terminal_width
from elaswave.cli.whatif.cluster_options import (
    DEFAULT_WORKERS,
    ClusterOptions,
    PlannedJob,
    check_racks_are_of_machines,
    check_some_are_left,
    choose_lost,
    cluster_options,
    describe_setting,
    loss_options,
)
from elaswave.cli.whatif.far_apart import FarOptions, check_far, compare_far_apart, far_options, far_planners
from elaswave.cli.whatif.layout_table import as_json
from elaswave.config.policy_code import find_policy
from elaswave.config.policy_code import policies as known_policies
from elaswave.errors import InfeasiblePlan, UsageError
from elaswave.observability.output import say, wrap
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.plan import Allocation, Plan, Planner
from elaswave.planning.policy.fault_free_policies import FaultFreeStart

DEFAULT_POLICIES = ",".join(known_policies())


@click.command(name="compare", short_help="What every policy makes of the same loss.")
@cluster_options
@far_options
@loss_options
@click.option(
    "--policies",
    metavar="NAME,NAME",
    default=DEFAULT_POLICIES,
    help=f"Separated by commas, of {', '.join(known_policies())}.  [default: all]",
)
@click.option(
    "--policy",
    "added",
    multiple=True,
    metavar="CODE",
    help="A policy of your own beside them: module:function, or file.py:function; may be given several times.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also draw throughputs: .png or .svg.")
@click.option("--json", "json_mode", is_flag=True, help="Print one JSON document.")
def compare_command(
    options: ClusterOptions,
    far: FarOptions,
    lose: int,
    pattern: str,
    seed: int,
    speeds: tuple[str, ...],
    nodes_per_rack: int | None,
    policies: str,
    added: tuple[str, ...],
    plot: Path | None,
    json_mode: bool,
) -> None:
    """Compare policies: throughput, pause and state moved after the same loss on the same cluster.

    The default is Llama-2 13B on 96 Ascend 910B, as 8 stages x 12 replicas. Every policy's layout is timed by the same
    simulated execution, twice: all from the same start, stages of equal width, and each from the layout that it would
    have chosen without a failure. recycle and oobleck are as published; this engine can run recycle_normalized and
    recycle_rerouting, parts of recycle, and oobleck_aligned. torchft_batch_kept keeps the batch that torchft shrinks;
    full_restart_spares has a host of spares from the beginning. With --network the policies are planners for sites far
    apart: op_fence, equal_number, equal_compute, dtfm_genetic.

    \b
    elaswave compare --lose 3
    elaswave compare --workers 96 --stages 8 --model llama-2-7b --device a100 \\
      --lose 5 --pattern clustered
    elaswave compare --policies elaswave,torchft_batch_kept --lose 5 \\
      --plot throughput.svg
    elaswave compare --policy examples/policies/my_policy.py:plan --lose 3
    elaswave compare --network examples/far_apart/four_regions.toml --codec int4
    """
    check_far(far)
    check_racks_are_of_machines(nodes_per_rack, far.network and "--network", "sites")
    if far.network is not None:
        if added or plot is not None:
            raise UsageError("--network goes with neither --policy nor --plot; leave them out")
        chosen = list(far_planners()) if policies == DEFAULT_POLICIES else policies.split(",")
        compare_far_apart(
            options,
            far,
            names=[name.strip() for name in chosen if name.strip()],
            lose=lose,
            pattern=pattern,
            seed=seed,
            speeds=speeds,
            json_mode=json_mode,
        )
        return
    names = [*(name.strip() for name in policies.split(",") if name.strip()), *added]
    if not names or len(set(names)) != len(names):
        raise UsageError(f"--policies {policies!r}: give each policy once, separated by commas, at least one")
    planners = {name: find_policy(name) for name in names}
    if lose < 1:
        raise UsageError("--lose 0: nothing happens then; give at least 1")
    if plot is not None:
        from elaswave.cli.whatif.plots import check_plot_path, plot_policies

        check_plot_path(plot)
    check_some_are_left(lose, options.workers or DEFAULT_WORKERS)
    # One healthy time for all, whoever is asked for.
    setting = replace(
        describe_setting(options, speeds=speeds, nodes_per_rack=nodes_per_rack),
        planners={**known_policies(), **planners},
    )
    lost = choose_lost(setting.allocation, lose, pattern, seed)
    left = setting.cluster.without(lost)
    event = ClusterEvent(kind="lost", workers=lost)
    same = FaultFreeStart(allocation=setting.allocation, step_s=setting.step_s)
    entries = _entries(planners, setting, dict.fromkeys(planners, same), left, event)
    own = _entries(planners, setting, setting.own_starts, left, event)
    title = f"{setting.title}; lost: {len(lost)}, {pattern}"
    if plot is not None:
        reference = setting.capacity_left(left)
        plot_policies(plot, title, entries, "tokens/s", reference)
    if json_mode:
        say(as_json(_document(setting, lost, entries, own)))
    else:
        say(*_render(setting, title, lost, entries, own, terminal_width()))


def _entries(
    planners: Mapping[str, Planner],
    setting: PlannedJob,
    starts: Mapping[str, FaultFreeStart],
    left: Cluster,
    event: ClusterEvent,
) -> list[dict[str, Any]]:
    """Describes what every policy does from its start, as JSON."""
    entries = [_entry(name, planner, setting, starts[name], left, event) for name, planner in planners.items()]
    ours = next((entry["throughput"] for entry in entries if entry["policy"] == "elaswave"), 0.0)
    for entry in entries:
        entry["elaswave_times"] = ours / entry["throughput"] if ours and entry["throughput"] else None
    return entries


def _entry(
    name: str, planner: Planner, setting: PlannedJob, start: FaultFreeStart, left: Cluster, event: ClusterEvent
) -> dict[str, Any]:
    """Describes what a policy does, as JSON."""
    survival = setting.survival(planner, start.allocation)
    begin = {
        "survives": survival.describe(),
        "survival": msgspec.to_builtins(survival),
        "step_time_s": start.step_s,
        "layout": _shape_of(start.allocation),
        "schedule": start.allocation.schedule,
    }
    try:
        plan = planner(left, setting.costs, start.allocation, event)
    except InfeasiblePlan as error:
        return {"policy": name, "throughput": 0.0, "capacity_fraction": 0.0, "step_time_s": None, "pause_s": None,
                "reason": f"no plan: {error}", "feasible": False, "start": begin}  # fmt: skip
    throughput = setting.tokens_per_s(plan.allocation.num_microbatches, plan.predicted_step_s)
    before = setting.tokens_per_s(start.allocation.num_microbatches, start.step_s)
    return {
        "policy": name,
        "throughput": throughput,
        "capacity_fraction": throughput / setting.capacity_left(left),
        "step_time_s": plan.predicted_step_s,
        "pause_s": plan.predicted_pause_s,
        "reason": plan.reason,
        "feasible": True,
        "throughput_fraction": throughput / before,
        "num_microbatches": plan.allocation.num_microbatches,
        "keeps_batch": plan.allocation.num_microbatches == setting.allocation.num_microbatches,
        "num_workers": len(plan.allocation.workers),
        "schedule": plan.allocation.schedule,
        "lost_work_s": plan.lost_work_s,
        "moved_bytes": _moved_bytes(plan),
        "copy_s": plan.copy_s,
        "interim_step_time_s": plan.interim_step_s,
        "power_w": plan.power_w,
        "energy_per_token_j": plan.power_w / throughput,
        "contributions": dict(plan.contributions),
        "start": begin,
    }


def _shape_of(allocation: Allocation) -> str:
    """Stages x workers of each, or the workers of each stage where they differ, chain by chain."""
    shapes: dict[str, int] = {}
    for chain in allocation.chains:
        widths = [stage.width for stage in chain.stages]
        equal = f"{len(widths)} x {widths[0]}"
        shape = equal if len(set(widths)) == 1 else "+".join(map(str, widths))
        shapes[shape] = shapes.get(shape, 0) + 1
    return ", ".join(shape if number == 1 else f"{number} of {shape}" for shape, number in shapes.items())


def _moved_bytes(plan: Plan) -> float:
    return sum(transfer.num_bytes for transfer in plan.transfers)


def _document(
    setting: PlannedJob, lost: tuple[int, ...], entries: list[dict[str, Any]], own: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "setting": setting.title,
        "costs": setting.costs.source,
        "lost": list(lost),
        "undisturbed": {
            "throughput": setting.tokens_per_s(setting.allocation.num_microbatches, setting.step_s),
            "step_time_s": setting.step_s,
            "num_microbatches": setting.allocation.num_microbatches,
            "num_workers": setting.cluster.num_workers,
            "schedule": setting.allocation.schedule,
        },
        "throughput_unit": "tokens/s",
        "healthy_step_time_s": setting.fault_free_step_s,
        "policies": entries,
        "own_starts": own,
    }


def _render(
    setting: PlannedJob,
    title: str,
    lost: tuple[int, ...],
    entries: list[dict[str, Any]],
    own: list[dict[str, Any]],
    width: int,
) -> list[str]:
    before = setting.tokens_per_s(setting.allocation.num_microbatches, setting.step_s)
    undisturbed = ["undisturbed", format_seconds(setting.step_s), f"{before:,.0f}", "-", "-", "-", "-", "yes"]
    header = ["policy", "step", "tokens/s", "elaswave's", "of capacity", "pause", "moved", "batch kept"]
    rows = [_row(entry, setting) for entry in entries]
    own_rows = [
        [row[0], format_seconds(entry["start"]["step_time_s"]), *row[1:-2], entry["start"]["layout"]]
        for entry in own
        for row in [_row(entry, setting)]
    ]
    fault_free = format_seconds(setting.fault_free_step_s)
    lines = [*wrap(title, width), *wrap(f"lost: {' '.join(map(str, lost))}", width), ""]
    lines += ["from the same start, stages of equal width:", *render_table(header, [undisturbed, *rows], width), ""]
    lines += ["each from its own fault-free layout:"]
    lines += [*render_table(["policy", "fault-free", *header[1:-2], "stages before"], own_rows, width), ""]
    lines += wrap(
        f"elaswave's: its throughput over the policy's. of capacity: of the shortest fault-free step that any policy "
        f"makes of all workers ({fault_free}), times the speed that is left",
        width,
    )
    for entry in entries:
        lines += wrap(f"{entry['policy']}: {entry['reason']}", width)
    lines += ["", *wrap("of losses at one instant before that, from the same start, without going back:", width)]
    for entry in entries:
        lines += wrap(f"{entry['policy']} {entry['start']['survives']}", width)
    return lines


def _row(entry: dict[str, Any], setting: PlannedJob) -> list[str]:
    """Describes an entry for people."""
    if not entry["feasible"]:
        return [entry["policy"], *["-"] * 7]
    times = entry["elaswave_times"]
    whole_batch = setting.allocation.num_microbatches
    return [
        entry["policy"],
        format_seconds(entry["step_time_s"]),
        f"{entry['throughput']:,.0f}",
        "-" if times is None else f"{times:.2f}",
        f"{entry['capacity_fraction']:.1%}",
        format_seconds(entry["pause_s"]),
        format_bytes(round(entry["moved_bytes"])),
        "yes" if entry["keeps_batch"] else f"{entry['num_microbatches']} of {whole_batch}",
    ]
