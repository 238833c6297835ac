"""Judges of a simulated run. They see what happens through a few calls and know nothing of how it is done.

Safety: the same bits; every micro-batch exactly once per committed step, no step skipped or applied twice; one owner
per block and generation; nothing of an older generation or attempt is used; survivors agree on what is committed, and a
coordinator goes on from what it has heard; no state is lost while a member holds it; what is published twice is equal.
Liveness: a run ends with all steps made, or with a reason that names what was lost.
"""

# ruff: noqa: D102 (the methods are described in `Observer`)

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from elaswave.blocks.placement import Placement
from elaswave.protocol.messages import Decision, Evidence
from elaswave.types import WHOLE_STAGE, Layout
from verify.simulator.job import BlockState, Exponents, Truth, parameter
from verify.simulator.observer import Observer


class Violation(Exception):
    """Something happened that must never happen."""


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


class SameBits(Observer):
    """State, parameters, losses and grids are the fault-free run's.

    Args:
        truth: the fault-free run.
        flips: whether bits flip: then a worker may compute with a wrong parameter, but no such attempt may commit.
    """

    def __init__(self, truth: Truth, flips: bool = False) -> None:
        self._truth = truth
        self._flips = flips
        self._wrong: dict[int, str] = {}
        """Worker -> what was wrong when its newest attempt began."""
        self._slipped: set[tuple[int, int]] = set()
        """(worker, block) of copies that were updated wrongly: that is found before anything is told of them."""

    def slipped(self, worker: int, block: int) -> None:
        self._slipped.add((worker, block))

    def used_parameter(self, worker: int, step: int, block: int, value: int) -> None:
        right = parameter(self._truth.states[step - 1][block])
        if value != right:
            text = f"worker {worker} computes step {step} with a parameter of block {block} of another step"
            _require(self._flips, text)
            self._wrong[worker] = text

    def began(self, worker: int, generation: int, step: int, attempt: int, placement: Placement) -> None:
        self._wrong.pop(worker, None)

    def applied(self, worker: int, block: int, step: int, state: BlockState) -> None:
        if state != self._truth.states[step][block] and (worker, block) not in self._slipped:
            raise Violation(f"block {block} on worker {worker} differs after step {step}")

    def loaded(self, worker: int, block: int, step: int, state: BlockState) -> None:
        self._slipped.discard((worker, block))
        _require(state == self._truth.states[step][block], f"block {block} loaded on worker {worker} differs")

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        if commits and grid != self._truth.grids[step]:
            raise Violation(f"the grid after step {step} differs on worker {worker}")
        if commits and worker in self._wrong:
            raise Violation(self._wrong[worker])

    def checkpointed(self, step: int, states: Mapping[int, BlockState], grid: Exponents) -> None:
        right = dict(enumerate(self._truth.states[step]))
        _require(states == right, f"the checkpoint of step {step} differs")
        _require(grid == self._truth.grids[step], f"the grid in the checkpoint of step {step} differs")

    def published(self, step: int, losses: tuple[float, ...]) -> None:
        _require(losses == self._truth.losses[step], f"the published losses of step {step} differ")

    def finished(self, members: Sequence[int], states: dict[int, dict[int, tuple[bool, int, BlockState]]]) -> None:
        owners = [block for held in states.values() for block, (owned, _, _) in held.items() if owned]
        num_blocks = len(self._truth.states[0])
        _require(sorted(owners) == list(range(num_blocks)), f"at the end the owned blocks are {sorted(owners)}")
        last = max(version for held in states.values() for _, version, _ in held.values())
        for worker, held in states.items():
            for block, (_, version, state) in held.items():
                right = (last, self._truth.states[last][block])
                _require((version, state) == right, f"block {block} on worker {worker} differs at the end")


