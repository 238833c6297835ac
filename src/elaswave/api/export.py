"""A run's weights as one file of named, whole tensors that other programs load.

They get Hugging Face's names and a ``config.json`` beside the file, so that ``transformers`` loads the folder as it is:
a Llama as ``LlamaForCausalLM``, a GPT as ``GPT2LMHeadModel``. Only the float32 master weights are exported, not the
optimizer's state.

A run's weights as a folder that ``from_pretrained`` of transformers loads: weights, configuration, tokenizer.

A model that came in through `elaswave.hf` goes out as it came in: names, shapes, types and tied tensors are those of
transformers' own files. The built-in GPT and Llama are described as far as transformers' GPT-2 and Llama can be.
transformers is not needed here.
"""

import functools
import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from elaswave._version import __version__
from elaswave.checkpoints import shards
from elaswave.checkpoints.checkpoint import CheckpointRef, SkippedCheckpoint, find_newest_checkpoint
from elaswave.checkpoints.format import EMA, CheckpointMeta, TensorInfo, WantedPiece, model_name, optimizer_name
from elaswave.checkpoints.shards import read_pieces
from elaswave.errors import CheckpointError, UsageError
from elaswave.fences import changing
from elaswave.models import gpt, llama
from elaswave.models.huggingface.model import CONFIG_FILE, DTYPES
from elaswave.models.huggingface.parts import FAMILIES
from elaswave.models.huggingface.stored import INDEX, SINGLE
from elaswave.models.layers import ModelSpec, build_layer
from elaswave.state.flat import buffer_from_float32, model_shapes, slot_values
from elaswave.untrusted import decode_json, open_binary, read_json, reason

DEFAULT_OUTPUT = Path("export") / "model.safetensors"
"""Where an export goes if nothing else is said, inside the run folder: the name that ``transformers`` looks for."""

_CONFIG_FILE = "config.json"
OWN_CONFIG_KEY = "elaswave_version"
"""In a ``config.json`` that elaswave has written."""
_MODEL_PREFIX = model_name("")
_EMA_PREFIX = optimizer_name(EMA, "")


class ExportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an export has written."""

    output: str
    """The file of tensors."""
    config_file: str | None
    """The ``config.json`` beside it, unless one of another origin stands there."""
    step: int
    """0: the initial weights."""
    checkpoint: str | None
    """Folder of the checkpoint that they come from; None for the initial weights."""
    num_tensors: int
    num_parameters: int
    num_bytes: int
    """Size of ``output``."""
    skipped: tuple[SkippedCheckpoint, ...]
    """Newer checkpoints that could not be used, and why."""
    notes: tuple[str, ...] = ()
    """What the folder does not say of the model, or lacks."""


class Weights(NamedTuple):
    """The master weights of a run at one step."""

    step: int
    """0: the initial ones."""
    config: Mapping[str, Any]
    """The run's, as JSON."""
    elaswave_version: str
    tensors: Mapping[str, torch.Tensor]
    """Whole tensors by elaswave's own names."""
    checkpoint: Path | None = None
    """The folder that they were read from."""
    skipped: tuple[SkippedCheckpoint, ...] = ()


def newest_weights(run_dir: Path, *, ema: bool = False) -> Weights:
    """Returns the weights of a run's newest valid checkpoint.

    Args:
        run_dir: the run's folder.
        ema: as of `stored_weights`.
    Raises:
        CheckpointError: there is none, or it has no average of weights.
    """
    search = find_newest_checkpoint(run_dir)
    if search.newest is None:
        reasons = "".join(f"\n  {skipped.folder.name}: {skipped.reason}" for skipped in search.skipped)
        raise CheckpointError(
            f"run {run_dir} has no valid checkpoint to export; a run writes one at its end, every run.checkpoint_every "
            f"steps and every run.checkpoint_every_s seconds, and --step 0 gives the initial weights"
            f"{reasons and ', but these cannot be used:'}{reasons}"
        )
    return stored_weights(search.newest, search.skipped, ema=ema)


