"""Files that somebody else has made: whatever stands there, who reads them goes on or says which file it is."""

import json
import os
import pickle
import signal
import socket
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
import torch
from tests.security.readers import STEP, kinds, resealed, seal

from elaswave.checkpoints.checkpoint import folder_of, verify_checkpoint
from elaswave.checkpoints.commit import commit_in_one_of
from elaswave.checkpoints.format import MANIFEST_FILE, decode_manifest
from elaswave.checkpoints.shards import elements_in, load_plain
from elaswave.data.token_files import read_header
from elaswave.errors import CheckpointError, DataError, ElaswaveError, RunFolderError, UsageError
from elaswave.models.huggingface.model import hf
from elaswave.observability.events import DAMAGED_SHOWN, EventLog, EventsLost, read_events
from elaswave.observability.run_folder import add_to_copy, atomic_write, huggingface_files
from elaswave.untrusted import (
    decode_json,
    is_plain_name,
    open_binary,
    open_to_write,
    read_bytes,
    read_text,
    stays_inside,
)

pytestmark = pytest.mark.security

HANGS_S = 60
"""A bound that nothing comes near: a reader that waits ends the test, not the suite."""
KINDS = kinds()


@pytest.fixture(autouse=True)
def bound() -> Iterator[None]:
    def hangs(number: int, frame: FrameType | None) -> None:
        raise AssertionError("a reader waits")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANGS_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def bound_socket(path: Path) -> None:
    at = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{at}/{path.name}")
    os.close(at)


