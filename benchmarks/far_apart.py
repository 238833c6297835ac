"""48 devices in ten regions of the world, in virtual time: OP-Fence against its rivals, with and without codecs.

    python benchmarks/far_apart.py --virtual [--models resnet101] [--rates 8 1000] [--mixes equal] [--json]

Networks and devices are emulated. Operators of GPT-2 (124 M parameters, transformers' network; needs `pip install
"elaswave[hf]"`) and of ResNet-101 are found and measured here by `elaswave.split`'s graph; their seconds on an emulated
device are those of a roofline (operations over the device's peak times its efficiency, bytes over its memory's
bandwidth, LAUNCH_S at least), of which the planner is told eight operators and estimates the rest (`graph.estimate`).
Steps are timed with the roofline's seconds: programs in virtual time, transfers of a worker to a site one after
another, and REDUCE, VOTE and GATHER by the objective. The network is DT-FM's matrix of ten regions, all links between
regions scaled so that the slowest has the given rate; within a region 2 Gbit/s.

Two more tables: what a chain loses where values could go straight to the stages that use them, for a U-Net and T5; and
the same network with sites left out.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, print_header

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples")]


from operator_costs import (  # noqa: E402
    chain_costs,
    crossing,
    direct_transfers,
    places,
    values_of,
)

from elaswave.config.network import read_network, scaled  # noqa: E402
from elaswave.config.presets import device_preset  # noqa: E402
from elaswave.errors import InfeasiblePlan  # noqa: E402
from elaswave.fences import Codec  # noqa: E402
from elaswave.planning.costs.analytic import USABLE_MEMORY  # noqa: E402
from elaswave.planning.costs.machines import Cluster  # noqa: E402
from elaswave.planning.costs.presets import DevicePreset  # noqa: E402
from elaswave.planning.far_apart.job import FarJob, FarPlan  # noqa: E402
from elaswave.planning.far_apart.objective import (  # noqa: E402
    GRADIENT_BYTES,
    Model,
    time_plan,
)
from elaswave.planning.far_apart.op_fence import op_fence  # noqa: E402
from elaswave_rivals.far_apart import dtfm_genetic, equal_compute, equal_number  # noqa: E402

RATES_MBIT = (8, 100, 1000, 10_000)
MIXES: dict[str, tuple[Sequence[str], float]] = {
    "equal": (("a100",), 1.0),
    "mixed": (("a100", "h100", "h200"), 1.0),
    "stragglers": (("a100",), 0.25),
}
"""Kinds of devices, region by region in turns; speed of each sixth worker."""
NUM_LAYERS = 32
MICROBATCHES = 32
LAUNCH_S = 5e-6
MEASURED = 8
"""Operators that the planner is told the seconds of."""
TARGETS = {"mild": 1.45, "slow": 9.39}
"""Of equal numbers without a codec, at 10 Gbit/s and at 8 Mbit/s: the ends of what FusionLLM's abstract states."""
PLAN_S_MAX = 1.0


@dataclass(frozen=True)
class Network:
    """A network's operators."""

    graph: Any
    parameters: Mapping[str, int]
    title: str


def gpt2() -> Network:
    """GPT-2's small model on 1 x 256 tokens: an operator is measured here, so it should not take long."""
    import torch
    import transformers

    torch.manual_seed(0)
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    return _network(model, {"input_ids": torch.randint(0, 50257, (1, 256))}, "GPT-2 (124 M), 1 x 256 tokens")


def resnet_101() -> Network:
    """ResNet-101 in its paper's width on 8 pictures of 64 x 64."""
    import resnet101
    import torch

    torch.manual_seed(0)
    model = resnet101.ResNet(resnet101.BLOCKS, 64, 1000)
    return _network(model, {"x": torch.randn(8, 1, 64, 64)}, "ResNet-101, 8 pictures of 64 x 64")


def u_net() -> Network:
    """The network of examples/unet.py on 4 pictures of 128 x 128."""
    import split_table
    import torch

    torch.manual_seed(0)
    return _network(split_table.UNet(), {"pictures": torch.randn(4, 1, 128, 128)}, "U-Net, 4 pictures of 128 x 128")


def t5() -> Network:
    """T5-small's sizes but for the vocabulary, on 4 x 256 tokens."""
    import split_table
    import torch

    torch.manual_seed(0)
    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "dropout_rate": 0.0}
    model = split_table.of_transformers("T5ForConditionalGeneration", **sizes)
    ids = torch.randint(0, split_table.VOCABULARY, (4, 256))
    return _network(model, {"input_ids": ids, "decoder_input_ids": ids.flip(1)}, "T5, 6 + 6 layers of 512, 4 x 256")


