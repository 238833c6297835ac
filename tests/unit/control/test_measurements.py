"""What the coordinator makes of the workers' timings."""

import pytest

from elaswave.config.devices import cluster_of, emulated_costs
from elaswave.config.load import build_config
from elaswave.control.measurements import Measurements
from elaswave.costs.profiled import ActionTiming
from elaswave.worker.messages import StepReport, Timings

CPU = build_config({"layout": {"widths": [2, 2], "layers": [3, 3]}})
EMULATED = build_config({"device": {"kind": "emulated", "model": "gpt2-small", "name": "a100", "time_scale": 2.0},
                         "model": {"num_layers": 12}})  # fmt: skip


def timings(worker: int, forward_s: float) -> Timings:
    stage = worker // 2
    actions = [
        ActionTiming(worker=worker, stage=stage, start=3 * stage, stop=3 * stage + 3, kind=kind, seconds=s, count=4)
        for kind, s in (("F", forward_s), ("B", 2 * forward_s))
    ]
    return Timings(worker=worker, epoch=1, step=5, level=0, actions=actions)


def step(duration_s: float, run_s: float, attempt: int = 1) -> StepReport:
    phases = {"run": run_s, "reduce": duration_s - run_s}
    return StepReport(
        worker=0, epoch=1, step=5, attempt=attempt, loss=1.0, norm=1.0, learning_rate=0.1, duration_s=duration_s,
        phases_s=phases, vector=b"", change=0, checkpoint=0, finished_s=1.0, retries=[],
    )  # fmt: skip


def test_costs_are_known_once_everybody_has_reported():
    measured = Measurements(CPU)
    for worker in range(3):
        measured.add(timings(worker, 0.3), 4)
    assert measured.costs() is None
    assert measured.known_or_estimated().source.startswith("estimated")
    measured.add(timings(3, 0.6), 4)
    costs = measured.costs()
    assert costs is not None and costs.source.startswith("measured")
    assert abs(costs.between("forward_s", 0, 3) - 0.3) < 1e-9
    # Of two workers of a stage the faster one is taken to have speed 1.
    assert abs(costs.between("forward_s", 3, 6) - 0.3) < 1e-9


def test_who_is_clearly_slower_is_known_and_who_is_hardly_is_not():
    measured = Measurements(CPU)
    for worker, seconds in enumerate((0.3, 0.32, 0.3, 0.6)):
        measured.add(timings(worker, seconds), 4)
    assert measured.speeds() == {3: pytest.approx(0.5)}
    emulated = Measurements(EMULATED)
    for worker, seconds in enumerate((0.3, 0.3, 0.3, 0.6)):
        emulated.add(timings(worker, seconds), 4)
    assert emulated.speeds() == {}


def test_a_worker_that_is_not_heard_holds_up_nobody():
    measured = Measurements(CPU)
    measured.add(timings(0, 0.3), 4)
    measured.add(timings(0, 0.3), 4)
    assert measured.costs() is not None


def test_what_a_step_costs_beside_its_actions_is_measured():
    measured = Measurements(EMULATED)
    for duration_s in (1.1, 1.3, 1.2):
        measured.add_step(step(duration_s, 1.0))
    measured.add_step(step(9.0, 8.0, attempt=2))  # its earlier attempt is in it
    measured.add_step(step(9.0, 1.0))  # of a worker that mostly waits
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
