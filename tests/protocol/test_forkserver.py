"""The forkserver's machine, event by event."""

import signal

from elaswave.launcher.forkserver.machine import (
    COMMITTER,
    COORDINATOR,
    ChildEnded,
    EndAsked,
    EndForkServer,
    ForkCommitter,
    ForkCoordinator,
    ForkLoader,
    ForkRefused,
    ForkServer,
    ForkWorker,
    KillChild,
    Loader,
    LoaderAsked,
    TellCommit,
    TellEnd,
    TellLoaderEnd,
)
from elaswave.launcher.forkserver.messages import (
    AbandonCommits,
    CommitShards,
    KillWorkers,
    SpawnCoordinator,
    SpawnWorkers,
)
from elaswave.protocol.membership.effects import SpawnJoiner

KILLED = int(signal.SIGKILL)
FAILED = 1 << 8
COORDINATOR_WANTED = SpawnCoordinator(num_samples=1, checkpoint=None, coordinator_ends_s=())


def first(*workers: int) -> SpawnWorkers:
    """Those with which a job begins."""
    return SpawnWorkers(workers=workers, checkpoint=None)


def shards(number: int, request: bytes) -> CommitShards:
    """Those of one checkpoint."""
    return CommitShards(number=number, request=request)


def test_a_workers_id_is_forked_once_and_its_end_told() -> None:
    forkserver = ForkServer()
    assert forkserver.handle(first(0, 1)) == [ForkWorker(0), ForkWorker(1)]
    assert forkserver.handle(first(1, 2)) == [ForkWorker(2)]
    assert forkserver.handle(ChildEnded(1, KILLED, 5.0)) == [TellEnd(1, KILLED, 5.0)]
    assert forkserver.handle(first(1)) == [], "also after its end"


def test_a_joiner_is_forked_like_any_worker_and_ends_with_the_template() -> None:
    forkserver = ForkServer(num_loaders=1)
    forkserver.handle(first(0))
    assert forkserver.handle(SpawnJoiner(worker=4)) == [ForkWorker(4, joins=True), ForkLoader(Loader(4, 0))]
    assert forkserver.handle(SpawnJoiner(worker=4)) == []
    assert forkserver.handle(EndAsked()) == [*map(KillChild, (0, 4)), *map(KillChild, (Loader(0, 0), Loader(4, 0)))]


def test_only_workers_that_live_are_killed() -> None:
    forkserver = ForkServer()
    forkserver.handle(first(0, 1))
    forkserver.handle(ChildEnded(0, 0, 5.0))
    assert forkserver.handle(KillWorkers(workers=(0, 1, 7))) == [KillChild(1)]


def test_coordinators_are_forked_one_after_the_other_and_their_ends_told() -> None:
    forkserver = ForkServer()
    assert forkserver.handle(COORDINATOR_WANTED) == [ForkCoordinator(COORDINATOR_WANTED)]
    assert forkserver.handle(KillWorkers(workers=(COORDINATOR,))) == [KillChild(COORDINATOR)]
    assert forkserver.handle(ChildEnded(COORDINATOR, KILLED, 5.0)) == [TellEnd(COORDINATOR, KILLED, 5.0)]
    assert forkserver.handle(KillWorkers(workers=(COORDINATOR,))) == [], "it has ended"
    assert forkserver.handle(COORDINATOR_WANTED) == [ForkCoordinator(COORDINATOR_WANTED)]
    forkserver.handle(first(0))
    assert forkserver.handle(EndAsked()) == [KillChild(COORDINATOR), KillChild(0)]
    assert forkserver.handle(COORDINATOR_WANTED) == []
    assert forkserver.handle(ChildEnded(0, KILLED, 6.0)) == [TellEnd(0, KILLED, 6.0)]
    assert forkserver.handle(ChildEnded(COORDINATOR, KILLED, 6.0))[1:] == [EndForkServer()]


def test_a_commit_is_answered_and_its_repetition_again() -> None:
    forkserver = ForkServer()
    asked = shards(3, b"what")
    assert forkserver.handle(asked) == [ForkCommitter(b"what")]
    assert forkserver.handle(asked) == [], "it is in hand"
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(3, None)]
    assert forkserver.handle(asked) == [TellCommit(3, None)]
    assert forkserver.handle(shards(4, b"next")) == [ForkCommitter(b"next")]


