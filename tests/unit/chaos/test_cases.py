"""Drawn jobs are the same on every machine and always possible; endings are judged right, also the bad ones."""

import shlex
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from elaswave.blocks.placement import make_blocks, place_blocks
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.cli.main import cli
from elaswave.cli.train import train_command
from elaswave.faults.injection import FaultRecord, parse_faults
from elaswave.observability.result import Recovery, RunResult
from elaswave.planning.programs.layout import make_layout
from verify.__main__ import verify
from verify.chaos.cases import (
    MAX_WORKERS,
    NUM_MODELS,
    NUM_STEPS,
    ChaosCase,
    Ending,
    Placed,
    can_lose_blocks,
    config_of,
    draw_case,
    draw_model,
    judge,
    reference_settings,
)

CASES = [draw_case(seed, index) for seed in (0, 1, 99) for index in range(70)]


def test_drawing_is_a_function_of_seed_and_index() -> None:
    assert CASES == [draw_case(case.seed, case.index) for case in reversed(CASES)][::-1]
    assert (draw_case(7, 3).faults, draw_case(7, 3).settings["layout.widths"]) == (("cut:2@1:vote",), [3])
    assert len({case.faults for case in CASES}) > 180


def test_every_case_is_possible() -> None:
    for case in CASES:
        widths = case.config.widths
        assert 1 <= len(widths) <= 3 and 2 <= sum(widths) <= MAX_WORKERS and max(widths) <= 4
        faults = parse_faults(case.faults, seed=1, workers=range(sum(widths)), num_steps=NUM_STEPS)
        assert 1 <= len(faults) <= 3
        assert sum(isinstance(fault.worker, int) for fault in faults) < sum(widths), "a worker is left"


def test_cases_are_varied() -> None:
    kinds = Counter(fault.partition(":")[0] for case in CASES for fault in case.faults)
    assert {"kill", "hang", "cut", "cut-close"} == set(kinds) and min(kinds.values()) > 15
    assert {"2x2", "1x2", "3x1"} < {f"{len(w)}x{w[0]}" for case in CASES if len(set(w := case.config.widths)) == 1}
    assert any(len(set(case.config.widths)) > 1 for case in CASES)
    for key in ("elastic.num_followers", "run.checkpoint_every", "layout.schedule", "model.family", "model.dtype"):
        assert len({case.settings[key] for case in CASES}) > 1
    assert any("coordinator" in fault for case in CASES for fault in case.faults)
    assert any("+" in fault for case in CASES for fault in case.faults)


def test_what_shows_in_a_result_is_the_models_alone() -> None:
    for case in CASES:
        model = draw_model(case.seed, case.model)
        assert model.items() <= case.settings.items()
        assert case.model == case.index % NUM_MODELS
        free = {key.partition(".")[0] for key in case.settings.keys() - model.keys()}
        assert free == {"model", "layout", "elastic", "run"}
        assert case.settings.keys() - model.keys() == {
            "model.recompute",
            "layout.widths",
            "layout.schedule",
            "elastic.num_followers",
            "elastic.respawn",
            "elastic.refill_bytes_per_step",
            "run.checkpoint_every",
        }
        assert config_of(reference_settings(model)).widths == (1,)


def test_the_command_trains_the_same_job() -> None:
    for case in CASES[:30]:
        words = shlex.split(case.command)
        assert words[:2] == ["elaswave", "train"]
        context = train_command.make_context("train", words[2:])
        assert context.params["fault_specs"] == case.faults
        printed = CliRunner().invoke(cli, ["train", *words[2:], "--print-config"])
        assert printed.output == case.config.to_toml()


def result(**changes: object) -> RunResult:
    values = {"steps": NUM_STEPS, "losses": [1.0] * NUM_STEPS, "state_digest": "ab", "throughput_tokens_per_s": None}
    return RunResult(**{**values, "generations": [], **changes})  # type: ignore[arg-type]


def record(worker: int | str, step: int) -> FaultRecord:
    return FaultRecord(
        position=0, fault=f"kill:{worker}@{step}", worker=worker, step=step, attempt=1, phase="vote", action=0,
        time_s=0.0,
    )  # type: ignore[arg-type]  # fmt: skip


