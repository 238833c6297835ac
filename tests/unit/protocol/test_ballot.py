"""The vote: every part of the certificate can fail, and what is judged first."""

import functools
import itertools
import math
import random

import numpy as np
import pytest

from elaswave.blocks.placement import Placement, ReplicaRole, block_keys
from elaswave.blocks.shapes import MAX_EXPONENT, MIN_EXPONENT, next_exponent
from elaswave.hashing import key64
from elaswave.protocol.step.ballot import (
    NOTHING_COUNTED,
    UNKNOWN_MICROBATCH,
    Ballot,
    BufferTensor,
    Expected,
    GridState,
    MetricSum,
    NonFinite,
    Request,
    Scores,
    VoteOutcome,
    VoteShape,
    add_words,
    agreement_keys,
    bits_float,
    coverage_key,
    decode_certificate,
    encode_certificate,
    expected_coverage,
    expected_residency,
    float_bits,
    holder_key,
    loss_key,
    read_verdict,
)

NUM_LAYERS, NUM_MICROBATCHES, NUM_TENSORS, NUM_WORKERS = 3, 4, 2, 3
SHAPE = VoteShape(NUM_MICROBATCHES, NUM_TENSORS)
LAYOUT_HASH = key64("layout") >> 2
MAXIMA = (0.5, 3.0)
GRIDS = GridState(tuple(next_exponent(maximum, 0, NUM_MICROBATCHES) for maximum in MAXIMA), calibrated=True, exact=True)
HASHES = [key64("gradient", block) for block in range(2)]


def residency_key(block, role, worker, version):
    """What one held block counts in the residency sum of a job of two blocks."""
    return int(block_keys(2)[block]) * holder_key(worker, role, version)


def agreement_key(kind, block, step, attempt, *hashes):
    """What one copy counts in the agreement sum, by itself."""
    (key,) = agreement_keys(kind, block_keys(2)[[block]], step, attempt, *(np.array([h], np.uint64) for h in hashes))
    return int(key)


def certificates():
    """What three workers bring to a vote that passes.

    Worker 0 owns block 0 and worker 1 follows it; worker 1 owns block 1, which workers 0 and 2 follow. Micro-batch m
    runs on worker m % 3.
    """
    keys = [agreement_key("gradient", block, 7, 1, value) for block, value in enumerate(HASHES)]
    holds = [[(0, 1), (1, 2)], [(0, 2), (1, 1)], [(1, 2)]]
    agreements = [keys[0] - keys[1], 2 * keys[1] - keys[0], -keys[1]]
    result = []
    for worker in range(NUM_WORKERS):
        ran = range(worker, NUM_MICROBATCHES, NUM_WORKERS)
        residency = sum(residency_key(block, role, worker, 6) for block, role in holds[worker])
        result.append(
            Ballot(
                coverage=sum(coverage_key(layer, m) for layer in range(NUM_LAYERS) for m in ran)
                + sum(map(loss_key, ran)),
                residency=residency,
                agreement=agreements[worker],
                partial_sums=[2**63, 2**62, 2**62][worker],
                next_state=LAYOUT_HASH,
                scores=Scores({m: 2.0 + m for m in ran}),
                square_sums=[[9.0], [16.0], []][worker],
                maxima=[{0: 0.5}, {0: 0.25, 1: 3.0}, {1: 1.0}][worker],
                nonfinite=None,
                request=Request.NONE,
            )
        )
    return result


def expected():
    holds = [(0, 1, 0), (0, 2, 1), (1, 1, 1), (1, 2, 0), (1, 2, 2)]
    residency = sum(residency_key(block, role, worker, 6) for block, role, worker in holds) % 2**64
    coverage = expected_coverage(NUM_LAYERS, NUM_MICROBATCHES)
    return Expected(NUM_WORKERS, coverage, residency, LAYOUT_HASH, NUM_MICROBATCHES)


def merged(votes, seed=0):
    """The vectors of several workers, merged in some order."""
    vectors = [SHAPE.vector_of(vote) for vote in votes]
    random.Random(seed).shuffle(vectors)
    return functools.reduce(SHAPE.merge, vectors)


