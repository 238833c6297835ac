"""All kinds of files that somebody else may have made, each with who reads it: a whole one to begin with, then changed.

A reader may give a value or one of the project's own errors. Anything else is a bug: a traceback, a wait, a process
that grows.
"""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors.torch import save_file
from tests.unit.observability.samples import make_result, write_events

from elaswave.api.export import export_safetensors
from elaswave.api.fine_tuning import FineTuning, saved_fine_tuning
from elaswave.checkpoints.checkpoint import find_newest_checkpoint, folder_of, shard_folder, verify_checkpoint
from elaswave.checkpoints.commit import commit_checkpoint
from elaswave.checkpoints.format import (
    MANIFEST_FILE,
    META_FILE,
    CheckpointMeta,
    TensorInfo,
    WantedPiece,
    checksum_of,
    model_name,
)
from elaswave.checkpoints.shards import Piece, elements_in, load_plain, read_pieces, write_shard
from elaswave.cli.whatif.scenario_options import ScenarioOptions, read_scenarios
from elaswave.config.load import load_config
from elaswave.config.network import read_network
from elaswave.config.presets import read_presets
from elaswave.config.schema import Config
from elaswave.config.values import read_toml
from elaswave.coordinator.job_spec import mark_of
from elaswave.data.fingerprint import dataset_fingerprint_in, fingerprint_in, fingerprint_of
from elaswave.data.samples import open_source
from elaswave.data.token_files import TokenWriter
from elaswave.data.tokenize import load_tokenizer, text_pieces
from elaswave.faults.injection import read_fault_records
from elaswave.job.setup import read_control_file
from elaswave.models.huggingface.model import hf
from elaswave.observability.events import read_events
from elaswave.observability.processes import PROCESSES_FILE, read_processes
from elaswave.observability.result import check_run_folder, read_digests, read_result, write_result
from elaswave.observability.run_folder import (
    AGENTS_FILE,
    CONFIG_FILE,
    CONTROL_FILE,
    DATA_FILE,
    DIGESTS_FILE,
    EVENTS_FILE,
    FAULTS_FILE,
    FINE_TUNING_FILE,
    HUGGINGFACE_DIR,
    LOGS_DIR,
    RESULT_FILE,
    data_facts,
    huggingface_files,
    last_lines,
    saved_config,
    worker_log,
)
from elaswave.observability.summary import summarize_run
from elaswave.observability.trace import merge_traces, part_path
from elaswave.store.file_store import FileStore
from elaswave.store.store import JournalRecord
from elaswave.untrusted import read_bytes

STEP = 3
WEIGHT = model_name("block.0.weight")


class Kind(NamedTuple):
    """One kind of folder."""

    make: Callable[[Path], None]
    """Writes a whole one into an empty folder."""
    files: tuple[str, ...]
    """Those that may have been made by another, as paths in it."""
    read: Callable[[Path], object]
    """Reads it as the product does."""


# --------------------------------------------------------------------------------------------------------- checkpoints


def _make_checkpoint(folder: Path) -> None:
    values = torch.arange(12, dtype=torch.float32)
    pieces = [Piece(WEIGHT, (3, 4), 0, values[:5]), Piece(WEIGHT, (3, 4), 5, values[5:])]
    items = write_shard(shard_folder(folder, STEP), "worker-0-generation-0", pieces)
    meta = CheckpointMeta(
        step=STEP,
        losses=[1.0, "nan", 0.5],
        grids={"block.0.weight": 40},
        seed=1,
        data_cursor=(0, 3),
        config=Config().to_dict(),
        tensors={WEIGHT: TensorInfo((3, 4))},
        elaswave_version="0.1.0",
        extra={
            "num_updates": 2,
            "calibrated": True,
            "val_steps": [1],
            "val_losses": [0.5],
            "data": {"num_bytes": 3, "sample": "00"},
        },
    )
    commit_checkpoint(folder_of(folder, STEP).with_suffix(".tmp"), items, meta)


