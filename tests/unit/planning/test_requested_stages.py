"""The stages that a person asks for: who works in them, and what cannot be."""

import pytest

from elaswave.errors import ConfigError
from elaswave.planning.search.requested_stages import requested_stages
from elaswave.types import Hop, Layout, Stage


def layout(*stages: tuple[int, int, tuple[int, ...]], idle: tuple[int, ...] = ()) -> Layout:
    made = tuple(Stage(start=start, stop=stop, workers=workers) for start, stop, workers in stages)
    route = tuple(Hop(stage.workers[0], index, stage.start, stage.stop) for index, stage in enumerate(made))
    return Layout(stages=made, routes=(route,), idle=idle)


TWO = layout((0, 3, (0, 1)), (3, 6, (2, 3)))


def shown(stages: tuple[Stage, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(stage.start, stage.stop, stage.workers) for stage in stages]


def test_layers_move_and_workers_stay() -> None:
    assert shown(requested_stages(TWO, (2, 4), None)) == [(0, 2, (0, 1)), (2, 6, (2, 3))]


def test_workers_move_only_where_widths_ask_for_it() -> None:
    assert shown(requested_stages(TWO, None, (1, 3))) == [(0, 3, (0,)), (3, 6, (1, 2, 3))]
    three = layout((0, 2, (0, 5)), (2, 4, (1, 4)), (4, 6, (2, 3)))
    assert shown(requested_stages(three, None, (1, 4, 1))) == [(0, 2, (0,)), (2, 4, (1, 3, 4, 5)), (4, 6, (2,))]


def test_another_number_of_stages_divides_the_workers_anew() -> None:
    assert shown(requested_stages(TWO, (1, 2, 3), (1, 1, 2))) == [(0, 1, (0,)), (1, 3, (1,)), (3, 6, (2, 3))]
    assert shown(requested_stages(TWO, (6,), (4,))) == [(0, 6, (0, 1, 2, 3))]


def test_idle_workers_are_given_work_last() -> None:
    present = layout((0, 3, (0, 5)), (3, 6, (2,)), idle=(1, 4))
    assert shown(requested_stages(present, None, (2, 2))) == [(0, 3, (0, 5)), (3, 6, (1, 2))]
    assert shown(requested_stages(present, None, (1, 2))) == [(0, 3, (0,)), (3, 6, (2, 5))]


@pytest.mark.parametrize(
    ("present", "layers", "widths", "problems"),
    [
        (TWO, (3, 5), None, ["--layers adds up to 8, but the model has 6 layers"]),
        (TWO, None, (1, 2), ["--widths adds up to 3, but the job has 4 members"]),
        (TWO, None, (3, 2), ["--widths adds up to 5, but the job has 4 members"]),
        (TWO, (6,), None, ["--layers has 1 stages and the layout 2: give --widths too"]),
        (TWO, None, (4,), ["--widths has 1 stages and the layout 2: give --layers too"]),
        (TWO, (1, 5), (1, 1, 2), ["--layers has 2 stages and --widths 3: give one number of stages"]),
        (
            layout((0, 4, (0,)), (3, 6, (1,))),
            None,
            (1, 1),
            ["stages of the layout 2x1 share layers: give --layers too"],
        ),
        (
            layout((0, 6, (0, 1)), idle=(2,)),
            (5,),
            (4,),
            [
                "--layers adds up to 5, but the model has 6 layers",
                "--widths adds up to 4, but the job has 3 members, 1 of them idle",
            ],
        ),
        (layout((0, 6, (0, 1)), idle=(2,)), None, (1,), ["adds up to 1, but the job has 3 members, 1 of them idle"]),
    ],
)
def test_what_cannot_be_is_refused_with_every_problem(present, layers, widths, problems) -> None:
    with pytest.raises(ConfigError) as error:
        requested_stages(present, layers, widths)
    assert len(error.value.problems) == len(problems)
    for found, expected in zip(error.value.problems, problems):
        assert expected in found
