"""Turns a run's folder into what it was before configurations carried the number of their format. A helper."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from elaswave.config.toml import toml_document
from elaswave.state.checkpoint_format import MANIFEST_FILE, META_FILE, checksum_of, decode_manifest, encode_manifest


def in_format_1(run_dir: Path) -> None:
    """Rewrites every configuration that a run folder holds: in ``config.toml``, ``result.json``, ``events.jsonl`` and
    all checkpoints, whose checksums are made anew."""
    saved = run_dir / "config.toml"
    saved.write_text(toml_document(_old(tomllib.loads(saved.read_text()))))
    result = run_dir / "result.json"
    if result.exists():
        result.write_bytes(_with_old_config(result.read_bytes()))
    events = run_dir / "events.jsonl"
    if events.exists():
        lines = events.read_bytes().splitlines()
        events.write_bytes(b"".join(_with_old_config(line) + b"\n" for line in lines))
    for path in (run_dir / "checkpoints").glob(f"*/{META_FILE}"):
        folder, meta = path.parent, _with_old_config(path.read_bytes())
        manifest = decode_manifest((folder / MANIFEST_FILE).read_bytes())
        files = manifest.files | {META_FILE: checksum_of(meta)}
        path.write_bytes(meta)
        (folder / MANIFEST_FILE).write_bytes(encode_manifest(msgspec.structs.replace(manifest, files=files)))


def _with_old_config(document: bytes) -> bytes:
    values = msgspec.json.decode(document)
    if "config" not in values:
        return document
    return msgspec.json.encode(values | {"config": _old(values["config"])})


def _old(config: dict[str, Any]) -> dict[str, Any]:
    assert config.pop("format") == 2
    names = {"hidden_size": "width", "intermediate_size": "hidden_size"}
    return config | {"model": {names.get(key, key): value for key, value in config["model"].items()}}
