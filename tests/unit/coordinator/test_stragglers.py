"""Which speeds plans count with: shifts are found out, noise changes nothing, and speeds that recover are noticed."""

import random
from collections.abc import Mapping

import pytest

from elaswave.coordinator.planning.measurements import (
    HYSTERESIS,
    TRIAL_ROUNDS,
    TRIALS_MAX,
    Hysteresis,
    Shift,
    Stragglers,
)

MEMBERS = (0, 1, 2, 3)
THREE = Hysteresis(0.1, 3)


def rounds(policy: Stragglers, speeds: Mapping[int, float], count: int) -> list[Shift | None]:
    """So many rounds in which workers run at these true speeds; 1 for those that are not in it."""
    shifts = []
    for _ in range(count):
        known = policy.speeds
        ratios = {worker: speeds.get(worker, 1.0) / known.get(worker, 1.0) for worker in MEMBERS}
        shifts.append(policy.observe(ratios, MEMBERS))
    return shifts


def test_a_worker_counts_as_slow_when_it_was_in_enough_rounds_in_a_row():
    policy = Stragglers(THREE)
    assert rounds(policy, {2: 0.5}, 2) == [None, None]
    [shift] = rounds(policy, {2: 0.5}, 1)
    assert shift == Shift((2,), "worker 2 computes at 0.50 of its speed, not 1.00")
    assert policy.speeds == {2: 0.5}
    assert rounds(policy, {2: 0.5}, 100) == [None] * 100


def test_a_round_in_between_begins_the_count_anew():
    policy = Stragglers(THREE)
    for _ in range(20):
        assert rounds(policy, {2: 0.5}, 2) + rounds(policy, {2: 0.95}, 1) == [None] * 3
        assert rounds(policy, {2: 0.5}, 2) + rounds(policy, {2: 1.5}, 1) == [None] * 3
    assert policy.speeds == {}


@pytest.mark.parametrize(("speed", "shifts"), [(0.91, False), (0.89, True), (1.1, False), (1.12, True)])
def test_what_is_nearer_than_the_deviation_is_noise(speed, shifts):
    policy = Stragglers(THREE)
    assert any(rounds(policy, {1: speed}, 50)) is shifts


def test_the_speed_is_the_median_of_the_reports_that_said_so():
    policy = Stragglers(THREE)
    for speed in (0.6, 0.2, 0.5):
        rounds(policy, {2: speed}, 1)
    assert policy.speeds == {2: 0.5}


def test_speed_that_recovers_is_noticed_and_is_the_configured_one_again():
    policy = Stragglers(THREE)
    rounds(policy, {2: 0.5}, 3)
    *before, shift = rounds(policy, {2: 0.97}, 3)
    assert before == [None, None]
    assert shift == Shift((2,), "worker 2 computes at 1.00 of its speed, not 0.50")
    assert policy.speeds == {}


def test_speed_may_change_again_and_again():
    policy = Stragglers(THREE)
    for speed in (0.5, 0.25, 0.7, 0.3):
        assert rounds(policy, {3: speed}, 3)[-1] is not None
        assert policy.speeds == {3: pytest.approx(speed)}


def test_what_all_have_in_common_is_no_workers_doing():
    policy = Stragglers(THREE)
    for speed in (0.5, 0.2, 1.0, 3.0):
        assert not any(rounds(policy, dict.fromkeys(MEMBERS, speed), 10))
    # On a machine that is slower altogether a straggler still stands out.
    rounds(policy, {0: 0.3, 1: 0.3, 2: 0.15, 3: 0.3}, 3)
    assert policy.speeds == {2: pytest.approx(0.5)}


def test_of_two_workers_the_one_that_was_slow_recovers():
    policy = Stragglers(THREE)
    for ratio in (0.5, 0.5, 0.5):
        policy.observe({0: 1.0, 1: ratio}, (0, 1))
    assert policy.speeds == {1: 0.5}
    for _ in range(3):
        policy.observe({0: 1.0, 1: 2.0}, (0, 1))
    assert policy.speeds == {}


def test_several_may_shift_at_once_or_one_after_the_other():
    policy = Stragglers(THREE)
    *_, shift = rounds(policy, {1: 0.5, 3: 0.25}, 3)
    assert shift is not None and shift.workers == (1, 3) and "; " in shift.reason
    late = Stragglers(THREE)
    rounds(late, {1: 0.5}, 1)
    found = rounds(late, {1: 0.5, 3: 0.25}, 3)
    assert [each and each.workers for each in found] == [None, (1,), (3,)]
    assert late.speeds == {1: 0.5, 3: 0.25}


def test_the_others_may_be_heard_less_often():
    policy = Stragglers(THREE)
    rounds(policy, {}, 1)
    shifts = [policy.observe({2: 0.5}, MEMBERS) for _ in range(3)]
    assert [bool(each) for each in shifts] == [False, False, True]
    assert policy.observe({}, MEMBERS) is None


