"""A run's newest checkpoint as one file of named, whole tensors that other programs load.

GPT keeps elaswave's own tensor names; Llama gets Hugging Face's, and a ``config.json`` beside the file, so that
``transformers`` loads the folder as it is. Only the float32 master weights are exported, not the optimizer's state.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from elaswave.errors import CheckpointError, UsageError
from elaswave.models.llama import RMS_NORM_EPS, huggingface_name
from elaswave.state.checkpoint import (
    CheckpointMeta,
    SkippedCheckpoint,
    TensorInfo,
    WantedPiece,
    find_newest_checkpoint,
    model_name,
    read_pieces,
)

DEFAULT_OUTPUT = Path("export") / "model.safetensors"
"""Where an export goes if nothing else is said, inside the run folder: the name that ``transformers`` looks for."""

_CONFIG_FILE = "config.json"
_OWN_CONFIG_KEY = "elaswave_version"
_MODEL_PREFIX = model_name("")


class ExportSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an export has written."""

    output: str
    """The file of tensors."""
    config_file: str | None
    """The ``config.json`` beside it: written for Llama, unless one of another origin stands there."""
    step: int
    """The checkpoint's step."""
    checkpoint: str
    """Its folder."""
    num_tensors: int
    num_parameters: int
    num_bytes: int
    """Size of ``output``."""
    skipped: tuple[SkippedCheckpoint, ...]
    """Newer checkpoints that could not be used, and why."""


def export_safetensors(run_dir: Path, output: Path | None = None) -> ExportSummary:
    """Writes the master weights of a run's newest valid checkpoint as one safetensors file.

    The file appears under its name only when it is whole; an earlier one of that name is replaced. Its metadata
    (strings) holds ``format`` ("pt"), ``step``, ``config`` (JSON) and ``elaswave_version``.

    Args:
        run_dir: the run's folder.
        output: the file to write; None stands for ``DEFAULT_OUTPUT`` in the run folder.
    Raises:
        UsageError: the safetensors package is missing, or the output cannot be written.
        CheckpointError: the run has no valid checkpoint.
    """
    save_file = _safetensors_writer()
    search = find_newest_checkpoint(run_dir)
    if search.newest is None:
        reasons = "".join(f"\n  {skipped.folder.name}: {skipped.reason}" for skipped in search.skipped)
        raise CheckpointError(
            f"run {run_dir} has no valid checkpoint to export; a run writes one at its end and every "
            f"run.checkpoint_every steps{reasons and ', but these cannot be used:'}{reasons}"
        )
    meta = search.newest.meta
    own = {fqn.removeprefix(_MODEL_PREFIX): info for fqn, info in meta.tensors.items() if fqn.startswith(_MODEL_PREFIX)}
    family = meta.config.get("model", {}).get("family")
    rename = _renaming(family)
    tensors = {rename(name): tensor for name, tensor in _read_whole(search.newest.folder, own).items()}
    assert len(tensors) == len(own), "two tensors got the same name"

    is_default, output = output is None, output or run_dir / DEFAULT_OUTPUT
    if not is_default and not output.parent.is_dir():
        raise UsageError(
            f"cannot write {output}: there is no folder {output.parent}; make it, or choose another --output"
        )
    metadata = {
        "format": "pt",
        "step": str(meta.step),
        "config": msgspec.json.encode(meta.config).decode(),
        "elaswave_version": meta.elaswave_version,
    }
    config_file: Path | None = None
    try:
        output.parent.mkdir(exist_ok=True)
        _write_atomically(output, lambda path: save_file(tensors, path, metadata))
        if family == "llama":
            config_file = _write_config(output.parent, huggingface_config(meta, tensors))
        num_bytes = output.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}; choose another --output") from error
    return ExportSummary(
        output=str(output),
        config_file=None if config_file is None else str(config_file),
        step=meta.step,
        checkpoint=str(search.newest.folder),
        num_tensors=len(tensors),
        num_parameters=sum(tensor.numel() for tensor in tensors.values()),
        num_bytes=num_bytes,
        skipped=search.skipped,
    )


def huggingface_config(meta: CheckpointMeta, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The ``config.json`` that ``transformers`` needs to load an exported Llama.

    Args:
        meta: of the checkpoint; its ``config["model"]`` gives what shapes do not tell.
        tensors: by Hugging Face's names.
    """
    model = meta.config["model"]
    vocab_size, width = tensors["model.embed_tokens.weight"].shape
    head_size = width // model["num_heads"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": len(tensors["model.layers.0.mlp.gate_proj.weight"]),
        "num_hidden_layers": sum(name.endswith(".input_layernorm.weight") for name in tensors),
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": len(tensors["model.layers.0.self_attn.k_proj.weight"]) // head_size,
        "head_dim": head_size,
        "max_position_embeddings": model["context_length"],
        "rope_theta": model["rope_theta"],
        "rms_norm_eps": RMS_NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        # Tokens are bytes or a user's own: none of them begins or ends a text.
        "bos_token_id": None,
        "eos_token_id": None,
        _OWN_CONFIG_KEY: meta.elaswave_version,
    }


def _safetensors_writer() -> Callable[[dict[str, torch.Tensor], Path, dict[str, str]], None]:
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

    return save


def _renaming(family: str | None) -> Callable[[str], str]:
    return huggingface_name if family == "llama" else lambda name: name


def _read_whole(folder: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, torch.Tensor]:
    wanted = [WantedPiece(model_name(name), info.shape, 0, math.prod(info.shape)) for name, info in tensors.items()]
    found = read_pieces(folder, wanted)
    return {name: flat.view(info.shape) for (name, info), flat in zip(tensors.items(), found, strict=True)}


def _write_config(folder: Path, config: dict[str, Any]) -> Path | None:
    """Writes ``config.json``, or leaves one that elaswave did not write alone and returns None."""
    path = folder / _CONFIG_FILE
    if path.exists():
        try:
            foreign = _OWN_CONFIG_KEY not in json.loads(path.read_bytes())
        except (ValueError, TypeError):
            foreign = True
        if foreign:
            return None
    _write_atomically(path, lambda temporary: temporary.write_text(json.dumps(config, indent=2) + "\n"))
    return path


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a temporary file beside ``path``, makes it durable and gives it its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
