"""Planted bugs of those who share a store: rules H4 to H6, and H9."""

# ruff: noqa: D102 (what each class does wrong is its own docstring)

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from elaswave.protocol.coordinator.store_writes import (
    Claim,
    EntryWrite,
    Holder,
    KeyValue,
    Outcome,
    Transaction,
    Written,
)
from elaswave.protocol.events import Persist
from elaswave.protocol.leadership.heads import Head
from elaswave.protocol.membership.effects import AnyRecord, Effect
from verify.planted_bugs.mutant import Mutant
from verify.simulator.candidates import Crew, Seat, SimCandidate
from verify.simulator.coordinator import SimCoordinator
from verify.simulator.run import Build


class SendsBeforeTheAnswer(SimCoordinator):
    """What follows a record is done while the store is still asked to take it."""

    def carry_out(self, effects: Sequence[Effect]) -> None:
        first = [effect for effect in effects if not isinstance(effect, Persist)]
        super().carry_out([*first, *(effect for effect in effects if isinstance(effect, Persist))])


class _ClaimsBlindly(Claim):
    def transaction(self) -> Transaction:
        return super().transaction()._replace(unwritten_since=(), values=())


class ElectsWithoutComparison(SimCandidate):
    """A claim does not compare the term with what was read."""

    claim_class = _ClaimsBlindly


class _WritesWithoutTerm(EntryWrite):
    def transaction(self) -> Transaction:
        asked = super().transaction()
        return asked._replace(unwritten_since=asked.unwritten_since[1:], values=())


class AppendsWithoutTerm(Seat):
    """An entry does not compare the term."""

    entry_class = _WritesWithoutTerm


class RetriesWithAnotherNonce(Seat):
    """A write without an answer is repeated in other words."""

    def not_answered(self, coordinator: SimCoordinator, entry: EntryWrite, record: AnyRecord) -> None:
        self.write(coordinator, record)


class _KnownByRevision(Holder):
    __slots__ = ()

    def still_writes(self) -> Transaction:
        return super().still_writes()._replace(values=())

    def is_fenced(self, standing: KeyValue | None) -> bool:
        return standing is None or standing.revision != self.revision


class KnowsTheTermByItsRevision(Seat):
    """A coordinator compares at which revision the term was written, and not by whom: a store that was put back comes
    to a revision twice."""

    def __init__(self, crew: Crew, candidate: SimCandidate, term: Holder, entries: list[bytes]) -> None:
        super().__init__(crew, candidate, _KnownByRevision(*term), entries)


class _TakesRefusalForTaken(EntryWrite):
    def judge(self, outcome: Outcome) -> Written:
        written = super().judge(outcome)
        return Written.YES if written is Written.FENCED else written


class GoesOnWhenFenced(Seat):
    """A coordinator that the store refuses goes on."""

    entry_class = _TakesRefusalForTaken


class ReadsFromALaggingMember(SimCandidate):
    """What was decided is read without asking the leader: a member lacks the newest entry."""

    def entries(self) -> list[bytes]:
        return super().entries()[:-1]


class _StandsAlone(EntryWrite):
    def transaction(self) -> Transaction:
        return super().transaction()._replace(exist=())


class AppendsWithoutTheOneBefore(Seat):
    """An entry is taken although the one before it, which was durable, is not there."""

    entry_class = _StandsAlone


class HearsNoHeads(SimCoordinator):
    """What members have heard of the history is not compared with what was read."""

    def fits(self, heard: Head) -> bool:
        return True


class TellsAnEmptyHistory(Seat):
    """A coordinator does not tell how far the history has come."""

    @property
    def head(self) -> Head:
        return msgspec.structs.replace(super().head, length=0)


STORE_MUTANTS = (
    Mutant(
        "send-before-store",
        "messages are sent while the store is still asked to take what they say",
        Build(coordinator=SendsBeforeTheAnswer),
        "candidates=2 kill:1@20",
    ),
    Mutant(
        "elect-blindly",
        "a candidate's claim does not compare with what it has read",
        Build(candidate=ElectsWithoutComparison),
        "widths=1,1 seed=71420045 candidates=2 store_delay=8",
    ),
    Mutant(
        "append-without-term",
        "a coordinator that was replaced still writes",
        Build(seat=AppendsWithoutTerm),
        "widths=1,3 num_microbatches=3 heartbeat_bound=25 restart_delay=30 candidates=2 isolate:2@15+40 late:s@20+60 "
        "kill:c@40",
    ),
    Mutant(
        "term-by-revision",
        "a coordinator takes another one's term of the same revision for its own, in a store that was put back",
        Build(seat=KnowsTheTermByItsRevision),
        "widths=1,3 layers_per_stage=2 num_microbatches=3 seed=741717208 restart_delay=30 slow_worker=2 slow_by=5 "
        "candidates=2 kill:c@68 back:s@118+5",
    ),
    Mutant(
        "retry-without-nonce",
        "a write without an answer is repeated as another one",
        Build(seat=RetriesWithAnotherNonce),
        "widths=1,1 steps=9 leave_step=4 candidates=2 mute:s@43+30",
    ),
    Mutant(
        "fenced-goes-on",
        "a coordinator that the store refuses goes on",
        Build(seat=GoesOnWhenFenced),
        "widths=1,2 seed=952333941 restart_delay=1 slow_worker=0 slow_by=15 plan_delay=15 candidates=2 kill:c@16 "
        "kill:0@25 usurp:c@47+50",
    ),
    Mutant(
        "serializable-read",
        "a candidate reads what was decided from a member that lags behind",
        Build(candidate=ReadsFromALaggingMember),
        "candidates=2 kill:c@20",
    ),
    Mutant(
        "entry-alone",
        "an entry is written although the one before it, which was durable, is not there",
        Build(seat=AppendsWithoutTheOneBefore),
        "candidates=2 kill:1@20 back:s@18+10",
    ),
    Mutant(
        "heads-unheard",
        "what members have heard of the history is not compared with an older copy of the store",
        Build(coordinator=HearsNoHeads),
        "candidates=2 kill:c@20 back:s@18+10",
    ),
    Mutant(
        "head-untold",
        "a coordinator does not tell how far the history has come",
        Build(seat=TellsAnEmptyHistory),
        "candidates=2 kill:c@20 back:s@18+10",
    ),
)