def test_a_commit_begins_only_when_the_one_before_has_ended_that_was_given_up() -> None:
    """Else the one before could still rename a folder that is not whole any more."""
    forkserver = ForkServer()
    forkserver.handle(shards(3, b"what"))
    assert forkserver.handle(shards(4, b"next")) == [KillChild(COMMITTER)]
    assert forkserver.handle(shards(4, b"next")) == [KillChild(COMMITTER)], "said again, it is no answer"
    lost = TellCommit(3, "the process that committed it was lost", again=True)
    assert forkserver.handle(ChildEnded(COMMITTER, KILLED, 5.0)) == [lost, ForkCommitter(b"next")]
    assert forkserver.handle(shards(4, b"next")) == [], "it is in hand"
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(4, None)]


def test_of_commits_that_wait_for_the_same_end_the_newest_is_made() -> None:
    forkserver = ForkServer()
    for number in (3, 4, 5):
        forkserver.handle(shards(number, b"%d" % number))
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(3, None), ForkCommitter(b"5")]
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(5, None)]


def test_a_commit_that_waits_is_not_begun_for_a_coordinator_that_is_gone() -> None:
    """The launcher waits for the answer before it starts the next coordinator: it comes when no committer lives."""
    forkserver = ForkServer()
    forkserver.handle(shards(3, b"what"))
    forkserver.handle(shards(4, b"next"))
    assert forkserver.handle(AbandonCommits()) == [KillChild(COMMITTER)]
    first, second = forkserver.handle(ChildEnded(COMMITTER, KILLED, 5.0))
    assert (first[0], second) == (3, TellCommit(4, "it was broken off before it had begun", again=True))
    assert forkserver.handle(shards(5, b"of the next coordinator")) == [ForkCommitter(b"of the next coordinator")]
    assert forkserver.handle(shards(6, b"later")) == [KillChild(COMMITTER)]
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(5, None), ForkCommitter(b"later")]
    assert forkserver.handle(EndAsked()) == []
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(6, None), EndForkServer()]


def test_a_commit_that_waits_is_not_begun_at_the_end() -> None:
    forkserver = ForkServer()
    forkserver.handle(shards(3, b"what"))
    forkserver.handle(shards(4, b"next"))
    assert forkserver.handle(EndAsked()) == []
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(3, None), EndForkServer()]


def test_a_process_that_the_system_refuses_is_not_waited_for_at_the_end() -> None:
    forkserver = ForkServer()
    forkserver.handle(first(0, 1))
    assert forkserver.handle(ForkRefused(1)) == [], "it has not ended: there was none"
    assert forkserver.handle(KillWorkers(workers=(0, 1))) == [KillChild(0)]
    assert forkserver.handle(EndAsked()) == [KillChild(0)]
    assert forkserver.handle(ChildEnded(0, KILLED, 5.0)) == [TellEnd(0, KILLED, 5.0), EndForkServer()]
    forkserver = ForkServer()
    forkserver.handle(first(0))
    assert forkserver.handle(EndAsked()) == [KillChild(0)]
    assert forkserver.handle(ForkRefused(0)) == [EndForkServer()]


def test_why_there_is_no_checkpoint_and_whether_another_try_may_help() -> None:
    forkserver = ForkServer()
    forkserver.handle(shards(3, b"what"))
    assert forkserver.handle(ChildEnded(COMMITTER, FAILED, 5.0, "disk full")) == [TellCommit(3, "disk full")]
    forkserver.handle(shards(4, b"what"))
    (told,) = forkserver.handle(ChildEnded(COMMITTER, KILLED, 5.0))
    assert told == TellCommit(4, "the process that committed it was lost", again=True)


def test_a_commit_whose_coordinator_is_gone_is_broken_off() -> None:
    forkserver = ForkServer()
    assert forkserver.handle(AbandonCommits()) == []
    forkserver.handle(shards(3, b"what"))
    assert forkserver.handle(AbandonCommits()) == [KillChild(COMMITTER)]
    assert forkserver.handle(ChildEnded(COMMITTER, KILLED, 5.0))[0][:1] == (3,)


