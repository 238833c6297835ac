"""The handshake as pure bytes: two honest sides agree; anything else is refused with a reason."""

import hmac
import itertools

import pytest

from elaswave.errors import AuthenticationError
from elaswave.transport.handshake import Dialler, KeyRing, Listener, Secrets, check_key, derived, secrets_of

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


# ------------------------------------------------------------------------------------- while the job's key is changed

OLD, NEW, THIRD = b"the old key of this job", b"the new key of this job", b"a key of neither of them"
RINGS = {"old": (OLD,), "both": (OLD, NEW), "new": (NEW,)}


def shake_hands(dialler: Dialler, listener: Listener) -> None:
    message, to = dialler.opening(), listener
    while message:
        message = to.receive(message)
        to = dialler if to is listener else listener
    assert dialler.done and listener.done
    assert dialler.secret(b"frames") == listener.secret(b"frames")


@pytest.mark.parametrize(("dials", "listens"), list(itertools.product(RINGS, repeat=2)))
def test_two_of_any_phases_meet_if_they_have_a_key_in_common(dials: str, listens: str) -> None:
    dialler, listener = sides(Secrets(RINGS[dials]), Secrets(RINGS[listens]))
    if {dials, listens} == {"old", "new"}:
        with pytest.raises(AuthenticationError, match="does not hold this job's key"):
            shake_hands(dialler, listener)
    else:
        shake_hands(dialler, listener)


@pytest.mark.parametrize("count", [3, 4])
def test_changes_that_were_begun_and_not_ended_add_up(count: int) -> None:
    keys = tuple(bytes([65 + index]) * 20 for index in range(count))
    for ring in itertools.chain([keys, keys[:1]], ((key,) for key in keys[1:])):
        shake_hands(*sides(Secrets(keys), Secrets(ring)))
        shake_hands(*sides(Secrets(ring), Secrets(keys)))


def test_both_speak_by_the_key_that_the_dialler_prefers() -> None:
    listener = Listener(Secrets((OLD, NEW)), 1, b"l" * 32, lambda peer: None)
    proof = listener.receive(Dialler(Secrets((NEW, OLD)), 0, 1, b"d" * 32).opening())
    alone = Dialler(NEW, 0, 1, b"d" * 32)  # of the same nonce, so that its HELLO is the same
    assert alone.opening() == Dialler(Secrets((NEW, OLD)), 0, 1, b"d" * 32).opening()
    assert listener.receive(alone.receive(proof)) and listener.done


def test_who_holds_a_retired_key_alone_is_told_so_and_nobody_else_is() -> None:
    listening = Secrets((NEW,), retired=(THIRD, OLD))
    dialler, listener = sides(OLD, listening)
    proof = listener.receive(dialler.opening())
    with pytest.raises(AuthenticationError, match="was changed while the job runs"):
        dialler.receive(proof)
    with pytest.raises(AuthenticationError, match=r"worker 0 holds a key of this job that was changed .* the new one"):
        listener.receive(dialler.last_words)
    assert not dialler.done and not listener.done

    stranger, listener = sides(b"a key of another job", listening)
    with pytest.raises(AuthenticationError, match="does not hold this job's key: check"):
        stranger.receive(listener.receive(stranger.opening()))
    with pytest.raises(AuthenticationError, match="was given another key"):
        listener.receive(stranger.last_words)


def test_who_prefers_a_retired_key_and_holds_the_new_one_is_let_in() -> None:
    shake_hands(*sides(Secrets((OLD, NEW)), Secrets((NEW,), retired=(OLD,))))


def test_a_retired_key_proves_nothing() -> None:
    dialler, listener = sides(OLD, Secrets((NEW,), retired=(OLD,)))
    transcript = dialler.opening() + listener.receive(dialler.opening())[14:46]
    answer = hmac.digest(OLD, b"dialler\0" + transcript, "sha256")
    with pytest.raises(AuthenticationError, match="claims to be worker 0 does not hold"):
        listener.receive(answer)
    sound = hmac.digest(NEW, b"dialler\0" + transcript, "sha256")
    assert listener.receive(sound) and listener.done, "that is how an answer is made"


def test_the_sign_of_a_key_is_another_one_each_time_and_is_no_part_of_any_proof() -> None:
    first, second = Dialler(OLD, 0, 1, b"a" * 32).opening(), Dialler(OLD, 0, 1, b"b" * 32).opening()
    assert first[-8:] != second[-8:] and len(first) == 50
    for changed in (first[:-1] + bytes([first[-1] ^ 1]), first[:20] + bytes([first[20] ^ 1]) + first[21:]):
        # Who changes it on its way makes the listener prove another key, or another transcript: no handshake succeeds.
        dialler, listener = Dialler(OLD, 0, 1, b"a" * 32), Listener(OLD, 1, b"l" * 32, lambda peer: None)
        with pytest.raises(AuthenticationError):
            dialler.receive(listener.receive(changed))
    assert OLD not in first and derived(OLD, "name") not in first


def test_a_ring_is_replaced_for_handshakes_to_come_and_checked_as_a_key_is() -> None:
    ring = KeyRing(Secrets((OLD,)))
    under_way = Dialler(ring, 0, 1, b"d" * 32)
    ring.now = Secrets((NEW,))
    shake_hands(under_way, Listener(OLD, 1, b"l" * 32, lambda peer: None))
    shake_hands(Dialler(ring, 0, 1, b"d" * 32), Listener(NEW, 1, b"l" * 32, lambda peer: None))
    with pytest.raises(ValueError, match="15 bytes, at least 16"):
        secrets_of(Secrets((OLD, bytes(15))))
    with pytest.raises(ValueError, match="was given none"):
        secrets_of(Secrets(()))


@pytest.mark.parametrize("dials", [(OLD, NEW), (NEW,)])
@pytest.mark.parametrize("listens", [(OLD, NEW), (NEW,)])
def test_a_handshake_that_was_begun_before_a_change_does_not_fail_by_it(
    dials: tuple[bytes, ...], listens: tuple[bytes, ...]
) -> None:
    """A listener that is slow to accept is told of the new key, and that it stands alone, between the lines; and so is
    who dials it. One that has answered already has proved the old key."""
    ring, listening = KeyRing(Secrets((OLD,))), KeyRing(Secrets((OLD,)))
    dialler = Dialler(ring, 0, 1, b"d" * 32)
    listener = Listener(listening, 1, b"l" * 32, lambda peer: None)
    ring.now, listening.now = Secrets(dials), Secrets(listens)
    shake_hands(dialler, listener)
    later = Dialler(ring, 0, 1, b"d" * 32)
    listener = Listener(lambda: listening.now, 1, b"l" * 32, lambda peer: None)
    listening.now = Secrets((NEW,))
    shake_hands(later, listener)


def test_the_name_of_secrets_tells_them_and_their_order_apart() -> None:
    named = {Secrets(ring).name for ring in ((OLD,), (NEW,), (OLD, NEW), (NEW, OLD), (OLD, NEW, THIRD))}
    assert len(named) == 5 and {len(name) for name in named} == {16}
    assert Secrets((OLD,), retired=(NEW,)).name == Secrets((OLD,)).name