def verdict_of(votes, *, grids=GRIDS, skip=False, shape=SHAPE, needed=None):
    return read_verdict(merged(votes), shape, needed or expected(), grids, skip_nonfinite=skip)


def changed(worker, **fields):
    """A vote in which one worker brings something else."""
    votes = certificates()
    votes[worker] = votes[worker]._replace(**fields)
    return votes


def test_a_vote_that_holds_commits():
    verdict = verdict_of(certificates())
    assert verdict.outcome is VoteOutcome.COMMIT
    assert verdict.norm == 5.0
    assert verdict.means.losses == (2.0, 3.0, 4.0, 5.0)
    assert verdict.means.scale == 1.0
    assert verdict.loss == 3.5
    assert verdict.grids == GRIDS.exponents
    assert (verdict.request, verdict.failed, verdict.nonfinite) == (Request.NONE, (), None)


def test_the_order_in_which_votes_meet_does_not_matter():
    assert all(merged(certificates(), seed) == merged(certificates()) for seed in range(6))


@pytest.mark.parametrize(
    ("part", "votes"),
    [
        ("voters", certificates()[:2]),
        ("voters", [*certificates(), certificates()[0]]),
        ("coverage", changed(0, coverage=0)),
        ("coverage", changed(1, coverage=2 * certificates()[1].coverage)),
        ("coverage", changed(2, coverage=certificates()[2].coverage - coverage_key(1, 2) + coverage_key(1, 1))),
        ("residency", changed(0, residency=0)),
        ("residency", changed(1, residency=certificates()[1].residency + residency_key(0, 1, 1, 6))),
        ("residency", changed(2, residency=residency_key(1, 2, 2, 5))),
        ("agreement", changed(2, agreement=-agreement_key("gradient", 1, 7, 1, HASHES[1] ^ 1))),
        ("agreement", changed(0, agreement=0)),
        ("memory", changed(1, num_changed=1)),
        ("partial sums", changed(0, partial_sums=2**63 + 2**40)),
        ("partial sums", changed(2, partial_sums=2**62 - 1)),
        ("layout and grids", changed(1, next_state=LAYOUT_HASH + 1)),
        ("layout and grids", changed(1, next_state=LAYOUT_HASH - 1)),
    ],
)  # fmt: skip
def test_every_part_of_the_certificate_can_fail(part, votes):
    verdict = verdict_of(votes)
    assert verdict.outcome is VoteOutcome.REJECT
    assert part in verdict.failed
    assert part in verdict.reason
    assert verdict.grids == GRIDS.exponents
    if len(votes) == NUM_WORKERS:
        assert verdict.failed == (part,)


def test_all_workers_on_the_same_wrong_next_layout_are_rejected():
    votes = [vote._replace(next_state=5) for vote in certificates()]
    assert verdict_of(votes).failed == ("layout and grids",)


def test_nothing_that_failed_is_committed_because_of_a_value_that_is_not_finite():
    votes = changed(0, coverage=0, nonfinite=NonFinite(0, 1))
    assert verdict_of(votes, skip=True).outcome is VoteOutcome.REJECT


@pytest.mark.parametrize("skip", [False, True])
def test_values_that_are_not_finite_end_or_skip_the_step_and_keep_the_grids(skip):
    votes = changed(0, nonfinite=NonFinite(3, 1), scores=Scores({0: math.nan, 3: 5.0}), maxima={0: 1e30})
    verdict = verdict_of(votes, skip=skip)
    assert verdict.outcome is (VoteOutcome.SKIP if skip else VoteOutcome.NON_FINITE)
    assert verdict.nonfinite == NonFinite(3, 1)
    assert verdict.grids == GRIDS.exponents
    assert math.isnan(verdict.norm)
    assert math.isnan(verdict.loss)


def test_infinite_losses_of_both_signs_have_no_mean():
    votes = changed(0, nonfinite=NonFinite(0, NUM_LAYERS), scores=Scores({0: math.inf, 3: -math.inf}))
    assert math.isnan(verdict_of(votes, skip=True).loss)


def test_a_step_whose_gradient_alone_is_not_finite_has_the_loss_nan():
    assert math.isnan(verdict_of(changed(0, nonfinite=NonFinite(1, 1)), skip=True).loss)


