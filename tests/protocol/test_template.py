"""The template's machine, event by event."""

import signal

from elaswave.launcher.forkserver.machine import (
    COMMITTER,
    COORDINATOR,
    ChildEnded,
    CommitAsked,
    CommitsAbandoned,
    CoordinatorAsked,
    EndAsked,
    EndTemplate,
    ForkCommitter,
    ForkCoordinator,
    ForkLoader,
    ForkRefused,
    ForkWorker,
    KillAsked,
    KillChild,
    Loader,
    LoaderAsked,
    SpawnAsked,
    TellCommit,
    TellEnd,
    TellLoaderEnd,
    Template,
)

KILLED = int(signal.SIGKILL)
FAILED = 1 << 8


def test_a_workers_id_is_forked_once_and_its_end_told() -> None:
    template = Template()
    assert template.handle(SpawnAsked((0, 1))) == [ForkWorker(0), ForkWorker(1)]
    assert template.handle(SpawnAsked((1, 2))) == [ForkWorker(2)]
    assert template.handle(ChildEnded(1, KILLED, 5.0)) == [TellEnd(1, KILLED, 5.0)]
    assert template.handle(SpawnAsked((1,))) == [], "also after its end"


def test_a_joiner_is_forked_like_any_worker_and_ends_with_the_template() -> None:
    template = Template(num_loaders=1)
    template.handle(SpawnAsked((0,)))
    assert template.handle(SpawnAsked((4,), joins=True)) == [ForkWorker(4, joins=True), ForkLoader(Loader(4, 0))]
    assert template.handle(SpawnAsked((4,), joins=True)) == []
    assert template.handle(EndAsked()) == [*map(KillChild, (0, 4)), *map(KillChild, (Loader(0, 0), Loader(4, 0)))]


def test_only_workers_that_live_are_killed() -> None:
    template = Template()
    template.handle(SpawnAsked((0, 1)))
    template.handle(ChildEnded(0, 0, 5.0))
    assert template.handle(KillAsked((0, 1, 7))) == [KillChild(1)]


def test_coordinators_are_forked_one_after_the_other_and_their_ends_told() -> None:
    template = Template()
    assert template.handle(CoordinatorAsked()) == [ForkCoordinator()]
    assert template.handle(KillAsked((COORDINATOR,))) == [KillChild(COORDINATOR)]
    assert template.handle(ChildEnded(COORDINATOR, KILLED, 5.0)) == [TellEnd(COORDINATOR, KILLED, 5.0)]
    assert template.handle(KillAsked((COORDINATOR,))) == [], "it has ended"
    assert template.handle(CoordinatorAsked()) == [ForkCoordinator()]
    template.handle(SpawnAsked((0,)))
    assert template.handle(EndAsked()) == [KillChild(COORDINATOR), KillChild(0)]
    assert template.handle(CoordinatorAsked()) == []
    assert template.handle(ChildEnded(0, KILLED, 6.0)) == [TellEnd(0, KILLED, 6.0)]
    assert template.handle(ChildEnded(COORDINATOR, KILLED, 6.0))[1:] == [EndTemplate()]


def test_a_commit_is_answered_and_its_repetition_again() -> None:
    template = Template()
    asked = CommitAsked(3, b"what")
    assert template.handle(asked) == [ForkCommitter(b"what")]
    assert template.handle(asked) == [], "it is in hand"
    assert template.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(3, None)]
    assert template.handle(asked) == [TellCommit(3, None)]
    assert template.handle(CommitAsked(4, b"next")) == [ForkCommitter(b"next")]


def test_a_commit_begins_only_when_the_one_before_has_ended_that_was_given_up() -> None:
    """Else the one before could still rename a folder that is not whole any more."""
    template = Template()
    template.handle(CommitAsked(3, b"what"))
    assert template.handle(CommitAsked(4, b"next")) == [KillChild(COMMITTER)]
    assert template.handle(CommitAsked(4, b"next")) == [KillChild(COMMITTER)], "said again, it is no answer"
    lost = TellCommit(3, "the process that committed it was lost", again=True)
    assert template.handle(ChildEnded(COMMITTER, KILLED, 5.0)) == [lost, ForkCommitter(b"next")]
    assert template.handle(CommitAsked(4, b"next")) == [], "it is in hand"
    assert template.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(4, None)]


def test_of_commits_that_wait_for_the_same_end_the_newest_is_made() -> None:
    template = Template()
    for number in (3, 4, 5):
        template.handle(CommitAsked(number, b"%d" % number))
    assert template.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(3, None), ForkCommitter(b"5")]
    assert template.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(5, None)]


def test_a_commit_that_waits_is_not_begun_for_a_coordinator_that_is_gone() -> None:
    """The launcher waits for the answer before it starts the next coordinator: it comes when no committer lives."""
    template = Template()
    template.handle(CommitAsked(3, b"what"))
    template.handle(CommitAsked(4, b"next"))
    assert template.handle(CommitsAbandoned()) == [KillChild(COMMITTER)]
    first, second = template.handle(ChildEnded(COMMITTER, KILLED, 5.0))
    assert (first[0], second) == (3, TellCommit(4, "it was broken off before it had begun", again=True))
    assert template.handle(CommitAsked(5, b"of the next coordinator")) == [ForkCommitter(b"of the next coordinator")]
    assert template.handle(CommitAsked(6, b"later")) == [KillChild(COMMITTER)]
    assert template.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(5, None), ForkCommitter(b"later")]
    assert template.handle(EndAsked()) == []
    assert template.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(6, None), EndTemplate()]


