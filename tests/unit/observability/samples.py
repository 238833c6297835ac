"""Runs made up for the tests of this folder."""

from pathlib import Path

from elaswave.observability.events import EventLog, Holdings, LayoutChosen, RunStarted, StepCommitted
from elaswave.observability.result import (
    CheckpointRecord,
    GenerationRecord,
    JsonFloat,
    Recovery,
    RunResult,
    WorkerMemory,
)
from elaswave.types import Hop, Layout, Stage

LAYOUT = Layout(
    stages=(Stage(start=0, stop=3, workers=(0, 1)), Stage(start=3, stop=6, workers=(2, 3))),
    routes=tuple(
        (Hop(worker=m % 2, stage=0, start=0, stop=3), Hop(worker=2 + m % 2, stage=1, start=3, stop=6)) for m in range(8)
    ),
)
"""Two stages of two workers, six layers, eight micro-batches."""

CONFIG = {
    "format": 2,
    "model": {"family": "gpt", "num_layers": 4, "hidden_size": 128, "dtype": "float32"},
    "layout": {"stages": 2, "replicas": 2},
    "run": {"steps": 6, "seed": 1},
}

RECOVERY = Recovery(
    kind="lost",
    worker=3,
    step=4,
    phase="backward",
    detected_by="exit",
    generation=1,
    attempt=1,
    outcome="retried",
    detect_s=0.004,
    agree_s=0.003,
    plan_s=0.001,
    edit_s=0.002,
    promote_s=0.001,
    redo_s=0.2,
    total_s=0.211,
    critical_bytes=0,
    num_microbatches_recomputed=4,
)

LOSSES: list[JsonFloat] = [5.6, 5.1, 4.7, 4.2, 4.4, 3.9]


def make_result(**changes: object) -> RunResult:
    fields: dict[str, object] = {
        "losses": LOSSES,
        "state_digest": "00ff" * 8,
        "throughput_tokens_per_s": 15234.4,
        "generations": [GenerationRecord(generation=0, layout=LAYOUT, reason="as configured", first_step=1)],
        "memory": {w: WorkerMemory(peak_bytes=200 << 20, optimizer_bytes=5 << 20) for w in range(4)},
        "checkpoints": [CheckpointRecord(step=5, path="checkpoints/step-00000005", num_bytes=3 << 20, duration_s=0.25)],
        "start_up_s": 0.9,
        "duration_s": 2.8,
        "val_losses": [4.5],
        "val_steps": [5],
        "config": CONFIG,
        **changes,
    }
    fields.setdefault("steps", len(fields["losses"]))  # type: ignore[arg-type]
    return RunResult(**fields)  # type: ignore[arg-type]


def write_events(run_dir: Path, losses: list[JsonFloat] = LOSSES, first_step: int = 1) -> Path:
    """Appends what a process logs that runs some steps and has not ended yet."""
    path = run_dir / "events.jsonl"
    with EventLog(path) as log:
        log.write(RunStarted(version="0.1", total_steps=6, first_step=first_step, num_workers=4, config=CONFIG))
        log.write(
            LayoutChosen(
                generation=0,
                layout=LAYOUT,
                reason="as configured",
                first_step=first_step,
                layer_names=["embedding", "block.0", "block.1", "block.2", "block.3", "head"],
                layer_parameters=[33000, 198000, 198000, 198000, 198000, 33000],
                holdings={
                    worker: Holdings(
                        num_parameters=429000,
                        num_owned_blocks=14,
                        num_owned_parameters=214500,
                        num_followed_blocks=14,
                        num_followed_parameters=214500,
                    )
                    for worker in range(4)
                },
            )
        )
        for step, loss in enumerate(losses, start=first_step):
            log.write(
                StepCommitted(
                    step=step,
                    generation=0,
                    attempt=0,
                    loss=loss,
                    grad_norm=1.5,
                    lr=2e-3,
                    tokens_per_s=16384.0,
                    duration_s=0.25,
                    phases_s={"run": 0.2, "reduce": 0.03, "vote": 0.01, "apply": 0.005, "gather": 0.005},
                )
            )
    return path
