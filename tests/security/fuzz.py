"""All that is read before anybody has proved anything, and all files of others, changed at random.

    python -m tests.security.fuzz --minutes 10
    python -m tests.security.fuzz --target checkpoint --seed 7 --case 123     one case again

A case is drawn from its seed, its target and its number, so that these three show it again. It may end in a value or in
one of the project's own errors, within `CASE_S` and with no more than `CASE_BYTES` more memory. Else its input is kept,
and said. `tests/security/test_fuzz.py` runs the first few cases of each target.
"""

import argparse
import contextlib
import json
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import msgspec
from tests.certificates import job_tls
from tests.property.test_fuzzed_codecs import SIDES
from tests.security.readers import Kind, kinds, resealed

from elaswave.channel.wire import COORDINATOR, Session
from elaswave.errors import ElaswaveError
from elaswave.launcher.forkserver.messages import FromForkServer, Spawned, ToForkServer, Unpacker, pack_message
from elaswave.store.etcd_client import Credentials, EtcdClient, HttpGateway, HttpResponse, NoAnswerError
from elaswave.transport.handshake import Dialler, Key, Listener, Secrets

CASE_S = 30.0
CASE_BYTES = 2 << 30
KEY, OTHER_KEY = b"a key of sixteen bytes or more", b"another key of sixteen bytes or more"
TOKENS = (
    b"[" * 50_000, b'{"a":' * 50_000, b"9" * 5000, b"1e999", b"-1", b"null", b"NaN", b"18446744073709551616",
    b"9223372036854775807", b'"\\ud800"', b"\xff\xfe", b"\x00", b"\x1b]0;x\x07", b"../../../etc/passwd", b"{}", b"[]",
    b"true", b'"', b"\n", b",", b":", b"PK\x05\x06", b"\x80\x02", b"=", b"a.b.c = 1\n", b"2147483648",
)  # fmt: skip
"""What is put in besides bytes."""
VALUES = (None, -1, 0, 1 << 40, 1 << 62, 1e300, "", "../x", "\x1b[2J", [], {}, [[[[]]]], True, "nan", "0" * 40)


class Target(NamedTuple):
    """What is fuzzed."""

    case: Callable[[random.Random, Path], object]
    """Draws one case, puts its input into an empty folder, and runs it."""


class Failure(NamedTuple):
    """A case that did what none may do."""

    target: str
    seed: int
    case: int
    what: str


# ------------------------------------------------------------------------------------------------------------- changes


def changed(rng: random.Random, data: bytes) -> bytes:
    """Bytes with some replaced, put in, left out, repeated or cut off."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(found))
        stop = min(len(found), at + rng.choice((1, 1, 4, 8, 64)))
        how = rng.randrange(6)
        if how == 0 and found:
            found[at % len(found)] ^= 1 << rng.randrange(8)
        elif how == 1:
            found[at:stop] = rng.randbytes(stop - at)
        elif how == 2:
            found[at:at] = rng.choice(TOKENS)
        elif how == 3:
            del found[at:stop]
        elif how == 4:
            found[at:at] = found[at:stop] * rng.randint(1, 20)
        else:
            del found[at:]
    return bytes(found)


def changed_value(rng: random.Random, value: Any) -> Any:
    """A value of JSON with one of its parts replaced, left out or put in."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {other: each for other, each in value.items() if other != key}
        if rng.random() < 0.1:
            return {**value, rng.choice(("../x", "", "a")): value[key]}
        return {**value, key: changed_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], changed_value(rng, value[at]), *value[at + 1 :]]
    return rng.choice(VALUES)


def file_target(kind: Kind, originals: Mapping[str, bytes]) -> Target:
    """Files of a kind of folder: one or two of them are changed, as bytes or, where they are JSON, as values."""

    def case(rng: random.Random, folder: Path) -> object:
        kind.make(folder)
        for name in rng.sample(kind.files, k=min(len(kind.files), rng.randint(1, 2))):
            data = originals[name]
            with contextlib.suppress(ValueError):
                if rng.random() < 0.6:
                    data = json.dumps(changed_value(rng, json.loads(data))).encode()
            (folder / name).write_bytes(data if data != originals[name] else changed(rng, data))
        return kind.read(folder)

    return Target(case)


