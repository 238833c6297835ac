"""What agents of other hosts are told, and how they see that run folder, data and configuration are the job's."""

from pathlib import Path

import pytest
from tests.integration.jobs import small_config

from elaswave.control.agent_messages import JobSpec
from elaswave.control.job import JobOptions, run_job
from elaswave.control.job_spec import check_data, check_shared, config_digest, write_mark
from elaswave.errors import ConfigError, DataError, RunFolderError, UsageError

DATA = {"num_bytes": 100, "sample": "ab", "content": ""}


def spec(mark: str = "") -> JobSpec:
    return JobSpec(
        job="demo", config={}, config_digest="", host="a", run_dir="/shared/run", mark=mark, data=DATA, faults=[],
        profile=False, checkpoint=None,
    )  # fmt: skip


def test_a_digest_is_of_all_that_hosts_have_in_common() -> None:
    here = small_config({"net.transport": '"tcp"', "net.bind": '"127.0.0.1"'})
    there = small_config({"net.transport": '"tcp"', "net.bind": '"127.0.0.2"'})
    assert config_digest(here) == config_digest(there) != config_digest(small_config({"run.steps": 13}))


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"on b has no agents\.json, so it is not the run folder /shared/run that"):
        check_shared(tmp_path, spec("5a"), "b")
    write_mark(tmp_path, "demo")
    with pytest.raises(RunFolderError, match=r"on b is another folder, .* mount the same folder on all hosts"):
        check_shared(tmp_path, spec("5a"), "b")
    mark = (tmp_path / "agents.json").read_text().split('"mark":"')[1].split('"')[0]
    check_shared(tmp_path, spec(mark), "b")


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
