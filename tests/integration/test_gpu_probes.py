"""The probes and the benchmark for a GPU run on a CPU at tiny sizes; no part is lost to another that fails, dies or
hangs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU = Path(__file__).parents[2] / "benchmarks" / "gpu"
UNRULY = """
import os, signal, sys, time
from parts import Probe, SkipPart
PROBE = Probe(99, __file__)

@PROBE.part(0.5)
def good(bench):
    yield {"value": 1}

@PROBE.part(0.5)
def raises(bench):
    yield {"value": 2}
    raise ValueError("on purpose")

@PROBE.part(0.5)
def dies(bench):
    yield {"value": 3}
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)

@PROBE.part(0.5)
def after(bench):
    raise SkipPart("there is nothing to see")
    yield

@PROBE.part(0.5, needs_cuda="there is no device")
def device(bench):
    yield {"value": 4}

@PROBE.part(0.5, alone=True)
def alone(bench):
    yield {"pid": os.getpid()}

@PROBE.part(0.5)
def late(bench):
    yield {"value": 5}

sys.exit(PROBE.main())
"""
HANGING = """
import os, sys, time
from parts import Probe
PROBE = Probe(98, __file__)

@PROBE.part(0.5, alone=True)
def hangs(bench):
    child = os.fork()
    if child == 0:
        time.sleep(600)
    yield {"pids": [os.getpid(), child]}
    time.sleep(600)

@PROBE.part(0.5)
def late(bench):
    yield {"value": 5}

sys.exit(PROBE.main())
"""


def run(script: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(GPU), *sys.path])}
    command = [sys.executable, str(script), "--device", "cpu", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_no_part_is_lost_to_another(tmp_path: Path) -> None:
    script = tmp_path / "unruly.py"
    script.write_text(UNRULY)
    code, lines = run(script, "--seconds", "240", "--out", str(tmp_path / "lines"))
    assert code == 1
    assert lines[0]["machine"]["torch"]
    assert [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()] == lines
    outcomes = {line["part"]: line for line in lines if "outcome" in line}
    assert {name: line["outcome"] for name, line in outcomes.items()} == {
        "good": "done",
        "raises": "failed",
        "dies": "died",
        "after": "skipped",
        "device": "skipped",
        "alone": "done",
        "late": "done",
    }
    assert outcomes["raises"]["why"] == "ValueError: on purpose"
    assert outcomes["dies"]["why"] == "exit code -11" and "last words" in outcomes["dies"]["log"]
    assert outcomes["device"]["why"] == "there is no device"
    assert [line["value"] for line in lines if "value" in line] == [1, 2, 3, 5]


@pytest.mark.slow
def test_what_hangs_is_killed_with_all_that_it_has_started(tmp_path: Path) -> None:
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    code, lines = run(script, "--seconds", "6")
    assert code == 1
    outcomes = {line["part"]: line["outcome"] for line in lines if "outcome" in line}
    assert outcomes == {"hangs": "overran", "late": "not begun"}
    for pid in (pid for line in lines for pid in line.get("pids", ())):
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()


def test_parts_are_left_out_when_the_time_is_over(tmp_path: Path) -> None:
    script = tmp_path / "unruly.py"
    script.write_text(UNRULY)
    code, lines = run(script, "--seconds", "1", "--part", "good", "--part", "device")
    assert code == 0
    outcomes = {line["part"]: line["outcome"] for line in lines if "outcome" in line}
    assert outcomes == {"good": "not begun", "device": "skipped"}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 11))
def test_every_probe_runs_at_tiny_sizes_on_a_cpu(number: int, tmp_path: Path) -> None:
    (script,) = GPU.glob(f"probe_{number:02}_*.py")
    code, lines = run(script, "--small", "--seconds", "240")
    outcomes = {line["part"]: line for line in lines if "outcome" in line}
    assert code == 0 and outcomes, lines
    for line in outcomes.values():
        assert line["outcome"] == "done" or (line["outcome"] == "skipped" and line["why"]), line


@pytest.mark.slow
def test_the_driver_runs_what_tells_most_first_and_within_its_budget(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(GPU / "probes.py"), "--device", "cpu", "--small", "--out", str(tmp_path)]
    options = ["--only", "8,3", "--skip-part", "pinning", "--budget-s", "100"]
    result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=200, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    (path,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["order"] == [3, 8]
    assert {line["probe"] for line in lines[1:]} == {3, 8}
    assert "pinning" not in {line.get("part") for line in lines}
    refused = subprocess.run([*command, "--only", "3,11"], capture_output=True, text=True, timeout=60, env=environment)
    assert refused.returncode == 2 and "no probes [11]" in refused.stderr


def fault_free(*arguments: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(GPU / "fault_free.py"), "--device", "cpu", "--small", "--json", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_the_benchmark_begins_nothing_when_its_budget_is_spent(tmp_path: Path) -> None:
    document = fault_free("--budget-s", "1", "--out", str(tmp_path / "rows"))
    assert set(document["outcomes"].values()) == {"not begun"} and len(document["outcomes"]) == 5
    written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert written == [{"machine": document["machine"]}, *document["rows"]]


@pytest.mark.slow
def test_the_benchmark_beside_plain_pytorch_runs_from_end_to_end(tmp_path: Path) -> None:
    document = fault_free("--budget-s", "800", "--out", str(tmp_path / "rows"))
    assert set(document["outcomes"].values()) == {"done"}, document
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        if "outcome" not in row:
            rows.setdefault(row["part"], []).append(row)
    for part in ("curve_gpt", "curve_llama"):
        programs = ["plain, deterministic", "plain, anything allowed", "bitwise", "scaled"]
        # What is known after each round, and in the end; those that do not run in turns end one after the other.
        ends = [row for row in rows[part] if row["rounds"] == "all"]
        assert len(rows[part]) == 2 * len(ends)
        assert [row["program"] for row in ends] == programs * 2
        rows[part] = ends
        for row in rows[part]:
            assert row["tokens_per_s"] > 0
            # The same batches and initial values, sums of another type.
            assert abs(row["last_loss"] - rows[part][0 if row["tokens"] == 32 else 4]["last_loss"]) < 0.01
        assert all(row["ratio"] > 0 and row["phases_s"]["vote"] > 0 for row in rows[part] if "ratio" in row)
    (company,) = rows["company"]
    assert company["same_loss"] and company["ratio"] > 0 and company["four_phases_s"]["gather"] > 0
    *each, kills = rows["kills"]
    assert len(each) == kills["kills"] == 2 and kills["same_bits"] and kills["critical_bytes"] == 0
    assert kills["needed_s"] > 0.15 and kills["worst_s"] >= kills["median_s"] > 0
    (memory,) = rows["memory"]
    assert memory["predicted_bytes"] == sum(memory["parts"].values()) < memory["process_peak_bytes"]
