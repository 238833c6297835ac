"""Links inside TLS: who may listen and dial, what both sides say of one that may not, and a plain peer's fate."""

import logging
import re
import ssl

import pytest
import torch
from tests.certificates import client_only_tls, expired_tls, job_tls, misnamed_tls, stranger_tls
from tests.conformance.worlds import KEY, PATIENCE_S, finish, in_threads, link, until

from elaswave.errors import AuthenticationError, WaitTimeoutError
from elaswave.transport.addresses import Endpoint
from elaswave.transport.interface import Tag
from elaswave.transport.stream import StreamTransport
from elaswave.transport.tls import TlsError, tls_failure

TAG = Tag(channel=1, step=1, attempt=0)
EITHER = (AuthenticationError, WaitTimeoutError)
"""Where the end of the connection may overtake the listener's last words: as a reset, after which dialling goes on, or
as an end of the stream."""


def transport(worker, tls, listen="tcp:127.0.0.1"):
    return StreamTransport(worker, key=KEY, listen=Endpoint(listen, tls=tls))


def meet(dialler, listener, seen_by_dialler, caplog, error=AuthenticationError):
    """Lets worker 0 dial worker 1, which does not work; checks what both sides say."""
    try:

        def serve():
            until(lambda: "turned a connection away" in caplog.text, listener)

        def dial():
            with pytest.raises(error) as raised:
                dialler.connect({1: listener.address}, PATIENCE_S if error is AuthenticationError else 0.5)
            assert re.search(seen_by_dialler, str(raised.value)), raised.value

        with caplog.at_level(logging.WARNING, "elaswave.transport"):
            in_threads([serve, dial])
        assert not dialler.peers and not listener.peers
    finally:
        dialler.close()
        listener.close()


@pytest.mark.parametrize(
    ("make_tls", "seen"),
    [
        (stranger_tls, "in certificate chain|unable to get local issuer certificate"),
        (expired_tls, "certificate has expired"),
        (misnamed_tls, "IP address mismatch"),
        (client_only_tls, "(unsupported|unsuitable) certificate purpose"),
    ],
    ids=["stranger", "expired", "of another host", "client"],
)
def test_a_listener_whose_certificate_does_not_fit(make_tls, seen, caplog):
    meet(transport(0, job_tls()), transport(1, make_tls()), f"TLS failed .*{seen}", caplog)
    assert "worker 1 turned a connection away: TLS failed" in caplog.text


@pytest.mark.parametrize("make_tls", [stranger_tls, expired_tls])
def test_a_dialler_whose_certificate_does_not_fit(make_tls, caplog):
    dialler = transport(0, make_tls())
    dialler._acceptor._dialling.context.load_verify_locations(job_tls().authority)  # it accepts the listener
    meet(dialler, transport(1, job_tls()), "TLS failed .*ALERT|inside of TLS|reset", caplog, EITHER)
    assert re.search("turned a connection away: TLS failed .*certificate", caplog.text)


def test_a_plain_dialler(caplog):
    meet(transport(0, None), transport(1, job_tls()), "only one side uses TLS|reset", caplog, WaitTimeoutError)
    assert "turned a connection away: TLS failed" in caplog.text


def test_a_plain_listener(caplog):
    meet(transport(0, job_tls()), transport(1, None), "inside of TLS|reset", caplog, WaitTimeoutError)
    assert "it is not an elaswave worker" in caplog.text


def test_links_over_ipv6_and_a_name_that_is_checked():
    a, b = (transport(worker, job_tls(), "tcp:[::1]") for worker in range(2))
    try:
        link([a, b])
        finish([b.recv(0, TAG), a.send(1, TAG, torch.ones(100_000))], a, b)
    finally:
        a.close()
        b.close()


def test_unix_sockets_need_no_tls(tmp_path):
    with pytest.raises(ValueError, match="TLS is for tcp: addresses"):
        transport(0, job_tls(), f"unix:{tmp_path}/s")


def test_many_pieces_of_many_sizes_arrive_as_they_were_sent(tls_world):
    """Records end anywhere: in headers, between tensors, in their midst."""
    a, b = tls_world.linked(2)
    generator = torch.Generator().manual_seed(7)
    sizes = [1, 63, 64, 65, 16320, 16384, 16385, 100_000, 3, 0, 5, 700_000]
    sent = [torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    frames = [sent[:1], sent[1:4], sent[4:8], sent[8:11], sent[11:], sent]
    received = [[torch.zeros_like(piece) for piece in frame] for frame in frames]
    into = [b.recv(0, TAG._replace(a=n), out) for n, out in enumerate(received)]
    gone = [a.send(1, TAG._replace(a=n), frame) for n, frame in enumerate(frames)]
    finish([*into, *gone], a, b)
    for out, frame in zip(received, frames):
        assert all(torch.equal(one, other) for one, other in zip(out, frame))
    assert a.bytes_sent[1] == b.bytes_received[0]


def test_a_handshake_that_is_cut_off_is_begun_again(caplog):
    """Whoever crowds a listener cuts handshakes off: that says nothing against a certificate."""
    dialler, listener = transport(0, job_tls()), transport(1, job_tls())
    cut = []

    def serve():
        real = listener._acceptor._begin

        def begin(sock, *arguments):
            visit = real(sock, *arguments)
            if len(cut) < 3:
                cut.append(visit)
                listener._acceptor._turn_away(visit, TimeoutError("cut off"))
            return visit

        listener._acceptor._begin = begin
        until(lambda: 0 in listener.peers, listener)

    try:
        in_threads([serve, lambda: dialler.connect({1: listener.address}, PATIENCE_S)])
        assert len(cut) == 3 and dialler.peers == {1}
    finally:
        dialler.close()
        listener.close()


@pytest.mark.parametrize(
    ("error", "is_over"),
    [
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), True),
        (ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed"), True),
        (ssl.SSLSyscallError(5, "Some I/O error occurred"), True),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), False),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), False),
    ],
)
def test_only_what_the_other_side_says_counts_against_it(error, is_over):
    error.reason = error.verify_message = error.args[1]  # as OpenSSL's have them
    found = tls_failure(error)
    assert isinstance(found, TlsError) != is_over and isinstance(found, ConnectionError)
