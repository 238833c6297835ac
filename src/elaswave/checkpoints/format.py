"""What a checkpoint folder holds: written items, the description of the run, the manifest. No torch, no files.

    checkpoints/step-00000017/
      <shard>.distcp   the tensors, one file per worker, in torch.distributed.checkpoint's (DCP's) file format
      meta.json        the run at that step: losses, grids, seed, data cursor, configuration, tensors
      manifest.json    where each rectangle stands, and a checksum of every stored byte, its own included
      .metadata        DCP's index (a pickle, which elaswave writes but never reads)

DCP loads a flipped bit silently and records no losses or grids, so the manifest is what elaswave itself trusts.
Tensor names are "model.<tensor>" for the float32 master weights and "optimizer.<slot>.<tensor>" for optimizer state.
``checkpoint_files`` reads and checks such a folder, ``checkpoint_shards`` writes and reads tensors, ``dcp_index``
writes DCP's index.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from elaswave.config_format import FORMAT_KEY, format_problem
from elaswave.errors import CheckpointError
from elaswave.untrusted import decode_json, is_plain_name

FORMAT_VERSION = 1
META_FILE = "meta.json"
MANIFEST_FILE = "manifest.json"
DCP_METADATA_FILE = ".metadata"
SHARD_SUFFIX = ".distcp"
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "bool": 1,
        "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    }
)  # fmt: skip
"""Bytes of an element, by the names of element types that a checkpoint may hold."""
ARCHIVE_BYTES_MAX = 1 << 16
"""Of an archive, beside its elements: torch writes some two thousand."""
DIMENSIONS_MAX = 64
"""As many as a tensor of torch may have."""
EXPONENT_MAX = 1 << 10
"""Beyond it no float reaches."""

MASTER = "master"
"""The float32 master weights among the states of a tensor; the others are the optimizer's slots."""
EMA = "ema"
"""The exponential moving average of the master weights, among the optimizer's slots."""
UPDATER = "optimizer"
"""In `CheckpointMeta.extra`: what an optimizer of a script keeps beside the tensors' states, see `Updater.state`."""


def model_name(tensor: str) -> str:
    """Makes the name in a checkpoint of the master weights of a tensor."""
    return f"model.{tensor}"


def optimizer_name(slot: str, tensor: str) -> str:
    """Makes the name in a checkpoint of an optimizer slot ("exp_avg", "exp_avg_sq", "momentum_buffer") of a tensor."""
    return f"optimizer.{slot}.{tensor}"


def stored_name(slot: str, tensor: str) -> str:
    """Makes the name in a checkpoint of one state of a tensor: `MASTER`, or an optimizer slot."""
    return model_name(tensor) if slot == MASTER else optimizer_name(slot, tensor)


class WantedPiece(NamedTuple):
    """A run of a flattened tensor, to be read."""

    fqn: str
    shape: tuple[int, ...]
    flat_start: int
    length: int


class WrittenItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rectangle of a tensor and where its bytes stand. Plain data: workers send it to the coordinator."""

    fqn: str
    offsets: tuple[int, ...]
    """First index in every dimension."""
    sizes: tuple[int, ...]
    """Number of elements in every dimension."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: str
    """A key of `ITEM_BYTES`."""
    relative_path: str
    """Name of the shard file inside the checkpoint folder."""
    offset: int
    """First byte in that file."""
    length: int
    """Number of bytes in that file (a torch.save archive, so more than the elements alone)."""
    checksum: str
    """``checksum_of`` those bytes."""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shape and element type of a whole tensor."""

    shape: tuple[int, ...]
    dtype: str = "float32"


class CheckpointMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run at the step of a checkpoint: everything but the tensors' elements.

    Raises:
        ValueError: a loss is neither finite nor "nan" (JSON has no other way to write it).
    """

    step: int
    """Number of committed steps."""
    losses: list[float | str]
    """Loss of every step from the first, exact; "nan" for a skipped step."""
    grids: dict[str, int]
    """Exponent of the power-of-two grid of the exact sums, by tensor name without "model."."""
    seed: int
    data_cursor: tuple[int, int]
    """(data pass, position in it) of the next sample."""
    config: dict[str, Any]
    """The resolved configuration, with its format's number."""
    tensors: dict[str, TensorInfo]
    """Every tensor of the checkpoint by full name; the commit checks that each is covered exactly once."""
    elaswave_version: str
    extra: dict[str, Any] = {}
    """Anything else the run needs to go on, as plain data."""

    def __post_init__(self) -> None:
        for index, loss in enumerate(self.losses):
            if loss != "nan" and (isinstance(loss, str) or not -float("inf") < loss < float("inf")):
                raise ValueError(f"the loss of step {index + 1} is {loss!r}, but must be a finite float or 'nan'")


class _Extra(msgspec.Struct, frozen=True, kw_only=True):
    """What `CheckpointMeta.extra` says to all readers, where it says it."""

    num_updates: int = 1
    calibrated: bool = False
    val_steps: list[int] = []
    val_losses: list[float | str] = []
    metrics: dict[str, list[float | str]] = {}
    val_metrics: dict[str, list[float | str]] = {}
    fence_ratios: list[str] = []
    data: dict[str, Any] = {}
    optimizer: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checksums and places of everything in a checkpoint folder."""

    format: int
    """``FORMAT_VERSION``."""
    shards: dict[str, int]
    """Size of each shard file in bytes; bytes outside of its items are not used."""
    files: dict[str, str]
    """``checksum_of`` each file that is neither a shard nor the manifest."""
    items: tuple[WrittenItem, ...]
    """Sorted by shard file and offset."""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    """The manifest with a checksum of its own encoding."""

    checksum: str
    manifest: msgspec.Raw


def checksum_of(data: bytes | bytearray | memoryview) -> str:
    """Computes the 128-bit BLAKE2b of bytes, as 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Encodes the content of ``manifest.json``."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(checksum_of(body), msgspec.Raw(body)))