def test_the_earliest_microbatch_and_in_it_the_last_layer_are_named():
    votes = certificates()
    found = [NonFinite(2, 2), NonFinite(1, 0), NonFinite(1, 2)]
    votes = [vote._replace(nonfinite=nonfinite) for vote, nonfinite in zip(votes, found, strict=True)]
    assert verdict_of(votes).nonfinite == NonFinite(1, 2)
    unknown = [votes[0]._replace(nonfinite=NonFinite(UNKNOWN_MICROBATCH, 1)), *votes[1:]]
    assert verdict_of(unknown).nonfinite == NonFinite(1, 2)
    alone = changed(0, nonfinite=NonFinite(UNKNOWN_MICROBATCH, 0))
    assert verdict_of(alone, grids=GRIDS._replace(exact=False)).nonfinite == NonFinite(UNKNOWN_MICROBATCH, 0)


def test_not_finite_is_judged_before_overflow_and_before_calibration():
    votes = changed(0, nonfinite=NonFinite(0, 0), maxima={0: 1e30})
    assert verdict_of(votes).outcome is VoteOutcome.NON_FINITE
    assert verdict_of(votes, grids=GRIDS._replace(calibrated=False)).outcome is VoteOutcome.NON_FINITE


def test_sums_that_could_overflow_are_tried_again_on_a_coarser_grid():
    verdict = verdict_of(changed(0, maxima={0: 0.5 * 2.0**20}))
    assert verdict.outcome is VoteOutcome.RETRY
    assert verdict.grids[0] == GRIDS.exponents[0] - 20
    assert verdict.grids[1] == GRIDS.exponents[1]
    again = verdict_of(changed(0, maxima={0: 0.5 * 2.0**20}), grids=GRIDS._replace(exponents=verdict.grids))
    assert again.outcome is VoteOutcome.COMMIT
    assert again.grids == verdict.grids


@pytest.mark.parametrize("shrunk", [40, 43, 150])
def test_gradients_that_have_shrunk_are_tried_again_on_a_finer_grid_and_only_once(shrunk):
    votes = [vote._replace(maxima={0: 0.5 * 2.0**-shrunk, 1: 3.0}) for vote in certificates()]
    verdict = verdict_of(votes)
    assert verdict.outcome is VoteOutcome.RETRY
    assert verdict.reason == "gradients of 1 tensors have fewer than 24 bits on their grids"
    assert verdict.grids == (min(GRIDS.exponents[0] + shrunk, MAX_EXPONENT), GRIDS.exponents[1])
    again = verdict_of(votes, grids=GRIDS._replace(exponents=verdict.grids))
    assert again.outcome is VoteOutcome.COMMIT
    assert again.grids == verdict.grids


def test_sums_of_48_bits_have_their_own_headroom_and_resolution():
    narrow = VoteShape(NUM_MICROBATCHES, NUM_TENSORS, accumulator_bits=48)
    finest = tuple(next_exponent(maximum, 0, NUM_MICROBATCHES, 48) for maximum in MAXIMA)
    assert [wide - each for wide, each in zip(GRIDS.exponents, finest, strict=True)] == [10] * NUM_TENSORS
    grids = GRIDS._replace(exponents=finest)

    def outcome(scale):
        votes = [vote._replace(maxima={0: MAXIMA[0] * scale, 1: MAXIMA[1]}) for vote in certificates()]
        return verdict_of(votes, shape=narrow, grids=grids)

    spare = 46 - 33 - (NUM_MICROBATCHES - 1).bit_length()
    assert outcome(2.0**spare).outcome is VoteOutcome.COMMIT
    grown = outcome(2.0 ** (spare + 1))
    assert grown.outcome is VoteOutcome.RETRY
    assert grown.reason == "sums of 1 tensors could overflow"
    assert grown.grids == (finest[0] - spare - 1, finest[1])
    assert outcome(2.0**-9).outcome is VoteOutcome.COMMIT
    assert outcome(2.0**-10).reason == "gradients of 1 tensors have fewer than 24 bits on their grids"


