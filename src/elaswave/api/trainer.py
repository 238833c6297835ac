"""The trainer of a script: its own layers, loss and dataset, trained under any layout and through any failure.

Evaluates a checkpoint in the script's process: the same numbers as an evaluation while training gives.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from elaswave.api.environment import RANDOM, forkserver_environment, given_key, hash_seed, use_private_cache
from elaswave.api.given import OwnModelSpec, dtype_name, held, refuse_connections, without_new_connections
from elaswave.api.result import Result
from elaswave.blocks.shapes import LayerShape
from elaswave.checkpoints.checkpoint import CheckpointRef, checkpoint_of_step, find_newest_checkpoint, verify_checkpoint
from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.config.values import OwnModel, plain
from elaswave.engine.batches import Microbatches
from elaswave.engine.blueprint import Blueprint, all_layers, changed_frozen
from elaswave.engine.checks.rehearsal import as_in_a_worker, interruptible
from elaswave.engine.compute import Compute, ComputeRules
from elaswave.errors import CheckpointError, UsageError, WorkerError
from elaswave.job.script import JobOptions, Script, current_session, read_files
from elaswave.launcher.launcher import run_job
from elaswave.models.huggingface.model import HuggingFaceModel
from elaswave.models.layers import Layer
from elaswave.models.splitting.split import SplitLayers
from elaswave.observability.run_folder import is_run, saved_config
from elaswave.protocol.step.ballot import Means, means_of, score_words
from elaswave.training.dataset import DatasetSamples
from elaswave.training.definition import Training, evaluation_draws
from elaswave.training.optimizer import ConfiguredOptimizer, Optimizer
from elaswave.training.own_optimizer import OwnOptimizer


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
            # The determinism check looks at backwards only.
            ComputeRules(blueprint.model, config.run.seed, has_determinism_check=True),
            layers,
            {},
            inputs=microbatches.inputs,
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


_FACTORIES = {
    "optimizer": "lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
    "lr_scheduler": "lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)",
}

LOADERS_MAX = 64
"""Processes beside each worker."""


class UserTraceback(Exception):
    """The traceback of an exception in a worker, as the cause of a `WorkerError`."""

    def __init__(self, text: str) -> None:
        super().__init__(f"in a worker\n{text.rstrip()}")


class Trainer:
    """Trains a model on workers of this machine.

    Args:
        model: an ``nn.Sequential``, or a list of ``nn.Module`` and `elaswave.Layer`, in forward order, which
            `elaswave.split` makes of any network. Modules keep
            their values: they are where training begins, and every worker computes with copies.
        loss: (output of the last layer, targets) -> mean loss of the micro-batch, a scalar tensor.
        dataset: map-style: has a length, and ``dataset[i]`` is a pair of input and target; or several of them, as a
            dictionary from a name to (dataset, weight).
        optimizer: (`elaswave.training.parameters.Parameters`) -> `torch.optim.Optimizer` that updates every element
            by itself; called in each process. None: the one that the configuration describes.
        config: values by dotted key, ``{"run.steps": 20}``, or by section, as in a configuration file.
        lr_scheduler: optimizer -> one of `torch.optim.lr_scheduler`, which steps once per committed step; goes with
            `optimizer`.
        grad_clip: goes with `optimizer`: largest norm of the whole gradient, 0: off.
        collate: list of samples -> inputs and targets of a micro-batch.
        loaders: processes beside each worker that make its micro-batches ahead; 0: it makes them itself.
        eval_dataset: as the dataset, for `evaluate` and for evaluations while training (``run.eval_every``).
        metrics: further means by name, of outputs and targets.
        callbacks: functions of (step, loss, metrics), or objects with such a method ``on_step``. They are called in
            this process after each committed step, once and in order. An exception in one ends the job after the step
            in hand, with a checkpoint.
        run_dir: folder for everything that a run writes; None: a new one below ``runs`` for each `train`.
        resume: go on from the newest valid checkpoint of `run_dir`.
    Raises:
        UsageError: the model, or another argument, cannot be used; all that is wrong with it.
    """

    def __init__(
        self,
        model: nn.Sequential | Sequence[nn.Module | Layer],
        loss: Callable[..., Any],
        dataset: Any,
        optimizer: Callable[..., Any] | None = None,
        *,
        config: Mapping[Any, Any] | None = None,
        lr_scheduler: Callable[..., Any] | None = None,
        grad_clip: float = 0.0,
        collate: Callable[[list[Any]], Any] = default_collate,
        loaders: int = 0,
        eval_dataset: Any = None,
        metrics: Mapping[str, Callable[..., Any]] = {},
        callbacks: Sequence[Any] = (),
        run_dir: str | Path | None = None,
        resume: bool = False,
    ) -> None:
        grad_clip, loaders, resume = plain(grad_clip), plain(loaders), plain(resume)
        problems = _problems_with_optimizer(optimizer, lr_scheduler, grad_clip)
        problems += _problems_with_run(config, loaders, callbacks, run_dir, resume)
        if problems:
            raise UsageError("; ".join(problems))
        self._network = model if isinstance(model, SplitLayers) else None
        self._loss, self._metrics = loss, metrics
        self._model = OwnModelSpec(model, loss, metrics)
        self._files = model.files if isinstance(model, HuggingFaceModel) else {}
        self._optimizer = None if optimizer is None else OwnOptimizer(optimizer, lr_scheduler)
        self._grad_clip = grad_clip
        self._config = {} if config is None else config
        self._samples = DatasetSamples(dataset, collate, eval_dataset)
        self._loaders = loaders
        self._callbacks = tuple(_step_function(callback) for callback in callbacks)
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._resume = resume
        self._newest: Path | None = self._run_dir
        """Folder of the newest run."""

    def train(self) -> Result:
        """Trains to the end; returns in this process only.

        Raises:
            UsageError: the configuration, the folder or the data cannot be used, or the data holds what processes must
                not share.
            WorkerError: a layer, the loss or the dataset has raised; names worker, step, micro-batch and layer.
            ElaswaveError: the job could not go on, for another reason that the message gives.
            Exception: what a callback has raised.
        """
        refuse_connections(self._samples.parts)
        session = current_session()
        options = session.begin_job(self._run_dir, self._resume)
        self._cut_as(options.saved_config())
        config = self._resolved(options, session.workers, session.overrides)
        use_private_cache()
        environment = forkserver_environment()
        if environment is not None and hash_seed() == RANDOM:
            _warn_of_sets(self._samples)
        files = read_files() if environment is None else ()  # a fresh interpreter inherits none
        script = Script(self._training(config), environment, self._after_step, self._files, files)
        try:
            layer_parameters = self._model.layer_parameters
            with without_new_connections(self._samples.parts):
                job = run_job(config, options, script=script, layer_parameters=layer_parameters, key=given_key())
        except WorkerError as error:
            # Python shows a cause first: what a person's own code has raised, then where that was.
            cause = UserTraceback(error.traceback_text) if error.traceback_text else None
            raise error.with_traceback(None) from cause
        session.jobs.append(job)
        self._newest = job.run_dir
        return Result(job.run_dir, job.result, self._model.spec.layers)

    def evaluate(self, checkpoint: str | Path | int | None = None) -> dict[str, float]:
        """Computes the mean loss over the first ``run.eval_microbatches`` micro-batches of the evaluation dataset.

        The same samples as evaluations while training, and the same number. It is computed in this process.

        Args:
            checkpoint: folder of a checkpoint, or its step; None: the newest of the run that this trainer has trained
                last, or of its `run_dir`.
        Returns:
            ``{"loss": mean loss}``, and the means of all metrics by name.
        Raises:
            UsageError: there is no evaluation dataset, or no run.
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        checkpoint = plain(checkpoint)
        if isinstance(checkpoint, bool) or not isinstance(checkpoint, str | os.PathLike | int | None):
            raise UsageError(
                f"evaluate was given {checkpoint!r}, needed: the step of a checkpoint, its folder, or nothing for the "
                "newest one"
            )
        if not self._samples.num_samples("validation"):
            raise UsageError("there is nothing to evaluate on; give eval_dataset to the Trainer")
        if self._newest is None:
            raise UsageError("nothing was trained yet: call train first, or give the run_dir of a run to the Trainer")
        if not is_run(self._newest):
            raise UsageError(f"{self._newest} holds no run yet: call train first, or give the run_dir of one that is")
        config = saved_config(self._newest)
        self._cut_as(config)
        with without_new_connections(self._samples.parts):
            means = evaluation_means(config, self._training(config), self._newest, checkpoint)
        return {"loss": means.loss, **means.by_name(list(self._model.spec.metrics))}

    def _cut_as(self, saved: Config | None) -> None:
        """Cuts a network that `elaswave.split` has cut where a run that exists already was cut."""
        if self._network is None or saved is None or saved.model.cuts == self._network.cuts:
            return
        self._network = self._network.cut_at(saved.model.cuts, saved.model.network)
        self._model = OwnModelSpec(self._network, self._loss, self._metrics)

    def _resolved(self, options: JobOptions, workers: int | None, overrides: tuple[str, ...]) -> Config:
        model = self._model
        own = OwnModel(
            model.layer_parameters,
            dtype_name(model.dtype),
            self._optimizer is not None,
            float(self._grad_clip),
            () if self._network is None else self._network.cuts,
            "" if self._network is None else self._network.fingerprint,
            model.foreign,
        )
        config = load_config(None, overrides, workers, base=options.saved_config(), settings=self._config, own=own)
        if config.run.eval_every and not self._samples.num_samples("validation"):
            raise UsageError(
                f"run.eval_every = {config.run.eval_every} asks for evaluations, and there is nothing to evaluate on; "
                "give eval_dataset to the Trainer, or leave the key out"
            )
        return config

    def _training(self, config: Config) -> Training:
        samples = self._samples.seeded(config.run.seed)

        def configured(shapes: tuple[LayerShape, ...]) -> Optimizer:
            return ConfiguredOptimizer(config.optimizer, config.run.steps)

        return Training(
            model=self._model.spec.with_fences(config.model.fences, config.model.fence_ratios),
            dtype=self._model.dtype,
            make_optimizer=self._optimizer or configured,
            open_samples=lambda folder: samples,
            loaders=self._loaders,
        )

    def _after_step(self, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        for call in self._callbacks:
            call(step, loss, dict(metrics))


def _warn_of_sets(samples: DatasetSamples) -> None:
    """Names a set of texts that data holds, where its order in the workers is another one than here."""
    for path, value in held(samples.parts):
        if isinstance(value, set | frozenset) and sum(isinstance(item, str | bytes) for item in value) > 1:
            warnings.warn(
                f"{path} is a set of texts. This process orders them by a seed that it has drawn at random, and has "
                "more than one thread, or a GPU's state, so that workers are no forks of it: there the order is "
                "another one. If it shows in samples, sort them, or start the script with `elaswave run` or with "
                "PYTHONHASHSEED=0",
                stacklevel=3,
            )
            return


def _step_function(callback: Any) -> Callable[[int, float, Mapping[str, float]], Any]:
    """Finds the function of a callback.

    Raises:
        UsageError: it is neither a function nor an object with ``on_step``.
    """
    method = getattr(callback, "on_step", callback)
    if not callable(method):
        raise UsageError(
            f"a callback is of type {type(callback).__name__}, needed: a function of (step, loss, metrics), or an "
            "object with such a method on_step"
        )
    function: Callable[[int, float, Mapping[str, float]], Any] = method
    return function


def _problems_with_optimizer(optimizer: object, lr_scheduler: object, grad_clip: object) -> list[str]:
    problems = []
    for name, value in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if value is not None and not callable(value):
            problems.append(
                f"{name} is of type {type(value).__name__}, needed: a function that makes one in each process, such as "
                + _FACTORIES[name]
            )
    if lr_scheduler is not None and optimizer is None:
        problems.append("lr_scheduler goes with an optimizer; set optimizer.schedule in the config")
    if isinstance(grad_clip, bool) or not isinstance(grad_clip, int | float) or not 0 <= grad_clip < float("inf"):
        problems.append(f"grad_clip = {grad_clip!r}, needed: the largest norm of the gradient, or 0 for no clipping")
    elif grad_clip and optimizer is None:
        problems.append(f"grad_clip = {grad_clip} goes with an optimizer; set optimizer.grad_clip in the config")
    return problems


def _problems_with_run(
    config: object, loaders: object, callbacks: object, run_dir: object, resume: object
) -> list[str]:
    problems = []
    if config is not None and not isinstance(config, Mapping):
        problems.append(f"config is of type {type(config).__name__}, needed: a dictionary of keys and values")
    if isinstance(loaders, bool) or not isinstance(loaders, int) or not 0 <= loaders <= LOADERS_MAX:
        problems.append(f"loaders = {loaders!r}, needed: a number of processes for each worker, 0 to {LOADERS_MAX}")
    if isinstance(callbacks, str) or not isinstance(callbacks, Iterable):
        problems.append(f"callbacks are of type {type(callbacks).__name__}, needed: a list, also of a single one")
    if run_dir is not None and not isinstance(run_dir, str | os.PathLike):
        problems.append(f"run_dir = {run_dir!r}, needed: the path of a folder, or None for a new one below runs")
    if not isinstance(resume, bool):
        problems.append(f"resume = {resume!r}, needed: True or False")
    return problems