def _network(model: Any, inputs: Any, title: str) -> Network:
    from elaswave.models.splitting.split import operator_graph

    parameters = {name: each.numel() for name, each in model.named_parameters()}
    return Network(operator_graph(model, inputs), parameters, title)


MODELS: dict[str, Callable[[], Network]] = {"gpt2": gpt2, "resnet101": resnet_101}


def roofline(graph: Any, preset: DevicePreset) -> list[tuple[float, float]]:
    """Seconds of each operator on an emulated device, forward and backward; a backward computes twice as much."""
    found = []
    for node in graph:
        if not node.bytes_out and not node.flops:
            found.append((0.0, 0.0))
            continue
        computing = node.flops / (preset.device.flops_per_s * preset.efficiency)
        moving = (node.bytes_in + node.bytes_out) / preset.memory_bandwidth_bytes_per_s
        has_backward = node.backward_s > 0
        ahead = max(computing, moving, LAUNCH_S)
        found.append((ahead, max(2 * computing, 2 * moving, LAUNCH_S) if has_backward else 0.0))
    return found


def estimated(graph: Any, true: Sequence[tuple[float, float]]) -> tuple[list[tuple[float, float]], float]:
    """Seconds as the planner estimates them from a few, and by how much all of them together are off."""
    told = {number: sum(true[number]) for number in graph.to_measure(MEASURED) if sum(true[number]) > 0}
    guess = graph.estimate(told).graph
    seconds = []
    for node, (ahead, back) in zip(guess, true, strict=True):
        whole = node.seconds
        share = ahead / (ahead + back) if ahead + back else 1.0
        seconds.append((whole * share, whole * (1 - share)))
    total = sum(map(sum, true))
    return seconds, sum(map(sum, seconds)) / total - 1


def cluster_of(mix: str, rate: float) -> tuple[Cluster, tuple[DevicePreset, ...]]:
    """The ten regions with a mix of devices and a rate of the slowest link."""
    names, slow = MIXES[mix]
    file = read_network(ROOT / "examples" / "far_apart" / "ten_regions.toml")
    presets = tuple(device_preset(name) for name in names)
    site = file.cluster.site
    assert site is not None
    kind = site % len(presets)
    speed = np.where(file.cluster.ids % 6 == 5, slow, 1.0)
    memory = np.array([preset.device.memory_bytes * USABLE_MEMORY for preset in presets])[kind]
    columns = vars(file.cluster) | {
        "devices": tuple(preset.device for preset in presets), "device": kind, "speed": speed, "memory_bytes": memory,
    }  # fmt: skip
    return scaled(Cluster(**columns), rate), presets


def virtual(options: argparse.Namespace) -> dict[str, Any]:
    """All rows."""
    rows = []
    networks = {name: MODELS[name]() for name in options.models}
    for name, network in networks.items():
        reference = roofline(network.graph, device_preset("a100"))
        cuts = places(list(network.graph), [sum(each) for each in reference], NUM_LAYERS)
        for mix in options.mixes:
            for rate in options.rates:
                rows += measured(name, network, cuts, mix, rate)
                print(f"{name}, {mix}, {rate:g} Mbit/s: done", file=sys.stderr)
    return {
        "emulated": True,
        "machine": machine(),
        "titles": {name: network.title for name, network in networks.items()},
        "rows": rows,
        "chains": [] if options.no_chains else [*chain_losses(u_net()), *chain_losses(t5())],
        "missed": missed(rows),
    }


def measured(name: str, network: Network, cuts: list[int], mix: str, rate: float) -> list[dict[str, Any]]:
    """What each planner makes of one model, mix and rate."""
    cluster, presets = cluster_of(mix, rate)
    operators = list(network.graph)
    true = [roofline(network.graph, preset) for preset in presets]
    guessed = [estimated(network.graph, each) for each in true]

    def job_of(seconds: Sequence[Sequence[tuple[float, float]]], codec: Codec) -> FarJob:
        costs = tuple(chain_costs(operators, each, cuts, network.parameters) for each in seconds)
        return FarJob(
            cluster=cluster,
            costs=costs,
            num_microbatches=MICROBATCHES,
            element_bytes=4,
            codec=codec,
            memory_bandwidth_bytes_per_s=min(preset.memory_bandwidth_bytes_per_s for preset in presets),
        )

    planners: list[tuple[str, Codec, Callable[[FarJob], FarPlan]]] = [
        ("equal_number", "none", equal_number),
        ("equal_number", "int8", equal_number),
        ("equal_compute", "int8", equal_compute),
        ("dtfm_genetic", "int8", dtfm_genetic),
        ("op_fence", "none", lambda job: op_fence(job, use_all=True)),
        ("op_fence", "int8", lambda job: op_fence(job, use_all=True)),
        ("op_fence", "int4", lambda job: op_fence(job, use_all=True)),
        ("op_fence, sites left out", "int8", op_fence),
    ]
    rows = []
    for planner, codec, make in planners:
        told, real = (job_of(each, codec) for each in ([seconds for seconds, _ in guessed], true))
        begin = time.process_time()
        try:
            plan = make(told)
        except InfeasiblePlan as error:
            rows.append({"model": name, "mix": mix, "rate": rate, "planner": planner, "codec": codec,
                         "step_s": None, "reason": str(error)})  # fmt: skip
            continue
        plan_s = time.process_time() - begin
        with_real = again(real, plan)
        timing = time_plan(real, with_real)
        rows.append({
            "model": name, "mix": mix, "rate": rate, "planner": planner, "codec": codec, "step_s": timing.shared_s,
            "objective_s": timing.objective_s, "programs_s": timing.alone_s, "gap": timing.gap, "plan_s": plan_s,
            "num_stages": len(plan.stages), "num_fences": len(plan.fences), "schedule": plan.schedule,
            "bound": with_real.parts.bound, "end_s": with_real.step_s - with_real.parts.run_s,
            "num_devices": sum(len(stage.devices) for stage in plan.stages),
            "estimate_error": max((error for _, error in guessed), key=abs),
        })  # fmt: skip
    first = rows[0]["step_s"]
    least_s = floor_s(job_of(true, "none"))
    for row in rows:
        row["floor_s"] = least_s
        row["speed_up"] = first / row["step_s"] if first and row["step_s"] else None
    return rows


