"""The result of a run: ``result.json`` and ``digests.json``, with their writers and readers.

Two runs are the same computation exactly if their ``losses`` and ``state_digest`` are equal, so a result holds
nothing that is rounded: losses are written with the shortest digits that read back as the same float.

JSON has no not-a-number, and a writer that turns it into ``null`` loses what happened. Wherever a number may fail to
be finite its type is ``JsonFloat``: a float, or one of the strings "nan", "inf", "-inf". The structs normalise what
they are given, so a float nan may be passed in.

This module draws nothing and reads no clock.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from elaswave.errors import RunFolderError
from elaswave.observability.run_folder import DIGESTS_FILE, EVENTS_FILE, RESULT_FILE, atomic_write
from elaswave.types import Layout
from elaswave.untrusted import JSON_BYTES_MAX, decode_json, read_bytes, reason

JsonFloat = float | Literal["nan", "inf", "-inf"]
"""A float as a run folder holds it: finite ones as numbers, the others as strings."""


def to_json_float(value: JsonFloat) -> JsonFloat:
    """Converts a float to the form that JSON can hold: non-finite ones become "nan", "inf" or "-inf"."""
    if isinstance(value, str) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def from_json_float(value: JsonFloat) -> float:
    """Returns the number that a ``JsonFloat`` stands for."""
    return float(value)


def set_json_floats(struct: msgspec.Struct, *names: str) -> None:
    """Normalises fields of a frozen struct, from its ``__post_init__``; ``None`` stays.

    Args:
        struct: the struct under construction.
        names: fields that hold a ``JsonFloat``, a list or a dictionary of them (or of such lists), or ``None``.
    """
    for name in names:
        msgspec.structs.force_setattr(struct, name, _json_floats(getattr(struct, name)))


def _json_floats(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_json_floats(item) for item in value]
    if isinstance(value, dict):
        return {name: _json_floats(item) for name, item in value.items()}
    return None if value is None else to_json_float(value)


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One membership view of the run and the layout that it trained under."""

    generation: int
    """Number of the membership view."""
    layout: Layout
    """Who ran what."""
    reason: str
    """Why this layout was chosen, one line."""
    first_step: int
    """First step that ran under it."""
    change: int = 0
    """Number of the planned change that brought it; 0 for the first layout and those that a recovery brought."""
    schedule: str = ""
    """Of the workers' programs."""
    predicted_step_s: float | None = None
    """Seconds of a step as they were predicted; None where nothing was known of the costs."""
    measured_step_s: float | None = None
    """Median over the steps that ran under it, its first one left out; None if there were none."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """One event that changed who takes part or who holds what: a failure, a join, a drain, a slow-down, a migration, a
    repair.

    Times are in seconds, from the injected fault's own time stamp where there is one, else from the first suspicion.
    For a join or a drain they begin with the pause at the boundary between two steps. Nobody waits for a planned change
    of the layout, so its times are 0.
    """

    kind: Literal["lost", "joined", "drained", "slowed", "migrated", "coordinator", "repaired"]
    """`slowed`: a planned change counts with a smaller speed of the worker; `migrated`: another one moved layers;
    `repaired`: copies of the state were found wrong, and made good."""
    worker: int | None
    """The worker concerned, of a repair the one that said so first; None for the coordinator, and for a migration."""
    step: int
    """In which it happened; of what changes between two steps, the first one after it."""
    phase: str
    """Phase of the step in which it happened: forward, backward, reduce, vote, apply, gather; or any, where it is not
    known: the lost worker's last heartbeat was of a place that it had passed, since it has voted later."""
    detected_by: Literal["exit", "link", "heartbeat", "progress", "vote", "drain", "host"] | None
    generation: int
    """The generation that the event led to."""
    attempt: int
    outcome: Literal["committed", "retried"]
    """Whether the step in flight was committed as it stood or tried again."""
    detect_s: float | None
    """None where no injected fault says when it really happened."""
    agree_s: float
    plan_s: float
    edit_s: float
    promote_s: float
    redo_s: float
    total_s: float
    """From the fault until training went on, ``redo_s`` included."""
    critical_bytes: int
    """State moved before training went on; the step's own gather is not counted."""
    num_microbatches_recomputed: int
    last_lines: list[str] = []
    """What a lost worker had printed last."""

    @property
    def is_failure(self) -> bool:
        """Whether something was lost."""
        return self.kind in ("lost", "coordinator")


class WorkerMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker needed, in bytes."""

    peak_bytes: int
    """Largest resident memory of the process."""
    optimizer_bytes: int
    """Master weights and optimizer slots of the blocks that the worker owns or follows."""


class CheckpointRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One durable checkpoint that was completely written."""

    step: int
    path: str
    """Folder, relative to the run folder."""
    num_bytes: int
    duration_s: float
    """From the request until it was complete; training went on meanwhile."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``result.json`` holds."""

    steps: int
    """Number of steps that the state has behind it, counted from the very first one, also after a resume."""
    losses: list[JsonFloat]
    """Mean nats per token of every step from the first one, also after a resume; a skipped step's is "nan"."""
    state_digest: str
    """Hash over step, data cursor, grids, every master weight and optimizer slot, as hexadecimal digits."""
    throughput_tokens_per_s: float | None
    """Start-up and the first three steps left out; None if there were no more steps than that, and for a script's own
    model, whose samples are not counted in tokens."""
    generations: list[GenerationRecord]
    throughput_samples_per_s: float | None = None
    """The same in samples; None if there were no more steps."""
    recoveries: list[Recovery] = []
    val_losses: list[JsonFloat] = []
    """Mean nats per token on the validation split, one per evaluation."""
    val_steps: list[int] = []
    """The step after which each of ``val_losses`` was measured."""
    metrics: dict[str, list[JsonFloat]] = {}
    """By name, of every step from the first one; "nan" where a step had none."""
    val_metrics: dict[str, list[JsonFloat]] = {}
    """By name, one per evaluation."""
    memory: dict[int, WorkerMemory] = {}
    """By worker id."""
    data_wait_s: dict[int, float] = {}
    """By worker id, of those that have finished: seconds in which RUN has waited for micro-batches."""
    fence_ratios: list[str] = []
    """Of adaptive fences, as ``STEP:LAYER:RATIO``: from that step on, in all steps of the run; what
    ``model.fence_ratios`` takes."""
    fence_bypasses: dict[str, int] = {}
    """By fence and direction ("block.1:int8 forward"): tensors that the workers who have finished have let pass as they
    were, since a number was not finite; repetitions and evaluations counted."""
    checkpoints: list[CheckpointRecord] = []
    start_up_s: float = 0.0
    """From the start of the command until the first step began."""
    duration_s: float = 0.0
    """The whole run of this process, start-up included."""
    config: dict[str, Any] = {}
    """The resolved configuration, section by section."""

    def __post_init__(self) -> None:
        set_json_floats(self, "losses", "val_losses", "metrics", "val_metrics")
        if len(self.losses) != self.steps:
            raise ValueError(f"a result of {self.steps} steps needs as many losses, not {len(self.losses)}")
        if len(self.val_losses) != len(self.val_steps):
            raise ValueError(f"{len(self.val_losses)} val_losses do not match {len(self.val_steps)} val_steps")
        if not is_hex(self.state_digest):
            raise ValueError(f"state_digest must be hexadecimal digits, not {self.state_digest!r}")


def is_hex(text: str) -> bool:
    """Tells whether a text is a digest: one or more lower-case hexadecimal digits."""
    return bool(text) and all(character in "0123456789abcdef" for character in text)


# ---------------------------------------------------------------------------------------------------------- writing


