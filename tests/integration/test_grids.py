"""Gradients that suddenly grow or shrink: the step is tried again on another grid, equally under every layout."""

from pathlib import Path

import msgspec
import pytest
import torch
from tests.integration.jobs import Job, run_job
from tests.integration.unlucky import make_unlucky


def steep(output: torch.Tensor) -> torch.Tensor:
    """The same values with a gradient that is a million times larger."""
    return output + (2.0**20 - 1) * (output - output.detach())


def shallow(output: torch.Tensor) -> torch.Tensor:
    """The same values with a gradient that is 2**40 times smaller."""
    return output.detach() + 2.0**-40 * (output - output.detach())


def retries(job: Job) -> dict[int, list[str]]:
    """Why steps were tried again, by step."""
    events = [msgspec.json.decode(line) for line in (job.run_dir / "events.jsonl").read_text().splitlines()]
    return {event["step"]: event["retries"] for event in events if event["kind"] == "step" and event["retries"]}


@pytest.mark.parametrize("bits", [64, pytest.param(48, marks=pytest.mark.slow)])
def test_a_sum_that_could_overflow_costs_an_attempt_and_no_bit(
    bits: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_unlucky(monkeypatch, steep, probability=0.1)
    settings = {"model.dropout": 0.0, "elastic.accumulator_bits": bits}
    one, other = (
        run_job(tmp_path / str(len(widths)), settings | {"layout.widths": widths}) for widths in ([1], [1, 3])
    )
    assert one.computation == other.computation
    assert retries(one) == retries(other)
    assert retries(one).pop(1) == ["the first gradients have been measured"]
    later = [reasons for step, reasons in retries(one).items() if step > 1]
    assert any("could overflow" in reasons[0] for reasons in later)
    assert any("fewer than 24 bits" in reasons[0] for reasons in later)  # they shrink again by as much
    assert all(len(reasons) == 1 for reasons in later)


def test_gradients_that_shrink_and_grow_again_cost_an_attempt_each_and_no_bit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_unlucky(monkeypatch, shallow, probability=0.5)
    settings = {"model.dropout": 0.0, "batch.num_microbatches": 1}  # one draw decides about a step
    one, other = (
        run_job(tmp_path / str(len(widths)), settings | {"layout.widths": widths}) for widths in ([1], [1, 1])
    )
    assert one.computation == other.computation
    assert retries(one) == retries(other)
    reasons = [reason for step, found in retries(one).items() for reason in found if step > 1]
    assert any("have fewer than 24 bits on their grids" in reason for reason in reasons)
    assert any("could overflow" in reason for reason in reasons)
    assert all(len(found) == 1 for found in retries(one).values())


@pytest.mark.slow
def test_grids_are_part_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_unlucky(monkeypatch, steep, probability=0.1)
    settings = {"model.dropout": 0.0, "optimizer.schedule": "constant", "layout.widths": [2]}
    whole = run_job(tmp_path / "whole", settings)
    for steps in (4, 8):
        run_job(tmp_path / "parts", settings | {"run.steps": steps}, resume=steps > 4)
    parts = run_job(tmp_path / "parts", settings | {"layout.widths": [1, 1]}, resume=True)
    assert parts.computation == whole.computation
    assert retries(parts) == retries(whole)
