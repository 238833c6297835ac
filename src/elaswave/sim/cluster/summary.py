"""A policy over several scenarios: means and their confidence intervals. Pure."""

from collections.abc import Callable, Sequence
from math import sqrt

import msgspec

from elaswave.sim.cluster.outcome import ROLLBACK_CAUSES, PolicyOutcome


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over seeds and its 95 % confidence interval."""

    mean: float
    half_width: float
    """0 for a single seed, which tells nothing about others."""


_STUDENT_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045),
)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, the normal distribution's 1.96 is used."""


def interval_of(values: Sequence[float]) -> Interval:
    """Computes the mean and 95 % confidence interval of independent values, by Student's t.

    Raises:
        ValueError: no value.
    """
    if not values:
        raise ValueError("a mean of no values was asked for: give at least one")
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return Interval(mean=mean, half_width=0.0)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = _STUDENT_T[count - 2] if count - 2 < len(_STUDENT_T) else 1.96
    return Interval(mean=mean, half_width=quantile * deviation / sqrt(count))


class OutcomeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A policy over several scenarios."""

    policy: str
    num_seeds: int
    goodput: Interval
    ettr: Interval
    of_capacity: Interval
    availability: Interval
    lost_work_s: Interval
    waiting_s: Interval
    slower_s: Interval
    migrated_bytes: Interval
    energy_j: Interval
    pauses_s: dict[str, Interval]
    """By cause."""
    num_rollbacks: Interval
    rollbacks: dict[str, Interval]
    """By cause: copies, workers, policy."""


def summarize_outcomes(outcomes: Sequence[PolicyOutcome]) -> OutcomeSummary:
    """Means and confidence intervals of one policy's outcomes.

    Raises:
        ValueError: no outcome, or those of several policies.
    """
    policies = sorted({outcome.policy for outcome in outcomes})
    if len(policies) != 1:
        raise ValueError(f"outcomes of policies {policies} were given: a summary is of exactly one")

    def over(value: Callable[[PolicyOutcome], float]) -> Interval:
        return interval_of([value(outcome) for outcome in outcomes])

    causes = sorted({cause for outcome in outcomes for cause in outcome.pauses_s})
    return OutcomeSummary(
        policy=policies[0],
        num_seeds=len(outcomes),
        goodput=over(lambda each: each.goodput),
        ettr=over(lambda each: each.ettr),
        of_capacity=over(lambda each: each.of_capacity),
        availability=over(lambda each: each.availability),
        lost_work_s=over(lambda each: each.lost_work_s),
        waiting_s=over(lambda each: each.waiting_s),
        slower_s=over(lambda each: each.slower_s),
        migrated_bytes=over(lambda each: each.migrated_bytes),
        energy_j=over(lambda each: each.energy_j),
        pauses_s={cause: interval_of([each.pauses_s.get(cause, 0.0) for each in outcomes]) for cause in causes},
        num_rollbacks=over(lambda each: each.num_rollbacks),
        rollbacks={
            cause: interval_of([each.rollbacks.get(cause, 0) for each in outcomes]) for cause in ROLLBACK_CAUSES
        },
    )