def _resealed_case(rng: random.Random, folder: Path) -> object:
    kind = kinds()["checkpoint"]
    kind.make(folder)

    def change(manifest: dict[str, Any], meta: dict[str, Any]) -> None:
        for each in rng.sample((manifest, meta), k=rng.randint(1, 2)):
            for _ in range(rng.randint(1, 2)):
                new = changed_value(rng, each)
                if isinstance(new, dict) and "files" in new or each is meta and isinstance(new, dict):
                    each.clear()
                    each.update(new)

    with contextlib.suppress(AttributeError, TypeError):  # the manifest's list of files is none any more
        resealed(folder, change)
    return kind.read(folder)


# ------------------------------------------------------------------------------------------------------------- sockets


def _handshake(listener_key: Key, dialler_key: Key) -> tuple[list[bytes], list[bytes]]:
    """What a dialler and a listener say to each other."""
    dialler, listener = Dialler(dialler_key, 5, 6, b"n" * 32), Listener(listener_key, 6, b"m" * 32, lambda peer: None)
    said = [dialler.opening()]
    heard = [listener.opening(), listener.receive(said[0])]
    with contextlib.suppress(ElaswaveError):
        said.append(dialler.receive(heard[-1]))
        heard.append(listener.receive(said[-1]))
    return said, heard


def _ring(rng: random.Random) -> Key:
    """Of one side, of a job whose key was never changed, is being changed, or was."""
    return rng.choice((KEY, Secrets((OTHER_KEY, KEY)), Secrets((KEY, OTHER_KEY)), Secrets((KEY,), (OTHER_KEY,))))


