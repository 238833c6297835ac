"""Evaluates a checkpoint in the script's process: the same numbers as an evaluation while training gives."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from elaswave.config.schema import Config
from elaswave.errors import CheckpointError
from elaswave.foreign.connection import close_all
from elaswave.protocol.scores import Means, means_of, score_words
from elaswave.state.checkpoint import CheckpointRef, checkpoint_of_step, find_newest_checkpoint, verify_checkpoint
from elaswave.training.dataset import UserDataError
from elaswave.training.definition import Training
from elaswave.training.evaluation import evaluation_draws
from elaswave.training.random_state import generators_kept
from elaswave.worker.blueprint import Blueprint
from elaswave.worker.compute import Compute, LayerError
from elaswave.worker.frozen import changed_frozen
from elaswave.worker.materialise import stored_layers
from elaswave.worker.microbatches import Microbatches


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
    layers = stored_layers(blueprint, stored)
    samples = training.open_samples(run_dir / "data")
    num_samples, size = samples.num_samples("validation"), config.batch.microbatch_size
    with _as_in_a_worker():

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
            has_canary=True,  # which looks at backwards only
        )
        compute.begin(found.step, ())
        for microbatch in range(config.run.eval_microbatches):
            with _interruptible():
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


@contextmanager
def _interruptible() -> Iterator[None]:
    """An interrupt of the script, which may come while a layer or the dataset runs, ends it as itself."""
    try:
        yield
    except (LayerError, UserDataError) as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        raise


@contextmanager
def _as_in_a_worker() -> Iterator[None]:
    """One thread, as in every worker; leaves the script's generators as they were, and no server of a foreign part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with generators_kept():
            yield
    finally:
        torch.set_num_threads(threads)
        close_all()