@pytest.mark.parametrize(("shrunk", "outcome"), [(19, VoteOutcome.COMMIT), (20, VoteOutcome.RETRY)])
def test_a_step_is_tried_again_where_the_largest_gradient_has_fewer_than_24_bits(shrunk, outcome):
    assert next_exponent(0.5, 0, NUM_MICROBATCHES) == 43  # 0.5 has 43 bits and is below 2**0
    votes = [vote._replace(maxima={0: 0.5 * 2.0**-shrunk, 1: 3.0}) for vote in certificates()]
    assert verdict_of(votes).outcome is outcome


def test_gradients_that_vanish_altogether_ask_for_nothing():
    votes = [vote._replace(maxima={1: 3.0}) for vote in certificates()]
    assert (
        verdict_of(votes, grids=GRIDS._replace(exponents=(MIN_EXPONENT, GRIDS.exponents[1]))).outcome
        is VoteOutcome.COMMIT
    )


def test_a_grid_that_cannot_be_finer_asks_for_nothing():
    """With some 10**7 micro-batches even the finest grid has fewer bits: a step must end all the same."""
    shape = VoteShape(2**23, 1)
    vote = certificates()[0]._replace(scores=Scores({}), maxima={0: 1.0}, coverage=0, agreement=0, residency=0)
    vector = shape.vector_of(vote._replace(partial_sums=0))
    needed = Expected(1, 0, 0, LAYOUT_HASH, 4)
    finest = next_exponent(1.0, 0, 2**23)
    assert finest + 1 < 24
    for exponent, outcome in ((finest, VoteOutcome.COMMIT), (finest - 1, VoteOutcome.RETRY)):
        grids = GridState((exponent,), calibrated=True, exact=True)
        assert read_verdict(vector, shape, needed, grids, skip_nonfinite=False).outcome is outcome


def test_one_tensor_that_grows_and_one_that_shrinks_cost_one_attempt():
    votes = [vote._replace(maxima={0: 0.5 * 2.0**20, 1: 3.0 * 2.0**-40}) for vote in certificates()]
    verdict = verdict_of(votes)
    assert verdict.outcome is VoteOutcome.RETRY
    assert "sums of 1 tensors could overflow; gradients of 1 tensors have fewer" in verdict.reason
    assert verdict_of(votes, grids=GRIDS._replace(exponents=verdict.grids)).outcome is VoteOutcome.COMMIT


@pytest.mark.parametrize("growth", [1.0, 2.0**10, 2.0**15])
def test_growth_within_the_headroom_commits_and_moves_the_grid(growth):
    verdict = verdict_of(changed(0, maxima={0: 0.5 * growth}))
    assert verdict.outcome is VoteOutcome.COMMIT
    assert verdict.grids[0] == GRIDS.exponents[0] - int(math.log2(growth))


def test_the_first_attempt_of_all_only_measures():
    unmeasured = GridState((40, 40), calibrated=False, exact=True)
    verdict = verdict_of(certificates(), grids=unmeasured)
    assert verdict.outcome is VoteOutcome.RETRY
    assert verdict.grids == GRIDS.exponents
    assert "measured" in verdict.reason


def test_a_tensor_whose_largest_gradient_is_zero_keeps_its_grid():
    votes = [vote._replace(maxima={1: 3.0}) for vote in certificates()]
    assert verdict_of(votes, grids=GRIDS._replace(exponents=(17, 0))).grids == (17, GRIDS.exponents[1])


@pytest.mark.parametrize(("maximum", "exponent"), [(5e-324, MAX_EXPONENT), (1.7e308, MIN_EXPONENT)])
def test_grids_are_clamped(maximum, exponent):
    votes = [vote._replace(maxima={0: maximum}) for vote in certificates()]
    assert verdict_of(votes, grids=GRIDS._replace(calibrated=False)).grids[0] == exponent


def test_without_exact_sums_grids_are_neither_judged_nor_changed():
    grids = GridState((3, 4), calibrated=True, exact=False)
    verdict = verdict_of(changed(0, maxima={0: 1e30}), grids=grids)
    assert (verdict.outcome, verdict.grids) == (VoteOutcome.COMMIT, (3, 4))


@pytest.mark.parametrize("request_", list(Request))
def test_one_workers_request_is_everybodys(request_):
    assert verdict_of(changed(1, request=request_)).request is request_


