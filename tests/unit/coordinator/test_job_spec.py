"""What agents of other hosts are told, and how they see that run folder, data and configuration are the job's."""

from pathlib import Path

import pytest
from tests.integration.jobs import small_config

from elaswave.channel.messages.agent import JobSpec
from elaswave.coordinator.job_spec import (
    check_data,
    check_shared,
    config_digest,
    link_checkpoints,
    mark_of,
    own_folder,
    write_marks,
)
from elaswave.errors import ConfigError, DataError, RunFolderError, UsageError
from elaswave.job.script import JobOptions
from elaswave.launcher.launcher import run_job

DATA = {"num_bytes": 100, "sample": "ab", "content": ""}


def spec(mark: str = "") -> JobSpec:
    return JobSpec(
        job="demo", config={}, config_digest="", host="a", run_dir="/shared/run", mark=mark, data=DATA, faults=[],
        profile=False, checkpoint=None, job_generation=1,
    )  # fmt: skip


def test_a_digest_is_of_all_that_hosts_have_in_common() -> None:
    here = small_config({"net.transport": '"tcp"', "net.bind": '"127.0.0.1"'})
    there = small_config({"net.transport": '"tcp"', "net.bind": '"127.0.0.2"'})
    assert config_digest(here) == config_digest(there) != config_digest(small_config({"run.steps": 13}))


def test_checkpoints_that_are_not_shared_are_refused(tmp_path: Path) -> None:
    founder, other = tmp_path / "founder", tmp_path / "other"
    for folder in (founder, other):
        own_folder(folder, "demo")
    with pytest.raises(
        RunFolderError, match=r"checkpoints on b has no agents\.json, so it is not the folder /shared/run/"
    ):
        check_shared(other, spec("5a"), "b")
    write_marks(founder, "demo")
    write_marks(other, "demo")
    mark = mark_of(founder / "checkpoints")
    with pytest.raises(
        RunFolderError, match=r"on b is another folder, .* mount the same folder on all hosts and name it"
    ):
        check_shared(other, spec(mark), "b")
    check_shared(founder, spec(mark), "b")
    assert [path.name for path in (founder / "checkpoints").iterdir()] == ["agents.json"]


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_marks(tmp_path, "demo")
    mark = mark_of(tmp_path / "checkpoints")
    with pytest.raises(RunFolderError, match=r"on no/such cannot be written \(No such file or directory\), but every"):
        check_shared(tmp_path, spec(mark), "no/such")


def test_a_run_folder_may_have_its_checkpoints_somewhere_else(tmp_path: Path) -> None:
    shared, here = tmp_path / "shared", tmp_path / "here"
    for _ in range(2):
        link_checkpoints(here, shared)
    write_marks(here, "demo")
    assert mark_of(shared) == mark_of(here / "checkpoints") != mark_of(here)
    with pytest.raises(RunFolderError, match=r"here/checkpoints is there already, and is not .*/other: leave"):
        link_checkpoints(here, tmp_path / "other")
    own_folder(here, "demo")
    mark = mark_of(here)
    own_folder(here, "demo")
    assert mark_of(here) == mark, "who shares a folder finds the same mark"
    own_folder(here, "another job")
    assert mark_of(here) != mark
    (tmp_path / "file").touch()
    for fails in (lambda: own_folder(tmp_path / "file", "demo"), lambda: link_checkpoints(tmp_path / "file", shared)):
        with pytest.raises(RunFolderError, match="cannot be"):
            fails()


def test_other_data_are_refused_with_both_sides_named() -> None:
    check_data(spec(), {**DATA, "content": "of all that they hold, which one side has not read"}, "b")
    with pytest.raises(DataError, match=r"on b are not those on a: num_bytes 100, sample cd here, and .* sample ab"):
        check_data(spec(), {**DATA, "sample": "cd"}, "b")


def test_a_command_that_starts_all_workers_here_has_one_host(tmp_path: Path) -> None:
    config = small_config({"control.hosts": 2, "layout.widths": "[2]"})
    with pytest.raises(UsageError, match="start `elaswave agent` on each host, or set control.hosts = 1"):
        run_job(config, JobOptions(run_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"control.hosts": 3}, "control.hosts: 3 hosts for 2 workers; begin with at most one for each"),
        (
            {"control.hosts": 2, "elastic.hosts": '["a"]'},
            "control.hosts: 2, but elastic.hosts names 1; make",
        ),
    ],
)
def test_hosts_have_names_and_workers(settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        small_config({**settings, "layout.widths": "[2]"})
