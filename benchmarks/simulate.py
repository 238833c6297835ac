"""A week of a large cluster in virtual time under every policy: what each makes of it, and how long simulating takes.

    python benchmarks/simulate.py [--workers 100000] [--days 7] [--rate llama3] [--stragglers 0.0] [--seeds 1]
        [--traces FILE ...] [--followers auto 1 free] [--checkpoint-minutes 10 60 ...] [--model llama-2-70b]
        [--device h100] [--stages 16] [--microbatches 8] [--policies ...] [--json]
    python benchmarks/simulate.py --traces spot-p3-trace.csv gcloud.txt --model llama-2-7b --device a100 --stages 4 \\
        --microbatches 16

Every policy meets the same scenarios, begins with the same job (split backwards, so that none gains by the schedule
alone), and checkpoints as often as is best for the failures that come, or as often as is asked. Needed: at most 60 s
for each policy and scenario of 100,000 workers and a week, on two cores; the simulation uses one, so what is judged is
its CPU time. On traces checkpoints are taken every 5, 20 and 60 minutes unless something else is asked, ElasWave has
the followers of a run's default, one, and as a bound the whole state of its stage in each worker for nothing (`free`),
and its planner may take ten times the CPU time of its slowest rival. A policy plans once for all intervals between
checkpoints, ElasWave for each number of followers that layouts are planned with, and what was timed once is not timed
again, for other policies too: the first row of a policy is the one that tells what its planner takes, `--policies` of
one what it takes alone. Rows are printed as they come.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from remembering import Remembering

from elaswave.config.policy_code import other_policies, policies
from elaswave.config.presets import device_preset, model_shape
from elaswave.planning.costs.analytic import analytic_costs, preset_cluster
from elaswave.planning.costs.layers import DEFAULT_FOLLOWERS
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.policy.fault_free_policies import fault_free_step_s
from elaswave.planning.policy.policies import ELASWAVE, make_policies
from elaswave.planning.policy.policy_metadata import declares
from elaswave.planning.policy.policy_parts import rectangle
from elaswave.planning.state_moves.placed_blocks import Placing
from elaswave.sim.cluster.failures import DAY_S, Scenario, draw, rates_named
from elaswave.sim.cluster.job import simulate
from elaswave.sim.cluster.outcome import PolicyOutcome
from elaswave.sim.cluster.summary import summarize_outcomes
from elaswave.sim.cluster.traces import read_trace

SCHEDULE = "zero-bubble"
"""Of the job at the beginning."""
OWN, FREE = "elaswave", "free"
WITH_WHOLE_STAGES = msgspec.structs.replace(
    ELASWAVE, replication=msgspec.structs.replace(ELASWAVE.replication, unit="stages")
)
"""What elaswave would declare if each of its workers held all of its stage's state."""
SECONDS_ALLOWED = 60.0
"""For one policy and one scenario of drawn failures."""
TIMES_RIVALS_ALLOWED = 10.0
"""ElasWave's CPU time on a trace over that of its slowest rival."""


