"""The smallest scatter width that is hardly felt."""

from elaswave.planning.costs.layers import Costs, LayerCosts
from elaswave.planning.programs.layout import make_layout
from elaswave.planning.state_moves.target_placement import DEFAULT_SCATTER_WIDTH, smallest_scatter_width

GIB = 2.0**30
LAYER = LayerCosts(
    name="layer",
    forward_s=0.1,
    input_gradient_s=0.1,
    weight_gradient_s=0.1,
    parameter_bytes=2 * GIB,
    accumulator_bytes=8 * GIB,
    optimizer_bytes=12 * GIB,
    activation_bytes=GIB,
    boundary_bytes=0.0,
)
STAGES = make_layout(widths=[8], layers_per_stage=[2], num_microbatches=8).stages


def width(*, overhead_s=0.0, **arguments):
    costs = Costs(layers=(LAYER, LAYER), step_overhead_s=overhead_s)
    return smallest_scatter_width(costs, STAGES, **({"followers": 1, "memory_bytes": 1000 * GIB} | arguments))


def test_a_partner_may_work_a_fiftieth_of_a_step_longer():
    assert [width(overhead_s=overhead_s, step_s=1.0) for overhead_s in (0.0, 0.02, 0.021, 0.06, 0.061)] == [
        1,
        1,
        2,
        3,
        4,
    ]
    assert width(overhead_s=1.0, step_s=1.0) == 7, "all others of the stage"


def test_what_a_partner_takes_over_must_fit():
    # 4 GiB of parameters, 16 of sums, 2 of activations, an eighth of 24 GiB of state twice: 28; its 6 GiB come anew.
    assert [width(memory_bytes=free * GIB, step_s=1.0) for free in (34, 33.9, 31, 30, 29, 28)] == [1, 2, 2, 3, 6, 7]


def test_where_no_times_are_known_the_default_is_the_least():
    assert width() == DEFAULT_SCATTER_WIDTH == 2
    assert width(memory_bytes=29 * GIB) == 6
    lone = make_layout(widths=[1, 1], layers_per_stage=[1, 1], num_microbatches=1).stages
    assert smallest_scatter_width(Costs(layers=(LAYER, LAYER)), lone, followers=1, memory_bytes=GIB) == 2