class ExactlyOnce(Observer):
    """Every micro-batch counts once in every committed step; every copy takes every step once."""

    def __init__(self, num_layers: int, num_microbatches: int) -> None:
        self._expected = num_layers * num_microbatches
        self._added: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        self._versions: dict[tuple[int, int], int] = {}
        self._checked: set[tuple[int, int, int]] = set()

    def computed(self, worker: int, generation: int, step: int, attempt: int, layer: int, microbatch: int) -> None:
        self._added.setdefault((generation, step, attempt), []).append((layer, microbatch))

    def kept(self, worker: int, generation: int, step: int, attempt: int, layer: int, microbatch: int) -> None:
        self._added.setdefault((generation, step, attempt), []).append((layer, microbatch))

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        key = (generation, step, attempt)
        if commits and key not in self._checked:
            self._checked.add(key)
            added = self._added.get(key, [])
            _require(
                len(added) == len(set(added)) == self._expected,
                f"step {step} was committed with {len(added)} gradients, {len(set(added))} different ones, of "
                f"{self._expected}",
            )

    def applied(self, worker: int, block: int, step: int, state: BlockState) -> None:
        before = self._versions.get((worker, block), 0)
        if step != before + 1:
            raise Violation(f"worker {worker} applies step {step} to block {block}, which is at step {before}")
        self._versions[worker, block] = step

    def loaded(self, worker: int, block: int, step: int, state: BlockState) -> None:
        self._versions[worker, block] = step


class OneRatio(Observer):
    """All that counts in a committed step was computed with the same ratio of an adaptive fence: also what was kept of
    an earlier attempt."""

    def __init__(self) -> None:
        self._used: dict[tuple[int, int, int, int], int] = {}
        self._counted: dict[tuple[int, int, int], set[int]] = {}

    def coded(self, worker: int, step: int, layer: int, microbatch: int, ratio: int) -> None:
        self._used[worker, step, layer, microbatch] = ratio

    def computed(self, worker: int, generation: int, step: int, attempt: int, layer: int, microbatch: int) -> None:
        ratio = self._used[worker, step, layer, microbatch]
        self._counted.setdefault((generation, step, attempt), set()).add(ratio)

    kept = computed

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        ratios = self._counted.get((generation, step, attempt), set())
        if commits and len(ratios) > 1:
            raise Violation(f"step {step} was committed with the ratios {sorted(ratios)}")


class OneOwner(Observer):
    """A block has one owner in a step of a generation: all workers that run in it know the same one."""

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], tuple[int, ...]] = {}

    def began(self, worker: int, generation: int, step: int, attempt: int, placement: Placement) -> None:
        if self._owners.setdefault((generation, step), placement.owner) != placement.owner:
            raise Violation(f"worker {worker} has other owners in step {step} than a peer")

    def decided(self, decision: Decision) -> None:
        owners = self._owners.setdefault((decision.generation, decision.resume_step), decision.placement.owner)
        _require(owners == decision.placement.owner, f"two decisions about generation {decision.generation}")


class EnoughCopies(Observer):
    """When copies are dropped, no block is left with fewer than asked for.

    Args:
        num_followers: copies beside the owner that are asked for, or `WHOLE_STAGE`: a change then comes into force with
            one, and the others are made afterwards.
    """

    def __init__(self, num_followers: int) -> None:
        self._num_followers = 1 if num_followers == WHOLE_STAGE else num_followers

    def switched(self, worker: int, generation: int, step: int, layout: Layout, placement: Placement) -> None:
        needed = 1 + min(self._num_followers, len(layout.active) - 1)
        for block in range(placement.num_blocks):
            holders = placement.holders(block)
            left = f"worker {worker} drops copies, and block {block} is left with holders {holders}"
            _require(len(set(holders)) == len(holders) >= needed, f"{left}: {needed} are needed")


