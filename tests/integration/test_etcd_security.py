"""A real etcd that speaks TLS and has users."""

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.etcd_processes import cluster, needs_etcd
from tests.fake_etcd import KEY

from elaswave.errors import StoreError
from elaswave.store.etcd_client import Credentials, EtcdClient, HttpGateway, NoAnswerError, security_of

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and one certificate for server and client; without a common name, which etcd would refuse."""
    openssl, folder = shutil.which("openssl"), tmp_path_factory.mktemp("keys")
    if openssl is None:
        pytest.skip("there is no openssl command to make certificates with")
    make = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    for name, options in {
        "ca": [],
        "own": ["-addext", "subjectAltName=IP:127.0.0.1", "-CA", f"{folder}/ca.pem", "-CAkey", f"{folder}/ca.key"],
    }.items():
        command = [*make, "-subj", f"/O={name}", "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.pem"]
        subprocess.run([*command, *options], check=True, capture_output=True, timeout=60)
    return folder


def test_members_are_known_by_their_authority_and_clients_by_certificate_and_password(files: Path) -> None:
    own = [f"--cert-file={files}/own.pem", f"--key-file={files}/own.key"]
    with cluster(1, *own, "--client-cert-auth", f"--trusted-ca-file={files}/ca.pem", scheme="https") as members:
        certified = security_of(files / "ca.pem", files / "own.pem", files / "own.key")
        gateways = [HttpGateway(certified), HttpGateway(security_of(files / "ca.pem", None, None)), HttpGateway()]
        clients = [
            EtcdClient([members[0].endpoint], "/elaswave/job/", gateway, KEY, job_generation=7) for gateway in gateways
        ]
        try:
            assert clients[0].transact([], [clients[0].put("k", b"v")]).succeeded
            for client in clients[1:]:
                with pytest.raises((NoAnswerError, StoreError), match="certificate|closed|ended|EOF|store_ca"):
                    client.transact([], [client.get("k")])
            for path, request in (
                ("user/add", {"name": "root", "password": "r"}),
                ("user/grant", {"user": "root", "role": "root"}),
                ("user/add", {"name": "ann", "password": "secret"}),
                ("auth/enable", {}),
            ):
                clients[0]._ask(f"/v3/auth/{path}" if "enable" not in path else f"/v3/{path}", request)
            with pytest.raises(StoreError, match="refuses: .*(user name is empty|permission denied); "):
                clients[0].transact([], [clients[0].get("k")])
            for user, problem in (
                (Credentials("ann", "wrong"), "authentication failed.*; set control.store_credentials"),
                (Credentials("ann", "secret"), "permission denied; give the user read and write permission"),
            ):
                client = EtcdClient([members[0].endpoint], "/elaswave/job/", gateways[0], KEY, user, job_generation=7)
                with pytest.raises(StoreError, match=problem):
                    client.transact([], [client.get("k")])
            root = EtcdClient(
                [members[0].endpoint], "/elaswave/job/", gateways[0], KEY, Credentials("root", "r"), job_generation=7
            )
            assert root.transact([], [root.get("k")]).ranges[0][0].value == b"v"
            root._token = "expired.1"
            with pytest.raises(NoAnswerError, match="invalid auth token"):
                root.transact([], [root.get("k")])
            assert root.transact([], [root.get("k")]).succeeded
        finally:
            for gateway in gateways:
                gateway.close()
