"""Throughput of 96 workers after losses: ElasWave's plans against the baselines', and what each of its moves is worth.

    python benchmarks/throughput.py [--models llama-2-7b ...] [--layouts 12x8 ...] [--lost 1 5] [--slow 5] [--json]

For every setting (model, replicas x stages, micro-batches per replica, number and pattern of losses) all policies plan
for the loss of the same workers, from the same undisturbed job and again each from its own, and every plan's programs
are timed exactly as the executor would run them. `capacity` is ElasWave's throughput over what is left of the
fault-free one's: the best that any policy makes of all 96 workers, times the survivors' share of all speeds. With
`--slow` so many of the workers compute at 0.7 of the others' speed. See README.md beside this file.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from harness import machine, print_header

from elaswave.cli.whatif.cluster_options import choose_lost
from elaswave.config.policy_code import policies
from elaswave.config.presets import catalog, device_preset, model_shape
from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.analytic import analytic_costs, preset_cluster
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.plan import Allocation, Plan
from elaswave.planning.policy.fault_free_policies import FaultFreeStart, fastest_fault_free, own_starts
from elaswave.planning.policy.policy_metadata import policy_metadata_of
from elaswave.planning.programs.prediction import time_within_memory
from elaswave.planning.search.candidates import AXES, Options
from elaswave.planning.search.planner import plan

POLICIES = policies()
PREDICTED_ONLY = {name for name, planner in POLICIES.items() if not policy_metadata_of(planner).runs_here}

NUM_WORKERS = 96
NEEDED_CAPACITY = 0.98
"""Median over spread losses."""
NEEDED = {"recycle_rerouting": 1.35, "torchft_batch_kept": 1.60}
"""Times a baseline's throughput, where arithmetic permits: where so much is left of the fault-free throughput."""
EXPECTED_AT: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "recycle_rerouting": lambda row: (
        row["layout"] == "12x8" and row["pattern"] == "clustered" and row["lost"] in (4, 5)
    ),
    "torchft_batch_kept": lambda row: row["layout"] == "12x8" and row["pattern"] == "spread" and row["lost"] >= 5,
}
"""Rows in which that is expected of it; where arithmetic does not permit it there, the table says so."""
ABLATIONS: Mapping[str, Options] = {
    "all": Options(),
    "no dataflow": Options(axes=AXES - {"dataflow"}),
    "no graph": Options(axes=AXES - {"graph"}),
    "no frequency": Options(axes=AXES - {"frequency"}),
    "no randomness": Options(axes=AXES - {"randomness"}),
    "no worker moves": Options(move_workers=False),
    "no shared layers": Options(share_layers=False),
    "neither of the two": Options(move_workers=False, share_layers=False),
    "no mixed depths": Options(mix_depths=False),
    "own schedule only": Options(schedules=("1f1b",)),
}
"""What is switched off; without the baselines' plans as candidates."""

