"""Bugs planted in how bits are found that flip in a worker's memory (K1 to K4); see `verify.planted_bugs.mutants`."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from typing import Any

from elaswave.protocol.coordinator.machine import Coordinator
from elaswave.protocol.coordinator.report_collection import ReportCollection
from elaswave.protocol.messages import Report
from elaswave.protocol.step.ballot import Ballot, Verdict
from elaswave.protocol.step.engine import Change, Pause
from elaswave.protocol.step.execution import Life
from elaswave.protocol.step.loop import StepLoop
from elaswave.protocol.step.replayed_state import ReplayedState
from elaswave.protocol.step.soundness import CopyChecks, Soundness
from verify.planted_bugs.mutant import Mutant, with_part
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.engine import ToyCopy
from verify.simulator.run import Build

_Steps = StepLoop[ToyCopy]
_Checks = CopyChecks[ToyCopy]


class VotesUnsound(_Steps):
    """Votes as if nothing had changed in its memory (K1)."""

    def ballot(self) -> Ballot:
        return super().ballot()._replace(num_changed=0)


class ClaimsWrongCopies(_Checks):
    """Reports copies as valid that it knows to be wrong (K2)."""

    def _note_wrong(self, found: Soundness) -> None:
        super()._note_wrong(found)
        self.wrong = frozenset()


class ClaimsWrongParameters(_Checks):
    """Does not say that parameters are to be sent again (K2)."""

    def _note_wrong(self, found: Soundness) -> None:
        before = self.ledger.parameters_step
        super()._note_wrong(found)
        self.ledger.parameters_step, self.proven = before, None


class UnsoundOnce(ReplayedState):
    """What a worker says of wrong copies is not said to the next coordinator (K3)."""

    def unsound(self, message: Any) -> None:
        pass


class TellsUnseen(_Checks):
    """Writes checkpoints, and ends, without a look at its memory (K4)."""

    def is_sound(self) -> bool:
        return True


class TellsUncompared(_Checks):
    """Writes checkpoints, and ends, without a look at the copies of others (K4)."""

    def compare_at_rest(self, step: int) -> Life[str]:
        yield Pause.MOMENT
        return ""


class CountsTwice(_Steps):
    """Has copies sent again that a refused vote has made count: the gradients of the next attempt go to those (K7)."""

    def vote(self) -> Life[Verdict]:
        before = self.blocks.placement
        verdict = yield from super().vote()
        if not verdict.commits:
            self.blocks.placement = before
        return verdict


class ForgetsConstants(_Steps):
    """Goes on with constants that have changed (K1)."""

    def ballot(self) -> Ballot:
        ballot = super().ballot()
        changes = self.checks.changes
        constants: list[Change] = [change for change in changes if change.memory.name in ("CONSTANT", "MENDED")]
        return ballot._replace(num_changed=len(changes) - len(constants))


class _Believes(ReportCollection):
    def add(self, report: Report) -> bool:
        found = super().add(report)
        self._reports[report.worker] = report
        return found


class _BelievesMissed(Coordinator):
    collection_class = _Believes


class BelievesMissed(SimCoordinator):
    """Counts on copies of a member that has missed the decision which had left them out (K2)."""

    core_class = _BelievesMissed


class _Forgets(ReportCollection):
    def new_generation(self) -> None:
        super().new_generation()
        self._wrong = frozenset()


class _ForgetsReports(Coordinator):
    collection_class = _Forgets


class ForgetsReports(SimCoordinator):
    """Forgets with a lost member's report which copies that has called wrong (K2)."""

    core_class = _ForgetsReports


SOUNDNESS_MUTANTS = (
    Mutant(
        "vote-unsound",
        "a worker votes though its memory has changed since it was written",
        Build(machine=with_part(VotesUnsound)),
        "flip:0@20+2",
    ),
    Mutant(
        "claim-wrong-copy",
        "a copy that is known to be wrong is reported as held",
        Build(machine=with_part(ClaimsWrongCopies)),
        "flip:2@29+3",
    ),
    Mutant(
        "claim-wrong-parameters",
        "parameters that are known to be wrong are not sent again",
        Build(machine=with_part(ClaimsWrongParameters)),
        "flip:1@40+1",
    ),
    Mutant(
        "believe-missed",
        "a copy that a decision has left out is believed of a member that has missed the decision",
        Build(coordinator=BelievesMissed),
        "widths=3 num_microbatches=3 num_followers=2 checkpoint_every=1 seed=690071726 slip:2@55+2 "
        "suspect:0@84 kill:c@97 kill:1@116",
        real=True,
    ),
    Mutant(
        "forget-reports",
        "which copies are wrong is forgotten with the report of the member that has said so",
        Build(coordinator=ForgetsReports),
        "widths=3 num_microbatches=3 num_followers=2 seed=361042596 slip:2@4+1 suspect:0@39 kill:1@72",
        real=True,
    ),
    Mutant(
        "unsound-once",
        "that copies are wrong is not said to the next coordinator",
        Build(replayed_state=UnsoundOnce),
        "flip:1@20+1 kill:c@23",
    ),
    Mutant(
        "end-unseen",
        "a worker ends without a look at what has changed in its memory since its last vote",
        Build(machine=with_part(TellsUnseen)),
        "flip:2@74+3",
    ),
    Mutant(
        "end-uncompared",
        "what an update has written wrongly is told before it is compared with the other copies",
        Build(machine=with_part(TellsUncompared)),
        "slip:0@60+1",
    ),
    Mutant(
        "count-twice",
        "a copy that a refused vote has made count is sent again, and keeps the gradient of before",
        Build(machine=with_part(CountsTwice)),
        "widths=3,2 num_microbatches=3 num_hosts=2 seed=131741710 kill:2@8 flip:3@21 suspect:1@88",
        real=True,
    ),
    Mutant(
        "constants-unseen",
        "what no step writes is not looked at in the vote",
        Build(machine=with_part(ForgetsConstants)),
        "flip:0@20+2",
    ),
)
