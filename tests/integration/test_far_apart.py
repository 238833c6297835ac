"""Jobs whose workers are at several sites, over emulated links: equal bits, and a slow link loses nobody."""

from pathlib import Path
from typing import Any

import pytest
from tests.integration.jobs import run_job
from tests.integration.waits import WaitsFor, log_of

SETTINGS: dict[str, Any] = {
    "model.num_layers": 4,
    "model.fences": ["block.0:topk10", "block.2:int8"],
    "run.steps": 6,
    "optimizer.schedule": "constant",
}
ONE = {"layout.stages": 1, "layout.replicas": 1}
APART = {
    "sites.network": "examples/far_apart/four_regions_small.toml",
    "sites.delay": 0.2,
    "sites.rate": 0.2,
    "layout.widths": [2, 2],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_job(tmp_path_factory.mktemp("alone"), SETTINGS | ONE).computation


@pytest.mark.parametrize("fault", ["kill:1@3:reduce", pytest.param("slow-link:1@3:0.01", marks=pytest.mark.slow)])
def test_slow_links_and_losses_change_no_bit(alone: Any, tmp_path: Path, fault: str) -> None:
    job = run_job(tmp_path, SETTINGS | APART, faults=[fault])
    assert job.computation == alone
    assert sum(each.is_failure for each in job.result.recoveries) == fault.startswith("kill")


@pytest.mark.slow
def test_links_that_are_slower_in_one_direction_change_no_bit(alone: Any, tmp_path: Path) -> None:
    """What comes back from the second site has a thirtieth of the rate, and a worker is lost meanwhile."""
    file = tmp_path / "network.toml"
    site = "workers = 2\nbandwidth_mbit_per_s = 1000\ndelay_ms = 1\n"
    link = '[[links]]\nbetween = ["oslo", "quito"]\nbandwidth_mbit_per_s = 300\ndelay_ms = 20\n'
    back = "back_bandwidth_mbit_per_s = 10\nback_delay_ms = 80\n"
    file.write_text(f"[sites.oslo]\n{site}[sites.quito]\n{site}{link}{back}")
    apart = {"sites.network": str(file), "sites.coordinator": "oslo", "layout.widths": [2, 2]}
    job = run_job(tmp_path / "apart", SETTINGS | apart, faults=["kill:3@3:reduce"])
    assert job.computation == alone
    assert [each.worker for each in job.result.recoveries if each.is_failure] == [3]


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["outside", "inside"])
def test_a_site_that_is_lost_costs_no_bit(alone: Any, tmp_path: Path, copies: str) -> None:
    """With copies elsewhere the others go on in place; else they go back to the last checkpoint. The coordinator is at
    another site, so that all that it hears comes over slow links."""
    settings = {
        "sites.copies": copies,
        "sites.coordinator": "tokyo",
        "run.checkpoint_every": 2,
        "elastic.respawn": False,
    }
    job = run_job(tmp_path, SETTINGS | APART | settings, faults=["kill-host:virginia@5:reduce"])
    assert job.computation == alone
    assert {each.worker for each in job.result.recoveries if each.is_failure} == {2, 3}
    said = "\n".join(job.messages)
    if copies == "outside":
        assert "the job survives the loss of any one of 2 sites" in said
        assert "until copies" not in said and "the only one that is left" in said
    else:
        assert "as sites.copies asks for: without it the job goes back to the last checkpoint" in said
    assert ("checkpoint of step 4" in said) == (copies == "inside"), said


@pytest.mark.slow
def test_who_joins_over_slow_links_loses_nobody(tmp_path: Path) -> None:
    """Those that pause for it have frames under way, which others wait for."""
    settings = SETTINGS | {"run.steps": 20}
    alone = run_job(tmp_path / "alone", settings | ONE).computation
    job = run_job(tmp_path / "apart", settings | APART, faults=["join@3", "join@9"])
    assert job.computation == alone
    assert [each.worker for each in job.result.recoveries if each.kind in ("lost", "joined")] == [4, 5]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_site_that_is_away_for_a_while_is_done_without_and_comes_back(tmp_path: Path) -> None:
    """For a minute. Its workers are lost and end when they are back; others take their places, at that site."""
    settings = SETTINGS | {"run.steps": 200}  # each waits for a moment, until the site is back
    alone = run_job(tmp_path / "alone", settings | ONE).computation
    apart = APART | {"sites.coordinator": "tokyo", "elastic.respawn": True, "sites.rate": 0.05}
    probe = WaitsFor(log_of(tmp_path / "apart"), "worker 5 has joined", step=8)
    job = run_job(tmp_path / "apart", settings | apart, probe=probe, faults=["away:virginia@3:60"])
    assert job.computation == alone
    kinds = {(each.kind, each.worker) for each in job.result.recoveries if each.kind in ("lost", "joined")}
    assert kinds == {("lost", 2), ("lost", 3), ("joined", 4), ("joined", 5)}
    assert {each.layout.domain_of.get(5) for each in job.result.generations if 5 in each.layout.workers} == {"virginia"}


@pytest.mark.slow
def test_op_fences_plan_of_an_example_runs_with_equal_bits(tmp_path: Path) -> None:
    """The shape of GPT-2 over four regions; alone it has one worker, and the same fences."""
    from elaswave.config.load import load_config

    config = load_config(Path("examples/far_apart/gpt2.toml"))
    values: dict[str, Any] = {key: value for key, value in config.flat().items() if value is not None}
    settings = {key: value for key, value in values.items() if key.partition(".")[0] in ("model", "batch", "optimizer")}
    settings |= {"run.steps": 4, "run.seed": config.run.seed}
    one = run_job(tmp_path / "one", settings | ONE)
    apart = {key: value for key, value in values.items() if key.partition(".")[0] in ("layout", "sites", "device")}
    job = run_job(tmp_path / "apart", settings | apart | {"device.time_scale": 40.0, "sites.delay": 0.2})
    assert job.computation == one.computation


ADAPTS: dict[str, Any] = {
    "model.num_layers": 12,
    "model.hidden_size": 64,
    "model.num_heads": 2,
    "model.context_length": 64,
    "model.fences": [f"block.{index}:adatopk50" for index in range(12)],
    "batch.num_microbatches": 8,
    "batch.microbatch_size": 1,
    "optimizer.schedule": "constant",
    "run.steps": 16,
    "run.eval_every": 4,
    "run.eval_microbatches": 1,
}
EMULATED: dict[str, Any] = {
    "device.kind": "emulated",
    "device.model": "gpt2-small",
    "device.name": "a100",
    "device.time_scale": 4.0,
    "sites.network": APART["sites.network"],
    "sites.rate": 0.02,
    "sites.delay": 0.02,
    "sites.of_workers": ["oregon", "virginia", "virginia", "tokyo"],
    "layout.widths": [1, 2, 1],
    "layout.layers": [2, 10, 2],
    "elastic.respawn": False,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_chooses_its_ratios_is_repeated_by_its_list_on_another_layout(tmp_path: Path) -> None:
    """A worker leaves; the planned change that relieves it brings other ratios. One worker alone repeats it all."""
    job = run_job(tmp_path / "adapts", ADAPTS | EMULATED, faults=["drain:1@3"])
    recorded = job.result.fence_ratios
    assert {each.partition(":")[0] for each in recorded} > {"1"}, recorded
    again = run_job(tmp_path / "again", ADAPTS | ONE | {"model.fence_ratios": recorded})
    assert again.result.fence_ratios == recorded
    assert again.computation == job.computation and again.result.val_losses == job.result.val_losses