def test_the_stronger_request_wins():
    votes = certificates()
    assert not verdict_of(votes).asks_checkpoint
    votes[0] = votes[0]._replace(request=Request.CHECKPOINT)
    assert (verdict_of(votes).request, verdict_of(votes).asks_checkpoint) == (Request.CHECKPOINT, True)
    votes[2] = votes[2]._replace(request=Request.STOP)
    assert (verdict_of(votes).request, verdict_of(votes).asks_checkpoint) == (Request.STOP, True)
    assert not verdict_of(votes)._replace(outcome=VoteOutcome.RETRY).asks_checkpoint


def test_keys_of_different_things_differ():
    pair = (0, 1)
    keys = {residency_key(*parts) % 2**64 for parts in itertools.product(pair, (1, 2), pair, (5, 6))}
    keys |= {agreement_key(*parts) for parts in itertools.product(("gradient", "master"), pair, (1, 2), (1, 2), pair)}
    keys |= {coverage_key(*parts) for parts in itertools.product(range(3), range(3))}
    keys |= {loss_key(microbatch) for microbatch in range(3)}
    assert len(keys) == 16 + 32 + 9 + 3


def test_the_vector_is_small_and_whole():
    vector = SHAPE.vector_of(certificates()[0])
    assert len(vector) == SHAPE.size == 7 + 21 + 2 + NUM_MICROBATCHES + 12 + 7 + NUM_TENSORS
    assert all(-(2**63) <= value < 2**63 for value in merged(certificates()))


def test_a_certificate_is_the_same_after_its_way_as_evidence():
    vector = merged(certificates())
    certificate = encode_certificate(vector)
    assert len(certificate) == 8 * SHAPE.size
    assert list(decode_certificate(certificate)) == vector


def test_sums_wrap_and_keep_the_bits_of_the_one_value_that_is_there():
    assert add_words([2**63 - 1, -(2**63), 5], [1, -1, -7]) == [-(2**63), 2**63 - 1, -2]
    for value in (0.0, -1.5, math.inf, 5e-324):
        assert bits_float(add_words([float_bits(0.0)], [float_bits(value)])[0]) == value


def test_what_the_residency_must_come_to():
    placement = Placement.of((0, 1), ((1,), (2, 0)))
    held = [
        (0, ReplicaRole.OWNER, 0),
        (0, ReplicaRole.FOLLOWER, 1),
        (1, ReplicaRole.OWNER, 1),
        (1, ReplicaRole.FOLLOWER, 2),
        (1, ReplicaRole.FOLLOWER, 0),
    ]
    assert expected_residency(placement, 7) == sum(residency_key(*copy, 6) for copy in held) % 2**64


def every_wrong_set(held):
    """All that differs from what is held in one thing, as (block, role, worker, version), and what differs in two."""
    for place, (block, role, worker, version) in enumerate(held):
        others = held[:place] + held[place + 1 :]
        yield others
        yield [*held, held[place]]
        yield [*others, (block, 3 - role, worker, version)]
        yield [*others, (block, role, worker + 1, version)]
        yield [*others, (block, role, worker, version - 1)]
        yield from ([*others, (other, role, worker, version)] for other in range(4) if other != block)
    for one, other in itertools.combinations(range(len(held)), 2):
        rest = [copy for place, copy in enumerate(held) if place not in (one, other)]
        yield rest
        for change in itertools.product((0, 1), repeat=4):
            # Parts of two copies are exchanged: each block, role, holder and version is there as often as it should be.
            pairs = [(b, a) if swap else (a, b) for a, b, swap in zip(held[one], held[other], change, strict=True)]
            yield [*rest, *zip(*pairs, strict=True)]


def test_every_other_set_of_holders_has_another_residency_sum():
    placement = Placement.of((0, 1, 0, 2), ((1,), (2, 0), (1, 2), ()))
    held = [(block, role, worker, 6) for block in range(4) for worker, role in zip(placement.holders(block), (1, 2, 2))]
    right, keys = expected_residency(placement, 7), block_keys(4).tolist()

    def sums(copies):
        return sum(keys[block] * holder_key(worker, role, version) for block, role, worker, version in copies) % 2**64

    assert sums(held) == right
    wrong = [copies for copies in every_wrong_set(held) if sorted(copies) != sorted(held)]
    assert len(wrong) > 200 and all(sums(copies) != right for copies in wrong)


