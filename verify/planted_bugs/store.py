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
    Transaction,
    TransactionResult,
    Written,
)
from elaswave.protocol.events import Persist
from elaswave.protocol.leadership.election import CoordinatorCandidate
from elaswave.protocol.leadership.store_position import StorePosition
from elaswave.protocol.membership.agent import Standby
from elaswave.protocol.membership.effects import AnyRecord, Effect
from verify.planted_bugs.mutant import Mutant
from verify.simulator.candidates import Candidates, SimCandidate, WriteLease
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


class _Blind(CoordinatorCandidate):
    claim_class = _ClaimsBlindly


class ElectsWithoutComparison(SimCandidate):
    """A claim does not compare the term with what was read."""

    candidate_class = _Blind


class _GivesUp(Standby):
    def ended(self, at_s: float, *, was_replaced: bool, was_displaced: bool = False) -> bool:
        is_later = super().ended(at_s, was_replaced=was_replaced, was_displaced=was_displaced)
        self.stand_by_at_s = None if was_replaced else self.stand_by_at_s
        return is_later


class ReplacedOnceGivesUp(SimCandidate):
    """An agent whose coordinator was replaced starts no candidate any more."""

    standby_class = _GivesUp


class _WritesWithoutTerm(EntryWrite):
    def transaction(self) -> Transaction:
        asked = super().transaction()
        return asked._replace(unwritten_since=asked.unwritten_since[1:], values=())


class AppendsWithoutTerm(WriteLease):
    """An entry does not compare the term."""

    entry_class = _WritesWithoutTerm


class RetriesWithAnotherNonce(WriteLease):
    """A write without an answer is repeated in other words."""

    def not_answered(self, coordinator: SimCoordinator, entry: EntryWrite, record: AnyRecord) -> None:
        self.write(coordinator, record)


class _KnownByRevision(Holder):
    __slots__ = ()

    def still_writes(self) -> Transaction:
        return super().still_writes()._replace(values=())

    def has_lost_lease(self, standing: KeyValue | None) -> bool:
        return standing is None or standing.revision != self.revision


class KnowsTheTermByItsRevision(WriteLease):
    """A coordinator compares at which revision the term was written, and not by whom: a store that was put back comes
    to a revision twice."""

    def __init__(self, candidates: Candidates, candidate: SimCandidate, term: Holder, entries: list[bytes]) -> None:
        super().__init__(candidates, candidate, _KnownByRevision(*term), entries)


class _TakesRefusalForTaken(EntryWrite):
    def judge(self, outcome: TransactionResult) -> Written:
        written = super().judge(outcome)
        return Written.YES if written is Written.LEASE_LOST else written


class GoesOnWithoutTheLease(WriteLease):
    """A coordinator that the store refuses goes on."""

    entry_class = _TakesRefusalForTaken


class ReadsFromALaggingMember(SimCandidate):
    """What was decided is read without asking the leader: a member lacks the newest entry."""

    def entries(self) -> list[bytes]:
        return super().entries()[:-1]


class _StandsAlone(EntryWrite):
    def transaction(self) -> Transaction:
        return super().transaction()._replace(exist=())


class AppendsWithoutTheOneBefore(WriteLease):
    """An entry is taken although the one before it, which was durable, is not there."""

    entry_class = _StandsAlone


class IgnoresStorePositions(SimCoordinator):
    """What members have heard of the history is not compared with what was read."""

    def fits(self, received: StorePosition) -> bool:
        return True


class TellsAnEmptyHistory(WriteLease):
    """A coordinator does not tell how far the history has come."""

    @property
    def store_position(self) -> StorePosition:
        return msgspec.structs.replace(super().store_position, length=0)


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
        "widths=1,1 seed=531969375 candidates=2 store_delay=8 kill:h@31",
    ),
    Mutant(
        "replaced-gives-up",
        "an agent whose coordinator was replaced is no candidate any more",
        Build(candidate=ReplacedOnceGivesUp),
        "candidates=2 kill:1@20 shut:c@20+90 kill:h@30",
    ),
    Mutant(
        "append-without-term",
        "a coordinator that was replaced still writes",
        Build(write_lease=AppendsWithoutTerm),
        "widths=1,3 num_microbatches=3 heartbeat_bound=25 restart_delay=30 candidates=2 isolate:2@15+40 late:s@20+60 "
        "kill:c@40",
    ),
    Mutant(
        "term-by-revision",
        "a coordinator takes another one's term of the same revision for its own, in a store that was put back",
        Build(write_lease=KnowsTheTermByItsRevision),
        "widths=1,3 layers_per_stage=2 num_microbatches=3 seed=977925843 restart_delay=30 slow_worker=2 "
        "slow_by=5 candidates=2 kill:c@77 back:s@118+20",
    ),
    Mutant(
        "retry-without-nonce",
        "a write without an answer is repeated as another one",
        Build(write_lease=RetriesWithAnotherNonce),
        "widths=1,1 steps=9 leave_step=4 candidates=2 mute:s@43+30",
    ),
    Mutant(
        "lease-lost-goes-on",
        "a coordinator that the store refuses goes on",
        Build(write_lease=GoesOnWithoutTheLease),
        "widths=1,2 seed=961616758 restart_delay=1 slow_worker=0 slow_by=15 plan_delay=15 candidates=2 "
        "kill:c@18 kill:0@32 usurp:c@46+50",
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
        Build(write_lease=AppendsWithoutTheOneBefore),
        "candidates=2 kill:1@20 back:s@18+10",
    ),
    Mutant(
        "store-positions-ignored",
        "what members have heard of the history is not compared with an older copy of the store",
        Build(coordinator=IgnoresStorePositions),
        "candidates=2 kill:c@20 back:s@18+10",
    ),
    Mutant(
        "store-position-not-sent",
        "a coordinator does not tell how far the history has come",
        Build(write_lease=TellsAnEmptyHistory),
        "candidates=2 kill:c@20 back:s@18+10",
    ),
)
