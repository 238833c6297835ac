"""What a run's log tells the planner: costs, speeds, how far predictions are off."""

from pathlib import Path

import msgspec
import pytest

from elaswave.config.cluster import base_level, device_of, shape_of
from elaswave.config.load import load_config
from elaswave.config.presets import model_shape
from elaswave.config.schema import Config
from elaswave.errors import RunFolderError
from elaswave.observability.events import (
    AnyEvent,
    LayoutChosen,
    RunStarted,
    StepCommitted,
    TimingsMeasured,
)
from elaswave.observability.run_costs import read_run_costs, run_costs
from elaswave.planning.costs.profiled import ActionTiming
from elaswave.planning.programs.layout import make_layout

LAYERS = (3, 3)


def configuration(*overrides: str) -> Config:
    return load_config(None, ["layout.widths=[2,2]", f"layout.layers={list(LAYERS)}", *overrides])


def timing(worker: int, kind: str, seconds: float) -> ActionTiming:
    stage = worker // 2
    return ActionTiming(
        worker=worker,
        stage=stage,
        start=3 * stage,
        stop=3 * stage + 3,
        kind=kind,  # type: ignore[arg-type]
        seconds=seconds,
        count=4,
    )


def log_of(
    config: Config, *, num_steps: int = 8, step_s: float = 1.0, timings: list[TimingsMeasured] | None = None
) -> list[AnyEvent]:
    layout = make_layout(
        widths=config.widths, layers_per_stage=config.layers_per_stage, num_microbatches=config.batch.num_microbatches
    )
    steps: list[AnyEvent] = [
        StepCommitted(
            step=step,
            generation=0,
            attempt=1,
            loss=5.0,
            grad_norm=1.0,
            lr=1e-3,
            tokens_per_s=1.0,
            duration_s=step_s,
            phases_s={"run": 0.9 * step_s, "reduce": 0.1 * step_s},
        )
        for step in range(1, num_steps + 1)
    ]
    started = RunStarted(version="0", total_steps=num_steps)
    chosen = LayoutChosen(
        generation=0,
        layout=layout,
        reason="begins",
        first_step=1,
        layer_parameters=[10, *[20] * config.model.num_layers, 30],
    )
    return [started, chosen, *steps, *(timings or [])]


