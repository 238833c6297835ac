"""Drawn jobs whose membership changes: the same on every machine, always possible, and no block can be lost."""

from collections import Counter

from elaswave.faults.injection import Fault, parse_faults
from verify.chaos.cases import ChaosCase
from verify.chaos.changing import MAX_WORKERS, NUM_CYCLES, NUM_STEPS, SPACING, draw_any, draw_changing

CASES = [draw_changing(seed, index) for seed in (0, 7) for index in range(60)]


def faults_of(case: ChaosCase) -> tuple[Fault, ...]:
    config = case.config
    workers = range(sum(config.widths))
    return parse_faults(
        case.faults, seed=1, workers=workers, num_steps=config.run.steps, respawns=config.elastic.respawns
    )  # raises if one is not possible


def test_drawing_is_a_function_of_seed_and_index() -> None:
    assert CASES == [draw_changing(case.seed, case.index) for case in reversed(CASES)][::-1]
    assert len({case.faults for case in CASES}) > 100
    drawn = [draw_any(5, index) for index in range(40)]
    assert 10 < sum(case.keeps_blocks for case in drawn) < 30, "both sorts take part"
    assert len({(case.model, str(case.reference)) for case in drawn}) <= 16, "cases of a model share reference runs"


def test_all_kinds_of_events_are_drawn() -> None:
    kinds = Counter(fault.kind for case in CASES for fault in faults_of(case))
    assert {"kill", "hang", "cut-close", "slow", "drain", "join"} == set(kinds) and min(kinds.values()) >= 5
    assert any(fault.worker == "coordinator" for case in CASES for fault in faults_of(case))
    assert {case.config.elastic.respawn for case in CASES} == {False, True}


def test_jobs_grow_to_twelve_and_shrink_to_one() -> None:
    ends = []
    for case in CASES:
        faults = faults_of(case)
        gone = [fault.worker for fault in faults if fault.kind in ("kill", "hang", "cut-close", "drain")]
        workers = [worker for worker in gone if isinstance(worker, int)]
        assert case.watches_growth == (case.config.run.steps > NUM_STEPS)
        assert 0 not in workers and len(set(workers)) == len(workers), "somebody always stays; nobody goes twice"
        size = sum(case.config.widths)
        joins = [fault.kind == "join" for fault in faults if fault.kind != "slow" and fault.worker in (None, *workers)]
        sizes = [size := size + (1 if is_join else -1) for is_join in joins]
        assert case.watches_growth is False or sizes.count(MAX_WORKERS) >= sizes.count(1) >= NUM_CYCLES
        ends.append((max(sizes), min(sizes)))
    assert max(most for most, _ in ends) == MAX_WORKERS and min(least for _, least in ends) == 1


def test_losses_are_so_far_apart_that_copies_are_made_in_between() -> None:
    for case in CASES:
        losses = sorted(
            fault.step
            for fault in faults_of(case)
            if fault.kind in ("kill", "hang", "cut-close") and isinstance(fault.worker, int)
        )
        assert all(later - earlier >= SPACING for earlier, later in zip(losses, losses[1:])), case.faults