class OneLayout(Observer):
    """All workers for which a planned change comes into force, with the vote of a step, go on with the same layout."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, int], Layout] = {}

    def switched(self, worker: int, generation: int, step: int, layout: Layout, placement: Placement) -> None:
        known = self._layouts.setdefault((generation, step), layout)
        _require(known == layout, f"worker {worker} goes on after step {step} with another layout than a peer")


class ChangesHeld(Observer):
    """A planned change that has come to a worker in its generation is held by it from its next step on: else the change
    comes into force for no worker, and no other change, join or leave can follow. A worker that has heard of the
    next coordinator meanwhile waits until that one says it again."""

    def __init__(self) -> None:
        self._offered: dict[int, tuple[int, int, int, int]] = {}

    def offered(self, worker: int, generation: int, step: int, number: int, term: int) -> None:
        known = self._offered.get(worker)
        if known is None or known[0] != generation or known[2:] < (number, term):
            self._offered[worker] = generation, step, number, term

    def holds(self, worker: int, generation: int, step: int, number: int, term: int) -> None:
        offered_generation, offered_step, offered, said_in = self._offered.get(worker, (-1, 0, 0, 0))
        _require(
            generation != offered_generation or step <= offered_step or number >= offered or said_in < term,
            f"change {offered} came to worker {worker} in step {offered_step}, and it begins step {step} without it",
        )


class FencingOff(Observer):
    """Nothing of another generation or attempt is used, nor anything from a worker that is no member."""

    def consumed(
        self, worker: int, generation: int, step: int, attempt: int, frame: tuple[int, int, int], sender_is_member: bool
    ) -> None:
        if frame != (generation, step, attempt):
            raise Violation(f"worker {worker} in {(generation, step, attempt)} uses a frame of {frame}")
        if not sender_is_member:
            raise Violation(f"worker {worker} uses a frame of a worker that is no member of generation {generation}")


class Agreement(Observer):
    """A vote has one result, and what a survivor has seen committed stays committed."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, int, int], tuple[bool, bytes]] = {}
        self._committed: dict[int, int] = {}
        """Worker -> newest step that it knows committed."""
        self._decision: Decision | None = None

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        if self._results.setdefault((generation, step, attempt), (commits, vector)) != (commits, vector):
            raise Violation(f"worker {worker} learned another vote on step {step} than a peer")
        if commits:
            self._committed[worker] = step

    def decided(self, decision: Decision) -> None:
        if decision.rollback is not None:
            self._committed.update(dict.fromkeys(decision.members, decision.rollback))
            return
        known = max((self._committed.get(worker, 0) for worker in decision.members), default=0)
        _require(
            decision.resume_step > known,
            f"generation {decision.generation} resumes with step {decision.resume_step}, but step {known} is committed",
        )

    def installed(self, worker: int, decision: Decision, versions: Iterable[int], grid: Exponents) -> None:
        base = decision.resume_step - 1
        _require(set(versions) <= {base}, f"worker {worker} goes on after step {base} with copies of {set(versions)}")
        self._committed[worker] = base

    def began(self, worker: int, generation: int, step: int, attempt: int, placement: Placement) -> None:
        before = self._committed.get(worker, 0)
        if step != before + 1:
            raise Violation(f"worker {worker} begins step {step} after step {before}")


class LogCounts(Observer):
    """What a coordinator has been told is committed, it does not have tried again.

    A vote that it hears of after the next decision does not count; and a successor need not know what no member told
    it.
    """

    def __init__(self) -> None:
        self._received: dict[int, int] = {}
        """Term -> newest committed step that its coordinator has heard of in time."""
        self._generation = 0
        """Of the newest decision."""

    def received(self, term: int, generation: int, evidence: Evidence) -> None:
        if generation >= self._generation:
            self._received[term] = max(self._received.get(term, 0), evidence.committed_step)

    def decided(self, decision: Decision) -> None:
        self._generation = decision.generation
        if decision.rollback is not None:
            self._received.clear()
            return
        received = self._received.get(decision.term, 0)
        _require(
            decision.resume_step > received,
            f"generation {decision.generation} resumes with step {decision.resume_step}, but its coordinator has "
            "heard that step "
            f"{received} is committed",
        )