def encode_result(result: RunResult) -> bytes:
    """Encodes ``result.json`` as bytes: one indented JSON document that ends in a new line."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def write_result(run_dir: Path, result: RunResult) -> Path:
    """Writes ``result.json``.

    Returns:
        Path of the file.
    Raises:
        RunFolderError: the folder cannot be written.
    """
    path = run_dir / RESULT_FILE
    atomic_write(path, [encode_result(result)])
    return path


def write_digests(run_dir: Path, tensor_digests: Mapping[str, str]) -> Path:
    """Writes ``digests.json``: ``{"<slot>.<tensor>": hexadecimal digest}`` in the order given.

    Returns:
        Path of the file.
    Raises:
        RunFolderError: the folder cannot be written.
        ValueError: a digest is not hexadecimal.
    """
    for name, digest in tensor_digests.items():
        if not is_hex(digest):
            raise ValueError(f"the digest of {name} must be hexadecimal digits, not {digest!r}")
    path = run_dir / DIGESTS_FILE
    atomic_write(path, [msgspec.json.format(msgspec.json.encode(dict(tensor_digests)), indent=2), b"\n"])
    return path


# ---------------------------------------------------------------------------------------------------------- reading


def check_run_folder(run_dir: Path) -> None:
    """Checks that a path is the folder of a run, finished or not.

    Raises:
        RunFolderError: it is not there, is no folder, or holds neither a result nor an event log.
    """
    if not run_dir.exists():
        raise RunFolderError(f"{run_dir}: no such folder; give the folder of a run, the one named by --run-dir")
    if not run_dir.is_dir():
        raise RunFolderError(f"{run_dir} is a file; give the folder of a run, the one named by --run-dir")
    if not (run_dir / RESULT_FILE).exists() and not (run_dir / EVENTS_FILE).exists():
        raise RunFolderError(
            f"{run_dir} is not a run folder: it holds neither {RESULT_FILE} nor {EVENTS_FILE}; "
            "give the folder of a run, the one named by --run-dir"
        )


def read_result(run_dir: Path) -> RunResult:
    """Reads and checks ``result.json``.

    Raises:
        RunFolderError: not a run folder, a run without a result, or a result that is damaged.
    """
    check_run_folder(run_dir)
    path = run_dir / RESULT_FILE
    if not path.exists():
        raise RunFolderError(
            f"{run_dir} has no {RESULT_FILE}: the run is still going on or has ended before its last step; "
            f"`elaswave inspect {run_dir}` shows how far it came"
        )
    return _decode(path, RunResult)


def read_digests(run_dir: Path) -> dict[str, str] | None:
    """Reads ``digests.json``; None if the run has none.

    Raises:
        RunFolderError: not a run folder, or the file is damaged.
    """
    check_run_folder(run_dir)
    path = run_dir / DIGESTS_FILE
    return _decode(path, dict[str, str]) if path.exists() else None


_T = TypeVar("_T")


def _decode(path: Path, type_: type[_T]) -> _T:
    """Reads a JSON file of a known shape, with errors that name the file."""
    try:
        data = read_bytes(path, JSON_BYTES_MAX)
        try:
            return decode_json(data, type_)
        except ValueError:
            if (translated := of_an_earlier_release(data)) is None:
                raise
            return decode_json(translated, type_)
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {reason(error)}") from error
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged or not of this version: {error}") from error


_EARLIER = {"epoch": "generation", "epochs": "generations"}
_OF_A_USER = ("metrics", "val_metrics", "config")
"""What stands in these has names of its own."""


def of_an_earlier_release(document: bytes) -> bytes | None:
    """Rewrites a result or an event with today's names, if it has those of releases that called a generation an epoch.

    Returns:
        The document; None: it has no such name.
    Raises:
        ValueError: it is no JSON.
    """
    if not any(f'"{name}"'.encode() in document for name in _EARLIER):
        return None
    return msgspec.json.encode(_with_generations(decode_json(document)))


def _with_generations(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_generations(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        _EARLIER.get(name, name): held if name in _OF_A_USER else _with_generations(held)
        for name, held in value.items()
    }
