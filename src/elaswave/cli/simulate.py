"""``elaswave simulate``: days and weeks of a job under one policy, in virtual time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from elaswave.cli.cluster_options import (
    DEFAULT_DEVICE,
    DEFAULT_MODEL,
    DEFAULT_STAGES,
    DEFAULT_WORKERS,
    MICROBATCHES_PER_STAGE,
    NOT_NEGATIVE,
    POSITIVE,
    ClusterOptions,
    cluster_options,
    describe_machines,
    does_not_fit,
    policy_option,
)
from elaswave.cli.layout_table import as_json
from elaswave.cli.policy_plugins import find_policy
from elaswave.cli.tables import format_bytes, format_seconds, render_table, terminal_width
from elaswave.cli.waiting import Waiting
from elaswave.config.presets import device_preset, model_shape
from elaswave.costs.layers import Costs
from elaswave.costs.machines import Cluster
from elaswave.costs.recovery_times import RecoveryTimes
from elaswave.costs.schedules import Schedule
from elaswave.errors import DataError, InfeasiblePlan, UsageError
from elaswave.observability.wrapping import wrap
from elaswave.planning.baselines.common import rectangle
from elaswave.planning.fault_free import fastest_fault_free
from elaswave.planning.healthy import healthy_step_s
from elaswave.planning.policies import POLICIES
from elaswave.sim.cluster.failures import CHANGES_MAX, DAY_S, RATES, Rates, Scenario, draw, rates_named
from elaswave.sim.cluster.job import OutcomeSummary, PolicyOutcome, simulate, summarize
from elaswave.sim.cluster.traces_csv import read_trace

DEFAULT_DAYS = 7.0
DEFAULT_RATE = "llama3"


@dataclass(frozen=True, kw_only=True)
class Life:
    """A job and the scenarios that it has to live through."""

    title: str
    machines: Cluster
    costs: Costs
    scenarios: tuple[Scenario, ...]
    num_stages: int
    num_microbatches: int
    schedule: Schedule
    tokens_per_microbatch: int

    def tokens_per_s(self, outcome: PolicyOutcome) -> float:
        """Of the fault-free job."""
        return self.num_microbatches * self.tokens_per_microbatch / outcome.undisturbed_step_s


def scenario_options(command: Any) -> Any:
    """Adds the options that say what happens to the machines."""
    for option in reversed(
        (
            click.option(
                "--days", type=POSITIVE, metavar="F", help=f"Length of the scenario.  [default: {DEFAULT_DAYS:g}]"
            ),
            click.option(
                "--rate",
                metavar="NAME|NUMBER",
                help=f"Losses: public rates ({', '.join(RATES)}), or a number per worker and day.  "
                f"[default: {DEFAULT_RATE}]",
            ),
            click.option(
                "--repair-hours",
                type=POSITIVE,
                metavar="F",
                help="Mean time until what was lost is back.  [default: 4]",
            ),
            click.option(
                "--stragglers", type=NOT_NEGATIVE, metavar="F", help="Slow-downs per worker and day.  [default: 0]"
            ),
            click.option(
                "--trace",
                type=click.Path(path_type=Path),
                help="A CSV of machines that come and go, lines of milliseconds,add or remove,node, instead of rates.",
            ),
            click.option(
                "--workers-per-node",
                type=click.IntRange(min=1),
                help="Workers that come and go with a machine.  [default: the device's, with --trace 1]",
            ),
        )
    ):
        command = option(command)
    return command


@click.command(name="simulate", short_help="Days of a job whose machines fail, under one policy.")
@cluster_options
@scenario_options
@policy_option
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first scenario.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Scenarios: several give intervals."
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also draw it over time: .png or .svg.")
@click.option("--json", "json_mode", is_flag=True, help="Print one JSON document.")
def simulate_command(
    options: ClusterOptions, policy: str, seed: int, seeds: int, plot: Path | None, json_mode: bool, **scenario: Any
) -> None:
    """Simulate days of training while machines fail, come back and slow down: goodput, lost work, pauses, energy.

    Time is virtual: a week of 100,000 workers takes a minute or two. The default is a week of Llama-2 13B on 96
    Ascend 910B, 8 stages, at Llama 3's rate of interruptions. Equal seeds give equal scenarios, whatever the policy.

    \b
    elaswave simulate --workers 100000 --days 7 --rate llama3 --policy elaswave
    elaswave simulate --trace spot-p3-trace.csv --model llama-2-7b \\
      --device a100 --stages 4 --policy recycle
    """
    find_policy(policy)
    if plot is not None:
        from elaswave.cli.plots import check_plot_path, plot_timelines

        check_plot_path(plot)
    life = describe_life(options, seeds=range(seed, seed + seeds), **scenario)
    outcomes = live(life, policy)
    if plot is not None:
        plot_timelines(plot, f"{life.title}; {policy}", [outcomes[0]])
    if json_mode:
        click.echo(as_json(life_document(life, outcomes)))
    else:
        click.echo("\n".join(render_outcomes(life, outcomes, terminal_width())))


def describe_life(
    options: ClusterOptions,
    *,
    seeds: Sequence[int],
    days: float | None,
    rate: str | None,
    repair_hours: float | None,
    stragglers: float | None,
    trace: Path | None,
    workers_per_node: int | None,
) -> Life:
    """The job and its scenarios that options describe.

    Raises:
        UsageError: options that contradict each other, or figures that cannot be.
        DataError: a trace that is damaged; names the line.
    """
    shape = model_shape(options.model or DEFAULT_MODEL)
    num_stages = options.stages or DEFAULT_STAGES
    if trace is not None:
        drawn = {"--days": days, "--rate": rate, "--repair-hours": repair_hours, "--stragglers": stragglers,
                 "--workers": options.workers}  # fmt: skip
        if given := [name for name, value in drawn.items() if value is not None]:
            raise UsageError(f"--trace says what happens, when and to how many; leave out {', '.join(given)}")
        if len(seeds) > 1:
            raise UsageError(f"--trace is one scenario, in which nothing is drawn; leave out --seeds {len(seeds)}")
        scenarios: tuple[Scenario, ...] = (_read_trace(trace, workers_per_node or 1),)
        num_workers = scenarios[0].num_workers_max
    else:
        num_workers = options.workers or DEFAULT_WORKERS
        days = DEFAULT_DAYS if days is None else days
        per_node = device_preset(options.device or DEFAULT_DEVICE).devices_per_node
        rates = _rates(rate or DEFAULT_RATE, repair_hours, stragglers)
        expected = rates.expected_changes(num_workers, days * DAY_S) * len(seeds)
        if expected > CHANGES_MAX:
            raise UsageError(
                f"{expected:.3g} losses, repairs and slow-downs are expected, and {CHANGES_MAX:,} are the most that "
                "are simulated: give fewer --days, --workers or --seeds, or a lower --rate or --stragglers"
            )
        waiting = Waiting(f"drawing {days:g} days of failures")
        try:
            scenarios = tuple(
                draw(
                    rates,
                    num_workers=num_workers,
                    duration_s=days * DAY_S,
                    seed=seed,
                    workers_per_node=workers_per_node or max(1, per_node // (options.tensor_parallel or 1)),
                    progress=lambda done, before=index: waiting.at((before + done) / len(seeds)),  # type: ignore[misc]
                )
                for index, seed in enumerate(seeds)
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        finally:
            waiting.close()
    num_replicas = num_workers // num_stages
    if not num_replicas:
        raise UsageError(f"{num_workers} workers are too few for {num_stages} stages; give fewer --stages")
    per_replica = options.microbatches or MICROBATCHES_PER_STAGE * num_stages
    machines, costs = describe_machines(options, num_workers=num_workers)
    num_microbatches = per_replica * num_replicas
    schedule = options.schedule
    if schedule is None:
        try:
            schedule = fastest_fault_free(machines, costs, num_stages, num_replicas, num_microbatches).schedule
        except InfeasiblePlan as error:
            raise does_not_fit(error) from error
    microbatch_size = options.microbatch_size or 1
    return Life(
        title=f"{shape.name} on {num_workers} x {machines.devices[0].name}, {num_stages} stages, "
        f"{num_microbatches} micro-batches of {microbatch_size} x {shape.context_length} tokens, "
        f"{scenarios[0].duration_s / DAY_S:.3g} days, {scenarios[0].source}",
        machines=machines,
        costs=costs,
        scenarios=scenarios,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        schedule=schedule,
        tokens_per_microbatch=microbatch_size * shape.context_length,
    )


def _rates(rate: str, repair_hours: float | None, stragglers: float | None) -> Rates:
    try:
        number = float(rate)
    except ValueError:
        rates = rates_named(rate)
    else:
        if not 0 <= number < float("inf"):
            raise UsageError(f"--rate {rate}: losses per worker and day are a number of at least 0, or a name: "
                             f"{', '.join(RATES)}")  # fmt: skip
        rates = _checked(Rates, name=f"{rate} losses per worker and day", losses_per_worker_day=number)
    changes: dict[str, Any] = {}
    if repair_hours is not None:
        changes["repair_s"] = repair_hours * 3600
    if stragglers is not None:
        changes["stragglers_per_worker_day"] = stragglers
    return _checked(msgspec.structs.replace, rates, **changes)


def _checked(make: Any, *args: Any, **values: Any) -> Rates:
    try:
        rates: Rates = make(*args, **values)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return rates


def _read_trace(path: Path, workers_per_node: int) -> Scenario:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        needed = "needed are lines of milliseconds,add or remove,node"
        raise DataError(f"the trace {path} is no text: {error}; {needed}") from error
    return read_trace(lines, name=str(path), workers_per_node=workers_per_node)


def live(life: Life, policy: str) -> list[PolicyOutcome]:
    """What a policy makes of every scenario.

    Raises:
        UsageError: the model does not fit on these machines at all.
    """
    outcomes = []
    own = find_policy(policy) if policy not in POLICIES else None
    waiting = Waiting("living through them")
    try:
        healthy_s = healthy_s_of(life)
    except InfeasiblePlan as error:
        raise does_not_fit(error) from error
    for index, scenario in enumerate(life.scenarios):
        pauses = RecoveryTimes()
        if 0 < scenario.mtbf_s < float("inf"):
            pauses = pauses.for_mtbf(scenario.mtbf_s)
        try:
            outcomes.append(
                simulate(
                    scenario,
                    life.machines,
                    life.costs,
                    policy,
                    num_stages=life.num_stages,
                    num_microbatches=life.num_microbatches,
                    schedule=life.schedule,
                    pauses=pauses,
                    planner=own,
                    healthy_step_s=healthy_s,
                    progress=lambda done, before=index: waiting.at(  # type: ignore[misc]
                        (before + done) / len(life.scenarios)
                    ),
                )
            )
        except InfeasiblePlan as error:
            raise does_not_fit(error) from error
        finally:
            waiting.close()
    return outcomes


def healthy_s_of(life: Life) -> float:
    """Seconds of the shortest fault-free step of all machines that any policy is known to make: one for all policies.

    Raises:
        InfeasiblePlan: too few machines for the job's pipelines.
    """
    configured = rectangle(
        life.machines,
        life.costs,
        num_stages=life.num_stages,
        num_microbatches=life.num_microbatches,
        schedule=life.schedule,
    )
    return healthy_step_s(life.machines, life.costs, configured, POLICIES)


def life_document(life: Life, outcomes: Sequence[PolicyOutcome]) -> dict[str, Any]:
    """One policy's outcomes as JSON: means and intervals, and every scenario."""
    summary = summarize(outcomes)
    undisturbed = life.tokens_per_s(outcomes[0])
    return {
        "setting": life.title,
        "costs": life.costs.source,
        "policy": summary.policy,
        "undisturbed_tokens_per_s": undisturbed,
        "undisturbed_step_s": outcomes[0].undisturbed_step_s,
        "tokens_per_s": summary.goodput.mean * undisturbed,
        "summary": msgspec.to_builtins(summary),
        "scenarios": [msgspec.to_builtins(outcome) for outcome in outcomes],
    }