class NoSilentLoss(Observer):
    """State is given up only when all its holders are gone.

    Who has to hold a block is read off the placements that the survivors were working under: if each of them names a
    holder that is still a member, the block must not be lost. Before any step is committed nothing can be lost at all:
    the seed has everything.
    """

    def __init__(self) -> None:
        self._in_force: dict[int, Placement] = {}
        self._newest: Decision | None = None
        self._loading: set[int] = set()
        """Workers that have yet to load a checkpoint; until they have, nothing can be asked of any worker."""
        self._any_committed = False
        self._flipped: set[tuple[int, int]] = set()
        """(worker, block) of copies in which a bit has flipped: they are as good as gone."""

        self._slipped: set[int] = set()
        """Blocks of which a copy was updated wrongly: of two copies none can be told to be right."""

    def flipped(self, worker: int, block: int) -> None:
        self._flipped.add((worker, block))

    def slipped(self, worker: int, block: int) -> None:
        self._flipped.add((worker, block))
        self._slipped.add(block)

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        self._any_committed = self._any_committed or commits

    def began(self, worker: int, generation: int, step: int, attempt: int, placement: Placement) -> None:
        self._in_force[worker] = placement

    def placed(self, worker: int, placement: Placement) -> None:
        self._in_force[worker] = placement

    def gone(self, worker: int) -> None:
        self._in_force.pop(worker, None)

    def decided(self, decision: Decision) -> None:
        if decision == self._newest:
            return  # a store that was put back has taken the same entry once more
        self._newest = decision
        if decision.rollback is not None:
            self._check(decision.members, range(len(decision.placement.owner)), decision.reason)
            self._loading = set(decision.members)
        for worker in decision.members:
            self._in_force[worker] = decision.placement

    def installed(self, worker: int, decision: Decision, versions: Iterable[int], grid: Exponents) -> None:
        self._loading.discard(worker)

    def ended(self, reason: str, members: Sequence[int], lost: Sequence[int], orphans: Sequence[int]) -> None:
        if orphans:
            _require(self._any_committed, f"state was given up that can be made from the seed: {reason}")
            self._check(members, orphans, reason)

    def _check(self, members: Sequence[int], orphans: Sequence[int], reason: str) -> None:
        known = [self._in_force[worker] for worker in members if worker in self._in_force]
        if not known or self._loading & set(members):
            return
        for block in orphans:
            # A member that has died by now holds nothing more, whatever the coordinator has yet to hear of it.
            left = {worker for worker in members if worker in self._in_force and (worker, block) not in self._flipped}
            num_voters = 3 if block in self._slipped else 1
            if any(len(placement.holders(block)) < num_voters for placement in known):
                return
            if not all(set(placement.holders(block)) & left for placement in known):
                return
        raise Violation(f"state was given up although survivors hold it: {reason}")


class PublishedOnce(Observer):
    """Steps are published in order, and a step that is published again has the same losses."""

    def __init__(self) -> None:
        self._losses: dict[int, tuple[float, ...]] = {}

    def published(self, step: int, losses: tuple[float, ...]) -> None:
        before = self._losses.setdefault(step, losses)
        _require(before == losses, f"step {step} was published with other losses before")

    def finished(self, members: Sequence[int], states: dict[int, dict[int, tuple[bool, int, BlockState]]]) -> None:
        steps = sorted(self._losses)
        _require(steps == list(range(1, len(steps) + 1)), f"the published steps are {steps}")


class CheckpointsKept(Observer):
    """A durable checkpoint that is due, or that a vote asked for, is made once, or given up with a word.

    It is given up only if a part is really missing, and not if no worker was lost since the survivors began to write
    it. Parts that are void because all members went back behind them are left out of account. So is a checkpoint that
    is known to no process any more: its coordinator was lost before it was settled, and all that had written a part.
    """

    def __init__(self, num_steps: int, every: int, num_blocks: int, asks: Callable[[bytes], bool]) -> None:
        self._num_steps = num_steps
        self._regular = {num_steps, *(range(every, num_steps + 1, every) if every else ())}
        self._asks = asks
        """Whether a vote asks for one."""
        self._asked: set[int] = set()
        """Steps whose vote asked for one."""
        self._num_blocks = num_blocks
        self._parts: dict[int, dict[int, set[int]]] = {}
        """Step -> worker -> blocks that it has written."""
        self._stored: set[int] = set()
        self._given_up: set[int] = set()
        self._returned: set[int] = set()
        """Steps whose checkpoints the job has gone back to: they are durable, whichever coordinator knew of it."""
        self._base = 0
        """The committed step that the newest decision goes on from."""
        self._term = 1
        """Of the coordinator that has decided last; the first one's to begin with."""
        self._forgotten: set[int] = set()
        """Steps of whose checkpoints no process knows."""

    @property
    def _due(self) -> set[int]:
        return self._regular | self._asked

    def learned(
        self, worker: int, generation: int, step: int, attempt: int, commits: bool, vector: bytes, grid: Exponents
    ) -> None:
        if commits and self._asks(vector):
            self._asked.add(step)

    def wrote(self, worker: int, step: int, blocks: Collection[int]) -> None:
        self._parts.setdefault(step, {}).setdefault(worker, set()).update(blocks)

    def checkpointed(self, step: int, states: Mapping[int, BlockState], grid: Exponents) -> None:
        _require(step in self._due, f"a checkpoint of step {step} was not asked for")
        self._stored.add(step)

    def given_up(self, step: int, members: Collection[int]) -> None:
        parts = self._parts.get(step, {})
        here = set().union(*(parts.get(worker, ()) for worker in members))
        _require(
            len(here) < self._num_blocks,
            f"the checkpoint of step {step} was given up although the members have written all of it",
        )
        _require(step not in self._returned, f"the checkpoint of step {step}, to which the job went back, was given up")
        self._given_up.add(step)

    def decided(self, decision: Decision) -> None:
        self._base = decision.resume_step - 1
        if decision.term != self._term:
            self._term = decision.term
            present = set(decision.members)
            self._forgotten.update(
                step for step in self._due if step < self._base and present.isdisjoint(self._parts.get(step, ()))
            )
        if decision.rollback is not None:
            self._returned = {step for step in self._returned if step < decision.rollback} | {decision.rollback}
            # Later ones may hold what was found wrong, and were put aside.
            self._stored = {step for step in self._stored if step <= decision.rollback}
            self._asked = {step for step in self._asked if step <= decision.rollback}
            for step in [step for step in self._parts if step > decision.rollback]:
                del self._parts[step]
        elif self._base in self._due and self._base not in self._returned - self._stored:
            # One that a replaced coordinator has made durable is there, and may be written again.
            is_stored = self._base in self._stored
            _require(
                decision.checkpoint != is_stored,
                f"generation {decision.generation} goes on after step {self._base}, whose checkpoint is "
                f"{'written, and writes it again' if is_stored else 'not written, and does not write it'}",
            )

    def finished(self, members: Sequence[int], states: dict[int, dict[int, tuple[bool, int, BlockState]]]) -> None:
        last = max((version for held in states.values() for _, version, _ in held.values()), default=self._num_steps)
        due = {step for step in self._due if step <= last} - self._returned
        missing = sorted(due - self._stored - self._given_up - self._forgotten)
        _require(not missing, f"the job ended without a word about the checkpoints of steps {missing}")
        missing = [step for step in sorted(due - self._stored) if step >= self._base]
        _require(not missing, f"the checkpoints of steps {missing} are not there, and no worker was lost since")


