"""Evaluates a checkpoint in the script's process: the same numbers as an evaluation while training gives."""

from pathlib import Path
from typing import Any

from elaswave.checkpoints.checkpoint import CheckpointRef, checkpoint_of_step, find_newest_checkpoint, verify_checkpoint
from elaswave.config.schema import Config
from elaswave.engine.blueprint import Blueprint
from elaswave.engine.checks.rehearsal import as_in_a_worker, interruptible
from elaswave.engine.compute import Compute
from elaswave.engine.frozen import changed_frozen
from elaswave.engine.materialise import all_layers
from elaswave.engine.microbatches import Microbatches
from elaswave.errors import CheckpointError
from elaswave.protocol.step.scores import Means, means_of, score_words
from elaswave.training.definition import Training
from elaswave.training.evaluation import evaluation_draws


def evaluation_means(config: Config, training: Training, run_dir: Path, checkpoint: str | Path | int | None) -> Means:
    """Loss and metrics of a checkpoint's weights on the evaluation dataset.

    Args:
        config: of the run.
        training: of the run.
        run_dir: its folder.
        checkpoint: folder or step; None: the newest one.
    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    found = _checkpoint(run_dir, checkpoint)
    blueprint = Blueprint(config, training)
    stored = (found.folder, found.meta)
    blueprint.frozen = changed_frozen(blueprint, stored)
    layers = all_layers(blueprint, stored)
    samples = training.open_samples(run_dir / "data")
    num_samples, size = samples.num_samples("validation"), config.batch.microbatch_size
    with as_in_a_worker():

        def fetch(step: int, microbatch: int) -> tuple[Any, Any]:
            return samples.batch(evaluation_draws(microbatch, size, num_samples), "validation")

        microbatches = Microbatches(fetch, fetch)
        compute = Compute(
            blueprint.model,
            layers,
            {},
            seed=config.run.seed,
            recompute=False,
            between_layers=lambda: None,
            inputs=microbatches.inputs,
            has_determinism_check=True,  # which looks at backwards only
        )
        compute.begin(found.step, ())
        for microbatch in range(config.run.eval_microbatches):
            with interruptible():
                inputs, targets = microbatches.get(found.step, microbatch, train=False)
                compute.forward(range(len(layers)), microbatch, inputs, targets, train=False)
            microbatches.release(found.step, microbatch, train=False, is_over=True)
    num_microbatches = config.run.eval_microbatches
    words = score_words(compute.scoring.scores, num_microbatches, len(blueprint.model.metrics))
    return means_of(words, num_microbatches, num_microbatches)


def _checkpoint(run_dir: Path, checkpoint: str | Path | int | None) -> CheckpointRef:
    if isinstance(checkpoint, int):
        return checkpoint_of_step(run_dir, checkpoint)
    if checkpoint is not None:
        return verify_checkpoint(Path(checkpoint))
    newest = find_newest_checkpoint(run_dir).newest
    if newest is None:
        raise CheckpointError(f"{run_dir} has no valid checkpoint to evaluate; a run writes one at its end")
    return newest
