"""The judge of failure domains in a simulated run: a host can be lost, and nothing with it."""

# ruff: noqa: D102 (the methods are described in `Observer`)

from collections.abc import Collection, Sequence

from elaswave.blocks.placement import Placement
from elaswave.protocol.membership.effects import AnyRecord, LeaveAsked, MembershipRecord, PlaceTaken
from elaswave.protocol.messages import Decision
from elaswave.types import WHOLE_STAGE, Layout
from verify.simulator.agents import WATCH
from verify.simulator.checkers import Violation
from verify.simulator.job import Job, model_of
from verify.simulator.observer import Observer
from verify.simulator.schedule import Schedule


class OneProcess(Observer):
    """Each id is given to one incarnation of an agent, which starts one process for it; nobody else does (H2)."""

    def __init__(self) -> None:
        self._given: dict[int, int] = {}
        self._forked: set[int] = set()

    def given(self, worker: int, incarnation: int) -> None:
        if self._given.setdefault(worker, incarnation) != incarnation:
            raise Violation(f"the id {worker} is given to agent {incarnation}, and was to {self._given[worker]}")

    def forked(self, worker: int, incarnation: int) -> None:
        if self._given.get(worker) != incarnation:
            raise Violation(f"worker {worker} is started by agent {incarnation}, not by {self._given.get(worker)}")
        if worker in self._forked:
            raise Violation(f"worker {worker} is started twice")
        self._forked.add(worker)


class OneInEachPlace(Observer):
    """A place is taken again once the others go on without its worker, or its process has ended, and not if that was
    asked to leave, nor while the job is about to end. Who is a member is not waited for as a joiner, nor killed as one.

    Args:
        num_workers: that the job begins with.
        num_wanted: that are asked for later.
    """

    def __init__(self, num_workers: int, num_wanted: int) -> None:
        self._num_wanted = num_wanted
        self._worker_in = {worker: worker for worker in range(num_workers)}
        """Place -> its newest worker."""
        self._place_of = dict(self._worker_in)
        self._there = set(self._worker_in)
        """Workers whose processes were started."""
        self._free: set[int] = set()
        """Workers that have ended, or that the others go on without."""
        self._closed: set[int] = set()
        """Places of those that were asked to leave."""
        self._trains: set[int] = set()
        self._is_stopping = False
        self._is_over = False
        """Whether the store has gone back: who begins again from an older copy may start somebody twice."""

    def wrote_down(self, record: MembershipRecord) -> None:
        if self._is_over:
            return
        if isinstance(record, LeaveAsked):
            place = self._place_of[record.worker]
            if self._worker_in[place] == record.worker:
                self._closed.add(place)
        if not isinstance(record, PlaceTaken):
            return
        worker, place = record.worker, record.place
        self._num_wanted -= record.request > 0
        if self._num_wanted < 0:
            raise Violation(f"worker {worker} is one more than were asked for")
        before = self._worker_in.get(place)
        if worker in self._place_of:
            raise Violation(f"the id {worker} is given to a second worker")
        if before in self._there - self._free:
            raise Violation(f"worker {worker} takes the place {place} of worker {before}, which is there")
        if place in self._closed:
            raise Violation(f"worker {worker} takes the place {place} of worker {before}, which was asked to leave")
        if self._is_stopping:
            raise Violation(f"worker {worker} is to join a job that is about to end")
        self._worker_in[place] = worker
        self._place_of[worker] = place

    def forked(self, worker: int, incarnation: int) -> None:
        self._there.add(worker)
        newest = self._worker_in.get(self._place_of.get(worker, -1))
        if newest != worker and not self._is_over:
            raise Violation(f"worker {worker} is started, and worker {newest} has its place")

    def held_for_lost(self, worker: int, detected_by: str) -> None:
        self._free.add(worker)

    def gone(self, worker: int) -> None:
        self._free.add(worker)

    def began(self, worker: int, generation: int, step: int, attempt: int, placement: Placement) -> None:
        self._trains.add(worker)

    def killed(self, worker: int) -> None:
        if worker in self._trains - self._free:
            raise Violation(f"worker {worker} is killed as a joiner, and is a member")

    def expects(self, joiners: Collection[int], members: Collection[int]) -> None:
        if both := sorted(set(joiners).intersection(members)):
            raise Violation(f"workers {both} are waited for as joiners, and are members")

    def stopping(self, members: Collection[int], leaving: Collection[int]) -> None:
        self._is_stopping = True

    def went_back(self, term: int, standing: Sequence[tuple[int, int, AnyRecord]], gone: Sequence[AnyRecord]) -> None:
        self._is_over = True