class Ends(Observer):
    """The run ends: with all steps, with one whose vote may have asked for the end, or with a reason that is one."""

    def __init__(self, num_steps: int, stop_step: int = 0, workers_min: int = 1) -> None:
        self._num_steps = num_steps
        self._stop_step = stop_step
        self._last = 0
        self._ended = ""
        self._flipped = False
        self._stopping = False
        self._workers_min = max(1, workers_min)

    def flipped(self, worker: int, block: int) -> None:
        self._flipped = True

    slipped = flipped

    def published(self, step: int, losses: tuple[float, ...]) -> None:
        self._last = max(self._last, step)

    def stopping(self, members: Collection[int], leaving: Collection[int]) -> None:
        _require(
            len(set(members) - set(leaving)) < self._workers_min,
            f"the job is to stop, and of its members {list(members)} only {sorted(leaving)} are to leave",
        )
        self._stopping = True

    def ended(self, reason: str, members: Sequence[int], lost: Sequence[int], orphans: Sequence[int]) -> None:
        self._ended = reason
        if self._flipped and orphans:
            return
        _require(bool(lost), f"given up although no worker was lost: {reason}")
        named = [worker for worker in lost if str(worker) in reason]
        _require(bool(named), f"the reason does not name any of the lost workers {list(lost)}: {reason}")

    def stopped(self, outcome: str, now: int) -> None:
        _require(outcome != "stuck", f"nothing happens any more at time {now}, after step {self._last}")
        if outcome == "finished":
            is_last = self._stopping or self._last == self._num_steps or 0 < self._stop_step <= self._last
            _require(is_last, f"finished after step {self._last} of {self._num_steps}")


def all_checkers(
    truth: Truth,
    num_layers: int,
    num_microbatches: int,
    checkpoint_every: int = 0,
    asks_checkpoint: Callable[[bytes], bool] = lambda vector: False,
    stop_step: int = 0,
    num_followers: int = 0,
    flips: bool = False,
    workers_min: int = 1,
) -> list[Observer]:
    """One of each."""
    num_steps = len(truth.states) - 1
    return [
        SameBits(truth, flips),
        ExactlyOnce(num_layers, num_microbatches),
        OneRatio(),
        OneOwner(),
        OneLayout(),
        ChangesHeld(),
        EnoughCopies(num_followers),
        FencingOff(),
        Agreement(),
        LogCounts(),
        NoSilentLoss(),
        PublishedOnce(),
        CheckpointsKept(num_steps, checkpoint_every, len(truth.states[0]), asks_checkpoint),
        Ends(num_steps, stop_step, workers_min),
    ]
