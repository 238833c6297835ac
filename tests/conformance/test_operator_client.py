"""An operator's end: every wait has its bound, and what makes waiting useless is an error at once."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conformance import coordinators
from tests.conformance.coordinators import KEY, Coordinator, Town

from elaswave.channel.messages.operator import (
    Answer,
    AskCheckpoint,
    AskDrain,
    AskKey,
    AskStatus,
    AskStop,
    FromOperator,
    JobOver,
    OperatorHello,
    TurnedAway,
)
from elaswave.channel.wire import FIRST_AGENT, is_reader, operator_id, role_of
from elaswave.cli.operator_client import OperatorClient
from elaswave.errors import AuthenticationError, ControlError
from elaswave.job.keys import LESSER, JobKey, KeyRole, next_file, role_key, secrets_for
from elaswave.job.setup import JobNetwork, remove_control_file, write_control_file
from elaswave.transport.addresses import Endpoint
from elaswave.transport.handshake import Secrets

PATIENCE_S = 20.0


class Job:
    """A run folder, and a coordinator that does what a test says."""

    def __init__(self, folder: Path) -> None:
        self.town = Town("unix", folder)
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        (self.run_dir / "run.json").write_text("{}")
        self.key_file = folder / "job.key"
        self.key_file.write_bytes(KEY)
        self.key_file.chmod(0o600)
        self.write_control_file(self.town.listen)

    def write_control_file(self, address: str) -> None:
        """As the launcher does."""
        write_control_file(self.run_dir, JobNetwork(address, address, address, Endpoint(address)), self.key_file)

    def serves(self, answer: Callable[[Any], list[Any]], **options: Any) -> Coordinator:
        """Starts a coordinator that answers each message with these; None hangs up."""

        def on_message(peer: int, message: Any) -> None:
            for each in answer(message):
                coordinator.server.send(peer, each) if each is not None else coordinator.server.hang_up(peer)

        held = options.pop("held", Secrets((KEY,)))
        options.setdefault("key_of", lambda peer: secrets_for(held, role_of(peer)))
        coordinator = self.town.coordinator(on_message=on_message, **options)
        return coordinator


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coordinators, "FromClient", FromOperator)
    job = Job(tmp_path)
    yield job
    job.town.close()


def answers(job: Job, timeout_s: float = PATIENCE_S) -> list[str]:
    with OperatorClient(job.run_dir) as client:
        asked = client.ask(lambda request: AskCheckpoint(request=request, wait=True), timeout_s)
        return [answer.decided for answer in asked if isinstance(answer, Answer)]


def taken_and_written(message: Any) -> list[Any]:
    if isinstance(message, OperatorHello):
        return []
    return [
        Answer(request=message.request + 1, is_last=True, decided="refused", reason="another request's"),
        Answer(request=message.request, is_last=False, decided="taken", reason="a"),
        Answer(request=message.request, is_last=True, decided="written", reason="b"),
    ]


def test_answers_come_one_by_one_to_the_last(job: Job) -> None:
    job.serves(taken_and_written)
    assert answers(job) == ["taken", "written"]


def test_nobody_who_listens_is_waited_for_until_the_bound(job: Job) -> None:
    began_s = time.monotonic()
    with pytest.raises(ControlError, match=r"could not be reached within 0.3 s \(.*starting, or being replaced"):
        answers(job, 0.3)
    assert time.monotonic() - began_s >= 0.3


def test_no_answer_and_no_end_have_the_same_bound(job: Job) -> None:
    job.serves(lambda message: taken_and_written(message)[:2] if isinstance(message, AskCheckpoint) else [])
    with pytest.raises(ControlError, match=r"not come to an end within 0.3 s; it is under way \(taken: a\)"):
        answers(job, 0.3)
    with OperatorClient(job.run_dir) as client:
        with pytest.raises(ControlError, match="has not answered within 0.3 s"):
            list(client.ask(lambda request: AskStatus(request=request), 0.3))
        with pytest.raises(ControlError, match="the job has not ended within 0.1 s"):
            client.wait_for_end(0.1)


def test_what_is_open_is_asked_again_of_a_successor(job: Job) -> None:
    first = job.serves(lambda message: [])
    with OperatorClient(job.run_dir) as client:
        asked = client.ask(lambda request: AskCheckpoint(request=request, wait=True), PATIENCE_S)

        def replace_once_asked(deadline_s: float) -> None:
            turn(deadline_s)
            if any(isinstance(message, AskCheckpoint) for _, _, message in list(first.log)):
                client._turn = turn  # type: ignore[method-assign]
                first.close()  # it has heard the request, and has answered nothing
                job.serves(taken_and_written)

        turn, client._turn = client._turn, replace_once_asked  # type: ignore[method-assign]
        assert [answer.decided for answer in asked if isinstance(answer, Answer)] == ["taken", "written"]
        assert client._turn == turn


def test_a_successor_is_told_that_a_leave_has_begun(job: Job) -> None:
    heard: list[Any] = []

    def begin(message: Any) -> list[Any]:
        if isinstance(message, OperatorHello):
            return []
        heard.append(message)
        if len(heard) == 1:  # and then its connection ends
            return [
                Answer(request=message.request, is_last=False, decided="draining", reason="a", workers=(4,)),
                None,
            ]
        return [Answer(request=message.request, is_last=True, decided="drained", reason="b")]

    job.serves(begin)
    with OperatorClient(job.run_dir) as client:
        asked = list(client.ask(lambda request: AskDrain(request=request, worker=4), PATIENCE_S))
    assert [answer.decided for answer in asked if isinstance(answer, Answer)] == ["draining", "drained"]
    first, second = heard
    assert (first.begun, second.begun) == (False, True) and first.request == second.request


def test_another_key_is_an_error_at_once(job: Job) -> None:
    job.serves(lambda message: [], key=b"another key of enough bytes", key_of=None)
    with pytest.raises(ControlError, match="cannot be talked to: AuthenticationError.* does not hold this job's key"):
        answers(job)


def test_who_is_turned_away_is_told_why(job: Job) -> None:
    job.serves(lambda message: [TurnedAway(reason="16 operators are connected"), None])
    with pytest.raises(ControlError, match="does not serve this operator: 16 operators are connected"):
        answers(job)


def test_the_end_of_the_job_ends_every_wait(job: Job) -> None:
    over = JobOver(outcome="stopped", reason="after step 3")
    job.serves(lambda message: [over, None] if isinstance(message, AskCheckpoint | AskStop) else [])
    with pytest.raises(ControlError, match="the job is over: stopped, after step 3"):
        answers(job)
    with OperatorClient(job.run_dir) as client, pytest.raises(ControlError):
        assert client.job_is_there()
        list(client.ask(lambda request: AskStop(request=request), PATIENCE_S))
    assert not client.job_is_there() and client.wait_for_end(0.0) == over


def test_a_job_that_ends_without_a_word_is_noticed(job: Job) -> None:
    with OperatorClient(job.run_dir) as client:
        remove_control_file(job.run_dir)
        with pytest.raises(ControlError, match="the job has ended meanwhile: no job runs in"):
            list(client.ask(lambda request: AskStatus(request=request), PATIENCE_S))
        assert not client.job_is_there()
        job.write_control_file("unix:/elsewhere")
        with pytest.raises(ControlError, match="another one runs in .* now: ask again"):
            list(client.ask(lambda request: AskStatus(request=request), PATIENCE_S))
        assert not client.job_is_there()


def test_a_key_that_cannot_be_read_is_an_error_at_once(job: Job) -> None:
    job.key_file.unlink()
    with pytest.raises(ControlError, match="the job cannot be talked to: the job's key in .* cannot be read"):
        OperatorClient(job.run_dir)


@pytest.mark.parametrize("role", [KeyRole.JOB, *LESSER])
def test_an_operator_says_by_its_id_what_its_key_is_for(job: Job, tmp_path: Path, role: KeyRole) -> None:
    path = tmp_path / "own.key"
    path.write_bytes(role_key(JobKey(KEY, None), role).text)
    path.chmod(0o600)
    coordinator = job.serves(taken_and_written)
    if role is KeyRole.JOINING:
        with pytest.raises(ControlError, match="own.key is a joining key of the job: what is asked for needs its key"):
            OperatorClient(job.run_dir, path)
        return
    with OperatorClient(job.run_dir, path) as client:
        asked = client.ask(lambda request: AskCheckpoint(request=request, wait=True), PATIENCE_S)
        assert [answer.decided for answer in asked if isinstance(answer, Answer)] == ["taken", "written"]
    ((_, peer, _), *_) = coordinator.log
    assert is_reader(peer) is (role is KeyRole.READING)


@pytest.mark.parametrize(
    ("role", "own"),
    [
        (KeyRole.READING, operator_id(1)),
        (KeyRole.READING, FIRST_AGENT),
        (KeyRole.STEERING, 1),
        (KeyRole.STEERING, operator_id(1, KeyRole.READING)),
        (KeyRole.JOINING, operator_id(1)),
        (KeyRole.JOINING, operator_id(1, KeyRole.CHANGING)),
        (KeyRole.STEERING, operator_id(1, KeyRole.CHANGING)),
        (KeyRole.CHANGING, operator_id(1)),
        (KeyRole.JOB, 1),
    ],
)
def test_a_key_is_good_for_ids_of_its_own_role_alone(job: Job, role: KeyRole, own: int) -> None:
    """Whoever claims another one proves nothing, nor with the job's key itself, which no connection uses."""
    coordinator = job.serves(lambda message: [])
    peer = job.town.raw_peer(own=own, key=JobKey(KEY, None).held(role))
    with pytest.raises(AuthenticationError, match="does not hold this job's key"):
        peer.authenticate()
    assert coordinator.events(own) == []