def test_hashes_that_differ_alike_do_not_make_up_for_each_other():
    # As a run's hash does where the sign of a float changes, in whatever block it is.
    step, hashes = (7, 1), np.array([3, 8], np.uint64)
    changed = hashes ^ np.uint64(1 << 63)
    keys = agreement_keys("copy", block_keys(2), *step, hashes, hashes)
    found = [
        agreement_keys("copy", block_keys(2), *step, *each)
        for each in ((changed, hashes), (hashes, changed), (changed, changed))
    ]
    assert all(int((each - keys).sum()) for each in found)
    assert all((each != keys).all() for each in found)


CHANGE = key64("a planned change") >> 2


def with_changes(*changes):
    return [vote._replace(change=change) for vote, change in zip(certificates(), changes, strict=True)]


@pytest.mark.parametrize(
    ("changes", "in_force"),
    [
        ((0, 0, 0), 0),
        ((CHANGE, CHANGE, CHANGE), CHANGE),
        ((CHANGE, 0, CHANGE), 0),
        ((CHANGE, CHANGE, CHANGE - 1), 0),
        ((CHANGE, CHANGE - 1, 0), 0),
    ],
)
def test_a_planned_change_comes_into_force_if_everybody_holds_it(changes, in_force):
    verdict = read_verdict(merged(with_changes(*changes)), SHAPE, expected(), GRIDS, skip_nonfinite=False)
    assert (verdict.outcome, verdict.change) == (VoteOutcome.COMMIT, in_force)


def test_a_vote_that_does_not_commit_changes_no_layout():
    votes = with_changes(CHANGE, CHANGE, CHANGE)
    votes[0] = votes[0]._replace(maxima={0: 1e30})
    verdict = read_verdict(merged(votes), SHAPE, expected(), GRIDS, skip_nonfinite=False)
    assert (verdict.outcome, verdict.change) == (VoteOutcome.RETRY, 0)


def test_a_smaller_batch_has_the_mean_of_its_own_losses():
    wanted = expected()._replace(num_microbatches=2)
    verdict = read_verdict(merged(certificates()), SHAPE, wanted, GRIDS, skip_nonfinite=False)
    assert verdict.means.losses == (2.0, 3.0) and verdict.loss == 2.5


def counted(counts, **fields):
    """A vote in which the loss of micro-batch m has the given count, None for none."""
    votes = certificates()
    for worker, vote in enumerate(votes):
        mine = [counts[m] for m in vote.scores.losses if counts[m] is not None]
        votes[worker] = vote._replace(scores=vote.scores._replace(count=sum(mine), num_counted=len(mine), **fields))
    return votes


def test_losses_with_counts_scale_loss_and_norm():
    verdict = verdict_of(counted([3, 0, 4, 1]))
    assert verdict.outcome is VoteOutcome.COMMIT
    assert verdict.loss == 14.0 / 8
    assert (verdict.means.scale, verdict.norm) == (4 / 8, 5.0 * 4 / 8)


def test_a_loss_that_has_counts_only_sometimes_is_rejected():
    verdict = verdict_of(counted([3, None, 4, 1]))
    assert (verdict.outcome, verdict.failed) == (VoteOutcome.REJECT, ("loss counts",))


@pytest.mark.parametrize("skip", [False, True])
def test_where_nothing_is_counted_there_is_no_update(skip):
    verdict = verdict_of(counted([0, 0, 0, 0]), skip=skip)
    assert verdict.outcome is (VoteOutcome.SKIP if skip else VoteOutcome.NON_FINITE)
    assert verdict.nonfinite == NOTHING_COUNTED and math.isnan(verdict.loss) and math.isnan(verdict.norm)
    assert "counts nothing" in verdict.reason


