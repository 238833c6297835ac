"""The rules of the run folder: what is used, what is refused, what is removed."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from elaswave.config.load import load_config
from elaswave.config.schema import Config
from elaswave.errors import ConfigError, DataError, RunFolderError
from elaswave.observability import run_folder
from elaswave.observability.run_folder import (
    check_same_computation,
    default_run_dir,
    differences_on_resume,
    is_run,
    open_run_dir,
    saved_config,
)

NOW = datetime(2026, 11, 20, 13, 3, 5, tzinfo=UTC)


@contextmanager
def opened(path: Path, config: Config | None = None, **flags: bool) -> Iterator[Path]:
    with open_run_dir(path, config or load_config(), now=NOW, **flags) as run:
        yield run


def start(path: Path, *overrides: str, **flags: bool) -> Path:
    """A run that began in a folder and ended."""
    with opened(path, load_config(None, overrides), **flags) as run:
        (run / "result.json").write_text("{}")
        (run / "events.jsonl").write_text("")
        (run / "logs" / "worker-0.log").write_text("hello")
        (run / "checkpoints" / "step-5").mkdir(parents=True)
        (run / "checkpoints" / "step-5" / "shard").write_text("x")
    return path


def test_the_default_folder_bears_the_time() -> None:
    assert default_run_dir(NOW, "3f9c21") == Path("runs/20261120T130305Z-3f9c21")


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with opened(path) as run:
        assert run == path and is_run(path)
        assert (run / "logs").is_dir()
    assert (path / "run.json").read_text() == (
        '{"written_by":"elaswave","version":"0.1.0","created":"2026-11-20T13:03:05Z"}\n'
    )
    assert saved_config(path) == load_config()


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with opened(Path("r")) as run:
        assert run == tmp_path / "r"


def test_an_empty_folder_and_one_with_foreign_files_are_used(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    start(tmp_path)
    assert is_run(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(RunFolderError, match="holds a run already; add --resume .* --overwrite"), opened(tmp_path):
        pass
    assert (tmp_path / "result.json").exists()


def test_overwrite_removes_what_the_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "trace-worker-1.json.part").write_text("")
    (tmp_path / ".result.json.77.tmp").write_text("")
    (tmp_path / ".secret.tmp").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with opened(tmp_path, load_config(None, ["run.seed=2"]), overwrite=True):
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {".lock", "run.json", "config.toml", "logs", "notes", ".secret.tmp"}
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
    assert list((tmp_path / "logs").iterdir()) == []
    assert saved_config(tmp_path).run.seed == 2


def test_overwrite_does_not_follow_links(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("mine")
    path = start(tmp_path / "run")
    for name in ("data", "trace.json"):
        (path / name).symlink_to(elsewhere)
    with opened(path, overwrite=True):
        assert not (path / "data").is_symlink() and not (path / "trace.json").is_symlink()
    assert (elsewhere / "precious").read_text() == "mine"


def test_overwrite_of_nothing_is_a_new_run(tmp_path: Path) -> None:
    with opened(tmp_path / "new", overwrite=True) as run:
        assert is_run(run)


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}])
@pytest.mark.parametrize("name", ["config.toml", "checkpoints", "result.json"])
def test_a_folder_that_is_no_run_keeps_its_files(tmp_path: Path, flags: dict[str, bool], name: str) -> None:
    (tmp_path / name).write_text("mine")
    message = f"not the folder of a run, but holds {name}, where a run would write"
    with pytest.raises(RunFolderError, match=message), opened(tmp_path, **flags):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_removal_cut_short_leaves_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path)

    def fails(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(run_folder.shutil, "rmtree", fails)
    with pytest.raises(RunFolderError, match=r"Input/output error \(.*checkpoints\)"), opened(tmp_path, overwrite=True):
        pass
    assert is_run(tmp_path)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="is a file; choose another --run-dir"), opened(tmp_path / "file"):
        pass
    with pytest.raises(RunFolderError, match="Not a directory.*choose another"), opened(tmp_path / "file" / "run"):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="cannot write /proc/elaswave: "), opened(Path("/proc/elaswave")):
        pass
    with pytest.raises(RunFolderError, match="cannot write /proc: "), opened(Path("/proc")):
        pass
    with pytest.raises(RunFolderError, match="File name too long"), opened(tmp_path / ("x" * 300)):
        pass


def test_resume_keeps_what_is_there_and_saves_the_new_configuration(tmp_path: Path) -> None:
    start(tmp_path)
    marker = (tmp_path / "run.json").read_bytes()
    config = load_config(None, ["layout.widths=[1,3]", "elastic.num_followers=2", "run.steps=300"])
    with opened(tmp_path, config, resume=True) as run:
        assert (run / "checkpoints" / "step-5" / "shard").exists()
        assert (run / "logs" / "worker-0.log").exists()
    assert (tmp_path / "run.json").read_bytes() == marker
    assert saved_config(tmp_path) == config


@pytest.mark.parametrize(
    "override",
    [
        "layout.schedule=gpipe",
        "elastic.block_size=32",
        "device.kind=loopback",
        "run.checkpoint_every=3",
        "run.eval_every=3",
        "run.keep_checkpoints=3",
        "run.skip_nonfinite=true",
        "model.recompute=true",
    ],
)
def test_resume_allows_what_does_not_change_the_model(tmp_path: Path, override: str) -> None:
    there = msgspec.json.decode(msgspec.json.encode(load_config().to_dict()))
    check_same_computation(there, load_config(None, [override]), tmp_path)


def test_resume_from_another_computation_lists_what_differs_whichever_side_leaves_a_key_out(tmp_path: Path) -> None:
    overrides = ("model.hidden_size=64", "model.family=llama", "model.num_kv_heads=2", "run.seed=2")
    bits = ("elastic.consistency=scaled", "elastic.accumulator_bits=48", "optimizer.betas=[0.9,0.99]")
    other = load_config(None, [*overrides, *bits])
    there = msgspec.json.decode(msgspec.json.encode(load_config().to_dict()))
    with pytest.raises(RunFolderError) as caught:
        check_same_computation(there, other, tmp_path / "step-00000004")
    assert str(caught.value) == (
        f"the checkpoint {tmp_path}/step-00000004 is of another computation, so this configuration cannot go on from "
        'it: model.family is "gpt" there and "llama" here; model.hidden_size is 128 there and 64 here; '
        "model.num_kv_heads is unset there and 2 here; optimizer.betas is [0.9,0.95] there and [0.9,0.99] here; "
        'elastic.consistency is "bitwise" there and "scaled" here; elastic.accumulator_bits is 64 there and 48 here; '
        "run.seed is 1 there and 2 here. Ask for its values (--set, or config.toml of the run), or begin a new run"
    )
    back = differences_on_resume(msgspec.json.decode(msgspec.json.encode(other.to_dict())), load_config())
    assert "model.num_kv_heads is 2 there and unset here" in back and len(back) == 7


def test_a_checkpoint_of_a_version_that_lacked_keys_is_taken_as_with_their_defaults() -> None:
    there = msgspec.json.decode(msgspec.json.encode(load_config().to_dict()))
    for section, key in (("model", "fences"), ("model", "cuts"), ("model", "dropout"), ("optimizer", "ema_decay")):
        del there[section][key]
    assert differences_on_resume(there, load_config()) == []
    fenced = load_config(None, ['model.fences=["block.0:int8"]'])
    assert differences_on_resume(there, fenced) == ['model.fences is [] there and ["block.0:int8"] here']
    there["model"]["of_the_future"] = 3
    assert differences_on_resume(there, load_config()) == ["model.of_the_future is 3 there and unset here"]


def test_a_configuration_saved_before_there_was_a_format_is_refused_with_one_line(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    saved = tmp_path / "config.toml"
    assert saved.read_text().startswith("format = 2\n\n[model]\n")
    saved.write_text(saved.read_text().removeprefix("format = 2\n\n"))
    with pytest.raises(RunFolderError, match="format: missing: an older version of elaswave has saved this") as caught:
        saved_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_resume_of_nothing_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(RunFolderError, match="holds no run that could be resumed"), opened(path, resume=True):
        pass
    with pytest.raises(RunFolderError, match="holds no run that could be resumed"):
        saved_config(path)
    assert not path.exists()


def test_a_damaged_saved_configuration_is_named(tmp_path: Path) -> None:
    start(tmp_path)
    (tmp_path / "config.toml").write_text("format = 2\n[model]\nhidden_size = 0\n")
    with pytest.raises(RunFolderError, match="saved in .* is damaged: model.hidden_size: got 0"):
        saved_config(tmp_path)
    (tmp_path / "config.toml").unlink()
    with pytest.raises(RunFolderError, match="is damaged: .*No such file"):
        saved_config(tmp_path)


def test_two_commands_cannot_work_in_one_folder(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(RunFolderError, match="another elaswave is at work in"), opened(tmp_path, overwrite=True):
            pass
        with pytest.raises(RunFolderError, match="another elaswave is at work in"), opened(tmp_path, resume=True):
            pass
    with opened(tmp_path, resume=True):
        pass


def test_a_folder_that_became_a_run_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commands started at the same instant: the one that gets the lock second looks again."""
    real = fcntl.flock

    def other_was_first(descriptor: int, operation: int) -> None:
        (tmp_path / "run.json").write_text("{}")
        real(descriptor, operation)

    monkeypatch.setattr(run_folder.fcntl, "flock", other_was_first)
    with pytest.raises(RunFolderError, match="holds a run already"), opened(tmp_path):
        pass


