"""The judge of failure domains in a simulated run: a host can be lost, and nothing with it."""

# ruff: noqa: D102 (the methods are described in `Observer`)

from collections.abc import Collection, Sequence

from elaswave.blocks.placement import Placement
from elaswave.protocol.messages import Decision
from elaswave.types import Layout
from verify.simulator.agents import WATCH
from verify.simulator.checkers import Violation
from verify.simulator.job import Job, model_of
from verify.simulator.observer import Observer


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
        # While a copy is missing at least `blocks_per_round` are made in a step, or all that are left.
        self._num_rounds = 1 - (-len(model.blocks) * (1 + job.num_followers) // job.blocks_per_round)
        self._due: dict[int, tuple[Layout, int]] = {1: (model.layout, 1)}
        """Epoch -> the layout in force, and the step from which on all blocks are on two hosts again."""
        self._has_flipped = False

    def flipped(self, worker: int, block: int) -> None:
        self._has_flipped = True  # that copy is gone as well

    slipped = flipped

    def began(self, worker: int, epoch: int, step: int, attempt: int, placement: Placement) -> None:
        if not self._is_on or epoch not in self._due:
            return
        layout, due = self._due[epoch]
        if step < due or len(self._hosts(layout.active)) == 1:
            return
        for block in range(len(placement.owner)):
            holders = placement.holders(block)
            if len(self._hosts(holders)) == 1:
                raise Violation(
                    f"in step {step} of epoch {epoch} all copies of block {block} are on host "
                    f"{self._hosts(holders).pop()}, of workers {holders}"
                )

    def switched(self, worker: int, epoch: int, step: int, layout: Layout, placement: Placement) -> None:
        self._due[epoch] = layout, step + 1

    def decided(self, decision: Decision) -> None:
        if decision.rollback is not None and decision.lost:
            self._check_first_loss(decision.lost, decision.reason)
        self._due[decision.epoch] = decision.layout, decision.resume_step + self._num_rounds

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
