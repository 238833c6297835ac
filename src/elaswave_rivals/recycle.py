"""ReCycle: micro-batches of lost workers go to their data-parallel peers and fill the pipeline's bubbles.

Gandhi, Zhao, Skiadopoulos, Kozyrakis: ReCycle: Resilient Training of Large DNNs using Pipeline Adaptation, SOSP 2024
(arXiv 2405.14009). What of it is modelled, and how:

- *Adaptive pipelining* (section 3): a lost worker's micro-batches are dealt to the live workers of its stage, to those
  with the fewest. No worker's layers change.
- *Decoupled back-propagation* (section 3): backward is split into input and weight gradients, weight gradients are
  deferred into bubbles. Those are our ``zero-bubble`` schedules, compiled for these very micro-batches, durations and
  memory by the same list scheduler as ElasWave's plans, and timed by the same code. Where splitting does not pay, the
  schedule of before is kept, as the paper decouples only where it has to.
- *Failure normalization* (section 4, its Planner): ReCycle plans for a number of failures, not for their places, and
  moves workers' roles so that failures are spread over stages as evenly as is best. A worker of a stage that can spare
  it takes over a stage that cannot, as long as the slowest stage gains; it has to be sent that stage's parameters and
  its share of the optimizer's state, while training stands. Where steps are no shorter for it, nobody moves, in its
  favour. ``normalize=False``: no worker changes stage.
- *Staggered optimizer* (section 3): stages update without waiting for each other, so bubbles at the end of one step and
  the beginning of the next are filled too. `elaswave_rivals.staggered` says how it is predicted.
  ``staggered_optimizer=False``: every step ends with a barrier.

With all three, the default and the policy ``recycle``, a plan is a prediction only. This engine commits a step by a
vote of all workers (global gradient norm, coverage, equal copies), which is a barrier, and the paper's way around it is
to undo a step whose check fails later. What runs here is ``recycle_normalized``, without the staggered optimizer, and
``recycle_rerouting``, without failure normalization too.

Simplified: the paper finds schedules by mixed-integer programming, offline, for each number of failures; here it is
list scheduling by priorities, at the time of the failure. A loss throws the step in flight away (half a step is
expected); so does the paper's. A worker that comes back fills the stage that lacks most, copying in the background. A
straggler is put out if the others are faster without it, which the paper does not treat. If a whole stage is lost, the
job begins again from a checkpoint (section 3).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from elaswave.errors import InfeasiblePlan
from elaswave.planning.costs.layers import Costs
from elaswave.planning.costs.machines import Cluster, ClusterEvent
from elaswave.planning.costs.recovery_times import RecoveryTimes
from elaswave.planning.plan import Allocation, Chain, Plan, StageShare, StateTransfer
from elaswave.planning.policy import full_restart
from elaswave.planning.policy.policy_parts import (
    base_levels,
    copy_s,
    fallback_plan,
    fetch,
    gone_from,
    is_in,
    make_plan,
    unused,
)
from elaswave.planning.policy.replication import Replication
from elaswave.planning.search.apportionment import evenly, topped_up
from elaswave.planning.search.pipelines import ranges_of
from elaswave_rivals.staggered import period_s

NAME = "recycle"
_PREDICTED = ", stages update without waiting for each other: predicted, this engine cannot run it"
REPLICATION = Replication(
    unit="stages",
    what="data-parallel peers hold the same parameters; that each holds all of the optimizer's state, too, is assumed "
    "in its favour: we could not check what the paper says of sharded state",
    source="ReCycle (arXiv 2405.14009), abstract (servers across data-parallel groups store the same parameters) and "
    "section 3 (a stage that is lost with all workers: back to a checkpoint)",
)


def plan_recycle(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, *, times: RecoveryTimes | None = None,
    normalize: bool = True, staggered_optimizer: bool = True, name: str = NAME,
) -> Plan:  # fmt: skip
    """Reroutes around the lost, takes the joined back in.

    Args:
        cluster: after the event.
        costs: of the model's layers.
        allocation: before the event.
        event: what happened.
        times: of recovery; see `RecoveryTimes`.
        normalize: move workers between stages so that losses are spread.
        staggered_optimizer: predict steps without a barrier between them, which nothing here can run.
        name: of the policy.
    Raises:
        InfeasiblePlan: a stage is lost with all its workers and too few workers are left to begin again, or memory.
    """
    times = times or RecoveryTimes()
    if event.kind == "slowed":
        return _slowed(cluster, costs, allocation, event, times, normalize, staggered_optimizer, name)
    gone = gone_from(event)
    chains = [_without(chain, gone) for chain in allocation.chains]
    if any(chain is None for chain in chains):
        restarted = full_restart.restart(cluster, costs, allocation, times, planned=event.kind == "drained")
        return fallback_plan(restarted, name, "a stage has lost all of its workers")
    after = replace(allocation, chains=tuple(chain for chain in chains if chain is not None))
    transfers: list[StateTransfer] = []
    after = _readmit(cluster, costs, after, transfers)
    if event.kind == "drained":
        what, pause_s = f"{len(gone)} workers leave after handing over", times.join_s
    elif len(gone):
        what, pause_s = f"micro-batches of {len(gone)} lost workers go to their stages' other workers", times.recover_s
    else:
        what, pause_s = "joined workers fill the stages that lack most", times.join_s
    lost_steps = 0.5 if event.kind == "lost" else 0.0
    moved: list[StateTransfer] = []
    spread = _normalized(cluster, costs, after, moved) if normalize else after
    offers = [(after, transfers, what, pause_s)]
    if moved:
        what += f", and {sum(len(each.workers) for each in moved)} workers change stage"
        offers.append((spread, [*transfers, *moved], what, pause_s + copy_s(cluster, costs, allocation, moved)))
    return _fastest(
        lambda allocation, sent, what, pause_s, within_s: _best_schedule(
            name, cluster, costs, allocation, pause_s, lost_steps, what, tuple(sent), staggered_optimizer, within_s
        ),
        offers,
    )


def _slowed(
    cluster: Cluster, costs: Costs, allocation: Allocation, event: ClusterEvent, times: RecoveryTimes, normalize: bool,
    staggered_optimizer: bool, name: str,
) -> Plan:  # fmt: skip
    """Keeps a straggler or puts it out, whichever is faster; takes one back in that is as fast as before."""
    after = _readmit(cluster, costs, allocation, [], skipped=event.workers if event.speed < 1 else ())
    now = _best_schedule(
        name, cluster, costs, after, 0.0, 0.0, "the straggler keeps its work", (), staggered_optimizer
    )  # fmt: skip
    if event.speed >= 1:
        return now
    loss = ClusterEvent(kind="lost", workers=event.workers)
    try:
        without = plan_recycle(
            cluster.without(event.workers), costs, allocation, loss, times=times, normalize=normalize,
            staggered_optimizer=staggered_optimizer, name=name,
        )  # fmt: skip
    except InfeasiblePlan:
        return now
    if without.predicted_step_s >= now.predicted_step_s or without.predicted_pause_s >= times.restart_s:
        return now
    return replace(
        without, lost_work_s=0.0, predicted_pause_s=times.join_s, reason=f"put out as slow: {without.reason}"
    )


def _fastest(make: Callable[..., Plan], offers: Sequence[tuple[Any, ...]], shortest_s: float = float("inf")) -> Plan:
    """Chooses the plan with the shortest step of those that can be, of equals the first.

    Args:
        make: a plan of an offer and of the shortest step so far, below which alone it need be timed exactly.
        offers: in order.
        shortest_s: of plans that are known already.
    Raises:
        InfeasiblePlan: none can; why the first cannot.
    """
    best: Plan | None = None
    problems = []
    for offer in offers:
        try:
            found = make(*offer, shortest_s if best is None else min(shortest_s, best.predicted_step_s))
        except InfeasiblePlan as problem:
            problems.append(problem)
            continue
        if best is None or found.predicted_step_s < best.predicted_step_s:
            best = found
    if best is None:
        raise problems[0]
    return best


def _best_schedule(
    name: str, cluster: Cluster, costs: Costs, allocation: Allocation, pause_s: float, lost_steps: float, what: str,
    transfers: tuple[StateTransfer, ...], staggered_optimizer: bool, within_s: float = float("inf"),
) -> Plan:  # fmt: skip
    """Chooses the schedule of before or one with split backwards, whichever is faster in the memory there is."""
    schedules = dict.fromkeys((allocation.schedule, "zero-bubble", "zero-bubble-h2"))
    suffix = _PREDICTED if staggered_optimizer else ""
    return _fastest(
        lambda schedule, within_s: make_plan(
            name, cluster, costs, replace(allocation, schedule=schedule), pause_s=pause_s, lost_steps=lost_steps,
            transfers=transfers, reason=f"{what}; {schedule}{suffix}", within_s=within_s,
            period_of=period_s if staggered_optimizer else None,
        ),
        [(schedule,) for schedule in schedules],
        within_s,
    )  # fmt: skip


def _without(chain: Chain, gone: np.ndarray) -> Chain | None:
    """Makes the chain without these workers, their micro-batches dealt to their stage; None if a stage is left
    empty."""
    stages = list(chain.stages)
    for index, stage in enumerate(chain.stages):
        where = is_in(stage.workers, gone)
        if len(where) == stage.width:
            return None
        if len(where):
            left = np.ones(stage.width, dtype=bool)
            left[where] = False
            counts = topped_up(stage.num_microbatches[left], int(stage.num_microbatches[where].sum()))
            stages[index] = replace(
                stage, workers=stage.workers[left], num_microbatches=counts, levels=stage.levels[left]
            )
    return replace(chain, stages=tuple(stages))


def _readmit(
    cluster: Cluster,
    costs: Costs,
    allocation: Allocation,
    transfers: list[StateTransfer],
    skipped: tuple[int, ...] = (),
) -> Allocation:
    """Gives every unused worker to the stage that lacks most, which then shares its micro-batches evenly."""
    spare = unused(cluster, allocation)
    if len(skipped):
        spare = np.setdiff1d(spare, np.array(skipped, dtype=np.int64))
    if not len(spare):
        return allocation
    widths = {
        (number, index): stage.width
        for number, chain in enumerate(allocation.chains)
        for index, stage in enumerate(chain.stages)
    }
    new: dict[tuple[int, int], list[int]] = {}
    for worker in spare.tolist():
        place = min(widths, key=lambda each: (widths[each], each))
        widths[place] += 1
        new.setdefault(place, []).append(worker)
    chains = [list(chain.stages) for chain in allocation.chains]
    for (number, index), workers in new.items():
        chains[number][index] = stage = _widened(cluster, chains[number][index], np.array(workers, dtype=np.int64))
        transfers += fetch(costs, {(stage.start, stage.stop): workers}, {(stage.start, stage.stop): stage.width})
    return replace(
        allocation,
        chains=tuple(
            replace(chain, stages=tuple(stages)) for chain, stages in zip(allocation.chains, chains, strict=True)
        ),
    )


def _widened(cluster: Cluster, stage: StageShare, new: np.ndarray) -> StageShare:
    """Makes the stage with more workers, its micro-batches shared evenly among all."""
    workers = np.concatenate([stage.workers, new])
    levels = np.concatenate([stage.levels, base_levels(cluster, new)])
    before = np.concatenate([stage.num_microbatches, np.zeros(len(new), dtype=np.int64)])
    counts = evenly(int(before.sum()), len(workers), before)
    order = np.argsort(workers, kind="stable")
    return replace(stage, workers=workers[order], num_microbatches=counts[order], levels=levels[order])


def _normalized(cluster: Cluster, costs: Costs, allocation: Allocation, transfers: list[StateTransfer]) -> Allocation:
    """Moves workers from stages that can spare one to the slowest stage while that makes the slowest faster.

    The paper's dynamic program over the number of failures of each stage has the same optimum: the time of a stage
    falls with its width, so giving one worker at a time to the slowest is best.
    """
    chains = []
    for chain in allocation.chains:
        stages = list(chain.stages)
        seconds = [costs.between("busy_s", start, stop) for start, stop in ranges_of(chain)]
        widths = [stage.width for stage in stages]
        total = chain.num_microbatches

        def slowest(width: int, stage: int, seconds: list[float] = seconds, total: int = total) -> float:
            return -(-total // width) * seconds[stage]

        while True:
            needy = max(range(len(stages)), key=lambda index: slowest(widths[index], index))
            donors = [index for index in range(len(stages)) if index != needy and widths[index] > 1]
            if not donors:
                break
            donor = min(donors, key=lambda index: slowest(widths[index] - 1, index))
            if slowest(widths[donor] - 1, donor) >= slowest(widths[needy], needy):
                break
            widths[donor] -= 1
            widths[needy] += 1
        moving: list[int] = []
        for index, stage in enumerate(stages):
            if (surplus := stage.width - widths[index]) > 0:
                moving += stage.workers[-surplus:].tolist()
                counts = topped_up(stage.num_microbatches[:-surplus], int(stage.num_microbatches[-surplus:].sum()))
                stages[index] = replace(
                    stage, workers=stage.workers[:-surplus], num_microbatches=counts, levels=stage.levels[:-surplus]
                )
        for index, stage in enumerate(stages):
            if (lacking := widths[index] - stage.width) > 0:
                own, moving = moving[:lacking], moving[lacking:]
                stages[index] = _widened(cluster, stage, np.array(own, dtype=np.int64))
                layers = (stage.start, stage.stop)
                transfers += fetch(costs, {layers: own}, {layers: widths[index]})
        chains.append(replace(chain, stages=tuple(stages)))
    return replace(allocation, chains=tuple(chains))