def test_a_forked_worker_does_not_unlock_for_its_launcher(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stack.enter_context(opened(tmp_path))
        child = os.fork()
        if child == 0:
            stack.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(RunFolderError, match="at work"), opened(tmp_path, resume=True):
            pass


def test_a_worker_that_outlives_its_launcher_keeps_others_out(tmp_path: Path) -> None:
    """A launcher killed with SIGKILL leaves its folder locked until its last worker has ended."""
    reader, writer = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        os.close(writer)
        stack = ExitStack()
        stack.enter_context(opened(tmp_path))
        if os.fork() == 0:
            os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    os.waitpid(launcher, 0)
    with pytest.raises(RunFolderError, match="at work"), opened(tmp_path, resume=True):
        pass
    os.close(writer)
    lock = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(lock)


@pytest.mark.parametrize(("number", "works"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_file_systems_without_locks_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, works: bool
) -> None:
    def fails(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_folder.fcntl, "flock", fails)
    if works:
        with opened(tmp_path) as run:
            assert is_run(run)
    else:
        with pytest.raises(RunFolderError, match="Input/output error"), opened(tmp_path):
            pass


def test_an_error_inside_passes_and_frees_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), opened(tmp_path):
        raise ValueError("inside")
    with opened(tmp_path, resume=True):
        pass


@pytest.mark.parametrize("error", [DataError("too short"), ConfigError(["bad"])])
def test_bad_input_leaves_no_run_in_the_way(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(type(error)), opened(tmp_path) as run:
        (run / "events.jsonl").write_text("{}")
        raise error
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt"}
    with opened(tmp_path):
        pass


@pytest.mark.parametrize("error", [ConfigError(["wrong"]), DataError("no text")])
def test_bad_input_leaves_no_folder_that_was_not_there_before(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)), opened(tmp_path / "runs" / "a"):
        raise error
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(type(error)), opened(tmp_path / "mine" / "a"):
        raise error
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_lock_that_was_removed_while_we_took_it_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = fcntl.flock

    def remove_then_take(descriptor: int, operation: int) -> None:
        (tmp_path / "r" / ".lock").unlink(missing_ok=True)
        take(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_then_take)
    with pytest.raises(RunFolderError, match="has just given up"), opened(tmp_path / "r"):
        pass


def test_bad_input_never_costs_a_run_that_was_there_before(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    with pytest.raises(DataError), opened(tmp_path, resume=True):
        raise DataError("gone")
    assert is_run(tmp_path) and saved_config(tmp_path) == load_config()


def test_bad_input_never_costs_a_checkpoint(tmp_path: Path) -> None:
    start(tmp_path)
    with pytest.raises(DataError), opened(tmp_path, resume=True):
        raise DataError("gone")
    assert (tmp_path / "checkpoints" / "step-5" / "shard").exists()
    with pytest.raises(DataError), opened(tmp_path, overwrite=True) as run:
        (run / "checkpoints" / "step-9").mkdir(parents=True)
        raise DataError("gone")
    assert (tmp_path / "checkpoints" / "step-9").exists()


def test_an_unwritable_folder_at_the_end_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError), opened(tmp_path) as run:
        (run / "events.jsonl").write_text("{}")
        raise RunFolderError("no space left")
    assert is_run(tmp_path) and (tmp_path / "events.jsonl").exists()


def test_checkpoints_may_be_somewhere_else_and_are_all_that_is_removed_there(tmp_path: Path) -> None:
    shared, path = tmp_path / "shared", tmp_path / "run"
    shared.mkdir()
    (shared / "precious").touch()
    path.mkdir()
    (path / "checkpoints").symlink_to(shared)
    with opened(path):
        (path / "checkpoints" / "step-00000004").mkdir()
    with opened(path, overwrite=True):
        assert [item.name for item in (path / "checkpoints").iterdir()] == ["precious"]
        (path / "checkpoints" / "step-00000004").mkdir()
    other = tmp_path / "other"
    other.mkdir()
    (other / "checkpoints").symlink_to(shared)
    with pytest.raises(RunFolderError, match="holds checkpoints, where a run would write"), opened(other):
        pass


def test_a_folder_that_no_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"'.*a\\x00b' has a character of number 0"), opened(tmp_path / "a\0b"):
        pass


def test_a_folder_whose_name_is_no_text_is_refused_also_as_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "text.txt").write_bytes(b"words " * 100)
    monkeypatch.chdir(folder)
    for path in (folder, Path("run")):
        with pytest.raises(RunFolderError, match=r"caf\\xe9.* is no UTF-8 text"), opened(path):
            pass
    for key in ("data.source", "run.spare_checkpoints", "net.keys"):
        with pytest.raises(ConfigError, match=r"caf\\xe9.* is no UTF-8 text"):
            load_config(None, [f"{key}=text.txt"])
    assert [path.name for path in folder.iterdir()] == ["text.txt"]


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    """What is there would be made private."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.touch()
    elsewhere.chmod(0o644)
    run.mkdir()
    (run / ".lock").symlink_to(elsewhere)
    with pytest.raises(RunFolderError, match="cannot write"):
        start(run)
    assert elsewhere.stat().st_mode & 0o777 == 0o644
