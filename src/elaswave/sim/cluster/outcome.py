"""What a policy made of a scenario: goodput, where the time went, and the job over time. See docs/simulation.md."""

import msgspec

ROLLBACK_CAUSES = ("copies", "workers", "policy")
"""Of `PolicyOutcome.rollbacks`."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The job from some time on."""

    at_s: float
    num_workers: int
    """That are there."""
    throughput: float
    """Relative to the fault-free job's; 0 while training stands."""


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy made of a scenario. Seconds are of the scenario's clock; see docs/simulation.md."""

    policy: str
    source: str
    """Of the scenario."""
    duration_s: float
    """T."""
    goodput: float
    """Useful work over what the fault-free job does in T."""
    ettr: float
    """Effective training time ratio: the share of T in which the job trained and did not lose that work again, at
    whatever speed. Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv
    2410.21680), where ETTR is defined: productive runtime over the available wallclock time of a job run."""
    availability: float
    """Mean number of workers that are there, over the most there are at once."""
    useful_s: float
    """goodput x T."""
    lost_work_s: float
    """Work that was thrown away, as time of the fault-free job."""
    lost_training_s: float
    """Seconds for which the job trained on what was thrown away: longer than `lost_work_s` where it was slower."""
    pauses_s: dict[str, float]
    """Cause -> seconds of standing still. Causes: the kinds of events, rollback (all copies of some state were lost),
    restart (after a stop), checkpoint."""
    num_pauses: dict[str, int]
    """Cause -> how often."""
    num_rollbacks: int
    """How often the job went back to a checkpoint, or to its beginning."""
    rollbacks: dict[str, int]
    """Cause -> how often. Causes: copies (some state had no
    holder left, and those that were left could run the job), workers (they could not: too few, or with too little
    memory), policy (that is how it goes on)."""
    waiting_s: float
    """With too few workers to train at all."""
    slower_s: float
    """What is missing to T: training, but slower than undisturbed. Below 0 where a policy found a faster schedule."""
    migrated_bytes: float
    energy_j: float
    """0 where devices state no power."""
    num_events: dict[str, int]
    """Kind -> how many of the scenario's changes."""
    undisturbed_step_s: float
    timeline: tuple[Sample, ...]

    @property
    def of_capacity(self) -> float:
        """Goodput over availability: what was made of the workers that were there."""
        return self.goodput / self.availability if self.availability else 0.0
