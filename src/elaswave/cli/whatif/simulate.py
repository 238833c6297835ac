"""``elaswave simulate``: days and weeks of a job whose machines fail, in virtual time, under every policy."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from elaswave.cli.tables import Waiting, terminal_width
from elaswave.cli.whatif.cluster_options import (
    DEFAULT_DEVICE,
    DEFAULT_MODEL,
    DEFAULT_STAGES,
    DEFAULT_WORKERS,
    MICROBATCHES_PER_STAGE,
    ClusterOptions,
    cluster_options,
    describe_copies,
    describe_machines,
    does_not_fit,
)
from elaswave.cli.whatif.layout_table import as_json
from elaswave.cli.whatif.outcome_table import Results, document_of, render_policies, render_policy
from elaswave.cli.whatif.scenario_options import (
    RedundancyOptions,
    ScenarioOptions,
    read_scenarios,
    redundancy_options,
    scenario_options,
)
from elaswave.config.policy_code import find_policy, is_code, other_policies
from elaswave.config.policy_code import policies as known_policies
from elaswave.config.presets import device_preset, model_shape
from elaswave.errors import InfeasiblePlan, UsageError
from elaswave.observability.output import say
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.costs.schedules import Schedule
from elaswave.planning.plan import Allocation, Planner
from elaswave.planning.policy.fault_free_policies import fastest_fault_free, fault_free_step_s
from elaswave.planning.policy.policies import make_policies
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.planning.state_moves.placed_blocks import Placing
from elaswave.planning.survival import survival_shares_of
from elaswave.sim.cluster.failures import DAY_S, Scenario, racks_of
from elaswave.sim.cluster.job import simulate
from elaswave.sim.cluster.outcome import PolicyOutcome

PLANS_MAX = 100_000
"""Most plans that one command may ask policies for together: each takes some milliseconds to a second."""


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

    @property
    def tokens_per_step(self) -> int:
        """Of the fault-free job."""
        return self.num_microbatches * self.tokens_per_microbatch


@click.command(name="simulate", short_help="Days of a job whose machines fail, under every policy.")
@cluster_options
@scenario_options
@redundancy_options
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME|CODE",
    help=f"Who plans: {', '.join(known_policies())}; or your own: module:function, file.py:function. May be "
    "given several times; one alone is told in detail.  [default: all of them]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first scenario.")
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Scenarios: several give intervals."
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Also draw it over time: .png or .svg.")
@click.option("--json", "json_mode", is_flag=True, help="Print one JSON document.")
def simulate_command(
    options: ClusterOptions, policies: tuple[str, ...], seed: int, seeds: int, plot: Path | None, json_mode: bool,
    redundancy: RedundancyOptions, **scenario: Any,
) -> None:  # fmt: skip
    """Simulate days of training while machines fail, come back and slow down: goodput, lost work, pauses, energy.

    Time is virtual: a week of 100,000 workers takes a minute or two for each policy. The default is a week of Llama-2
    13B on 96 Ascend 910B, 8 stages, at Llama 3's rate of interruptions. All policies meet the same scenarios; equal
    seeds give equal ones.

    \b
    elaswave simulate --workers 100000 --days 7 --rate llama3 --policy elaswave
    elaswave simulate --rate 0.01 --weibull-shape 0.7 \\
      --nodes-per-rack 4 --rack-losses 0.002
    elaswave simulate --trace gcloud.txt --model llama-2-7b \\
      --device a100 --stages 4 --followers 2
    """
    names = policies or tuple(known_policies())
    if len(set(names)) != len(names):
        raise UsageError(f"--policy {' --policy '.join(names)}: give each policy once")
    for name in names:
        find_policy(name)
    if plot is not None:
        from elaswave.cli.whatif.plots import check_plot_path, plot_timelines

        check_plot_path(plot)
    life = describe_life(options, ScenarioOptions(**scenario), seeds=range(seed, seed + seeds))
    _check_effort(life, len(names))
    outcomes = simulate_policies(life, names, redundancy)
    if plot is not None:
        title = life.title if len(names) > 1 else f"{life.title}; {names[0]}"
        plot_timelines(plot, title, [of_policy[0] for of_policy in outcomes])
    results = Results(
        title=life.title,
        costs=life.costs.source,
        tokens_per_step=life.tokens_per_step,
        outcomes=outcomes,
        copies=_copies(life, redundancy.placing) if "elaswave" in names else None,
    )
    if json_mode:
        say(as_json(document_of(results)))
    else:
        render = render_policy if len(names) == 1 else render_policies
        say(*render(results, terminal_width()))


def _copies(life: Life, placing: Placing) -> str:
    """Describes what elaswave's job survives on all machines, and why it has as many copies as it has."""
    allocation = _configured(life)
    replication = policy_metadata_of(_named("elaswave", RecoveryTimes(), placing.planned_followers)).replication
    first = life.scenarios[0]
    per_host = max(Counter(first.nodes).values())
    machines = replace(life.machines, node=np.arange(life.machines.num_workers) // per_host)
    per_rack = max(Counter(first.racks).values(), default=1)
    placing = replace(placing, racks=racks_of(int(machines.node.max()) + 1, per_rack))
    shares = survival_shares_of(replication, allocation, machines, placing, life.costs)
    return f"{describe_copies(placing, allocation, life.machines, life.costs)}; at the beginning it {shares.describe()}"


def _check_effort(life: Life, num_policies: int) -> None:
    changes = sum(len(scenario.changes) for scenario in life.scenarios)
    if changes * num_policies > PLANS_MAX:
        raise UsageError(
            f"{changes:,} changes under {num_policies} policies are {changes * num_policies:,} plans, and "
            f"{PLANS_MAX:,} are the most that are made: give fewer --days, --workers, --seeds or policies (--policy), "
            "or a lower --rate or --stragglers"
        )


def describe_life(options: ClusterOptions, scenario: ScenarioOptions, *, seeds: Sequence[int]) -> Life:
    """Makes the job and its scenarios that options describe.

    Raises:
        UsageError: options that contradict each other, or figures that cannot be.
        DataError: a trace that is damaged; names the line.
    """
    shape = model_shape(options.model or DEFAULT_MODEL)
    num_stages = options.stages or DEFAULT_STAGES
    scenarios = read_scenarios(
        scenario,
        seeds=seeds,
        num_workers=options.workers,
        default_workers=DEFAULT_WORKERS,
        devices_per_node=max(
            1, device_preset(options.device or DEFAULT_DEVICE).devices_per_node // (options.tensor_parallel or 1)
        ),
    )
    num_workers = max(each.num_workers_max for each in scenarios)
    num_replicas = num_workers // num_stages
    if not num_replicas:
        few = f"{num_workers} workers are too few for {num_stages} stages"
        if scenario.trace is not None:
            raise UsageError(
                f"{few}, and {scenario.trace} never has more at once; give fewer --stages, or more --workers-per-node"
            )
        raise UsageError(f"{few}; give fewer --stages, or more --workers")
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


def simulate_policies(life: Life, policies: Sequence[str], redundancy: RedundancyOptions) -> list[list[PolicyOutcome]]:
    """Computes what each policy makes of every scenario.

    Raises:
        UsageError: the model does not fit on these machines at all.
    """
    waiting = Waiting("living through them")
    number = len(policies) * len(life.scenarios)
    outcomes: list[list[PolicyOutcome]] = []
    try:
        fault_free_s = fault_free_s_of(life)
        for policy in policies:
            own = find_policy(policy) if is_code(policy) else None
            outcomes.append([])
            for scenario in life.scenarios:
                before, pauses = sum(map(len, outcomes)), redundancy.pauses(scenario)
                planner = own or _named(policy, pauses, redundancy.placing.planned_followers)
                outcomes[-1].append(
                    simulate(
                        scenario,
                        life.machines,
                        life.costs,
                        policy,
                        planner,
                        num_stages=life.num_stages,
                        num_microbatches=life.num_microbatches,
                        schedule=life.schedule,
                        pauses=pauses,
                        placing=redundancy.placing,
                        fault_free_step_s=fault_free_s,
                        progress=lambda done, before=before: waiting.at((before + done) / number),  # type: ignore[misc]
                    )
                )
    except InfeasiblePlan as error:
        raise does_not_fit(error) from error
    finally:
        waiting.close()
    return outcomes


def _named(policy: str, pauses: RecoveryTimes, followers: int) -> Planner:
    return make_policies(pauses, followers=followers, others=other_policies())[policy]


def fault_free_s_of(life: Life) -> float:
    """Computes the seconds of the shortest fault-free step of all machines that any policy is known to make: one for
    all policies.

    Raises:
        InfeasiblePlan: too few machines for the job's pipelines.
    """
    return fault_free_step_s(life.machines, life.costs, _configured(life), known_policies())


def _configured(life: Life) -> Allocation:
    """Makes the job as it was asked for, on all machines."""
    return rectangle(
        life.machines,
        life.costs,
        num_stages=life.num_stages,
        num_microbatches=life.num_microbatches,
        schedule=life.schedule,
    )