def _read_checkpoint(folder: Path) -> object:
    found = find_newest_checkpoint(folder)
    if found.newest is None:
        return verify_checkpoint(folder_of(folder, STEP))  # which says why
    meta = found.newest.meta
    wanted = [WantedPiece(fqn, info.shape, 0, torch.Size(info.shape).numel()) for fqn, info in meta.tensors.items()]
    read_pieces(found.newest.folder, wanted)
    for step_said in (fingerprint_in, dataset_fingerprint_in):
        step_said(meta.extra)
    return export_safetensors(folder)


def resealed(folder: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Changes what a checkpoint says of itself, and makes its checksums right again, as whoever sends it can.

    Args:
        folder: of a run.
        change: of its manifest and its description, in their place.
    """
    checkpoint = folder_of(folder, STEP)
    meta = json.loads((checkpoint / META_FILE).read_bytes())
    manifest = json.loads((checkpoint / MANIFEST_FILE).read_bytes())["manifest"]
    change(manifest, meta)
    (checkpoint / META_FILE).write_text(json.dumps(meta))
    manifest["files"][META_FILE] = checksum_of((checkpoint / META_FILE).read_bytes())
    seal(checkpoint, json.dumps(manifest).encode())


def seal(checkpoint: Path, manifest: bytes) -> None:
    """Writes a manifest with its checksum."""
    content = {"checksum": checksum_of(manifest), "manifest": msgspec.Raw(manifest)}
    (checkpoint / MANIFEST_FILE).write_bytes(msgspec.json.encode(content))


# --------------------------------------------------------------------------------------------------------- run folders


def _make_run(folder: Path) -> None:
    config = load_config()
    (folder / "run.json").write_bytes(b'{"written_by": "elaswave"}\n')
    (folder / CONFIG_FILE).write_text(config.to_toml())
    write_result(folder, make_result())
    write_events(folder)
    (folder / DIGESTS_FILE).write_bytes(b'{"master.weight": "00ff"}')
    (folder / DATA_FILE).write_bytes(b'{"num_bytes": 3, "sample": "00"}')
    (folder / PROCESSES_FILE).write_bytes(b'{"processes": []}')
    (folder / CONTROL_FILE).write_bytes(
        b'{"address":"unix:/x","key_file":"/x/key","host":"h","launcher":{"role":"launcher","id":0,"pid":1,"start_ticks":1}}'
    )
    (folder / AGENTS_FILE).write_bytes(b'{"job": "j", "mark": "00"}')
    (folder / FAULTS_FILE).write_bytes(b"")
    (folder / HUGGINGFACE_DIR).mkdir()
    (folder / HUGGINGFACE_DIR / "config.json").write_bytes(b'{"model_type": "llama", "dtype": "float32"}')
    fine_tuning = msgspec.json.encode(FineTuning(folder="f", data="d"))
    (folder / HUGGINGFACE_DIR / FINE_TUNING_FILE).write_bytes(fine_tuning)
    (folder / LOGS_DIR).mkdir()
    (folder / LOGS_DIR / worker_log(0)).write_bytes(b"last words\n")
    part_path(folder, 0).write_bytes(b"{}")


_RUN_READERS: tuple[Callable[[Path], object], ...] = (
    check_run_folder,
    read_result,
    read_digests,
    lambda folder: read_events(folder / EVENTS_FILE),
    summarize_run,
    saved_config,
    data_facts,
    read_processes,
    read_control_file,
    mark_of,
    lambda folder: read_fault_records(folder / FAULTS_FILE),
    huggingface_files,
    saved_fine_tuning,
    lambda folder: last_lines(folder, 0),
    merge_traces,
)


# ------------------------------------------------------------------------------------------- models, data, other files


def _make_model(folder: Path) -> None:
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 5, "hidden_size": 4,
        "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    block, square = "model.layers.0.", (4, 4)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (5, 4), "model.norm.weight": (4,), "lm_head.weight": (5, 4),
        f"{block}input_layernorm.weight": (4,), f"{block}post_attention_layernorm.weight": (4,),
        **{f"{block}self_attn.{name}_proj.weight": square for name in "qkvo"},
        **{f"{block}mlp.{name}_proj.weight": square for name in ("gate", "up", "down")},
    }  # fmt: skip
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(shapes, "weights.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "tokenizer_config.json").write_text("{}")


def _make_data(folder: Path) -> None:
    with TokenWriter(folder / "tokens.bin", 40, b"t" * 16) as writer:
        writer.write(list(range(40)))
    (folder / "text.txt").write_text("a text\n" * 9)


def _read_data(folder: Path) -> None:
    for name in ("tokens.bin", "text.txt"):
        open_source(
            str(folder / name), vocab_size=None, context_length=4, validation_fraction=0.1, cache_dir=folder
        ).batch([0], "train")
        fingerprint_of(folder / name, whole=False)
        next(text_pieces(folder / name), None)


def _make_settings(folder: Path) -> None:
    (folder / "config.toml").write_text("format = 2\n[model]\nnum_layers = 2\n")
    (folder / "network.toml").write_text("")
    (folder / "presets.toml").write_text("")
    (folder / "trace.csv").write_text("0,add,a\n1000,remove,a\n")


def _read_trace(folder: Path) -> None:
    options = ScenarioOptions(**dict.fromkeys(ScenarioOptions.__dataclass_fields__) | {"trace": folder / "trace.csv"})
    read_scenarios(options, seeds=[0], num_workers=None, default_workers=1, devices_per_node=1)


def _make_archives(folder: Path) -> None:
    torch.save(torch.arange(6, dtype=torch.float32), folder / "tensor.pt")
    torch.save({"num_updates": 3, "scalars": {"a": 1.0}, "tensor": torch.zeros(3)}, folder / "values.pt")


def _read_tensor(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError):  # which those who read archives tell with the name of the checkpoint
        elements_in(read_bytes(path, 1 << 20), torch.float32, 6)


def _read_values(path: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        load_plain(read_bytes(path, 1 << 20))


def _make_journal(folder: Path) -> None:
    store = FileStore[Any](folder / "journal", JournalRecord)
    store.append()
    store.close()


def _read_journal(folder: Path) -> None:
    FileStore[Any](folder / "journal", JournalRecord).close()


def _one(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: read(folder / name)


def kinds() -> Mapping[str, Kind]:
    """All kinds of folders, by name."""
    run = (
        CONFIG_FILE, RESULT_FILE, DIGESTS_FILE, EVENTS_FILE, DATA_FILE, PROCESSES_FILE, CONTROL_FILE, AGENTS_FILE,
        FAULTS_FILE, f"{HUGGINGFACE_DIR}/config.json", f"{HUGGINGFACE_DIR}/{FINE_TUNING_FILE}",
        f"{LOGS_DIR}/{worker_log(0)}", "trace-worker-0.json.part",
    )  # fmt: skip
    checkpoint = f"checkpoints/step-{STEP:08d}"
    places = (META_FILE, MANIFEST_FILE, ".metadata", "worker-0-generation-0.distcp")
    model = ("config.json", "model.safetensors.index.json", "weights.safetensors", "tokenizer_config.json")
    return {
        "checkpoint": Kind(_make_checkpoint, tuple(f"{checkpoint}/{name}" for name in places), _read_checkpoint),
        **{f"run-{index}": Kind(_make_run, run, read) for index, read in enumerate(_RUN_READERS)},
        "model": Kind(_make_model, model, hf),
        "data": Kind(_make_data, ("tokens.bin", "text.txt"), _read_data),
        "config": Kind(_make_settings, ("config.toml",), lambda folder: load_config(folder / "config.toml")),
        "toml": Kind(_make_settings, ("config.toml",), _one("config.toml", read_toml)),
        "network": Kind(_make_settings, ("network.toml",), _one("network.toml", read_network)),
        "presets": Kind(_make_settings, ("presets.toml",), _one("presets.toml", read_presets)),
        "tokenizer": Kind(_make_settings, ("config.toml",), _one("config.toml", load_tokenizer)),
        "trace": Kind(_make_settings, ("trace.csv",), _read_trace),
        "tensor": Kind(_make_archives, ("tensor.pt",), _one("tensor.pt", _read_tensor)),
        "values": Kind(_make_archives, ("values.pt",), _one("values.pt", _read_values)),
        "journal": Kind(_make_journal, ("journal",), _read_journal),
    }