def test_the_end_kills_workers_and_waits_for_all_also_for_a_commit() -> None:
    forkserver = ForkServer()
    assert ForkServer().handle(EndAsked()) == [EndForkServer()]
    forkserver.handle(first(0, 1))
    forkserver.handle(shards(3, b"what"))
    assert forkserver.handle(EndAsked()) == [KillChild(0), KillChild(1)]
    assert forkserver.handle(first(2)) == forkserver.handle(shards(4, b"")) == []
    assert forkserver.handle(ChildEnded(0, KILLED, 5.0)) == [TellEnd(0, KILLED, 5.0)]
    assert forkserver.handle(ChildEnded(1, KILLED, 5.0)) == [TellEnd(1, KILLED, 5.0)]
    assert forkserver.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(3, None), EndForkServer()]


def test_loaders_are_forked_with_their_worker_and_end_with_it() -> None:
    forkserver = ForkServer(num_loaders=2)
    mine, others = [Loader(0, 0), Loader(0, 1)], [Loader(1, 0), Loader(1, 1)]
    assert forkserver.handle(first(0, 1)) == [
        ForkWorker(0), *map(ForkLoader, mine), ForkWorker(1), *map(ForkLoader, others)
    ]  # fmt: skip
    assert forkserver.handle(ChildEnded(0, KILLED, 5.0)) == [TellEnd(0, KILLED, 5.0), *map(KillChild, mine)]
    assert [forkserver.handle(ChildEnded(loader, KILLED, 5.0)) for loader in mine] == [
        [TellLoaderEnd(loader)] for loader in mine
    ]
    assert forkserver.handle(EndAsked()) == [KillChild(1), *map(KillChild, others)]
    assert forkserver.handle(ChildEnded(1, KILLED, 6.0)) == [TellEnd(1, KILLED, 6.0), *map(KillChild, others)]
    assert forkserver.handle(ChildEnded(others[0], KILLED, 6.0)) == [TellLoaderEnd(others[0])]
    assert forkserver.handle(ChildEnded(others[1], KILLED, 6.0)) == [TellLoaderEnd(others[1]), EndForkServer()]


def test_a_loader_is_replaced_when_its_worker_asks() -> None:
    forkserver, loader = ForkServer(num_loaders=1), Loader(0, 0)
    forkserver.handle(first(0))
    assert forkserver.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader)], "nobody asks yet"
    assert forkserver.handle(LoaderAsked(loader)) == [ForkLoader(loader)]
    assert forkserver.handle(LoaderAsked(loader)) == [KillChild(loader)], "it hangs"
    assert forkserver.handle(LoaderAsked(loader)) == [KillChild(loader)]
    assert forkserver.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader), ForkLoader(loader)]
    assert forkserver.handle(LoaderAsked(Loader(0, 1))) == forkserver.handle(LoaderAsked(Loader(3, 0))) == []


def test_a_loader_is_not_replaced_when_its_worker_or_the_job_has_ended() -> None:
    forkserver, loader = ForkServer(num_loaders=1), Loader(0, 0)
    forkserver.handle(first(0, 1))
    forkserver.handle(LoaderAsked(loader))
    forkserver.handle(ChildEnded(0, KILLED, 5.0))
    assert forkserver.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader)]
    assert forkserver.handle(LoaderAsked(loader)) == []
    loader = Loader(1, 0)
    forkserver.handle(LoaderAsked(loader))
    forkserver.handle(EndAsked())
    assert forkserver.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader)]


def test_a_loader_that_cannot_be_forked_is_not_waited_for() -> None:
    forkserver = ForkServer(num_loaders=1)
    forkserver.handle(first(0))
    assert forkserver.handle(ForkRefused(Loader(0, 0))) == []
    assert forkserver.handle(EndAsked()) == [KillChild(0)]
    assert forkserver.handle(ChildEnded(0, KILLED, 5.0))[-1] == EndForkServer()
