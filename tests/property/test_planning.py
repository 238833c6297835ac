"""Planning over arbitrary layouts: routes, programs, placement and layer splits, against dumb independent checks."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.programs import parse_programs, print_programs
from tests.property.layouts import layouts, regular_layouts

from elaswave.blocks.placement import holders_of_layers, make_blocks, place_blocks, replica_peers_under
from elaswave.blocks.replica_peers import EVERYBODY
from elaswave.errors import ConfigError, InvalidProgramError
from elaswave.planning.costs.schedules import SCHEDULES, in_flight_bounds
from elaswave.planning.programs.layout import (
    layout_problems,
    make_layout,
    partition_layers,
    peers_of,
    resolve_widths,
    validate_layout,
)
from elaswave.planning.programs.programs import compile_programs
from elaswave.planning.programs.validation import validate_programs
from elaswave.types import Action


def runs_to_the_end(layout, programs, pick):
    """Executes programs one action at a time, choosing the worker at random; the dumbest possible check."""
    needs = {}
    for microbatch, route in enumerate(layout.routes):
        for index, hop in enumerate(route):
            before = route[index - 1].stage if index else None
            after = route[index + 1].stage if index + 1 < len(route) else None
            forward = Action(hop.stage, "F", microbatch)
            needs[forward] = [] if before is None else [Action(before, "F", microbatch)]
            gradient = [] if after is None else [Action(after, "B", microbatch)]
            needs[Action(hop.stage, "B", microbatch)] = needs[Action(hop.stage, "I", microbatch)] = [forward, *gradient]
            needs[Action(hop.stage, "W", microbatch)] = [Action(hop.stage, "I", microbatch)]
    done = set()
    rest = {worker: list(program) for worker, program in programs.items()}
    while True:
        ready = sorted(w for w, program in rest.items() if program and done.issuperset(needs[program[0]]))
        if not ready:
            return not any(rest.values())
        action = rest[pick(ready)].pop(0)
        done.add(action)
        if action.kind == "I":  # as good as a B for the worker that waits for the gradient
            done.add(Action(action.stage, "B", action.microbatch))


@given(layouts)
def test_routes_pass_every_layer_once_on_workers_that_hold_it(layout):
    validate_layout(layout)
    holders = holders_of_layers(layout)
    for route in layout.routes:
        layers = [layer for hop in route for layer in range(hop.start, hop.stop)]
        assert layers == list(range(layout.num_layers))
        assert all(hop.worker in holders[layer] for hop in route for layer in range(hop.start, hop.stop))


@given(regular_layouts())
def test_every_worker_of_a_stage_gets_its_fair_share(layout):
    given_to = Counter(hop.worker for route in layout.routes for hop in route)
    for stage in layout.stages:
        shares = [given_to[worker] for worker in stage.workers]
        assert max(shares) - min(shares) <= 1
        assert min(shares) >= 1


@given(layouts, st.sampled_from(SCHEDULES), st.randoms(use_true_random=False))
def test_programs_are_valid_and_run_to_the_end_in_any_interleaving(layout, schedule, random):
    programs = compile_programs(layout, schedule)
    bounds = in_flight_bounds(layout, schedule)
    validate_programs(layout, programs, max_in_flight=bounds)
    assert sorted(programs) == list(layout.workers)
    assert runs_to_the_end(layout, programs, random.choice)
    assert parse_programs(print_programs(programs)) == programs
    assert compile_programs(layout, schedule) == programs
    for program in programs.values():
        if schedule == "gpipe":
            assert "".join(action.kind for action in program).rstrip("B").strip("F") == ""


@given(layouts, st.sampled_from(["1f1b", "zero-bubble", "zero-bubble-h2"]), st.data())
def test_any_bound_of_at_least_one_is_kept(layout, schedule, data):
    bounds = {worker: data.draw(st.integers(1, 4)) for worker in layout.workers}
    programs = compile_programs(layout, schedule, max_in_flight=bounds)
    validate_programs(layout, programs, max_in_flight=bounds)


@given(layouts, st.sampled_from(SCHEDULES))
def test_forward_only_programs_are_valid(layout, schedule):
    programs = compile_programs(layout, schedule, forward_only=True)
    validate_programs(layout, programs, forward_only=True)
    assert {action.kind for program in programs.values() for action in program} == {"F"}


@given(layouts, st.sampled_from(SCHEDULES), st.data())
def test_a_dropped_doubled_or_moved_action_is_caught(layout, schedule, data):
    programs = {worker: list(program) for worker, program in compile_programs(layout, schedule).items()}
    worker = data.draw(st.sampled_from([worker for worker, program in programs.items() if program]))
    position = data.draw(st.integers(0, len(programs[worker]) - 1))
    action = programs[worker][position]
    mistakes = ["drop", "double", "invent"] + (["move"] if len(programs) > 1 else [])
    mistake = data.draw(st.sampled_from(mistakes))
    if mistake in ("drop", "move"):
        del programs[worker][position]
    if mistake == "double":
        programs[worker].insert(data.draw(st.integers(0, len(programs[worker]))), action)
    if mistake == "invent":
        programs[worker][position] = Action(action.stage, action.kind, action.microbatch + layout.num_microbatches)
    if mistake == "move":
        other = data.draw(st.sampled_from([other for other in programs if other != worker]))
        programs[other].insert(data.draw(st.integers(0, len(programs[other]))), action)
    with pytest.raises(InvalidProgramError, match=r">\S+<"):
        validate_programs(layout, {worker: tuple(program) for worker, program in programs.items()})


@given(layouts, st.sampled_from(SCHEDULES), st.data())
def test_the_validator_agrees_with_execution_on_any_order(layout, schedule, data):
    """Shuffled programs: refused exactly if running them comes to a stop."""
    programs = compile_programs(layout, schedule)
    for worker in data.draw(st.lists(st.sampled_from(sorted(programs)), min_size=1, max_size=3)):
        program = list(programs[worker])
        if len(program) > 1:
            a, b = data.draw(st.tuples(*[st.integers(0, len(program) - 1)] * 2))
            program[a], program[b] = program[b], program[a]
            programs[worker] = tuple(program)
    if runs_to_the_end(layout, programs, min):
        validate_programs(layout, programs)
    else:
        with pytest.raises(InvalidProgramError, match="deadlock"):
            validate_programs(layout, programs)


@given(layouts, st.sampled_from(SCHEDULES))
def test_one_less_than_the_peak_is_refused(layout, schedule):
    programs = compile_programs(layout, schedule)
    for worker, program in programs.items():
        signs = [{"F": 1, "B": -1, "I": 0, "W": -1}[action.kind] for action in program]
        peak = max(itertools.accumulate(signs), default=0)
        bounds = dict.fromkeys(programs, layout.num_microbatches)
        validate_programs(layout, programs, max_in_flight=bounds | {worker: peak})
        if peak:
            with pytest.raises(InvalidProgramError, match=f"number {peak} in flight, at most {peak - 1} fit"):
                validate_programs(layout, programs, max_in_flight=bounds | {worker: peak - 1})


@given(layouts, st.data())
def test_placement(layout, data):
    sizes = data.draw(
        st.lists(st.integers(0, 200), min_size=layout.num_layers, max_size=layout.num_layers), label="layer sizes"
    )
    block_size = data.draw(st.integers(1, 40), label="block size")
    num_followers = data.draw(st.integers(0, 4), label="followers")
    width = data.draw(st.sampled_from((1, 2, 3, EVERYBODY)), label="scatter width")
    hosts = {worker: data.draw(st.sampled_from("abc")) for worker in layout.workers}
    layout = replace(layout, domains=tuple(hosts.items()))
    if len(set(hosts.values())) == len(hosts):  # a host for each: as if they were on one
        hosts = dict.fromkeys(hosts, "")
    blocks = make_blocks(sizes, block_size)
    layout, arguments = layout.with_followers(num_followers), {"scatter_width": width}
    placement = place_blocks(layout, blocks, **arguments)
    assert place_blocks(layout, blocks, **arguments) == placement
    assert len(placement.owner) == len(placement.followers) == len(blocks)

    members_of_layer = holders_of_layers(layout)
    workers = set(layout.workers)
    for block in blocks:
        owner, *followers = placement.holders(block.id)
        members = set(members_of_layer[block.layer])
        assert owner in members
        assert len(followers) == min(num_followers, len(workers) - 1)
        assert len({owner, *followers}) == len(followers) + 1
        assert workers.issuperset(followers)
        for index, follower in enumerate(followers):
            earlier = {owner, *followers[:index]}
            used_hosts = {hosts[worker] for worker in earlier}
            elsewhere = {worker for worker in workers if hosts[worker] not in used_hosts}
            free = elsewhere or workers - earlier
            assert follower in free, "another host comes before the stage"
            preferred = members - earlier
            if index or not elsewhere:  # replica peers on other hosts may be in any stage
                assert follower in (preferred & free or free)
    replica_peers = replica_peers_under(layout, width)
    for owner, followers in zip(placement.owner, placement.followers, strict=True):
        assert not followers or followers[0] in replica_peers[owner]
    sets = {frozenset(placement.holders(block.id)) for block in blocks}
    # A worker may be in several groups only where stages share layers; for each it has further followers of its own.
    num_groups = Counter(worker for members in set(members_of_layer) for worker in members)
    assert len(sets) <= max(1, sum(num_groups[worker] * len(others) for worker, others in replica_peers.items()))


@given(layouts, st.lists(st.integers(0, 200), min_size=12, max_size=12), st.integers(1, 40))
def test_blocks_cover_layers_exactly_once(layout, sizes, block_size):
    blocks = make_blocks(sizes, block_size)
    assert [block.id for block in blocks] == list(range(len(blocks)))
    elements = [(block.layer, element) for block in blocks for element in range(block.start, block.stop)]
    assert elements == [(layer, element) for layer, size in enumerate(sizes) for element in range(size)]
    assert all(0 < block.num_elements <= block_size for block in blocks)


@given(regular_layouts(), st.data())
def test_owners_and_followers_are_balanced(layout, data):
    sizes = data.draw(st.lists(st.integers(0, 400), min_size=layout.num_layers, max_size=layout.num_layers))
    block_size = data.draw(st.integers(1, 40))
    blocks = make_blocks(sizes, block_size)
    placement = place_blocks(layout.with_followers(1), blocks, scatter_width=EVERYBODY)
    for stage in layout.stages:
        owned = dict.fromkeys(stage.workers, 0)
        pairs = dict.fromkeys(itertools.permutations(stage.workers, 2), 0)
        per_layer = Counter()
        for block in blocks:
            if stage.start <= block.layer < stage.stop:
                owner, *followers = placement.holders(block.id)
                owned[owner] += block.num_elements
                if block.num_elements == block_size:
                    per_layer[block.layer, owner] += 1
                if stage.width > 1:
                    pairs[owner, followers[0]] += 1
        assert max(owned.values()) - min(owned.values()) <= block_size
        for layer in range(stage.start, stage.stop):  # interleaved: every layer by itself, too
            counts = [per_layer[layer, worker] for worker in stage.workers]
            assert max(counts) - min(counts) <= 2
        for owner in stage.workers:  # declustered: an owner's blocks are everywhere
            counts = [count for (first, _), count in pairs.items() if first == owner]
            assert max(counts, default=0) - min(counts, default=0) <= 1


@given(layouts, st.integers(0, 3), st.data())
def test_peers_are_symmetric_and_cover_every_exchange(layout, num_followers, data):
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=layout.num_layers, max_size=layout.num_layers))
    blocks = make_blocks(sizes, 10)
    placement = place_blocks(layout.with_followers(num_followers), blocks, scatter_width=EVERYBODY)
    peers = peers_of(layout, placement, blocks)
    assert sorted(peers) == list(layout.workers)
    for worker, others in peers.items():
        assert worker not in others
        assert all(worker in peers[other] for other in others)
    pairs = {(a.worker, b.worker) for route in layout.routes for a, b in itertools.pairwise(route)}
    holders = holders_of_layers(layout)
    for block in blocks:
        owner = placement.owner[block.id]
        pairs |= {(owner, other) for other in (*holders[block.layer], *placement.followers[block.id])}
    expected = {frozenset(pair) for pair in pairs if pair[0] != pair[1]}
    assert {frozenset((a, b)) for a, others in peers.items() for b in others} == expected
    # Without a placement it is enough for any owners inside the stages.
    general = peers_of(layout)
    for route in layout.routes:
        assert all(b.worker in general[a.worker] for a, b in itertools.pairwise(route))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_the_layer_split_is_the_best_of_all(costs, data):
    widths = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=len(costs)))
    split = partition_layers(costs, widths)
    assert len(split) == len(widths)
    assert sum(split) == len(costs)
    assert min(split) >= 1

    def slowest(bounds):
        return max(sum(costs[a:b]) * 6 // width for (a, b), width in zip(itertools.pairwise(bounds), widths))

    ends = itertools.combinations(range(1, len(costs)), len(widths) - 1)
    best = min(slowest((0, *inner, len(costs))) for inner in ends)
    assert slowest((0, *itertools.accumulate(split))) == best
    assert partition_layers([cost / 8 for cost in costs], widths) == split


@given(
    st.one_of(st.none(), st.integers(-1, 5)),
    st.one_of(st.none(), st.integers(-1, 5)),
    st.one_of(st.none(), st.lists(st.integers(-1, 4), max_size=4)),
    st.one_of(st.none(), st.integers(-1, 20)),
)
@settings(max_examples=300)
def test_widths_are_consistent_or_refused(stages, replicas, widths, workers):
    try:
        resolved = resolve_widths(stages, replicas, widths, workers)
    except ConfigError as error:
        assert error.problems
        return
    assert min(resolved) >= 1
    assert workers in (None, sum(resolved))
    assert stages in (None, len(resolved))
    assert replicas is None or set(resolved) == {replicas}
    assert widths is None or tuple(widths) == resolved


@given(
    st.lists(st.integers(-1, 5), max_size=4),
    st.integers(1, 8),
    st.integers(0, 6),
    st.one_of(st.none(), st.lists(st.integers(0, 4), max_size=4)),
)
def test_a_layout_without_problems_can_be_made(widths, num_layers, num_microbatches, layers):
    problems = layout_problems(
        widths, num_layers=num_layers, num_microbatches=num_microbatches, layers_per_stage=layers
    )
    if problems:
        return
    split = layers or partition_layers([1.0] * num_layers, widths)
    layout = make_layout(widths=widths, layers_per_stage=split, num_microbatches=num_microbatches)
    validate_layout(layout)
    assert layout.num_layers == num_layers