def render_outcomes(life: Life, outcomes: Sequence[PolicyOutcome], width: int) -> list[str]:
    """What ``elaswave simulate`` prints."""
    summary = summarize(outcomes)
    duration_s = outcomes[0].duration_s
    undisturbed = life.tokens_per_s(outcomes[0])
    lines = wrap(life.title, width)
    events = ", ".join(f"{number:,} {kind}" for kind, number in outcomes[0].num_events.items()) or "none"
    several = f" (the first of {len(outcomes)} scenarios)" if len(outcomes) > 1 else ""
    lines += wrap(f"events{several}: {events}", width)
    lines += [
        "",
        *wrap(
            f"{summary.policy}: goodput {_percent(summary, 'goodput')} of the fault-free job's "
            f"{undisturbed:,.0f} tokens/s, {_percent(summary, 'of_capacity')} of the workers that were there "
            f"({_percent(summary, 'availability')})",
            width,
        ),
        "",
    ]
    rows = [["useful", _part(summary.goodput.mean * duration_s, duration_s)]]
    rows += [[f"pause: {cause}", _part(interval.mean, duration_s)] for cause, interval in summary.pauses_s.items()]
    for name, seconds in (
        ("lost work", summary.lost_work_s.mean),
        ("waiting for workers", summary.waiting_s.mean),
        ("slower than undisturbed", summary.slower_s.mean),
    ):
        rows.append([name, _part(seconds, duration_s)])
    lines += render_table(["where the time went", "share of it"], rows, width)
    lines += ["", *wrap(f"state moved {format_bytes(round(summary.migrated_bytes.mean))}, energy "
                        f"{summary.energy_j.mean / 3.6e9:,.2f} MWh", width)]  # fmt: skip
    return lines


def _percent(summary: OutcomeSummary, name: str) -> str:
    interval = getattr(summary, name)
    text = f"{interval.mean:.2%}"
    return text if summary.num_seeds == 1 else f"{text} +- {interval.half_width:.2%}"


def _part(seconds: float, whole_s: float) -> str:
    return f"{seconds / whole_s:.3%} ({'-' if seconds < 0 else ''}{_duration(abs(seconds))})" if whole_s else "-"


def _duration(seconds: float) -> str:
    for unit_s, unit in ((2 * DAY_S, "days"), (2 * 3600.0, "h"), (600.0, "min")):
        if seconds >= unit_s:
            return f"{seconds / {'days': DAY_S, 'h': 3600.0, 'min': 60.0}[unit]:.1f} {unit}"
    return format_seconds(seconds)
