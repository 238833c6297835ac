"""Data files are told apart by size, by 64 blocks, and by their whole content where that is asked for."""

from pathlib import Path

import msgspec
import pytest

from elaswave.data.fingerprint import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    DatasetFingerprint,
    check_same_data,
    fingerprint_in,
    fingerprint_of,
    script_differences,
    script_in_force,
)
from elaswave.errors import DataError
from elaswave.observability.run_folder import data_facts, write_data_facts

LARGE = 3 * NUM_BLOCKS * BLOCK_BYTES


def changed_at(path: Path, position: int) -> Path:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"x")
    return path


@pytest.mark.parametrize("num_bytes", [1, 70_000, LARGE])
def test_changes_in_the_sample_are_seen(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(num_bytes))
    before = fingerprint_of(path, whole=False)
    assert check_same_data(str(path), before, fingerprint_of(path, whole=False)) == ""
    for position in (0, num_bytes - 1, num_bytes - 1):
        with pytest.raises(DataError, match=f"it still has {num_bytes} bytes, but its content has changed; bring"):
            check_same_data(str(path), before, fingerprint_of(changed_at(path, position), whole=False))
        path.write_bytes(bytes(num_bytes))
    path.write_bytes(bytes(num_bytes + 1))
    with pytest.raises(DataError, match=f"it had {num_bytes} bytes and now has {num_bytes + 1}"):
        check_same_data(str(path), before, fingerprint_of(path, whole=False))


def test_a_change_between_the_blocks_is_seen_in_the_whole_content_only(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(LARGE))
    sample, whole = (fingerprint_of(path, whole=whole) for whole in (False, True))
    changed_at(path, BLOCK_BYTES + 1)
    assert fingerprint_of(path, whole=False) == sample
    now = fingerprint_of(path, whole=True)
    with pytest.raises(DataError, match="bytes, but its content has changed"):
        check_same_data(str(path), whole, now)
    assert "only a sample can be compared" in check_same_data(str(path), sample, now)
    assert "does not say what" in check_same_data(str(path), None, now)


def test_a_fingerprint_belongs_to_a_run_and_its_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"words")
    fingerprint = fingerprint_of(path, whole=True)
    assert data_facts(tmp_path) == {}
    write_data_facts(tmp_path, fingerprint)
    assert fingerprint_in({"data": data_facts(tmp_path)}) == fingerprint
    assert fingerprint_in({}) is fingerprint_in({"data": {}}) is None
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint_of(tmp_path / "gone", whole=False)


def given(**script: str) -> DatasetFingerprint:
    return DatasetFingerprint(num_samples={"dataset": 4}, hashes=[], script={"python": "3.11", **script})


def test_what_a_script_gives_otherwise_is_said_with_both_values_and_options_stay_those_of_the_checkpoint() -> None:
    then, now = (
        given(**{"optimizer.groups[0].lr": "0.1", "loss": "a"}),
        given(**{"optimizer.groups[0].lr": "0.5", "loss": "b", "metric accuracy": "c"}),
    )
    options, code = script_differences(then, now)
    assert "optimizer.groups[0].lr is 0.1 there and 0.5 in the script" in options and "options are kept" in options
    assert code.startswith("loss, metric accuracy: other code or settings")
    kept = script_in_force(then, now)
    assert kept == given(**{"optimizer.groups[0].lr": "0.1", "loss": "b", "metric accuracy": "c"})
    assert script_differences(kept, now) == [options]  # at the next resume as well
    assert script_in_force(None, now) == now and script_differences(None, now) == script_differences(then, then) == []
    (only,) = script_differences(then, msgspec.structs.replace(now, script=now.script | {"python": "3.12"}))
    assert only == options  # another version's byte code says nothing
