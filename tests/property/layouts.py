"""Hypothesis strategies for layouts, shared by the property tests of planning and of recovery."""

from hypothesis import assume
from hypothesis import strategies as st

from elaswave.planning.programs.layout import make_layout
from elaswave.types import Hop, Layout, Stage

widths_of_stages = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@st.composite
def regular_layouts(draw):
    widths = draw(widths_of_stages)
    layers = draw(st.lists(st.integers(1, 3), min_size=len(widths), max_size=len(widths)))
    num_microbatches = draw(st.integers(max(widths), 10))
    return make_layout(widths=widths, layers_per_stage=layers, num_microbatches=num_microbatches)


@st.composite
def irregular_layouts(draw):
    """Any worker of each stage may get any micro-batch, ids have gaps, and neighbouring stages may share layers."""
    widths = draw(widths_of_stages)
    ids = draw(st.permutations(range(2 * sum(widths))))
    stages = []
    start = stop = 0
    for width in widths:
        start = max(start + 1, stop - draw(st.integers(0, 1))) if stages else 0
        stop = max(stop, start) + draw(st.integers(1, 3))
        stages.append(Stage(start=start, stop=stop, workers=tuple(sorted(ids[:width]))))
        ids = ids[width:]
    routes = []
    for _ in range(draw(st.integers(1, 8))):
        route = []
        first = 0
        for index, stage in enumerate(stages):
            # The cut lies anywhere in the layers that this stage shares with the next one.
            lowest = max(stages[index + 1].start, first + 1) if index + 1 < len(stages) else stage.stop
            last = draw(st.integers(lowest, stage.stop))
            route.append(Hop(draw(st.sampled_from(stage.workers)), index, first, last))
            first = last
        routes.append(tuple(route))
    return Layout(stages=tuple(stages), routes=tuple(routes))


@st.composite
def layouts_of_chains(draw):
    """Pipelines of different depth in one layout: each micro-batch passes the stages of one of them."""
    num_layers = draw(st.integers(1, 6))
    chains = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.sets(st.integers(1, num_layers - 1))) if num_layers > 1 else set()
        bounds = [0, *sorted(cuts), num_layers]
        chains.append([(start, stop) for start, stop in zip(bounds, bounds[1:])])
    pieces = sorted((*piece, chain) for chain, each in enumerate(chains) for piece in each)
    assume(all(before[1] <= after[1] for before, after in zip(pieces, pieces[1:])))
    ids = draw(st.permutations(range(2 * len(pieces))))
    stages = []
    for start, stop, _ in pieces:
        width = draw(st.integers(1, 2)) if len(ids) > len(pieces) else 1
        stages.append(Stage(start=start, stop=stop, workers=tuple(sorted(ids[:width]))))
        ids = ids[width:]
    routes = []
    for _ in range(draw(st.integers(1, 8))):
        chain = draw(st.integers(0, len(chains) - 1))
        routes.append(
            tuple(
                Hop(draw(st.sampled_from(stage.workers)), index, stage.start, stage.stop)
                for index, (stage, piece) in enumerate(zip(stages, pieces))
                if piece[2] == chain
            )
        )
    return Layout(stages=tuple(stages), routes=tuple(routes))


layouts = st.one_of(regular_layouts(), irregular_layouts(), layouts_of_chains())