def _session_case(rng: random.Random, folder: Path) -> None:
    """A stranger who knows how members speak dials a coordinator, or answers a worker."""
    if rng.random() < 0.5:
        session: Session[Any] = Session.listening(_ring(rng), COORDINATOR, rng.choice(list(SIDES.values())))
        other: Session[Any] = Session.dialling(rng.choice((KEY, OTHER_KEY)), 5, COORDINATOR, SIDES["worker"])
    else:
        session = Session.dialling(_ring(rng), 5, COORDINATOR, SIDES["worker"])
        other = Session.listening(rng.choice((KEY, OTHER_KEY)), COORDINATOR, SIDES["coordinator"])
    for _ in range(4):
        data = other.take()
        if rng.random() < 0.5:
            data = changed(rng, data)
        (folder / f"{time.monotonic_ns()}").write_bytes(data)
        for cut in (data[: len(data) // 2], data[len(data) // 2 :]):
            session.feed(cut)
        with contextlib.suppress(ElaswaveError):
            other.feed(session.take())


def _handshake_case(rng: random.Random, folder: Path) -> None:
    listens, dials = _ring(rng), rng.choice((KEY, OTHER_KEY))
    said, heard = _handshake(listens, dials)
    side: Dialler | Listener
    if rng.random() < 0.5:
        side, lines = Listener(listens, 6, b"m" * 32, lambda peer: None), said
    else:
        side, lines = Dialler(_ring(rng), 5, 6, b"n" * 32), [line for line in heard if line]
        side.opening()
    for line in lines:
        data = changed(rng, line)[: side.bytes_needed].ljust(side.bytes_needed, b"\0")
        (folder / "heard").write_bytes(data)
        if not side.done:
            side.receive(data)


def _forkserver_case(rng: random.Random, folder: Path) -> None:
    """The forkserver's socket is a pair, which nobody can dial: what it hears is checked all the same."""
    unpacker: Unpacker[Any] = Unpacker(rng.choice((FromForkServer, ToForkServer)))
    data = changed(rng, pack_message(Spawned(child=1, pid=2)) * 2)
    (folder / "heard").write_bytes(data)
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        list(unpacker.feed(data))


def _tls_case(rng: random.Random, folder: Path) -> None:
    """A stranger speaks TLS, almost, to a coordinator; or a coordinator does to a member."""
    listens = rng.random() < 0.5
    server: Session[Any] = Session.listening(KEY, COORDINATOR, SIDES["coordinator"], security=job_tls().listening())
    client: Session[Any] = Session.dialling(
        KEY, 5, COORDINATOR, SIDES["worker"], security=job_tls().dialling(), host="localhost"
    )
    session, other = (server, client) if listens else (client, server)
    with contextlib.suppress(ElaswaveError):
        for _ in range(rng.randint(0, 3)):
            session.feed(other.take())
            other.feed(session.take())
    data = changed(rng, other.take() or b"\x16\x03\x01\x00\x05hello")
    (folder / "heard").write_bytes(data)
    session.feed(data)
    session.take()


HTTP = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 28\r\n\r\n"
    + b'{"header": {"revision": "7"}}'
)


def _http_case(rng: random.Random, folder: Path) -> None:
    """Who has taken the address of a member of etcd answers."""
    data = changed(rng, rng.choice((HTTP, HTTP.replace(b"Content-Length: 29", b"Transfer-Encoding: chunked"))))
    (folder / "heard").write_bytes(data)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(data)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.closing(
            EtcdClient((endpoint,), "/elaswave/j/", HttpGateway(), KEY, rng.choice((None, CREDENTIALS)))
        ) as client:
            client.timeout_s_max = 0.2
            with contextlib.suppress(NoAnswerError):
                client.transact([], [])
        thread.join()


class _Member:
    """A member of etcd that answers what it is told to."""

    def __init__(self, answer: HttpResponse) -> None:
        self._answer = answer

    def post(self, *request: object) -> HttpResponse:
        """Answers."""
        return self._answer

    def close(self) -> None:
        """Nothing."""


CREDENTIALS = Credentials("user", "password")
ETCD = {
    "token": "abc.7",
    "header": {"revision": "7"},
    "succeeded": True,
    "responses": [
        {"response_range": {"kvs": [{"key": "L2VsYXN3YXZlL2ovdGVybQ==", "value": "e30=", "mod_revision": "5"}]}}
    ],
}


def _etcd_case(rng: random.Random, folder: Path) -> None:
    body = json.dumps(changed_value(rng, ETCD) if rng.random() < 0.7 else ETCD).encode()
    body = changed(rng, body) if rng.random() < 0.5 else body
    (folder / "body").write_bytes(body)
    answer = HttpResponse(rng.choice((200, 200, 200, 400, 401, 404, 500)), body)
    client = EtcdClient(("h:1",), "/elaswave/j/", _Member(answer), KEY, rng.choice((None, CREDENTIALS)))
    with contextlib.suppress(NoAnswerError):
        client.transact([], [client.get("term")])


def targets() -> dict[str, Target]:
    """All targets by name."""
    found = {
        "handshake": Target(_handshake_case),
        "session": Target(_session_case),
        "tls": Target(_tls_case),
        "forkserver": Target(_forkserver_case),
        "http": Target(_http_case),
        "etcd": Target(_etcd_case),
        "checkpoint-resealed": Target(_resealed_case),
    }
    for name, kind in kinds().items():
        with tempfile.TemporaryDirectory() as folder:
            kind.make(Path(folder))
            originals = {file: (Path(folder) / file).read_bytes() for file in kind.files}
        found[name] = file_target(kind, originals)
    return found


# ------------------------------------------------------------------------------------------------------------- running


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Ends what takes longer with a `TimeoutError`."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_case(name: str, target: Target, seed: int, case: int, kept: Path | None = None) -> Failure | None:
    """Runs one case.

    Args:
        name: of the target.
        target: itself.
        seed, case: of which it is drawn.
        kept: folder for the inputs of failures.
    """
    rng = random.Random(f"{seed}/{name}/{case}")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    what = ""
    try:
        with bounded(CASE_S), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.case(rng, folder)
    except ElaswaveError as error:
        str(error)
    except Exception:
        what = traceback.format_exc()
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if not what and grown > CASE_BYTES:
        what = f"it took {grown / 2**20:.0f} MiB"
    if what and kept is not None:
        shutil.copytree(folder, kept / f"{name}-{seed}-{case}", symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    return Failure(name, seed, case, what) if what else None


def main() -> int:
    """The command.

    Returns:
        Its exit code: 1 if a case has failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--target", action="append", help="only this one; may be given again")
    parser.add_argument("--case", type=int, help="only this case")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "elaswave-fuzz")
    asked = parser.parse_args()
    known = targets()
    chosen = {name: known[name] for name in asked.target or known}
    print(f"seed {asked.seed}, {len(chosen)} targets", flush=True)
    deadline_s = time.monotonic() + 60 * asked.minutes
    failures: dict[tuple[str, str], Failure] = {}
    case, num_cases = asked.case or 0, 0
    while asked.case is None or case == asked.case:
        for name, target in chosen.items():
            failure = run_case(name, target, asked.seed, case, asked.keep)
            num_cases += 1
            if failure is not None and (key := (name, failure.what.splitlines()[-1][:60])) not in failures:
                failures[key] = failure
                again = f"--target {name} --seed {asked.seed} --case {case}"
                print(f"{failure.what}\n{name}: python -m tests.security.fuzz {again}", flush=True)
                print(f"input: {asked.keep / f'{name}-{asked.seed}-{case}'}\n", flush=True)
        case += 1
        if time.monotonic() >= deadline_s:
            break
    print(f"{num_cases:,} cases, {len(failures)} kinds of failures, seed {asked.seed}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
