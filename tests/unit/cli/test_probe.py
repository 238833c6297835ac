"""``elaswave probe``: links of a network file are measured, and written for `plan --network`."""

import json
import threading

import pytest
from tests.agents import free_port

from elaswave.cli.main import main
from elaswave.config.network import read_network, read_parts
from elaswave.job.keys import JobKey, KeyRole
from elaswave.transport import probing
from elaswave.transport.addresses import reserve

KEY = "6b" * 32
SITES = "".join(
    f'[sites."{name}"]\nworkers = 1\nbandwidth_mbit_per_s = 2000\ndelay_ms = 5\n' for name in ("oslo", "new york")
)


@pytest.fixture
def sites(tmp_path, monkeypatch):
    key = tmp_path / "job.key"
    key.touch(0o600)
    key.write_text(KEY)
    monkeypatch.setenv("ELASWAVE_KEY_FILE", str(key))
    monkeypatch.setattr("elaswave.planning.costs.link_probes.PROBE_BYTES_MAX", 1 << 18)
    file = tmp_path / "sites.toml"
    file.write_text(f'source = "ours"\n{SITES}')
    return file


@pytest.fixture
def port():
    """Of a host that answers."""
    over = threading.Event()
    with reserve("127.0.0.1") as listener:
        listener.listen()
        arguments = (
            listener,
            JobKey(KEY.encode(), None).held(KeyRole.JOINING),
            lambda: not over.is_set(),
            lambda _: None,
        )
        thread = threading.Thread(target=probing.answer, args=arguments)
        thread.start()
        yield listener.getsockname()[1]
        over.set()
        thread.join(30)
        assert not thread.is_alive()


def test_what_is_measured_is_a_network_file(sites, port, tmp_path, capsys):
    written = tmp_path / "measured.toml"
    target = f"new york=127.0.0.1:{port}"
    assert main(["probe", str(sites), "--from", "oslo", "--to", target, "--output", str(written)]) == 0
    assert f"written: {written}" in capsys.readouterr().out
    file = read_network(written)
    assert file.source == "ours; measured from oslo: new york"
    assert not read_parts(sites).links, "what was given stays as it was"
    assert main(["probe", str(written), "--from", "new york", "--to", f"oslo=localhost:{port}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (link,) = document["links"]
    assert (document["from"], link["to"], document["output"]) == ("new york", "oslo", None)
    assert link["bandwidth_mbit_per_s"] > 0 and link["delay_ms"] > 0 and link["num_probes"] >= 15


def test_an_answer_ends_in_time(sites, capsys):
    free = free_port()
    assert main(["probe", "--answer", f"127.0.0.1:{free}", "--for", "0.01"]) == 0
    assert capsys.readouterr().out == f"answers probes at 127.0.0.1:{free}\n"


TO = ("--to", "new york=10.0.0.1:7070")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --answer ADDRESS:PORT to answer, or NETWORK.toml"),
        (["--answer", "127.0.0.1:7070", "--from", "oslo"], "--answer goes with --for alone"),
        (["--answer", "127.0.0.1"], "needed is HOST:PORT"),
        (["--answer", "oslo:7070"], "cannot listen there"),
        (["FILE", "--from", "oslo", "--to", "new york"], "needed is SITE=HOST:PORT"),
        (["FILE", "--from", "oslo", "--to", "new york=10.0.0.1:0"], "with a port from 1 to 65535"),
        (["FILE", "--from", "oslo", *TO, *TO], "new york was given before"),
        (["FILE", "--from", "rome", *TO], "has no site 'rome'; there are oslo, new york"),
        (["FILE", "--from", "new york", *TO], "is the site of --from"),
        (["FILE", "--from", "oslo", *TO, "--output", "nowhere/measured.toml"], "its folder is not there"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(sites, arguments, said, capsys):
    assert main(["probe", *(str(sites) if each == "FILE" else each for each in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_without_a_key_it_is_said_how_to_get_one(sites, monkeypatch, capsys):
    monkeypatch.delenv("ELASWAVE_KEY_FILE")
    assert main(["probe", str(sites), "--from", "oslo", *TO]) == 2
    assert "both sides of a probe need one key: `elaswave keys DIR` makes it" in capsys.readouterr().err
