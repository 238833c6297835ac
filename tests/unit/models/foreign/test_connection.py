"""A server's process and the messages to and from it: every way in which it can fail has its words, and its end."""

import os
import signal
import sys
import threading

import pytest

from elaswave.errors import ForeignError, InterruptedWaitError
from elaswave.models.foreign import connection
from elaswave.models.foreign.connection import Connection, close_all, is_failure
from elaswave.models.foreign.server import FAILED, HEADER_BYTES, WELCOME, Array, PartMessage, encode_message

WAIT_S = 100.0
"""Bound of waits that end by themselves."""

ECHO = """
import os
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            os._exit(0)
        data += more
    return data
while True:
    head = take(64)
    body = take(int.from_bytes(head[52:60], "little"))
    data = head + body
    while data:
        data = data[os.write(1, data):]
"""
"""Answers each request with itself."""


def answering(data: bytes) -> str:
    return f"import os, time\nos.read(0, 64)\nos.write(1, {data!r})\ntime.sleep(600)"


def made(code: str) -> Connection:
    return Connection([sys.executable, "-I", "-S", "-c", code], "the server")


HELLO = PartMessage(1)


def asked(one: Connection, message: PartMessage = HELLO, timeout_s: float = WAIT_S) -> PartMessage:
    return one.answer(one.ask(message, 1 << 24), timeout_s, lambda: None, "something")


def has_ended(one: Connection) -> bool:
    """Ended and reaped."""
    try:
        os.kill(one.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_answers_come_whatever_their_size() -> None:
    one = made(ECHO)
    for num_bytes in (0, 4, 1 << 16, 5 << 20):
        sent = PartMessage(
            5, text="text", arrays=[Array("uint8", (num_bytes,), os.urandom(num_bytes))] * 2, hash=bytes(16)
        )
        found = asked(one, sent)
        assert (found.kind, found.text, found.number) == (5, "text", one._number)
        assert [bytes(each.data) for each in found.arrays] == [bytes(each.data) for each in sent.arrays]
    assert one.is_open
    one.close()
    assert has_ended(one) and not one.is_open


def test_a_wait_that_is_left_leaves_nothing_behind() -> None:
    """Also half a message, in either direction."""
    one = made(ECHO)
    large = PartMessage(5, arrays=[Array("uint8", (16 << 20,), bytes(16 << 20))])

    def leave() -> None:
        raise InterruptedWaitError("a new generation")

    for _ in range(3):
        with pytest.raises(InterruptedWaitError):
            one.answer(one.ask(large, 1 << 25), WAIT_S, leave, "something")
    small = asked(one, PartMessage(6, text="after"), WAIT_S)
    assert (small.kind, small.text) == (6, "after")
    one.close()


HEADER = b"".join(encode_message(PartMessage(WELCOME, 1)))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os\nos.read(0, 64)\nos._exit(3)", r"has ended \(status 3\)"),
        ("import os\nos.read(0, 64)\nos.kill(os.getpid(), 9)", r"has ended \(it was killed by signal 9\)"),
        (answering(HEADER[:20]) + "\n", "has not answered within 0.2 s, asked for something"),
        (answering(b"the part printed this ") + "\n", "has not answered within 0.2 s"),
        (answering(b"x" * HEADER_BYTES), "answered what is no message: a message begins with b'xxxx'"),
        (
            answering(HEADER[:4] + b"\7\0" + HEADER[6:]),
            "answered what is no message: .*speaks protocol 7, and this one 1",
        ),
        (
            answering(HEADER[:52] + b"\xff" * 8 + HEADER[60:]),
            "answered what is no message: .* 18446744073709551615 bytes in all",
        ),
        (
            answering(b"".join(encode_message(PartMessage(WELCOME, 9)))),
            "answered what is no message: the answer to request 9 came for that to 1",
        ),
    ],
    ids=["exits", "is killed", "half a header", "prints", "no header", "another version", "too long", "another number"],
)
def test_what_a_broken_server_does_is_named_and_it_is_ended(code: str, error: str) -> None:
    one = made(code)
    with pytest.raises(ForeignError, match=f"^the server {error}"):
        # A time that has run out is the only end of a wait for what never comes.
        asked(one, timeout_s=0.2 if "0.2" in error else WAIT_S)
    assert has_ended(one) and not one.is_open


@pytest.mark.parametrize("closed", [0, 1])
def test_a_server_that_closes_a_pipe_and_goes_on_is_named_and_ended(
    closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaswave.models.foreign.connection.STATUS_S_MAX", 0.05)
    one = made(f"import os, time\nos.read(0, 64)\nos.close({closed})\ntime.sleep(600)")
    large = PartMessage(1, arrays=[Array("uint8", (1 << 22,), bytes(1 << 22))])  # more than a pipe holds
    with pytest.raises(ForeignError, match="^the server has closed a pipe to this worker, and goes on; what it has"):
        asked(one, large)
    assert has_ended(one) and not one.is_open


def test_an_answer_that_nobody_asked_for_is_none() -> None:
    one = made(answering(HEADER * 2))
    assert asked(one).kind == WELCOME
    with pytest.raises(ForeignError, match="for that to 2|nobody has asked for"):
        asked(one)
    assert has_ended(one)


def test_a_failure_is_told_apart() -> None:
    assert is_failure(PartMessage(FAILED)) and not is_failure(PartMessage(WELCOME))


def test_a_command_that_is_not_there_is_named() -> None:
    with pytest.raises(
        ForeignError, match="cannot be started: No such file or directory: /nowhere/python; give the path"
    ):
        Connection(["/nowhere/python"], "the server")


def test_a_thread_ends_its_own_servers_only() -> None:
    mine, theirs = made(ECHO), []
    done, close = threading.Event(), threading.Event()

    def other() -> None:
        theirs.append(made(ECHO))
        done.set()
        close.wait(WAIT_S)
        close_all()

    thread = threading.Thread(target=other)
    thread.start()
    assert done.wait(WAIT_S)
    close_all()
    assert has_ended(mine) and theirs[0].is_open
    assert theirs[0] not in connection._HERE.connections, "what one thread adds, another does not look through"
    close.set()
    thread.join(WAIT_S)
    assert has_ended(theirs[0])


def test_a_forked_child_leaves_the_server_to_its_parent() -> None:
    one = made(ECHO)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            is_mine = one.is_open
            one.close()
            status = int(is_mine)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert asked(one, PartMessage(4)).kind == 4, "it lives"
    one.close()


def test_a_server_that_no_signal_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "END_S_MAX", 0.02)
    one = made(ECHO)
    kill = one._process.kill
    monkeypatch.setattr(one._process, "kill", lambda: None)
    monkeypatch.setattr(connection.subprocess.Popen, "__del__", lambda self: None)
    os.kill(one.pid, signal.SIGSTOP)  # nor does the end of its input
    one.close()
    assert one._process.poll() is None
    kill()
    one._process.wait(WAIT_S)
