"""`elaswave plan --network` and `compare --network`: what they print, their JSON, and how they refuse bad input."""

import json
from pathlib import Path

import pytest

from elaswave.cli.main import main

FOUR = str(Path(__file__).parents[3] / "examples" / "far_apart" / "four_regions.toml")


def output(capsys, *arguments):
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def refusal(capsys, *arguments):
    assert main(list(arguments)) == 2
    return " ".join(capsys.readouterr().err.split())


def test_plan_as_json(capsys):
    found = json.loads(output(capsys, "plan", "--network", FOUR, "--model", "gpt2-small", "--json"))
    assert found["emulated"] is True
    assert len(found["lost"]) == 1
    for plan, count in ((found["before"], 12), (found["after"], 11)):
        used = [worker for stage in plan["stages"] for worker in stage["workers"]]
        assert len(used) + len(plan["left_out"]) == count
        assert [stage["start"] for stage in plan["stages"]][1:] == [stage["stop"] for stage in plan["stages"]][:-1]
        assert plan["step_time_s"] == pytest.approx(sum(plan[f"{p}_s"] for p in ("run", "reduce", "vote", "gather")))
        assert plan["queued_s"] == pytest.approx(plan["step_time_s"], rel=0.3)
    assert not set(found["lost"]) & {worker for stage in found["after"]["stages"] for worker in stage["workers"]}


def test_plan_for_people_uses_all_sites_when_told(capsys):
    text = output(capsys, "plan", "--network", FOUR, "--use-all", "--codec", "int8", "--lose", "0", "--speed", "1=0.5")
    assert "networks and devices are emulated" in " ".join(text.split())
    assert all(site in text for site in ("oregon", "virginia", "tokyo", "london"))
    assert "codec int8; copies inside" in text
    assert "left out" not in text
    assert "lost" not in text


def test_plan_says_which_sites_may_be_lost(capsys):
    """With copies outside any of them, with copies inside none, and where all workers are at one, not that one."""
    arguments = ["plan", "--network", FOUR, "--model", "gpt2-small", "--lose", "0"]
    of_all = [*arguments, "--use-all", "--copies"]
    outside, inside = (" ".join(output(capsys, *of_all, copies).split()) for copies in ("outside", "inside"))
    assert "it survives the loss of any one of 4 sites" in outside
    assert "it survives the loss of none of 4 sites (site" in inside
    assert "without it the job goes back to the last checkpoint" in inside
    one = " ".join(output(capsys, *arguments, "--copies", "outside").split())
    assert "; it does not survive the loss of " in one and ", its only site" in one


def test_compare(capsys):
    names = ["op_fence", "equal_number", "equal_compute"]
    arguments = ["compare", "--network", FOUR, "--policies", ",".join(names), "--codec", "int4"]
    found = json.loads(output(capsys, *arguments, "--json"))
    assert [entry["policy"] for entry in found["policies"]] == names
    steps = {entry["policy"]: entry["before"]["step_time_s"] for entry in found["policies"]}
    assert steps["op_fence"] == min(steps.values())
    text = output(capsys, *arguments, "--lose", "3", "--use-all")
    assert "equal_number" in text


def test_what_cannot_be_is_refused(capsys):
    assert "--codec only mean something with --network" in refusal(capsys, "plan", "--codec", "int8")
    for policies in (",", "op_fence,op_fence"):
        text = refusal(capsys, "compare", "--network", FOUR, "--policies", policies)
        assert "give each planner once, separated by commas, at least one of op_fence" in text
    assert "--use-all only mean something with --network" in refusal(capsys, "compare", "--use-all")
    far = ("plan", "--network", FOUR)
    assert "--device, --workers cannot be given with --network: the file of" in refusal(
        capsys, *far, "--workers", "4", "--device", "a100"
    )
    assert "--stages cannot be given with --network: OP-Fence does not plan that" in refusal(capsys, *far, "--stages=2")
    assert "zero-bubble is not planned with --network; give one of 1f1b, gpipe" in refusal(
        capsys, *far, "--schedule", "zero-bubble"
    )
    assert "goes with neither RUN, --trace nor --policy" in refusal(capsys, *far, "--policy", "torchft")
    assert "--lose must leave at least one" in refusal(capsys, *far, "--lose", "12")
    assert "cannot be read" in refusal(capsys, "plan", "--network", "no-such.toml")
    assert "memory: the 82 layers do not fit" in refusal(capsys, *far, "--model", "llama-2-70b", "--microbatch-size=64")
    compare = ("compare", "--network", FOUR)
    assert "there is no planner 'torchft'; choose of op_fence" in refusal(capsys, *compare, "--policies", "torchft")
    assert "goes with neither --policy nor --plot" in refusal(capsys, *compare, "--plot", "x.png")
    assert "memory: the 82 layers do not fit" in refusal(
        capsys, *compare, "--model", "llama-2-70b", "--microbatch-size=64"
    )


def test_a_rival_without_a_plan_says_so(capsys, tmp_path):
    # The two sites differ: in equal stages one of them has too little memory.
    site = "workers = 1\nbandwidth_mbit_per_s = 1000\ndelay_ms = 1\nmemory_gib = "
    link = '[[links]]\nbetween = ["a", "b"]\nbandwidth_mbit_per_s = 100\ndelay_ms = 10\n'
    path = tmp_path / "two.toml"
    path.write_text(f"[sites.a]\n{site}3\n[sites.b]\n{site}80\n{link}")
    arguments = ["compare", "--network", str(path), "--policies", "op_fence,equal_number", "--model", "gpt2-medium"]
    found = json.loads(output(capsys, *arguments, "--json"))
    begin = {entry["policy"]: entry["before"] for entry in found["policies"]}
    assert begin["op_fence"]["feasible"]
    assert begin["equal_number"]["reason"].startswith("no plan: memory: equal_number has no stages of equal width")
    assert "no plan" in output(capsys, *arguments)
