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
from typing import Any, NamedTuple

import msgspec

from elaswave.config_format import upgraded
from elaswave.errors import CheckpointError

FORMAT_VERSION = 1
META_FILE = "meta.json"
MANIFEST_FILE = "manifest.json"
DCP_METADATA_FILE = ".metadata"
SHARD_SUFFIX = ".distcp"


MASTER = "master"
"""The float32 master weights among the states of a tensor; the others are the optimizer's slots."""
EMA = "ema"
"""The exponential moving average of the master weights, among the optimizer's slots."""
UPDATER = "optimizer"
"""In `CheckpointMeta.extra`: what an optimizer of a script keeps beside the tensors' states, see `Updater.state`."""


def model_name(tensor: str) -> str:
    """Name in a checkpoint of the master weights of a tensor."""
    return f"model.{tensor}"


def optimizer_name(slot: str, tensor: str) -> str:
    """Name in a checkpoint of an optimizer slot ("exp_avg", "exp_avg_sq", "momentum_buffer") of a tensor."""
    return f"optimizer.{slot}.{tensor}"


def stored_name(slot: str, tensor: str) -> str:
    """Name in a checkpoint of one state of a tensor: `MASTER`, or an optimizer slot."""
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
    """A key of ``checkpoint_shards.DTYPES``."""
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
    """128-bit BLAKE2b of bytes, as 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``."""
    body = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(checksum_of(body), msgspec.Raw(body)))


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in the content of ``manifest.json``.

    Raises:
        CheckpointError: it is cut off, altered, or of another format version.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.checksum != checksum_of(bytes(envelope.manifest)):
            raise CheckpointError(f"{MANIFEST_FILE} is damaged: its checksum does not match its content")
        manifest = msgspec.json.decode(envelope.manifest, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{MANIFEST_FILE} is damaged: {error}") from error
    if manifest.format != FORMAT_VERSION:
        raise CheckpointError(
            f"{MANIFEST_FILE} has format {manifest.format}, but this version of elaswave reads {FORMAT_VERSION}"
        )
    return manifest


def encode_meta(meta: CheckpointMeta) -> bytes:
    """The content of ``meta.json``; floats keep every bit."""
    return msgspec.json.format(msgspec.json.encode(meta), indent=1)


def decode_meta(data: bytes) -> CheckpointMeta:
    """The description in the content of ``meta.json``; its configuration as today's format has it.

    Raises:
        CheckpointError: it does not have the expected form.
    """
    try:
        meta = msgspec.json.decode(data, type=CheckpointMeta)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{META_FILE} is damaged: {error}") from error
    return msgspec.structs.replace(meta, config=upgraded(meta.config))
