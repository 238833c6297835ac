"""Layouts beyond what a configuration can ask for, and every schedule: the same bits as one worker alone."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.crew import Training, train

from elaswave.planning.costs.schedules import SCHEDULES, splits_backwards
from elaswave.planning.programs.layout import make_layout
from elaswave.types import Hop, Layout, Stage

NUM_MICROBATCHES = 5

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model.dropout": 0.1},
    "llama in bfloat16": {"model.family": "llama", "model.dtype": "bfloat16", "model.recompute": True},
}


def route(*hops: tuple[int, int, int, int]) -> tuple[Hop, ...]:
    return tuple(Hop(*hop) for hop in hops)


def shared_boundary() -> Layout:
    """Layer 2 of 4 is in both stages, and worker 1 never gets it; worker 4 does nothing but hold."""
    stages = (Stage(start=0, stop=3, workers=(0, 1)), Stage(start=2, stop=4, workers=(2, 3, 4)))
    early, late = ((0, 0, 0, 2), (2, 1, 2, 4)), ((0, 0, 0, 3), (3, 1, 3, 4))
    other = ((1, 0, 0, 2), (3, 1, 2, 4))
    return Layout(stages=stages, routes=tuple(route(*hops) for hops in (early, late, other, late, other)))


def pipelines_of_unequal_depth() -> Layout:
    """Two pipelines in one layout: workers 0 and 2 in two stages, workers 1, 3 and 4 in three."""
    stages = (
        Stage(start=0, stop=1, workers=(1,)),
        Stage(start=0, stop=2, workers=(0,)),
        Stage(start=1, stop=3, workers=(3,)),
        Stage(start=2, stop=4, workers=(2,)),
        Stage(start=3, stop=4, workers=(4,)),
    )
    short, long = ((0, 1, 0, 2), (2, 3, 2, 4)), ((1, 0, 0, 1), (3, 2, 1, 3), (4, 4, 3, 4))
    return Layout(stages=stages, routes=tuple(route(*hops) for hops in (short, long, short, long, long)))


def regular(*widths: int, layers: tuple[int, ...]) -> Layout:
    return make_layout(widths=widths, layers_per_stage=layers, num_microbatches=NUM_MICROBATCHES)


LAYOUTS: dict[str, Layout] = {
    "two stages": regular(1, 1, layers=(2, 2)),
    "four stages": regular(1, 1, 1, 1, layers=(1, 1, 1, 1)),
    "unequal widths": regular(2, 1, layers=(3, 1)),
    "shared boundary": shared_boundary(),
    "unequal depths": pipelines_of_unequal_depth(),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Layout, str], Training]:
    folder = tmp_path_factory.mktemp("text")

    @functools.cache
    def of(model: str, layout: Layout, schedule: str) -> Training:
        return train(layout, folder, MODELS[model] | {"layout.schedule": schedule})

    return of


@pytest.mark.parametrize(
    ("model", "name", "schedule"),
    [
        pytest.param(
            model, name, schedule, marks=() if model == "gpt" or (index - place) % 4 == 0 else pytest.mark.slow
        )  # of the other model each layout and each schedule once
        for model in MODELS
        for index, name in enumerate(LAYOUTS)
        for place, schedule in enumerate(SCHEDULES)
    ],
)
def test_neither_layout_nor_schedule_shows(
    trained: Callable[[str, Layout, str], Training], model: str, name: str, schedule: str
) -> None:
    alone = trained(model, regular(1, layers=(4,)), "1f1b")
    found = trained(model, LAYOUTS[name], schedule)
    assert found.losses == alone.losses
    assert found.digests == alone.digests
    assert found.followers_digests == alone.digests
    kinds = {action.kind for program in found.programs.values() for action in program}
    assert kinds == ({"F", "I", "W"} if splits_backwards(schedule) else {"F", "B"})
    assert found.ran == {worker: list(map(str, program)) for worker, program in found.programs.items()}


def test_one_worker_alone_may_split_its_backwards_too(trained: Callable[[str, Layout, str], Training]) -> None:
    whole, split = (trained("gpt", regular(1, layers=(4,)), schedule) for schedule in ("1f1b", "zero-bubble"))
    assert (split.losses, split.digests) == (whole.losses, whole.digests)


def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    """So the comparisons above can fail."""
    layout = regular(1, layers=(4,))
    one, other = (train(layout, tmp_path, {"run.seed": seed}, steps=1) for seed in (1, 2))
    assert one.losses != other.losses and one.digests != other.digests
