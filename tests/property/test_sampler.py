"""The sampler: exact permutations, wrapping, purity, and orders that look random."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import elaswave
from elaswave.data.samples import MixedSampler, Sampler, Source, choose_source, permuted, sample_order, share_units

seeds = st.integers(0, 2**63)
passes = st.integers(0, 10**6)


@given(st.integers(1, 3000), seeds, passes)
def test_a_pass_is_a_permutation(num_samples: int, seed: int, data_pass: int):
    order = [permuted(position, num_samples, seed, data_pass) for position in range(num_samples)]
    assert sorted(order) == list(range(num_samples))


@given(st.integers(1, 2**62), seeds, passes, st.data())
def test_single_positions_of_huge_passes(num_samples: int, seed: int, data_pass: int, data: st.DataObject):
    positions = data.draw(st.sets(st.integers(0, num_samples - 1), min_size=1, max_size=20))
    found = {permuted(position, num_samples, seed, data_pass) for position in positions}
    assert len(found) == len(positions)
    assert all(0 <= sample < num_samples for sample in found)


@given(st.integers(1, 200), seeds, st.integers(1, 9), st.integers(1, 9))
def test_every_sample_once_per_pass_and_the_batch_wraps(
    num_samples: int, seed: int, samples_per_microbatch: int, num_microbatches: int
):
    sampler = Sampler(seed, num_samples, samples_per_microbatch, num_microbatches)
    per_step = samples_per_microbatch * num_microbatches
    num_steps = -(-3 * num_samples // per_step)
    stream = [
        sample
        for step in range(1, num_steps + 1)
        for microbatch in range(num_microbatches)
        for sample in sampler.microbatch(step, microbatch)
    ]
    assert len(stream) == num_steps * per_step
    for data_pass in range(3):
        samples = stream[data_pass * num_samples : (data_pass + 1) * num_samples]
        assert sorted(samples) == list(range(num_samples))
        assert samples == [permuted(p, num_samples, seed, data_pass) for p in range(num_samples)]


@given(st.integers(1, 500), seeds, st.integers(1, 9), st.integers(1, 9), st.integers(0, 1000))
def test_the_cursor_points_at_the_next_sample(
    num_samples: int, seed: int, samples_per_microbatch: int, num_microbatches: int, step: int
):
    sampler = Sampler(seed, num_samples, samples_per_microbatch, num_microbatches)
    data_pass, position = sampler.cursor(step)
    assert data_pass * num_samples + position == step * samples_per_microbatch * num_microbatches
    assert sampler.microbatch(step + 1, 0)[0] == permuted(position, num_samples, seed, data_pass)


@given(seeds, st.randoms(use_true_random=False))
def test_a_micro_batch_does_not_depend_on_what_was_asked_before(seed: int, order: random.Random):
    wanted = list(itertools.product(range(1, 9), range(4)))
    expected = {key: Sampler(seed, 100, 8, 4).microbatch(*key) for key in wanted}
    order.shuffle(wanted)
    sampler = Sampler(seed, 100, 8, 4)
    assert {key: sampler.microbatch(*key) for key in wanted} == expected


def test_the_split_into_micro_batches_does_not_show_in_the_global_batch():
    coarse, fine = Sampler(5, 1000, 8, 4), Sampler(5, 1000, 2, 16)
    for step in (1, 2, 50):
        a = [sample for m in range(4) for sample in coarse.microbatch(step, m)]
        b = [sample for m in range(16) for sample in fine.microbatch(step, m)]
        assert a == b


def test_the_order_is_part_of_the_format():
    # Checkpoints name a position in this order: another order would resume with other samples.
    assert Sampler(0, 1000, 4, 2).microbatch(1, 0) == [492, 310, 715, 459]
    assert Sampler(1234, 6568, 4, 2).microbatch(900, 1) == [5986, 1394, 2697, 6129]


def test_the_order_is_public():
    assert sample_order(1234, 6568, 900, 1, 4, 2) == [5986, 1394, 2697, 6129]
    assert elaswave.sample_order is sample_order
    with pytest.raises(ValueError, match="num_samples is 0"):
        sample_order(0, 0, 1, 0, 1, 1)


@given(st.integers(1, 50), seeds, st.integers(1, 5), st.integers(1, 5), st.integers(1, 40))
def test_a_draw_says_where_its_sample_stands(
    num_samples: int, seed: int, samples_per_microbatch: int, num_microbatches: int, step: int
):
    sampler = Sampler(seed, num_samples, samples_per_microbatch, num_microbatches)
    for draw in sampler.draws(step, num_microbatches - 1):
        assert draw.sample == permuted(draw.position, num_samples, seed, draw.data_pass)
    after = sampler.cursor(step)
    assert (draw.data_pass * num_samples + draw.position + 1) == after[0] * num_samples + after[1]


weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


class TestSeveralSources:
    @given(weights, st.integers(0, 10**12), st.integers(1, 300))
    def test_shares_are_kept_over_every_stretch(self, weights: list[float], start: int, length: int):
        units = share_units(weights)
        counts = Counter(choose_source(number, units)[0] for number in range(start, start + length))
        for index, unit in enumerate(units):
            assert abs(counts[index] - length * unit / sum(units)) <= index + 2

    @given(weights)
    def test_each_source_is_counted_without_a_gap(self, weights: list[float]):
        units = share_units(weights)
        following: Counter[int] = Counter()
        for number in range(400):
            index, its_number = choose_source(number, units)
            assert its_number == following[index]
            following[index] += 1

    @given(st.lists(st.integers(1, 30), min_size=1, max_size=4), seeds, st.data())
    def test_each_source_has_passes_of_its_own(self, sizes: list[int], seed: int, data: st.DataObject):
        sources = [Source(f"s{index}", size, data.draw(st.floats(0.1, 9.0))) for index, size in enumerate(sizes)]
        sampler = MixedSampler(seed, sources, 4, 5)
        draws = [draw for step in range(1, 20) for m in range(5) for draw in sampler.draws(step, m)]
        assert [draw.sample for draw in draws[20:24]] == sampler.microbatch(2, 0)
        start = 0
        for source in sources:
            stop = start + source.num_samples
            own = [draw for draw in draws if start <= draw.sample < stop]
            assert [draw.data_pass * source.num_samples + draw.position - start for draw in own] == list(
                range(len(own))
            )
            for data_pass in range(len(own) // source.num_samples):
                samples = [draw.sample for draw in own if draw.data_pass == data_pass]
                assert sorted(samples) == list(range(start, stop))
            start = stop
        assert len({(draw.data_pass, draw.position) for draw in draws}) == len(draws)  # what randomness is keyed by

    def test_sources_of_one_length_have_orders_of_their_own(self):
        sampler = MixedSampler(3, [Source("a", 100, 1.0), Source("b", 100, 1.0)], 200, 1)
        samples = sampler.microbatch(1, 0)
        a, b = ([sample % 100 for sample in samples if (sample < 100) is first] for first in (True, False))
        assert sorted(a) == sorted(b) == list(range(100))
        assert sum(x == y for x, y in zip(a, b)) < 12

    @pytest.mark.parametrize("source", [Source("a", 0, 1.0), Source("a", 1, 0.0), Source("a", 1, float("inf"))])
    def test_impossible_sources(self, source: Source):
        with pytest.raises(ValueError, match="source a has . samples and weight .*: it needs one sample"):
            MixedSampler(0, [source, Source("b", 1, 1.0)], 1, 1)


class TestLooksRandom:
    """Chi-squared statistics against a uniform choice; fixed seeds, so a failure is a change of the permutation."""

    @pytest.mark.parametrize("num_samples", [2, 3, 5, 10, 37])
    def test_every_position_meets_every_sample_equally_often(self, num_samples: int):
        num_orders = 200 * num_samples
        counts = Counter(
            (position, permuted(position, num_samples, seed=7, data_pass=data_pass))
            for data_pass in range(num_orders)
            for position in range(num_samples)
        )
        expected = num_orders / num_samples
        statistic = sum((counts[cell] - expected) ** 2 / expected for cell in all_cells(num_samples))
        freedom = (num_samples - 1) ** 2
        assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5 + 5

    @pytest.mark.parametrize("num_samples", [5, 10, 37])
    def test_neighbours_are_no_closer_than_others(self, num_samples: int):
        num_orders = 4000
        differences = Counter()
        for data_pass in range(num_orders):
            order = [permuted(position, num_samples, 8, data_pass) for position in range(num_samples)]
            differences.update((b - a) % num_samples for a, b in itertools.pairwise(order))
        assert differences[0] == 0
        expected = num_orders  # (num_samples - 1) pairs over (num_samples - 1) differences
        statistic = sum((differences[d] - expected) ** 2 / expected for d in range(1, num_samples))
        assert statistic < (num_samples - 2) + 6 * (2 * num_samples) ** 0.5

    def test_a_large_order_is_spread_evenly_over_the_file(self):
        num_samples, num_bins = 1_000_003, 64
        counts = Counter(permuted(position, num_samples, 9, 0) * num_bins // num_samples for position in range(6400))
        statistic = sum((counts[b] - 100) ** 2 / 100 for b in range(num_bins))
        assert statistic < 63 + 5 * 126**0.5

    def test_seeds_and_passes_have_orders_of_their_own(self):
        orders = {
            (seed, data_pass): tuple(permuted(p, 100, seed, data_pass) for p in range(100))
            for seed in range(8)
            for data_pass in range(8)
        }
        for (_, a), (_, b) in itertools.combinations(orders.items(), 2):
            assert sum(x == y for x, y in zip(a, b)) < 12  # one coincidence is expected


def all_cells(num_samples: int) -> itertools.product:
    return itertools.product(range(num_samples), repeat=2)


class TestRefusals:
    def test_counts_below_one_are_all_named(self):
        with pytest.raises(ValueError, match="num_samples is 0, num_microbatches is -1"):
            Sampler(0, 0, 1, -1)

    @pytest.mark.parametrize("step, microbatch", [(0, 0), (1, -1), (1, 4)])
    def test_steps_and_micro_batches_outside_their_range(self, step: int, microbatch: int):
        with pytest.raises(ValueError, match=f"step {step}, micro-batch {microbatch}: .* from 0 to 3"):
            Sampler(0, 10, 2, 4).microbatch(step, microbatch)

    @pytest.mark.parametrize("position", [-1, 10])
    def test_positions_outside_the_pass(self, position: int):
        with pytest.raises(ValueError, match=rf"position {position} is outside \[0, 10\)"):
            permuted(position, 10, 0, 0)