def stored_weights(ref: CheckpointRef, skipped: tuple[SkippedCheckpoint, ...] = (), *, ema: bool = False) -> Weights:
    """Returns the weights of a checkpoint that has been checked.

    Args:
        ref: the checkpoint.
        skipped: newer ones that could not be used.
        ema: their moving average (``optimizer.ema_decay``) instead; tensors that have none stay as they are.
    Raises:
        CheckpointError: the average is asked for, and there is none.
    """
    meta = ref.meta
    stored = {name: (model_name(name), info) for name, info in _with_prefix(meta, _MODEL_PREFIX).items()}
    if ema:
        averages = _with_prefix(meta, _EMA_PREFIX)
        if not averages:
            raise CheckpointError(
                f"checkpoint {ref.folder} has no moving average of the weights; a run keeps one if optimizer.ema_decay "
                "is above 0 from its first step on"
            )
        stored |= {name: (optimizer_name(EMA, name), info) for name, info in averages.items()}
    return Weights(meta.step, meta.config, meta.elaswave_version, _read_whole(ref.folder, stored), ref.folder, skipped)


def _with_prefix(meta: CheckpointMeta, prefix: str) -> dict[str, TensorInfo]:
    return {fqn.removeprefix(prefix): info for fqn, info in meta.tensors.items() if fqn.startswith(prefix)}


def initial_weights(model: ModelSpec, seed: int, config: Mapping[str, Any]) -> Weights:
    """Makes the weights with which a run begins.

    Args:
        model: its layers.
        seed: ``run.seed``.
        config: the run's, as JSON.
    """
    shapes, tensors = model_shapes(model), {}
    for layer, spec in enumerate(model.layers):
        module = build_layer(spec, seed, layer)
        for shape in shapes:
            if layer == (shape.users[0] if shape.users else shape.layer):
                for slot, values in slot_values(spec, module, shape):
                    tensors[slot.name] = buffer_from_float32(values, shards.DTYPES[slot.dtype]).view(slot.shape)
        for tensor in shapes[layer].frozen:
            tensors[tensor.name] = module.get_parameter(spec.own_name(tensor.name)).detach()
    return Weights(0, config, __version__, tensors)


def export_safetensors(
    run_dir: Path, output: Path | None = None, *, weights: Weights | None = None, own_names: bool = False
) -> ExportSummary:
    """Writes the master weights of a run as one safetensors file.

    The file appears under its name only when it is whole; an earlier one of that name is replaced. Its metadata
    (strings) holds ``format`` ("pt"), ``step``, ``config`` (JSON) and ``elaswave_version``.

    Args:
        run_dir: the run's folder.
        output: the file to write, in a folder that exists; None stands for ``DEFAULT_OUTPUT`` in the run folder.
        weights: what to write; None stands for the newest valid checkpoint's.
        own_names: keep elaswave's names and shapes of tensors instead of Hugging Face's, and write no ``config.json``.
    Raises:
        UsageError: the safetensors package is missing, or the output cannot be written.
        CheckpointError: the run has no valid checkpoint.
    """
    write_tensors = safetensors_writer()
    weights = newest_weights(run_dir) if weights is None else weights
    model = weights.config.get("model", {})
    export = _as_own if own_names else {"llama": _as_llama, "gpt": _as_gpt2}.get(model.get("family"), _as_own)
    try:
        tensors, huggingface = export(model, weights.tensors)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"the configuration of the checkpoint {weights.checkpoint} does not fit its tensors "
            f"({type(error).__name__}: {error}): no run has written it"
        ) from error
    if len(tensors) != len(weights.tensors):
        raise CheckpointError(f"two tensors of the checkpoint {weights.checkpoint} have one name in {model['family']}")

    is_default, output = output is None, output or run_dir / DEFAULT_OUTPUT
    if not is_default and not output.parent.is_dir():
        raise UsageError(
            f"cannot write {output}: there is no folder {output.parent}; make it, or choose another --output"
        )
    metadata = {
        "format": "pt",
        "step": str(weights.step),
        "config": msgspec.json.encode(weights.config).decode(),
        "elaswave_version": weights.elaswave_version,
    }
    config_file: Path | None = None
    try:
        output.parent.mkdir(exist_ok=True)
        write_tensors(tensors, output, metadata)
        if huggingface is not None:
            config_file = _write_config(output.parent, huggingface | {OWN_CONFIG_KEY: weights.elaswave_version})
        num_bytes = output.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another --output") from error
    return ExportSummary(
        output=str(output),
        config_file=None if config_file is None else str(config_file),
        step=weights.step,
        checkpoint=None if weights.checkpoint is None else str(weights.checkpoint),
        num_tensors=len(tensors),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        num_bytes=num_bytes,
        skipped=weights.skipped,
    )