def recovery(worker: int) -> Recovery:
    return Recovery(
        kind="lost", worker=worker, step=1, phase="vote", detected_by="exit", generation=2, attempt=1,
        outcome="retried",
        detect_s=0.0, agree_s=0.0, plan_s=0.0, edit_s=0.0, promote_s=0.0, redo_s=0.0, total_s=0.0, critical_bytes=0,
        num_microbatches_recomputed=0,
    )  # fmt: skip


def placed(widths: tuple[int, ...] = (2, 2), num_followers: int = 1, max_elements: int = 1 << 20) -> Placed:
    layout = make_layout(widths=widths, layers_per_stage=[2] * len(widths), num_microbatches=4)
    blocks = make_blocks([256] * (2 * len(widths)), 64)
    layout = layout.with_followers(num_followers)
    placement = place_blocks(layout, blocks, scatter_width=EVERYBODY)
    return Placed(layout, blocks, placement, EVERYBODY, max_elements)


CASE: ChaosCase = CASES[0]
REFERENCE = Ending(result=result(), digests={"a": "1"}, checkpoint_step=NUM_STEPS)
LOST = "RecoveryError: all copies of 3 blocks (1, 2, 3) were lost with workers [0, 1], and there is no checkpoint"


@pytest.mark.parametrize(
    ("ending", "outcome", "detail"),
    [
        (REFERENCE, "same bits", ""),
        (Ending(result=result(), digests={"a": "1"}, checkpoint_step=NUM_STEPS, recoveries=[recovery(2)]),
         "same bits", "false alarm about worker 2"),
        (Ending(result=result(), digests={"a": "1"}, checkpoint_step=NUM_STEPS, recoveries=[recovery(2)],
                struck=[record(2, 1)]), "same bits", ""),
        (Ending(result=result(), digests={"a": "2"}, checkpoint_step=NUM_STEPS), "different", "of single tensors"),
        (Ending(result=result(state_digest="cd"), digests={"a": "2"}, checkpoint_step=NUM_STEPS), "different", "a"),
        (Ending(result=result(losses=[2.0] * NUM_STEPS), digests={"a": "1"}, checkpoint_step=NUM_STEPS),
         "different", "the losses differ first at step 1"),
        (Ending(result=result(val_losses=[1.0], val_steps=[4]), digests={"a": "1"}, checkpoint_step=NUM_STEPS),
         "different", "validation"),
        (Ending(result=result(), digests={"a": "1"}), "error", "checkpoint is of step None"),
        (Ending(result=result(), digests={"a": "1"}, checkpoint_step=NUM_STEPS, struck=[record(2, 1)]),
         "error", "says nothing of the loss of worker 2"),
        (Ending(hung_s=9.0), "hung", "not over after 9 s"),
        (Ending(result=result(), left_behind=["process 7 (S)"]), "left behind", "process 7"),
        (Ending(error="StateError: oh"), "error", "StateError: oh"),
        (Ending(error=LOST, struck=[record(0, 3), record(1, 3)]), "blocks lost", "all copies of 3 blocks"),
        (Ending(error=LOST, struck=[record(0, 3), record(1, 3)], num_checkpoints=1),
         "unexplained loss", "1 checkpoints"),
        (Ending(error=LOST, struck=[record(0, 3)]), "unexplained loss", "a copy of every block"),
        (Ending(error=LOST, struck=[record(0, 3), record(1, 9)]), "unexplained loss", "a copy of every block"),
    ],
)  # fmt: skip
def test_endings_are_judged(ending: Ending, outcome: str, detail: str) -> None:
    verdict = judge(CASE, ending, REFERENCE, placed())
    assert verdict.outcome == outcome
    assert detail in verdict.detail


def test_blocks_can_be_lost_only_while_copies_are_missing() -> None:
    assert can_lose_blocks(placed(), [(0, 3), (1, 4)])
    assert not can_lose_blocks(placed(), [(0, 3)])
    assert not can_lose_blocks(placed(), [(0, 3), (1, 8)])
    assert can_lose_blocks(placed(max_elements=64), [(0, 3), (1, 8)]), "making new copies takes many steps"
    assert not can_lose_blocks(placed(num_followers=2), [(0, 3), (1, 3)])
    assert can_lose_blocks(placed(num_followers=2), [(0, 3), (1, 3), (2, 4)])
    assert can_lose_blocks(placed(widths=(2,), num_followers=2), [(0, 3), (1, 3)]), "there are but two copies"


def test_a_full_folder_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = CliRunner().invoke(verify, ["chaos", "--run-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not empty; give a new folder" in done.output
