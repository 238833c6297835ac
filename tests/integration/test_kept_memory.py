"""What the memory model counts for going on with an interrupted step, against the tensors that workers keep for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.crew import Machine, train
from tests.integration.jobs import small_config

from elaswave.engine.in_flight import Reached
from elaswave.planning.costs.layers import Costs, LayerCosts, MemoryModel
from elaswave.planning.programs.layout import make_layout

NUM_MICROBATCHES = 8
STAGES = 3


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Reached):
        yield from value.gradients
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_of(each)


class Kept:
    """Looks before every action of every worker at what it keeps of micro-batches."""

    def __init__(self) -> None:
        self.most_bytes: dict[int, int] = {}

    def __call__(self, machine: Machine) -> None:
        engine: Any = machine.engine
        run = engine.run

        def look_and_run(*arguments: Any, **options: Any) -> Any:
            in_flight = engine.compute._in_flight_microbatches
            fronts = [*in_flight._forwards.values(), *in_flight._backwards.values()]
            storages = {
                tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
                for front in fronts
                for tensor in tensors_of(front.value)
            }
            self.most_bytes[machine.worker] = max(self.most_bytes.get(machine.worker, 0), sum(storages.values()))
            return run(*arguments, **options)

        engine.run = look_and_run


@pytest.mark.parametrize("recompute", [False, True])
def test_what_workers_keep_is_what_the_model_counts(tmp_path: Path, recompute: bool) -> None:
    settings = {"batch.num_microbatches": NUM_MICROBATCHES, "model.recompute": recompute, "elastic.num_followers": 0}
    config = small_config(settings)
    layout = make_layout(widths=[1] * STAGES, layers_per_stage=[1, 2, 1], num_microbatches=NUM_MICROBATCHES)
    kept = Kept()
    train(layout, tmp_path, settings, steps=1, change=kept)
    rows = config.batch.microbatch_size * config.model.context_length
    border = float(rows * config.model.hidden_size * 4)
    layer = LayerCosts(
        forward_s=1.0,
        input_gradient_s=1.0,
        weight_gradient_s=1.0,
        parameter_bytes=0.0,
        accumulator_bytes=0.0,
        optimizer_bytes=0.0,
        activation_bytes=0.0,
        boundary_bytes=border,
    )
    model = MemoryModel.of_width(Costs(layers=(layer,) * 4), 1, copies=1)
    for stage, worker in zip(layout.stages, layout.workers, strict=True):
        in_flight = STAGES - layout.stage_of(worker)
        assert kept.most_bytes[worker] == model.parts(stage.start, stage.stop, in_flight).kept, worker