# --------------------------------------------------------------------------------------------------- a key is changed

NEW = JobKey(b"the new key of the control connections", None)


@pytest.mark.parametrize("held", [Secrets((KEY,)), Secrets((KEY, NEW.secret)), Secrets((NEW.secret,), (KEY,))])
def test_who_changes_the_key_is_let_in_by_either(job: Job, held: Secrets) -> None:
    coordinator = job.serves(taken_and_written, held=held)
    with OperatorClient(job.run_dir, new_key=NEW) as client:
        asked = client.ask(lambda request: AskKey(request=request, key=NEW.secret), PATIENCE_S)
        assert [answer.decided for answer in asked if isinstance(answer, Answer)] == ["taken", "written"]
    ((_, peer, _), *_) = coordinator.log
    assert role_of(peer) is KeyRole.CHANGING


@pytest.mark.parametrize("role", LESSER)
def test_a_lesser_key_changes_no_key(job: Job, tmp_path: Path, role: KeyRole) -> None:
    path = tmp_path / "own.key"
    path.write_bytes(role_key(JobKey(KEY, None), role).text)
    path.chmod(0o600)
    with pytest.raises(
        ControlError, match=f"own.key is a {role.value} key of the job: what is asked for needs its key"
    ):
        OperatorClient(job.run_dir, path, new_key=NEW)


