"""`elaswave keys rotate`: what is refused before a new key is made or sent, and what is left of a refused change."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaswave.channel.messages.operator import Answer, AskKey, AskStatus, StatusAnswer
from elaswave.cli import keys as keys_module
from elaswave.cli.main import main
from elaswave.errors import ControlError
from elaswave.job.keys import next_file, read_key
from elaswave.job.setup import JobNetwork, write_control_file
from elaswave.transport.addresses import Endpoint
from elaswave.transport.tls import Tls

OLD = "the old key of the job"
TLS = Tls(certificate="c", key="k", authority="a")


class Job:
    """The folder of a run whose coordinator answers as the test wants it to."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        (self.run_dir / "run.json").write_text("{}")
        self.file = folder / "keys" / "job.key"
        self.file.parent.mkdir()
        self.file.write_text(OLD)
        self.file.chmod(0o600)
        self.asked: list[bytes] = []
        self.decided: Any = "changed"
        self.is_over = False
        self.status: Any = None

    def runs(self, address: str = "unix:/x", tls: Tls | None = None, *, is_temporary: bool = False) -> None:
        """As the launcher says it."""
        network = JobNetwork(address, address, address, Endpoint(address, tls=tls))
        write_control_file(self.run_dir, network, self.file, is_temporary=is_temporary)

    def client(self, run_dir: Path, *, new_key: Any) -> "Job":
        return self

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def job_is_there(self) -> bool:
        return not self.is_over

    def ask(self, make: Callable[[int], AskKey | AskStatus], timeout_s: float) -> Iterator[Answer | StatusAnswer]:
        request = make(1)
        if isinstance(request, AskStatus):
            if self.status is None:
                raise ControlError("the job is over")
            yield StatusAnswer(request=1, status=self.status)
            return
        self.asked.append(request.key)
        if self.decided is None:
            raise ControlError("it has not come to an end within 1 s")
        yield Answer(request=1, is_last=False, decided="offered", reason="a")
        yield Answer(request=1, is_last=True, decided=self.decided, reason="b")

    def rotate(self, *options: str) -> int:
        return main(["keys", "rotate", str(self.run_dir), *options])


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(tmp_path)
    monkeypatch.setattr(keys_module, "OperatorClient", job.client)
    job.runs()
    return job


def test_the_new_key_takes_the_place_of_the_old_one_and_what_is_outdated_is_named(job: Job, capsys: Any) -> None:
    (job.file.parent / "node-1").mkdir()
    for name in ("reading.key", "node-1/job.key", "other.key"):
        (job.file.parent / name).write_text(OLD)
    assert job.rotate("--json") == 0
    shown, folder = json.loads(capsys.readouterr().out), job.file.parent
    outdated = [str(folder / "node-1" / "job.key"), str(folder / "reading.key")]
    assert shown == {"decided": "changed", "reason": "b", "files": [str(job.file)], "outdated": outdated}
    assert [read_key(job.file).secret] == job.asked != [OLD.encode()] and not next_file(job.file).exists()
    assert job.rotate() == 0 and len(set(job.asked)) == 2
    lines = capsys.readouterr().out
    assert f"{folder / 'node-1' / 'job.key'}: of the old key; copy {job.file} there, and to its host" in lines
    assert f"reading.key: of the old key; remove it, and make it anew: elaswave keys {folder} --role reading" in lines


def test_a_change_that_does_not_come_to_its_end_is_gone_on_with(job: Job, capsys: Any) -> None:
    job.decided = None
    assert job.rotate() == 1
    assert "within 1 s; nothing is lost: `elaswave keys rotate" in capsys.readouterr().err
    job.status = SimpleNamespace(under_way=["2 keys are good, and worker 3 must still say so"])
    assert job.rotate() == 1
    assert "with this change; at present 2 keys are good, and worker 3 must still say so" in capsys.readouterr().err
    job.is_over = True
    assert job.rotate() == 1
    assert "within 1 s; the change has ended with it, and no file" in capsys.readouterr().err
    job.decided, job.is_over = "failed", False
    assert job.rotate() == 1 and read_key(job.file).secret == OLD.encode()
    assert "error: failed: b" in capsys.readouterr().err
    job.decided = "changed"
    assert job.rotate() == 0
    assert len(job.asked) == 5 and set(job.asked) == {read_key(job.file).secret}


def test_of_a_change_that_is_refused_nothing_is_left_unless_it_was_begun_before(job: Job, tmp_path: Path) -> None:
    job.decided, out = "refused", tmp_path / "out.key"
    assert job.rotate("--out", str(out)) == 1
    assert not next_file(job.file).exists() and not out.exists() and read_key(job.file).secret == OLD.encode()
    job.decided = None
    assert job.rotate() == 1 and next_file(job.file).exists()
    job.decided = "refused"
    assert job.rotate("--out", str(out)) == 1 and next_file(job.file).exists() and out.exists()


def test_no_new_key_is_made_where_it_could_be_read_on_its_way(job: Job, capsys: Any) -> None:
    job.runs("tcp:127.0.0.1:1")
    assert job.rotate() == 1
    assert "this job's connections are not encrypted" in capsys.readouterr().err
    assert job.asked == [] and not next_file(job.file).exists()
    job.runs("tcp:127.0.0.1:1", TLS)
    assert job.rotate() == 0


def test_a_key_that_stands_in_no_file_is_written_to_one(job: Job, tmp_path: Path, capsys: Any) -> None:
    job.runs("tcp:127.0.0.1:1", TLS, is_temporary=True)
    assert job.rotate() == 2
    assert "the job was given its key in no file" in capsys.readouterr().err and job.asked == []
    out = tmp_path / "out.key"
    assert job.rotate("--out", str(out)) == 0
    assert [read_key(out).secret] == job.asked == [read_key(job.file).secret]
    assert f"{out}: the job's key from now on" in capsys.readouterr().out
    job.runs(is_temporary=True)
    assert job.rotate() == 0, "nobody else needs it on one machine"
    assert job.rotate("--out", str(out)) == 2 and "is there already: name a new file" in capsys.readouterr().err


def test_a_folder_may_be_called_as_the_command_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["keys", "rotate"]) == 2
    assert "Missing argument 'RUN'" in capsys.readouterr().err
    assert main(["keys", "./rotate"]) == main(["keys", "--days", "3", "rotate"]) == 2
    assert "there is no openssl command here" in capsys.readouterr().err and (tmp_path / "rotate").is_dir()