def test_metrics_are_read_from_the_vote():
    shape, aux_loss = VoteShape(NUM_MICROBATCHES, NUM_TENSORS, 1), MetricSum().plus(0.5, 1)
    votes = [
        vote._replace(scores=vote.scores._replace(metrics=(MetricSum().plus(worker, 2),), aux_loss=aux_loss))
        for worker, vote in enumerate(certificates())
    ]
    vector = functools.reduce(shape.merge, map(shape.vector_of, votes))
    assert len(vector) == shape.size
    verdict = read_verdict(vector, shape, expected(), GRIDS, skip_nonfinite=False)
    assert verdict.outcome is VoteOutcome.COMMIT
    assert verdict.means.metrics == (3 / 6,) and verdict.means.aux_loss == 1.5 / NUM_MICROBATCHES


# ------------------------------------------------------------------------------------------ shared tensors and buffers

OWN = VoteShape(
    NUM_MICROBATCHES,
    NUM_TENSORS + 2,
    uses={1: 3},
    buffers=(BufferTensor(NUM_TENSORS, is_whole=False), BufferTensor(NUM_TENSORS + 1, is_whole=True)),
)
OWN_GRIDS = GridState(
    tuple(next_exponent(m, 0, n) for m, n in zip((*MAXIMA, 1.0, 255.0), OWN.num_terms, strict=True)),
    calibrated=True,
    exact=True,
)


def own_verdict(*writes, maxima=None, grids=OWN_GRIDS):
    votes = certificates()
    for worker, told in enumerate(writes):
        votes[worker] = votes[worker]._replace(writes=told)
    if maxima is not None:
        votes[0] = votes[0]._replace(maxima=maxima)
    vectors = [OWN.vector_of(vote) for vote in votes]
    return read_verdict(functools.reduce(OWN.merge, vectors), OWN, expected(), grids, skip_nonfinite=False)


def test_a_buffer_that_any_microbatch_has_written_is_written():
    whole = {3: (77, -77)}
    assert own_verdict(whole, whole).written == (3,)
    assert own_verdict({2: (0, 0)} | whole, {2: (1, 0)}, {}).written == (2, 3)
    assert own_verdict({2: (0, 0)} | whole, {2: (0, 0)} | whole).outcome is VoteOutcome.COMMIT


@pytest.mark.parametrize("other", [0, 76, 78, 2**62 - 1])
def test_whole_numbers_that_differ_are_seen(other):
    verdict = own_verdict({3: (77, -77)}, {}, {3: (other, -other)})
    assert (verdict.outcome, verdict.unequal) == (VoteOutcome.UNEQUAL, (3,))
    assert not verdict.commits


def test_a_certificate_that_fails_says_nothing_about_buffers():
    votes = changed(0, coverage=0)
    vectors = [OWN.vector_of(vote) for vote in votes]
    verdict = read_verdict(functools.reduce(OWN.merge, vectors), OWN, expected(), OWN_GRIDS, skip_nonfinite=False)
    assert verdict.outcome is VoteOutcome.REJECT


def test_sums_of_a_shared_tensor_have_headroom_for_every_use():
    assert OWN.num_terms == [4, 12, 4, 4]
    whole = {3: (77, -77)}
    once = VoteShape(NUM_MICROBATCHES, NUM_TENSORS + 2)
    assert own_verdict(whole).grids[1] == next_exponent(3.0, 0, 12) == next_exponent(3.0, 0, once.num_terms[1]) - 1
    # The largest gradient of 12 terms that still fits, and the next power of two.
    largest = 2.0 ** (62 - 4 - OWN_GRIDS.exponents[1])
    assert own_verdict(whole, maxima={1: largest * 0.999}).outcome is VoteOutcome.COMMIT
    assert own_verdict(whole, maxima={1: largest}).outcome is VoteOutcome.RETRY


def test_every_use_of_a_shared_unit_counts_in_the_coverage():
    shared = ((0, 2),)
    keys = [coverage_key(layer, m) for layer in range(3) for m in range(2)]
    keys += [coverage_key(3, m, use) for m in range(2) for use in range(2)] + [loss_key(m) for m in range(2)]
    assert len(set(keys)) == 12
    assert expected_coverage(3, 2, shared) == sum(keys) % 2**64
    assert expected_coverage(3, 2, ()) == expected_coverage(3, 2)