def main() -> int:
    """Run the benchmark; the exit code is 1 if a policy took too long."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=100_000)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--rate", default="llama3", help="public failure rates, by name")
    parser.add_argument("--stragglers", type=float, default=0.0, help="slow-downs per worker and day")
    parser.add_argument("--seeds", type=int, default=1, help="scenarios; several give confidence intervals")
    parser.add_argument("--traces", nargs="+", type=Path, default=[], help="traces instead of rates, one job for each")
    parser.add_argument(
        "--followers", nargs="+", type=followers_named, default=[],
        help="of elaswave: live copies of blocks, auto, or free: all of the stage's state, for nothing",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-minutes", nargs="+", type=float, default=[],
        help="between durable checkpoints; default: on traces 5 20 60, else the best for the failures that come",
    )  # fmt: skip
    parser.add_argument("--model", default="llama-2-70b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--stages", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=8, help="of a pipeline, in a step")
    parser.add_argument("--policies", nargs="+", default=list(policies()), choices=list(policies()))
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()

    options.followers = options.followers or (["auto", DEFAULT_FOLLOWERS, FREE] if options.traces else ["auto"])
    options.checkpoint_minutes = options.checkpoint_minutes or ([5, 20, 60] if options.traces else [None])

    rows = []
    for job in jobs(options):
        if not options.json:
            show_job(job)
        for row in measure(options, job):
            rows.append(row)
            if not options.json:
                show(row)
    too_slow = slow_policies(rows, is_trace=bool(options.traces))
    if options.json:
        print(json.dumps({"settings": vars(options), "too_slow": too_slow, "rows": rows}, indent=2, default=str))
    elif too_slow:
        print(f"too slow: {', '.join(too_slow)}")
    return 1 if too_slow else 0


class Job(NamedTuple):
    """What every policy is to keep running."""

    title: str
    scenarios: list[Scenario]
    num_workers: int


def jobs(options: argparse.Namespace) -> list[Job]:
    """One job for each trace, or one for the rates."""
    shape = f"{options.model}, {options.stages} stages"
    if options.traces:
        found = []
        for path in options.traces:
            with path.open(encoding="utf-8") as lines:
                scenarios = [read_trace(lines, name=path.name)]
            number = scenarios[0].num_workers_max
            found.append(Job(f"{path.name}: {shape}, {number} x {options.device}", scenarios, number))
        return found
    rates = msgspec.structs.replace(rates_named(options.rate), stragglers_per_worker_day=options.stragglers)
    scenarios = [
        draw(rates, num_workers=options.workers, duration_s=options.days * DAY_S, seed=seed)
        for seed in range(options.seeds)
    ]
    title = f"{shape}, {options.workers} x {options.device}, {options.days:g} days at the rates of {options.rate}"
    return [Job(title, scenarios, options.workers)]


def followers_named(text: str) -> int | str:
    """Followers as they are given on the command line."""
    return text if text in ("auto", FREE) else int(text)


def measure(options: argparse.Namespace, job: Job) -> Iterator[dict[str, Any]]:
    """One row for each policy, number of followers (of elaswave) and interval between checkpoints."""
    device = device_preset(options.device)
    # Activations are computed again in the backward: else a model of 70 billion parameters does not fit.
    costs = analytic_costs(model_shape(options.model), device, recompute=True)
    machines = preset_cluster(job.num_workers, device)
    number = job.num_workers // options.stages * options.microbatches
    configured = rectangle(
        machines, costs, num_stages=options.stages, num_microbatches=number, schedule=SCHEDULE
    )  # fmt: skip
    fault_free_s = fault_free_step_s(machines, costs, configured, policies())
    planners: dict[tuple[str, int, int], Remembering] = {}
    kinds = [(name, each) for name in options.policies for each in (options.followers if name == OWN else [None])]
    for (policy, followers), minutes in product(kinds, options.checkpoint_minutes):
        outcomes: list[PolicyOutcome] = []
        begin, begin_cpu = time.perf_counter(), time.process_time()
        placing = Placing() if followers in (None, FREE) else Placing(followers=followers)
        for index, scenario in enumerate(job.scenarios):
            pauses = RecoveryTimes().for_mtbf(scenario.mtbf_s)
            if minutes is not None:
                pauses = msgspec.structs.replace(
                    pauses, checkpoint_interval_s=60 * minutes, backup_interval_s=60 * minutes
                )
            planner = make_policies(pauses, followers=placing.planned_followers, others=other_policies())[policy]
            # Else no plan is wanted twice, and they may be large.
            if len(options.checkpoint_minutes) > 1 or len(options.followers) > 1:
                key = policy, placing.planned_followers, index
                if key not in planners:
                    planners[key] = Remembering(planner)
                planner = planners[key].again()
            if followers == FREE:
                planner = declares(WITH_WHOLE_STAGES)(partial(planner))
            outcomes.append(
                simulate(
                    scenario,
                    machines,
                    costs,
                    policy,
                    planner,
                    num_stages=options.stages,
                    num_microbatches=number,
                    schedule=SCHEDULE,
                    fault_free_step_s=fault_free_s,
                    pauses=pauses,
                    placing=placing,
                    free_copies=followers == FREE,
                )
            )
        wall_s = (time.perf_counter() - begin) / len(job.scenarios)
        cpu_s = (time.process_time() - begin_cpu) / len(job.scenarios)
        changes = sum(sum(each.num_events.values()) for each in outcomes)
        how = {"job": job.title, "followers": followers, "checkpoint_minutes": minutes, "num_changes": changes}
        yield msgspec.to_builtins(summarize_outcomes(outcomes)) | how | {"wall_s": wall_s, "cpu_s": cpu_s}


def slow_policies(rows: Sequence[dict[str, Any]], *, is_trace: bool) -> list[str]:
    """Policies that took more CPU time than they may: on rates by themselves, on traces ElasWave beside its rivals."""
    if not is_trace:
        return [row["policy"] for row in rows if row["cpu_s"] > SECONDS_ALLOWED]
    too_slow = []
    for job, of_job in groupby(rows, key=lambda row: row["job"]):
        first_s: dict[str, float] = {}
        for row in of_job:
            first_s.setdefault(row["policy"], row["cpu_s"])
        own_s = first_s.pop(OWN, 0.0)
        if first_s and own_s > TIMES_RIVALS_ALLOWED * max(first_s.values()):
            too_slow.append(f"elaswave on {job}: {own_s:.0f} s, its slowest rival {max(first_s.values()):.0f} s")
    return too_slow


def show_job(job: Job) -> None:
    """The head of a job's rows."""
    print(f"{job.title}, {len(job.scenarios)} scenarios; 95 % intervals")
    print(
        f"{'policy':<20} {'copies':>6} {'checkpoints':>11} {'goodput':>17} {'ETTR':>7} {'of capacity':>12} "
        f"{'lost work':>10} {'back':>5} {'no copies':>9} {'no workers':>10} {'pauses':>9} {'slower':>9} {'moved':>9} "
        f"{'energy':>9} {'CPU':>7}",
        flush=True,
    )


def show(row: dict[str, Any]) -> None:
    """One row."""
    pauses_s = sum(each["mean"] for each in row["pauses_s"].values())
    goodput = f"{row['goodput']['mean']:.4f} +- {row['goodput']['half_width']:.4f}"
    every = "best" if row["checkpoint_minutes"] is None else f"{row['checkpoint_minutes']:g} min"
    copies = "-" if row["followers"] is None else row["followers"]
    print(
        f"{row['policy']:<20} {copies:>6} {every:>11} {goodput:>17} {row['ettr']['mean']:>7.4f} "
        f"{row['of_capacity']['mean']:>12.4f} {row['lost_work_s']['mean']:>8.0f} s "
        f"{row['num_rollbacks']['mean']:>5.0f} {row['rollbacks']['copies']['mean']:>9.0f} "
        f"{row['rollbacks']['workers']['mean']:>10.0f} {pauses_s:>7.0f} s {row['slower_s']['mean']:>7.0f} s "
        f"{row['migrated_bytes']['mean'] / 1e12:>6.1f} TB {row['energy_j']['mean'] / 3.6e9:>5.1f} MWh "
        f"{row['cpu_s']:>5.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