class HeldForACause(Observer):
    """A worker is held for lost only if there is a cause: its process has ended, it was asked to leave, or a fault has
    struck it, or a link of its; and by silence or standstill also where the coordinator was struck.

    Args:
        schedule: of the run.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._struck = {schedule.conditions.slow_worker}.union(*(fault.workers for fault in schedule.faults))
        self._any = any(not fault.workers for fault in schedule.faults)
        self._gone: set[int] = set()
        job = schedule.job
        asked = range(job.leaver, job.leaver + job.leavers) if job.leave_step else ()
        # A coordinator may have been lost that has made a request durable, and not its deadline.
        self._leaves = set(asked).union(*(fault.workers for fault in schedule.faults if fault.kind == "notice"))

    def gone(self, worker: int) -> None:
        self._gone.add(worker)

    def wrote_down(self, record: MembershipRecord) -> None:
        if isinstance(record, LeaveAsked):
            self._leaves.add(record.worker)

    def held_for_lost(self, worker: int, detected_by: str) -> None:
        if detected_by == "exit":
            has_cause = self._any or worker in self._gone
        elif detected_by == "drain":
            has_cause = worker in self._leaves
        else:
            has_cause = self._any or worker in self._struck | self._gone
        if not has_cause:
            raise Violation(f"worker {worker} is held for lost ({detected_by}), and nothing has befallen it")


class Orphans(Observer):
    """An agent ends its workers when it has had no coordinator and no commit for long enough, and not before (H12).

    Args:
        patience: how long that is.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience

    def waits(self, incarnation: int, alone: int, idle: int) -> None:
        if min(alone, idle) > self._patience + 2 * WATCH:
            raise Violation(f"agent {incarnation} goes on after {alone} without a coordinator, {idle} without a commit")

    def orphaned(self, incarnation: int, alone: int, idle: int) -> None:
        if min(alone, idle) < self._patience:
            raise Violation(f"agent {incarnation} ends after {alone} without a coordinator, {idle} without a commit")


class HostsApart(Observer):
    """Every block has copies on two hosts: from the start, again soon after a loss, and when a planned change is in
    force; and the first loss, if it is of workers of one host, is survived without a checkpoint.

    Where a worker runs is taken from the job, not from the labels in a layout.

    Args:
        job: that is trained.
    """

    def __init__(self, job: Job) -> None:
        model = model_of(job)
        self._job = job
        self._host_of = {**model.layout.domain_of}
        self._founders = model.layout.workers
        self._is_on = bool(job.num_hosts and job.num_followers)
        num_copies = 1 + (job.num_ever if job.num_followers == WHOLE_STAGE else job.num_followers)
        # While a copy is missing at least `blocks_per_round` are made in a step, or all that are left.
        self._num_rounds = 1 - (-len(model.blocks) * num_copies // job.blocks_per_round)
        self._due: dict[int, tuple[Layout, int]] = {1: (model.layout, 1)}
        """Generation -> the layout in force, and the step from which on all blocks are on two hosts again."""
        self._has_flipped = False

    def flipped(self, worker: int, block: int) -> None:
        self._has_flipped = True  # that copy is gone as well

    slipped = flipped

    def began(self, worker: int, generation: int, step: int, attempt: int, placement: Placement) -> None:
        if not self._is_on or generation not in self._due:
            return
        layout, due = self._due[generation]
        if step < due or len(self._hosts(layout.active)) == 1:
            return
        for block in range(len(placement.owner)):
            holders = placement.holders(block)
            if len(self._hosts(holders)) == 1:
                raise Violation(
                    f"in step {step} of generation {generation} all copies of block {block} are on host "
                    f"{self._hosts(holders).pop()}, of workers {holders}"
                )

    def switched(self, worker: int, generation: int, step: int, layout: Layout, placement: Placement) -> None:
        self._due[generation] = layout, step + 1

    def decided(self, decision: Decision) -> None:
        if decision.rollback is not None and decision.lost:
            self._check_first_loss(decision.lost, decision.reason)
        self._due[decision.generation] = decision.layout, decision.resume_step + self._num_rounds

    def ended(self, reason: str, members: Sequence[int], lost: Sequence[int], orphans: Sequence[int]) -> None:
        if orphans:
            self._check_first_loss([worker for worker in self._founders if worker not in members], reason)

    def _check_first_loss(self, gone: Collection[int], reason: str) -> None:
        is_first = len(self._due) == 1
        active = self._due[max(self._due)][0].active  # who leaves on request may already compute nothing
        if (
            self._is_on
            and is_first
            and not self._has_flipped
            and len(self._hosts(gone)) == 1 < len(self._hosts(active))
        ):
            raise Violation(f"only workers {list(gone)} of one host were lost, and their state with them: {reason}")

    def _hosts(self, workers: Collection[int]) -> set[str]:
        return {self._host_of.get(worker) or self._job.host_of_joiner(worker) for worker in workers}
