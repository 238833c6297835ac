"""An operator's end: asks the coordinator of a running job, and waits for answers, each for a bounded time.

Single-threaded. While there is no coordinator (it is just being replaced, or the job is starting) the connection is
tried again, and what is open is asked again on the new one; what makes that useless (the job is over, its launcher is
gone, the key is another one, also when it is read again) is an error at once.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elaswave._version import __version__
from elaswave.channel.client import ClientOwner, ControlClient
from elaswave.channel.messages.operator import (
    Answer,
    AskDrain,
    JobOver,
    OperatorHello,
    Request,
    StatusAnswer,
    ToOperator,
    TurnedAway,
)
from elaswave.channel.wire import operator_id
from elaswave.errors import ControlError, RunFolderError, UsageError
from elaswave.job.keys import JobKey, KeyRole, next_file, read_key
from elaswave.job.setup import read_control_file
from elaswave.transport.handshake import KeyRing, Secrets

TURN_S = 0.1
HEARTBEAT_S = 1.0
SILENCE_TIMEOUT_S = 3.0
"""A coordinator that has not answered for this long gets a new connection."""
HOPELESS = ("AuthenticationError", "FrameError")
"""Troubles of a connection that another one meets too."""


class OperatorClient(ClientOwner):
    """Talks to the job that runs in a folder; to be closed, or used as a context.

    Args:
        run_dir: the run's folder.
        key_file: of the key to use; None: of the job's own, which the folder names.
        new_key: of the job, which is to follow that one: then either of them is used, and this client may change it.
        clock: monotonic seconds.
    Raises:
        RunFolderError, ControlError: as of `read_control_file`; also where the job's key or certificate cannot be read.
    """

    def __init__(
        self,
        run_dir: Path,
        key_file: Path | None = None,
        *,
        new_key: JobKey | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._file = read_control_file(run_dir)
        self._open: Request | None = None
        self._arrived: list[ToOperator] = []
        self._over: JobOver | None = None
        self._key_file = key_file or Path(self._file.key_file)
        self._new_keys = () if new_key is None else (new_key,)
        self._role = KeyRole.CHANGING
        if new_key is None:
            is_reader = _key_in(self._key_file).role is KeyRole.READING
            self._role = KeyRole.READING if is_reader else KeyRole.STEERING
        self._ring = KeyRing(self._secrets())
        self._client: ControlClient[ToOperator] = ControlClient(
            [(self._file.address, self._file.tls_host)],
            self._ring,
            operator_id(secrets.randbits(30), self._role),
            ToOperator,
            self,
            tls=self._file.tls,
        )
        self._client.interval_s, self._client.silence_timeout_s = HEARTBEAT_S, SILENCE_TIMEOUT_S

    def __enter__(self) -> "OperatorClient":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection."""
        self._client.close(0.0)

    def over(self) -> JobOver | None:
        """Tells how the job has ended, once it has said so."""
        return self._over

    def job_is_there(self) -> bool:
        """Tells whether the job runs, as far as is known."""
        try:
            return self._over is None and read_control_file(self._run_dir) == self._file
        except (ControlError, RunFolderError):
            return False

    def ask(self, make: Callable[[int], Request], timeout_s: float) -> Iterator[Answer | StatusAnswer]:
        """Asks, and gives answers as they come, the last one last.

        Args:
            make: a request of this number.
            timeout_s: bound of the whole.
        Raises:
            ControlError: the last answer does not come: there is no job any more, or the time is over.
        """
        deadline_s = self._clock() + timeout_s
        request = make(secrets.randbits(62))
        self._open = request
        newest: Answer | None = None
        if self._client.connected:
            self._client.send(request)
        try:
            while True:
                for answer in self._answers_to(request):
                    if isinstance(answer, Answer) and isinstance(request, AskDrain):
                        self._open = msgspec.structs.replace(request, begun=True)
                    yield answer
                    if not isinstance(answer, Answer) or answer.is_last:
                        return
                    newest = answer
                if self._over is not None:
                    raise ControlError(f"the job is over: {self._over.outcome}{_because(self._over.reason)}")
                if self._clock() >= deadline_s:
                    raise ControlError(self._too_late(timeout_s, newest))
                self._turn(deadline_s)
        finally:
            self._open = None

    def wait_for_end(self, timeout_s: float) -> JobOver:
        """Waits until the job says that it has ended.

        Raises:
            ControlError: it does not in time, or has ended in another way.
        """
        deadline_s = self._clock() + timeout_s
        while self._over is None:
            if self._clock() >= deadline_s:
                raise ControlError(
                    f"the job has not ended within {timeout_s:g} s; it goes on with what was decided: ask again, or "
                    "give a longer --timeout"
                )
            self._turn(deadline_s)
        return self._over

    def wait(self, seconds: float) -> None:
        """Lets time pass; ends at once when the job does."""
        until_s = self._clock() + seconds
        while self._over is None and self._clock() < until_s:
            self._turn(until_s)

    def _answers_to(self, request: Request) -> Iterator[Answer | StatusAnswer]:
        arrived, self._arrived = self._arrived, []
        for message in arrived:
            if isinstance(message, TurnedAway):
                raise ControlError(f"the job does not serve this operator: {message.reason}")
            if isinstance(message, Answer | StatusAnswer) and message.request == request.request:
                yield message

    def hello(self) -> OperatorHello:
        """Tells of which version this is."""
        return OperatorHello(version=__version__)

    def standing(self) -> tuple[Request, ...]:
        """Lists the request that waits for its answer."""
        return () if self._open is None else (self._open,)

    def receive(self, message: ToOperator) -> None:
        """Handles an answer, or the end of the job."""
        if isinstance(message, JobOver):
            self._over = message
        else:
            self._arrived.append(message)

    def _turn(self, deadline_s: float) -> None:
        self._client.turn(max(0.0, min(TURN_S, deadline_s - self._clock())))
        if self._over is not None or self._client.connected:
            return
        if self._client.trouble.startswith(HOPELESS) and not self._has_other_keys():
            raise ControlError(f"the job in {self._run_dir} cannot be talked to: {self._client.trouble}")
        try:
            present = read_control_file(self._run_dir)
        except ControlError as error:
            raise ControlError(f"the job has ended meanwhile: {error}") from None
        if present != self._file:
            raise ControlError(f"the job has ended meanwhile, and another one runs in {self._run_dir} now: ask again")

    def _secrets(self) -> Secrets:
        """Finds the secrets by which it may speak. While the job's own key is changed, and where the command for that
        was killed, the secret is the one in the file, or the one that is to follow it, which is read first: it is
        renamed to the other."""
        following: list[JobKey] = []
        with contextlib.suppress(UsageError):
            following = [key for key in (read_key(next_file(self._key_file)),) if key.role is KeyRole.JOB]
        present = _key_in(self._key_file)
        later = following if present.role is KeyRole.JOB else []
        held = [_held(key, self._role) for key in (present, *later, *self._new_keys)]
        return Secrets(tuple(dict.fromkeys(held)))

    def _has_other_keys(self) -> bool:
        """Tells whether its file holds another key than when it was read last: then that is tried."""
        before, self._ring.now = self._ring.now, self._secrets()
        if self._ring.now == before:
            return False
        self._client.trouble = ""
        return True

    def _too_late(self, timeout_s: float, newest: Answer | None) -> str:
        if newest is not None:
            return (
                f"it has not come to an end within {timeout_s:g} s; it is under way ({newest.decided}: "
                f"{newest.reason}) and goes on: `elaswave ctl {self._run_dir} status` shows it"
            )
        if self._client.connected:
            return f"the coordinator has not answered within {timeout_s:g} s: the machine is too busy, or it is stopped"
        trouble = self._client.trouble or "no answer"
        return (
            f"the job's coordinator could not be reached within {timeout_s:g} s ({trouble}): it is starting, or being "
            "replaced after a loss; try again, or give a longer --timeout"
        )


def _held(key: JobKey, role: KeyRole) -> bytes:
    try:
        return key.held(role)
    except UsageError as error:
        raise ControlError(f"the job cannot be talked to: {error}") from None


def _key_in(path: Path) -> JobKey:
    try:
        return read_key(path)
    except UsageError as error:
        raise ControlError(f"the job cannot be talked to: {error}") from None


def _because(reason: str) -> str:
    return f", {reason}" if reason else ""