def report(step: int, slow: float = 1.0) -> TimingsMeasured:
    """Stage 0 needs 30 ms forward, stage 1 60 ms, backwards twice that; worker 3 is slower."""
    return TimingsMeasured(
        step=step,
        timings=[
            timing(worker, kind, seconds * (slow if worker == 3 else 1.0))
            for worker in range(4)
            for kind, seconds in (("F", 0.03 * (1 + worker // 2)), ("B", 0.06 * (1 + worker // 2)))
        ],
    )


def test_costs_and_speeds_come_from_the_timings() -> None:
    config = configuration()
    found = run_costs(config, log_of(config, timings=[report(5, 1.25), report(6, 1.25)]))
    assert found.num_reports == 2
    assert found.costs.between("forward_s", 0, 3) == pytest.approx(0.03)
    assert found.costs.between("forward_s", 3, 6) == pytest.approx(0.06)
    assert found.costs.between("busy_s", 3, 6) == pytest.approx(0.18)
    assert found.cluster.speed.tolist() == pytest.approx([1, 1, 1, 0.8])
    assert found.costs.overhead_s(found.layout.stages) == pytest.approx(0.1)
    assert found.costs.layers[0].parameter_bytes == 40 and found.costs.layers[5].optimizer_bytes == 240
    assert found.tokens_per_microbatch == 8 * 64
    # 8 micro-batches over 2 workers of stage 1 at 0.18 s each, of which one at 4/5 of the speed, and stage 0's part.
    assert 4 * 0.18 / 0.8 < found.predicted_step_s < 4 * 0.18 / 0.8 + 0.09 + 0.1 + 0.2
    assert found.prediction_error == pytest.approx(1.0 - found.predicted_step_s)


def test_the_first_steps_count_only_where_there_is_nothing_else() -> None:
    config = configuration()
    cold = msgspec.structs.replace(
        report(2), timings=[msgspec.structs.replace(each, seconds=9.0) for each in report(2).timings]
    )
    assert run_costs(config, log_of(config, timings=[cold, report(4)])).costs.between("forward_s", 0, 3) < 0.1
    assert run_costs(config, log_of(config, timings=[cold])).costs.between("forward_s", 0, 3) == pytest.approx(9)


def test_without_timings_the_description_is_scaled_to_the_steps() -> None:
    config = configuration("optimizer.name=sgd", "elastic.consistency=scaled")
    found = run_costs(config, log_of(config, step_s=2.0))
    assert found.num_reports == 0
    assert found.predicted_step_s == pytest.approx(2.0)
    assert found.prediction_error == pytest.approx(0.0)
    assert "scaled to the median of 5 measured steps" in found.costs.source
    assert found.costs.layers[0].optimizer_bytes == 40 and found.costs.layers[0].accumulator_bytes == 40


def test_only_the_latest_process_counts() -> None:
    config = configuration()
    log = [*log_of(config, step_s=9.0, timings=[report(5, 2.0)]), *log_of(config, timings=[report(5)])]
    found = run_costs(config, log)
    assert found.cluster.speed.tolist() == pytest.approx([1, 1, 1, 1])
    assert found.step_s == (1.0,) * 5


def test_emulated_devices_cost_what_is_described() -> None:
    config = configuration(
        "device.kind=emulated", "device.model=gpt2-small", "model.num_layers=12", "layout.layers=[7,7]"
    )
    wide = [msgspec.structs.replace(each, start=7 * each.stage, stop=7 * each.stage + 7) for each in report(5).timings]
    found = run_costs(config, log_of(config, timings=[TimingsMeasured(step=5, timings=wide)]))
    assert found.costs.source.startswith("analytic: gpt2-small")
    assert found.costs.step_overhead_s == pytest.approx(0.1)


def test_the_layout_in_force_has_a_schedule_and_steps_of_its_own() -> None:
    config = configuration()
    started, chosen, *steps = log_of(config, step_s=9.0)
    assert isinstance(chosen, LayoutChosen)
    change = msgspec.structs.replace(chosen, change=1, first_step=9, schedule="zero-bubble", reason="better")
    later = [msgspec.structs.replace(step, step=step.step + 8, duration_s=1.0) for step in steps[:4]]
    found = run_costs(config, [started, chosen, *steps, change, *later])
    assert found.schedule == "zero-bubble" and found.knows_durations
    assert found.step_s == (1.0,) * 4
    before = run_costs(config, [started, chosen, *steps])
    assert before.schedule == "1f1b" and not before.knows_durations
    assert before.step_s == (9.0,) * 5


def test_levels_and_memory_in_force_are_those_of_the_layout() -> None:
    config = configuration(
        "device.kind=emulated", "device.model=gpt2-small", "model.num_layers=12", "layout.layers=[7,7]"
    )
    wide = [msgspec.structs.replace(each, start=7 * each.stage, stop=7 * each.stage + 7) for each in report(5).timings]
    started, chosen, *steps = log_of(config, timings=[TimingsMeasured(step=5, timings=wide)])
    assert isinstance(chosen, LayoutChosen)
    plain = run_costs(config, [started, chosen, *steps])
    top, base = len(device_of(config).levels) - 1, base_level(config)
    assert plain.levels == dict.fromkeys(chosen.layout.workers, base) and top > base
    lifted = msgspec.structs.replace(chosen, levels=dict.fromkeys(chosen.layout.workers, top))
    assert run_costs(config, [started, lifted, *steps]).predicted_step_s < 0.99 * plain.predicted_step_s
    held_back = msgspec.structs.replace(chosen, in_flight={0: 1, 1: 1})
    assert (
        run_costs(config, [started, held_back, *steps]).predicted_step_s > 1.04 * plain.predicted_step_s
    )  # of which overhead is most


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_run_that_has_hardly_begun(num_steps: int) -> None:
    config = configuration()
    with pytest.raises(RunFolderError, match="the run has not run 4 steps yet, so nothing is known of its costs"):
        run_costs(config, log_of(config, num_steps=num_steps))
    with pytest.raises(RunFolderError, match="has not run 4 steps"):
        run_costs(config, [])


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        read_run_costs(tmp_path / "nowhere")


def test_the_shape_of_a_run() -> None:
    gpt = shape_of(configuration())
    assert (gpt.family, gpt.num_layers, gpt.intermediate_size, gpt.vocab_size) == ("gpt", 4, 512, 256)
    llama = shape_of(
        configuration(
            "model.family=llama", "model.hidden_size=4096", "model.num_heads=32", "model.intermediate_size=11008"
        )
    )
    assert llama.block_parameters == model_shape("llama-2-7b").block_parameters
    assert shape_of(configuration("model.family=llama", "model.num_kv_heads=2")).num_kv_heads == 2