def holes(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


def nested(path: Path) -> None:
    path.write_text('{"a":' * 100_000)


def nested_list(path: Path) -> None:
    path.write_text("a = " + "[" * 100_000)


def long_number(path: Path) -> None:
    path.write_text('{"num_labels": ' + "9" * 5000 + "}")


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00" * 99)


ATTACKS = (pipe, folder, device, bound_socket, holes, nested, nested_list, long_number, no_text)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", KINDS)
def test_no_file_hangs_fills_the_memory_or_ends_in_a_traceback(
    name: str, attack: Callable[[Path], None], tmp_path: Path
) -> None:
    kind = KINDS[name]
    at_once = [kind.files] if name.startswith("run") else [(file,) for file in kind.files]
    for number, files in enumerate(at_once):
        place = tmp_path / str(number)
        place.mkdir()
        kind.make(place)
        for file in files:
            (place / file).unlink()
            attack(place / file)
        try:
            kind.read(place)
        except ElaswaveError as error:
            assert str(error)


@pytest.mark.parametrize("name", KINDS)
def test_whole_files_are_read(name: str, tmp_path: Path) -> None:
    KINDS[name].make(tmp_path)
    try:
        KINDS[name].read(tmp_path)
    except ElaswaveError as error:  # such as a job that does not run any more: not of the file's form
        assert "damaged" not in str(error)


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    KINDS["checkpoint"].make(tmp_path)
    return tmp_path


def item(manifest: dict[str, Any]) -> list[Any]:
    found: list[Any] = manifest["items"][0]
    return found


PATH, OFFSET, LENGTH, DTYPE, SIZES = 5, 6, 7, 4, 2


def leaves(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    item(manifest)[PATH] = "../../../../etc/passwd"
    manifest["shards"]["../../../../etc/passwd"] = 1 << 20


def lists_elsewhere(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    manifest["files"]["/etc/passwd"] = "00"


def is_unlisted(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    item(manifest)[PATH] = "other.distcp"


def claims_much(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    item(manifest)[LENGTH] = 1 << 50


def is_before(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    item(manifest)[OFFSET] = -5


def has_another_type(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    item(manifest)[DTYPE] = "object"


def has_huge_sizes(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    item(manifest)[SIZES] = [1 << 40, 1 << 40]


def has_no_description(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    del manifest["files"][".metadata"]


def has_no_sections(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["config"]["model"] = 5


def has_other_words(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["extra"]["num_updates"] = "many"


def has_no_losses(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["extra"]["val_losses"] = []


def has_words_for_losses(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["extra"]["val_losses"] = ["low"]


def has_a_grid_beyond(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
    meta["grids"]["block.0.weight"] = 1 << 60


@pytest.mark.parametrize(
    "change",
    [
        leaves, lists_elsewhere, is_unlisted, claims_much, is_before, has_another_type, has_huge_sizes,
        has_no_description, has_no_sections, has_other_words, has_no_losses, has_words_for_losses, has_a_grid_beyond,
    ],
)  # fmt: skip
def test_a_checkpoint_that_contradicts_itself_is_named(change: Callable[..., None], run: Path) -> None:
    resealed(run, change)
    with pytest.raises(CheckpointError, match=f"step-{STEP:08d}"):
        verify_checkpoint(folder_of(run, STEP))


def test_a_part_takes_no_more_room_than_its_elements(run: Path) -> None:
    def change(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
        (shard,) = manifest["shards"]
        item(manifest)[LENGTH] = manifest["shards"][shard] = 1 << 40

    resealed(run, change)
    with pytest.raises(CheckpointError, match=rf"of \d+ bytes takes {1 << 40}"):
        verify_checkpoint(folder_of(run, STEP))


def test_a_worker_writes_into_its_checkpoint_only(run: Path) -> None:
    manifest = decode_manifest((folder_of(run, STEP) / MANIFEST_FILE).read_bytes())
    meta = verify_checkpoint(folder_of(run, STEP)).meta
    items = [msgspec.structs.replace(each, relative_path="../../.bashrc") for each in manifest.items]
    with pytest.raises(CheckpointError, match="a worker has written no part"):
        commit_in_one_of([run / "step-00000009.tmp"], items, meta, sizes={"../../.bashrc": 1 << 16})


def test_a_manifest_that_is_nested_is_named(run: Path) -> None:
    seal(folder_of(run, STEP), b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(CheckpointError, match=MANIFEST_FILE):
        verify_checkpoint(folder_of(run, STEP))


class Asks:
    """Pickled, it asks for memory."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (1 << 40,)


def archive(values: object) -> bytes:
    data = BytesIO()
    torch.save(values, data)
    return data.getvalue()


def repacked(data: bytes) -> bytes:
    """The same archive with compressed files."""
    packed = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return packed.getvalue()


def test_an_archive_unpacks_to_no_more_than_it_is() -> None:
    zeros = archive(torch.zeros(1 << 22))
    assert len(elements_in(zeros, torch.float32, 1 << 22)) == 1 << 22
    assert len(repacked(zeros)) < len(zeros) // 100
    for read in (load_plain, lambda data: elements_in(data, torch.float32, 1 << 22)):
        with pytest.raises(ValueError, match="would unpack to more than it is"):
            read(repacked(zeros))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"a": Asks()}, "memory that nothing stands for"),
        ({"a": torch.zeros(1).expand(1 << 40)}, "larger than all of it"),
        ({"a": pickle.dumps}, "no archive of plain values"),
        (Path("/"), "no archive of plain values"),
    ],
)
def test_an_archive_of_values_that_are_not_plain_is_refused(values: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_plain(archive(values))


def test_plain_values_come_back() -> None:
    values = {"a": [1, (2.5, "x")], "b": torch.arange(3)}
    found = load_plain(archive(values))
    assert found["a"] == values["a"] and found["b"].tolist() == [0, 1, 2]


def test_a_part_of_another_size_or_type_is_refused() -> None:
    data = archive(torch.arange(6, dtype=torch.int32))
    assert elements_in(data, torch.int32, 6).tolist() == list(range(6))
    for dtype, number in ((torch.int32, 7), (torch.int64, 6)):
        with pytest.raises(ValueError, match="should hold"):
            elements_in(data, dtype, number)


# --------------------------------------------------------------------------------------------------- models and tokens


@pytest.fixture
def model(tmp_path: Path) -> Path:
    KINDS["model"].make(tmp_path)
    return tmp_path


def changed(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


@pytest.mark.parametrize("key", ["num_labels", "num_hidden_layers", "num_attention_heads"])
def test_a_configuration_counts_nothing_that_would_fill_the_memory(key: str, model: Path) -> None:
    changed(model / "config.json", **{key: 1 << 40})
    with pytest.raises(UsageError, match=rf"config.json .*{key} is {1 << 40}, and at most"):
        hf(model)


def test_more_layers_than_tensors_are_not_built(model: Path) -> None:
    changed(model / "config.json", num_hidden_layers=1 << 16)
    with pytest.raises(UsageError, match=r"65536 layers, and the files \d+ tensors"):
        hf(model)


def test_an_export_would_copy_no_file_from_elsewhere(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("elsewhere") / "id_rsa"
    secret.write_text("secret")
    (model / "tokenizer_x").symlink_to(secret)
    with pytest.raises(UsageError, match="tokenizer_x is a link to .*id_rsa, out of the folder"):
        hf(model)
    (model / "tokenizer_x").unlink()
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_y.json").symlink_to("tokenizer.json")
    assert {"tokenizer.json", "tokenizer_y.json"} <= hf(model).files.keys()


def test_a_snapshot_of_hugging_faces_cache_links_to_its_blobs(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0f"
    for made in (blobs, snapshot):
        made.mkdir(parents=True)
    (blobs / "1a").touch()
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1a")
    (snapshot / "tokenizer_x").symlink_to("/etc/passwd")
    assert stays_inside(snapshot / "tokenizer.json") and not stays_inside(snapshot / "tokenizer_x")


def test_a_run_folder_gives_away_no_file_from_elsewhere(tmp_path: Path) -> None:
    KINDS["run-0"].make(tmp_path)
    assert huggingface_files(tmp_path)
    (tmp_path / "huggingface" / "tokenizer_x").symlink_to("/etc/passwd")
    with pytest.raises(RunFolderError, match="tokenizer_x is a link to /etc/passwd"):
        huggingface_files(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 0]},
        {"dtype": "U8", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 1000, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32"},
        [],
    ],
)
def test_a_header_of_tensors_that_cannot_be_is_named(entry: object, model: Path) -> None:
    header = json.dumps({"a": entry}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0\0")
    with pytest.raises(UsageError, match=r"model.safetensors is no whole safetensors file"):
        hf(model)


def test_a_vocabulary_is_no_larger_than_its_tokens_tell_apart(tmp_path: Path) -> None:
    KINDS["data"].make(tmp_path)
    data = bytearray((tmp_path / "tokens.bin").read_bytes())
    data[24:32] = (1 << 40).to_bytes(8, "little")
    (tmp_path / "tokens.bin").write_bytes(data)
    with pytest.raises(DataError, match="a vocabulary of 1099511627776 tokens, which 2 bytes cannot tell apart"):
        read_header(tmp_path / "tokens.bin")


# ------------------------------------------------------------------------------------------------------ the helpers


def test_many_damaged_lines_of_a_log_are_counted(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b"\n" * 10_000)
    events = read_events(tmp_path / "events.jsonl")
    assert len(events) == DAMAGED_SHOWN + 1
    assert sum(event.num_events for event in events if isinstance(event, EventsLost)) == 10_000


def test_a_pipe_of_the_shells_is_read_as_a_file() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"text")
    os.close(writing)
    assert read_text(f"/dev/fd/{reading}") == "text"
    os.close(reading)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 9)
    assert read_bytes(tmp_path / "file", 9) == b"x" * 9
    with pytest.raises(OSError, match="longer than 8 bytes"):
        read_bytes(tmp_path / "file", 8)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    own = tmp_path / ".bashrc"
    own.write_text("mine")
    (tmp_path / "run").mkdir()
    KINDS["run-0"].make(tmp_path / "run")
    log = tmp_path / "run" / "events.jsonl"
    log.unlink()
    log.symlink_to(own)
    with pytest.raises(RunFolderError, match="it is a link, through which nothing is written"):
        EventLog(log)
    with pytest.raises(OSError, match="it is a link"):
        open_to_write(log)
    copy = tmp_path / "run" / "logs" / "worker-3.log"
    copy.symlink_to(own)
    with pytest.raises(OSError, match="it is a link"):
        add_to_copy(tmp_path / "run", 3, "text")
    assert own.read_text() == "mine"


def test_texts_of_a_configuration_are_none_that_a_terminal_obeys(model: Path) -> None:
    changed(model / "config.json", bos_token_id="\x1b]0;owned\x07")
    with pytest.raises(UsageError, match="bos_token_id holds characters that a terminal would obey"):
        hf(model)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a named pipe, no regular file"):
        open_binary(tmp_path / "pipe")
    with pytest.raises(OSError, match="a device, no regular file"):
        open_binary("/dev/zero")


@pytest.mark.parametrize("data", [b"[" * 100_000, b"{", b"9" * 5000, b"\xff"])
@pytest.mark.parametrize("type", [None, list, int])
def test_json_has_one_kind_of_error(data: bytes, type: Any) -> None:
    with pytest.raises(ValueError):
        decode_json(data, type)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\0"])
def test_names_that_lead_elsewhere(name: str) -> None:
    assert not is_plain_name(name) and is_plain_name("..a")


def test_a_file_is_replaced_although_a_pipe_has_its_temporary_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f".result.json.{os.getpid()}.tmp")
    atomic_write(tmp_path / "result.json", [b"{}"])
    assert (tmp_path / "result.json").read_bytes() == b"{}"
