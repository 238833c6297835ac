"""What the coordinator makes of the workers' timings."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from elaswave.channel.messages.worker import StepReport, Timings
from elaswave.config.cluster import base_level, cluster_of, device_of, emulated_costs
from elaswave.config.load import build_config
from elaswave.coordinator.planning.measurements import HYSTERESIS, Measurements
from elaswave.planning.costs.profiled import ActionTiming
from elaswave.types import ExecutionParameters, Gauges

CPU = build_config({"layout": {"widths": [2, 2], "layers": [3, 3]}})
EMULATED = build_config({"device": {"kind": "emulated", "model": "gpt2-small", "name": "a100", "time_scale": 2.0},
                         "model": {"num_layers": 12}})  # fmt: skip


def timings(worker: int, forward_s: float) -> Timings:
    stage = worker // 2
    actions = [
        ActionTiming(worker=worker, stage=stage, start=3 * stage, stop=3 * stage + 3, kind=kind, seconds=s, count=4)
        for kind, s in (("F", forward_s), ("B", 2 * forward_s))
    ]
    return Timings(worker=worker, generation=1, step=5, level=0, actions=actions)


def step(duration_s: float, run_s: float, attempt: int = 1) -> StepReport:
    phases = {"run": run_s, "reduce": duration_s - run_s}
    return StepReport(
        worker=0, generation=1, step=5, attempt=attempt, loss=1.0, norm=1.0, learning_rate=0.1, duration_s=duration_s,
        phases_s=phases, vector=b"", change=0, checkpoint=0, retries=[],
    )  # fmt: skip


def test_costs_are_known_once_everybody_has_reported():
    measured = Measurements(CPU)
    for worker in range(3):
        measured.add(timings(worker, 0.3), ALL)
    assert measured.costs() is None
    assert measured.known_or_estimated().source.startswith("estimated")
    measured.add(timings(3, 0.6), ALL)
    costs = measured.costs()
    assert costs is not None and costs.source.startswith("measured")
    assert abs(costs.between("forward_s", 0, 3) - 0.3) < 1e-9
    # Of two workers of a stage the faster one is taken to have speed 1.
    assert abs(costs.between("forward_s", 3, 6) - 0.3) < 1e-9


ALL = (0, 1, 2, 3)
ROUNDS = HYSTERESIS.rounds


def tell(measured: Measurements, seconds: Sequence[float], num_rounds: int = ROUNDS, level: int = 0) -> None:
    for _ in range(num_rounds):
        for worker, forward_s in enumerate(seconds):
            measured.add(replace(timings(worker, forward_s), level=level), ALL)


@pytest.mark.parametrize("config", [CPU, EMULATED], ids=["cpu", "emulated"])
def test_who_is_clearly_slower_is_known_and_who_is_hardly_is_not(config):
    measured = Measurements(config)
    tell(measured, (0.3, 0.32, 0.3, 0.6), ROUNDS - 1)
    assert measured.speeds() == {} and measured.shift is None
    tell(measured, (0.3, 0.32, 0.3, 0.6), 1)
    assert measured.speeds() == {3: pytest.approx(0.5)}
    assert measured.shift is not None and measured.shift.workers == (3,)
    measured.shift = None
    # What it takes is what is expected of it now, and no news; neither do its layers cost more.
    tell(measured, (0.3, 0.32, 0.3, 0.6), 50)
    assert measured.shift is None
    if config is CPU:
        assert measured.known_or_estimated().between("forward_s", 3, 6) == pytest.approx(0.3)
    tell(measured, (0.3, 0.32, 0.3, 0.3))
    assert measured.speeds() == {} and measured.shift is not None


def test_a_worker_that_runs_layers_alone_is_compared_with_its_own_past():
    alone = build_config({"layout": {"widths": [1, 1], "layers": [3, 3]}})
    measured = Measurements(alone)

    def told(first_s: float, second_s: float, num_rounds: int) -> None:
        for _ in range(num_rounds):
            measured.add(timings(0, first_s), (0, 2))
            measured.add(timings(2, second_s), (0, 2))

    told(0.3, 0.5, 10)
    assert measured.speeds() == {}  # the second stage has costlier layers
    told(0.3, 1.0, ROUNDS)
    assert measured.speeds() == {2: pytest.approx(0.5)}
    told(0.3, 1.0, 50)
    assert measured.speeds() == {2: pytest.approx(0.5)}
    assert measured.known_or_estimated().between("forward_s", 3, 6) == pytest.approx(0.5)


def test_the_speeds_of_the_configuration_and_of_frequency_levels_are_no_news():
    device = {"kind": "emulated", "model": "gpt2-small", "name": "ascend-910b", "speeds": [1, 1, 1, 0.5]}
    config = build_config({"device": device, "model": {"num_layers": 12}})
    levels = device_of(config).levels
    base = base_level(config)
    measured = Measurements(config)
    tell(measured, (0.3, 0.3, 0.3, 0.6), 10, base)
    assert measured.speeds() == {}
    other = levels[0].speed
    for _ in range(10):
        for worker, seconds in enumerate((0.3, 0.3 / other, 0.3, 0.6)):
            measured.add(replace(timings(worker, seconds), level=0 if worker == 1 else base), ALL)
    assert measured.speeds() == {} and other != 1.0


def test_an_idle_worker_holds_up_no_round():
    measured = Measurements(CPU)
    for worker, seconds in enumerate((0.3, 0.3, 0.3)):
        assert measured.add(timings(worker, seconds), ALL) == []
    assert len(measured.add(replace(timings(3, 0.3), actions=[]), ALL)) == 6


def test_a_new_coordinator_takes_the_speeds_from_what_stands_beside_the_layout():
    device = {"kind": "emulated", "model": "gpt2-small", "name": "ascend-910b", "speeds": [1, 0.8, 1, 1]}
    config = build_config({"device": device, "model": {"num_layers": 12}})
    slow = device_of(config).levels[0].speed
    measured = Measurements(config)
    measured.plan_with(ExecutionParameters(speeds={0: slow, 1: 0.8, 2: 0.5, 9: 0.25}, levels={0: 0}))
    assert measured.speeds() == {2: pytest.approx(0.5), 9: pytest.approx(0.25)}


NOISE = json.loads((Path(__file__).parent / "noise.json").read_text())


@pytest.mark.parametrize("name", NOISE)
def test_a_recorded_run_on_a_busy_machine_changes_nothing(name):
    config = {"cpu": build_config({}), "emulated": EMULATED}[name.partition(",")[0]]
    measured = Measurements(config)
    num_rounds = 0
    for worker, step, actions in NOISE[name]:
        told = [
            ActionTiming(
                worker=worker, stage=worker // 2, start=start, stop=stop, kind=kind, seconds=us * 1e-6, count=n
            )
            for start, stop, kind, us, n in actions
        ]
        report = Timings(worker=worker, generation=1, step=step, level=base_level(config), actions=told)
        num_rounds += bool(measured.add(report, ALL))
        assert measured.shift is None
    assert num_rounds >= 15


def test_a_worker_that_is_not_heard_holds_up_nobody():
    measured = Measurements(CPU)
    measured.add(timings(0, 0.3), ALL)
    measured.add(timings(0, 0.3), ALL)
    assert measured.costs() is not None


def test_what_a_step_costs_beside_its_actions_is_measured():
    measured = Measurements(EMULATED)
    for duration_s in (1.1, 1.3, 1.2):
        measured.add_step(step(duration_s, 1.0))
    measured.add_step(step(9.0, 8.0, attempt=2))  # its earlier attempt is in it
    measured.add_step(step(9.0, 1.0))  # of a worker that mostly waits
    assert abs(measured.step_overhead_s - 0.2) < 1e-9
    # Who waits for a slow worker tells its wait in REDUCE, once the slow one has told how long it runs.
    for worker, run_s in enumerate((1.0, 1.0, 1.9, 1.0)):
        measured.add(replace(timings(worker, 0.3), run_s=run_s), ALL)
    for _ in range(3):
        measured.add_step(step(2.1, 1.0))
    measured.add_step(step(1.5, 1.4))  # before it was slow
    assert abs(measured.step_overhead_s - 0.2) < 1e-9
    costs = measured.costs()
    assert costs is not None
    assert costs.layers == emulated_costs(EMULATED).layers and costs.step_overhead_s == measured.step_overhead_s


def test_an_emulated_second_is_stretched():
    plain = build_config({"device": {"kind": "emulated", "model": "gpt2-small", "name": "a100"},
                          "model": {"num_layers": 12}})  # fmt: skip
    assert emulated_costs(EMULATED).layers[3].forward_s == 2 * emulated_costs(plain).layers[3].forward_s
    assert "each described second takes 2 s" in emulated_costs(EMULATED).source


def test_the_cluster_has_the_configured_speeds():
    given = build_config({"layout": {"widths": [2, 1]}, "device": {"speeds": [1, 0.5, 2]}})
    cluster = cluster_of(given)
    assert cluster.speed.tolist() == [1.0, 0.5, 2.0] and cluster.ids.tolist() == [0, 1, 2]


def test_the_newest_gauges_of_members_are_known():
    measurements = Measurements(CPU)
    first, second = Gauges(utilization=0.5), Gauges(utilization=0.75, power_w=90.0)
    for worker, device in ((0, first), (1, None), (2, first), (0, second)):
        measurements.add(replace(timings(worker, 0.1), device=device), members=[0, 1, 2, 3])
    assert measurements.gauges([2, 1, 0]) == {0: second, 2: first}
    assert measurements.gauges([1, 0]) == {0: second}