@pytest.mark.parametrize("role", [KeyRole.JOB, KeyRole.STEERING, KeyRole.READING])
def test_an_old_key_and_all_made_of_it_are_refused_with_the_reason(job: Job, tmp_path: Path, role: KeyRole) -> None:
    job.serves(lambda message: [], held=Secrets((NEW.secret,), retired=(KEY,)))
    path = tmp_path / "own.key"
    path.write_bytes(role_key(JobKey(KEY, None), role).text)
    path.chmod(0o600)
    with (
        OperatorClient(job.run_dir, path) as client,
        pytest.raises(ControlError, match="the job's key was changed while the job runs") as caught,
    ):
        list(client.ask(lambda request: AskStatus(request=request), PATIENCE_S))
    assert "job.key" not in str(caught.value).split("the old one")[1]


def asked_for_status(client: OperatorClient) -> str:
    """What a coordinator that does `taken_and_written` answers last."""
    (*_, answer) = client.ask(lambda request: AskStatus(request=request), PATIENCE_S)
    assert isinstance(answer, Answer)
    return answer.decided


def test_the_next_key_of_the_job_is_spoken_by_where_the_command_was_killed_that_changes_it(job: Job) -> None:
    """It may be the only good one. That of a lesser key's file is none."""
    next_file(job.key_file).write_bytes(NEW.text)
    next_file(job.key_file).chmod(0o600)
    coordinator = job.serves(taken_and_written, held=Secrets((NEW.secret,), retired=(KEY,)))
    with OperatorClient(job.run_dir) as client:
        assert asked_for_status(client) == "written"
    coordinator.close()
    job.serves(taken_and_written)
    with OperatorClient(job.run_dir) as client:
        assert asked_for_status(client) == "written"
    next_file(job.key_file).write_bytes(role_key(NEW, KeyRole.READING).text)
    with OperatorClient(job.run_dir) as client:
        assert asked_for_status(client) == "written"


def test_who_watches_the_job_while_its_key_is_changed_goes_on_with_the_new_one(job: Job) -> None:
    held = [Secrets((KEY,))]
    coordinator = job.serves(taken_and_written, key_of=lambda peer: secrets_for(held[0], role_of(peer)))
    with OperatorClient(job.run_dir) as client:
        assert asked_for_status(client) == "written"
        next_file(job.key_file).write_bytes(NEW.text)
        next_file(job.key_file).chmod(0o600)
        held[0] = Secrets((NEW.secret,), retired=(KEY,))
        coordinator.call(lambda: coordinator.server.keep([]))
        assert asked_for_status(client) == "written", "before the file is replaced"
        next_file(job.key_file).replace(job.key_file)
        held[0] = Secrets((b"the job's third key", NEW.secret))
        coordinator.call(lambda: coordinator.server.keep([]))
        assert asked_for_status(client) == "written"
        held[0] = Secrets((b"the job's third key",), retired=(KEY, NEW.secret))
        coordinator.call(lambda: coordinator.server.keep([]))
        with pytest.raises(ControlError, match="the job's key was changed while the job runs"):
            asked_for_status(client)