_Exported = tuple[dict[str, torch.Tensor], dict[str, Any] | None]
"""Tensors by the names that they get, and the ``config.json`` that transformers needs, if it knows the model."""

_COMMON_CONFIG: dict[str, Any] = {
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    # Tokens are bytes or a user's own: none of them begins or ends a text.
    "bos_token_id": None,
    "eos_token_id": None,
}


def _as_own(model: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> _Exported:
    return dict(own), None


def _as_llama(model: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> _Exported:
    tensors = {llama.huggingface_llama_name(name): tensor for name, tensor in own.items()}
    vocab_size, hidden_size = tensors["model.embed_tokens.weight"].shape
    head_size = hidden_size // model["num_heads"]
    return tensors, _COMMON_CONFIG | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": len(tensors["model.layers.0.mlp.gate_proj.weight"]),
        "num_hidden_layers": sum(name.endswith(".input_layernorm.weight") for name in tensors),
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": len(tensors["model.layers.0.self_attn.k_proj.weight"]) // head_size,
        "head_dim": head_size,
        "max_position_embeddings": model["context_length"],
        "rope_theta": model["rope_theta"],
        "rms_norm_eps": llama.RMS_NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def _as_gpt2(model: Mapping[str, Any], own: Mapping[str, torch.Tensor]) -> _Exported:
    tensors = {}
    for own_name, tensor in own.items():
        name, transposed = gpt.gpt2_name(own_name)
        tensors[name] = tensor.t().contiguous() if transposed else tensor
    vocab_size, hidden_size = tensors["transformer.wte.weight"].shape
    return tensors, _COMMON_CONFIG | {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_embd": hidden_size,
        "n_layer": sum(name.endswith(".ln_1.weight") for name in tensors),
        "n_head": model["num_heads"],
        "n_positions": model["context_length"],
        "activation_function": "gelu",
        "layer_norm_epsilon": gpt.LAYER_NORM_EPS,
        "resid_pdrop": model["dropout"],
        "embd_pdrop": model["dropout"],
        "attn_pdrop": model["dropout"],
    }


def safetensors_writer() -> Callable[[dict[str, torch.Tensor], Path, dict[str, str]], None]:
    """Makes what writes tensors and metadata as a file of safetensors, which appears under its name when it is whole.

    Raises:
        UsageError: the safetensors package is missing; what is returned: the file cannot be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise UsageError(
            "exporting to safetensors needs the safetensors package; install it with: pip install safetensors"
        ) from error

    def save(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        path.touch()
        mode = stat.S_IMODE(path.stat().st_mode)
        try:
            save_file(tensors, path, metadata)
        except SafetensorError as error:
            raise UsageError(f"cannot write {path}: {error}; choose another --output") from error
        path.chmod(mode)  # safetensors leaves the file readable by its owner alone

    def write(tensors: dict[str, torch.Tensor], output: Path, metadata: dict[str, str]) -> None:
        write_atomically(output, lambda path: save(tensors, path, metadata))

    return write


def _read_whole(folder: Path, tensors: Mapping[str, tuple[str, TensorInfo]]) -> dict[str, torch.Tensor]:
    wanted = [WantedPiece(fqn, info.shape, 0, math.prod(info.shape)) for fqn, info in tensors.values()]
    found = read_pieces(folder, wanted)
    return {name: flat.view(info.shape) for (name, (_, info)), flat in zip(tensors.items(), found, strict=True)}


def _write_config(folder: Path, config: dict[str, Any]) -> Path | None:
    """Writes ``config.json``, or leaves one that elaswave did not write alone and returns None."""
    path = folder / _CONFIG_FILE
    if path.exists():
        try:
            foreign = OWN_CONFIG_KEY not in read_json(path)
        except (OSError, ValueError, TypeError):
            foreign = True
        if foreign:
            return None
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(config, indent=2) + "\n"))
    return path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path``, makes it durable and gives it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with open_binary(temporary) as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
    """Decodes the configuration of a transformers model that a run keeps.

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
    """Converts tensors to those that transformers' files have, in the type that the model computes in."""
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
