"""The benchmarks run from end to end at tiny sizes. What they measure is not judged here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.etcd_processes import needs_etcd

from elaswave.config.policy_code import policies
from elaswave.config.presets import device_preset, model_shape
from elaswave.planning.costs.analytic import analytic_costs
from elaswave.planning.policy.policy_metadata import policy_metadata_of

PREDICTED_ONLY = {name for name, planner in policies().items() if not policy_metadata_of(planner).runs_here}

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    # 1: a target was missed, which such sizes may.
    assert result.returncode in (0, 1), result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_throughput_is_compared_with_plain_pytorch_which_learns_the_same() -> None:
    document = run("fault_free.py", "--sizes", "tiny", "--starts", "1", "--rounds", "2", "--consistency", "bitwise")
    assert [row["layout"] for row in document["rows"]] == ["1x1", "2x2"]
    for row in document["rows"]:
        assert row["plain_tokens_per_s"] > 0
        assert row["elaswave_tokens_per_s"] > 0
        assert row["ratio"] > 0
        assert row["cpu_ratio"] > 0
        # The same batches and initial values, other dropout draws.
        assert abs(row["plain_loss"] - row["elaswave_loss"]) < 0.05


@pytest.mark.slow
def test_throughput_is_compared_with_plain_transformers_which_learns_the_same() -> None:
    document = run(
        "fault_free.py", "--sizes", "gpt2-tiny", "--starts", "1", "--rounds", "1", "--consistency", "bitwise"
    )
    assert [row["layout"] for row in document["rows"]] == ["1x1", "2x2"]
    for row in document["rows"]:
        assert row["plain_tokens_per_s"] > 0 and row["elaswave_tokens_per_s"] > 0
        assert abs(row["plain_loss"] - row["elaswave_loss"]) < 1e-4, "dropout is off"


@pytest.mark.slow
@needs_etcd
def test_new_coordinators_are_waited_for() -> None:
    document = run("new_coordinator.py", "--rounds", "1", "--kinds", "process", "leader")
    assert [(row["kind"], row["median_s"] > 0) for row in document["rows"]] == [("process", True), ("leader", True)]


@pytest.mark.slow
def test_the_tax_of_every_part_is_measured() -> None:
    document = run("tax.py", "--size", "tiny", "--tokens", "64", "--starts", "1", "--rounds", "2")
    parts = ["exact sums", "followers", "vote and verification", "all together"]
    assert [row["part"] for row in document["rows"]] == parts
    assert all(row["step_s"] > 0 for row in document["rows"])


@pytest.mark.slow
def test_what_a_spot_check_takes_is_measured() -> None:
    document = run("spot_checks.py", "--sizes", "tiny", "--pairs", "2", "--runs", "100")
    (row,) = document["rows"]
    assert document["delays"]["later"]["a processor that is wrong in all it does"][1] <= 2 * 90 - 1
    assert document["one_run_of"] > 100
    assert row["run"][0] > 0 and row["average"] == pytest.approx((row["run"][1] + row["probe"][1]) / 2)


@pytest.mark.slow
def test_a_foreign_part_is_compared_with_the_same_layer() -> None:
    document = run("foreign.py", "--widths", "16", "--rows", "8", "--rounds", "2")
    (row,) = document["rows"]
    assert row["same_s"] > 0 and row["here_s"] > 0 and row["new_s"] > 0


@pytest.mark.slow
def test_codecs_and_trainings_with_fences_are_measured() -> None:
    document = run("fences.py", "codecs", "--steps", "2", "--rounds", "2")
    codecs = [row["codec"] for row in document["rows"]]
    assert codecs == ["bf16", "int8", "int4", "topk10", "topk10-own", "topk100", "topk100-own"]
    errors = [row["errors"]["normal"] for row in document["rows"]]
    assert errors == sorted(errors) and errors[0] > 0
    tiny = ("model.hidden_size=16", "run.eval_microbatches=1", "batch.num_microbatches=1")
    sizes = (part for each in tiny for part in ("--size", each))
    codecs = ("--codecs", "bf16", "int8", "int4")
    document = run("fences.py", "training", "--steps", "2", "--seeds", "1", "2", *codecs, *sizes)
    assert [(row["codec"], row["fences"]) for row in document["rows"]] == [
        ("dense", 0), *((codec, number) for number in (1, 4) for codec in ("bf16", "int8", "int4")),
    ]  # fmt: skip


@pytest.mark.slow
def test_the_checksum_of_partial_sums_is_measured() -> None:
    document = run("checksum.py", "--sizes", "tiny", "--steps", "8")
    (row,) = document["rows"]
    assert row["pairs"] == 4
    assert row["step_cpu_s"] > 0
    assert 0 < row["sums"] < 1
    assert len(row["added"]) == 3


@pytest.mark.slow
def test_gradients_that_alternate_cost_a_try_of_every_step() -> None:
    document = run("grids.py", "--size", "tiny", "--steps", "6", "--tensors", "alternates")
    assert [row["scale"] for row in document["errors"]] == [10.0**-decade for decade in range(3, 14)]
    (training,) = document["runs"]
    assert sorted(training["retries"].values()) == [1, 2, 3]  # measured; smaller in steps 3 and 5; larger in 2, 4, 6
    assert document["errors"][0]["exact"] < document["errors"][0]["float32"]
    assert document["errors"][-1]["exact"] > document["errors"][-1]["float32"]


@pytest.mark.slow
def test_sums_of_both_widths_on_real_gradients_are_within_their_bounds() -> None:
    document = run(
        "accumulator.py", "--steps", "5", "--set", "model.num_layers=2", "--set", "model.hidden_size=64",
        "--config", str(BENCHMARKS.parent / "examples" / "gpt-10m.toml"),
    )  # fmt: skip
    assert document["within bound"]
    wide, narrow, plain = (document["errors"][name] for name in ("64 bits", "48 bits", "float32"))
    assert wide["tensors"] == narrow["tensors"] == plain["tensors"] > 20
    assert narrow["median of tensors"] < plain["median of tensors"]
    assert narrow["elements off by 2**-20"] > wide["elements off by 2**-20"]


@pytest.mark.slow
def test_a_slow_worker_with_the_reaction_and_without() -> None:
    document = run("straggler.py", "--quick")
    (row,) = document["rows"]
    assert row["same_bits"]
    assert not row["without"]["changed_before_step"]  # on a busy machine the emulated pace does not tell who is slow
    assert 0 < row["divisible_s"] <= row["whole_s"]
    assert row["gain"] > 0 and row["without"]["of_whole"] > 0


@pytest.mark.slow
def test_a_job_that_loses_workers_and_gets_others_again_and_again_does_not_grow() -> None:
    document = run("soak.py", "--steps", "100", "--every", "20")
    assert document["good"] and document["same_bits"]
    assert document["losses"] == document["joins"] == 4
    assert document["ratio"] > 0


@pytest.mark.slow
def test_what_survivors_keep_of_a_step_does_not_run_again() -> None:
    document = run("salvage.py", "--quick")
    assert [row["fault"] for row in document["rows"]] == ["kill:1@3:reduce", "kill:6@3:vote"]
    for row in document["rows"]:
        assert row["with"]["outcome"] == row["without"]["outcome"] == "retried"
        assert 0 < row["with"]["recomputed"] < row["without"]["recomputed"] <= 8
        assert row["faster"] > 0
    assert len({row["digest"] for row in document["rows"]}) == 1


@pytest.mark.slow
def test_moves_of_layers_are_compared_with_stop_and_copy() -> None:
    document = run("migration.py", "--quick")
    (row,) = document["rows"]
    assert row["same_bits"]
    for name in ("elaswave", "stop_and_copy"):
        assert row[name]["moves"] == 1
        assert row[name]["sent_bytes"] >= row[name]["largest_bytes"] > 0
        assert row[name]["total_s"] > 0
        assert row[name]["held_s"] > 0
    assert row["stop_and_copy"]["copying_steps"] == 1


@pytest.mark.slow
def test_a_join_is_measured() -> None:
    document = run("join.py", "--quick", "--torchft", "0")
    (row,) = document["rows"]
    assert 0 < row["member_s"] <= row["computes_s"]
    assert row["longest"] > 0 and row["lost_worker_s"] > 0


@pytest.mark.slow
def test_repairs_of_communicators_are_compared() -> None:
    document = run("communicator.py", "--workers", "4", "--rounds", "1")
    rows = {row["communicator"]: row for row in document["rows"]}
    assert {"elaswave", "gloo destroy + init", "gloo new_group"} <= rows.keys()
    assert all(0 < row["repair_s"] <= row["ready_s"] for row in rows.values())
    assert rows["elaswave"]["times_ours"] == 1.0


@pytest.mark.slow
def test_reduce_and_gather_are_compared_with_gloo_in_time_and_bytes() -> None:
    document = run("reduce_gather.py", "--sizes", "tiny", "--workers", "4", "--rounds", "2")
    rows = {row["what"]: row for row in document["rows"]}
    assert rows.keys() == {"elaswave", "gloo reduce-scatter + all-gather", "gloo all-reduce"}
    assert all(row["s"] > 0 and row["times_ours"] > 0 for row in rows.values())
    # By arithmetic, of 4 workers with one follower: 3/4 of 8 bytes, 1/4 of 4 and 2/4 of 4, beside frames and padding.
    assert 9 <= rows["elaswave"]["received_per_parameter"] < 10
    assert rows["gloo all-reduce"]["received_per_parameter"] >= 6


@pytest.mark.slow
def test_recoveries_are_measured_and_keep_the_bits() -> None:
    document = run(
        "recovery.py", "--workers", "4", "--modes", "saturated", "--kills", "2", "--hangs", "0", "--torchft", "0"
    )
    (row,) = document["rows"]
    assert (row["workers"], row["mode"], row["fault"], row["count"]) == (4, "saturated", "kill", 2)
    assert row["same_bits"]
    assert 0 < row["median_s"] <= row["worst_s"]


@pytest.mark.slow
def test_the_tax_of_the_control_plane_is_measured() -> None:
    document = run("control_tax.py", "--workers", "2", "--steps", "12")
    (row,) = document["rows"]
    assert row["steps"] > 0
    assert row["s_per_step"]["wall"] > 0
    assert 0 < row["share_of_cores"] < 1, row


@pytest.mark.slow
def test_memory_is_measured_by_part_beside_plain_pytorch() -> None:
    document = run("memory.py", "--hidden-size", "128", "--layers", "2", "--workers", "2")
    rows = {row["program"]: row for row in document["rows"]}
    assert rows.keys() == {"elaswave", "DDP", "ZeRO-1"}
    parts = ("weights", "optimizer", "followed", "sums", "receive")
    assert [round(rows["elaswave"][part], 1) for part in parts] == [4.0, 4.0, 4.0, 8.0, 4.0]
    assert [round(rows["DDP"][part], 1) for part in parts] == [4.0, 8.0, 0.0, 4.0, 0.0]
    assert round(rows["ZeRO-1"]["optimizer"], 1) == 4.0
    assert all(row["peak"] > 12 for row in rows.values())  # weights, gradients and a share of the optimizer's at least


@pytest.mark.slow
def test_plans_are_timed() -> None:
    document = run("planner.py", "--workers", "96", "1024", "--runs", "1")
    assert [(row["workers"], row["stragglers"]) for row in document["rows"]] == [
        (96, False),
        (96, True),
        (1024, False),
        (1024, True),
    ]
    assert all(row["plan_s"] > 0 for row in document["rows"])


@pytest.mark.slow
def test_throughput_after_losses_is_predicted_for_all_policies() -> None:
    document = run(
        "throughput.py", "--models", "llama-2-7b", "--layouts", "12x8", "--microbatches", "4", "--lost", "5",
        "--patterns", "clustered",
    )  # fmt: skip
    (row,) = document["simulated"]
    assert row["lost"] == len(row["lost_workers"]) == 5
    assert all(times >= 1 - 1e-9 for name, times in row["times"].items() if name not in PREDICTED_ONLY)
    assert row["ablations"]["all"] <= row["ablations"]["no graph"]
    assert document["missed"] == []


@pytest.mark.slow
def test_policies_run_in_real_jobs_beside_their_predictions() -> None:
    document = run("throughput_real.py", "--quick", "--time-scale", "3", "--policies", "recycle_rerouting", "torchft")
    rows = {row["policy"]: row for row in document["rows"]}
    assert rows["recycle_rerouting"]["same_bits"] and not rows["torchft"]["same_bits"]
    assert (rows["recycle_rerouting"]["num_microbatches"], rows["torchft"]["num_microbatches"]) == (6, 4)
    for row in rows.values():
        assert row["step_s"] > 0 and row["predicted_step_s"] > 0 and row["capacity_fraction"] > 0
    beside = {row["policy"]: row for row in document["predicted_only"]}
    assert set(beside) == PREDICTED_ONLY
    described = analytic_costs(model_shape("gpt2-small"), device_preset("ascend-910b"))
    described_s = 3 * sum(each.forward_s + each.input_gradient_s + each.weight_gradient_s for each in described.layers)
    for row in beside.values():
        assert row["predicted_step_s"] > row["step_overhead_s"] >= 0 and row["elaswave_against_it"] is None
        # At the device's usual clock: two stages of about half of the layers, two micro-batches for each worker, and at
        # most one more to fill the pipeline. At its lowest clock it would be twice the whole model.
        assert 1 <= row["start_step_s"] / described_s < 1.5


@pytest.mark.slow
def test_a_day_of_a_cluster_is_simulated_under_every_policy() -> None:
    document = run(
        "simulate.py", "--workers", "64", "--stages", "4", "--model", "llama-2-7b", "--days", "1", "--stragglers", "0.1"
    )
    assert [row["policy"] for row in document["rows"]] == list(policies())
    assert all(0 < row["goodput"]["mean"] < 1.5 for row in document["rows"])
    assert all(row["cpu_s"] > 0 for row in document["rows"])


@pytest.mark.slow
def test_traces_are_simulated_with_several_followers_and_intervals(tmp_path: Path) -> None:
    """More copies lose no more state, and more checkpoints lose no more work with it."""
    trace = tmp_path / "spot.csv"
    came = "".join(f"0,add,n{number}\n" for number in range(12))
    trace.write_text(came + "7000000,remove,n0\n7000000,remove,n1\n7000000,remove,n2\n14400000,add,n12\n")
    job = ("simulate.py", "--traces", str(trace), "--stages", "2", "--model", "gpt2-xl", "--device", "a100",
           "--policies", "recycle_rerouting", "full_restart")  # fmt: skip
    document = run(*job, "--followers", "1", "2", "--checkpoint-minutes", "5", "60")
    settings = [(row["policy"], row["followers"], row["checkpoint_minutes"]) for row in document["rows"]]
    policies = ("recycle_rerouting", "full_restart")
    assert settings == [(policy, copies, every) for policy in policies for copies in (1, 2) for every in (5.0, 60.0)]
    lost = {setting: row["lost_work_s"]["mean"] for setting, row in zip(settings, document["rows"], strict=True)}
    assert lost["full_restart", 1, 5.0] < lost["full_restart", 1, 60.0]
    assert all(0 < row["goodput"]["mean"] <= row["ettr"]["mean"] <= 1 for row in document["rows"])
    found = dict(zip(settings, document["rows"], strict=True))
    for row in run(*job, "--followers", "2", "--checkpoint-minutes", "60")["rows"]:
        planned_once = found[row["policy"], 2, 60.0]
        assert {**planned_once, "wall_s": 0, "cpu_s": 0} == {**row, "wall_s": 0, "cpu_s": 0}


@pytest.mark.slow
def test_the_cost_of_tls_is_measured() -> None:
    document = run("tls.py", "--pairs", "2", "--size", "tiny", "--starts", "1", "--rounds", "2")
    for name in ("link", "job"):
        assert document[name]["plain"] > 0 and document[name]["tls"] > 0 and document[name]["ratio"] > 0
