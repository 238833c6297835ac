"""The handshake as pure bytes: two honest sides agree; anything else is refused with a reason."""

import pytest

from elaswave.errors import AuthenticationError
from elaswave.transport.handshake import Dialler, Listener, check_key

KEY = b"a key of sixteen bytes or more"


def sides(dialler_key=KEY, listener_key=KEY, refusal=lambda peer: None, dialled=1):
    return Dialler(dialler_key, 0, dialled, b"d" * 32), Listener(listener_key, 1, b"l" * 32, refusal)


def test_two_who_hold_the_key_agree():
    dialler, listener = sides()
    assert listener.opening() == b""
    message, to = dialler.opening(), listener
    while message:
        assert len(message) == to.bytes_needed
        message = to.receive(message)
        to = dialler if to is listener else listener
    assert dialler.done and listener.done
    assert (dialler.peer, listener.peer) == (1, 0)
    assert dialler.bytes_needed == listener.bytes_needed == 0


def test_a_listener_with_another_key_is_refused_before_anything_is_proved_to_it():
    dialler, listener = sides(listener_key=b"another key, as long as it is")
    with pytest.raises(AuthenticationError, match="worker 1 does not hold this job's key"):
        dialler.receive(listener.receive(dialler.opening()))
    with pytest.raises(AuthenticationError, match="worker 0 was given another key than this process"):
        listener.receive(dialler.last_words)
    assert not listener.done


def test_a_dialler_with_another_key_is_refused():
    dialler, listener = sides()
    listener.receive(dialler.opening())
    with pytest.raises(AuthenticationError, match="claims to be worker 0 does not hold"):
        listener.receive(b"x" * 32)
    assert not listener.done


def test_a_proof_sent_back_to_its_speaker_proves_nothing():
    dialler, listener = sides()
    proof = listener.receive(dialler.opening())
    with pytest.raises(AuthenticationError):
        listener.receive(proof[-32:])


def test_a_wrong_welcome_is_refused():
    dialler, listener = sides()
    dialler.receive(listener.receive(dialler.opening()))
    with pytest.raises(AuthenticationError, match="wrong proof"):
        dialler.receive(bytes(32))


def test_the_wrong_listener_is_refused():
    dialler, listener = sides(dialled=2)
    with pytest.raises(AuthenticationError, match="dialled worker 2 but reached"):
        listener.receive(dialler.opening())


def test_a_listener_that_is_somebody_else_is_refused():
    dialler = Dialler(KEY, 0, 2, b"d" * 32)
    honest = Listener(KEY, 2, b"l" * 32, lambda peer: None).receive(dialler.opening())
    pretended = honest[:10] + (3).to_bytes(4, "little") + honest[14:]
    with pytest.raises(AuthenticationError, match="worker 2 does not hold"):
        dialler.receive(pretended)


def test_a_refusal_comes_after_the_proof_and_says_why():
    dialler, listener = sides(refusal=lambda peer: f"no {peer} here")
    answer = dialler.receive(listener.receive(dialler.opening()))
    with pytest.raises(AuthenticationError, match="worker 0 may not link with worker 1: no 0 here"):
        listener.receive(answer)


@pytest.mark.parametrize(("change", "seen"), [((0, b"X"), "instead of"), ((8, b"\x07"), "version 7")])
@pytest.mark.parametrize("who", ["dialler", "listener"])
def test_other_protocols_and_versions_are_named(who, change, seen):
    offset, value = change
    dialler, listener = sides()
    message = dialler.opening()
    if who == "dialler":
        message = listener.receive(message)
    message = message[:offset] + value + message[offset + 1 :]
    with pytest.raises(AuthenticationError, match=seen):
        (dialler if who == "dialler" else listener).receive(message)


def test_keys_have_a_least_length():
    assert check_key(bytes(16)) == bytes(16)
    with pytest.raises(ValueError, match="15 bytes, at least 16"):
        check_key(bytes(15))
