"""A run's weights as a folder that ``from_pretrained`` of transformers loads: weights, configuration, tokenizer.

A model that came in through `elaswave.hf` goes out as it came in: names, shapes, types and tied tensors are those of
transformers' own files. The built-in GPT and Llama are described as far as transformers' GPT-2 and Llama can be.
transformers is not needed here.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from elaswave.api.export import (
    DEFAULT_OUTPUT,
    OWN_CONFIG_KEY,
    ExportSummary,
    Weights,
    export_safetensors,
    newest_weights,
    safetensors_writer,
    write_atomically,
)
from elaswave.errors import UsageError
from elaswave.fences import changing
from elaswave.models.huggingface.families import FAMILIES
from elaswave.models.huggingface.model import CONFIG_FILE, DTYPES
from elaswave.models.huggingface.stored import INDEX, SINGLE
from elaswave.untrusted import decode_json, read_json, reason


def export_folder(
    run_dir: Path, kept: Mapping[str, bytes], output: Path | None = None, *, weights: Weights | None = None
) -> ExportSummary:
    """Writes a folder for ``from_pretrained``.

    Args:
        run_dir: the run's folder.
        kept: what the run keeps of a transformers model, by name; empty: it trained another one.
        output: the folder to write, in one that exists; None: ``export`` in the run's folder.
        weights: what to write; None: the newest valid checkpoint's.
    Raises:
        UsageError: the model is one that transformers does not know, or the folder cannot be written.
        CheckpointError: the run has no valid checkpoint.
    """
    weights = newest_weights(run_dir) if weights is None else weights
    model = weights.config.get("model", {})
    if not kept and model.get("family") not in _NOTES:
        raise UsageError(
            f"{run_dir} trained a script's own model, which is none of transformers: leave --format out to get its "
            "tensors as one file"
        )
    folder = run_dir / DEFAULT_OUTPUT.parent if output is None else output
    _prepare(folder)
    if not kept:
        summary = export_safetensors(run_dir, folder / SINGLE, weights=weights)
        notes = _NOTES[model["family"]](weights.config) + _notes_of_fences(model)
        return msgspec.structs.replace(summary, notes=notes)
    described = _described(run_dir, kept)
    tensors = _as_stored(described, weights.tensors)
    metadata = {"format": "pt", "step": str(weights.step), OWN_CONFIG_KEY: weights.elaswave_version}
    try:
        for name, content in kept.items():
            if name != CONFIG_FILE:
                write_atomically(folder / name, functools.partial(Path.write_bytes, data=content))
        text = json.dumps(described | {OWN_CONFIG_KEY: weights.elaswave_version}, indent=2) + "\n"
        write_atomically(folder / CONFIG_FILE, lambda path: path.write_text(text))
        safetensors_writer()(tensors, folder / SINGLE, metadata)
        num_bytes = (folder / SINGLE).stat().st_size
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}; choose another --output") from error
    has_tokenizer = any(name.startswith(("tokenizer", "vocab", "spiece")) for name in kept)
    notes = () if has_tokenizer else ("no tokenizer: the folder that was trained from had none",)
    return ExportSummary(
        output=str(folder / SINGLE),
        config_file=str(folder / CONFIG_FILE),
        step=weights.step,
        checkpoint=None if weights.checkpoint is None else str(weights.checkpoint),
        num_tensors=len(tensors),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        num_bytes=num_bytes,
        skipped=weights.skipped,
        notes=(*notes, *_notes_of_fences(model)),
    )


def _described(run_dir: Path, kept: Mapping[str, bytes]) -> dict[str, Any]:
    """The configuration of a transformers model that a run keeps.

    Raises:
        UsageError: no run has written it.
    """
    try:
        found = decode_json(kept[CONFIG_FILE])
        if found["model_type"] in FAMILIES and found["dtype"] in DTYPES:
            return found
        problem = "it is of a model that no run trains"
    except (KeyError, TypeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise UsageError(f"the {CONFIG_FILE} that {run_dir} keeps of its model is damaged ({problem}): bring it again")


def _prepare(folder: Path) -> None:
    """Makes the folder, and refuses one with somebody else's model.

    Raises:
        UsageError: names the file that is in the way.
    """
    if not folder.parent.is_dir():
        raise UsageError(
            f"cannot write {folder}: there is no folder {folder.parent}; make it, or choose another --output"
        )
    try:
        folder.mkdir(exist_ok=True)
        config = folder / CONFIG_FILE
        is_ours = config.is_file() and OWN_CONFIG_KEY in read_json(config)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"cannot write {folder}: {reason(error)}; choose another --output") from error
    in_the_way = [name for name in (CONFIG_FILE, INDEX) if (folder / name).exists() and not is_ours]
    if in_the_way:
        raise UsageError(
            f"{folder} holds {in_the_way[0]}, which elaswave has not written, so it is somebody's model: choose "
            "another --output"
        )


def _as_stored(described: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as transformers' files have them, in the type that the model computes in."""
    family, dtype = FAMILIES[described["model_type"]], DTYPES[described["dtype"]]
    tensors = {}
    for name, tensor in own.items():
        pieces = family.pieces(name, tensor.shape)
        flat, start = tensor.to(dtype).reshape(-1), 0
        for piece, shape in pieces:
            stop = start + torch.Size(shape).numel()
            tensors[piece] = flat[start:stop].view(shape).clone() if len(pieces) > 1 else flat.view(shape)
            start = stop
    return tensors


def _notes_of_fences(model: Mapping[str, Any]) -> tuple[str, ...]:
    fences = ", ".join(changing(model.get("fences", ())))
    return (f"the model was trained with the fences {fences}, which transformers leaves out",) if fences else ()


def _notes_of_gpt(config: Mapping[str, Any]) -> tuple[str, ...]:
    return (_NO_TOKENIZER,)


def _notes_of_llama(config: Mapping[str, Any]) -> tuple[str, ...]:
    dropout = config["model"]["dropout"]
    lost = (
        f"dropout {dropout} is left out: transformers' Llama has none on embeddings and on what blocks add; logits are "
        "the same",
    )
    return (*(lost if dropout else ()), _NO_TOKENIZER)


_NO_TOKENIZER = (
    "no tokenizer: the run read bytes or ready tokens; put the files of the tokenizer that made them beside the weights"
)
_NOTES = {"gpt": _notes_of_gpt, "llama": _notes_of_llama}
