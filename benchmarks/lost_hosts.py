"""How long until every survivor computes again after a host was lost, and whether state moved for it.

    python benchmarks/lost_hosts.py [--jobs 10] [--faults kill cut] [--quick] [--json]

Real jobs of four hosts with two workers each, on emulated devices. Hosts are namespaces of the kernel, joined by a
relay with a round trip of 1.3 ms (`tests/hosts`): needs root, and a checkout. One host is killed (its kernel lives, and
closes connections), or cut off (nobody is told). See README.md beside this file.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import exit_on_sigterm, machine, print_header
from tests.agents import Agents
from tests.hosts.world import World, lacking

from elaswave.observability.result import read_result

NUM_HOSTS = 4
DELAY_S = 0.00065
"""Of each direction."""
NEEDED_S = {"kill": (0.0, 0.150), "cut": (1.5, 3.0)}
"""Least and most of the median: until all survivors compute; until the loss of a host that is cut off is noticed."""
FIRST_STEP = 3
END_S = 1200.0
"""Bound of a job, also on a machine that is busy with others."""
SETTINGS: dict[str, Any] = {
    "model.num_layers": 12,
    "model.hidden_size": 16,
    "model.num_heads": 2,
    "model.context_length": 16,
    "batch.num_microbatches": 16,
    "batch.microbatch_size": 1,
    "layout.widths": "[4, 4]",
    "device.kind": "emulated",
    "device.model": "gpt2-small",
    "device.name": "a100",
    "elastic.respawn": False,
    "elastic.rebalance": False,
    "control.hosts": NUM_HOSTS,
    "net.trusted": True,
}


def main() -> int:
    """Runs the benchmark; the exit code is 1 if a target was missed, state moved or bits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10, help="of each fault; one host is lost in each")
    parser.add_argument("--faults", nargs="+", choices=list(NEEDED_S), default=list(NEEDED_S))
    parser.add_argument("--steps", type=int, default=14, help="of each job")
    parser.add_argument("--time-scale", type=float, default=1.0, help="device.time_scale: how slow the devices are")
    parser.add_argument("--seed", type=int, default=1, help="of who is lost")
    parser.add_argument("--quick", action="store_true", help="one job of each fault, to see that all runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args()
    exit_on_sigterm()
    if reason := lacking():
        print(reason, file=sys.stderr)
        return 1
    if options.quick:
        options.jobs = 1
    draw = random.Random(options.seed)
    where = machine()
    settings = {**SETTINGS, "run.steps": options.steps, "device.time_scale": options.time_scale}
    rows = [row(fault, [lose_one(fault, settings, draw) for _ in range(options.jobs)]) for fault in options.faults]
    where["load_after"] = machine()["load_before"]
    print(json.dumps({"machine": where, "rows": rows}, indent=2)) if options.json else print_table(rows, where)
    return 1 if any(each["missed"] or each["critical_bytes"] or not each["same_bits"] for each in rows) else 0


def lose_one(fault: str, settings: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """One job, in which any host but the coordinator's is lost."""
    folder = Path(tempfile.mkdtemp(prefix="elaswave-bench-"))
    try:
        with (
            World(NUM_HOSTS, delay_s=DELAY_S) as world,
            Agents(folder, settings, f"{world.hosts[0].address}:7077") as agents,
        ):
            started = [agents.start(f"h{host.number}", creates_job=True, before=host.enter()) for host in world.hosts]
            agents.wait_for_step(FIRST_STEP + draw.randrange(4))
            index = draw.randrange(1, NUM_HOSTS)
            struck_s = time.time()
            world.hosts[index].kill() if fault == "kill" else world.cut(world.hosts[index])
            survivors = [agent for at, agent in enumerate(started) if at != index]
            codes = [agent.end(END_S) for agent in survivors]
            assert codes == [0] * len(survivors), [agent.text for agent in survivors]
            world.heal()
            with contextlib.suppress(AssertionError):
                started[index].end(60.0)
            if started[index].process.poll() is None:
                started[index].signal(signal.SIGKILL)
            result = read_result(agents.run_dir)
            detect_s = _generation_began_s(agents.run_dir) - struck_s
        losses = [each for each in result.recoveries if each.kind == "lost"]
        assert len({each.generation for each in losses}) == 1, losses
        waited_s = max(each.total_s - each.redo_s for each in losses)
        print(
            f"{fault}: noticed after {detect_s:.3f} s, all compute after {detect_s + waited_s:.3f} s", file=sys.stderr
        )
        return {
            "detect_s": detect_s,
            "waited_s": detect_s + waited_s,
            "critical_bytes": sum(each.critical_bytes for each in losses),
            "digest": result.state_digest,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _generation_began_s(run_dir: Path) -> float:
    """When the coordinator said that a host is lost, by the clock of the day: its monotonic one is its host's own."""
    lines = (run_dir / "logs" / "coordinator.log").read_text().splitlines()
    line = next(line for line in lines if " generation 2: " in line)
    return datetime.strptime(" ".join(line.split()[:2]), "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()


def row(fault: str, losses: list[dict[str, Any]]) -> dict[str, Any]:
    """All jobs with one fault."""
    key = "waited_s" if fault == "kill" else "detect_s"
    least_s, most_s = NEEDED_S[fault]
    median_s = statistics.median(each[key] for each in losses)
    return {
        "fault": fault,
        "jobs": len(losses),
        "detect_s": statistics.median(each["detect_s"] for each in losses),
        "waited_s": statistics.median(each["waited_s"] for each in losses),
        "worst_s": max(each["waited_s"] for each in losses),
        "needed_s": most_s,
        "missed": not least_s <= median_s <= most_s,
        "critical_bytes": sum(each["critical_bytes"] for each in losses),
        "same_bits": len({each["digest"] for each in losses}) == 1,
    }


def print_table(rows: list[dict[str, Any]], where: dict[str, Any]) -> None:
    """The rows for people."""
    print_header(where)
    print(f"{NUM_HOSTS} hosts x 2 workers, round trip {2e3 * DELAY_S:.1f} ms; milliseconds, medians")
    names = f"{'fault':<5} {'jobs':>4} {'noticed':>8} {'all compute':>11} {'worst':>7}"
    print(f"{names} {'needed':>7} {'bytes moved':>11} bits")
    for each in rows:
        print(
            f"{each['fault']:<5} {each['jobs']:>4} {1e3 * each['detect_s']:>8.0f} {1e3 * each['waited_s']:>11.0f} "
            f"{1e3 * each['worst_s']:>7.0f} {1e3 * each['needed_s']:>7.0f} {each['critical_bytes']:>11} "
            f"{'same' if each['same_bits'] else 'NOT'}"
        )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
