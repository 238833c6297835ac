"""Scenarios: drawn from rates, and read from traces."""

from math import exp, gamma

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaswave.errors import UsageError
from elaswave.sim.cluster.failures import DAY_S, RATES, Rates, Scenario, draw, rates_named

BUSY = Rates(
    losses_per_worker_day=2.0, repair_s=3600.0, stragglers_per_worker_day=3.0, straggler_s=1800.0, whole_nodes=False
)


def walk(scenario: Scenario) -> set[int]:
    """Plays the changes, checks that each is possible, and returns who is there at the end."""
    there, seen, slow, last = set(scenario.initial), set(scenario.initial), set(), 0.0
    for change in scenario.changes:
        assert last <= change.at_s <= scenario.duration_s
        last = change.at_s
        workers = set(change.event.workers)
        if change.event.kind == "joined":
            assert not workers & seen, "ids are given once"
            assert len(change.nodes) == len(change.event.workers)
            there |= workers
            seen |= workers
            continue
        assert workers <= there
        if change.event.kind == "lost":
            there -= workers
            slow -= workers
        else:
            assert change.event.kind == "slowed"
            assert (change.event.speed == 1.0) == (workers <= slow), "a worker is slow once at a time, and recovers"
            slow = slow - workers if change.event.speed == 1.0 else slow | workers
    return there


@settings(max_examples=30)
@given(
    st.builds(
        Rates,
        losses_per_worker_day=st.floats(0, 5),
        whole_nodes=st.booleans(),
        repair_s=st.none() | st.floats(60, 1e5),
        stragglers_per_worker_day=st.floats(0, 5),
        weibull_shape=st.just(1.0) | st.floats(0.2, 1),
        rack_losses_per_day=st.just(0.0) | st.floats(0, 2),
    ),
    st.integers(1, 20),
    st.integers(0, 1000),
    st.integers(1, 3),
)
def test_scenarios_are_possible_and_the_same_for_the_same_seed(rates, num_workers, seed, nodes_per_rack):
    given = {"num_workers": num_workers, "duration_s": 2 * DAY_S, "seed": seed, "workers_per_node": 4}
    scenario = draw(rates, **given, nodes_per_rack=nodes_per_rack)
    walk(scenario)
    assert scenario == draw(rates, **given, nodes_per_rack=nodes_per_rack)
    assert scenario.num_workers_max <= num_workers


def test_seeds_differ_and_stragglers_do_not_move_losses():
    one, two = (draw(BUSY, num_workers=8, duration_s=DAY_S, seed=seed) for seed in (1, 2))
    assert one.changes != two.changes
    calm = draw(msgspec.structs.replace(BUSY, stragglers_per_worker_day=0.0), num_workers=8, duration_s=DAY_S, seed=1)

    def gone(scenario: Scenario) -> list[tuple[float, tuple[int, ...]]]:
        return [(each.at_s, each.event.workers) for each in scenario.changes if each.event.kind == "lost"]

    assert gone(one) == gone(calm)
    assert set(calm.counts) == {"lost", "joined"}


def test_losses_come_as_often_as_the_rate_says():
    rates = rates_named("llama3")
    weeks = [draw(rates, num_workers=100_000, duration_s=7 * DAY_S, seed=seed).counts["lost"] for seed in range(20)]
    expected = 419 / 54 / 16_384 * 7 * 100_000  # 331.5
    assert abs(sum(weeks) / 20 - expected) < 4 * (expected / 20) ** 0.5
    never_repaired = Rates(losses_per_worker_day=1.0, repair_s=None)
    week = draw(never_repaired, num_workers=50, duration_s=7 * DAY_S, seed=0)
    assert set(week.counts) == {"lost"}
    assert walk(week) == set(range(50)) - {worker for each in week.changes for worker in each.event.workers}


@pytest.mark.parametrize("rates", [BUSY, msgspec.structs.replace(BUSY, repair_s=None, stragglers_per_worker_day=0.0)])
def test_changes_are_about_as_many_as_expected_and_never_far_more(rates):
    drawn = len(draw(rates, num_workers=200, duration_s=0.2 * DAY_S, seed=1).changes)
    assert 0.6 < drawn / rates.expected_changes(200, 0.2 * DAY_S) < 1.1


def test_a_whole_node_goes_and_comes_together():
    rates = Rates(losses_per_worker_day=0.2, whole_nodes=True, repair_s=3600.0)
    scenario = draw(rates, num_workers=32, duration_s=7 * DAY_S, seed=3, workers_per_node=8)
    for change in scenario.changes:
        assert len(change.event.workers) == 8
        assert len(set(change.nodes)) == (1 if change.event.kind == "joined" else 0)


