"""Members that a person wants to join or to leave: asked for once, followed until it has happened or never will."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial

from elaswave.coordinator.commands.job_status import JobParts
from elaswave.coordinator.commands.reply import Reply, refusal
from elaswave.protocol.membership.driver import MembersDriver


class MemberCommands:
    """The joins and leaves of one job that were asked for.

    Args:
        job: what is known of it.
        driver: does it.
    """

    def __init__(self, job: JobParts, driver: MembersDriver) -> None:
        self._job = job
        self._driver = driver
        self._refused: dict[int, str] = {}
        """Joiners that were not let in, or have ended before they were members, and why."""
        self._lost: set[int] = set()
        """Members that the others had to go on without, and that were not asked to leave since."""

    @property
    def under_way(self) -> list[str]:
        """Who is on the way in or out, in words."""
        core, joining = self._job.core, self._driver.membership.joining
        leaving = sorted(core.admissions.leaving.intersection(core.members))
        found = [f"{_named(joining)} to join"] if joining else []
        return [*found, *([f"{_named(leaving)} to leave"] if leaving else [])]

    def join(self, count: int, request: int) -> Reply:
        """Takes in new workers.

        Args:
            count: how many.
            request: its number.
        """
        started = self._driver.request_join(count, request)
        if isinstance(started, str):
            return refusal(started)
        workers = tuple(started)
        reason = "the process starts, links are made and state is copied while training goes on"
        return Reply("joining", f"{_named(workers)}: {reason}", workers=workers, follow=partial(self._joined, workers))

    def _joined(self, workers: Sequence[int]) -> Reply | None:
        members = self._job.core.members
        for worker in set(workers).difference(members):
            if not self._driver.membership.is_joiner(worker):
                gone = "was lost" if worker in self._lost else "is none any more"
                return Reply("failed", f"worker {worker} had become a member, and {gone} before all had joined")
            if worker in self._refused:
                return Reply("failed", f"worker {worker} is not admitted: {self._refused[worker]}")
        if not set(workers) <= set(members):
            return None
        verb = "is a member" if len(workers) == 1 else "are members"
        return Reply("joined", f"{_named(workers)} {verb} since generation {self._job.core.generation} at the latest")

    def drain(self, worker: int, deadline_s: float | None, *, begun: bool = False) -> Reply:
        """Lets a worker go.

        Args:
            worker: its id.
            deadline_s: after which it is lost; None: as configured.
            begun: whether an earlier coordinator was asked for it.
        """
        core, elastic = self._job.core, self._job.config.elastic
        if begun and (gone := self._drained(worker)) is not None:
            return gone
        if worker not in core.members:
            return refusal(f"worker {worker} is no member; the members are {', '.join(map(str, core.members))}")
        going = core.admissions.leaving.intersection(core.members) - {worker}
        if len(core.members) - len(going) <= max(1, elastic.min_workers):
            others = f", of which {len(going)} are to leave already," if going else ""
            return refusal(
                f"the job has {len(core.members)} members{others} and needs {max(1, elastic.min_workers)}: `elaswave "
                "ctl RUN stop` ends it with a checkpoint"
            )
        self._lost.discard(worker)
        self._driver.request_drain(worker, deadline_s)
        within_s = elastic.drain_deadline_s if deadline_s is None else deadline_s
        reason = f"worker {worker} leaves when others hold what it holds, and is lost after {within_s:g} s otherwise"
        return Reply("draining", reason, workers=(worker,), follow=lambda: self._drained(worker))

    def _drained(self, worker: int) -> Reply | None:
        core = self._job.core
        if worker in core.members:
            return None
        if worker in self._lost:
            return Reply(
                "failed", f"worker {worker} was lost before it could leave; generation {core.generation} goes on"
            )
        return Reply("drained", f"worker {worker} is no member of generation {core.generation}; no step was done twice")

    # --------------------------------------------------------------------------------------------------- what happens

    def refused(self, worker: int, problem: str) -> None:
        """A joiner is not let in, or has ended before it was a member; what is said first is why."""
        self._refused.setdefault(worker, problem)

    def lost(self, workers: Iterable[int]) -> None:
        """The members go on without these, which have not left by themselves."""
        self._lost.update(workers)


def _named(workers: Collection[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
