"""Exact means of losses and metrics."""

import itertools
import math
import random
from fractions import Fraction

import pytest

from elaswave.protocol.step.ballot import AUX_LOSS, MetricSum, Scores, add_words, means_of, num_score_words, score_words

NUM_METRICS, SLOTS = 2, 4


def merged(scores):
    words = [score_words(each, SLOTS, NUM_METRICS) for each in scores]
    total = [0] * num_score_words(SLOTS, NUM_METRICS)
    for each in words:
        total = add_words(total, each)
    return means_of(total, SLOTS, SLOTS)


def sum_of(values):
    result = MetricSum()
    for total, count in values:
        result = result.plus(total, count)
    return result


def test_a_mean_is_that_of_rational_numbers_in_any_order_and_grouping():
    source = random.Random(0)
    values = [(source.uniform(-1, 1) * 2.0 ** source.randrange(-60, 60), source.randrange(1, 9)) for _ in range(40)]
    count = sum(count for _, count in values)
    exact = float(sum(Fraction(total) for total, _ in values) / count)
    for seed in range(6):
        random.Random(seed).shuffle(values)
        cuts = [0, seed, 2 * seed + 1, 40]
        parts = [sum_of(values[start:stop]) for start, stop in itertools.pairwise(cuts)]
        scores = [Scores({}, metrics=(part, MetricSum())) for part in parts]
        assert merged(scores).metrics[0] == exact


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**128])
def test_one_bad_value_makes_a_mean_nan(bad):
    scores = [
        Scores({}, metrics=(sum_of([(1.0, 1)]), sum_of([(2.0, 1)]))),
        Scores({}, metrics=(sum_of([(bad, 1)]),) * 2),
    ]
    assert all(map(math.isnan, merged(scores).metrics))


def test_values_near_the_limits_are_added_without_loss():
    large = 2.0**127
    both = sum_of([(large, 1)] * 3), sum_of([(-large, 1)] * 3)
    assert merged([Scores({}, metrics=both)]).metrics == (large, -large)
    assert merged([Scores({}, metrics=(sum_of([(2.0**-160, 1)]), MetricSum()))]).metrics[0] == 2.0**-160


def test_a_metric_of_which_nothing_was_counted_is_nan():
    assert all(map(math.isnan, merged([Scores({})]).metrics))


def test_losses_without_counts_have_the_plain_mean():
    means = merged([Scores({0: 1.0, 2: 3.0}), Scores({1: 2.0, 3: 4.0})])
    assert means.losses == (1.0, 2.0, 3.0, 4.0)
    assert (means.loss, means.scale, means.num_counted, means.aux_loss) == (2.5, 1.0, 0, None)
    assert means.by_name(["a", "b"]).keys() == {"a", "b"}


def test_losses_with_counts_are_divided_by_all_of_them():
    aux = sum_of([(6.0, 1), (4.0, 1)])
    means = merged([Scores({0: 10.0, 2: 30.0}, 7, 2, (), aux), Scores({1: 20.0, 3: 0.0}, 13, 2)])
    assert (means.loss, means.scale, means.count, means.num_counted) == (3.0, 4 / 20, 20, 4)
    assert means.aux_loss == 0.5
    assert means.by_name(["a", "b"])[AUX_LOSS] == 0.5


def test_counts_that_add_up_to_nothing_have_no_mean():
    means = merged([Scores(dict.fromkeys(range(4), 0.0), 0, 4)])
    assert math.isnan(means.loss) and means.scale == 0.0


def test_a_batch_that_has_shrunk_reads_its_first_slots():
    words = score_words(Scores({0: 1.0, 1: 2.0}), SLOTS, NUM_METRICS)
    assert means_of(words, SLOTS, 2).loss == 1.5