def floor_s(job: FarJob) -> float:
    """What a step takes at least, by the objective, if all devices are used and no stage is in two regions.

    The vote of all; the shortest way through all regions and back, with a micro-batch computed by the fastest device;
    and the end of the first layer, of which no backward is left to hide anything: a device that has it alone sends
    its mean gradients to a follower, several send each other exact sums, which takes longer.
    """
    network = job.cluster.network
    assert network is not None
    latency_s = network.latency_s + network.latency_s.T
    count = len(network.sites)
    ways = {(1 << site, site): 0.0 for site in range(count)}
    for visited in range(1, 1 << count):
        for site in range(count):
            if (way_s := ways.get((visited, site))) is None:
                continue
            for other in range(count):
                if not visited >> other & 1:
                    key = visited | 1 << other, other
                    ways[key] = min(ways.get(key, np.inf), way_s + float(latency_s[site, other]))
    way_s = min(ways[(1 << count) - 1, site] for site in range(count))
    model = Model(job)
    sent = job.costs[0].layers[0].accumulator_bytes / job.sum_bytes * GRADIENT_BYTES * job.followers
    end_s = float(network.latency_s.diagonal().min()) + sent / float(network.bandwidth_bytes_per_s.diagonal().max())
    return model.vote_s(list(range(job.cluster.num_workers))) + way_s + 1 / float(model.rate.max()) + end_s


def again(job: FarJob, plan: FarPlan) -> FarPlan:
    """The same stages, cuts and schedule under the true seconds."""
    model = Model(job)
    groups, cuts = [model.group(stage.devices) for stage in plan.stages], [stage.start for stage in plan.stages[1:]]
    parts = model.evaluate(groups, cuts, plan.schedule)
    assert parts is not None
    return model.plan(plan.planner, groups, cuts, plan.schedule, parts)


CHAIN_PARTS = 4
CHAIN_RATES = (1e6, 1e7, 1e8, 1e9)
"""Bytes per second between any two parts."""
CHAIN_PLACES = 24


def chain_losses(network: Network) -> list[dict[str, Any]]:
    """The best cuts into four parts where values are carried, and where they go straight to the parts that use them.

    All parts are on devices alike, each pair joined by a link of its own; every choice of cuts is tried.
    """
    graph = network.graph
    operators = list(graph)
    seconds = roofline(graph, device_preset("a100"))
    cuts = places(operators, [sum(each) for each in seconds], CHAIN_PLACES)
    bytes_at, values = crossing(operators), values_of(operators)
    sums = np.concatenate([[0.0], np.cumsum([sum(each) for each in seconds])])
    choices = []
    for choice in itertools.combinations(cuts, CHAIN_PARTS - 1):
        ends = [0, *choice, len(operators)]
        parts = [float(sums[stop] - sums[start]) for start, stop in itertools.pairwise(ends)]
        carried = {(part, part + 1): bytes_at[cut] for part, cut in enumerate(choice)}
        choices.append((parts, carried, direct_transfers(values, choice)))
    rows = []
    for rate in CHAIN_RATES:
        chain = min(_step_s(parts, carried, rate) for parts, carried, _ in choices)
        direct = min(_step_s(parts, straight, rate) for parts, _, straight in choices)
        rows.append({
            "model": network.title, "rate_bytes_per_s": rate, "chain_s": chain, "direct_s": direct,
            "loss": chain / direct - 1,
        })  # fmt: skip
    return rows


