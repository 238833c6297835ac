"""The key of a running job is changed while workers and coordinators die and others come: the same bits, one key."""

import json
import re
import signal
from pathlib import Path

import pytest
from tests.agents import Agents, free_port
from tests.certificates import keys_of
from tests.integration.jobs import SMALL, run_job
from tests.integration.test_agents import recoveries
from tests.integration.test_ctl import FOREVER, PATIENCE_S, ctl, job, status_of, until_step

from elaswave.channel.messages.operator import Answer, AskKey
from elaswave.cli.main import main
from elaswave.cli.operator_client import OperatorClient
from elaswave.errors import ControlError
from elaswave.job.keys import KeyRole, begin_change, next_file, read_key, write_role_key
from elaswave.job.setup import read_control_file
from elaswave.observability.processes import read_processes, signal_process


def rotate(run_dir: Path, *options: str) -> int:
    return main(["keys", "rotate", str(run_dir), "--timeout", str(PATIENCE_S), *options])


def kill(run_dir: Path, role: str) -> None:
    """Kills one of a job's processes, the newest of its kind."""
    found = [each for each in read_processes(run_dir) if each.role == role]
    assert signal_process(max(found, key=lambda each: each.id), signal.SIGKILL)


def test_a_key_is_changed_under_losses_and_no_bit_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir, settings = tmp_path / "run", {"layout.widths": "[1,2]", "optimizer.schedule": "constant"}
    with job(run_dir, run__steps=FOREVER, elastic__respawn=True, optimizer__schedule="constant") as process:
        until_step(run_dir, process, 1)
        file = Path(read_control_file(run_dir).key_file)
        keys = [read_key(file).secret]
        steering = write_role_key(file.parent, KeyRole.STEERING)
        kill(run_dir, "worker")  # it is missed, and another one started, while the key is changed
        with OperatorClient(run_dir, steering) as stands:
            status_of(stands)
            assert rotate(run_dir) == 0, capsys.readouterr()
            with pytest.raises(ControlError, match="the job's key was changed while the job runs"):
                status_of(stands)
        out = capsys.readouterr().out
        assert "changed: the new key is the job's only one" in out
        assert f"{file}: the job's key from now on" in out and f"{steering}: of the old key; remove it, and make" in out
        keys.append(read_key(file).secret)

        old, (new, _) = read_key(file), begin_change(file)
        with OperatorClient(run_dir, new_key=new) as client:  # a command that is killed once it was answered first
            answer = next(client.ask(lambda request: AskKey(request=request, key=new.secret), PATIENCE_S))
            assert isinstance(answer, Answer) and answer.decided == "offered"
        kill(run_dir, "coordinator")  # which was told of it; its successor knows what the launcher does
        assert read_key(file) == old
        assert rotate(run_dir, "--json", "--out", str(tmp_path / "copy.key")) == 0, capsys.readouterr()
        assert json.loads(capsys.readouterr().out)["outdated"] == [str(steering)]
        assert read_key(file).secret == new.secret == read_key(tmp_path / "copy.key").secret
        keys.append(new.secret)
        assert len(set(keys)) == 3 and not next_file(file).exists()

        capsys.readouterr()
        assert main(["ctl", "--key", str(steering), str(run_dir), "status"]) == 1
        assert "the job's key was changed while the job runs" in capsys.readouterr().err
        assert ctl(run_dir, "join") == 0
        assert "joined: " in capsys.readouterr().out
        kill(run_dir, "coordinator")
        with OperatorClient(run_dir) as client:
            status = status_of(client)
            assert status.term == 3 and not [each for each in status.under_way if "key" in each]
        assert ctl(run_dir, "stop", "--wait", "--json") == 0
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert "holds a key of this job that was changed while it runs" in errors
    content = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert not [key for key in keys if key in content or key.hex().encode() in content]
    steps = int(re.findall(r"newest checkpoint is of step (\d+)", errors)[0])
    resumed = run_job(run_dir, {**settings, "run.steps": steps}, resume=True)
    undisturbed = run_job(tmp_path / "reference", {**settings, "run.steps": steps})
    assert resumed.computation == undisturbed.computation


@pytest.mark.slow
def test_the_key_of_a_job_of_several_hosts_inside_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = ["--set", "net.tls=required", "--set", f"net.keys={keys_of('job')}"]
    settings = {**SMALL, "control.hosts": 2, "layout.widths": "[1,1]", "run.steps": FOREVER, "elastic.respawn": True}
    with Agents(tmp_path, settings, f"127.0.0.1:{free_port()}") as agents:
        first, second = agents.start("a", *net, creates_job=True), agents.start("b", *net, joins=True)
        agents.wait_for_step(1)
        assert rotate(agents.run_dir) == 0, capsys.readouterr()
        assert "joining.key: of the old key; remove it, and make it anew" in capsys.readouterr().out
        late = agents.start("c", *net, "--slots", "1", joins=True)  # with the old joining key
        assert late.end() == 75 and "the job's key was changed while the job runs" in late.text
        (tmp_path / "joining.key").unlink()
        write_role_key(tmp_path, KeyRole.JOINING)
        fourth = agents.start("d", *net, "--slots", "1", joins=True)
        agents.wait_for(lambda: recoveries(agents, "joined"), "the worker of a host that has the new joining key")
        kill(agents.run_dir, "coordinator")
        assert ctl(agents.run_dir, "stop", "--wait") == 0
        assert first.end() == second.end() == fourth.end() == 143