def test_a_commit_that_waits_is_not_begun_at_the_end() -> None:
    template = Template()
    template.handle(CommitAsked(3, b"what"))
    template.handle(CommitAsked(4, b"next"))
    assert template.handle(EndAsked()) == []
    assert template.handle(ChildEnded(COMMITTER, 0, 5.0)) == [TellCommit(3, None), EndTemplate()]


def test_a_process_that_the_system_refuses_is_not_waited_for_at_the_end() -> None:
    template = Template()
    template.handle(SpawnAsked((0, 1)))
    assert template.handle(ForkRefused(1)) == [], "it has not ended: there was none"
    assert template.handle(KillAsked((0, 1))) == [KillChild(0)]
    assert template.handle(EndAsked()) == [KillChild(0)]
    assert template.handle(ChildEnded(0, KILLED, 5.0)) == [TellEnd(0, KILLED, 5.0), EndTemplate()]
    template = Template()
    template.handle(SpawnAsked((0,)))
    assert template.handle(EndAsked()) == [KillChild(0)]
    assert template.handle(ForkRefused(0)) == [EndTemplate()]


def test_why_there_is_no_checkpoint_and_whether_another_try_may_help() -> None:
    template = Template()
    template.handle(CommitAsked(3, b"what"))
    assert template.handle(ChildEnded(COMMITTER, FAILED, 5.0, "disk full")) == [TellCommit(3, "disk full")]
    template.handle(CommitAsked(4, b"what"))
    (told,) = template.handle(ChildEnded(COMMITTER, KILLED, 5.0))
    assert told == TellCommit(4, "the process that committed it was lost", again=True)


def test_a_commit_whose_coordinator_is_gone_is_broken_off() -> None:
    template = Template()
    assert template.handle(CommitsAbandoned()) == []
    template.handle(CommitAsked(3, b"what"))
    assert template.handle(CommitsAbandoned()) == [KillChild(COMMITTER)]
    assert template.handle(ChildEnded(COMMITTER, KILLED, 5.0))[0][:1] == (3,)


def test_the_end_kills_workers_and_waits_for_all_also_for_a_commit() -> None:
    template = Template()
    assert Template().handle(EndAsked()) == [EndTemplate()]
    template.handle(SpawnAsked((0, 1)))
    template.handle(CommitAsked(3, b"what"))
    assert template.handle(EndAsked()) == [KillChild(0), KillChild(1)]
    assert template.handle(SpawnAsked((2,))) == template.handle(CommitAsked(4, b"")) == []
    assert template.handle(ChildEnded(0, KILLED, 5.0)) == [TellEnd(0, KILLED, 5.0)]
    assert template.handle(ChildEnded(1, KILLED, 5.0)) == [TellEnd(1, KILLED, 5.0)]
    assert template.handle(ChildEnded(COMMITTER, 0, 6.0)) == [TellCommit(3, None), EndTemplate()]


def test_loaders_are_forked_with_their_worker_and_end_with_it() -> None:
    template = Template(num_loaders=2)
    mine, others = [Loader(0, 0), Loader(0, 1)], [Loader(1, 0), Loader(1, 1)]
    assert template.handle(SpawnAsked((0, 1))) == [
        ForkWorker(0), *map(ForkLoader, mine), ForkWorker(1), *map(ForkLoader, others)
    ]  # fmt: skip
    assert template.handle(ChildEnded(0, KILLED, 5.0)) == [TellEnd(0, KILLED, 5.0), *map(KillChild, mine)]
    assert [template.handle(ChildEnded(loader, KILLED, 5.0)) for loader in mine] == [
        [TellLoaderEnd(loader)] for loader in mine
    ]
    assert template.handle(EndAsked()) == [KillChild(1), *map(KillChild, others)]
    assert template.handle(ChildEnded(1, KILLED, 6.0)) == [TellEnd(1, KILLED, 6.0), *map(KillChild, others)]
    assert template.handle(ChildEnded(others[0], KILLED, 6.0)) == [TellLoaderEnd(others[0])]
    assert template.handle(ChildEnded(others[1], KILLED, 6.0)) == [TellLoaderEnd(others[1]), EndTemplate()]


def test_a_loader_is_replaced_when_its_worker_asks() -> None:
    template, loader = Template(num_loaders=1), Loader(0, 0)
    template.handle(SpawnAsked((0,)))
    assert template.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader)], "nobody asks yet"
    assert template.handle(LoaderAsked(loader)) == [ForkLoader(loader)]
    assert template.handle(LoaderAsked(loader)) == [KillChild(loader)], "it hangs"
    assert template.handle(LoaderAsked(loader)) == [KillChild(loader)]
    assert template.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader), ForkLoader(loader)]
    assert template.handle(LoaderAsked(Loader(0, 1))) == template.handle(LoaderAsked(Loader(3, 0))) == []


def test_a_loader_is_not_replaced_when_its_worker_or_the_job_has_ended() -> None:
    template, loader = Template(num_loaders=1), Loader(0, 0)
    template.handle(SpawnAsked((0, 1)))
    template.handle(LoaderAsked(loader))
    template.handle(ChildEnded(0, KILLED, 5.0))
    assert template.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader)]
    assert template.handle(LoaderAsked(loader)) == []
    loader = Loader(1, 0)
    template.handle(LoaderAsked(loader))
    template.handle(EndAsked())
    assert template.handle(ChildEnded(loader, KILLED, 5.0)) == [TellLoaderEnd(loader)]


def test_a_loader_that_cannot_be_forked_is_not_waited_for() -> None:
    template = Template(num_loaders=1)
    template.handle(SpawnAsked((0,)))
    assert template.handle(ForkRefused(Loader(0, 0))) == []
    assert template.handle(EndAsked()) == [KillChild(0)]
    assert template.handle(ChildEnded(0, KILLED, 5.0))[-1] == EndTemplate()