def test_newcomers_fail_more_often_and_the_mean_stays():
    """Shape 0.5: a fresh worker is lost within a tenth of the mean with a chance of 36 %, not 10 %."""
    rates = Rates(losses_per_worker_day=1.0, repair_s=60.0, weibull_shape=0.5)
    scenario = draw(rates, num_workers=2_000, duration_s=5 * DAY_S, seed=4)
    assert scenario.counts["lost"] == pytest.approx(10_000, rel=0.06)  # within 4 deviations of such a renewal process
    days = [sum(day * DAY_S <= each.at_s < (day + 1) * DAY_S for each in scenario.changes) / 2 for day in range(5)]
    assert days == pytest.approx([2_000] * 5, rel=0.12)  # from the first day on
    joined: dict[int, float] = {}
    lives = []
    for change in scenario.changes:
        (worker,) = change.event.workers
        if change.event.kind == "joined":
            joined[worker] = change.at_s
        elif worker in joined:
            lives.append(change.at_s - joined.pop(worker))
    born_early = len(lives) + sum(at_s < 4.9 * DAY_S for at_s in joined.values())
    expected = 1 - exp(-((0.1 * gamma(3)) ** 0.5))  # Weibull: 1 - exp(-(t / scale) ** shape), scale = mean / gamma(3)
    assert sum(life < DAY_S / 10 for life in lives) / born_early == pytest.approx(expected, abs=0.02)


def test_a_node_that_fails_early_fails_whole():
    rates = Rates(losses_per_worker_day=0.5, whole_nodes=True, repair_s=600.0, weibull_shape=0.6)
    scenario = draw(rates, num_workers=400, duration_s=4 * DAY_S, seed=1, workers_per_node=4)
    walk(scenario)
    assert all(len(change.event.workers) == 4 for change in scenario.changes)
    assert scenario.counts["lost"] == pytest.approx(0.5 * 400 * 4, rel=0.15)


def test_racks_are_lost_together_and_do_not_move_other_losses():
    rates = msgspec.structs.replace(BUSY, rack_losses_per_day=0.5)
    given = {"num_workers": 60, "duration_s": 4 * DAY_S, "seed": 2, "workers_per_node": 2, "nodes_per_rack": 5}
    rarely = msgspec.structs.replace(rates, losses_per_worker_day=0.01, stragglers_per_worker_day=0.0)
    scenario = draw(rarely, **given)
    walk(scenario)
    strikes = [change for change in scenario.changes if change.event.kind == "lost" and len(change.event.workers) > 2]
    assert 3 <= len(strikes) <= 22  # 12 expected
    first = strikes[0].event.workers
    assert {scenario.rack_of(worker // 2) for worker in first} == {first[0] // 10}
    without = draw(msgspec.structs.replace(rarely, rack_losses_per_day=0.0), **given)
    assert without.counts["lost"] <= 6

    def alone(life: Scenario) -> set[float]:
        return {each.at_s for each in life.changes if each.event.kind == "lost" and len(each.event.workers) == 1}

    assert alone(without) & alone(scenario), "adding racks left the other losses where they were"


def test_what_a_scenario_is_drawn_from_is_told():
    rates = Rates(losses_per_worker_day=0.1, weibull_shape=0.7, rack_losses_per_day=0.5, name="mine")
    assert rates.described == "mine; Weibull shape 0.7; each rack lost 0.5 times a day"
    assert draw(rates, num_workers=1, duration_s=1.0, seed=0).source == rates.described
    assert rates.expected_changes(100, DAY_S, 10) == 2 * (10 + 5)


def test_nodes_share_racks():
    scenario = draw(BUSY, num_workers=10, duration_s=DAY_S, seed=0, workers_per_node=2, nodes_per_rack=2)
    assert scenario.racks == (0, 0, 1, 1, 2)
    assert scenario.rack_of(3) == 1
    alone = draw(BUSY, num_workers=4, duration_s=DAY_S, seed=0, workers_per_node=2)
    assert (alone.racks, alone.rack_of(1)) == ((), 1)


def test_public_rates_say_where_they_are_from():
    for name, rates in RATES.items():
        assert rates.name == name
        assert "arXiv" in rates.source or "Hugging Face" in rates.source
    with pytest.raises(
        UsageError, match="unknown failure rates 'lama', and there is no file of that name: choose one of bloom, llama3"
    ):
        rates_named("lama")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("losses_per_worker_day", -1.0, "losses_per_worker_day is -1.0, needed: finite, at least 0"),
        ("stragglers_per_worker_day", float("inf"), "stragglers_per_worker_day is inf"),
        ("rack_losses_per_day", -1.0, "rack_losses_per_day is -1.0"),
        ("weibull_shape", 1.5, "weibull_shape is 1.5, needed: at least 0.2 and at most 1"),
        ("weibull_shape", 0.0, "weibull_shape is 0.0"),
        ("repair_s", 0.0, "repair_s is 0.0, needed: above 0"),
        ("straggler_s", -2.0, "straggler_s is -2.0"),
        ("straggler_speed", (0.9, 0.5), "needed: two of 0 < low <= high < 1"),
    ],
)
def test_impossible_rates(field, value, message):
    with pytest.raises(ValueError, match=message):
        Rates(**{"losses_per_worker_day": 1.0, field: value})


@pytest.mark.parametrize(
    "bad", [{"num_workers": 0}, {"duration_s": 0.0}, {"workers_per_node": 0}, {"nodes_per_rack": 0}]
)
def test_impossible_scenarios(bad):
    with pytest.raises(ValueError, match="all four must be above 0"):
        draw(BUSY, **{"num_workers": 4, "duration_s": 10.0, "seed": 0, **bad})


def test_the_smallest_rates_are_as_good_as_none():
    rates = Rates(losses_per_worker_day=5e-324, stragglers_per_worker_day=5e-324)
    assert draw(rates, num_workers=1, duration_s=1e9, seed=0).changes == ()
