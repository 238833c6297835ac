"""The result files: exact numbers, atomic replacement, errors that say what is wrong with a folder."""

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.observability.samples import LOSSES, RECOVERY, make_result, write_events

from elaswave.errors import RunFolderError
from elaswave.observability.result import (
    encode_result,
    from_json_float,
    read_digests,
    read_result,
    to_json_float,
    write_digests,
    write_result,
)
from elaswave.observability.run_folder import atomic_write


def test_a_result_reads_back_as_it_was_written(tmp_path: Path) -> None:
    result = make_result(recoveries=[RECOVERY])
    assert write_result(tmp_path, result) == tmp_path / "result.json"
    assert read_result(tmp_path) == result
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_result_json_has_the_promised_keys_and_shapes(tmp_path: Path) -> None:
    document = json.loads(encode_result(make_result(recoveries=[RECOVERY])))
    assert document.keys() >= {
        *["steps", "losses", "state_digest", "generations", "recoveries", "throughput_tokens_per_s", "config"],
        *["val_losses", "memory", "start_up_s", "duration_s", "checkpoints"],
    }
    assert document["steps"] == 6
    assert document["losses"] == LOSSES
    assert document["generations"][0].keys() == {
        *["generation", "layout", "reason", "first_step"],
        *["change", "schedule", "predicted_step_s", "measured_step_s"],
    }
    assert document["memory"]["3"] == {"peak_bytes": 200 << 20, "optimizer_bytes": 5 << 20}
    assert document["recoveries"][0].keys() == {
        *["kind", "worker", "step", "phase", "detected_by", "generation", "attempt", "outcome"],
        *["detect_s", "agree_s", "plan_s", "edit_s", "promote_s", "redo_s", "total_s"],
        *["critical_bytes", "num_microbatches_recomputed", "last_lines"],
    }


@given(st.floats())
def test_any_float_survives_json_exactly(value: float) -> None:
    loss = json.loads(encode_result(make_result(losses=[value])))["losses"][0]
    assert isinstance(loss, float if math.isfinite(value) else str)
    assert math.isnan(value) and loss == "nan" or float(loss).hex() == value.hex()
    assert repr(from_json_float(to_json_float(value))) == repr(value)


def test_a_skipped_steps_loss_is_the_string_nan(tmp_path: Path) -> None:
    write_result(tmp_path, make_result(losses=[5.0, float("nan"), "nan"]))
    assert json.loads((tmp_path / "result.json").read_text())["losses"] == [5.0, "nan", "nan"]
    assert read_result(tmp_path).losses == [5.0, "nan", "nan"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 5}, "a result of 5 steps needs as many losses, not 6"),
        ({"val_steps": [1, 2]}, "1 val_losses do not match 2 val_steps"),
        ({"state_digest": "0xFF"}, "state_digest must be hexadecimal digits, not '0xFF'"),
        ({"state_digest": ""}, "state_digest must be hexadecimal digits"),
    ],
)
def test_a_result_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_result(**changes)


def test_digests_keep_their_order(tmp_path: Path) -> None:
    digests = {"master.embedding.weight": "ab", "exp_avg.embedding.weight": "0c", "master.block.0.weight": "ff"}
    write_digests(tmp_path, digests)
    write_events(tmp_path)
    assert list(read_digests(tmp_path).items()) == list(digests.items())


def test_a_digest_that_is_not_hexadecimal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the digest of master.head.weight must be hexadecimal digits, not 'xyz'"):
        write_digests(tmp_path, {"master.head.weight": "xyz"})


def test_a_run_without_digests_has_none(tmp_path: Path) -> None:
    write_result(tmp_path, make_result())
    assert read_digests(tmp_path) is None


def test_an_interrupted_write_leaves_the_old_content(tmp_path: Path) -> None:
    def chunks():
        yield b"half of the new"
        raise KeyboardInterrupt

    path = tmp_path / "file"
    atomic_write(path, [b"old"])
    with pytest.raises(KeyboardInterrupt):
        atomic_write(path, chunks())
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"cannot write .*missing/result\.json: No such file.*--run-dir"):
        write_result(tmp_path / "missing", make_result())


def test_reading_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        read_result(tmp_path / "missing")
    with pytest.raises(RunFolderError, match="is not a run folder: it holds neither result.json nor events.jsonl"):
        read_result(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file; give the folder"):
        read_digests(tmp_path / "file")


def test_reading_the_result_of_a_run_that_has_none_yet(tmp_path: Path) -> None:
    write_events(tmp_path)
    with pytest.raises(RunFolderError, match=r"has no result\.json: the run is still going on or has ended before"):
        read_result(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"steps":1}', b"\xff", b'{"steps": "1"}'])
def test_a_damaged_result_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(RunFolderError, match=r"result\.json is damaged or not of this version"):
        read_result(tmp_path)


def test_a_result_whose_parts_contradict_each_other_is_damaged(tmp_path: Path) -> None:
    content = encode_result(make_result()).replace(b'"steps": 6', b'"steps": 7')
    (tmp_path / "result.json").write_bytes(content)
    with pytest.raises(RunFolderError, match="damaged .*7 steps needs as many losses, not 6"):
        read_result(tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "result.json")
    with pytest.raises(RunFolderError, match="cannot read .*Is a directory"):
        read_result(tmp_path)