SHORT = {
    "recycle_normalized": "rc norm",
    "recycle_rerouting": "rc route",
    "torchft_batch_kept": "tft kept",
    "oobleck_aligned": "oo align",
    "full_restart": "restart",
    "full_restart_spares": "rs spares",
}
"""Names as columns have room for."""
SLOW_SPEED = 0.7
"""Of slow workers, relative to the others'."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One case."""

    model: str
    device: str
    replicas: int
    stages: int
    microbatches: int
    """Per replica."""
    num_lost: int
    pattern: str
    num_slow: int = 0
    """Workers at `SLOW_SPEED`."""

    @property
    def layout(self) -> str:
        """Replicas x stages."""
        return f"{self.replicas}x{self.stages}"


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", default=["llama-2-7b", "llama-2-13b", "llama-2-34b"], choices=catalog().models
    )
    parser.add_argument(
        "--device", default="h200", choices=catalog().devices, help="its costs and memory; nothing is needed"
    )
    parser.add_argument("--layouts", nargs="+", default=["12x8", "24x4", "6x16"], help="replicas x stages, 96 together")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16, 32], help="per replica")
    parser.add_argument("--lost", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--patterns", nargs="+", default=["spread", "clustered"], choices=["spread", "clustered"])
    parser.add_argument("--slow", type=int, default=0, help=f"workers at {SLOW_SPEED:g} of the others' speed, spread")
    parser.add_argument(
        "--ablate", type=int, nargs="*", help="losses for which moves are switched off; default: 5, none with --slow"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    if options.ablate is None:
        options.ablate = [] if options.slow else [5]

    where = machine()
    rows = simulate(list(settings_of(options)), options.ablate, options.jobs)
    summary = summarise(rows, options.slow) | {"ablations_uneven": ablate_uneven() if options.ablate else {}}
    if options.json:
        print(
            json.dumps(
                {"machine": where, "device": options.device, "slow": options.slow, "simulated": rows} | summary,
                indent=2,
            )
        )
    else:
        print_table(rows, summary, where, options.slow)
    return 1 if summary["missed"] else 0


def settings_of(options: argparse.Namespace) -> Iterator[Setting]:
    """All combinations."""
    for model, layout, microbatches, pattern, num_lost in itertools.product(
        options.models, options.layouts, options.microbatches, options.patterns, options.lost
    ):
        replicas, stages = map(int, layout.split("x"))
        if replicas * stages != NUM_WORKERS:
            raise SystemExit(f"--layouts {layout} has {replicas * stages} workers, needed: {NUM_WORKERS}")
        yield Setting(
            model=model,
            device=options.device,
            replicas=replicas,
            stages=stages,
            microbatches=microbatches,
            num_lost=num_lost,
            pattern=pattern,
            num_slow=options.slow,
        )


def simulate(settings: Sequence[Setting], ablate: Sequence[int], num_jobs: int) -> list[dict[str, Any]]:
    """One row for each setting, in order; settings of one job are planned together."""
    jobs = itertools.groupby(settings, key=lambda each: (each.model, each.layout, each.microbatches))
    groups = [list(group) for _, group in jobs]
    if num_jobs == 1:
        found = [simulate_job(group, ablate) for group in groups]
    else:
        with ProcessPoolExecutor(num_jobs) as pool:
            found = list(pool.map(simulate_job, groups, itertools.repeat(ablate)))
    return [row for rows in found for row in rows]


def simulate_job(settings: Sequence[Setting], ablate: Sequence[int]) -> list[dict[str, Any]]:
    """Rows for settings that differ in their losses only."""
    first = settings[0]
    preset = device_preset(first.device)
    costs = analytic_costs(model_shape(first.model), preset)
    cluster = with_slow(preset_cluster(NUM_WORKERS, preset), first.num_slow)
    number = first.replicas * first.microbatches
    try:
        start = fastest_fault_free(cluster, costs, first.stages, first.replicas, number)
    except InfeasiblePlan as error:
        return [row_of(setting) | {"infeasible": str(error)} for setting in settings]
    equal = fastest_fault_free(cluster, costs, first.stages, first.replicas, number, share_layers=True)
    equal_s = time_within_memory(cluster, costs, equal).step_s
    own = own_starts(cluster, costs, start, POLICIES)
    whole_s = min(equal_s, *(each.step_s for each in own.values()))
    return [simulate_loss(setting, cluster, costs, start, own, whole_s, equal_s, ablate) for setting in settings]


def with_slow(cluster: Cluster, number: int) -> Cluster:
    """The cluster with so many slow workers, evenly spread."""
    speed = cluster.speed.copy()
    speed[[round((index + 0.5) * NUM_WORKERS / number) for index in range(number)]] = SLOW_SPEED
    return dataclasses.replace(cluster, speed=speed)


def simulate_loss(
    setting: Setting,
    cluster: Cluster,
    costs: Costs,
    start: Allocation,
    own: Mapping[str, FaultFreeStart],
    whole_s: float,
    equal_s: float,
    ablate: Sequence[int],
) -> dict[str, Any]:
    """One row."""
    lost = choose_lost(start, setting.num_lost, setting.pattern, 0)
    left, event = cluster.without(lost), ClusterEvent(kind="lost", workers=lost)
    number = start.num_microbatches
    plans, refused = plans_of(left, costs, dict.fromkeys(POLICIES, start), event)
    ours = plans.pop("elaswave")
    from_own, refused_from_own = plans_of(left, costs, {name: each.allocation for name, each in own.items()}, event)
    rates = {name: rate_of(each) for name, each in plans.items()}
    rate = rate_of(ours)
    share = float(left.speed.sum() / cluster.speed.sum())
    ablations = {}
    if setting.num_lost in ablate:
        for name, each in ABLATIONS.items():
            try:
                ablations[name] = plan(left, costs, start, event, options=each).predicted_step_s
            except InfeasiblePlan:
                ablations[name] = float("inf")
    return row_of(setting) | {
        "lost_workers": list(lost),
        "step_s": ours.predicted_step_s,
        "microbatches_per_s": rate,
        "capacity_fraction": rate / (number / whole_s * share),
        "capacity_fraction_of_equal_stages": rate / (number / equal_s * share),
        "times": {name: rate / each for name, each in rates.items()},
        "own_starts": {
            "fault_free_step_s": {name: each.step_s for name, each in own.items()},
            "capacity_fraction": rate_of(from_own["elaswave"]) / (number / whole_s * share),
            "times": {
                name: rate_of(from_own["elaswave"]) / rate_of(each)
                for name, each in from_own.items()
                if name != "elaswave"
            },
            "refused": refused_from_own,
        },
        "permitted": {name: number / whole_s * share / each for name, each in rates.items()},
        "refused": refused,
        "moved_bytes": sum(each.num_bytes for each in ours.transfers),
        "reason": ours.reason,
        "contributions": dict(ours.contributions),
        "ablations": ablations,
    }


def plans_of(
    left: Cluster, costs: Costs, starts: Mapping[str, Allocation], event: ClusterEvent
) -> tuple[dict[str, Plan], dict[str, str]]:
    """What every policy does from its start, and why those that refuse do."""
    plans: dict[str, Plan] = {}
    refused: dict[str, str] = {}
    ours = starts["elaswave"]
    for name, policy in POLICIES.items():
        if name == "elaswave":
            continue
        try:
            plans[name] = policy(left, costs, starts[name], event)
        except InfeasiblePlan as error:
            refused[name] = str(error)
    if any(start is not ours for start in starts.values()):
        return {"elaswave": POLICIES["elaswave"](left, costs, ours, event), **plans}, refused
    known = [  # planned once is enough
        lambda *_, found=found: found  # type: ignore[misc]
        for name, found in plans.items()
        if policy_metadata_of(POLICIES[name]).is_candidate
    ]
    return {"elaswave": plan(left, costs, ours, event, baselines=known), **plans}, refused


def rate_of(found: Plan) -> float:
    """Micro-batches per second."""
    return found.allocation.num_microbatches / found.predicted_step_s


def ablate_uneven() -> dict[str, float]:
    """Median step time without each move, relative to all of them, where workers differ and clocks can rise.

    Llama-2 13B on 12 x 8 Ascend 910B, one of them at `SLOW_SPEED`, 8 and 16 micro-batches per replica, 5 others lost.
    """
    preset = device_preset("ascend-910b")
    costs = analytic_costs(model_shape("llama-2-13b"), preset)
    even = preset_cluster(NUM_WORKERS, preset)
    speed = even.speed.copy()
    speed[1] = SLOW_SPEED
    cluster = dataclasses.replace(even, speed=speed)
    ratios: dict[str, list[float]] = {name: [] for name in ABLATIONS}
    for microbatches, pattern in itertools.product((8, 16), ("spread", "clustered")):
        start = fastest_fault_free(cluster, costs, 8, 12, 12 * microbatches)
        lost = tuple(worker for worker in choose_lost(start, 6, pattern, 0) if worker != 1)[:5]
        left, event = cluster.without(lost), ClusterEvent(kind="lost", workers=lost)
        steps = {
            name: plan(left, costs, start, event, options=each).predicted_step_s for name, each in ABLATIONS.items()
        }
        for name, step_s in steps.items():
            ratios[name].append(step_s / steps["all"])
    return {name: statistics.median(found) for name, found in ratios.items()}


def row_of(setting: Setting) -> dict[str, Any]:
    """What a row is about."""
    return {
        "model": setting.model,
        "layout": setting.layout,
        "microbatches": setting.microbatches,
        "pattern": setting.pattern,
        "lost": setting.num_lost,
    }


def summarise(rows: Sequence[dict[str, Any]], slow: int) -> dict[str, Any]:
    """What all rows together say, and which targets they miss; `NEEDED` is of workers that are alike."""
    planned = [row for row in rows if "step_s" in row]
    missed: list[str] = []
    spread = [row["capacity_fraction"] for row in planned if row["pattern"] == "spread"]
    median = statistics.median(spread) if spread else None
    if median is not None and median < NEEDED_CAPACITY:
        missed.append(f"median capacity over spread losses is {median:.3f}, needed: {NEEDED_CAPACITY}")
    faster: list[dict[str, Any]] = []
    for row in planned:
        below = {name: times for name, times in row["times"].items() if times < 1 - 1e-9}
        missed += [
            f"{title(row)}: {times:.3f} of {name}" for name, times in below.items() if name not in PREDICTED_ONLY
        ]
        faster += [
            {"setting": title(row), "baseline": name, "times": times}
            for name, times in below.items()
            if name in PREDICTED_ONLY
        ]
    needed = []
    for name, target in () if slow else NEEDED.items():
        for row in planned:
            if name not in row["times"]:
                continue
            times, permitted = row["times"][name], row["permitted"][name]
            expected = EXPECTED_AT[name](row)
            if permitted < target and not expected:
                continue
            found = {"setting": title(row), "baseline": name, "times": times, "needed": target, "permitted": permitted}
            needed.append(found | {"expected": expected})
            if permitted >= target > times:
                missed.append(f"{title(row)}: {times:.3f} times {name}, needed: {target}, permitted: {permitted:.3f}")
    ablated = [row["ablations"] for row in planned if row["ablations"]]
    ablations = {
        name: statistics.median(row[name] / row["all"] for row in ablated) for name in (ABLATIONS if ablated else ())
    }
    return {
        "capacity_median": median,
        "starts": against(planned),
        "needed": needed,
        "faster": faster,
        "ablations": ablations,
        "missed": missed,
    }


def against(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """ElasWave's throughput over each baseline's from both starts: median and least."""
    found = {}
    for name in POLICIES:
        same = [row["times"][name] for row in rows if name in row["times"]]
        own = [row["own_starts"]["times"][name] for row in rows if name in row["own_starts"]["times"]]
        if same and own:
            found[name] = {
                "same_median": statistics.median(same),
                "same_least": min(same),
                "own_median": statistics.median(own),
                "own_least": min(own),
            }
    return found


def title(row: dict[str, Any]) -> str:
    """A setting in a few words."""
    return f"{row['model']} {row['layout']}, {row['microbatches']} micro-batches, {row['lost']} {row['pattern']}"


def print_table(rows: Sequence[dict[str, Any]], summary: dict[str, Any], where: dict[str, Any], slow: int) -> None:
    """For people."""
    print_header(where)
    if slow:
        print(f"{slow} workers at {SLOW_SPEED:g} of the others' speed")
    names = [name for name in POLICIES if name != "elaswave"]
    print("throughput relative to each baseline's; capacity: of what is left of the fault-free throughput")
    print(f"{'model':<12} {'layout':>6} {'mb':>3} {'lost':>12} {'step ms':>8} {'capacity':>8} " + " ".join(
        f"{SHORT.get(name, name)[:9]:>9}" for name in names
    ))  # fmt: skip
    for row in rows:
        head = f"{row['model']:<12} {row['layout']:>6} {row['microbatches']:>3} {row['lost']:>2} {row['pattern']:<9}"
        if "step_s" not in row:
            print(f"{head} {row['infeasible']}")
            continue
        times = " ".join(f"{row['times'][name]:>9.2f}" if name in row["times"] else f"{'-':>9}" for name in names)
        print(f"{head} {row['step_s'] * 1e3:>8.0f} {row['capacity_fraction']:>8.3f} {times}")
    if summary["capacity_median"] is not None:
        print(f"\nmedian capacity over spread losses: {summary['capacity_median']:.3f} (needed: {NEEDED_CAPACITY})")
    print("times each baseline's throughput, median (least): from the same start; each from its own fault-free layout")
    for name, each in summary["starts"].items():
        print(f"  {name:<20} {each['same_median']:.3f} ({each['same_least']:.3f})  {each['own_median']:.3f} "
              f"({each['own_least']:.3f})")  # fmt: skip
    for name, target in () if slow else NEEDED.items():
        asked = [each for each in summary["needed"] if each["baseline"] == name]
        permitted = [each for each in asked if each["permitted"] >= target]
        reached = sum(each["times"] >= target for each in asked)
        print(f"{target} times {name}: permitted by the capacity that is left in {len(permitted)} settings, reached in "
              f"{reached}")  # fmt: skip
        for each in asked:
            if each["expected"] and each["times"] < target and each["permitted"] < target:
                whole = f"all of the capacity that is left would be {each['permitted']:.2f} times"
                print(f"  {each['setting']}: {each['times']:.2f} times; {whole}")
    print(f"settings in which a policy as published, which this engine cannot run, is faster: {len(summary['faster'])}")
    for each in summary["faster"]:
        print(f"  {each['setting']}: {each['times']:.3f} of {each['baseline']}")
    if summary["ablations"]:
        print(
            "\nstep time without a move, relative to all moves (median): all workers alike, and on Ascend 910B with one"
        )
        print(f"worker at {SLOW_SPEED:g} of the others' speed")
        for name, ratio in summary["ablations"].items():
            print(f"  {name:<20} {ratio:.3f}  {summary['ablations_uneven'][name]:.3f}")
    print("\n" + ("all targets met" if not summary["missed"] else "missed:"))
    for line in summary["missed"]:
        print(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
