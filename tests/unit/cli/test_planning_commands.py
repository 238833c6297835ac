"""`elaswave plan`, `simulate`, `compare`: what they print, their JSON, and how they refuse bad input."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.unit.observability.test_run_costs import configuration, log_of, report

from elaswave.cli.main import main
from elaswave.cli.whatif.cluster_options import ClusterOptions, choose_lost, describe_setting
from elaswave.config.load import load_config
from elaswave.config.policy_code import policies
from elaswave.config.presets import device_preset
from elaswave.observability.events import EventLog
from elaswave.observability.run_folder import open_run_dir
from elaswave.planning.policy.policy_metadata import policy_metadata_of

PREDICTED_ONLY = {name for name, planner in policies().items() if not policy_metadata_of(planner).runs_here}

SMALL = ["--workers", "12", "--stages", "3", "--model", "llama-2-7b", "--device", "h100", "--microbatches", "6"]
TRACE = "0,add,a\n0,add,b\n0,add,c\n0,add,d\n3600000,remove,b\n7200000,add,b\n10800000,remove,a\n14400000,add,e\n"


def output(capsys: Any, *arguments: str) -> str:
    assert main(list(arguments)) == 0
    text: str = capsys.readouterr().out
    return text


def document(capsys: Any, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output(capsys, *arguments, "--json"))
    return found


# ----------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_shows_before_and_after(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = output(capsys, "plan", *SMALL, "--lose", "5", "--pattern", "clustered")
    assert text.startswith("llama-2-7b on 12 x h100, 3 stages x 4 replicas, 24 micro-batches of 1 x 4096 tokens")
    before, after = text.split("\nafter: ")
    for part in (before, after):
        assert part.count("<- bottleneck") == 1
        assert "stage" in part and "0 to " in part
    assert "of before with 7 of 12 workers" in after
    assert "\nreason: " in after and "\nrandomness: " in after


def test_a_limit_of_power_that_nobody_can_keep_is_refused(capsys: Any) -> None:
    assert main(["plan", *SMALL, "--power-limit-kw", "0.1"]) == 2
    error = capsys.readouterr().err
    assert "cannot run: power: the workers would draw" in error and "give a higher --power-limit-kw" in error


def test_fences_shorten_steps_over_slow_links_and_stand_behind_layers(capsys: Any, tmp_path: Path) -> None:
    link = tmp_path / "slow.toml"
    link.write_text('[links.slow]\nbandwidth_bytes_per_s = 1e6\nlatency_s = 0.01\nsource = "a test"\n')
    slow = [*SMALL, "--within-node", str(link), "--between-nodes", str(link), "--lose", "0"]
    fences = [part for block in range(32) for part in ("--fence", f"block.{block}:int4")]
    plain, fenced = (document(capsys, "plan", *slow, *more)["before"]["step_time_s"] for more in ([], fences))
    assert fenced < plain
    assert main(["plan", *SMALL, "--fence", "block.40:int8"]) == 2
    assert "the model has no layer block.40; a fence stands behind one of embedding, block.0" in capsys.readouterr().err


def test_a_plan_as_json(capsys: Any) -> None:
    found = document(capsys, "plan", *SMALL, "--lose", "1", "--seed", "3")
    assert len(found["lost"]) == 1
    after = found["after"]
    assert after["policy"] == "elaswave" and after["reason"]
    assert after["throughput"] == pytest.approx(24 * 4096 / after["step_time_s"])
    assert after["throughput_fraction"] == pytest.approx(after["throughput"] / found["before"]["throughput"])
    for layout, num_workers in (("before", 12), ("after", 11)):
        stages = found[layout]["stages"]
        assert sum(len(stage["workers"]) for stage in stages) == num_workers
        assert sum(stage["is_bottleneck"] for stage in stages) == 1
        assert stages[0]["start"] == 0 and stages[-1]["stop"] == 34
        assert all(stage["free_memory_bytes"] >= 0 for stage in stages)
    assert found["plan"]["policy"] == "elaswave"
    assert found["plan"]["num_microbatches"] == 24
    again = document(capsys, "plan", *SMALL, "--lose", "1", "--seed", "3")
    assert again == found


def test_a_plans_step_can_be_looked_at(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    text = " ".join(output(capsys, "plan", *SMALL, "--lose", "1", "--trace", str(path)).split())  # lines are broken
    assert f"trace: {path}" in text and "bubbles by stage: " in text
    traced = json.loads(path.read_text())["traceEvents"]
    assert len({event["pid"] for event in traced if event["ph"] == "X"}) == 11
    found = document(capsys, "plan", *SMALL, "--lose", "1", "--trace", str(path))
    simulated = found["simulated_step"]
    assert simulated["step_s"] >= simulated["uncontended_s"] * (1 - 1e-9)
    assert simulated["uncontended_s"] == pytest.approx(found["after"]["step_time_s"])
    assert all(0 <= share < 1 for share in simulated["stage_bubble_fractions"])
    assert main(["plan", *SMALL, "--trace", str(tmp_path / "none" / "step.json")]) == 2
    assert "step.json" in capsys.readouterr().err
    huge = ["--workers", "96", "--stages", "8", "--device", "h200", "--microbatches", "2000"]
    assert main(["plan", *huge, "--trace", str(path)]) == 2
    assert "--trace: a step has" in capsys.readouterr().err


def test_nobody_lost_shows_the_layout_alone(capsys: Any) -> None:
    assert "no worker is lost" in output(capsys, "plan", *SMALL, "--lose", "0")
    assert "after" not in document(capsys, "plan", *SMALL, "--lose", "0")


def test_any_policy_can_plan(capsys: Any) -> None:
    assert document(capsys, "plan", *SMALL, "--policy", "recycle")["after"]["policy"] == "recycle"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has ended, as far as its log tells."""
    from datetime import UTC, datetime

    config = load_config(None, ["layout.widths=[2,2]", "layout.layers=[3,3]"])
    with open_run_dir(tmp_path / "run", config, now=datetime(2026, 1, 1, tzinfo=UTC)) as folder:
        with EventLog(folder / "events.jsonl") as log:
            for event in log_of(configuration(), timings=[report(5), report(6, 1.5)]):
                log.write(event)
        return folder