def _step_s(parts: Sequence[float], transfers: Mapping[tuple[int, int], int], rate: float) -> float:
    """The longest way of a micro-batch there and back, with branches side by side, and what bounds the others."""
    reached = [0.0] * len(parts)
    for part, each in enumerate(parts):
        arrivals = [reached[source] + 2 * size / rate for (source, to), size in transfers.items() if to == part]
        begin = max(arrivals, default=0.0)
        reached[part] = begin + each
    busiest = max([*parts, *(size / rate for size in transfers.values())])
    return max(reached) + (MICROBATCHES - 1) * busiest


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Targets that were missed."""
    found = []
    slowest, fastest = min((row["rate"] for row in rows), default=0), max((row["rate"] for row in rows), default=0)
    for row in rows:
        if row["step_s"] is None or not row["planner"].startswith("op_fence"):
            continue
        what = f"{row['model']}, {row['mix']}, {row['rate']} Mbit/s, {row['planner']} {row['codec']}"
        if row["plan_s"] > PLAN_S_MAX:
            found.append(f"{what}: planned in {row['plan_s']:.2f} s of CPU time, needed: {PLAN_S_MAX:.0f}")
        if row["codec"] == "int4" and row["speed_up"]:
            for rate, name in ((slowest, "slow"), (fastest, "mild")):
                if row["rate"] == rate and slowest < fastest and row["speed_up"] < TARGETS[name]:
                    found.append(f"{what}: {row['speed_up']:.2f}x equal numbers, needed: {TARGETS[name]}")
    return found


def show(result: Mapping[str, Any]) -> None:
    """The tables."""
    print("NETWORKS AND DEVICES ARE EMULATED: steps in virtual time; operators were measured on")
    print_header(result["machine"])
    for (name, mix), rows in itertools.groupby(result["rows"], key=lambda row: (row["model"], row["mix"])):
        print(f"\n{result['titles'][name]}, 48 devices in ten regions, {mix}; seconds of a step, and times as fast as "
              "equal_number without a codec")  # fmt: skip
        table = list(rows)
        rates = list(dict.fromkeys(row["rate"] for row in table))
        print(f"{'planner':26} {'codec':6}" + "".join(f"{f'{rate:g} Mbit/s':>20}" for rate in rates))
        for planner, codec in dict.fromkeys((row["planner"], row["codec"]) for row in table):
            cells = [row for row in table if (row["planner"], row["codec"]) == (planner, codec)]
            print(f"{planner:26} {codec:6}" + "".join(f"{_cell(row):>20}" for row in cells))
        floors = [next(row for row in table if row["rate"] == rate)["floor_s"] for rate in rates]
        print(f"{'at least, all devices':33}" + "".join(f"{f'{each:.2f} s':>20}" for each in floors))
        ours = [row for row in table if row["planner"] == "op_fence" and row["step_s"]]
        queued = _spread([row["objective_s"] / row["step_s"] - 1 for row in table if row["step_s"]])
        alone = _spread([row["gap"] for row in table if row["step_s"]])
        print(f"op_fence: planned in at most {max(row['plan_s'] for row in ours):.2f} s of CPU time; estimated seconds "
              f"of operators are {ours[0]['estimate_error']:+.1%} off in all")  # fmt: skip
        print(
            f"objective of all plans against programs whose transfers queue: {queued}; against time_programs: {alone}"
        )
    if result["chains"]:
        print("\nwhat a chain loses: four parts, values carried through parts between, or straight to who uses them")
        for row in result["chains"]:
            print(f"{row['model']:34} {row['rate_bytes_per_s'] * 8 / 1e6:>8g} Mbit/s  {row['chain_s'] * 1e3:10.2f} ms  "
                  f"{row['direct_s'] * 1e3:10.2f} ms  {row['loss']:+.1%}")  # fmt: skip
    for line in result["missed"]:
        print(f"missed: {line}")


def _spread(values: Sequence[float]) -> str:
    values = sorted(values)
    return f"{values[0]:+.0%} to {values[-1]:+.0%}, median {values[len(values) // 2]:+.0%}"


def _cell(row: Mapping[str, Any]) -> str:
    return "-" if row["step_s"] is None else f"{row['step_s']:.2f} s {row['speed_up'] or 0:7.2f}x"


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--virtual", action="store_true", help="48 devices in virtual time")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--mixes", nargs="+", choices=sorted(MIXES), default=list(MIXES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES_MBIT), help="Mbit/s of the slowest link")
    parser.add_argument("--no-chains", action="store_true", help="leave out the table of U-Net and T5")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    options = parser.parse_args()
    if not options.virtual:
        parser.error("give --virtual: there is no other part so far")
    result = virtual(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)
    return 1 if result["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