def decode_manifest(data: bytes) -> Manifest:
    """Decodes the manifest in the content of ``manifest.json``.

    Raises:
        CheckpointError: it is cut off, altered, or of another format version.
    """
    try:
        envelope = decode_json(data, _Envelope)
        if envelope.checksum != checksum_of(bytes(envelope.manifest)):
            raise CheckpointError(f"{MANIFEST_FILE} is damaged: its checksum does not match its content")
        manifest: Manifest = decode_json(bytes(envelope.manifest), Manifest)
        if manifest.format == FORMAT_VERSION:
            _check_manifest(manifest)
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: {error}") from error
    if manifest.format != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST_FILE} has format {manifest.format}, but this version of elaswave reads {FORMAT_VERSION}"
        )
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Refuses one whose places are not in its folder, or hold more than the tensors that they are of.

    Raises:
        ValueError: says what.
    """
    for name in (*manifest.shards, *manifest.files):
        if not is_plain_name(name):
            raise ValueError(f"it names {name!r}, which is no file in its folder")
    if missing := {META_FILE, DCP_METADATA_FILE} - manifest.files.keys():
        raise ValueError(f"it does not list {', '.join(sorted(missing))}")
    check_places(manifest.items, manifest.shards)


def check_places(items: Iterable[WrittenItem], shards: Mapping[str, int]) -> None:
    """Refuses rectangles that do not lie in the shards, or take other room than their elements.

    Args:
        items: of a manifest, or as workers say that they have written them.
        shards: bytes of each file, by name.
    Raises:
        ValueError: says which.
    """
    for item in items:
        size = shards.get(item.relative_path)
        if size is None or not is_plain_name(item.relative_path):
            raise ValueError(f"a part of {item.fqn!r} is in {item.relative_path!r}, which is no shard of it")
        _check_shape(item.fqn, (*item.sizes, *item.shape), item.dtype)
        elements = math.prod(item.sizes) * ITEM_BYTES[item.dtype]
        if not (0 <= item.offset <= item.offset + item.length <= size):
            raise ValueError(f"a part of {item.fqn!r} is not inside {item.relative_path}, which has {size} bytes")
        if not elements <= item.length <= elements + ARCHIVE_BYTES_MAX:
            raise ValueError(f"a part of {item.fqn!r} of {elements} bytes takes {item.length} in {item.relative_path}")


def _check_shape(fqn: str, sizes: tuple[int, ...], dtype: str) -> None:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{fqn!r} is of type {dtype!r}, which is none of {', '.join(ITEM_BYTES)}")
    if len(sizes) > 2 * DIMENSIONS_MAX or any(not 0 <= size < 1 << 62 for size in sizes):
        raise ValueError(f"{fqn!r} has a shape that no tensor has")


def encode_meta(meta: CheckpointMeta) -> bytes:
    """Encodes the content of ``meta.json``; floats keep every bit."""
    return msgspec.json.format(msgspec.json.encode(meta), indent=1)


def decode_meta(data: bytes) -> CheckpointMeta:
    """Decodes the description in the content of ``meta.json``.

    Raises:
        CheckpointError: it does not have the expected form, or its configuration is of another format.
    """
    try:
        meta: CheckpointMeta = decode_json(data, CheckpointMeta)
        _check_meta(meta)
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{META_FILE} is damaged: {error}") from error
    if problem := format_problem(meta.config, is_saved=True):
        raise CheckpointError(f"{META_FILE}: {problem}")
    return meta


def _check_meta(meta: CheckpointMeta) -> None:
    """Refuses a description of which no run could go on.

    Raises:
        ValueError, msgspec.ValidationError: says what.
    """
    for fqn, info in meta.tensors.items():
        _check_shape(fqn, info.shape, info.dtype)
    for section, keys in meta.config.items():
        if section != FORMAT_KEY and not isinstance(keys, dict):
            raise ValueError(f"its configuration has {section!r}, which is no section")
    if any(abs(exponent) > EXPONENT_MAX for exponent in meta.grids.values()):
        raise ValueError("it has grids that no sum is on")
    extra = msgspec.convert(meta.extra, _Extra)
    if len(extra.val_losses) != len(extra.val_steps):
        raise ValueError(f"it has {len(extra.val_losses)} losses of {len(extra.val_steps)} evaluations")
    for series, steps in ((extra.metrics, meta.step), (extra.val_metrics, len(extra.val_steps))):
        for name, values in series.items():
            if len(values) != steps:
                raise ValueError(f"it has {len(values)} values of {name!r} for {steps} steps")
    for value in (*extra.val_losses, *(v for s in (extra.metrics, extra.val_metrics) for vs in s.values() for v in vs)):
        float(value)


class CommitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a committer needs to know; see `elaswave.checkpoints.commit.commit_in_one_of`."""

    folders: list[str]
    items: list[WrittenItem]
    meta: CheckpointMeta
    sizes: dict[str, int]
