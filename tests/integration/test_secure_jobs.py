"""Jobs over TCP with TLS: equal bits through losses, and a key that stands nowhere but where it belongs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.certificates import keys_of
from tests.integration.jobs import SMALL, Calm, as_toml, run_job

from elaswave.api.environment import KEY_FILE_VARIABLE, KEY_VARIABLE
from elaswave.cli.main import main
from elaswave.observability.processes import read_processes
from elaswave.observability.run_folder import CONTROL_FILE

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 240.0
KEY = "a-key-that-is-found-wherever-it-is-written-4711"


def shown_by(pid: int) -> dict[str, bytes]:
    """What every user of a machine, or its owner, can see of a process."""
    shown = {}
    for name in ("cmdline", "environ"):
        try:
            shown[name] = Path(f"/proc/{pid}/{name}").read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            shown[name] = b""
    return shown


def test_a_job_inside_tls_computes_the_same_and_shows_its_key_nowhere(tmp_path: Path, calm: Calm) -> None:
    keys, run_dir = keys_of("job"), tmp_path / "run"
    settings = {**SMALL, "layout.widths": "[1,2]", "run.steps": 8, "net.transport": "tcp", "net.tls": "required"}
    settings |= {"net.keys": keys, "elastic.respawn": True}
    command = [sys.executable, "-m", "elaswave", "train", "--run-dir", str(run_dir), "--json"]
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={as_toml(value)}")]
    command += ["--fault", "kill:2@3:reduce", "--fault", "kill:coordinator@5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), KEY_VARIABLE: KEY, "TMPDIR": str(tmp_path)}
    roles, asked = set(), None
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        deadline_s = time.monotonic() + PATIENCE_S
        while job.poll() is None:
            assert time.monotonic() < deadline_s
            for process in read_processes(run_dir) if run_dir.exists() else ():
                for name, content in shown_by(process.pid).items():
                    assert KEY.encode() not in content, f"the key stands in the {name} of {process}"
                roles.add(process.role)
            if asked is None and "worker" in roles and (run_dir / CONTROL_FILE).exists():
                asked = main(["ctl", str(run_dir), "status", "--timeout", "60"])
            time.sleep(0.05)
        out, errors = job.communicate()
    assert job.returncode == 0, errors.decode()
    assert roles >= {"launcher", "forkserver", "coordinator", "worker"} and asked == 0
    assert b"a new one took over" in errors
    for path in (path for path in run_dir.rglob("*") if path.is_file()):
        content = path.read_bytes()
        assert KEY.encode() not in content and KEY.encode().hex().encode() not in content, path
    assert KEY.encode() not in out + errors
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("elaswave-")], "the job's folder is left"

    reference = calm({"run.steps": 8})
    result = json.loads(out)
    assert (result["losses"], result["state_digest"]) == (
        reference.result.losses,
        reference.result.state_digest,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "net",
    [
        {"net.bind": "::1"},
        {"net.bind": "0.0.0.0", "net.advertise": "127.0.0.1", "net.trusted": True},
        {"net.interface": "lo", "net.ports": "23400-23420"},
        {"net.bind": "0.0.0.0", "net.advertise": "localhost", "net.tls": "required", "net.keys": "KEYS"},
        {"net.bind": "::1", "net.tls": "required", "net.keys": "KEYS"},
    ],
    ids=["ipv6", "everywhere", "interface-and-ports", "name-tls", "ipv6-tls"],
)
def test_other_addresses(tmp_path: Path, net: dict[str, object]) -> None:
    shared = {"layout.widths": "[1,1]", "run.steps": 4}
    net = {key: keys_of("job") if value == "KEYS" else value for key, value in net.items()}
    job = run_job(tmp_path / "run", {**shared, "net.transport": "tcp", **net}, faults=["kill:1@3:gather"])
    reference = run_job(tmp_path / "reference", shared)
    assert job.computation == reference.computation


@pytest.mark.parametrize(
    ("net", "seen"),
    [
        ({"net.keys": "none", "net.tls": "required"}, "none has no certificate.pem"),
        ({"net.interface": "no-such-0"}, "net.interface: there is no no-such-0 here; there are lo"),
        ({"net.bind": "192.0.2.222", "net.trusted": True}, "no port for the coordinator can be had at 192.0.2.222"),
        ({"net.keys": "OTHER", "net.tls": "required"}, "cannot serve 127.0.0.1: .*IP address mismatch"),
    ],
    ids=["files", "interface", "address", "name"],
)
def test_what_cannot_work_is_said_before_anything_starts(tmp_path: Path, capsys, net, seen: str) -> None:
    values = {**SMALL, "net.transport": "tcp", **net}
    if values.get("net.keys") == "OTHER":
        values["net.keys"] = keys_of("job") / "10.9.8.7"
    overrides = [part for key, value in values.items() for part in ("--set", f"{key}={as_toml(value)}")]
    assert main(["train", "--run-dir", str(tmp_path / "run"), *overrides]) in (1, 2)
    import re

    assert re.search(seen, capsys.readouterr().err.replace("\n", " "))


def test_a_key_that_others_can_read_ends_the_command(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o644)
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    assert main(["train", "--run-dir", str(tmp_path / "run")]) == 2
    assert "has mode 0644" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