def test_a_plan_for_a_run(capsys: Any, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = output(capsys, "plan", str(run), "--lose", "1")
    assert "layout 2x2, 8 micro-batches of 8 x 64 tokens" in text
    assert "costs measured, of 2 reports; a step is predicted to take" in text
    assert "than the median of 5 steps that were run" in text
    assert "schedule 1f1b" in text and "frequency: off" in text  # what the run's own planner may do
    assert "memory" not in text
    found = document(capsys, "plan", str(run), "--lose", "1")
    assert found["num_reports"] == 2 and found["num_steps"] == 5
    assert found["speeds"]["3"] == pytest.approx(0.8)
    assert found["predicted_step_s"] == pytest.approx(found["before"]["step_time_s"], rel=0.05)
    assert len(found["lost"]) == 1


def test_a_plan_for_a_run_without_timings(capsys: Any, run: Path) -> None:
    path = run / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"kind":"timings"' not in line))
    assert "costs as described, scaled to the steps" in " ".join(output(capsys, "plan", str(run)).split())


def test_a_plan_for_a_run_on_emulated_devices_begins_at_the_base_level(capsys: Any, tmp_path: Path) -> None:
    from datetime import UTC, datetime

    overrides = ["layout.widths=[2,2]", "device.kind=emulated", "device.model=gpt2-small", "model.num_layers=12"]
    config = load_config(None, [*overrides, "device.name=ascend-910b", "device.frequency=emulated"])
    with open_run_dir(tmp_path / "run", config, now=datetime(2026, 1, 1, tzinfo=UTC)) as folder:
        with EventLog(folder / "events.jsonl") as log:
            for event in log_of(config):
                log.write(event)
    found = document(capsys, "plan", str(folder), "--lose", "1")
    assert [stage["speed_levels"] for stage in found["before"]["stages"]] == [[1, 1], [1, 1]]
    device = device_preset("ascend-910b").device
    assert 0 < found["plan"]["power_w"] <= 4 * device.levels[device.base_level].power_w
    restart = document(capsys, "plan", str(folder), "--lose", "1", "--policy", "full_restart")
    assert restart["after"]["pause_s"] == config.elastic.restart_s


def test_a_trace_is_one_scenario(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    assert main(["simulate", "--trace", str(tmp_path / "trace.csv"), "--stages", "1", "--seeds", "3"]) == 2
    assert "--trace is one scenario, in which nothing is drawn; leave out --seeds 3" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------------- compare


def test_policies_are_compared_on_the_same_loss(capsys: Any) -> None:
    found = document(capsys, "compare", *SMALL, "--lose", "2")
    entries = {entry["policy"]: entry for entry in found["policies"]}
    assert list(entries) == list(policies())
    for entry in entries.values():
        assert {"policy", "throughput", "capacity_fraction", "step_time_s", "pause_s", "reason"} <= set(entry)
        if entry["feasible"]:
            assert entry["throughput"] == pytest.approx(entry["num_microbatches"] * 4096 / entry["step_time_s"])
    assert entries["torchft"]["num_microbatches"] < 24 and not entries["torchft"]["keeps_batch"]
    assert entries["elaswave"]["keeps_batch"]
    best = max(entry["throughput"] for name, entry in entries.items() if name not in PREDICTED_ONLY)
    assert entries["elaswave"]["throughput"] > 0.9 * best
    assert found["undisturbed"]["num_workers"] == 12


def test_the_comparison_as_a_table(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    text = output(capsys, "compare", *SMALL, "--lose", "2", "--policies", "elaswave, torchft")
    rows = [line.split()[0] for line in text.splitlines() if line and not line.startswith(" ")]
    assert rows[2:11] == [
        *("from", "policy", "undisturbed", "elaswave", "torchft"),
        *("each", "policy", "elaswave", "torchft"),
    ]
    assert "elaswave: " in text and "torchft: " in text


def test_capacity_is_measured_by_one_healthy_time_for_all(capsys: Any) -> None:
    arguments = ["compare", *SMALL, "--lose", "2", "--policies"]
    both = document(capsys, *arguments, "recycle,oobleck")
    alone = document(capsys, *arguments, "recycle")
    assert both["healthy_step_time_s"] == alone["healthy_step_time_s"] <= both["undisturbed"]["step_time_s"]
    assert both["policies"][0]["capacity_fraction"] == alone["policies"][0]["capacity_fraction"]
    for entry in [*both["policies"], *both["own_starts"]]:
        whole = entry["num_microbatches"] * 4096 / both["healthy_step_time_s"]
        assert entry["capacity_fraction"] == pytest.approx(entry["throughput"] / (whole * 10 / 12))


def test_ratios_are_given_from_both_starts(capsys: Any) -> None:
    found = document(capsys, "compare", *SMALL, "--lose", "2", "--policies", "elaswave,recycle,oobleck")
    same, own = found["policies"], found["own_starts"]
    assert [entry["policy"] for entry in same] == [entry["policy"] for entry in own]
    assert {entry["start"]["step_time_s"] for entry in same} == {found["undisturbed"]["step_time_s"]}
    for before, entry in zip(same, own, strict=True):
        assert entry["start"]["step_time_s"] <= before["start"]["step_time_s"]
        assert entry["elaswave_times"] == pytest.approx(own[0]["throughput"] / entry["throughput"])
    assert min(entry["start"]["step_time_s"] for entry in own) == own[0]["start"]["step_time_s"]


def test_a_policy_without_a_plan_says_so(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    # If three replicas lose one worker each, none is left for torchft.
    arguments = ["compare", *SMALL, "--lose", "4", "--policies", "elaswave,torchft"]
    entry = document(capsys, *arguments)["policies"][1]
    assert (entry["feasible"], entry["throughput"], entry["step_time_s"]) == (False, 0.0, None)
    assert entry["reason"].startswith("no plan: ")
    assert "\ntorchft  " in output(capsys, *arguments)


@pytest.mark.parametrize(
    ("suffix", "magic"), [("png", b"\x89PNG"), pytest.param("svg", b"<?xml", marks=pytest.mark.slow)]
)
def test_plots(capsys: Any, tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"plot.{suffix}"
    output(capsys, "compare", *SMALL, "--policies", "elaswave,recycle", "--lose", "1", "--plot", str(path))
    assert path.read_bytes().startswith(magic)
    life = ["simulate", *SMALL, "--days", "1", "--rate", "0.1"]
    output(capsys, *life, "--policy", "oobleck", "--policy", "torchft", "--plot", str(path))
    assert path.read_bytes().startswith(magic)


def test_a_plot_without_matplotlib(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", *SMALL, "--plot", str(tmp_path / "plot.png")]) == 2
    assert "pip install 'elaswave[plots]'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- simulate


def test_a_simulation_adds_up(capsys: Any) -> None:
    arguments = ["simulate", *SMALL, "--days", "1", "--rate", "0.3", "--seeds", "2", "--stragglers", "0.1"]
    arguments += ["--policy", "recycle"]
    found = document(capsys, *arguments)
    assert found["policy"] == "recycle" and found["summary"]["num_seeds"] == 2
    assert len(found["scenarios"]) == 2
    for outcome in found["scenarios"]:
        parts = sum(outcome[name] for name in ("useful_s", "lost_work_s", "waiting_s", "slower_s"))
        paused_s = sum(outcome["pauses_s"].values())
        assert parts + paused_s == pytest.approx(86400)
        unproductive_s = paused_s + outcome["waiting_s"] + outcome["lost_training_s"]
        assert outcome["ettr"] == pytest.approx(1 - unproductive_s / 86400)
    assert found["tokens_per_s"] == pytest.approx(
        found["summary"]["goodput"]["mean"] * found["undisturbed_tokens_per_s"]
    )
    assert document(capsys, *arguments) == found


def test_a_simulation_for_people(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["simulate", *SMALL, "--days", "20", "--rate", "llama3", "--seeds", "2"]
    text = output(capsys, *arguments, "--policy", "elaswave")
    assert "The Llama 3 Herd of Models" in text
    assert "elaswave: goodput " in text and " +- " in text and "effective training time (ETTR) " in text
    for part in ("useful", "lost work", "waiting for workers", "slower than undisturbed"):
        assert f"\n{part} " in text
    assert "MWh" in text


def test_all_policies_are_simulated_in_one_call(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["simulate", *SMALL, "--days", "20", "--rate", "llama3"]
    lines = output(capsys, *arguments).splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("policy "))
    columns = ["policy", "goodput", "ETTR", "of capacity", "went back", "no copies", "no workers"]
    columns += ["lost work", "pauses", "waiting", "slower"]
    assert lines[header].split() == " ".join(columns).split()
    rows = [line.split() for line in lines[header + 1 :]]
    assert [row[0] for row in rows] == list(policies())
    faster = [row[0] for row in rows if float(row[1].rstrip("%")) > float(row[2].rstrip("%"))]
    assert not faster, "hardly anything is lost, and all are measured by the fastest fault-free job that any makes"
    assert "\nfault-free: " in "\n".join(lines)
    found = document(capsys, *arguments, "--policy", "oobleck", "--policy", "torchft", "--seed", "3")
    assert [entry["policy"] for entry in found["policies"]] == ["oobleck", "torchft"]
    for entry in found["policies"]:
        assert entry["tokens_per_s"] == pytest.approx(
            entry["summary"]["goodput"]["mean"] * found["undisturbed_tokens_per_s"]
        )
        assert 0 < entry["summary"]["goodput"]["mean"] < entry["summary"]["ettr"]["mean"] <= 1
    alone = document(capsys, *arguments, "--policy", "torchft", "--seed", "3")
    assert {key: alone[key] for key in found["policies"][1]} == found["policies"][1], "the same as without the others"


def test_newcomers_racks_and_rates_of_a_trace(capsys: Any, tmp_path: Path) -> None:
    small = ["simulate", *SMALL, "--policy", "torchft", "--workers-per-node", "2", "--nodes-per-rack", "2"]
    found = document(capsys, *small, "--rate", "0.5", "--weibull-shape", "0.5", "--rack-losses", "0.5")
    assert "Weibull shape 0.5; each rack lost 0.5 times a day" in found["setting"]
    assert found["scenarios"][0]["num_events"]["lost"] > 10
    jobs = tmp_path / "trace_seren.csv"
    jobs.write_text(
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time\n"
        "1,u,4,32,1,Other,NODE_FAIL,a,b,c,86400,1,2764800.0\n"
    )
    found = document(capsys, *small, "--rate", str(jobs))
    assert "1 jobs ended by the crash of a node in 32 GPU days" in found["setting"]


def test_a_poll_log_is_lived_through(capsys: Any, tmp_path: Path) -> None:
    """A log of counts leaves open which machines went, so several scenarios can be drawn of it."""
    log = tmp_path / "gcloud.txt"
    counts = {"11": 8, "12": 6, "13": 8, "15": 8}
    log.write_text("".join(f"2021-12-11, {hour}:00:00, {count}\n" for hour, count in counts.items()))
    cluster = ["--stages", "2", "--model", "gpt2-xl", "--device", "a100", "--policy", "recycle"]
    found = document(capsys, "simulate", "--trace", str(log), *cluster, "--seeds", "2")
    assert [outcome["duration_s"] for outcome in found["scenarios"]] == [14400, 14400]
    assert found["summary"]["availability"]["mean"] == pytest.approx(30 / 32)
    assert main(["simulate", "--trace", str(log), *cluster, "--trace-format", "philly"]) == 2
    assert "line 1 has the time '2021-12-11'" in capsys.readouterr().err


def test_a_trace_is_lived_through(capsys: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    cluster = ["--model", "gpt2-xl", "--device", "a100", "--stages", "2", "--workers-per-node", "2"]
    found = document(capsys, "simulate", "--trace", str(trace), *cluster, "--policy", "recycle")
    assert found["scenarios"][0]["num_events"] == {"joined": 2, "lost": 2}
    assert found["scenarios"][0]["duration_s"] == 14400
    assert "gpt2-xl on 8 x a100, 2 stages" in found["setting"]
    trace.write_text(TRACE + "9999999999,explode,a\n")
    assert main(["simulate", "--trace", str(trace), *cluster]) == 2
    assert "line 9 says 'explode'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "gpt5"], "there is no model 'gpt5'; choose one of gpt2-small"),
        (["plan", "--device", "abacus"], "there is no device 'abacus'"),
        (["plan", "--between-nodes", "string"], "there is no link 'string'"),
        (["plan", "--workers", "10", "--stages", "4"], "10 workers cannot be split into 4 stages"),
        (["plan", "--workers", "60", "--stages", "60", "--model", "gpt2-xl"], "60 stages for the 50 layers"),
        (["plan", *SMALL, "--lose", "12"], "12 of 12 workers would be lost"),
        (["plan", *SMALL, "--efficiency", "2"], "'--efficiency': '2' is not a number above 0 and at most 1"),
        (["plan", *SMALL, "--tensor-parallel", "16"], "16 devices per worker"),
        (["plan", *SMALL, "--power-limit-kw", "-1"], "'--power-limit-kw': '-1' is not a number above 0"),
        (["plan", *SMALL, "--lose", "99"], "99 of 12 workers would be lost"),
        (["plan", "--workers", "12", "--stages", "4", "--lose", "99"], "99 of 12 workers would be lost"),
        (["compare", "--workers", "12", "--stages", "4", "--lose", "99"], "99 of 12 workers would be lost"),
        (["plan", "--workers", "8", "--stages", "1", "--model", "llama-2-70b"], "1 stages x 8 replicas does not fit"),
        (["plan", "--policy", "prayer"], "unknown policy 'prayer'"),
        (["plan", "--policy", "my_policy.py"], "or name your own as module:function or path/to/file.py:function"),
        (["plan", *SMALL, "--speed", "1=0.5", "--speed", "1=0.7"], "--speed 1=0.7: worker 1 has a speed already"),
        (["plan", "no-such-run"], "no such folder"),
        (["plan", "no-such-run", "--model", "gpt2-xl"], "--model describe a cluster, but RUN names a run"),
        (["compare", "--policies", "prayer"], "unknown policy 'prayer'"),
        (["compare", "--policies", "recycle,recycle"], "give each policy once"),
        (["compare", "--policies", ","], "give each policy once"),
        (["compare", "--lose", "0"], "nothing happens then"),
        (["compare", "--plot", "plot.gif"], "must end in .png or .svg"),
        (["compare", "--plot", "no-such-folder/plot.png"], "there is no folder"),
        (["simulate", "--policy", "prayer"], "unknown policy 'prayer'"),
        (["simulate", "--rate", "often"], "unknown failure rates 'often', and there is no file of that name"),
        (
            ["simulate", "--rate", "-1"],
            "--rate -1: losses per worker and day are a number of at least 0, or a name",
        ),
        (["simulate", "--repair-hours", "0"], "'--repair-hours': '0' is not a number above 0"),
        (["simulate", "--days", "0"], "'--days': '0' is not a number above 0"),
        (["simulate", "--days", "-1"], "'--days': '-1' is not a number above 0"),
        (["simulate", "--days", "nan"], "'--days': 'nan' is not a number above 0"),
        (["simulate", "--days", "inf"], "'--days': 'inf' is not a number above 0"),
        (["simulate", "--policy", "torchft", "--policy", "torchft"], "--policy torchft: give each policy once"),
        (["simulate", "--rate", "1e9", "--days", "0.001"], "96 workers would meet a loss every 9e-07 s"),
        (["simulate", "--rate", "1e9", "--days", "0.001"], "needed is 1 s between losses, at most 900 per worker and"),
        (
            ["simulate", "--rate", "800", "--days", "0.15", "--repair-hours", "0.01"],
            "are the most that are made: give fewer",
        ),
        (["simulate", "--rack-losses", "1"], "--rack-losses needs --nodes-per-rack"),
        (["simulate", "--weibull-shape", "1.2"], "weibull_shape is 1.2, needed: at least 0.2 and at most 1"),
        (["simulate", "--trace-format", "polls"], "--trace-format polls: there is no --trace that it could be"),
        (
            ["simulate", "--trace", "x", "--weibull-shape", "1", "--rack-losses", "1"],
            "leave out --weibull-shape, --rack",
        ),
        (["simulate", "--days", "1e9"], "9.09e+07 losses, repairs and slow-downs are expected, and 1,000,000 are"),
        (["simulate", "--days", "1e6", "--seeds", "12"], "1.09e+06 losses, repairs and slow-downs are expected"),
        (["simulate", "--stragglers", "1e9"], "repairs and slow-downs are expected, and 1,000,000 are the most"),
        (["simulate", "--rate", "nan"], "--rate nan: losses per worker and day are a number"),
        (["simulate", "--stragglers", "-1"], "'--stragglers': '-1' is not a number of at least 0"),
        (["simulate", "--power-limit-kw", "0"], "'--power-limit-kw': '0' is not a number above 0"),
        (["simulate", "--workers", "4", "--stages", "8"], "4 workers are too few for 8 stages; give fewer --stages"),
        (["simulate", "--trace", "no-such.csv"], "cannot read the trace no-such.csv"),
        (["simulate", "--trace", "x.csv", "--rate", "llama3", "--workers", "4"], "leave out --rate, --workers"),
        (["simulate", "--workers", "8", "--stages", "1", "--model", "llama-2-70b"], "try more --stages"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: Any, tmp_path: Path,
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


def test_a_trace_that_is_no_text(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe\x00")
    assert main(["simulate", "--trace", str(tmp_path / "trace.csv")]) == 2
    assert "is no text" in capsys.readouterr().err
    (tmp_path / "part-000.parquet").write_bytes(b"PAR1\x15\x04\xff\xfe")
    assert main(["simulate", "--trace", str(tmp_path / "part-000.parquet")]) == 2
    assert "is Parquet, as Alibaba's trace of GPUs of 2026" in capsys.readouterr().err


def test_a_trace_of_too_few_machines(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0,add,a\n5,remove,a\n")
    assert main(["simulate", "--trace", str(tmp_path / "trace.csv"), "--stages", "2"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "1 workers are too few for 2 stages, and " in told
    assert "trace.csv never has more at once; give fewer --stages, or more --workers-per-node" in told


def test_a_plot_that_cannot_be_written(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "plot.png").mkdir()
    assert main(["compare", *SMALL, "--lose", "1", "--policies", "recycle", "--plot", str(tmp_path / "plot.png")]) == 2
    assert "plot.png" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- who is lost


def test_patterns_of_losses() -> None:
    options = ClusterOptions(workers=24, stages=4, model="gpt2-xl", device="a100", microbatches=4)
    allocation = describe_setting(options).allocation
    stage_of = {
        worker: index for index, stage in enumerate(allocation.chains[0].stages) for worker in stage.workers.tolist()
    }
    replica_of = {
        worker: index for stage in allocation.chains[0].stages for index, worker in enumerate(stage.workers.tolist())
    }
    for seed in range(20):
        for count in range(24):
            for pattern in ("spread", "clustered", "random"):
                lost = choose_lost(allocation, count, pattern, seed)
                assert len(set(lost)) == count and list(lost) == sorted(lost)
                assert lost == choose_lost(allocation, count, pattern, seed)
                per_stage = Counter(stage_of[worker] for worker in lost)
                if pattern == "spread" and count:
                    assert max(per_stage.values()) - min(per_stage[stage] for stage in range(4)) <= 1
                    if count <= 4:
                        assert len({replica_of[worker] for worker in lost}) == count
                if pattern == "clustered":
                    assert len(per_stage) == -(-count // 6)
    assert len({choose_lost(allocation, 3, "random", seed) for seed in range(20)}) > 10


# ------------------------------------------------------------------------------------------- speeds, one's own policy


@pytest.mark.slow
def test_slow_workers_are_planned_for(capsys: Any) -> None:
    slow = document(capsys, "compare", *SMALL, "--lose", "1", "--speed", "1=0.5", "--speed", "2=0.9",
                    "--policies", "recycle", "--json")  # fmt: skip
    even = document(capsys, "compare", *SMALL, "--lose", "1", "--policies", "recycle")
    for ours, theirs in zip(slow["policies"], even["policies"], strict=True):
        assert ours["throughput"] <= theirs["throughput"] * (1 + 1e-9)
    assert slow["undisturbed"]["step_time_s"] > even["undisturbed"]["step_time_s"]
    assert document(capsys, "plan", *SMALL, "--speed", "1=0.5", "--policy", "recycle")["after"]["step_time_s"] > 0


MY_POLICY = str(Path(__file__).parents[3] / "examples" / "policies" / "my_policy.py") + ":plan"


def test_a_policy_of_ones_own_is_compared_planned_and_simulated(capsys: Any) -> None:
    entries = document(capsys, "compare", *SMALL, "--policy", MY_POLICY, "--policies", "recycle")["policies"]
    assert [entry["policy"] for entry in entries] == ["recycle", MY_POLICY]
    assert entries[1]["pause_s"] == 1.0 and entries[1]["keeps_batch"]
    assert document(capsys, "plan", *SMALL, "--policy", MY_POLICY)["after"]["policy"] == "my policy"
    found = document(capsys, "simulate", *SMALL, "--days", "30", "--rate", "0.01", "--policy", MY_POLICY)
    assert found["policy"] == MY_POLICY
    assert 0 < found["summary"]["goodput"]["mean"] <= 1


@pytest.mark.parametrize(
    ("body", "name", "message"),
    [
        ("", "policy.py:plan", "has no function 'plan'"),
        ("plan = 3", "policy.py:plan", "'plan' in policy.py is of type int, no function"),
        ("raise RuntimeError('broken')", "policy.py:plan", "loading it fails: RuntimeError: broken"),
        ("def plan(*_): return 3", "policy.py:plan", "returned int, needed: elaswave.planning.plan.Plan"),
        (
            "from elaswave.planning.plan import Plan\n"
            "def plan(cluster, costs, allocation, event):\n"
            "    return Plan(policy='p', allocation=allocation, predicted_step_s=1.0, predicted_pause_s=0.0)",
            "policy.py:plan",
            "returned an allocation that cannot be: ",  # the lost worker is still in it
        ),
        ("", "absent.py:plan", "there is no file"),
        ("", "no_such_module_at_all:plan", "loading it fails: ModuleNotFoundError"),
        ("", "nobody", "unknown policy 'nobody'"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(
    body: str, name: str, message: str, capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.py").write_text(body)
    assert main(["plan", *SMALL, "--policy", name]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("speed", "message"),
    [("1", "needed is WORKER=F, as 3=0.7"), ("99=0.5", "there are the workers 0 to"), ("1=0", "a number above 0")],
)
def test_a_speed_that_cannot_be_is_refused(speed: str, message: str, capsys: Any) -> None:
    assert main(["compare", *SMALL, "--speed", speed]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_run_has_measured_speeds(capsys: Any, tmp_path: Path) -> None:
    assert main(["plan", str(tmp_path), "--speed", "1=0.5"]) == 2
    assert "whose speeds are measured" in " ".join(capsys.readouterr().err.split())


# ---------------------------------------------------------------------------------------------------------------- racks


def test_racks_are_survived_whole_where_they_are_known(capsys: Any) -> None:
    hosts_only = document(capsys, "plan", *SMALL, "--workers", "48", "--lose", "0")["before"]
    assert hosts_only["survival"]["num_racks"] == 0 and "rack" not in hosts_only["survives"]
    racks = document(capsys, "plan", *SMALL, "--workers", "48", "--lose", "0", "--nodes-per-rack", "3")["before"]
    assert (racks["survival"]["racks"], racks["survival"]["num_racks"]) == (2, 2)
    assert racks["survives"].endswith("; any whole host; any whole rack")
    compared = document(capsys, "compare", *SMALL, "--workers", "48", "--lose", "1", "--nodes-per-rack", "3",
                        "--policies", "elaswave,torchft")["policies"]  # fmt: skip
    assert compared[0]["start"]["survival"]["racks"] == 2
    assert "whole rack" in compared[1]["start"]["survives"]


@pytest.mark.parametrize("command", ["plan", "compare"])
def test_racks_beside_sites_are_refused(capsys: Any, command: str) -> None:
    network = str(Path(__file__).parents[3] / "examples/far_apart/four_regions.toml")
    assert main([command, "--network", network, "--nodes-per-rack", "2"]) == 2
    assert "--nodes-per-rack is of a described cluster, but --network has sites" in capsys.readouterr().err


def test_racks_of_a_run_are_refused(capsys: Any, tmp_path: Path) -> None:
    assert main(["plan", str(tmp_path), "--nodes-per-rack", "2"]) == 2
    assert "but RUN has hosts whose labels name racks" in capsys.readouterr().err