def test_one_worker_alone_has_nobody_to_be_slower_than():
    policy = Stragglers(THREE)
    assert not any(policy.observe({0: ratio}, (0,)) for ratio in (1.0, 0.5, 0.5, 0.5, 0.5, 0.2))


def test_who_is_gone_is_forgotten():
    policy = Stragglers(THREE)
    rounds(policy, {2: 0.5}, 3)
    policy.observe({0: 1.0, 1: 1.0, 3: 1.0}, (0, 1, 3))
    assert policy.speeds == {}


def test_a_slow_worker_without_work_is_tried_again_and_then_less_and_less_often():
    policy = Stragglers(THREE)
    rounds(policy, {2: 0.1}, 3)
    others = {worker: 1.0 for worker in MEMBERS if worker != 2}
    for wanted in (TRIAL_ROUNDS, 2 * TRIAL_ROUNDS, 4 * TRIAL_ROUNDS):
        *before, shift = [policy.observe(others, MEMBERS) for _ in range(wanted)]
        assert not any(before)
        assert shift == Shift((2,), "worker 2, without work at 0.10 of its speed, is tried again")
        assert policy.speeds == {}
        rounds(policy, {2: 0.1}, 3)  # it has got work, and is still slow
        assert policy.speeds == {2: pytest.approx(0.1)}


def failed_trials(policy: Stragglers, number: int) -> None:
    """So many, one after the other, of worker 2; then it is without work again."""
    rounds(policy, {2: 0.1}, 3)
    others = {worker: 1.0 for worker in MEMBERS if worker != 2}
    for trial in range(number):
        for _ in range(TRIAL_ROUNDS << trial):
            assert policy.hopeless == ()
            policy.observe(others, MEMBERS)
        rounds(policy, {2: 0.1}, 3)
    assert policy.hopeless == (), "it has had work up to now"
    policy.observe(others, MEMBERS)


def test_a_worker_that_is_slow_in_every_trial_is_hopeless():
    policy = Stragglers(THREE)
    failed_trials(policy, TRIALS_MAX)
    assert policy.hopeless == (2,)
    policy.observe({0: 1.0, 1: 1.0, 3: 1.0}, (0, 1, 3))
    assert policy.hopeless == ()
    policy = Stragglers(THREE)
    failed_trials(policy, TRIALS_MAX - 1)
    assert policy.hopeless == ()


def test_a_trial_that_succeeds_makes_up_for_those_that_have_failed():
    policy = Stragglers(THREE)
    failed_trials(policy, TRIALS_MAX)
    others = {worker: 1.0 for worker in MEMBERS if worker != 2}
    while policy.speeds:
        policy.observe(others, MEMBERS)  # it is tried once more
    assert rounds(policy, {}, 3) == [None, None, None] and policy.hopeless == ()
    rounds(policy, {2: 0.1}, 3)  # some time later
    policy.observe(others, MEMBERS)
    assert policy.speeds and policy.hopeless == ()


def test_a_slow_worker_with_work_is_not_tried():
    policy = Stragglers(THREE)
    rounds(policy, {2: 0.5}, 3)
    assert not any(rounds(policy, {2: 0.5}, 10 * TRIAL_ROUNDS))


def test_a_new_coordinator_counts_with_the_speeds_of_the_layout_that_it_finds():
    policy = Stragglers(THREE)
    rounds(policy, {1: 0.5}, 2)
    policy.plan_with({0: 1.0, 2: 0.5})
    assert policy.speeds == {2: 0.5}
    assert not any(rounds(policy, {2: 0.5}, 10))
    assert rounds(policy, {}, 3)[-1] == Shift((2,), "worker 2 computes at 1.00 of its speed, not 0.50")


def test_hours_of_noise_change_nothing():
    """Independent noise of a third of the deviation in every round, beside a drift of the whole machine, and rounds in
    which one worker in a hundred stands still for a while."""
    draw = random.Random(7)
    policy = Stragglers()
    sigma = HYSTERESIS.deviation / 3
    drift = 1.0
    for _ in range(10_000):
        drift = min(4.0, max(0.25, drift * draw.uniform(0.8, 1.25)))
        ratios = {worker: drift * draw.lognormvariate(0.0, sigma) for worker in MEMBERS}
        if draw.random() < 0.01:
            ratios[draw.choice(MEMBERS)] *= 0.2
        assert policy.observe(ratios, MEMBERS) is None


def test_half_speed_is_found_in_the_same_noise():
    draw = random.Random(11)
    policy = Stragglers()
    sigma = HYSTERESIS.deviation / 3
    for _ in range(HYSTERESIS.rounds):
        policy.observe({w: draw.lognormvariate(0.0, sigma) * (0.5 if w == 3 else 1.0) for w in MEMBERS}, MEMBERS)
    assert set(policy.speeds) == {3} and 0.4 < policy.speeds[3] < 0.6
