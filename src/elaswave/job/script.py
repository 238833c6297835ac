"""What a script brings to its job, beside the configuration. No torch here: the launcher imports this."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from elaswave.job.read_files import ReadFile


class Script(NamedTuple):
    """A script's training, and how its processes begin.

    The process that launches a script's job is the script's own: callbacks may have started threads in it, and
    libraries have left state. So it forks nothing but the template, and that only where it may.
    """

    training: Any
    """An `elaswave.training.definition.Training`."""
    environment: Mapping[str, str] | None
    """Of a fresh interpreter that becomes the template and gets the training pickled; None: the template is forked."""
    on_step: Callable[[int, float, Mapping[str, float]], None]
    """Called in this process after each committed step, in order and once, with its number and loss."""
    files: Mapping[str, bytes] = {}
    """To be kept in the run's folder, under ``huggingface``, by name: what an export needs of a transformers model."""
    read_files: tuple[ReadFile, ...] = ()
    """That the script has open, and that a fork inherits."""
