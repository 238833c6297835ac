"""``elaswave plan``: what the planner would make of a loss, in a run or on a described cluster."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from elaswave.cli.tables import format_bytes, format_seconds, terminal_width
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
    policy_option,
)
from elaswave.cli.whatif.far_apart import FarOptions, check_far, far_options, plan_far_apart
from elaswave.cli.whatif.layout_table import as_json, render_stages, stage_rows
from elaswave.config.values import SAMPLES_PER_S, TOKENS_PER_S
from elaswave.errors import UsageError
from elaswave.observability.output import say, wrap
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.schedules import SCHEDULES
from elaswave.planning.plan import Plan, Planner
from elaswave.planning.survival import SurvivalShares

if TYPE_CHECKING:
    from elaswave.planning.costs.step_time.contended import SimulatedStep

MAX_TRACED_ACTIONS = 200_000
"""Of a step: what a viewer still shows."""


@click.command(name="plan", short_help="What the planner makes of a loss.")
@click.argument("run", required=False, type=click.Path(path_type=Path))
@cluster_options
@far_options
@loss_options
@policy_option
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write one simulated step of the planned layout, for https://ui.perfetto.dev.",
)
@click.option("--json", "json_mode", is_flag=True, help="Print one JSON document.")
def plan_command(
    run: Path | None,
    options: ClusterOptions,
    far: FarOptions,
    lose: int,
    pattern: str,
    seed: int,
    speeds: tuple[str, ...],
    nodes_per_rack: int | None,
    policy: str,
    trace: Path | None,
    json_mode: bool,
) -> None:
    """Plan for the loss of workers: the layout before and after, what bounds it, what it brings, and why.

    With RUN, the folder of a run that is going on or has ended, its layout, measured costs and measured speeds are
    used, and no options that describe a cluster; planners do what they may do in that run. Without, a cluster is
    described; the default is Llama-2 13B on 96 Ascend 910B, as 8 stages x 12 replicas. With --network, OP-Fence plans
    for sites that are far apart, GPT-2 by default.

    \b
    elaswave plan --lose 3
    elaswave plan --workers 12 --stages 3 --model llama-2-7b --device h100 \\
      --lose 5 --pattern clustered
    elaswave plan runs/20261120T125701Z-ab12 --lose 1
    elaswave plan --network examples/far_apart/four_regions.toml --codec int8
    """
    from elaswave.config.policy_code import find_policy

    check_far(far)
    check_racks_are_of_machines(nodes_per_rack, far.network and "--network", "sites")
    check_racks_are_of_machines(nodes_per_rack, run and "RUN", "hosts whose labels name racks")
    if far.network is not None:
        if run is not None or trace is not None or policy != "elaswave":
            raise UsageError("--network goes with neither RUN, --trace nor --policy: OP-Fence plans; leave them out")
        plan_far_apart(options, far, lose=lose, pattern=pattern, seed=seed, speeds=speeds, json_mode=json_mode)
        return
    planner = find_policy(policy)
    notes: dict[str, Any] = {}
    if run is None:
        check_some_are_left(lose, options.workers or DEFAULT_WORKERS)
        setting = describe_setting(options, speeds=speeds, nodes_per_rack=nodes_per_rack)
    else:
        if options.given:
            raise UsageError(f"{', '.join(options.given)} describe a cluster, but RUN names a run; give one of the two")
        if speeds:
            raise UsageError("--speed is of a described cluster, but RUN names a run, whose speeds are measured")
        setting, notes, policies = _setting_of_run(run)
        planner = find_policy(policy, policies)
    lost = choose_lost(setting.allocation, lose, pattern, seed)
    if lost:
        left = setting.cluster.without(lost)
        plan = planner(left, setting.costs, setting.allocation, ClusterEvent(kind="lost", workers=lost))
    else:
        left, plan = setting.cluster, None
    result = _Result(
        setting, setting.survival(planner, setting.allocation), setting.copies_of(planner), lost, left, plan
    )
    step = None if trace is None else _traced(trace, setting, left, plan)
    if json_mode:
        simulated = {} if step is None else {"simulated_step": step.to_json()}
        say(as_json(result.to_json() | notes | simulated))
        return
    lines = result.render(terminal_width(), notes)
    if step is not None:
        bubbles = " ".join(f"{share:.0%}" for share in step.timeline.stage_bubble_fractions)
        text = f"trace: {trace}; a step takes {format_seconds(step.step_s)} where transfers share links"
        lines += wrap(f"{text}; bubbles by stage: {bubbles}", terminal_width())
    say(*lines)


def _traced(path: Path, setting: PlannedJob, left: Cluster, plan: Plan | None) -> "SimulatedStep":
    """Simulates one step of what was planned, or of the job as it is, and writes its trace."""
    from elaswave.observability.trace import write_step_trace
    from elaswave.planning.plan import num_actions
    from elaswave.planning.programs.prediction import simulate_allocation

    allocation = setting.allocation if plan is None else plan.allocation
    if (number := num_actions(allocation)) > MAX_TRACED_ACTIONS:
        raise UsageError(
            f"--trace: a step has {number:,} actions, at most {MAX_TRACED_ACTIONS:,} can be looked at; give fewer "
            "--workers or --microbatches"
        )
    step = simulate_allocation(left, setting.costs, allocation, followers=setting.followers)
    write_step_trace(path, step)
    return step


def _setting_of_run(run: Path) -> tuple[PlannedJob, dict[str, Any], Mapping[str, Planner]]:
    """Reads a run as it is, what is known about the prediction of its steps, and the policies as it asks them."""
    from elaswave.config.policy_code import other_policies
    from elaswave.coordinator.planning.replanning import planners_of
    from elaswave.observability.run_costs import read_run_costs
    from elaswave.planning.programs.routes import allocation_of
    from elaswave.planning.state_moves.placed_blocks import Placing

    costs = read_run_costs(run)
    allocation = allocation_of(costs.layout, costs.schedule, costs.levels)
    size = costs.config.batch.microbatch_size
    planners = planners_of(costs.config, other_policies())
    setting = PlannedJob(
        title=f"{run}: layout {costs.layout.describe()}, {costs.layout.num_microbatches} micro-batches of "
        + (f"{size} samples" if costs.counts_samples else f"{size} x {costs.config.model.context_length} tokens"),
        cluster=costs.cluster,
        costs=costs.costs,
        allocation=allocation,
        tokens_per_microbatch=costs.tokens_per_microbatch,
        unit=SAMPLES_PER_S if costs.counts_samples else TOKENS_PER_S,
        followers=costs.config.elastic.planned_followers,
        placing=Placing(followers=costs.config.elastic.num_followers, copies_memory=costs.config.elastic.copies_memory),
        planners=planners,
        # What a backward costs in two halves is not known of a real device before it has run any.
        schedules=SCHEDULES if costs.config.device.kind == "emulated" else (costs.schedule,),
    )
    notes = {
        "run": str(run),
        "num_reports": costs.num_reports,
        "num_steps": len(costs.step_s),
        "predicted_step_s": costs.predicted_step_s,
        "prediction_error": costs.prediction_error,
        "speeds": dict(zip(map(str, costs.cluster.ids.tolist()), costs.cluster.speed.tolist())),
    }
    return setting, notes, planners


class _Result:
    """A plan beside what was before it."""

    def __init__(
        self,
        setting: PlannedJob,
        survival: SurvivalShares,
        copies: str | None,
        lost: tuple[int, ...],
        left: Cluster,
        plan: Plan | None,
    ) -> None:
        self._setting = setting
        self._copies = copies
        self._lost = lost
        self._left = left
        self._plan = plan
        self._survival = survival
        self._before = stage_rows(setting.cluster, setting.costs, setting.allocation, followers=setting.followers)
        self._after = (
            [] if plan is None else stage_rows(left, setting.costs, plan.allocation, followers=setting.followers)
        )
        self._before_rate = setting.tokens_per_s(setting.allocation.num_microbatches, setting.step_s)
        self._after_rate = self._capacity_left = 0.0
        if plan is not None:
            self._after_rate = setting.tokens_per_s(plan.allocation.num_microbatches, plan.predicted_step_s)
            self._capacity_left = setting.capacity_left(left)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "setting": self._setting.title,
            "costs": self._setting.costs.source,
            "lost": list(self._lost),
            "before": {
                "step_time_s": self._setting.step_s,
                "throughput": self._before_rate,
                "throughput_unit": self._setting.unit,
                "stages": msgspec.to_builtins(self._before),
                "survives": self._survival.describe(),
                "survival": msgspec.to_builtins(self._survival),
                "copies": self._copies,
            },
        }
        if self._plan is None:
            return document
        return document | {
            "workers_left": self._left.num_workers,
            "after": {
                "policy": self._plan.policy,
                "step_time_s": self._plan.predicted_step_s,
                "throughput": self._after_rate,
                "throughput_fraction": self._after_rate / self._before_rate,
                "capacity_fraction": self._after_rate / self._capacity_left,
                "pause_s": self._plan.predicted_pause_s,
                "moved_bytes": sum(transfer.num_bytes for transfer in self._plan.transfers),
                "copy_s": self._plan.copy_s,
                "interim_step_time_s": self._plan.interim_step_s,
                "stages": msgspec.to_builtins(self._after),
                "contributions": dict(self._plan.contributions),
                "reason": self._plan.reason,
            },
            "plan": self._plan.to_json(),
        }

    def render(self, width: int, notes: dict[str, Any]) -> list[str]:
        lines = wrap(self._setting.title, width)
        if notes:
            lines += wrap(_about_measurements(notes), width)
        step = format_seconds(self._setting.step_s)
        lines += ["", *wrap(f"before: a step takes {step}, {self._before_rate:,.0f} {self._setting.unit}", width)]
        lines += render_stages(self._before, width)
        lines += wrap(f"at one instant, without going back to a checkpoint, it {self._survival.describe()}", width)
        if self._copies is not None:
            lines += wrap(f"copies: {self._copies}", width)
        if self._plan is None:
            return [*lines, "", "no worker is lost; --lose N asks for a plan"]
        plan, fraction = self._plan, self._after_rate / self._before_rate
        lines += ["", *wrap(f"lost: {' '.join(map(str, self._lost))}", width), ""]
        lines += wrap(
            f"after: a step takes {format_seconds(plan.predicted_step_s)}, {self._after_rate:,.0f} "
            f"{self._setting.unit}, schedule {plan.allocation.schedule}",
            width,
        )
        lines += [*render_stages(self._after, width), ""]
        lines += wrap(
            f"throughput is {fraction:.1%} of before with {self._left.num_workers} of "
            f"{self._setting.cluster.num_workers} workers: {self._after_rate / self._capacity_left:.1%} of the "
            "capacity left",
            width,
        )
        moved = sum(transfer.num_bytes for transfer in plan.transfers)
        lines += wrap(
            f"pause {format_seconds(plan.predicted_pause_s)}, work done again {format_seconds(plan.lost_work_s)}, "
            f"state moved {format_bytes(round(moved))}",
            width,
        )
        if plan.interim_step_s is not None:
            lines += wrap(
                f"the state is copied in the background for {format_seconds(plan.copy_s)}; until then a step takes "
                f"{format_seconds(plan.interim_step_s)}",
                width,
            )
        for axis, what in plan.contributions.items():
            lines += wrap(f"{axis}: {what}", width)
        return [*lines, *wrap(f"reason: {plan.reason}", width)]


def _about_measurements(notes: dict[str, Any]) -> str:
    text = f"costs measured, of {notes['num_reports']} reports"
    if not notes["num_reports"]:
        text = "costs as described, scaled to the steps: the run was too short for timings"
    if notes["prediction_error"] is None:
        return text
    error = notes["prediction_error"]
    return (
        f"{text}; a step is predicted to take {format_seconds(notes['predicted_step_s'])}, {abs(error):.1%} "
        f"{'less' if error > 0 else 'more'} than the median of {notes['num_steps']} steps that were run"
    )
